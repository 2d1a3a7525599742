"""Normalized scores of the D4RL benchmark: 0 for its random policy, 100 for its expert (Fu et al. 2020, arXiv:2004.07219)."""

from __future__ import annotations

import re
from typing import Any

import gymnasium as gym

from amago.envs.builtin import _common as common
from amago.envs.statistics import AMAGO_ENV_LOG_PREFIX

REFERENCE_RETURNS: dict[str, tuple[float, float]] = {
    "halfcheetah": (-280.178953, 12135.0),
    "hopper": (-20.272305, 3234.3),
    "walker2d": (1.629008, 4592.3),
    "ant": (-325.6, 3879.7),
    "pen": (96.262799, 3076.8331),
    "hammer": (-274.856578, 12794.134825),
    "door": (-56.512833, 2880.569306),
    "relocate": (-6.425911, 4233.877797),
}
"""Returns of the random policy and of the expert in each environment, as published with the datasets."""


def reference_returns(dataset: str) -> tuple[float, float] | None:
    """The `REFERENCE_RETURNS` for the name of a dataset ("halfcheetah_medium-v2", "D4RL/pen/human-v2"), None if it is
    unknown."""
    words = re.split(r"[^a-z0-9]+", dataset.lower())
    return next((REFERENCE_RETURNS[word] for word in words if word in REFERENCE_RETURNS), None)


def normalized_score(episode_return: float, low: float, high: float) -> float:
    """``100 (return - low) / (high - low)``."""
    return 100.0 * (episode_return - low) / (high - low)


class NormalizedScore(gym.Wrapper[Any, Any, Any, Any]):
    """Add the metric ``Normalized Score`` at the end of an episode.

    Args:
        env: any environment.
        low: the return with score 0.
        high: the return with score 100.
    """

    def __init__(self, env: gym.Env[Any, Any], low: float, high: float):
        super().__init__(env)
        self.low, self.high = common.check_real("low", low), common.check_real("high", high)
        if self.low == self.high:
            raise ValueError(f"low and high must differ, got {low!r} for both")
        self._return = 0.0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        self._return = 0.0
        return self.env.reset(seed=seed, options=options)

    def step(self, action: object) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        obs, reward, terminated, truncated, info = self.env.step(action)
        self._return += float(reward)
        if terminated or truncated:
            score = normalized_score(self._return, self.low, self.high)
            info = {**info, f"{AMAGO_ENV_LOG_PREFIX} Normalized Score": score}
        return obs, reward, terminated, truncated, info
