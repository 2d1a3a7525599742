"""T-Maze in PyTorch: thousands of corridors on one device."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import torch
from torch import Tensor


class DeviceTMaze(gym.vector.VectorEnv):
    """A passive T-Maze with ``num_envs`` rows, whose `reset` and `step` take and return tensors on ``device``.

    The first observation shows a sign, +1 or -1; at the end of a corridor of ``length`` steps the agent must turn to that side. Observation,
    Box (3,): the sign in the first step, 1 at the junction, and the fraction of the corridor that is behind. Actions, Discrete(4): ahead,
    back, left (sign +1), right (sign -1). Every step in the corridor that does not lead ahead costs 1 / length; the right turn at the
    junction earns 1. A rollout terminates with a turn at the junction and is truncated after ``length + 1`` steps.
    """

    metadata = {"autoreset_mode": gym.vector.AutoresetMode.SAME_STEP, "arrays": "torch"}

    def __init__(self, num_envs: int, length: int = 20, device: torch.device | str = "cpu") -> None:
        self.num_envs, self.length, self.device, self.horizon = num_envs, length, torch.device(device), length + 1
        self.single_observation_space = gym.spaces.Box(-1.0, 1.0, (3,), np.float32)
        self.single_action_space = gym.spaces.Discrete(4)
        self.observation_space = gym.vector.utils.batch_space(self.single_observation_space, num_envs)
        self.action_space = gym.vector.utils.batch_space(self.single_action_space, num_envs)
        self._signs = np.random.default_rng()

    def _new_signs(self) -> Tensor:
        """Signs of the next rollouts of all rows; the host draws those of 64 steps at once, so that a step has no copy of its own."""
        if not self._drawn:
            drawn = torch.from_numpy(self._signs.integers(2, size=(64, self.num_envs), dtype=np.int8))
            drawn = drawn.pin_memory() if self.device.type == "cuda" else drawn
            self._drawn = list((2 * drawn.to(self.device, non_blocking=True).float() - 1).unbind(0))
        return self._drawn.pop()

    def _observe(self) -> Tensor:
        sign = torch.where(self._time == 0, self._sign, 0.0)
        return torch.stack((sign, (self._place == self.length).float(), self._place / self.length), 1)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Tensor, dict[str, Any]]:
        if seed is not None:
            self._signs = np.random.default_rng(seed)
        self._drawn: list[Tensor] = []
        self._time, self._place = torch.zeros((2, self.num_envs), dtype=torch.int64, device=self.device)
        self._sign = self._new_signs()
        return self._observe(), {}

    def step(self, actions: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, dict[str, Any]]:
        at_junction = self._place == self.length
        turned = at_junction & (actions >= 2)
        won = turned & ((actions == 2) == (self._sign > 0))
        ahead = (actions == 0).long() - (actions == 1).long()
        reward = torch.where(at_junction | (ahead > 0), 0.0, -1.0 / self.length) + won.float()
        self._place, self._time = (self._place + ahead).clamp(0, self.length), self._time + 1
        truncated = (self._time >= self.horizon) & ~turned
        ended, last = turned | truncated, self._observe()
        self._place, self._time = (x.masked_fill(ended, 0) for x in (self._place, self._time))
        self._sign = torch.where(ended, self._new_signs(), self._sign)
        info = {"final_obs": last, "final_info": {"AMAGO_LOG_METRIC Success": won.float()}}
        return self._observe(), reward, turned, truncated, info
