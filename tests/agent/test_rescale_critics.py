"""Critics whose networks' outputs stay near 1 where returns are large or small."""

import gymnasium as gym
import pytest
import torch
from one_step import agent_for, rollouts, train

from amago.run.learner import WeightAverage

CHOICES, NUMBERS = gym.spaces.Discrete(2), gym.spaces.Box(-1, 1, (1,))


def two_sides(generator, base, space=CHOICES, b=64, unit=1.0):
    """Rollouts of one step, which pay ``base``, and ``unit`` more if the action is on the side of the observation."""
    x = torch.rand(b, generator=generator) * 2 - 1
    a = torch.rand(b, generator=generator) * 2 - 1
    rews = base + unit * ((a > 0) == (x > 0)).float()
    return rollouts(space, x[:, None], ((a > 0).long() if space == CHOICES else a)[:, None], rews)


def trained(base, updates, space=CHOICES, unit=1.0, **options):
    g = torch.Generator().manual_seed(0)
    return train(agent_for(space, **options), lambda: two_sides(g, base, space, unit=unit), updates, lr=6e-4)


@pytest.mark.parametrize("space", [CHOICES, NUMBERS], ids=["choices", "numbers"])
def test_the_scale_follows_the_returns_and_values_do_not_change_units(space):
    agent = trained(-300.0, 300, space, rescale_critics=True)
    # returns of -3,000 with the reward multiplier, a tenth of that raw
    assert 64.0 <= agent.critics.output_scale.item() <= 512.0
    assert torch.equal(agent.critics.output_scale, agent.target_critics.output_scale)
    with torch.no_grad():
        q = agent.get_values(two_sides(torch.Generator().manual_seed(1), -300.0, space))["q_sa"]
    assert q.mean().item() == pytest.approx(-300.0, rel=0.05)


@pytest.mark.parametrize("space", [CHOICES, NUMBERS], ids=["choices", "numbers"])
def test_small_rewards_are_learned_as_large_ones(space):
    """Training is the same to the bit as with a larger reward multiplier: all sizes are divided by one power of two."""
    options = {"use_multigamma": False, "gamma": 0.9}
    scaled = trained(0.0, 20, space, unit=1e-5, rescale_critics=True, **options)
    scale = scaled.critics.output_scale.item()
    assert scale == 2.0**-17  # rewards of 1e-5 are 1.3 times as large
    large = trained(0.0, 20, space, unit=1e-5, reward_multiplier=10.0 / scale, **options)
    for a, b in zip(scaled.parameters(), large.parameters(), strict=True):
        assert torch.equal(a, b)
    assert scaled.popart.sigma.item() == pytest.approx(scale * large.popart.sigma.item())


def test_small_returns_change_nothing():
    """Where the first rewards are of size 1, training is the same to the bit until the scale grows."""
    plain, scaled = trained(0.0, 20), trained(0.0, 20, rescale_critics=True)
    assert scaled.critics.output_scale.item() == 1.0
    for a, b in zip(plain.parameters(), scaled.parameters(), strict=True):
        assert torch.equal(a, b)


def test_an_average_of_weights_keeps_its_values_when_the_scale_grows():
    agent, g = agent_for(CHOICES, rescale_critics=True), torch.Generator().manual_seed(0)
    average = WeightAverage(agent, 0.9)
    for n in range(1, 5):
        train(agent, lambda: two_sides(g, 0.0), 1, lr=6e-4).train()
        average.update(n)
    scale = agent.critics.output_scale.item()

    def values():
        with torch.no_grad(), average.acting():
            return agent.get_values(two_sides(torch.Generator().manual_seed(1), 0.0))

    before = values()
    agent.losses(two_sides(g, 3000.0))  # without a step of the optimizer
    assert agent.critics.output_scale > scale
    after = values()
    for name in ("q_sa", "v_s"):
        torch.testing.assert_close(before[name], after[name], rtol=1e-2, atol=1e-4)


def test_gradients_of_an_unfinished_update_are_those_of_the_divided_layer():
    """An update of several batches: the layer that is divided between two of them."""
    agent, g = agent_for(CHOICES, rescale_critics=True), torch.Generator().manual_seed(0)
    layer = agent.critics.net.output_layer
    train(agent, lambda: two_sides(g, 0.0), 1, lr=0.0).train()
    agent.losses(two_sides(g, 0.0))["critic"].mean().backward()
    gradient, scale = layer.weight.grad.clone(), agent.critics.output_scale.clone()
    agent.losses(two_sides(g, 3000.0))
    growth = agent.critics.output_scale / scale
    assert growth > 1
    assert torch.equal(layer.weight.grad, gradient * growth)
