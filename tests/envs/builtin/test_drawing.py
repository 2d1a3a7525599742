"""The pictures of built-in environments."""

import numpy as np
import pytest
from support.point_robot import PointRobot

from amago.envs.builtin import MazeRunner, MetaFrozenLake, RoomKeyDoor, SymbolicAlchemy, TMazeActive, TMazePassive
from amago.envs.builtin._common import COLOURS

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


def cells(picture):
    """The characters of the cells of a picture, a row of them for each of its rows."""
    names = {colour: name for name, colour in reversed(COLOURS.items())}
    return ["".join(names[tuple(pixel)] for pixel in row) for row in picture[12::24, 12::24].tolist()]


def test_everything_is_drawn_in_its_place():
    arguments = {"start_location": (0, 0), "key_location": (1, 0), "goal_location": (1, 1), "render_mode": "rgb_array"}
    room = RoomKeyDoor(True, 3, 5, 20, **arguments)
    room.reset(seed=0)
    seen = [cells(room.render())] + [cells(room.render()) for action in (0, 2, 0) if room.step(action)]
    assert seen == [["AK.", ".G.", "..."], [".a.", ".G.", "..."], ["...", ".a.", "..."], ["AK.", ".G.", "..."]]
    maze = MazeRunner(5, 2, 2, 9, render_mode="rgb_array")
    maze.reset(seed=0)
    rows, places = cells(maze.render()), [maze.position, *maze.goals]
    assert [[c != "#" for c in row] for row in rows] == maze.maze.T.tolist()
    assert "".join(rows[y][x] for x, y in places) == "AGK"
    lake = MetaFrozenLake(4, render_mode="rgb_array")
    lake.reset(seed=1)
    rows = cells(lake.render())
    assert (rows[0][0], rows[3][3]) == ("A", "G")
    np.testing.assert_array_equal([[c == "O" for c in row] for row in rows], lake.holes.T)
