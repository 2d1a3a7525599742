"""The DeepMind Control Suite, with observations as one vector, through shimmy (Tassa et al. 2018, arXiv:1801.00690)."""

from __future__ import annotations

import difflib
import warnings
from typing import Any

import gin
import gymnasium as gym
import numpy as np
from numpy.typing import NDArray

from amago.envs.builtin import _common as common
from amago.registry import require

Observation = NDArray[np.float32]

PREFIX = "dm_control/"


@gin.configurable(module="amago.envs.builtin")
class DeepMindControl(gym.Env[Observation, NDArray[np.floating[Any]]]):
    """A task of the DeepMind Control Suite.

    Observation, float32 ``(n,)``: the task's observations, flattened and concatenated in the order of its observation space.

    Actions: the task's own, a Box in [-1, 1].

    Reward: the task's own, in [0, 1]. An episode truncates at its step limit, which is 1000 for most tasks.

    Args:
        name: "cartpole-balance", or its Gymnasium id "dm_control/cartpole-balance-v0".
        max_episode_steps: truncate after this many steps; None means the task's own limit.
        render_mode: a render mode of shimmy. Without a display, set ``MUJOCO_GL=osmesa`` or ``egl`` before the process starts.

    Attributes:
        horizon: maximum steps per episode, None if there is no limit.
        env_name: the Gymnasium id.

    Raises:
        ImportError: shimmy or dm_control is not installed (``pip install 'amago[dmc]'``).
        TypeError, ValueError: there is no such task, or ``max_episode_steps`` has the wrong type or is out of range.
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
            warnings.simplefilter("ignore")  # that there is no display
            self._env: gym.Env[Any, Any] = gym.make(self.env_name, disable_env_checker=True, render_mode=render_mode)
        self.render_mode, self.metadata = render_mode, self._env.metadata
        limit = float(getattr(self._env.unwrapped._env, "_step_limit", np.inf))  # type: ignore[attr-defined]
        own = int(limit) if np.isfinite(limit) else None
        limits = [n for n in (own, max_episode_steps) if n is not None]
        self.horizon = min(limits) if limits else None
        observed = self._env.observation_space
        if not isinstance(observed, gym.spaces.Dict):
            raise ValueError(f"the observations of the task {name!r} must be a dict of arrays, got {observed}")
        self._keys = list(observed.spaces)
        size = sum(int(np.prod(space.shape or ())) for space in observed.spaces.values())
        self.observation_space = gym.spaces.Box(-np.inf, np.inf, shape=(size,), dtype=np.float32)
        self.action_space = self._env.action_space
        self._steps: int | None = None  # None: no episode is under way

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Observation, dict[str, Any]]:
        super().reset(seed=seed)
        # a new seed each time, so that an episode depends on this environment's generator alone
        obs, _ = self._env.reset(seed=int(self.np_random.integers(2**31)))
        self._steps = 0
        return self._flat(obs), {}

    def step(self, action: object) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
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
