"""`MetaFrozenLake` and `RoomKeyDoor`, under the module that scripts for the original system import them from."""

from amago.envs.builtin.frozen_lake import MetaFrozenLake
from amago.envs.builtin.key_door import RoomKeyDoor

__all__ = ["MetaFrozenLake", "RoomKeyDoor"]
