"""The fields of a trajectory, declared once, and the types that hold one (numpy only).

`FIELDS` is the only list of the stored fields of a rollout. The recorder's arrays, the files' schema and row counts, reading,
slicing, batches and ``amago buffer verify`` follow from it. `amago.data.extras.ExtraField` declares a user's own field.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from amago.spaces import ActionSpec

Array = NDArray[Any]

ROWS = ("T+1", "T", "1")
"""Rows of a field in a trajectory of T transitions: one for each observation, for each transition, or for the trajectory."""
OBS, EXTRA = "obs/", "extra/"
"""The prefixes of the names of observations and of declared extra fields in files."""
OBS_KEY, EXTRA_KEY = "_OBS_KEY_", "_EXTRA_KEY_"
"""The same prefixes in `FrozenTraj.to_dict`."""


_OBJECT = np.dtype(object)


@dataclass(frozen=True)
class Field:
    """One stored field.

    Attributes:
        name: in files; an attribute of `StoredTraj` unless it begins with ``obs/`` or ``extra/``.
        rows: one of `ROWS`.
        role: "obs", "action", "reward", "done", "context" or "extra".
        dtype, shape: of one row; object and () where a space determines them.
        before: the field of one row that precedes the first row of this one, where the trajectory continues a rollout.
        default: value in trajectories that lack the field; None: no trajectory may lack it.
    """

    name: str
    rows: str
    role: str
    dtype: np.dtype[Any] = _OBJECT
    shape: tuple[int, ...] = ()
    before: str | None = None
    default: float | None = None

    @property
    def key(self) -> str:
        """The key of an observation, or the name of an extra field."""
        return self.name.removeprefix({"obs": OBS, "extra": EXTRA}.get(self.role, ""))


_F32, _I64, _BOOL = np.dtype(np.float32), np.dtype(np.int64), np.dtype(np.bool_)
FIELDS = (
    Field(OBS, "T+1", "obs"),  # one for each key of the observation space
    Field("actions", "T", "action", before="prev_action"),
    Field("rews", "T", "reward", _F32, (1,), before="prev_reward"),
    Field("dones", "T", "done", _BOOL, (1,)),
    Field("start_time", "1", "context", _I64, ()),
    Field("prev_reward", "1", "context", _F32, ()),
    Field("prev_action", "1", "context"),  # a row of ``actions``
)

SEQUENCE_ROWS = {f.name: f.rows for f in FIELDS if f.rows != "1" and f.role != "obs"} | {"rl2s": "T+1", "time_idxs": "T+1"}
"""Rows of the arrays of `FrozenTraj`, `amago.data.batch.RLData` and `amago.data.batch.Batch` beside ``obs`` and ``extras``."""


def columns(data: object) -> dict[str, Any]:
    """The arrays or tensors of these names, of a `FrozenTraj`, a sequence or a batch."""
    fields = vars(data)
    return {name: fields[name] for name in SEQUENCE_ROWS}


def under(prefix: str, arrays: Mapping[str, Any]) -> dict[str, Any]:
    """The entries whose names have a prefix, without it."""
    return {name.removeprefix(prefix): a for name, a in arrays.items() if name.startswith(prefix)}


def rows_in(rows: str, n: int, total: int) -> int:
    """Rows of a field in n trajectories of ``total`` transitions together."""
    return n if rows == "1" else total + n if rows == "T+1" else total


MAGIC_PAD_VAL = 4.0
"""The value of steps after the end of a sequence in a batch, in every field but extra fields; see `pad_value`."""


def pad_value(dtype: np.dtype[Any], low: ArrayLike | None = None, high: ArrayLike | None = None) -> Any:
    """The value of padding in a field: 4.0, the integer 4, or True.

    Args:
        dtype: of the field, of numpy.
        low, high: the bounds of an observation, arrays of its shape. Integers stay within them, since encoders look integers up
            in tables: a vocabulary of three words has no fifth.
    """
    dtype = np.dtype(dtype)
    if dtype.kind not in "iu" or low is None:
        return dtype.type(MAGIC_PAD_VAL)
    value = np.clip(MAGIC_PAD_VAL, np.asarray(low, np.float64), np.asarray(high, np.float64)).astype(dtype)
    return value.reshape(-1)[0] if value.size and (value == value.reshape(-1)[0]).all() else value


def rl2(reward: Array, prev_action: Array) -> NDArray[np.float32]:
    """(..., 1) rewards and (..., A) vectors of the actions before them -> the policy's input (..., 1 + A)."""
    return np.concatenate((reward, prev_action), axis=-1, dtype=np.float32)


def split_rl2(rl2s: Any) -> tuple[Any, Any]:
    """The reward (..., 1) and the previous action (..., A) of an array or tensor of rl2, as views."""
    return rl2s[..., :1], rl2s[..., 1:]


def cut(a: Any, rows: str, start: int, stop: int) -> Any:
    """The rows of an array or tensor that belong to transitions [start, stop), as a view."""
    return a if rows == "1" else a[start : stop + (rows == "T+1")]


def rows_of_extra(name: str, rows: int, steps: int) -> str:
    """The element of `ROWS` that describes an extra field, from its number of rows and the number of transitions.

    With one transition, "T" and "1" are the same rows.

    Raises:
        ValueError: none of them.
    """
    for kind in ROWS:
        if rows == rows_in(kind, 1, steps):
            return kind
    raise ValueError(f"extras[{name!r}] has {rows} rows; with {steps} rewards it must have {steps + 1}, {steps} or 1")


def cut_extras(extras: Mapping[str, Any], steps: int, start: int, stop: int) -> dict[str, Any]:
    """`cut` of each extra field of a trajectory of so many transitions."""
    return {k: cut(a, rows_of_extra(k, len(a), steps), start, stop) for k, a in extras.items()}


def cut_fields(data: Any, start: int, stop: int) -> dict[str, Any]:
    """The fields of a `FrozenTraj` or a sequence at transitions [start, stop), as views."""
    return {
        "obs": {k: cut(x, "T+1", start, stop) for k, x in data.obs.items()},
        "extras": cut_extras(data.extras, len(data), start, stop),
        **{name: cut(x, SEQUENCE_ROWS[name], start, stop) for name, x in columns(data).items()},
    }


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
        extras: {name: (rows, ...)} of declared extra fields (`amago.data.extras.ExtraField`): T + 1, T or 1 rows.
    """

    obs: dict[str, Array]
    rl2s: NDArray[np.float32]
    time_idxs: NDArray[np.int64]
    rews: NDArray[np.float32]
    dones: NDArray[np.bool_]
    actions: NDArray[np.float32]
    extras: dict[str, Array] = field(default_factory=dict)

    def __len__(self) -> int:
        return int(self.rews.shape[0])

    def __repr__(self) -> str:
        return f"FrozenTraj(T={len(self)}, keys={list(self.obs)}, return={float(self.rews.sum()):.6g})"

    def validate(self) -> FrozenTraj:
        """Return self if the numbers of rows fit together.

        Raises:
            ValueError: naming the field, its length and the right one.
        """
        t = len(self)
        found = {f"obs[{k!r}]": (len(x), t + 1) for k, x in self.obs.items()}
        found |= {name: (len(vars(self)[name]), rows_in(kind, 1, t)) for name, kind in SEQUENCE_ROWS.items()}
        for name, (rows, right) in found.items():
            if rows != right:
                raise ValueError(f"{name} has {rows} rows; with {t} rewards it must have {right}")
        for name, array in self.extras.items():
            rows_of_extra(name, len(array), t)
        return self

    def to_dict(self) -> dict[str, Array]:
        """The arrays under one name each, as a file of one trajectory in the original's format holds them.

        Returns:
            the six fields by their names, an observation under ``_OBS_KEY_`` and its key, an extra field under ``_EXTRA_KEY_``
            and its name.
        """
        obs = {OBS_KEY + k: v for k, v in self.obs.items()}
        return columns(self) | obs | {EXTRA_KEY + k: v for k, v in self.extras.items()}

    @classmethod
    def from_dict(cls, d: Mapping[str, Array]) -> FrozenTraj:
        """The trajectory whose `to_dict` is ``d``; a file opened by `numpy.load` will do.

        Raises:
            ValueError: a field is missing, or an entry is none of a trajectory; the message names them.
        """
        arrays = {k: np.asarray(d[k]) for k in d}
        missing = sorted(SEQUENCE_ROWS.keys() - arrays)
        unknown = [k for k in arrays if k not in SEQUENCE_ROWS and not k.startswith((OBS_KEY, EXTRA_KEY))]
        if missing or unknown:
            raise ValueError(
                f"this is no trajectory: missing {missing}, unknown {unknown}; it must hold {', '.join(SEQUENCE_ROWS)}, observations "
                f"named {OBS_KEY}<key>, and extra fields named {EXTRA_KEY}<name>"
            )
        obs, extras = under(OBS_KEY, arrays), under(EXTRA_KEY, arrays)
        return cls(obs=obs, extras=extras, **{name: arrays[name] for name in SEQUENCE_ROWS})

    def slice(self, start: int, stop: int) -> FrozenTraj:
        """Transitions [start, stop) with the observation that follows the last of them."""
        return FrozenTraj(**cut_fields(self, start, stop))

    def to_stored(self, spec: ActionSpec, env_name: str = "") -> StoredTraj:
        """The form that is written to disk; rewards and actions are taken from ``rews`` and ``actions``."""
        reward, action = split_rl2(self.rl2s[0])
        return StoredTraj(
            self.obs, spec.from_vector(self.actions), self.rews, self.dones, self.time_idxs.item(0), reward.item(),
            spec.from_vector(action), env_name, self.extras,
        )  # fmt: skip


@dataclass
class StoredTraj:
    """The part of a rollout that is kept on disk, without anything that can be derived from the rest.

    Attributes:
        obs: {key: (T + 1, ...)}, any dtype.
        actions: (T, S), stored form of `amago.spaces.ActionSpec`.
        rews: (T, 1) float32.
        dones: (T, 1) bool, terminated only.
        start_time: time index of the first observation (0 unless a rollout was saved in pieces).
        prev_reward, prev_action: reward and action that arrived with the first observation; used only where ``start_time > 0``.
        env_name: the environment's name during this rollout.
        extras: {name: (rows, ...)} of declared extra fields (`amago.data.extras.ExtraField`): T + 1, T or 1 rows.
    """

    obs: dict[str, Array]
    actions: Array
    rews: NDArray[np.float32]
    dones: NDArray[np.bool_]
    start_time: int = 0
    prev_reward: float = 0.0
    prev_action: Array | None = None
    env_name: str = ""
    extras: dict[str, Array] = field(default_factory=dict)

    def __len__(self) -> int:
        return int(self.rews.shape[0])

    def arrays(self) -> dict[str, Array]:
        """The fields that have a row for each step, and the extra fields, by their names in files."""
        steps = {"actions": self.actions, "rews": self.rews, "dones": self.dones}
        return steps | {OBS + k: v for k, v in self.obs.items()} | {EXTRA + k: v for k, v in self.extras.items()}

    def copy(self) -> StoredTraj:
        """A copy of the trajectory, with its own arrays."""
        return self.slice()

    def slice(self, start: int = 0, stop: int | None = None) -> StoredTraj:
        """A copy of transitions [start, stop), with the observation after the last, and the reward and action that arrived with
        the first; by default all of them."""
        t = len(self)
        stop = t if stop is None else stop
        reward, action = self.prev_reward, self.prev_action
        if start:
            reward, action = self.rews[start - 1].item(), self.actions[start - 1]
        return StoredTraj(
            {k: a[start : stop + 1].copy() for k, a in self.obs.items()}, self.actions[start:stop].copy(), self.rews[start:stop].copy(),
            self.dones[start:stop].copy(), self.start_time + start, reward, None if action is None else action.copy(), self.env_name,
            {k: a.copy() for k, a in cut_extras(self.extras, t, start, stop).items()},
        )  # fmt: skip

    def derive(self, spec: ActionSpec) -> FrozenTraj:
        """Add ``rl2s`` and ``time_idxs``, and turn actions into vectors."""
        t = len(self)
        vectors = spec.to_vector(self.actions)
        rewards, actions = np.zeros((t + 1, 1), np.float32), np.zeros((t + 1, spec.dim), np.float32)
        rewards[1:], actions[1:] = self.rews, vectors
        if self.start_time > 0:
            rewards[0] = self.prev_reward
            if self.prev_action is not None:
                actions[0] = spec.to_vector(np.asarray(self.prev_action).reshape(-1))
        time_idxs = np.arange(self.start_time, self.start_time + t + 1, dtype=np.int64)[:, None]
        return FrozenTraj(self.obs, rl2(rewards, actions), time_idxs, self.rews, self.dones, vectors, self.extras)


@dataclass
class StoredTrajs:
    """Trajectories of the same spaces, one after the other, as a recorder hands them to a writer and as a file holds them.

    Attributes:
        arrays: the rows of all trajectories, by the names of `StoredTraj.arrays`.
        lengths: (n,) int64, transitions of each.
        start_times: (n,) int64.
        prev_rewards: (n,) float32.
        prev_actions: (n, S); zeros where there is none.
        env_names: n of them.
    """

    arrays: dict[str, Array]
    lengths: NDArray[np.int64]
    start_times: NDArray[np.int64]
    prev_rewards: NDArray[np.float32]
    prev_actions: Array
    env_names: list[str]

    def __len__(self) -> int:
        return len(self.lengths)

    @classmethod
    def of(cls, traj: StoredTraj) -> StoredTrajs:
        """One trajectory, with arrays of its own."""
        before = np.zeros_like(traj.actions, shape=traj.actions.shape[1:]) if traj.prev_action is None else traj.prev_action
        return cls(
            {k: a.copy() for k, a in traj.arrays().items()}, np.array([len(traj)]), np.array([traj.start_time]),
            np.array([traj.prev_reward], np.float32), before[None].copy(), [traj.env_name],
        )  # fmt: skip

    def each(self) -> Iterator[StoredTraj]:
        """The trajectories, as views."""
        n, total, end = len(self), int(self.lengths.sum()), 0
        rows = {name: next(kind for kind in ROWS if rows_in(kind, n, total) == len(a)) for name, a in self.arrays.items()}
        for i, t in enumerate(self.lengths.tolist()):
            part = {k: a[rows_in(rows[k], i, end) : rows_in(rows[k], i + 1, end + t)] for k, a in self.arrays.items()}
            yield StoredTraj(
                under(OBS, part), part["actions"], part["rews"], part["dones"], int(self.start_times[i]), float(self.prev_rewards[i]),
                self.prev_actions[i], self.env_names[i], under(EXTRA, part),
            )  # fmt: skip
            end += t
