"""Agents that learn one-step tasks from random data: rare large rewards, thousands of actions."""

import gymnasium as gym
import pytest
import torch

from amago import config
from amago.agent import Agent, MultiTaskAgent
from amago.loading import Batch
from amago.nets.policy_dists import Discrete
from amago.nets.traj_encoders import FFTrajEncoder
from amago.nets.tstep_encoders import FFTstepEncoder
from amago.spaces import action_spec, rl2_space

OBS = gym.spaces.Dict({"observation": gym.spaces.Box(0, 1, (1,))})
SMALL = {
    "FFTstepEncoder.n_layers": 1, "FFTstepEncoder.d_hidden": 32, "FFTstepEncoder.d_output": 32, "FFTrajEncoder.d_model": 32,
    "FFTstepEncoder.normalize_inputs": False, "FFTrajEncoder.d_ff": 32, "FFTrajEncoder.n_layers": 1, "Actor.d_hidden": 32,
    "NCritics.d_hidden": 32, "NCriticsTwoHot.d_hidden": 32,
}  # fmt: skip


def one_step(actions, rewards):
    """A batch of rollouts of one step; actions and rewards (B,)."""
    b, n = len(actions), actions.max() + 1
    return Batch(
        {"observation": torch.ones(b, 2, 1)}, torch.zeros(b, 2, 1 + n), rewards[:, None, None], torch.ones(b, 1, 1) > 0,
        actions[:, None, None], torch.arange(2)[None, :, None].expand(b, -1, -1), torch.ones(b, 2, 1) > 0,
    )  # fmt: skip


def trained(agent_type, num_actions, draw, updates, **options):
    """The policy (A,) after ``updates`` on data that ``draw(generator)`` returns as actions and rewards."""
    config.bind(SMALL)
    torch.manual_seed(0)
    space = gym.spaces.Discrete(num_actions)
    agent = agent_type(
        OBS, rl2_space(action_spec(space)), space, 1, FFTstepEncoder, FFTrajEncoder, use_multigamma=False, num_critics=2,
        tau=0.05, **options,
    )  # fmt: skip
    optimizer, g = torch.optim.Adam(agent.trainable_params, lr=1e-3), torch.Generator().manual_seed(0)
    for _ in range(updates):
        actions, rewards = draw(g)
        batch = one_step(actions, rewards)
        batch.rl2s = torch.zeros(len(actions), 2, 1 + num_actions)
        optimizer.zero_grad()
        loss = agent.losses(batch)
        (loss["actor"].mean() + (loss["critic"].mean() if "critic" in loss else 0.0)).backward()
        optimizer.step()
        agent.soft_sync_targets()
    with torch.no_grad():
        return agent.eval().actor(agent.encode(batch)[:1, 0]).probs[0, -1]


def gamble(g, b=128):
    """Arm 0 pays 1, arm 1 pays 100 with a probability of 0.1: 10 on average."""
    arm = torch.randint(2, (b,), generator=g)
    return arm, torch.where(arm == 0, 1.0, 100.0 * (torch.rand(b, generator=g) < 0.1))


@pytest.mark.learning
def test_a_rare_large_reward_is_worth_its_mean():
    config.bind({"NCriticsTwoHot.label_type": "hlgauss", "NCriticsTwoHot.decoding": "mean_return"})
    assert trained(MultiTaskAgent, 2, gamble, 250)[1] > 0.9


@pytest.mark.learning
def test_the_mean_bin_prefers_the_small_sure_reward():
    assert trained(MultiTaskAgent, 2, gamble, 250)[1] < 0.1


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
