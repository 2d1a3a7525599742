"""Entropy with a temperature, as a user of the agents meets it; `test_oracles` has the numbers of the losses."""

import math

import gymnasium as gym
import pytest
import torch
from one_step import agent_for, rollouts, train
from test_agent import SEVERAL, SPACES, build, make_batch

from amago import config
from amago.agent.methods import entropy_scale, exact_entropy, sample_with_entropy
from amago.nets.policy_dists import Beta, TanhGaussian, distribution_of
from amago.spaces import action_spec

TARGET = {"continuous": -0.5, "choices": 0.6}


def test_a_policy_of_several_parts_has_the_sum_of_their_entropies():
    torch.manual_seed(0)
    spec = action_spec(SEVERAL)
    head = distribution_of(spec.kind, spec.dim, Beta)
    policy = head(torch.randn(2, 3, 4, head.input_dimension).requires_grad_())
    vector, entropy = sample_with_entropy(policy, grad=True)
    choice, bits, numbers = policy.factors
    want = -(choice.probs * choice.probs.log()).sum(-1) + bits.entropy().sum(-1) + numbers.entropy().sum(-1)
    torch.testing.assert_close(entropy[..., 0], want)
    torch.testing.assert_close(exact_entropy(policy), entropy)
    assert vector.shape == (2, 3, 4, 7)
    torch.autograd.grad(entropy.sum(), policy.factors[2].alpha)


def test_what_is_illegal_cannot_add_to_the_entropy():
    spec = action_spec(gym.spaces.Tuple((gym.spaces.Discrete(4), gym.spaces.MultiBinary(2))))
    head = distribution_of(spec.kind, spec.dim, TanhGaussian)
    legal = torch.tensor([[1, 1, 1, 1, 1, 1], [1, 1, 0, 0, 0, 1], [1, 0, 0, 0, 0, 0]]) > 0
    policy = head(head.masked(torch.zeros(3, 6), legal))
    want = torch.tensor([math.log(4) + 2 * math.log(2), 2 * math.log(2), 0.0])[:, None]
    torch.testing.assert_close(entropy_scale(policy), want)
    torch.testing.assert_close(exact_entropy(policy), want)


def one_step(space, draw, b=64):
    """A batch of rollouts of one step; ``draw(vectors)`` gives the rewards (B,) of random actions."""
    vectors = torch.cat([
        torch.nn.functional.one_hot(torch.randint(p.dim, (b,)), p.dim).float() if p.kind == "discrete"
        else torch.randint(2, (b, p.dim)).float() if p.kind == "multibinary" else torch.rand(b, p.dim) * 2 - 1
        for p in action_spec(space).parts
    ], dim=-1)  # fmt: skip
    return rollouts(space, torch.ones(b, 1), vectors, draw(vectors))


def learned(space, draw, updates, **options):
    """The agent after so many updates, and its policy (G,) at the only observation."""
    config.bind({"Multigammas.discrete": [0.5], "Multigammas.continuous": [0.5]})
    agent = agent_for(space, size=16, offline_coeff=0.0, **options)
    train(agent, lambda: one_step(space, draw), updates, lr=3e-3)
    with torch.no_grad():
        return agent, agent.actor(agent.encode(one_step(space, draw))[:1, :1])


def test_a_fixed_temperature_gives_boltzmanns_policy():
    """exp(m r / alpha), normalised, for rewards r and multiplier m: alpha is in units of reward x multiplier."""
    multiplier = 10.0
    rewards = torch.tensor([0.0, 0.3, 0.6, 1.0])
    options = {"entropy_coeff": 0.5 * multiplier, "reward_multiplier": multiplier}
    _, pi = learned(SPACES["discrete"], lambda a: a @ rewards, 500, **options)
    want = (rewards / 0.5).softmax(0)
    for g in range(2):
        torch.testing.assert_close(pi.probs[0, 0, g], want, atol=0.06, rtol=0.0)


@pytest.mark.parametrize("kind", TARGET)
def test_the_entropy_comes_to_its_target_for_every_discount(kind):
    space = SPACES["continuous"] if kind == "continuous" else gym.spaces.MultiDiscrete((3, 4))
    reward = (lambda a: -a.square().sum(-1)) if kind == "continuous" else (lambda a: a[:, 0])
    agent, pi = learned(space, reward, 400, entropy_target=TARGET[kind], entropy_lr=0.05, online_coeff=1.0)
    if kind == "continuous":
        torch.manual_seed(0)
        found = torch.stack([sample_with_entropy(pi, False)[1] for _ in range(4000)]).mean(0) / 3
    else:
        found = exact_entropy(pi) / entropy_scale(pi)
    torch.testing.assert_close(found.flatten(), torch.full((2,), TARGET[kind]), atol=0.1, rtol=0.0)
    assert agent.temperature.value.shape == (2, 1)
    assert (agent.temperature.value > 0.01).all()


def test_only_real_steps_after_burn_in_move_the_temperature():
    def moved(batch, **options):
        torch.manual_seed(0)
        agent = build("discrete", entropy_target=0.5, burn_in=2, **options).train()
        agent(batch)
        return agent.temperature.log.clone()

    batch = make_batch("discrete")
    batch.time_idxs = batch.time_idxs + 30
    before = moved(batch)
    batch.obs["observation"][:, :2] += 3.0
    batch.obs["observation"][~batch.mask[..., 0]] = 3.0
    torch.testing.assert_close(moved(batch), before)
    batch.obs["observation"][:, 3] += 3.0
    assert (moved(batch) != before).any()


def test_temperatures_stay_in_evaluation_and_where_nothing_can_be_chosen():
    agent, batch = build("discrete", entropy_target=0.5), make_batch("discrete")
    before = agent.temperature.log.clone()
    agent.eval()(batch)
    agent.get_values(batch)
    assert agent.temperature.log.equal(before)
    agent.train()(batch)
    assert not agent.temperature.log.equal(before)
    config.bind({"ActionMask.key": "mask"})
    agent = build("discrete", entropy_target=0.5)
    batch.obs["mask"] = batch.obs["mask"] * torch.tensor([1.0, 0.0, 0.0, 0.0])
    agent.train()(batch)
    assert agent.temperature.log.equal(before)
