"""`amago.envs.builtin.atari` and `amago.envs.builtin.retro` in the form that scripts for the original system import."""

from __future__ import annotations

from typing import Any

from amago.envs.amago_env import AMAGOEnv
from amago.envs.builtin.atari import AtariGame
from amago.envs.builtin.retro import RetroArcade

__all__ = ["ALE", "AtariAMAGOWrapper", "AtariGame", "RetroAMAGOWrapper", "RetroArcade"]

ALE = AtariGame
"""One game of the Arcade Learning Environment."""


class AtariAMAGOWrapper(AMAGOEnv):
    """An `AMAGOEnv` that is named by its game.

    Args:
        env: an `AtariGame`.
    """

    def __init__(self, env: Any) -> None:
        super().__init__(env)


class RetroAMAGOWrapper(AMAGOEnv):
    """An `AMAGOEnv` that is named by the game and level of each rollout.

    Args:
        env: a `RetroArcade`.
    """

    def __init__(self, env: Any) -> None:
        super().__init__(env)
