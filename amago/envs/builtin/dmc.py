"""DeepMind Control through shimmy, with one flat vector for an observation (Tassa et al. 2018, arXiv:1801.00690)."""

from __future__ import annotations

import difflib
import warnings
from typing import Any

import gin
import gymnasium as gym
import numpy as np
from numpy.typing import NDArray

from amago.envs.builtin import _common as common
from amago.envs.builtin._extras import require

Observation = NDArray[np.float32]

PREFIX = "dm_control/"


@gin.configurable(module="amago.envs.builtin")
class DeepMindControl(gym.Env[Observation, NDArray[np.floating[Any]]]):
    """A task of the DeepMind Control Suite. Rewards are in [0, 1] a step; an episode has 1000 steps, fewer for some tasks.

    Observation, float32 ``(n,)``: all that the task shows, flattened in the order of its observation space. Actions: as the task has
    them, a Box from -1 to 1. The end of the time is a truncation, as upstream has it: the value of what follows counts.

    Args:
        name: "cartpole-balance", or its Gymnasium id "dm_control/cartpole-balance-v0".
        max_episode_steps: truncate after so many steps; None: where the task ends.
        render_mode: of shimmy (pictures need ``MUJOCO_GL=osmesa`` or ``egl``, set before the start, where there is no display).

    Attributes:
        horizon: the longest an episode can be.
        env_name: its Gymnasium id.

    Raises:
        ImportError: shimmy or dm_control is not installed (``pip install 'amago[dmc]'``).
        TypeError, ValueError: there is no such task, or a number is out of range; the message quotes it.
    """

    def __init__(self, name: str, max_episode_steps: int | None = None, render_mode: str | None = None) -> None:
        if max_episode_steps is not None:
            max_episode_steps = common.check_int("max_episode_steps", max_episode_steps, 1)
        require("dm_control", "dmc")
        gym.register_envs(require("shimmy", "dmc"))
        self.env_name = name if name.startswith(PREFIX) else f"{PREFIX}{name}-v0"
        known = [env_id for env_id in gym.registry if env_id.startswith(PREFIX) and "compatibility" not in env_id]
        if self.env_name not in known:
            near = difflib.get_close_matches(self.env_name, known)
            raise ValueError(
                f"there is no task {name!r} in DeepMind Control" + (f"; there is {', '.join(near)}" if near else "")
            )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of a missing display
            self._env: gym.Env[Any, Any] = gym.make(self.env_name, disable_env_checker=True, render_mode=render_mode)
        self.render_mode, self.metadata = render_mode, self._env.metadata
        limit = float(getattr(self._env.unwrapped._env, "_step_limit", np.inf))  # type: ignore[attr-defined]
        own = int(limit) if np.isfinite(limit) else None
        limits = [n for n in (own, max_episode_steps) if n is not None]
        self.horizon = min(limits) if limits else None
        shown = self._env.observation_space
        if not isinstance(shown, gym.spaces.Dict):
            raise ValueError(f"the task {name!r} does not show a dict of arrays, but {shown}")
        self._keys = list(shown.spaces)
        size = sum(int(np.prod(space.shape or ())) for space in shown.spaces.values())
        self.observation_space = gym.spaces.Box(-np.inf, np.inf, shape=(size,), dtype=np.float32)
        self.action_space = self._env.action_space
        self._steps: int | None = None  # None: no episode is under way

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Observation, dict[str, Any]]:
        super().reset(seed=seed)
        # seeded each time, so that an episode depends on the generator of this environment alone
        obs, _ = self._env.reset(seed=int(self.np_random.integers(2**31)))
        self._steps = 0
        return self._flat(obs), {}

    def step(self, action: Any) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        if self._steps is None:
            common.refuse_step("DeepMindControl")
        obs, reward, terminated, truncated, _ = self._env.step(action)
        self._steps += 1
        truncated = bool(truncated or (self._steps == self.horizon and not terminated))
        if terminated or truncated:
            self._steps = None
        return self._flat(obs), float(reward), bool(terminated), truncated, {}

    def _flat(self, obs: dict[str, Any]) -> Observation:
        return np.concatenate([np.ravel(obs[key]) for key in self._keys]).astype(np.float32)

    def render(self) -> Any:
        return self._env.render()

    def close(self) -> None:
        self._env.close()
