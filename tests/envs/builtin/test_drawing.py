"""What the pictures of built-in environments show. `test_render` of the grid worlds covers their cells."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from numpy.typing import NDArray

from amago.envs.builtin import (
    MazeRunner,
    MetaFrozenLake,
    PointRobot,
    RoomKeyDoor,
    SymbolicAlchemy,
    TMazeActive,
    TMazePassive,
)
from amago.envs.builtin.alchemy import CAULDRON, action_for
from amago.envs.builtin.alchemy_chemistry import COLOURS, GOAL

Frame = NDArray[np.uint8]
RIGHT, UP, LEFT, DOWN = range(4)


def middle(frame: Frame, x: int, y: int) -> tuple[int, ...]:
    """The colour in the middle of a grid's cell."""
    return tuple(frame[12 + 24 * y, 12 + 24 * x].tolist())


@pytest.mark.parametrize(
    ("make", "shape"),
    [
        (lambda mode: MetaFrozenLake(4, render_mode=mode), (96, 96)),
        (lambda mode: RoomKeyDoor(size=3, render_mode=mode), (72, 72)),
        (lambda mode: MazeRunner(5, render_mode=mode), (120, 120)),
        (lambda mode: TMazePassive(4, render_mode=mode), (72, 120)),
        (lambda mode: TMazeActive(4, render_mode=mode), (72, 144)),
        (lambda mode: TMazePassive(10_000, render_mode=mode), (72, 720)),
        (lambda mode: SymbolicAlchemy(render_mode=mode), (204, 288)),
        (lambda mode: PointRobot(render_mode=mode), (240, 240)),
    ],
)
def test_a_picture_follows_the_state_and_changes_nothing(
    make: Callable[[str | None], gym.Env[Any, Any]], shape: tuple[int, int]
) -> None:
    """Two rollouts with one seed, one of them drawn in each step."""
    env, plain = make("rgb_array"), make(None)
    env.action_space.seed(1)
    first, second = env.reset(seed=2), plain.reset(seed=2)
    frames: list[Any] = [env.render()]
    for _ in range(20):
        action = env.action_space.sample()
        first, second = env.step(action), plain.step(action)
        frames.append(env.render())
        np.testing.assert_equal(first[0], second[0])
        assert first[1:4] == second[1:4]
        if first[2]:
            break
    assert {(f.shape, f.dtype) for f in frames} == {((*shape, 3), np.dtype(np.uint8))}
    assert len({f.tobytes() for f in frames}) > 1
    assert np.array_equal(frames[-1], env.render())
    assert plain.render() is None


@pytest.mark.parametrize("goal", [1, -1])
def test_tmaze_shows_agent_goal_and_sign(goal: int) -> None:
    env = TMazeActive(3, render_mode="rgb_array")
    env.reset(seed=0)
    env._goal = goal
    begin = env.render()
    agent, free, wall, sign = middle(begin, 1, 1), middle(begin, 2, 1), middle(begin, 2, 0), middle(begin, 0, 1)
    goals = {+1: middle(begin, 4, 0), -1: middle(begin, 4, 2)}
    assert len({agent, free, wall, sign, goals[goal]}) == 5
    assert goals[-goal] == free
    assert middle(begin, 0, 1 - goal) == wall, "the sign is not shown from here"
    env.step(LEFT)
    shown = env.render()
    assert middle(shown, 0, 1) == agent
    assert middle(shown, 0, 1 - goal) == sign
    assert middle(shown, 0, 1 + goal) == wall
    for action in (RIGHT, RIGHT, RIGHT, RIGHT, UP):
        env.step(action)
    assert middle(env.render(), 4, 0) == agent


def test_a_long_corridor_is_drawn_from_start_to_junction() -> None:
    env = TMazePassive(300, render_mode="rgb_array")
    env.reset(seed=0)
    agent = middle(env.render(), 0, 1)
    at = []
    for _ in range(300):
        env.step(RIGHT)
        frame = env.render()
        at += [x for x in range(30) if middle(frame, x, 1) == agent]
    assert len(at) == 300
    assert at == sorted(at)
    assert at[-2:] == [28, 29], "the junction is no part of the corridor"


def color_count(frame: Frame, color: tuple[int, int, int]) -> int:
    return int((frame == color).all(axis=-1).sum())


def test_alchemy_shows_what_is_left() -> None:
    env = SymbolicAlchemy(2, 6, render_mode="rgb_array")
    env.reset(seed=3)
    before = env.render()
    env.step(action_for(1, CAULDRON))
    after = env.render()
    stones, potions = slice(0, 96), slice(96, 184)
    empty = tuple(after[42, 48 + 96].tolist())
    assert tuple(before[42, 48 + 96].tolist()) != empty
    assert (after[stones, 96:192] == empty).all(), "the second stone is gone"
    assert np.array_equal(before[stones, :96], after[stones, :96])
    assert np.array_equal(before[potions], after[potions])
    env.step(action_for(0, 1))
    assert tuple(env.render()[120, 24].tolist()) == empty, "the first potion is used"
    assert tuple(env.render()[120, 24 + 48].tolist()) != empty


def test_alchemy_shows_appearance_value_and_colours() -> None:
    env = SymbolicAlchemy(render_mode="rgb_array")
    env.reset(seed=0)
    pictures, gold = set(), []
    for corner in range(GOAL + 1):
        env._stones = [corner, -1, -1]
        frame = env.render()
        pictures.add(frame[:80, :96].tobytes())
        gold.append(color_count(frame[80:96], (214, 158, 46)))
    assert len(pictures) == GOAL + 1, "each corner has an appearance of its own"
    assert [round(g / gold[GOAL] * 3) for g in gold] == [corner.bit_count() for corner in range(GOAL + 1)]
    env._potions = [*range(COLOURS)] * 2
    row = env.render()[120, 24::48]
    assert len({tuple(c) for c in row.tolist()}) == COLOURS


def test_point_robot_shows_robot_goal_path_and_attempt() -> None:
    env = PointRobot(2, 4, step_size=0.25, render_mode="rgb_array")
    env.reset(seed=0)
    env.goal = (0.0, 1.0)
    begin = env.render()
    robot, goal, path = (200, 60, 60), (64, 145, 90), (214, 158, 46)

    def at(frame: Frame, color: tuple[int, int, int]) -> tuple[float, float]:
        rows, cols = np.nonzero((frame == color).all(axis=-1))
        return float(cols.mean()), float(rows.mean())

    assert at(begin, robot) == pytest.approx((119.5, 119.5), abs=1)
    assert at(begin, goal) == pytest.approx((119.5, 119.5 - 120 / 1.4), abs=1)
    assert color_count(begin, path) == 0
    for _ in range(3):
        env.step([1.0, -0.5])
    moved = env.render()
    assert at(moved, robot) == pytest.approx((119.5 + 0.75 * 120 / 1.4, 119.5 + 0.375 * 120 / 1.4), abs=1)
    assert color_count(moved, path) > 0
    env.step([0.0, 0.0])
    again = env.render()
    assert color_count(again, path) == 0, "the next attempt begins without a path"
    dark = (60, 66, 74)
    assert color_count(again[:4], dark) == 2 * color_count(begin[:4], dark)


def test_a_robot_outside_of_the_picture_is_at_its_edge() -> None:
    env = PointRobot(1, 30, render_mode="rgb_array")
    env.reset(seed=0)
    for _ in range(29):
        env.step([1.0, 0.0])
    columns = np.nonzero((env.render() == (200, 60, 60)).all(axis=-1))[1]
    assert columns.max() == 239
