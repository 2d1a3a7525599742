"""Built-in environments, most of which cannot be solved without memory; adapters of other packages are imported by their module.

All of them draw every random number from the generator that ``reset(seed=...)`` seeds, raise TypeError or ValueError for a wrong
argument or action, naming it and its value, and `gymnasium.error.ResetNeeded` for a step with no rollout under way. ``horizon`` is
the maximum number of steps of a rollout. Metrics are in ``info``, under names that begin with ``AMAGO_ENV_LOG_PREFIX``. Where a
package is missing, an ImportError names the extra that installs it.
"""

from __future__ import annotations

from amago.compat.names import attributes
from amago.envs.builtin.alchemy import SymbolicAlchemy
from amago.envs.builtin.mazerunner import MazeRunner
from amago.envs.builtin.tmaze import TMazeActive, TMazePassive
from amago.envs.builtin.toy_gym import MetaFrozenLake, RoomKeyDoor

__all__ = ["MazeRunner", "MetaFrozenLake", "RoomKeyDoor", "SymbolicAlchemy", "TMazeActive", "TMazePassive"]

__getattr__ = attributes(__name__)
