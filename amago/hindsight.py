"""Steps and trajectories as scripts handle them, and relabelers of trajectories (numpy only)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from amago.data.trajectory import FrozenTraj, StoredTraj, rl2
from amago.relabeling import NoOpRelabeler, Relabeler
from amago.spaces import ActionSpec

__all__ = [
    "FrozenTraj", "NoOpRelabeler", "Relabeler", "StoredTraj", "Timestep", "Trajectory", "TrajectoryBuilder",
    "split_batched_timestep",
]  # fmt: skip

Array = NDArray[Any]
PolicyInput = tuple[dict[str, Array], NDArray[np.float32], NDArray[np.int64]]
"""Observations {key: (B, ...)}, rl2 (B, 1 + A) and time indices (B, 1); in a sequence (1, L, ...)."""
_FIELDS = ("prev_action", "reward", "time_idx", "terminal")  # of a timestep, with a row for each environment


@dataclass
class Timestep:
    """One step as the policy observes it, with a leading batch dimension B = ``batched_envs``.

    Attributes:
        obs: {key: (B, ...)}.
        prev_action: (B, A), the vector form of the action that caused ``obs``; zeros at time 0. One-hots are uint8, the rest
            float32.
        reward: (B,) float32, the reward that arrived with ``obs``; zero at time 0.
        time_idx: (B,) int64, index of the step in its rollout.
        terminal: (B,) bool, the environment terminated here (never: was truncated).
        batched_envs: B.
    """

    obs: dict[str, Array]
    prev_action: Array
    reward: NDArray[np.float32]
    time_idx: NDArray[np.int64]
    terminal: NDArray[np.bool_]
    batched_envs: int = 1

    @property
    def rl2(self) -> NDArray[np.float32]:
        """(B, 1 + A): reward first, then the previous action."""
        return rl2(self.reward[:, None], self.prev_action)

    def as_input(self) -> PolicyInput:
        """The input of a policy: the observations, `rl2`, and the time indices (B, 1)."""
        return self.obs, self.rl2, self.time_idx[:, None]

    def create_reset_version(self, reset_idxs: NDArray[np.bool_]) -> Timestep:
        """A copy that opens a new rollout where ``reset_idxs`` (B,) is True: reward, time index, terminal and previous action are zero
        there. The observations are shared with this timestep.
        """
        changed: dict[str, Any] = {name: np.array(vars(self)[name]) for name in _FIELDS}
        for x in changed.values():
            x[np.asarray(reset_idxs, dtype=bool)] = 0
        return replace(self, **changed)


def split_batched_timestep(t: Timestep) -> list[Timestep]:
    """The B rows of a timestep, each a timestep with ``batched_envs`` = 1 whose arrays are views."""
    rows = [slice(i, i + 1) for i in range(t.batched_envs)]
    obs = [{k: v[at] for k, v in t.obs.items()} for at in rows]
    return [replace(t, obs=o, batched_envs=1, **{k: vars(t)[k][at] for k in _FIELDS}) for o, at in zip(obs, rows)]


class Trajectory:
    """The timesteps of one environment, each of one row, in order. `TrajectoryBuilder` makes trajectories from actions of the
    environment.
    """

    def __init__(self, timesteps: Iterable[Timestep] | None = None):
        self.timesteps: list[Timestep] = []
        for timestep in timesteps or ():
            self.add_timestep(timestep)

    def add_timestep(self, timestep: Timestep) -> None:
        """Append a timestep; ValueError if it has more than one row."""
        if timestep.batched_envs != 1:
            raise ValueError(f"the timestep has {timestep.batched_envs} rows; split_batched_timestep returns one for each")
        self.timesteps.append(timestep)

    def __len__(self) -> int:
        """The number of timesteps."""
        return len(self.timesteps)

    def __getitem__(self, i: int | slice) -> Any:
        return self.timesteps[i]

    def __iter__(self) -> Iterator[Timestep]:
        return iter(self.timesteps)

    def __repr__(self) -> str:
        return f"Trajectory({len(self)} timesteps, return={self.total_return:.6g})"

    @property
    def total_return(self) -> float:
        """The sum of all rewards."""
        return float(sum(float(np.sum(t.reward)) for t in self.timesteps))

    def as_input_sequence(self) -> PolicyInput:
        """The input of a policy: observations {key: (1, L, ...)}, rl2 (1, L, 1 + A) and time indices (1, L, 1)."""
        obs, rl2s, time_idxs = self._stacked()
        return {k: v[None] for k, v in obs.items()}, rl2s[None], time_idxs[None]

    def _stacked(self) -> PolicyInput:
        if not self.timesteps:
            raise ValueError("the trajectory has no timestep")
        inputs = [t.as_input() for t in self.timesteps]
        obs = {k: np.concatenate([o[k] for o, _, _ in inputs]) for k in inputs[0][0]}
        return obs, np.concatenate([r for _, r, _ in inputs]), np.concatenate([t for _, _, t in inputs])

    def freeze(self) -> FrozenTraj:
        """The arrays of a `FrozenTraj`: L timesteps, at least two, are L - 1 transitions."""
        if len(self) < 2:
            raise ValueError(f"a trajectory of {len(self)} timesteps has no transition: it needs two or more")
        obs, rl2s, time_idxs = self._stacked()
        dones = np.concatenate([np.asarray(t.terminal, dtype=bool).reshape(1, 1) for t in self.timesteps[1:]])
        return FrozenTraj(obs, rl2s, time_idxs, rl2s[1:, :1].copy(), dones, rl2s[1:, 1:].copy())

    def save_to_disk(self, path: str | Path, save_as: str = "npz") -> None:
        """Write the trajectory to one file, as the original system does: the arrays of `FrozenTraj.to_dict`, for `numpy.load`.

        Args:
            path: of the file; ".npz" is appended if it has another ending.
            save_as: "npz" or "npz-compressed"; the original's "trajectory" is a pickle, which runs code when it is loaded.
        """
        savers = {"npz": np.savez, "npz-compressed": np.savez_compressed}
        if save_as not in savers:
            raise ValueError(
                f"save_as is {save_as!r}, but must be one of {', '.join(map(repr, savers))} (amago writes no pickles)"
            )
        arrays: Any = self.freeze().to_dict()
        savers[save_as](path, **arrays)


@dataclass
class TrajectoryBuilder:
    """A rollout that grows by one step at a time, for scripts that build data by hand.

    ``start(obs)`` once, ``add(action, reward, terminated, obs)`` per step, then ``freeze()``.
    """

    spec: ActionSpec
    env_name: str = ""
    _obs: list[dict[str, Array]] = field(default_factory=list, repr=False)
    _actions: list[Array] = field(default_factory=list, repr=False)
    _rews: list[float] = field(default_factory=list, repr=False)
    _dones: list[bool] = field(default_factory=list, repr=False)

    def __len__(self) -> int:
        return len(self._rews)

    def start(self, obs: dict[str, Array]) -> TrajectoryBuilder:
        """Begin (or begin again) with the first observation, without a batch dimension."""
        self._obs, self._actions, self._rews, self._dones = [obs], [], [], []
        return self

    def add(self, action: object, reward: float, terminated: bool, obs: dict[str, Array]) -> None:
        """One transition: the environment's own action, its reward, whether it terminated, the next observation."""
        if not self._obs:
            raise ValueError("call start(first_observation) before add(...)")
        if self._dones and self._dones[-1]:
            raise ValueError("the trajectory has terminated; call start(...) to begin another")
        self._obs.append(obs)
        self._actions.append(self.spec.from_env(action))
        self._rews.append(float(reward))
        self._dones.append(bool(terminated))

    def to_stored(self) -> StoredTraj:
        """The form that is written to disk."""
        if not self._rews:
            raise ValueError("a trajectory needs at least one transition")
        return StoredTraj(
            obs={k: np.stack([np.asarray(o[k]) for o in self._obs]) for k in self._obs[0]},
            actions=np.stack(self._actions),
            rews=np.asarray(self._rews, dtype=np.float32)[:, None],
            dones=np.asarray(self._dones, dtype=bool)[:, None],
            env_name=self.env_name,
        )

    def freeze(self) -> FrozenTraj:
        """The arrays of a `FrozenTraj`."""
        return self.to_stored().derive(self.spec)
