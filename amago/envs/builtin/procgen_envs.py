"""`amago.envs.builtin.procgen` in the form that scripts for the original system import."""

from __future__ import annotations

from typing import Any

from amago.envs.amago_env import AMAGOEnv
from amago.envs.builtin.procgen import TwoAttemptMTProcgen

__all__ = ["ProcgenAMAGO", "TwoAttemptMTProcgen"]


class ProcgenAMAGO(AMAGOEnv):
    """An `AMAGOEnv` that is named by the game of each rollout.

    Args:
        env: a `TwoAttemptMTProcgen`.
    """

    def __init__(self, env: Any) -> None:
        super().__init__(env)
