"""Cached weights follow every optimizer, and nothing of the process changes without them."""

import gc
import subprocess
import sys

import gymnasium as gym
import numpy as np
import pytest
import torch

from amago import config
from amago.agent import Agent
from amago.nets.cpu.packed import Linear
from amago.nets.traj_encoders import FFTrajEncoder, TformerTrajEncoder
from amago.nets.tstep_encoders import FFTstepEncoder
from amago.spaces import action_spec, rl2_space

OBS = gym.spaces.Dict({"observation": gym.spaces.Box(-np.inf, np.inf, (6,))})
ACTIONS = gym.spaces.Box(-1, 1, (3,))


def hooks():
    from torch.optim import optimizer

    return len(optimizer._global_optimizer_post_hooks)


def act(agent, obs):
    memory = agent.init_hidden_state(4, "cpu")
    rl2s, times = torch.zeros(4, 4), torch.zeros(4, 1, dtype=torch.int64)
    return agent.get_actions({"observation": obs}, rl2s, times, memory, sample=False)[0]


@pytest.mark.parametrize("traj", [FFTrajEncoder, TformerTrajEncoder])
@pytest.mark.parametrize("fused", [True, False])
def test_an_agent_acts_by_the_weights_of_a_users_own_optimizer(traj, fused):
    agent = Agent(OBS, rl2_space(action_spec(ACTIONS)), ACTIONS, 8, FFTstepEncoder, traj).eval()
    obs = torch.randn(4, 6)
    optimizer = torch.optim.AdamW(agent.trainable_params, lr=0.01, fused=fused)
    for _ in range(2):
        before = act(agent, obs)
        for p in agent.trainable_params:
            p.grad = torch.randn_like(p)
        optimizer.step()
        optimizer.zero_grad()
        after = act(agent, obs)
        fresh = Agent(OBS, rl2_space(action_spec(ACTIONS)), ACTIONS, 8, FFTstepEncoder, traj).eval()
        fresh.load_state_dict(agent.state_dict())
        torch.testing.assert_close(after, act(fresh, obs))
        assert (after - before).abs().max() > 1e-3


def test_optimizers_are_watched_while_there_is_something_cached():
    gc.collect()
    parameter = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    optimizer.step()  # caches of earlier tests that are gone
    before = hooks()
    layers = [Linear(264, 272).eval() for _ in range(2)]
    with torch.inference_mode():
        for layer in layers:
            layer(torch.randn(3, 264))
    assert hooks() <= before + 1
    watched = hooks()
    layers[0].train()
    assert hooks() == watched, "the other still has a value"
    del layers[1], layer
    gc.collect()
    optimizer.step()
    assert hooks() == before


def test_importing_and_building_hook_no_optimizer():
    code = (
        "import amago.agent, amago.experiment, torch; from amago.nets.ff import MLP; MLP(300, 300, 2, 300);"
        "from torch.optim import optimizer; assert not optimizer._global_optimizer_post_hooks"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_switch_is_asked_when_a_module_is_built():
    with config.temporary({"amago.config.fast_paths.enabled": False}):
        plain = Agent(OBS, rl2_space(action_spec(ACTIONS)), ACTIONS, 8, FFTstepEncoder, FFTrajEncoder).eval()
    fast = Agent(OBS, rl2_space(action_spec(ACTIONS)), ACTIONS, 8, FFTstepEncoder, FFTrajEncoder).eval()
    fast.load_state_dict(plain.state_dict())
    for agent, expected in ((plain, {False}), (fast, {True})):
        assert {m.fast for m in agent.modules() if hasattr(m, "fast")} == expected
    obs = torch.randn(4, 6)
    torch.testing.assert_close(act(plain, obs), act(fast, obs), rtol=1e-4, atol=1e-5)
