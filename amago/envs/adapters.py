"""Vectorised environments of other libraries as `AMAGOEnv`, with ``env_mode="already_vectorized"``; neither library is imported."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import gymnasium as gym
import numpy as np

from amago.envs.amago_env import AMAGOEnv


def from_sb3_vec_env(vec_env: Any, env_name: str) -> AMAGOEnv:
    """A ``VecEnv`` of Stable-Baselines3, each of whose ``num_envs`` environments is a row.

    ``TimeLimit.truncated`` in an info makes the end of a rollout a truncation, and ``terminal_observation`` is its last observation.
    """
    return AMAGOEnv(_SB3Rows(vec_env), env_name=env_name, batched_envs=vec_env.num_envs)


def from_pettingzoo(parallel_env: Any, env_name: str) -> AMAGOEnv:
    """An environment of PettingZoo's parallel API, each of whose agents is a row: one policy acts for all of them.

    A rollout ends for all agents together, once the environment has none left. An agent that ended before them keeps its last
    observation and gets no reward until then.

    Raises:
        ValueError: the agents have different spaces, or one does not begin with the others.
    """
    rows = _Agents(parallel_env)
    return AMAGOEnv(rows, env_name=env_name, batched_envs=rows.num_envs)


class _Rows(gym.vector.VectorEnv[Any, Any, Any]):
    """Rows that another environment resets by itself, in the step that ends a rollout."""

    metadata = {"autoreset_mode": gym.vector.AutoresetMode.SAME_STEP}

    def __init__(self, env: Any, rows: int, observation_space: gym.Space[Any], action_space: gym.Space[Any]):
        self.env, self.num_envs = env, rows
        self.single_observation_space, self.single_action_space = observation_space, action_space
        self.observation_space = gym.vector.utils.batch_space(observation_space, rows)
        self.action_space = gym.vector.utils.batch_space(action_space, rows)

    def close_extras(self, **kwargs: object) -> None:
        self.env.close()


class _SB3Rows(_Rows):
    def __init__(self, env: Any):
        super().__init__(env, env.num_envs, env.observation_space, env.action_space)

    def reset(self, *, seed: Any = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        if seed is not None:
            self.env.seed(int(seed if np.ndim(seed) == 0 else seed[0]))  # row i has this number plus i
        return self.env.reset(), {}

    def step(self, actions: object) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        obs, rewards, ended, infos = self.env.step(actions)
        truncated = np.array([bool(info.get("TimeLimit.truncated")) for info in infos]) & ended
        info: dict[str, Any] = {}
        if ended.any():
            info = {"final_obs": [i.get("terminal_observation") for i in infos], "_final_obs": ended}
        return obs, rewards, ended & ~truncated, truncated, info


class _Agents(_Rows):
    def __init__(self, env: Any):
        self.agents: Sequence[str] = list(env.possible_agents)
        spaces = [(env.observation_space(agent), env.action_space(agent)) for agent in self.agents]
        for agent, found in zip(self.agents, spaces):
            if found != spaces[0]:
                raise ValueError(
                    f"one policy acts for all agents, so their spaces must be equal: {self.agents[0]!r} has {spaces[0]}, {agent!r} has {found}"
                )
        super().__init__(env, len(self.agents), *spaces[0])

    def reset(self, *, seed: Any = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        self._last, _ = self.env.reset(seed=None if seed is None else int(np.ravel(seed)[0]), options=options)
        if missing := [agent for agent in self.agents if agent not in self._last]:
            raise ValueError(f"every agent must begin a rollout, but reset() returned no observation of {missing}")
        self._terminated: dict[str, bool] = {}
        return self._batch(), {}

    def _batch(self) -> Any:
        rows = [self._last[agent] for agent in self.agents]
        empty = gym.vector.utils.create_empty_array(self.single_observation_space, len(rows))
        return gym.vector.utils.concatenate(self.single_observation_space, rows, empty)

    def step(self, actions: object) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        each = gym.vector.utils.iterate(self.action_space, actions)
        chosen = {agent: action for agent, action in zip(self.agents, each) if agent in self.env.agents}
        obs, rewards, terminated, _, _ = self.env.step(chosen)
        self._last = {**self._last, **obs}
        self._terminated |= terminated
        over = not self.env.agents
        reward = np.array([rewards.get(agent, 0.0) for agent in self.agents], dtype=np.float64)
        batch, none = self._batch(), np.zeros(self.num_envs, bool)
        if not over:
            return batch, reward, none, none, {}
        ended = np.array([self._terminated.get(agent, False) for agent in self.agents])
        return self.reset()[0], reward, ended, ~ended, {"final_obs": batch, "_final_obs": ~none}
