"""What `MultiTaskAgent` does otherwise than `Agent`; distributions and critics that fit only one of them; values; discounts."""

import math

import gymnasium as gym
import pytest
import torch
from one_step import agent_for, rollouts, train
from test_agent import AGENTS, SPACES, build, make_batch

from amago import config
from amago.agent import MultiTaskAgent, exp_filter, leaky_relu_filter

both_agents = pytest.mark.parametrize("agent_type", AGENTS.values(), ids=AGENTS)


def test_filters():
    adv = torch.tensor([-2.0, 0.0, 3.0])
    line = {"tau": 0.0, "target_f0": 0.0, "clip_weights_low": None, "clip_weights_high": None, "add_binary": False}
    torch.testing.assert_close(leaky_relu_filter(adv, **line), torch.tensor([-0.05, 0.0, 1.5]))
    torch.testing.assert_close(leaky_relu_filter(adv, **line | {"beta": 0.5, "neg_slope": 0.5}), torch.tensor([-2.0, 0.0, 6.0]))
    torch.testing.assert_close(
        leaky_relu_filter(adv, **line | {"clip_weights_low": 0.0, "clip_weights_high": 1.0}), torch.tensor([0.0, 0.0, 1.0])
    )
    config.bind({"leaky_relu_filter.add_binary": False, "MultiTaskAgent.fbc_filter_func": leaky_relu_filter})
    assert build("discrete", agent_type=MultiTaskAgent).fbc_filter_func(adv).tolist() == pytest.approx(
        [1e-7, 0.01, 0.01 + 0.05 * 0.01 / 2 + 2.99 / 2]
    )


def test_exponential_weights_have_a_ceiling():
    adv = torch.tensor([-1.0, 0.0, 4.0, 90.0, torch.inf])
    assert exp_filter(adv).tolist() == pytest.approx([math.exp(-1), 1.0, math.exp(4), 100.0, 100.0])
    assert exp_filter(adv, clip_weights_high=None)[3].isinf()
    config.bind({"exp_filter.clip_weights_high": None, "exp_filter.beta": 2.0})
    assert exp_filter(adv)[2].item() == pytest.approx(math.exp(8))


@both_agents
@pytest.mark.parametrize("kind", SPACES)
@pytest.mark.parametrize("online", [0.0, 0.5])
def test_values_are_those_that_the_loss_sees(kind, agent_type, online):
    seen = []

    def spy(adv):
        seen.append(adv)
        return exp_filter(adv, beta=0.3)

    torch.manual_seed(6)
    agent = build(kind, agent_type=agent_type, fbc_filter_func=spy, online_coeff=online, offline_coeff=1.0).eval()
    batch = make_batch(kind)
    torch.manual_seed(7)
    agent.losses(batch)
    torch.manual_seed(7)
    values = agent.get_values(batch)
    torch.testing.assert_close(values["advantage"], seen[0][:, :6])
    if agent_type is MultiTaskAgent:  # the last row, of an observation without an action, repeats the one before it
        assert seen[0].shape == (3, 7, 7, 1)
        assert seen[0][:, 6].equal(seen[0][:, 5])
    torch.testing.assert_close(values["filter_weights"], exp_filter(seen[0][:, :6], beta=0.3))
    assert values.pop("state_mask").equal(batch.transition_mask)
    for x in values.values():
        assert x.shape == (3, 6, 7, 1)
        assert torch.isfinite(x).all()
        assert not x.requires_grad
    assert ((values["q_sa"] > values["v_s"]) == (values["advantage"] > 0))[values["advantage"].abs() > 1e-3].all()
    assert (values["q_sa_std"] > 0).all()


@both_agents
def test_asking_for_values_changes_nothing(agent_type):
    agent, batch = build("continuous", agent_type=agent_type).train(), make_batch("continuous")
    before = {k: v.clone() for k, v in agent.state_dict().items()}
    agent.get_values(batch)
    assert all(m.training for m in agent.modules())
    for k, v in agent.state_dict().items():
        assert v.equal(before[k]), k
    broken = make_batch("continuous")
    del broken.obs["observation"]
    with pytest.raises(KeyError):
        agent.get_values(broken)
    assert agent.training


def test_values_are_in_units_of_the_environments_return():
    agent, batch = build("discrete", num_critics=3).eval(), make_batch("discrete")
    agent.popart.mu.copy_(torch.arange(7.0)[:, None])
    agent.popart.nu.copy_(agent.popart.mu**2 + 25.0)
    state = agent.encode(batch)[:, :-1]
    mu = agent.popart.mu.float()
    returns = (5.0 * agent.critics.all_values(state) + mu) / agent.reward_multiplier
    index = batch.actions.argmax(-1)[:, :, None, None, None].expand(3, 6, 3, 7, 1)
    stored = agent.actor.policy_dist.action_from_buffer(batch.actions)[:, :, None, None]
    probs = agent.actor(state).probs[:, :, None]
    values = agent.get_values(batch)
    q = returns.gather(-1, index)
    torch.testing.assert_close(values["q_sa"], ((5.0 * agent.critics.all_values(state) * stored).sum(-1, keepdim=True)
                                          + mu).mean(2) / 10.0, rtol=1e-4, atol=1e-4)  # fmt: skip
    torch.testing.assert_close(values["q_sa"], q.mean(2), rtol=0.02, atol=0.02)  # but for the clip of the one-hot
    torch.testing.assert_close(values["v_s"], (returns * probs).sum(-1, keepdim=True).mean(2), rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(values["q_sa_std"], q.std(2, correction=0), rtol=0.02, atol=0.02)
    assert not build("discrete", num_critics=1).get_values(batch)["q_sa_std"].any()


@both_agents
def test_any_discount_may_act(agent_type):
    batch = make_batch("discrete")
    for options, usual in (({}, 6), ({"rollout_gamma_idx": 1}, 1)):
        agent = build("discrete", agent_type=agent_type, **options).eval()
        with torch.no_grad():  # each discount prefers an action of its own
            agent.actor.base.out_layer.weight.zero_()
            agent.actor.base.out_layer.bias.view(7, 4).copy_(50.0 * torch.eye(4)[torch.arange(7) % 4])
        step = (
            {k: v[:, 0] for k, v in batch.obs.items()},
            batch.rl2s[:, 0],
            batch.time_idxs[:, 0],
            agent.init_hidden_state(3, "cpu"),
        )
        for given, acts in [(None, usual), *((g, g % 7) for g in range(-7, 7))]:
            actions, _ = agent.get_actions(*step, sample=False, gamma_idx=given)
            assert actions.tolist() == [[acts % 4]] * 3


PAY = torch.tensor([1.0, 1000.0])


def right(stored, arm):
    """Whether stored actions (B, 1) lie in the first, second or last third of the interval."""
    return ((stored[:, 0] + 1) * 1.5).long().clamp(max=2) == arm


def successes(updates, seed):
    """Share of right choices in the task that pays 1 and in the one that pays 1,000, after training on random data.

    The observation shows which of three arms pays, and the task. Actions of the data are uniform, so that cloning them is right a
    third of the time; nothing is better without looking.
    """
    config.bind(
        {"NCriticsTwoHot.output_bins": 48, "NCriticsTwoHot.min_return": -20_000.0, "NCriticsTwoHot.max_return": 20_000.0}
    )
    space, g = gym.spaces.Box(-1, 1, (1,)), torch.Generator().manual_seed(seed)

    def draw(b=128):
        arm, task = (torch.randint(n, (b,), generator=g) for n in (3, 2))
        stored, obs = 2 * torch.rand(b, 1, generator=g) - 1, torch.cat((torch.eye(3)[arm], torch.eye(2)[task]), dim=-1)
        return rollouts(space, obs, stored, right(stored, arm) * PAY[task]), arm, task

    agent = agent_for(space, inputs=5, size=64, agent_type=MultiTaskAgent, use_multigamma=False)
    train(agent, lambda: draw()[0], updates)
    batch, arm, task = draw(600)
    with torch.no_grad():
        found = right(agent.act(agent.encode(batch)[:, 0], {}, sample=False), arm).float()
    return [found[task == i].mean().item() for i in (0, 1)]


@pytest.mark.learning
def test_it_learns_what_pays_in_tasks_a_thousand_times_apart():
    """On one of three seeds: about one in three does not take off within 600 updates, and which one depends on the processor."""
    worse = []
    for seed in range(3):
        worse.append(min(successes(600, seed)))  # of the two tasks
        if worse[-1] >= 0.95:
            return
    pytest.fail(f"the worse of both tasks reaches {worse} on three seeds")
