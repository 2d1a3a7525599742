"""Normalises Gymnasium's autoreset modes of vectorised environments.

In each mode (https://farama.org/Vector-Autoreset-Mode) a step shows something else where a rollout ends: the last observation
("next_step", where the step after it ignores the action and resets), the next rollout's first ("same_step", where the last may be in
the info), or the last, with resets on request ("disabled"). `AutoReset` describes a step alike in all of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import gymnasium as gym
import numpy as np
from numpy.typing import NDArray

from amago.envs.observed import Observations
from amago.spaces import obs_spec

Array = NDArray[Any]
Mask = NDArray[np.bool_]
Info = tuple[dict[str, Any], Mask]

NEXT_STEP, SAME_STEP, DISABLED = "next_step", "same_step", "disabled"


@dataclass
class AutoReset:
    """How rollouts ended and began in one step of a vectorised environment with B rows.

    Attributes:
        real: (B,) bool, False where the environment ignored the action and only began a rollout.
        opened: (B,) bool, True where the `Timestep` after this step opens a new rollout.
        last_obs: {key: (B, ...)}, the last observation of the rollouts that ended, undefined in other rows; None: the `Timestep`
            holds it.
        last_known: (B,) bool, False where a rollout ended and the environment does not report its last observation.
        step_infos: (info, rows (B,) that it is about) of the rollouts that took this step.
        opening_infos: (info, rows (B,) that it is about) of the rollouts that begin.
    """

    real: Mask
    opened: Mask
    last_obs: dict[str, Array] | None
    last_known: Mask
    step_infos: list[Info]
    opening_infos: list[Info]


def autoreset_mode(env: Any) -> str:
    """The environment's ``metadata["autoreset_mode"]`` as "next_step", "same_step" (also if it has none) or "disabled".

    Raises:
        ValueError: the mode is unknown.
    """
    mode = (getattr(env, "metadata", None) or {}).get("autoreset_mode")
    if mode is None:
        return SAME_STEP
    name = str(getattr(mode, "name", mode)).replace("-", "_").lower()
    name = {"nextstep": NEXT_STEP, "samestep": SAME_STEP}.get(name, name)
    if name not in (NEXT_STEP, SAME_STEP, DISABLED):
        raise ValueError(f"metadata['autoreset_mode'] is {mode!r}, but must be a gymnasium.vector.AutoresetMode")
    return name


class AutoResetter:
    """Describes each step of one vectorised environment as an `AutoReset`; resets ended rows if the mode is "disabled".

    Args:
        env: an `AMAGOEnv`, whose ``inner_reset`` resets rows.
        observations: converts batched observations to {key: (B, ...)}.
        single_space: the environment's own observation space of one row.

    Raises:
        ValueError: the environment's mode is unknown.
    """

    def __init__(self, env: Any, observations: Observations, single_space: gym.Space[Any]):
        self.env, self._observations, self.mode = env, observations, autoreset_mode(env)
        self._convert_one = obs_spec(single_space).convert
        self._waiting: Mask | None = None  # rows that the next step resets ("next_step")

    def begin(self) -> None:
        """Say that every row was reset."""
        self._waiting = None

    def after_step(
        self, obs: dict[str, Array], terminated: Array, truncated: Array, info: dict[str, Any]
    ) -> tuple[dict[str, Array], AutoReset]:
        """Describe a step.

        Args:
            obs: {key: (B, ...)}, as converted.
            terminated, truncated: (B,) bool.
            info: of the step.

        Returns:
            what the policy sees next {key: (B, ...)}, and the description.
        """
        ended: Mask = terminated | truncated
        everywhere = np.ones_like(ended)
        if self.mode == NEXT_STEP:
            opened = self._waiting if self._waiting is not None else np.zeros_like(ended)
            real = ~opened
            self._waiting = ended & real
            return obs, AutoReset(real, opened, None, everywhere, [(info, real)], [(info, opened)])
        if not ended.any():
            return obs, AutoReset(everywhere, ended, None, everywhere, [(info, everywhere)], [])
        if self.mode == DISABLED:
            last = {k: v.copy() for k, v in obs.items()}
            raw, opening = self.env.inner_reset(seed=None, options={"reset_mask": ended})
            return self._observations.convert(raw), AutoReset(
                everywhere, ended, last, everywhere, [(info, everywhere)], [(opening, ended)]
            )
        last_obs, known = self._last_observations(obs, ended, info)
        step_infos = [(info, ~ended), *_final_infos(info, ended)]
        return obs, AutoReset(everywhere, ended, last_obs, known, step_infos, [(info, ended)])

    def _last_observations(self, obs: dict[str, Array], ended: Mask, info: dict[str, Any]) -> tuple[dict[str, Array], Mask]:
        """`AutoReset.last_obs` and ``last_known`` from the info: a batched observation, or one observation a row."""
        key = next((k for k in ("final_obs", "final_observation") if info.get(k) is not None), None)
        if key is None or self._observations.changed:  # the environment knows nothing of keys that a subclass has added
            return obs, ~ended
        raw, given = info[key], np.asarray(info.get(f"_{key}", ended), dtype=bool)
        if not (isinstance(raw, list) or (isinstance(raw, np.ndarray) and raw.dtype == object)):
            return self._observations.convert(raw), ~ended | given
        last, known = {k: v.copy() for k, v in obs.items()}, ~ended
        for row in np.flatnonzero(ended & given):
            if raw[row] is None:
                continue
            known[row] = True
            for k, v in self._convert_one(raw[row]).items():
                last[k][row] = v
        return last, known


def _final_infos(info: dict[str, Any], ended: Mask) -> list[Info]:
    """``info["final_info"]``, a dict of batches or a list of dicts, with the rows that each dict is about."""
    final = info.get("final_info")
    if final is None:
        return []
    if isinstance(final, dict):
        return [(final, ended)]
    return [(row, np.arange(len(ended)) == i) for i, row in enumerate(final) if ended[i] and isinstance(row, dict)]
