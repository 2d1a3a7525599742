"""A trained agent as a function from observations to actions that keeps its own memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from amago.agent import BaseAgent
from amago.data.trajectory import rl2
from amago.policy.discount import discounts
from amago.policy.export import export_policy


class Policy:
    """A trained agent that acts with memory, in one environment or in several side by side. `load_policy` makes it.

    Args:
        agent: the trained agent; it is moved to ``device`` and put into evaluation mode.
        num_envs: B, the first dimension of every argument and of actions; None: one environment, without that dimension.
        sample: whether to draw actions from the policy; False takes its mode.
        device: where the networks compute.
        version: number of the published weights; 0 for weights that were never published.

    Attributes:
        action_space: the environment's, which actions belong to.
        observation_space: the Dict of arrays that `act` takes, as `amago.envs.AMAGOEnv` gives them.
        version: see above. A run raises it each time that it publishes its policy.
    """

    def __init__(self, agent: BaseAgent, num_envs: int | None, sample: bool, device: torch.device | str, version: int = 0):
        self.version = version
        self.agent = agent.to(device).eval()
        self.num_envs, self.sample, self.device = num_envs, sample, torch.device(device)
        self.action_space, self.observation_space = agent.action_space, agent.obs_space
        self.reset()

    def reset(self) -> None:
        """Clear the memory of every environment: the next observations begin new rollouts."""
        n = self.num_envs or 1
        self._memory = self.agent.init_hidden_state(n, self.device)
        self._prev = np.zeros((n, self.agent.action_spec.dim), dtype=np.float32)
        self._time = np.zeros((n, 1), dtype=np.int64)

    @property
    def gammas(self) -> tuple[float, ...]:
        """The discounts that the agent has a policy for: what ``load_policy(..., gamma=...)`` may be given."""
        return discounts(self.agent)

    @property
    def gamma(self) -> float | None:
        """The discount whose policy acts; None for an agent without discounts."""
        gammas = self.gammas
        return gammas[self.agent.rollout_gamma_idx] if gammas else None  # type: ignore[index]

    def export(self, path: str | Path) -> Path:
        """Write one step of the policy, (observation, memory) -> (action, memory), for programs without amago.

        The step takes any number of environments. It returns the mode of the policy, and the parameters of the distribution.

        Args:
            path: ends in ``.onnx`` (for onnxruntime) or ``.pt2`` (for ``torch.export.load``). `amago.policy.export.export_policy`
                lists the inputs and outputs.

        Returns:
            the path.

        Raises:
            ValueError: the path has another suffix, or the agent cannot be exported.
            ImportError: the packages that ONNX needs are missing (``pip install 'amago[export]'``).
        """
        return export_policy(self.agent, path)

    def act(self, obs: Any, reward: ArrayLike | None = None, done: ArrayLike | None = None) -> Any:
        """Choose an action, and remember the observation.

        Args:
            obs: {key: array} of ``observation_space``, each (B, ...) if ``num_envs`` was given; an array alone where there is one key.
            reward: of the last action, (B,); None at the first step.
            done: (B,) bool, True where ``obs`` is the first of a new rollout: the memory, time and reward of that row are cleared.

        Returns:
            an action of ``action_space``; (B, ...) if ``num_envs`` was given.

        Raises:
            ValueError: a key of ``obs`` is missing or unknown, or an array has the wrong shape.
        """
        n = self.num_envs or 1
        arrays = self._arrays(obs)
        rewards = np.zeros((n, 1), np.float32) if reward is None else np.asarray(reward, np.float32).reshape(n, 1).copy()
        dones = np.zeros(n, bool) if done is None else np.asarray(done, bool).reshape(n)
        if dones.any():
            self._memory = self.agent.reset_hidden_state(self._memory, dones)
            self._prev[dones], self._time[dones], rewards[dones] = 0.0, 0, 0.0
        rl2s = rl2(rewards, self._prev)
        stored, self._memory = self.agent.get_actions(
            {k: self._tensor(v) for k, v in arrays.items()},
            self._tensor(rl2s),
            self._tensor(self._time),
            self._memory,
            self.sample,
        )
        actions = stored.cpu().numpy()
        self._prev = self.agent.action_spec.to_vector(actions)
        self._time += 1
        return self.agent.action_spec.to_env(actions if self.num_envs else actions[0])

    def _tensor(self, array: NDArray[Any]) -> Tensor:
        return torch.from_numpy(array.copy()).to(self.device)

    def _arrays(self, obs: Any) -> dict[str, NDArray[Any]]:
        """``obs`` as {key: (B, ...)} of the right dtypes and shapes."""
        spaces = self.observation_space.spaces
        if not isinstance(obs, dict):
            if len(spaces) != 1:
                raise ValueError(f"obs must be a dict with keys {sorted(spaces)}, got {type(obs).__name__}")
            obs = {next(iter(spaces)): obs}
        if obs.keys() != spaces.keys():
            raise ValueError(f"obs has keys {sorted(obs)}, the policy was trained with {sorted(spaces)}")
        out, batch = {}, (self.num_envs,) if self.num_envs else ()
        for key, space in spaces.items():
            array = np.asarray(obs[key], dtype=space.dtype)
            want = (*batch, *(space.shape or ()))
            if array.shape != want:
                raise ValueError(f"obs[{key!r}] has shape {array.shape}, it must be {want}")
            out[key] = array if batch else array[None]
        return out
