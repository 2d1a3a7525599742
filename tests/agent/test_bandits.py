"""Agents that learn one-step tasks from random data: rare large rewards, thousands of actions."""

import gymnasium as gym
import pytest
import torch
from one_step import agent_for, rollouts, train

from amago import config
from amago.agent import Agent, MultiTaskAgent
from amago.nets.policy_dists import Discrete


def trained(agent_type, num_actions, draw, updates, **options):
    """The policy (A,) after ``updates`` on data that ``draw(generator)`` returns as actions and rewards."""
    space, g = gym.spaces.Discrete(num_actions), torch.Generator().manual_seed(0)
    agent = agent_for(space, agent_type=agent_type, use_multigamma=False, **options)

    def batch():
        actions, rewards = draw(g)
        return rollouts(space, torch.ones(len(actions), 1), actions[:, None], rewards)

    train(agent, batch, updates)
    with torch.no_grad():
        return agent.actor(agent.encode(batch())[:1, 0]).probs[0, -1]


def gamble(g, b=128):
    """Arm 0 pays 1, arm 1 pays 100 with a probability of 0.1: 10 on average."""
    arm = torch.randint(2, (b,), generator=g)
    return arm, torch.where(arm == 0, 1.0, 100.0 * (torch.rand(b, generator=g) < 0.1))


@pytest.mark.learning
def test_a_rare_large_reward_is_worth_its_mean_where_bins_are_evenly_spaced():
    config.bind({"NCriticsTwoHot.use_symlog": False, "NCriticsTwoHot.min_return": -100.0, "NCriticsTwoHot.max_return": 1100.0})
    assert trained(MultiTaskAgent, 2, gamble, 250)[1] > 0.9


def one_of_2000(g, b=64):
    """Every second action is 1,234 and pays 1; the others are random and pay nothing."""
    action = torch.where(torch.rand(b, generator=g) < 0.5, 1234, torch.randint(2000, (b,), generator=g))
    return action, (action == 1234).float()


@pytest.mark.learning
def test_an_agent_with_two_thousand_actions_learns():
    """With probabilities clipped at 0.001 no gradient reached a policy whose probabilities are 0.0005."""
    assert trained(Agent, 2000, one_of_2000, 200, online_coeff=1.0, offline_coeff=0.0)[1234] > 0.8


@pytest.mark.parametrize("n", [2, 50, 51, 1000, 2000, 70_000])
def test_the_clip_leaves_room_for_every_number_of_actions(n):
    """An untrained policy lies between the bounds, and a trained one can be sure of an action."""
    kind = Discrete(n)
    assert kind.clip_prob_low == pytest.approx(0.001 if n <= 50 else 0.05 / n)
    logits = (0.1 * torch.randn(1, n)).requires_grad_()
    kind(logits).log_prob(torch.tensor([n - 1])).sum().backward()
    assert logits.grad[0, -1] > 0
    sure = torch.zeros(1, n)
    sure[0, 0] = 100.0
    assert kind(sure).probs[0, 0] > 0.94
    assert Discrete(n, clip_prob_low=0.0).clip_prob_low == 0.0
