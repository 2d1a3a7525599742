"""What `MultiTaskAgent` does otherwise than `Agent`; distributions and critics that fit only one of them; values; discounts."""

import math

import gymnasium as gym
import numpy as np
import pytest
import tiny
import torch
from test_agent import AGENTS, OBS, SPACES, build, make_batch

import amago
from amago import config
from amago.agent import Agent, MultiTaskAgent, exp_filter, leaky_relu_filter
from amago.loading import Batch
from amago.nets.actor_critic import NCritics, NCriticsTwoHot, ResidualActor
from amago.nets.policy_dists import GMM, Beta, TanhGaussian
from amago.nets.traj_encoders import FFTrajEncoder, GRUTrajEncoder
from amago.nets.tstep_encoders import FFTstepEncoder
from amago.ops import symexp
from amago.spaces import action_spec, rl2_space

both_agents = pytest.mark.parametrize("agent_type", AGENTS.values(), ids=AGENTS)


def multitask(kind, **options):
    return build(kind, agent_type=MultiTaskAgent, **options)


# what it is


def test_defaults():
    agent = multitask("discrete")
    assert (agent.online_coeff, agent.offline_coeff) == (0.0, 1.0)
    assert (agent.num_actions_for_value_in_actor_loss, agent.num_actions_for_value_in_critic_loss) == (3, 1)
    assert (agent.reward_multiplier, agent.tau, agent.num_critics_td, len(agent.gammas)) == (10.0, 0.003, 2, 7)
    assert isinstance(agent.critics, NCriticsTwoHot)
    config.bind({"MultiTaskAgent.tau": 0.5, "Agent.n_step": 9})
    agent = multitask("discrete")
    assert (agent.tau, agent.n_step) == (0.5, 1), "settings of Agent are not those of MultiTaskAgent"


@pytest.mark.parametrize("kind", SPACES)
def test_targets_are_means_of_returns_over_samples_and_chosen_critics(kind):
    torch.manual_seed(1)
    agent = multitask(kind, num_critics=3, num_critics_td=2, num_actions_for_value_in_critic_loss=5, n_step=1)
    for p in agent.target_critics.net.output_layer.parameters():
        p.data.mul_(30.0)  # critics with an opinion
    state, rews = torch.randn(2, 4, 16), torch.randn(2, 4, 1)
    dones, real = torch.rand(2, 4, 1) < 0.3, torch.ones(2, 4, 1, dtype=torch.bool)
    torch.manual_seed(2)
    got = agent._td_target(state, rews, dones, real, {})
    torch.manual_seed(2)
    pi = agent.target_actor(state)
    logits = agent.target_critics(state, torch.stack([pi.sample_vector() for _ in range(5)])).logits
    chosen = torch.randint(3, (2,))
    bins = agent.critics.bins.centers
    q = torch.stack([symexp((lo.softmax(-1) * bins).sum(-1)) for lo in logits]).mean(0)
    bootstrap = q[:, :, chosen].mean(2)  # (B, L, G)
    want = rews + agent.gammas * (1 - dones.float()) * bootstrap
    assert want.std() > 1.0
    torch.testing.assert_close(got[:, :, 0, :, 0], want, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("kind", SPACES)
def test_losses_by_hand(kind):
    """Cross-entropy of every critic; minus the log-probability of the actions whose return beats the mean of three samples."""
    torch.manual_seed(3)
    agent, batch = multitask(kind).eval(), make_batch(kind)
    for p in agent.critics.net.output_layer.parameters():
        p.data.mul_(30.0)
    torch.manual_seed(4)
    loss = agent.losses(batch)
    torch.manual_seed(4)
    states = agent.encode(batch).detach()
    state, action = states[:, :-1], batch.actions
    pi = agent.actor(state)
    vector = agent.actor.policy_dist.action_from_buffer(action)[None, :, :, None].expand(1, -1, -1, 7, -1)
    logits = agent.critics(state, vector).logits[0]
    sampled = torch.stack(
        [agent.critics.bin_dist_to_raw_vals(agent.critics(state, pi.sample_vector()[None]))[0] for _ in range(3)]
    )
    advantage = agent.critics.bins.value(logits).mean(2) - sampled.mean(0).mean(2)
    clear = advantage.abs() > 1e-3  # it is 0 where all samples are the stored action
    assert clear.float().mean() > 0.8
    rews = batch.rews * 10.0
    target = agent._td_target(states[:, 1:], rews, batch.dones, batch.transition_mask, {})
    label = agent.critics.bins.labels(target).expand_as(logits)
    torch.testing.assert_close(loss.critic_loss[..., 0], -(label * logits.log_softmax(-1)).sum(-1), rtol=1e-4, atol=1e-4)
    if kind == "discrete":
        log_prob = pi.probs.gather(-1, action.argmax(-1)[:, :, None, None].expand(-1, -1, 7, 1)).log()
    else:
        per_dim = pi.log_prob(action[:, :, None].expand(-1, -1, 7, -1))
        log_prob = (per_dim.mean if kind == "multibinary" else per_dim.sum)(-1, keepdim=True)
    want = -(advantage > 0).float() * log_prob
    torch.testing.assert_close(loss.actor_loss[clear], want[clear], rtol=1e-4, atol=1e-4)


def test_a_stored_action_looks_to_a_critic_like_the_same_action_sampled():
    agent, batch = multitask("discrete").eval(), make_batch("discrete")
    with torch.no_grad():
        agent.actor.base.out_layer.weight.zero_()
        agent.actor.base.out_layer.bias.view(7, 4)[:, 2] = 50.0
        agent.critics.net.inp_layer.weight.mul_(5.0)
    config.bind({})
    agent.actor.policy_dist.clip_prob_low = agent.target_actor.policy_dist.clip_prob_low = 0.0
    batch.actions = torch.nn.functional.one_hot(torch.full((3, 6), 2), 4).float()
    assert agent.get_values(batch).advantage.abs().max() < 1e-4
    batch.actions = torch.nn.functional.one_hot(torch.full((3, 6), 1), 4).float()
    assert agent.get_values(batch).advantage.abs().max() > 1e-3


@pytest.mark.parametrize("scale", [1.0, 1000.0])
def test_the_size_of_the_losses_does_not_grow_with_the_rewards(scale):
    torch.manual_seed(5)
    agent, batch = multitask("discrete").eval(), make_batch("discrete")
    batch.rews = batch.rews * scale
    assert 0.5 < agent.losses(batch).critic_loss.mean() / np.log(16) < 2.0


def test_targets_beyond_the_bins_are_counted():
    agent, batch = multitask("continuous").eval(), make_batch("continuous")
    name = "Pct. of TD Targets beyond the Bins (main gamma)"
    assert agent.losses(batch, log_step=True).metrics[name] == 0.0
    batch.rews = torch.full_like(batch.rews, 1e6)
    assert agent.losses(batch, log_step=True).metrics[name] == 100.0
    assert name not in build("continuous").losses(batch, log_step=True).metrics


def test_hl_gauss_labels_train_too():
    config.bind({"NCriticsTwoHot.label_type": "hlgauss"})
    agent, batch = multitask("continuous"), make_batch("continuous")
    optimizer = torch.optim.Adam(agent.trainable_params, lr=1e-2)
    losses = []
    for _ in range(30):
        optimizer.zero_grad()
        loss = agent.losses(batch)
        (loss.critic_loss.mean() + 0.1 * loss.actor_loss.mean()).backward()
        optimizer.step()
        losses.append(loss.critic_loss.mean().item())
    assert losses[-1] < 0.7 * losses[0]


@pytest.mark.parametrize(("agent_type", "critic_type", "message"), [
    (Agent, NCriticsTwoHot, "critic_type=NCriticsTwoHot gives distributions over bins: use it with MultiTaskAgent"),
    (MultiTaskAgent, NCritics, "critic_type=NCritics has no bins to classify returns into: use NCriticsTwoHot"),
])  # fmt: skip
def test_critics_of_the_other_kind_are_refused(agent_type, critic_type, message):
    with pytest.raises(ValueError, match=message):
        build("continuous", agent_type=agent_type, critic_type=critic_type)


def test_filters():
    adv = torch.tensor([-2.0, 0.0, 3.0])
    line = {"tau": 0.0, "target_f0": 0.0, "clip_weights_low": None, "clip_weights_high": None, "add_binary": False}
    torch.testing.assert_close(leaky_relu_filter(adv, **line), torch.tensor([-0.05, 0.0, 1.5]))
    torch.testing.assert_close(leaky_relu_filter(adv, **line | {"beta": 0.5, "neg_slope": 0.5}), torch.tensor([-2.0, 0.0, 6.0]))
    torch.testing.assert_close(
        leaky_relu_filter(adv, **line | {"clip_weights_low": 0.0, "clip_weights_high": 1.0}), torch.tensor([0.0, 0.0, 1.0])
    )
    config.bind({"leaky_relu_filter.add_binary": False, "MultiTaskAgent.fbc_filter_func": leaky_relu_filter})
    assert multitask("discrete").fbc_filter_func(adv).tolist() == pytest.approx([1e-7, 0.01, 0.01 + 0.05 * 0.01 / 2 + 2.99 / 2])


def test_exponential_weights_have_a_ceiling():
    adv = torch.tensor([-1.0, 0.0, 4.0, 90.0, torch.inf])
    assert exp_filter(adv).tolist() == pytest.approx([math.exp(-1), 1.0, math.exp(4), 100.0, 100.0])
    assert exp_filter(adv, clip_weights_high=None)[3].isinf()
    config.bind({"exp_filter.clip_weights_high": None, "exp_filter.beta": 2.0})
    assert exp_filter(adv)[2].item() == pytest.approx(math.exp(8))


# distributions


@both_agents
@pytest.mark.parametrize("dist", [TanhGaussian, Beta, GMM])
def test_continuous_distributions_train(agent_type, dist):
    config.bind({"Actor.continuous_dist_type": dist, "ResidualActor.continuous_dist_type": dist})
    options = {"online_coeff": 0.0 if dist is GMM else 1.0, "offline_coeff": 1.0, "actor_type": ResidualActor}
    agent, batch = build("continuous", agent_type=agent_type, **options), make_batch("continuous")
    loss = agent.losses(batch, log_step=True)
    (loss.actor_loss.mean() + loss.critic_loss.mean()).backward()
    for part in (agent.actor, agent.critics):
        assert all(torch.isfinite(p.grad).all() for p in part.parameters())
    assert torch.isfinite(loss.actor_loss).all()
    action = agent.act(torch.randn(5, 16), {}, sample=True)
    assert action.shape == (5, 3)
    assert action.abs().max() <= 1.0


@both_agents
def test_a_policy_gradient_without_reparametrised_samples_is_refused_at_the_start(agent_type):
    config.bind({"Actor.continuous_dist_type": GMM})
    message = rf"online_coeff=0.5 .* samples of GMM carry none .* set {agent_type.__name__}.online_coeff = 0"
    with pytest.raises(ValueError, match=message):
        build("continuous", agent_type=agent_type, online_coeff=0.5)
    build("discrete", agent_type=agent_type, online_coeff=0.5)  # has no continuous distribution


def test_an_experiment_refuses_it_before_any_environment_starts(tmp_path):
    e = tiny.experiment(tmp_path, tiny.pendulum)
    config.bind({"Actor.continuous_dist_type": GMM})
    with pytest.raises(ValueError, match="samples of GMM carry none"):
        e.start()


# what an agent thinks of a batch


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
    torch.testing.assert_close(values.advantage, seen[0][:, :6])
    if agent_type is MultiTaskAgent:  # the last row, of an observation without an action, repeats the one before it
        assert seen[0].shape == (3, 7, 7, 1)
        assert seen[0][:, 6].equal(seen[0][:, 5])
    torch.testing.assert_close(values.filter_weight, exp_filter(seen[0][:, :6], beta=0.3))
    assert values.pop("state_mask").equal(batch.transition_mask)
    for x in values.values():
        assert x.shape == (3, 6, 7, 1)
        assert torch.isfinite(x).all()
        assert not x.requires_grad
    assert ((values.q > values.v) == (values.advantage > 0))[values.advantage.abs() > 1e-3].all()
    assert (values.ensemble_spread > 0).all()


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
    torch.testing.assert_close(values.q, ((5.0 * agent.critics.all_values(state) * stored).sum(-1, keepdim=True)
                                          + mu).mean(2) / 10.0, rtol=1e-4, atol=1e-4)  # fmt: skip
    torch.testing.assert_close(values.q, q.mean(2), rtol=0.02, atol=0.02)  # but for the clip of the one-hot
    torch.testing.assert_close(values.v, (returns * probs).sum(-1, keepdim=True).mean(2), rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(values.ensemble_spread, q.std(2, correction=0), rtol=0.02, atol=0.02)
    assert not build("discrete", num_critics=1).get_values(batch).ensemble_spread.any()


def test_without_a_filter_every_weight_is_one():
    assert (multitask("discrete", fake_filter=True).get_values(make_batch("discrete")).filter_weight == 1).all()


# several discounts


@both_agents
def test_any_discount_may_act(agent_type):
    def prefers_its_own_action(agent):
        with torch.no_grad():
            agent.actor.base.out_layer.weight.zero_()
            agent.actor.base.out_layer.bias.view(7, 4).copy_(50.0 * torch.eye(4)[torch.arange(7) % 4])
        return agent.eval()

    agent, batch = prefers_its_own_action(build("discrete", agent_type=agent_type)), make_batch("discrete")
    step = {k: v[:, 0] for k, v in batch.obs.items()}, batch.rl2s[:, 0], batch.time_idxs[:, 0]

    def taken(agent, **options):
        actions, _ = agent.get_actions(*step, agent.init_hidden_state(3, "cpu"), sample=False, **options)
        assert actions.shape == (3, 1)
        return set(actions.flatten().tolist())

    for g in range(7):
        assert taken(agent, gamma_idx=g) == {g % 4}
        assert taken(agent, gamma_idx=g - 7) == {g % 4}
    assert taken(agent) == taken(agent, gamma_idx=None) == {6 % 4}
    other = prefers_its_own_action(build("discrete", agent_type=agent_type, rollout_gamma_idx=1))
    assert taken(other) == {1}
    assert taken(other, gamma_idx=-1) == {6 % 4}
    with pytest.raises(ValueError, match=r"gamma_idx=7 is the index of none of the discounts \[0.1, 0.9"):
        taken(agent, gamma_idx=7)


# learning


class Arms:
    """One step. The observation shows which of three arms pays, and in which of two tasks: 1 in the one, 1,000 in the other.
    Actions of the data are uniform, so that cloning them is right a third of the time; nothing is better without looking."""

    pay = torch.tensor([1.0, 1000.0])
    obs = gym.spaces.Dict({"observation": gym.spaces.Box(0, 1, (5,))})

    def __init__(self, kind):
        self.kind = kind
        self.space = gym.spaces.Discrete(3) if kind == "discrete" else gym.spaces.Box(-1, 1, (1,))
        self.dim = action_spec(self.space).dim

    def right(self, stored, arm):
        """Whether stored actions (B, 1) choose the arm; of an interval, its first, second or last third."""
        return (((stored[:, 0] + 1) * 1.5).long().clamp(max=2) if self.kind == "continuous" else stored[:, 0]) == arm

    def batch(self, b, generator):
        arm, task = (torch.randint(n, (b,), generator=generator) for n in (3, 2))
        obs = torch.cat((torch.eye(3)[arm], torch.eye(2)[task]), dim=-1)[:, None].repeat(1, 2, 1)
        if self.kind == "discrete":
            stored = torch.randint(3, (b, 1), generator=generator)
        else:
            stored = 2 * torch.rand(b, 1, generator=generator) - 1
        rews = self.right(stored, arm) * self.pay[task]
        batch = Batch(
            {"observation": obs}, torch.zeros(b, 2, 1 + self.dim), rews[:, None, None], torch.ones(b, 1, 1, dtype=torch.bool),
            stored[:, None], torch.arange(2)[None, :, None].expand(b, -1, -1), torch.ones(b, 2, 1, dtype=torch.bool),
        )  # fmt: skip
        return batch, arm, task


def successes(kind, options, updates, seed):
    """Share of right choices in the task that pays 1 and in the one that pays 1,000, after training on random data."""
    config.bind({
        "FFTstepEncoder.n_layers": 1, "FFTstepEncoder.d_hidden": 64, "FFTstepEncoder.d_output": 64, "FFTrajEncoder.d_model": 64,
        "FFTstepEncoder.normalize_inputs": False, "FFTrajEncoder.d_ff": 128, "FFTrajEncoder.n_layers": 1, "Actor.d_hidden": 64,
        "NCriticsTwoHot.d_hidden": 128, "NCriticsTwoHot.output_bins": 48, "NCriticsTwoHot.min_return": -20_000.0,
        "NCriticsTwoHot.max_return": 20_000.0,
    })  # fmt: skip
    torch.manual_seed(seed)
    world, g = Arms(kind), torch.Generator().manual_seed(0)
    agent = MultiTaskAgent(
        Arms.obs, rl2_space(action_spec(world.space)), world.space, 1, FFTstepEncoder, FFTrajEncoder, num_critics=2,
        use_multigamma=False, tau=0.05, **options,
    )  # fmt: skip
    optimizer = torch.optim.Adam(agent.trainable_params, lr=1e-3)
    for _ in range(updates):
        optimizer.zero_grad()
        loss = agent.losses(world.batch(128, g)[0])
        (loss.actor_loss.mean() + loss.critic_loss.mean()).backward()
        optimizer.step()
        agent.soft_sync_targets()
    agent.eval()
    batch, arm, task = world.batch(600, g)
    with torch.no_grad():
        action = agent.act(agent.encode(batch)[:, 0], {}, sample=False)
    right = world.right(action, arm).float()
    return [right[task == i].mean().item() for i in (0, 1)]


@pytest.mark.learning
@pytest.mark.parametrize(("kind", "options"), [
    ("discrete", {}),
    ("discrete", {"online_coeff": 1.0}),
    ("continuous", {}),
], ids=["discrete", "discrete-both-losses", "continuous"])  # fmt: skip
def test_it_learns_what_pays_in_tasks_a_thousand_times_apart(kind, options):
    """On one of three seeds: about one in three does not take off within 600 updates, and which one depends on the processor."""
    worse = []
    for seed in range(3):
        worse.append(min(successes(kind, options, 600, seed)))  # of the two tasks
        if worse[-1] >= 0.95:
            return
    pytest.fail(f"the worse of both tasks reaches {worse} on three seeds")


# end to end


@pytest.mark.parametrize("make_env", [tiny.cartpole, tiny.pendulum, tiny.bits], ids=["discrete", "continuous", "multibinary"])
def test_an_experiment_from_collection_to_a_loaded_policy(tmp_path, make_env):
    config.bind({"NCriticsTwoHot.d_hidden": 16})
    e = tiny.learned(
        tmp_path,
        make_env,
        "transformer",
        agent_type=amago.agent.MultiTaskAgent,
        always_save_latest=True,
        val_interval=1,
        val_timesteps_per_epoch=40,
        train_timesteps_per_epoch=60,
        log_interval=1,
    )
    logged = [name for row in tiny.rows(e.run_dir) for name in row["values"]]
    assert any("TD Targets beyond the Bins" in name for name in logged)
    assert any("Filter Weight" in name for name in logged)
    policy = amago.load_policy(e.run_dir, sample=False)
    assert isinstance(policy.agent, MultiTaskAgent)
    first, _ = make_env().reset(seed=0)
    assert policy.action_space.contains(policy.act({k: v[0] for k, v in first.obs.items()}))


def test_the_command_line_knows_it():
    from amago.cli_utils import switch_agent

    settings = {}
    assert switch_agent(settings, "multitask", num_critics=6, gamma=0.998) is MultiTaskAgent
    assert settings == {"amago.agent.MultiTaskAgent.num_critics": 6, "amago.agent.MultiTaskAgent.gamma": 0.998}
    amago.cli_utils.use_config(settings)
    config.bind({"NCriticsTwoHot.d_hidden": 16})
    agent = MultiTaskAgent(
        OBS, rl2_space(action_spec(SPACES["discrete"])), SPACES["discrete"], 8, FFTstepEncoder, GRUTrajEncoder
    )
    assert agent.critics.num_critics == 6
    assert agent.gammas[-1].item() == pytest.approx(0.998)
