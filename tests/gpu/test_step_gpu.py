"""A step of the policy as one CUDA graph, on a simulated device: resets included, with one memory for all steps."""

import sys

import pytest
import tiny
import torch
from gpu.devices import CUDA

ROWS, STEPS = 5, 36

pytestmark = [
    pytest.mark.skipif("simcuda" not in sys.modules, reason="graphs are captured on a simulated device"),
    pytest.mark.parametrize("device", [CUDA], indirect=True),
]


def inputs(agent, device):
    """Random observations, rewards and actions, times and resets of all steps; rollouts of row i last i + 4 steps."""
    torch.manual_seed(1)
    time = torch.zeros(ROWS, dtype=torch.int64)
    for _ in range(STEPS):
        resets = time == torch.arange(4, 4 + ROWS)
        time = torch.where(resets, 0, time)
        obs = {key: torch.rand(ROWS, *space.shape) for key, space in agent.obs_space.spaces.items()}
        yield [x.to(device) for x in (*obs.values(), torch.rand(ROWS, *agent.rl2_space.shape), time[:, None].clone(), resets)]
        time = time + 1


def act(agent, memory, given):
    *obs, rl2s, time, resets = given
    memory = agent.reset_hidden_state(memory, resets)
    return agent.get_actions(dict(zip(agent.obs_space.spaces, obs)), rl2s, time, memory, sample=True)


@pytest.mark.parametrize("traj", ["ff", "transformer", "gru", "mingru", "mamba"])
def test_replayed_steps_equal_eager_ones(traj, device):
    agent = tiny.agent(tiny.cartpole(), traj, max_seq_len=9).to(device).eval()
    given = list(inputs(agent, device))
    with torch.inference_mode():
        memory, expected = agent.init_hidden_state(ROWS, device), []
        torch.manual_seed(2)
        for step in given:
            actions, memory = act(agent, memory, step)
            expected.append(actions.clone())
        memory = agent.init_hidden_state(ROWS, device)
        if traj == "transformer":
            memory.host_lengths[:] = memory.capacity  # every slot is read in each step
        static, graph = [x.clone() for x in given[0]], torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            actions, after = act(agent, memory, static)
        assert after is memory  # else a replay would begin with the same memory each time
        agent.reset_hidden_state(
            memory, torch.ones(ROWS, dtype=torch.bool, device=device)
        )  # a simulated device computes while it captures
        torch.manual_seed(2)
        for step, wanted in zip(given, expected):
            for to, x in zip(static, step):
                to.copy_(x)
            graph.replay()
            assert actions.equal(wanted)
