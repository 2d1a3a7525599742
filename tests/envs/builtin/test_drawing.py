"""The pictures of built-in environments."""

from __future__ import annotations

import numpy as np
import pytest
from support.point_robot import PointRobot

from amago.envs.builtin import MazeRunner, MetaFrozenLake, RoomKeyDoor, SymbolicAlchemy, TMazeActive, TMazePassive

CASES = [  # (environment, its arguments, rows and columns of its picture)
    (MetaFrozenLake, {"size": 4}, (4, 4)), (RoomKeyDoor, {"size": 3}, (3, 3)), (MazeRunner, {"size": 5}, (5, 5)),
    (TMazePassive, {"corridor_length": 4}, (3, 5)), (TMazeActive, {"corridor_length": 4}, (3, 6)),
    (TMazePassive, {"corridor_length": 10_000}, (3, 30)), (SymbolicAlchemy, {}, (3, 6)), (PointRobot, {"step_size": 0.5}, (15, 15)),
]  # fmt: skip


@pytest.mark.parametrize(("cls", "arguments", "cells"), CASES)
def test_a_picture_follows_the_state_and_changes_nothing(cls, arguments, cells):
    """Two rollouts with one seed, one of them drawn in each step."""
    env, plain = cls(**arguments, render_mode="rgb_array"), cls(**arguments)
    env.action_space.seed(1)
    np.testing.assert_equal(env.reset(seed=2), plain.reset(seed=2))
    frames = [env.render()]
    done = False
    while not done and len(frames) < 40:
        action = env.action_space.sample()
        first, second = env.step(action), plain.step(action)
        np.testing.assert_equal(first, second)
        frames.append(env.render())
        done = first[2]
    assert {(f.shape, f.dtype) for f in frames} == {((24 * cells[0], 24 * cells[1], 3), np.dtype(np.uint8))}
    assert len({f.tobytes() for f in frames}) > 1
    assert np.array_equal(frames[-1], env.render())
    assert plain.render() is None


def test_the_agent_is_red_and_its_goal_green():
    env = TMazeActive(3, render_mode="rgb_array")
    env.reset(seed=0)
    for action in (2, 0, 0, 0, 0):
        picture = env.render()
        agent, goal = picture[36, 12 + 24 * (env.position[0] + 1)], picture[36 - 24 * env.goal, 12 + 24 * 4]
        assert agent.argmax() == 0
        assert goal.argmax() == 1
        env.step(action)
