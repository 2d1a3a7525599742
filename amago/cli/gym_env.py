"""A Gymnasium environment by its id, as the commands build it."""

from __future__ import annotations

from dataclasses import dataclass

import gymnasium as gym

from amago.envs import AMAGOEnv


@dataclass(frozen=True)
class GymEnv:
    """Calling it makes the environment; picklable, so that it can be made in another process.

    Args:
        env_id: registered id.
        max_steps: truncate rollouts after so many steps; None keeps the environment's own limit.
    """

    env_id: str
    max_steps: int | None = None

    def __call__(self, render_mode: str | None = None) -> AMAGOEnv:
        try:
            env = gym.make(self.env_id, max_episode_steps=self.max_steps, render_mode=render_mode)
        except gym.error.Error as err:
            raise ValueError(f"cannot make the environment {self.env_id!r}: {err}") from err
        return AMAGOEnv(env, env_name=self.env_id)

    def horizon(self, env: AMAGOEnv) -> int:
        """Steps after which a rollout ends at the latest; 1000 where the environment does not say."""
        limit = env.unwrapped.spec.max_episode_steps if env.unwrapped.spec is not None else None
        return self.max_steps or limit or 1000
