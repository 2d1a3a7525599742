"""PointRobot in PyTorch: thousands of robots on one device."""

from __future__ import annotations

import math
from typing import Any

import gymnasium as gym
import torch
from torch import Tensor

from support.point_robot import PointRobot


class DevicePointRobot(gym.vector.VectorEnv):
    """``num_envs`` rows of `support.point_robot.PointRobot`, whose `reset` and `step` take and return tensors on ``device``.

    Metrics come with the end of a rollout. Other arguments: as there.

    Attributes:
        goals: (B, 2), of the present rollouts.
    """

    metadata = {"autoreset_mode": gym.vector.AutoresetMode.SAME_STEP, "arrays": "torch"}

    def __init__(self, num_envs: int, *args: Any, device: torch.device | str = "cpu", **kwargs: Any) -> None:
        robot = PointRobot(*args, **kwargs)
        self.k_episodes, self.episode_length, self.final_only = robot.k_episodes, robot.episode_length, robot.final_only
        self.goal_region, self.step_size, self.horizon = robot.goal_region, robot.step_size, robot.horizon
        self.num_envs, self.device = num_envs, torch.device(device)
        self.single_observation_space, self.single_action_space = robot.observation_space, robot.action_space
        self.observation_space = gym.vector.utils.batch_space(robot.observation_space, num_envs)
        self.action_space = gym.vector.utils.batch_space(robot.action_space, num_envs)
        self._numbers = torch.Generator()

    def _new_goals(self) -> Tensor:
        """Goals of the next rollouts of all rows; the host draws those of 64 steps at once, so that a step has no copy of its own."""
        if not self._drawn:
            drawn = torch.rand((64, self.num_envs, 2), generator=self._numbers)
            drawn = drawn.pin_memory() if self.device.type == "cuda" else drawn
            drawn = drawn.to(self.device, non_blocking=True)
            if self.goal_region == "square":
                drawn = 2.0 * drawn - 1.0
            else:
                angle = drawn[..., 0] * math.pi * (1 if self.goal_region == "semicircle" else 2)
                drawn = torch.stack((angle.cos(), angle.sin()), -1)
            self._drawn = list(drawn.unbind(0))
        return self._drawn.pop()

    def _observe(self) -> Tensor:
        counts = torch.stack((self._steps / self.episode_length, self._attempt / self.k_episodes), 1)
        return torch.cat((self._place, counts), 1)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Tensor, dict[str, Any]]:
        if seed is not None:
            self._numbers.manual_seed(seed)
        self._drawn: list[Tensor] = []
        self.goals = self._new_goals()
        self._place = torch.zeros((self.num_envs, 2), device=self.device)
        self._steps, self._attempt = torch.zeros((2, self.num_envs), dtype=torch.int64, device=self.device)
        self._distances, self._returns = torch.zeros((2, self.num_envs, self.k_episodes), device=self.device)  # of each attempt
        self._reset_due = torch.zeros(self.num_envs, dtype=torch.bool, device=self.device)
        return self._observe(), {}

    def step(self, actions: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, dict[str, Any]]:
        due = self._reset_due
        self._place = (self._place + self.step_size * actions).masked_fill(due[:, None], 0.0)
        self._steps = (self._steps + 1).masked_fill(due, 0)
        distance, over = torch.linalg.vector_norm(self._place - self.goals, dim=1), self._steps == self.episode_length
        reward = torch.where(over, -distance, 0.0) if self.final_only else -distance
        now = torch.arange(self.k_episodes, device=self.device) == self._attempt[:, None]
        self._returns = self._returns + now * reward[:, None]
        self._distances = torch.where(now & over[:, None], distance[:, None], self._distances)
        self._attempt = self._attempt + over
        terminated = self._attempt == self.k_episodes
        begin = over & ~terminated
        if self.final_only:
            self._reset_due = begin
        else:
            self._place, self._steps = self._place.masked_fill(begin[:, None], 0.0), self._steps.masked_fill(begin, 0)
        logged = {}
        for i in range(self.k_episodes):
            logged[f"AMAGO_LOG_METRIC Attempt {i} Final Distance"] = self._distances[:, i]
            logged[f"AMAGO_LOG_METRIC Attempt {i} Return"] = self._returns[:, i]
        info = {"final_obs": self._observe(), "final_info": logged}
        self._steps, self._attempt = (x.masked_fill(terminated, 0) for x in (self._steps, self._attempt))
        self._place, self._returns = (x.masked_fill(terminated[:, None], 0.0) for x in (self._place, self._returns))
        self.goals = torch.where(terminated[:, None], self._new_goals(), self.goals)
        return self._observe(), reward, terminated, torch.zeros_like(terminated), info
