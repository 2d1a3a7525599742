"""The ways in which vectorised environments reset themselves, made one: which transitions are real, what each ended with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import gymnasium as gym
import numpy as np
from numpy.typing import NDArray

from amago.spaces import obs_spec

Array = NDArray[Any]
Mask = NDArray[np.bool_]
Info = tuple[dict[str, Any], Mask]

NEXT_STEP, SAME_STEP, DISABLED = "next_step", "same_step", "disabled"


@dataclass
class AutoReset:
    """One step of a vectorised environment, B rows.

    Attributes:
        real: (B,) False where the action was ignored and the step only opened a rollout.
        opened: (B,) True where the `Timestep` after this step opens a new rollout.
        last_obs: {key: (B, ...)}, the observation that the step led to where a rollout ended; None: that of the `Timestep`.
        last_known: (B,) False where a rollout ended and its last observation is lost.
        step_infos: infos that belong to the rollouts that made this step, each with the rows it speaks of.
        opening_infos: infos that belong to the rollouts that open.
    """

    real: Mask
    opened: Mask
    last_obs: dict[str, Array] | None
    last_known: Mask
    step_infos: list[Info]
    opening_infos: list[Info]


def autoreset_mode(env: Any) -> str:
    """The environment's ``metadata["autoreset_mode"]``; "same_step" where it has none.

    Raises:
        ValueError: an unknown mode.
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
    """Follows one vectorised environment from step to step.

    Args:
        env: the environment; asked to reset single rows where it does not do so itself.
        convert: its batched observation -> {key: (B, ...)}.
        single_space: the observation space of one row.
    """

    def __init__(self, env: Any, convert: Callable[[Any], dict[str, Array]], single_space: gym.Space[Any]):
        self.env, self.convert, self.mode = env, convert, autoreset_mode(env)
        self._convert_one = obs_spec(single_space).convert
        self._waiting: Mask | None = None

    def begin(self) -> None:
        """Every row was reset."""
        self._waiting = None

    def after_step(
        self, obs: dict[str, Array], terminated: Array, truncated: Array, info: dict[str, Any]
    ) -> tuple[dict[str, Array], AutoReset]:
        """What the policy sees next, and what became of the rollouts; terminated and truncated are (B, 1)."""
        ended: Mask = (terminated | truncated)[:, 0]
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
            raw, opening = self.env.reset(options={"reset_mask": ended})
            return self.convert(raw), AutoReset(everywhere, ended, last, everywhere, [(info, everywhere)], [(opening, ended)])
        last_obs, known = self._last_observations(obs, ended, info)
        steps = [(info, ~ended)]
        final = info.get("final_info")
        if isinstance(final, dict):
            steps.append((final, ended))
        elif final is not None:  # one dict a row
            steps += [(row, np.arange(len(ended)) == i) for i, row in enumerate(final) if ended[i] and isinstance(row, dict)]
        return obs, AutoReset(everywhere, ended, last_obs, known, steps, [(info, ended)])

    def _last_observations(self, obs: dict[str, Array], ended: Mask, info: dict[str, Any]) -> tuple[dict[str, Array], Mask]:
        key = next((k for k in ("final_obs", "final_observation") if info.get(k) is not None), None)
        if key is None:
            return obs, ~ended
        raw, given = info[key], np.asarray(info.get(f"_{key}", ended), dtype=bool)
        if isinstance(raw, list) or (isinstance(raw, np.ndarray) and raw.dtype == object):
            last, known = {k: v.copy() for k, v in obs.items()}, ~ended
            for row in np.flatnonzero(ended & given):
                if raw[row] is None:
                    continue
                known[row] = True
                for k, v in self._convert_one(raw[row]).items():
                    last[k][row] = v
            return last, known
        return self.convert(raw), ~ended | given
