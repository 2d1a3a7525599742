"""What happened: one step, one finished rollout, and relabelling it in hindsight (numpy only)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from amago.spaces import ActionSpec

Array = NDArray[Any]


@dataclass
class Timestep:
    """One step as the policy sees it, with a leading batch dimension B = ``batched_envs``.

    Attributes:
        obs: {key: (B, ...)}.
        prev_action: (B, A) float32, the vector form of the action that caused ``obs``; zeros at time 0.
        reward: (B, 1) float32, the reward that arrived with ``obs``; zero at time 0.
        time_idx: (B, 1) int64, index of the step in its rollout.
        terminal: (B, 1) bool, the environment terminated here (never: was truncated).
        batched_envs: B.
    """

    obs: dict[str, Array]
    prev_action: NDArray[np.float32]
    reward: NDArray[np.float32]
    time_idx: NDArray[np.int64]
    terminal: NDArray[np.bool_]
    batched_envs: int = 1

    @property
    def rl2(self) -> NDArray[np.float32]:
        """(B, 1 + A): reward first, then the previous action."""
        return np.concatenate((self.reward, self.prev_action), axis=-1, dtype=np.float32)


@dataclass
class FrozenTraj:
    """A finished rollout (or a piece of one) of T transitions, as arrays.

    Attributes:
        obs: {key: (T + 1, ...)}.
        rl2s: (T + 1, 1 + A) float32, reward then previous action.
        time_idxs: (T + 1, 1) int64.
        rews: (T, 1) float32.
        dones: (T, 1) bool, *terminated* only.
        actions: (T, A) float32, vector form.
    """

    obs: dict[str, Array]
    rl2s: NDArray[np.float32]
    time_idxs: NDArray[np.int64]
    rews: NDArray[np.float32]
    dones: NDArray[np.bool_]
    actions: NDArray[np.float32]

    def __len__(self) -> int:
        return int(self.rews.shape[0])

    def __repr__(self) -> str:
        return f"FrozenTraj(T={len(self)}, keys={list(self.obs)}, return={float(self.rews.sum()):.6g})"

    def validate(self) -> FrozenTraj:
        """Return self if the six fields fit together.

        Raises:
            ValueError: naming the field, its length and the right one.
        """
        t = len(self)
        lengths = {f"obs[{k!r}]": (len(v), t + 1) for k, v in self.obs.items()}
        lengths |= {"rl2s": (len(self.rl2s), t + 1), "time_idxs": (len(self.time_idxs), t + 1)}
        lengths |= {"dones": (len(self.dones), t), "actions": (len(self.actions), t)}
        for name, (have, want) in lengths.items():
            if have != want:
                raise ValueError(f"{name} has {have} rows; with {t} rewards it must have {want}")
        return self

    def slice(self, start: int, stop: int) -> FrozenTraj:
        """Transitions [start, stop) with the observation that follows the last of them."""
        return FrozenTraj(
            obs={k: v[start : stop + 1] for k, v in self.obs.items()},
            rl2s=self.rl2s[start : stop + 1],
            time_idxs=self.time_idxs[start : stop + 1],
            rews=self.rews[start:stop],
            dones=self.dones[start:stop],
            actions=self.actions[start:stop],
        )

    def to_stored(self, spec: ActionSpec, env_name: str = "") -> StoredTraj:
        """The form that is written to disk; rewards and actions are taken from ``rews`` and ``actions``."""
        return StoredTraj(
            obs=self.obs,
            actions=spec.from_vector(self.actions),
            rews=self.rews,
            dones=self.dones,
            start_time=int(self.time_idxs[0, 0]),
            prev_reward=float(self.rl2s[0, 0]),
            prev_action=spec.from_vector(self.rl2s[0, 1:]),
            env_name=env_name,
        )


@dataclass
class StoredTraj:
    """What is kept of a rollout on disk: nothing that can be derived from the rest.

    Attributes:
        obs: {key: (T + 1, ...)}, any dtype.
        actions: (T, S), stored form of `amago.spaces.ActionSpec`.
        rews: (T, 1) float32.
        dones: (T, 1) bool, terminated only.
        start_time: time index of the first observation (0 unless a rollout was saved in pieces).
        prev_reward, prev_action: what arrived with the first observation; used only where ``start_time > 0``.
        env_name: the environment's name during this rollout.
    """

    obs: dict[str, Array]
    actions: Array
    rews: NDArray[np.float32]
    dones: NDArray[np.bool_]
    start_time: int = 0
    prev_reward: float = 0.0
    prev_action: Array | None = None
    env_name: str = ""

    def __len__(self) -> int:
        return int(self.rews.shape[0])

    def slice(self, start: int, stop: int) -> StoredTraj:
        """A copy of transitions [start, stop), with the observation after the last and what arrived with the first."""
        return StoredTraj(
            obs={k: v[start : stop + 1].copy() for k, v in self.obs.items()},
            actions=self.actions[start:stop].copy(),
            rews=self.rews[start:stop].copy(),
            dones=self.dones[start:stop].copy(),
            start_time=self.start_time + start,
            prev_reward=float(self.rews[start - 1, 0]) if start else self.prev_reward,
            prev_action=self.actions[start - 1].copy() if start else self.prev_action,
            env_name=self.env_name,
        )

    def derive(self, spec: ActionSpec) -> FrozenTraj:
        """Add ``rl2s`` and ``time_idxs``, and turn actions into vectors."""
        t = len(self)
        vectors = spec.to_vector(self.actions)
        rl2s = np.zeros((t + 1, 1 + spec.dim), dtype=np.float32)
        rl2s[1:, :1] = self.rews
        rl2s[1:, 1:] = vectors
        if self.start_time > 0:
            rl2s[0, 0] = self.prev_reward
            if self.prev_action is not None:
                rl2s[0, 1:] = spec.to_vector(np.asarray(self.prev_action).reshape(-1))
        time_idxs = np.arange(self.start_time, self.start_time + t + 1, dtype=np.int64)[:, None]
        return FrozenTraj(self.obs, rl2s, time_idxs, self.rews, self.dones, vectors)


@dataclass
class Trajectory:
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

    def start(self, obs: dict[str, Array]) -> Trajectory:
        """Begin (or begin again) with the first observation, without a batch dimension."""
        self._obs, self._actions, self._rews, self._dones = [obs], [], [], []
        return self

    def add(self, action: Any, reward: float, terminated: bool, obs: dict[str, Array]) -> None:
        """One transition: the environment's own action, its reward, whether it terminated, the next observation.

        Raises:
            ValueError: before `start`, or after a terminated step.
        """
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
        """The six arrays of a `FrozenTraj`."""
        return self.to_stored().derive(self.spec)
