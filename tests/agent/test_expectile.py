"""Implicit Q-learning: values of states by expectile regression. `test_oracles` has the numbers of the losses."""

import gymnasium as gym
import pytest
import tiny
import torch
from messages import naming
from one_step import agent_for, train

import amago
from amago import config
from amago.agent import exp_filter
from amago.loading import Batch
from amago.run.settings import SettingsError

OFFLINE = {"online_coeff": 0.0, "offline_coeff": 1.0}


STATES, RIGHT = 5, 0.25
SPACE = gym.spaces.Discrete(2)


def pieces(b, g):
    """Rollouts of two steps at most that begin anywhere in a corridor. Action 0, taken a quarter of the time, goes right, and out of the
    last state pays 1. Action 1 pays 0.3 and ends the rollout. None goes from the first state to the reward."""
    first = torch.randint(STATES, (b,), generator=g)
    exits = (torch.rand(b, 2, generator=g) > RIGHT).long()
    at = torch.stack([first, first + 1, first + 2], dim=1)
    done = (exits == 1) | (at[:, :2] == STATES - 1)
    rews = torch.where(exits == 1, 0.3, (at[:, :2] == STATES - 1).float())
    mask = torch.stack([torch.ones(b), torch.ones(b), (~done[:, 0]).float()], dim=1)[..., None] > 0
    return Batch(
        {"observation": torch.nn.functional.one_hot(at.clamp(max=STATES), STATES + 1).float()}, torch.zeros(b, 3, 3), rews[..., None],
        done[..., None], torch.nn.functional.one_hot(exits, 2).float(), torch.arange(3)[None, :, None].expand(b, -1, -1), mask,
    )  # fmt: skip


def offline_agent(updates, **options):
    """The probability of going right in each state, after so many updates on such rollouts, and the agent."""
    config.bind({"StateValues.d_hidden": 16, "exp_filter.beta": 4.0})
    options = OFFLINE | {"gamma": 0.95, "use_multigamma": False, "fbc_filter_func": exp_filter} | options
    agent, g = agent_for(SPACE, STATES + 1, 16, max_seq_len=2, num_critics=4, **options), torch.Generator().manual_seed(0)
    train(agent, lambda: pieces(64, g), updates, lr=3e-3)
    batch = pieces(STATES, g)
    batch.obs = {"observation": torch.eye(STATES + 1)[:STATES, None].expand(-1, 3, -1)}
    with torch.no_grad():
        return agent.actor(agent.encode(batch)[:, 0]).probs[:, -1, 0], agent, batch


def greedy_return(right, gamma=1.0):
    """Of the likelier action in each state, from the first."""
    stops = [n for n, p in enumerate(right.tolist()) if p <= 0.5]
    return 0.3 if stops else 1.0


def test_pieces_of_rollouts_are_put_together():
    """With the same filter, cloning weighs actions by the values of a policy that stays near the data, and mostly leaves the corridor."""
    cloned, _, _ = offline_agent(500)
    joined, agent, batch = offline_agent(500, expectile=0.98)
    assert greedy_return(cloned) == pytest.approx(0.3), cloned
    assert cloned[0] < 0.4
    assert greedy_return(joined) == 1.0, joined
    assert joined[0] > 0.55
    v = agent.get_values(batch)["v_s"][:, 0, -1, 0]
    torch.testing.assert_close(v, 0.95 ** torch.arange(STATES - 1, -1, -1.0), atol=0.15, rtol=0.0)


def test_a_run_learns_saves_and_goes_on(tmp_path):
    config.bind({"Agent.expectile": 0.8, "Agent.online_coeff": 0.0, "Agent.offline_coeff": 1.0})
    e = tiny.learned(tmp_path, epochs=1, ckpt_interval=1)
    before = tiny.weights(e)
    e.close()
    e = tiny.started(tmp_path, epochs=2, ckpt_interval=1, resume="auto")
    assert not tiny.differing(before, tiny.weights(e))
    assert "state_values.net.in_layer.weight" in before
    e.learn()
    assert amago.load_policy(e.run_dir).agent.state_values is not None
    e.close()
    config.bind({"Agent.expectile": None})
    with pytest.raises(SettingsError, match=naming("Agent.expectile", "0.8", "None")):
        tiny.started(tmp_path, epochs=2, ckpt_interval=1, resume="auto")
