"""A trained agent as a function from observations to actions that keeps its own memory."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
import torch
from numpy.typing import ArrayLike, DTypeLike, NDArray
from torch import Tensor

from amago.agent import BaseAgent
from amago.data.trajectory import rl2
from amago.policy.export import export_policy
from amago.policy.spec import describe_agent
from amago.run.checkpoint import save_weights
from amago.spaces import NonFiniteError, ObsReader, from_description

SUFFIXES = (".pt", ".safetensors")
"""Of files with a policy."""


class RowMemory(NamedTuple):
    """The memory of a policy for one environment: the sequence model's hidden state, the previous action (A,), and the time in the rollout."""

    hidden: object
    previous: NDArray[np.float32]
    time: int


class Policy:
    """A trained agent that acts with memory, in one environment or in several side by side. `load_policy` makes it.

    Args:
        agent: the trained agent; it is moved to ``device`` and put into evaluation mode.
        num_envs: B, the first dimension of every argument and of actions; None: one environment, without that dimension.
        sample: whether to draw actions from the policy; False takes its mode.
        device: where the networks compute.
        version: number of the published weights; 0 for weights that were never published.
        description: of the agent (`amago.policy.describe_agent`), from which its class, its settings and the environment's observation
            space are read; None: of an agent that was built with the gin bindings now in force.

    Attributes:
        action_space: the environment's, which actions belong to.
        observation_space: the converted observations, a flat Dict of arrays, as `amago.envs.AMAGOEnv` gives them.
        raw_observation_space: the environment's own; ``observation_space`` where it is not known (files of earlier versions).
        hides_rewards: the agent does not see rewards: its timestep encoder has ``hide_rl2s=True``.
        version: see above. A run raises it each time that it publishes its policy.
    """

    def __init__(
        self,
        agent: BaseAgent,
        num_envs: int | None,
        sample: bool,
        device: torch.device | str,
        version: int = 0,
        description: Mapping[str, Any] | None = None,
    ):
        self.version = version
        self.description = dict(describe_agent(agent) if description is None else description)
        self.agent = agent.to(device).eval()
        self.num_envs, self.sample, self.device = num_envs, sample, torch.device(device)
        self.action_space, self.observation_space = agent.action_space, agent.obs_space
        raw = self.description.get("raw_observation_space")
        self.raw_observation_space: gym.Space[Any] = agent.obs_space if raw is None else from_description(raw)
        self.hides_rewards = agent.tstep_encoder.hide_rl2s
        self._read = ObsReader(agent.obs_space, self.raw_observation_space, num_envs)
        self.reset()

    def reset(self) -> None:
        """Clear the memory of every environment: the next observations begin new rollouts."""
        n = self.num_envs or 1
        self._memory = self.agent.init_hidden_state(n, self.device)
        self._prev = np.zeros((n, self.agent.action_spec.dim), dtype=np.float32)
        self._time = np.zeros((n, 1), dtype=np.int64)

    def __repr__(self) -> str:
        agent, rows = self.agent, "one environment" if self.num_envs is None else f"{self.num_envs} environments"
        parts = " -> ".join(type(part).__name__ for part in (agent.tstep_encoder, agent.traj_encoder))
        count = sum(p.numel() for p in agent.parameters())
        how = "actions sampled" if self.sample else "the most likely actions"
        return f"<{type(self).__name__} {type(agent).__name__}: {parts}, {count:,} parameters on {self.device}; {rows}, {self.action_space}, {how}>"

    def memory(self, row: int = 0) -> RowMemory:
        """A copy of the policy's memory for an environment, the only one or number ``row``; `set_memory` restores it."""
        return RowMemory(copy.deepcopy(self._row(row)), self._prev[row].copy(), int(self._time[row, 0]))

    def set_memory(self, memory: RowMemory, row: int = 0) -> None:
        """Let an environment go on from a `memory` of the same agent, taken of any row. A ValueError if it is of another agent."""
        hidden = self._row(row)
        if memory.previous.shape != self._prev[row].shape:
            raise ValueError(f"the memory holds an action of {memory.previous.shape}, the agent's are {self._prev[row].shape}")
        _fill(hidden, memory.hidden)
        self._prev[row], self._time[row, 0] = memory.previous, memory.time

    def _row(self, row: int) -> Any:
        """The hidden state of an environment, which shares storage."""
        rows = self.num_envs or 1
        if not 0 <= row < rows:
            raise ValueError(f"row must be from 0 to {rows - 1}, got {row!r}")
        return self._memory if rows == 1 else self.agent.slice_hidden_state(self._memory, row, row + 1)

    @property
    def gammas(self) -> tuple[float, ...]:
        """The discounts that the agent has a policy for: the valid values of ``load_policy(..., gamma=...)``."""
        return discounts(self.agent)

    @property
    def gamma(self) -> float | None:
        """The discount whose policy acts; None for an agent without discounts."""
        gammas = self.gammas
        return gammas[self.agent.rollout_gamma_idx] if gammas else None  # type: ignore[index]

    def export(self, path: str | Path) -> Path:
        """Write one step of the policy, (observation, memory) -> (action, memory), for programs without amago.

        `amago.policy.export.export_policy` lists inputs, outputs and errors. The action is the mode of the policy.

        Args:
            path: ends in ``.onnx`` (for onnxruntime) or ``.pt2`` (for ``torch.export.load``); it is returned.
        """
        return export_policy(self.agent, path)

    def save(self, path: str | Path) -> Path:
        """Write the policy to one file, which `amago.load_policy` loads wherever it is copied.

        Its memory is not part of it. The discount that acts is.

        Args:
            path: ends in ``.pt`` (a PyTorch state dict, its description among the metadata that PyTorch keeps with it) or
                ``.safetensors`` (its description in the header); it is returned.

        Raises:
            ValueError: the path has another suffix.
        """
        path = Path(path).expanduser()
        if path.suffix not in SUFFIXES:
            raise ValueError(f"path={str(path)!r} must end in {' or '.join(SUFFIXES)}; `Policy.export` writes .onnx and .pt2")
        save_weights(self.agent.state_dict(), path, self.version, self.full_description())
        return path

    def full_description(self) -> dict[str, Any]:
        """The description with the discount that acts, as files of policies hold it."""
        return self.description | ({} if self.gamma is None else {"gamma": self.gamma})

    def act(
        self, obs: object, reward: ArrayLike | None = None, done: ArrayLike | None = None, deterministic: bool | None = None
    ) -> Any:
        """Choose an action, and remember the observation.

        Args:
            obs: the environment's observation, or {key: array} of ``observation_space``. If ``num_envs`` was given, a batch:
                arrays with B rows in that structure, as Gymnasium's vector environments return them (of a Tuple space, a
                tuple), or a list of B observations. Where there is only one key, the array alone will do.
            reward: of the last action, (B,), or one number for all; it is ignored in the first step of a rollout. It may be left out in
                that step, and always if `hides_rewards`. Pass ``reward=0.0`` where there is no reward to observe.
            done: (B,) bool, or one for all: True where ``obs`` is the first of a new rollout: the memory, time and reward of that row
                are cleared. None: nowhere (the first call, and the first after `reset`, begin new rollouts without it).
            deterministic: take the mode of the policy; False: draw from it; None: as ``sample`` says.

        Returns:
            an action of ``action_space``; (B, ...) if ``num_envs`` was given.

        Raises:
            ValueError: a key of ``obs`` is missing or unknown, an array has the wrong shape or dtype, or the reward of the last action
                is missing. The memory is as before the call.
            NonFiniteError: an observation or a reward is NaN or infinite.
        """
        arrays = self._read(obs)
        dones = self._column("done", False if done is None else done, bool)[:, 0]
        first = dones | (self._time[:, 0] == 0)
        rewards = self._rewards(reward, first)
        if dones.any():
            self._memory = self.agent.reset_hidden_state(self._memory, dones)
            self._prev[dones], self._time[dones] = 0.0, 0
        rl2s = rl2(rewards, self._prev)
        tensors = {k: self._tensor(v) for k, v in arrays.items()}
        steps = tensors, self._tensor(rl2s), self._tensor(self._time)
        sample = self.sample if deterministic is None else not deterministic
        stored, self._memory = self.agent.get_actions(*steps, self._memory, sample)
        actions = stored.cpu().numpy()
        self._prev = self.agent.action_spec.to_vector(actions)
        self._time += 1
        return self.agent.action_spec.to_env(actions if self.num_envs else actions[0])

    def _rewards(self, reward: ArrayLike | None, first: NDArray[np.bool_]) -> NDArray[np.float32]:
        """Rewards (B, 1) as networks read them: 0 in rows that are ``first`` (B,), in which a rollout begins."""
        late = np.flatnonzero(~first)
        if reward is None:
            if len(late) and not self.hides_rewards:
                where = f"step {int(self._time[late[0], 0])} of its rollout" + (f" in row {late[0]}" if self.num_envs else "")
                raise ValueError(
                    f"reward is missing: the policy observes the reward of its last action, and this is {where}, counted from 0. Pass "
                    "what env.step() returned, policy.act(obs, reward), or reward=0.0 if there is none; if obs is the first of a new "
                    "rollout, pass done=True, or call policy.reset() before"
                )
            return np.zeros((len(first), 1), np.float32)
        rewards = self._column("reward", reward, np.float32)
        rewards[first] = 0.0
        if not np.isfinite(rewards).all():
            raise NonFiniteError(f"reward is {reward!r}; rewards must be finite in float32")
        return rewards

    def _column(self, name: str, value: object, dtype: DTypeLike) -> NDArray[Any]:
        """One value a row, (B, 1), of an array (B,), (B, 1) or one number."""
        n = self.num_envs or 1
        try:
            return np.broadcast_to(np.asarray(value, dtype).reshape(-1, 1), (n, 1)).copy()
        except (TypeError, ValueError):
            what = f"one value for each of {n} environments" if self.num_envs else "one number"
            raise ValueError(f"{name} is {value!r}, it must be {what}") from None

    def _tensor(self, array: NDArray[Any]) -> Tensor:
        return torch.from_numpy(array.copy()).to(self.device)


def _fill(into: Any, source: Any) -> None:
    """Copy the tensors and arrays of a hidden state into those of another of the same agent."""
    arrays, parts = isinstance(into, Tensor | np.ndarray), isinstance(into, Mapping | list | tuple)
    if type(into) is not type(source) or (arrays and into.shape != source.shape) or (parts and len(into) != len(source)):
        raise ValueError("the memory is of another agent: its hidden state has other parts or sizes")
    if arrays:
        into[...] = source
    elif parts:
        for key in into if isinstance(into, Mapping) else range(len(into)):
            _fill(into[key], source[key])
    elif isinstance(getattr(into, "__dict__", None), dict):
        _fill(vars(into), vars(source))


# ---- discounts -------------------------------------------------------------------------------------------------------------


def discounts(agent: BaseAgent) -> tuple[float, ...]:
    """The discounts that an agent has a policy for, in its order; () for an agent without an attribute ``gammas``."""
    gammas = getattr(agent, "gammas", None)
    return () if gammas is None else tuple(round(float(g), 6) for g in gammas)


def choose_discount(agent: BaseAgent, gamma: float) -> None:
    """Let the policy of one of the agent's discounts act from now on; ValueError if it has no such discount."""
    known = discounts(agent)
    near = [i for i, g in enumerate(known) if abs(g - gamma) < 1e-6]
    if not near:
        raise ValueError(
            f"gamma={gamma} is none of the discounts of the {type(agent).__name__}: {', '.join(map(str, known)) or 'none'}"
        )
    agent.rollout_gamma_idx = near[-1]  # type: ignore[assignment]


@contextmanager
def acting_by(agent: BaseAgent, gamma: float | None) -> Iterator[None]:
    """Let the policy of another of the agent's discounts act within the block; None changes nothing."""
    before: Any = agent.rollout_gamma_idx if discounts(agent) else None
    if gamma is not None:
        choose_discount(agent, gamma)
    try:
        yield
    finally:
        if gamma is not None:
            agent.rollout_gamma_idx = before
