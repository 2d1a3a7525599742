"""Action spaces: any supported space as one row of numbers with a part for each choice.

An action has three forms:

- the environment's own (``Discrete(3, start=5)`` takes 5, 6, 7; a ``Box`` its own range and shape; a ``Dict`` a dict);
- *stored*, on disk and between the policy and the actors, ``(S,)``: an int64 index from 0, float32 in [-1, 1], or int8 bits;
- *vector*, the input of networks, ``(A,)`` float32: one-hot, in [-1, 1], or 0 and 1.

A MultiDiscrete has a discrete part for each of its numbers. A Tuple or Dict has the parts of its spaces, in the order of the
tuple or of the sorted keys. The stored forms of several parts lie side by side in a dtype that holds each exactly: int64 if no
part is continuous, float64 if only some are.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from math import isfinite
from typing import Any

import gymnasium as gym
import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

KINDS = ("discrete", "continuous", "multibinary")
"""The kinds of a part. An action of several parts has a kind such as "discrete(3)+continuous(2)"."""

_FEW = 64
"""Up to so many numbers are checked one by one, because a numpy call takes longer."""
_ROUNDING = 1e-5
"""How far rounding may take a continuous action out of [-1, 1]."""
_STORED: dict[str, tuple[str, str]] = {  # dtype kinds of the stored form, and the form in words
    "discrete": ("iu", "whole numbers from 0 to {last}"),
    "multibinary": ("iub", "bits 0 or 1"),
    "continuous": ("fiu", "numbers in [-1, 1]"),
}


class NonFiniteError(ValueError):
    """An environment or a policy returned NaN or infinity; the message says which, where, and at which step."""


def all_finite(a: Array) -> bool:
    """Whether an array of real numbers holds neither NaN nor infinity."""
    if a.size <= _FEW and isfinite(sum(a.ravel().tolist())):  # a sum is finite only if every term is
        return True
    return bool(np.isfinite(a).all())


def _where(at: tuple[int, ...]) -> str:
    """An index in brackets, "[2, 0]"; an empty text for an empty index."""
    return f"[{', '.join(map(str, at))}]" if at else ""


@dataclass(frozen=True)
class ActionPart:
    """One of the independent choices of an action.

    Attributes:
        kind: "discrete", "continuous" or "multibinary".
        dim: width in the vector form (number of choices, of numbers, of bits).
        stored, vector: its columns in the stored and in the vector form.
    """

    kind: str
    dim: int
    stored: slice
    vector: slice


def parts_of(kind: str, dim: int) -> tuple[ActionPart, ...]:
    """The parts of an action space, from `ActionSpec.kind` and `ActionSpec.dim`.

    Raises:
        ValueError: the kind is unknown, or its parts are not ``dim`` wide.
    """
    if kind in KINDS:
        return (ActionPart(kind, dim, slice(0, 1 if kind == "discrete" else dim), slice(0, dim)),)
    found = [re.fullmatch(rf"({'|'.join(KINDS)})\((\d+)\)", part) for part in kind.split("+")]
    parts, s, v = [], 0, 0
    for match in found:
        if match is None:
            raise ValueError(f"action_kind={kind!r} is unknown: use one of {', '.join(KINDS)}, or ActionSpec.kind")
        width = int(match[2])
        stored = 1 if match[1] == "discrete" else width
        parts.append(ActionPart(match[1], width, slice(s, s + stored), slice(v, v + width)))
        s, v = s + stored, v + width
    if v != dim:
        raise ValueError(f"action_kind={kind!r} is {v} numbers wide, not {dim}")
    return tuple(parts)


def stored_dtype_of(kinds: Iterable[str]) -> np.dtype[Any]:
    """The dtype of a stored action with parts of these kinds; each part is exact in it."""
    found = set(kinds)
    if found == {"continuous"}:
        return np.dtype(np.float32)
    if "continuous" in found:
        return np.dtype(np.float64)
    return np.dtype(np.int8 if found == {"multibinary"} else np.int64)


@dataclass(frozen=True)
class ActionSpec:
    """Conversions between the three forms of the actions of a space. Create it with `action_spec`.

    Attributes:
        space: the environment's space.
        kind: "discrete", "continuous" or "multibinary"; for several parts their kinds and widths, "discrete(3)+continuous(2)".
        dim: A, the width of the vector form (number of choices, of numbers, of bits; their sum over the parts).
        stored_dim: S, the width of the stored form.
        stored_dtype: dtype of the stored form.
    """

    space: gym.Space[Any]
    kind: str
    dim: int
    stored_dim: int
    stored_dtype: np.dtype[Any]
    _low: Array | None = field(default=None, repr=False)
    _high: Array | None = field(default=None, repr=False)

    @cached_property
    def parts(self) -> tuple[ActionPart, ...]:
        """The parts of the action; one for Discrete, Box and MultiBinary."""
        return parts_of(self.kind, self.dim)

    def to_env(self, stored: Array) -> Any:
        """The environment's form of a stored action (S,), or of a batch (B, S)."""
        batch = stored.shape[:-1]
        if self.kind == "discrete":
            out = stored[..., 0] + self.space.start  # type: ignore[attr-defined]
            return int(out) if not batch else out
        if self.kind == "multibinary":
            return stored.reshape(*batch, *self.space.shape).astype(self.space.dtype)  # type: ignore[misc]
        assert self._low is not None
        assert self._high is not None
        unit = np.minimum(np.maximum(stored, -1.0), 1.0)  # np.clip takes several times as long
        scaled = self._low + (unit.astype(np.float64) + 1.0) * 0.5 * (self._high - self._low)
        scaled = np.minimum(np.maximum(scaled, self._low), self._high)  # rounding must not leave the box
        return scaled.reshape((*batch, *self.space.shape)).astype(self.space.dtype)  # type: ignore[misc]

    def check(self, stored: Array) -> None:
        """Refuse stored actions (..., S) of the wrong dtype or with values out of bounds.

        Raises:
            NonFiniteError: NaN or infinity.
            ValueError: anything else; the message has the index of the number, and what is allowed.
        """
        kinds, words = _STORED[self.kind]
        if stored.dtype.kind not in kinds:
            raise ValueError(
                f"actions have dtype {stored.dtype}, but those of {self.space} are stored as {self.stored_dtype}: "
                + words.format(last=self.dim - 1)
            )
        low, high = self._bounds
        if stored.size <= _FEW:
            for x in stored.ravel().tolist():
                if not low <= x <= high:
                    raise self._refusal(stored)
        elif not (stored.min() >= low and stored.max() <= high):  # also refuses NaN, for which comparisons are False
            raise self._refusal(stored)

    @property
    def _bounds(self) -> tuple[float, float]:
        if self.kind == "continuous":
            return -1.0 - _ROUNDING, 1.0 + _ROUNDING
        return 0, self.dim - 1 if self.kind == "discrete" else 1

    def _refusal(self, stored: Array) -> ValueError:
        low, high = self._bounds
        at = tuple(int(i) for i in np.argwhere(~((stored >= low) & (stored <= high)))[0])
        words, value = _STORED[self.kind][1].format(last=self.dim - 1), stored[at]
        text = f"action{_where(at if stored.size > 1 else ())} is {value}, but the stored form holds {words}"
        return ValueError(text) if isfinite(value) else NonFiniteError(text)

    def from_env(self, action: Any) -> Array:
        """The stored form (S,) of an environment's action, or (B, S) of a batch."""
        a = np.asarray(action)
        if self.kind == "discrete":
            return (a.astype(np.int64) - self.space.start)[..., None]  # type: ignore[attr-defined,no-any-return]
        shape = self.space.shape
        assert shape is not None
        a = a.reshape(*a.shape[: a.ndim - len(shape)], self.dim)
        if self.kind == "multibinary":
            return a.astype(np.int8)
        span = np.where(self._high > self._low, self._high - self._low, 1.0)  # type: ignore[operator]
        return ((a - self._low) / span * 2.0 - 1.0).astype(np.float32)

    def to_vector(self, stored: Array) -> NDArray[np.float32]:
        """The vector form (..., A) of stored actions (..., S)."""
        if self.kind != "discrete":
            return stored.astype(np.float32)
        out = np.zeros((*stored.shape[:-1], self.dim), dtype=np.float32)
        np.put_along_axis(out, stored.astype(np.int64), 1.0, axis=-1)
        return out

    def from_vector(self, vector: Array) -> Array:
        """The stored form (..., S) of vectors (..., A); the inverse of `to_vector`."""
        if self.kind == "discrete":
            return np.argmax(vector, axis=-1, keepdims=True).astype(np.int64)
        return vector.astype(self.stored_dtype)

    def zeros(self, batch: int) -> Array:
        """Stored actions (B, S) of zeros."""
        return np.zeros((batch, self.stored_dim), dtype=self.stored_dtype)


@dataclass(frozen=True)
class _CompositeSpec(ActionSpec):
    """An action of several parts. Subclasses convert between the parts and the environment's form."""

    @cached_property
    def _columns(self) -> tuple[Array, Array, Array, Array]:
        """Stored columns of discrete parts, the first vector column of each, and stored and vector columns of other parts."""
        index = [p for p in self.parts if p.kind == "discrete"]
        other = [p for p in self.parts if p.kind != "discrete"]
        numbers = [[p.stored.start for p in index], [p.vector.start for p in index]]
        numbers += [[i for p in other for i in range(at(p).start, at(p).stop)] for at in (_stored, _vector)]
        first, second, third, fourth = (np.array(x, dtype=np.int64) for x in numbers)
        return first, second, third, fourth

    @cached_property
    def _ranges(self) -> tuple[Array, Array, NDArray[np.bool_]]:
        """The minimum and maximum of each stored column, and whether it holds whole numbers only."""
        low, high = np.zeros(self.stored_dim), np.zeros(self.stored_dim)
        whole = np.ones(self.stored_dim, dtype=bool)
        for p in self.parts:
            ends = {"discrete": (0, p.dim - 1), "multibinary": (0, 1), "continuous": (-1.0 - _ROUNDING, 1.0 + _ROUNDING)}
            low[p.stored], high[p.stored] = ends[p.kind]
            whole[p.stored] = p.kind != "continuous"
        return low, high, whole

    def check(self, stored: Array) -> None:
        allowed = "fiu" if self.stored_dtype.kind == "f" else "iub" if self.stored_dtype == np.int8 else "iu"
        if stored.dtype.kind not in allowed:
            raise ValueError(f"actions have dtype {stored.dtype}, but those of {self.space} are stored as {self.stored_dtype}")
        low, high, whole = self._ranges
        right = (stored >= low) & (stored <= high)
        if stored.dtype.kind == "f":
            right &= ~whole | (stored == np.floor(stored))
        if right.all():
            return
        at = tuple(int(i) for i in np.argwhere(~right)[0])
        part = next(p for p in self.parts if p.stored.start <= at[-1] < p.stored.stop)
        words, value = _STORED[part.kind][1].format(last=part.dim - 1), stored[at]
        text = f"action{_where(at)} ({self._column_names()[at[-1]]}) is {value}, but the stored form holds {words}"
        raise ValueError(text) if isfinite(value) else NonFiniteError(text)

    def _column_names(self) -> list[str]:
        raise NotImplementedError

    def to_vector(self, stored: Array) -> NDArray[np.float32]:
        out = np.zeros((*stored.shape[:-1], self.dim), dtype=np.float32)
        index, begin, other, place = self._columns
        out[..., place] = stored[..., other]
        np.put_along_axis(out, stored[..., index].astype(np.int64) + begin, 1.0, axis=-1)
        return out

    def from_vector(self, vector: Array) -> Array:
        out = np.zeros((*vector.shape[:-1], self.stored_dim), dtype=self.stored_dtype)
        _, _, other, place = self._columns
        out[..., other] = vector[..., place]
        for p in self.parts:
            if p.kind == "discrete":
                out[..., p.stored.start] = np.argmax(vector[..., p.vector], axis=-1)
        return out


def _stored(part: ActionPart) -> slice:
    return part.stored


def _vector(part: ActionPart) -> slice:
    return part.vector


class _MultiDiscreteSpec(_CompositeSpec):
    @cached_property
    def _start(self) -> Array:
        return np.asarray(self.space.start, dtype=np.int64).reshape(-1)  # type: ignore[attr-defined]

    def to_env(self, stored: Array) -> Any:
        values = stored.astype(np.int64) + self._start
        return values.reshape(*stored.shape[:-1], *self.space.shape).astype(self.space.dtype)  # type: ignore[misc]

    def from_env(self, action: Any) -> Array:
        a = np.asarray(action).astype(np.int64)
        return a.reshape(*a.shape[: a.ndim - len(self.space.shape or ())], self.stored_dim) - self._start  # type: ignore[no-any-return]

    def _column_names(self) -> list[str]:
        shape = self.space.shape or ()
        return [_where(tuple(int(i) for i in np.unravel_index(n, shape))) for n in range(self.stored_dim)]


@dataclass(frozen=True)
class _NestedSpec(_CompositeSpec):
    """An action of a Tuple or Dict space; ``children`` are (key, spec, stored columns)."""

    children: tuple[tuple[Any, ActionSpec, slice], ...] = ()

    def to_env(self, stored: Array) -> Any:
        values = {key: spec.to_env(stored[..., at].astype(spec.stored_dtype)) for key, spec, at in self.children}
        if isinstance(self.space, gym.spaces.Dict):
            return {key: values[key] for key in self.space.spaces}
        return tuple(values.values())

    def from_env(self, action: Any) -> Array:
        rows = [spec.from_env(action[key]).astype(self.stored_dtype) for key, spec, _ in self.children]
        return np.concatenate(rows, axis=-1)

    def _column_names(self) -> list[str]:
        names = []
        for key, spec, _ in self.children:
            if isinstance(spec, _NestedSpec):
                names += [f"{key}/{name}" for name in spec._column_names()]
            elif isinstance(spec, _CompositeSpec):
                names += [f"{key}{name}" for name in spec._column_names()]
            else:
                names += [f"{key}[{i}]" if spec.stored_dim > 1 else str(key) for i in range(spec.stored_dim)]
        return names


def action_spec(space: gym.Space[Any]) -> ActionSpec:
    """The `ActionSpec` of a Discrete, MultiDiscrete, Box or MultiBinary space, or of a (nested) Tuple or Dict of such spaces.

    Raises:
        ValueError: an unbounded box, to which [-1, 1] cannot be scaled, or an empty Tuple or Dict.
        TypeError: any other kind of space, or a Dict with a key that is not a str.
    """
    if isinstance(space, gym.spaces.Discrete):
        return ActionSpec(space, "discrete", int(space.n), 1, np.dtype(np.int64))
    if isinstance(space, gym.spaces.MultiBinary):
        n = int(np.prod(space.shape))
        return ActionSpec(space, "multibinary", n, n, np.dtype(np.int8))
    if isinstance(space, gym.spaces.Box):
        low, high = space.low.reshape(-1).astype(np.float64), space.high.reshape(-1).astype(np.float64)
        if not (np.isfinite(low).all() and np.isfinite(high).all()):
            raise ValueError(
                f"action space {space} is unbounded: actions are scaled from [-1, 1] to [low, high], so both must be finite. "
                "Wrap the environment with gymnasium.wrappers.RescaleAction or give the Box finite bounds."
            )
        return ActionSpec(space, "continuous", low.size, low.size, np.dtype(np.float32), low, high)
    if isinstance(space, gym.spaces.MultiDiscrete):
        nvec = [int(n) for n in space.nvec.reshape(-1)]
        kind = "+".join(f"discrete({n})" for n in nvec)
        return _MultiDiscreteSpec(space, kind, sum(nvec), len(nvec), np.dtype(np.int64))
    if isinstance(space, gym.spaces.Tuple | gym.spaces.Dict):
        return _nested_spec(space)
    raise TypeError(
        f"action space {space} is not supported: use Discrete, MultiDiscrete, Box or MultiBinary, or a Tuple or Dict of these"
    )


def _nested_spec(space: gym.spaces.Tuple | gym.spaces.Dict) -> ActionSpec:
    if isinstance(space, gym.spaces.Dict):
        wrong = [key for key in space.spaces if not isinstance(key, str)]
        if wrong:
            raise TypeError(f"action space {space} has the key {wrong[0]!r}, but the keys of a Dict of actions must be str")
        items: list[tuple[Any, gym.Space[Any]]] = sorted(space.spaces.items())
    else:
        items = list(enumerate(space.spaces))
    if not items:
        raise ValueError(f"action space {space} is empty: it has no action to choose")
    children, at = [], 0
    for key, sub in items:
        child = action_spec(sub)
        children.append((key, child, slice(at, at + child.stored_dim)))
        at += child.stored_dim
    specs = [child for _, child, _ in children]
    kind = "+".join(f"{p.kind}({p.dim})" for spec in specs for p in spec.parts)
    dtype = stored_dtype_of(p.kind for spec in specs for p in spec.parts)
    return _NestedSpec(space, kind, sum(spec.dim for spec in specs), at, dtype, children=tuple(children))


def rl2_space(spec: ActionSpec) -> gym.spaces.Box:
    """The space of ``[reward, previous action]``, of shape (1 + A,)."""
    return gym.spaces.Box(-np.inf, np.inf, shape=(1 + spec.dim,), dtype=np.float32)
