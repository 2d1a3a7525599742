"""Tasks of one step: batches of rollouts of one step, and training on them."""

import gymnasium as gym
import torch

from amago import config
from amago.agent import Agent
from amago.loading import Batch
from amago.nets.traj_encoders import FFTrajEncoder
from amago.nets.tstep_encoders import FFTstepEncoder
from amago.spaces import action_spec, rl2_space

PARTS = (
    "FFTstepEncoder.d_hidden", "FFTstepEncoder.d_output", "FFTrajEncoder.d_model", "FFTrajEncoder.d_ff", "Actor.d_hidden",
    "NCritics.d_hidden", "NCriticsTwoHot.d_hidden",
)  # fmt: skip


def rollouts(space, obs, actions, rews):
    """A batch: observations (B, n), the same before and after the step; actions (B, S) or vectors (B, A); rewards (B,)."""
    b = len(rews)
    return Batch(
        {"observation": obs[:, None].repeat(1, 2, 1)}, torch.zeros(b, 2, 1 + action_spec(space).dim), rews[:, None, None],
        torch.ones(b, 1, 1) > 0, actions[:, None], torch.arange(2)[None, :, None].expand(b, -1, -1), torch.ones(b, 2, 1) > 0,
    )  # fmt: skip


def agent_for(space, inputs=1, size=32, agent_type=Agent, max_seq_len=1, **options):
    """A small agent, which has always the same weights, for observations of so many numbers."""
    config.bind(dict.fromkeys(PARTS, size) | {"FFTstepEncoder.n_layers": 1, "FFTrajEncoder.n_layers": 1})
    config.bind({"FFTstepEncoder.normalize_inputs": False})
    torch.manual_seed(0)
    obs = gym.spaces.Dict({"observation": gym.spaces.Box(-1, 1, (inputs,))})
    options = {"num_critics": 2, "tau": 0.05} | options
    return agent_type(obs, rl2_space(action_spec(space)), space, max_seq_len, FFTstepEncoder, FFTrajEncoder, **options)


def train(agent, draw, updates, lr=1e-3):
    """The agent after updates on batches that ``draw()`` returns."""
    optimizer = torch.optim.Adam(agent.trainable_params, lr=lr)
    for _ in range(updates):
        optimizer.zero_grad()
        agent.train()(draw()).backward()
        optimizer.step()
        agent.soft_sync_targets()
    return agent.eval()
