"""Gymnasium environments by their ids."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import gymnasium as gym

from amago.envs import AMAGOEnv


@dataclass(frozen=True)
class GymEnv:
    """A picklable function that makes a registered environment.

    Args:
        env_id: its id.
        max_steps: rollouts are truncated after this many steps; None: the environment's own limit.
    """

    env_id: str
    max_steps: int | None = None

    def __call__(self, render_mode: str | None = None) -> AMAGOEnv:
        options: dict[str, Any] = (
            {} if render_mode is None else {"render_mode": render_mode}
        )  # not every environment takes the argument
        try:
            env = gym.make(self.env_id, max_episode_steps=self.max_steps, **options)
        except gym.error.Error as err:
            raise ValueError(f"cannot make the environment {self.env_id!r}: {err}") from err
        except TypeError as err:
            if render_mode is None or "render_mode" not in str(err):
                raise
            raise ValueError(f"the environment {self.env_id!r} takes no render_mode, so it cannot be shown: {err}") from err
        return AMAGOEnv(env, env_name=self.env_id)

    def horizon(self, env: AMAGOEnv) -> int:
        """The time limit of rollouts in steps; 1000 for an environment without one."""
        return self.max_steps or env.horizon or 1000
