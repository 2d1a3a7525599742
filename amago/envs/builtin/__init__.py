"""Built-in environments, most of which cannot be solved without memory. Those that need an extra package are imported by their
module."""

from __future__ import annotations

from amago.envs.builtin.alchemy import SymbolicAlchemy
from amago.envs.builtin.frozen_lake import MetaFrozenLake
from amago.envs.builtin.key_door import RoomKeyDoor
from amago.envs.builtin.maze_runner import MazeRunner
from amago.envs.builtin.nim import Nim
from amago.envs.builtin.point_robot import PointRobot
from amago.envs.builtin.tmaze import TMazeActive, TMazePassive
from amago.envs.builtin.toy_mixture import ToyMixture

__all__ = [
    "MazeRunner",
    "MetaFrozenLake",
    "Nim",
    "PointRobot",
    "RoomKeyDoor",
    "SymbolicAlchemy",
    "TMazeActive",
    "TMazePassive",
    "ToyMixture",
]
