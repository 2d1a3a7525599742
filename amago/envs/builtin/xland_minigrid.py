"""`amago.envs.builtin.xland_envs` in the form that scripts for the original system import."""

from __future__ import annotations

from typing import Any

from amago.envs.builtin.xland_envs import XLandMiniGrid

__all__ = ["XLandMinigridVectorizedGym"]


class XLandMinigridVectorizedGym(XLandMiniGrid):
    """`amago.envs.builtin.xland_envs.XLandMiniGrid` with the original's names of arguments.

    Args:
        parallel_envs: worlds (rows).
        k_episodes: attempts of a rollout.
        options: other arguments of `XLandMiniGrid`.
    """

    def __init__(self, parallel_envs: int, k_episodes: int = 25, **options: Any) -> None:
        super().__init__(parallel_envs, k_shots=k_episodes, **options)
