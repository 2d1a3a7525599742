"""Action spaces: any supported space as one row of numbers with a part for each choice.

An action has three forms:

- the environment's own (``Discrete(3, start=5)`` takes 5, 6, 7; a ``Box`` its own range and shape; a ``Dict`` a dict);
- *stored*, on disk and between the policy and the actors, ``(S,)``: an int64 index from 0, float32 in [-1, 1], or int8 bits;
- *vector*, the input of networks, ``(A,)`` float32: one-hot, in [-1, 1], or 0 and 1.

A MultiDiscrete has a discrete part for each of its numbers. A Tuple or Dict has the parts of its spaces, in the order of the
tuple or of the sorted keys. The stored forms of several parts lie side by side in a dtype that holds each exactly: int64 if no
part is continuous, float64 if only some are. A ``Box`` of whole numbers is scaled as any other, its actions are rounded to the
nearest number, and those with more than 2**22 numbers are stored in float64, so that each comes back.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from math import isfinite, prod
from typing import Any

import gin
import gymnasium as gym
import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

KINDS = ("discrete", "continuous", "multibinary")
"""The kinds of a part. An action of several parts has a kind such as "discrete(3)+continuous(2)"."""

_ROUNDING = 1e-5
"""The largest distance by which rounding may take a continuous action out of [-1, 1]."""
_MOST_IN_FLOAT32, _MOST_IN_FLOAT64 = 2**22, 2**50
"""The widest ranges of whole numbers that come back from [-1, 1] in these dtypes."""
_STORED = {
    "discrete": "whole numbers from 0 to {last}", "multibinary": "bits 0 or 1", "continuous": "numbers in [-1, 1]",
}  # fmt: skip
"""The stored form of each kind, in words."""


class NonFiniteError(ValueError):
    """Raised if an environment or a policy returned NaN or infinity; the message names it, the place and the step."""


def all_finite(a: Array) -> bool:
    """True if an array of real numbers holds neither NaN nor infinity."""
    return 0 not in np.isfinite(a).tobytes()  # a third of the time of `all`, in each step of an environment


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
        children: of a Tuple or Dict, (key, spec, stored columns) of each of its spaces.
    """

    space: gym.Space[Any]
    kind: str
    dim: int
    stored_dim: int
    stored_dtype: np.dtype[Any]
    _low: Array | None = field(default=None, repr=False)
    _high: Array | None = field(default=None, repr=False)
    children: tuple[tuple[Any, ActionSpec, slice], ...] = field(default=(), repr=False)

    @cached_property
    def parts(self) -> tuple[ActionPart, ...]:
        """The parts of the action; one for Discrete, Box and MultiBinary."""
        return parts_of(self.kind, self.dim)

    def to_env(self, stored: Array) -> Any:
        """The environment's form of a stored action (S,), or of a batch (B, S)."""
        space, batch = self.space, stored.shape[:-1]
        if self.children:
            values = {key: spec.to_env(stored[..., at].astype(spec.stored_dtype)) for key, spec, at in self.children}
            return {k: values[k] for k in space.spaces} if isinstance(space, gym.spaces.Dict) else tuple(values.values())
        if isinstance(space, gym.spaces.Discrete):
            index = stored[..., 0] + space.start
            return index if batch else int(index)
        if isinstance(space, gym.spaces.MultiDiscrete):
            stored = stored.astype(np.int64) + np.asarray(space.start, np.int64).reshape(-1)
        elif isinstance(space, gym.spaces.Box):
            low, high = self._low, self._high
            unit = np.minimum(np.maximum(stored, -1.0), 1.0)  # np.clip takes several times as long
            stored = low + (unit.astype(np.float64) + 1.0) * 0.5 * (high - low)  # type: ignore[operator]
            stored = np.rint(stored) if np.dtype(space.dtype).kind in "iub" else stored
            stored = np.minimum(np.maximum(stored, low), high)  # type: ignore[arg-type]  # rounding must not leave the box
        return stored.reshape((*batch, *(space.shape or ()))).astype(space.dtype)

    def from_env(self, action: Any) -> Array:
        """The stored form (S,) of an environment's action, or (B, S) of a batch."""
        if self.children:
            rows = [spec.from_env(action[key]).astype(self.stored_dtype) for key, spec, _ in self.children]
            return np.concatenate(rows, axis=-1)
        a, space = np.asarray(action), self.space
        if isinstance(space, gym.spaces.Discrete):
            return (a.astype(np.int64) - int(space.start))[..., None]
        a = a.reshape(*a.shape[: a.ndim - len(space.shape or ())], self.stored_dim)
        if isinstance(space, gym.spaces.MultiDiscrete):
            return a.astype(np.int64) - np.asarray(space.start, np.int64).reshape(-1)
        if isinstance(space, gym.spaces.Box):
            span = np.where(self._high > self._low, self._high - self._low, 1.0)  # type: ignore[operator]
            a = (a - self._low) / span * 2.0 - 1.0
        return a.astype(self.stored_dtype)

    def to_vector(self, stored: Array) -> NDArray[np.float32]:
        """The vector form (..., A) of stored actions (..., S)."""
        if self.kind in ("continuous", "multibinary"):
            return stored.astype(np.float32)
        out = np.empty((*stored.shape[:-1], self.dim), dtype=np.float32)
        for p in self.parts:
            values = stored[..., p.stored]
            out[..., p.vector] = values == np.arange(p.dim) if p.kind == "discrete" else values
        return out

    def from_vector(self, vector: Array) -> Array:
        """The stored form (..., S) of vectors (..., A); the inverse of `to_vector`."""
        out = np.zeros((*vector.shape[:-1], self.stored_dim), dtype=self.stored_dtype)
        for p in self.parts:
            values = vector[..., p.vector]
            out[..., p.stored] = np.argmax(values, axis=-1, keepdims=True) if p.kind == "discrete" else values
        return out

    def zeros(self, batch: int) -> Array:
        """Stored actions (B, S) of zeros."""
        return np.zeros((batch, self.stored_dim), dtype=self.stored_dtype)

    def check(self, stored: Array) -> None:
        """Refuse stored actions (..., S) of the wrong dtype or with values out of bounds.

        Raises:
            NonFiniteError: NaN or infinity.
            ValueError: anything else; the message has the index of the number, and the values allowed.
        """
        low, high, whole, kinds = self._allowed
        if stored.dtype.kind not in kinds:
            raise ValueError(f"actions have dtype {stored.dtype}, but those of {self.space} are stored as {self.stored_dtype}")
        right = (stored >= low) & (stored <= high)  # False for NaN
        if stored.dtype.kind == "f" and whole.any():
            right &= ~whole | (stored == np.floor(stored))
        if right.all():
            return
        at = tuple(int(i) for i in np.argwhere(~right)[0])
        part, value = next(p for p in self.parts if p.stored.start <= at[-1] < p.stored.stop), stored[at]
        name = f" ({self._column_names()[at[-1]]})" if len(self.parts) > 1 else ""
        words = _STORED[part.kind].format(last=part.dim - 1)
        text = f"action{_where(at if stored.size > 1 else ())}{name} is {value}, but the stored form holds {words}"
        raise ValueError(text) if isfinite(value) else NonFiniteError(text)

    @cached_property
    def _allowed(self) -> tuple[Array, Array, NDArray[np.bool_], str]:
        """The minimum and maximum of each stored column, whether it holds whole numbers only, and the kinds of dtypes."""
        low, high, whole = np.zeros(self.stored_dim), np.zeros(self.stored_dim), np.ones(self.stored_dim, bool)
        for p in self.parts:
            ends = {"discrete": (0, p.dim - 1), "multibinary": (0, 1), "continuous": (-1.0 - _ROUNDING, 1.0 + _ROUNDING)}
            low[p.stored], high[p.stored] = ends[p.kind]
            whole[p.stored] = p.kind != "continuous"
        return low, high, whole, "fiu" if self.stored_dtype.kind == "f" else "iub" if self.stored_dtype == np.int8 else "iu"

    def _column_names(self) -> list[str]:
        if self.children:
            named = [
                (key, "/" if spec.children else "", name) for key, spec, _ in self.children for name in spec._column_names()
            ]
            return [f"{key}{slash}{name}" for key, slash, name in named]
        shape = (self.space.shape or ()) if isinstance(self.space, gym.spaces.MultiDiscrete) else (self.stored_dim,)
        every = [_where(tuple(int(i) for i in np.unravel_index(n, shape))) for n in range(self.stored_dim)]
        return every if len(every) > 1 else [""]


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
        return _box_spec(space)
    if isinstance(space, gym.spaces.MultiDiscrete):
        nvec = [int(n) for n in space.nvec.reshape(-1)]
        kind = "+".join(f"discrete({n})" for n in nvec)
        return ActionSpec(space, kind, sum(nvec), len(nvec), np.dtype(np.int64))
    if isinstance(space, gym.spaces.Tuple | gym.spaces.Dict):
        return _nested_spec(space)
    raise TypeError(
        f"action space {space} is not supported: use Discrete, MultiDiscrete, Box or MultiBinary, or a Tuple or Dict of these"
    )


def _box_spec(space: gym.spaces.Box) -> ActionSpec:
    low, high = space.low.reshape(-1).astype(np.float64), space.high.reshape(-1).astype(np.float64)
    if not (np.isfinite(low).all() and np.isfinite(high).all() and space.is_bounded("both")):
        raise ValueError(
            f"action space {space} is unbounded: actions are scaled from [-1, 1] to [low, high], so both must be finite. "
            "Wrap the environment with gymnasium.wrappers.RescaleAction or give the Box finite bounds."
        )
    with np.errstate(over="ignore"):
        widest = float((high - low).max(initial=0.0))
    whole = space.dtype is not None and space.dtype.kind in "iub"
    largest = float(max(np.abs(low).max(initial=0.0), np.abs(high).max(initial=0.0)))
    if not isfinite(widest) or (whole and max(widest, largest / 4) > _MOST_IN_FLOAT64):
        raise ValueError(
            f"action space {space} has a range that float64 cannot hold, so that actions scaled to [-1, 1] would not come back as they "
            "were: give the Box closer bounds, for whole numbers at most 2**50 apart and within 2**52 of 0"
        )
    dtype = np.float64 if whole and widest > _MOST_IN_FLOAT32 else np.float32
    return ActionSpec(space, "continuous", low.size, low.size, np.dtype(dtype), low, high)


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
    if any(spec.stored_dtype == np.float64 for spec in specs):
        dtype = np.dtype(np.float64)
    return ActionSpec(space, kind, sum(spec.dim for spec in specs), at, dtype, children=tuple(children))


def rl2_space(spec: ActionSpec) -> gym.spaces.Box:
    """The space of ``[reward, previous action]``, of shape (1 + A,)."""
    return gym.spaces.Box(-np.inf, np.inf, shape=(1 + spec.dim,), dtype=np.float32)


@gin.configurable(module="amago")
def ActionMask(key: str | None = None) -> str | None:
    """The name of the observation that marks the legal actions. Bind it: ``ActionMask.key = "action_mask"``.

    The observation has A numbers in any shape, one for each number of the action's vector form: nonzero where a choice is
    legal, or where a bit may be 1. Numbers of continuous parts are not read. If no choice of a discrete part is legal (after
    the end of an episode, for example), all count as legal.

    Policies give illegal choices a probability of exactly 0, and exploration does not take them.

    Args:
        key: default: None, all actions are always legal.
    """
    return key


def check_mask(key: str, obs_space: gym.spaces.Dict, spec: ActionSpec) -> None:
    """Refuse an `ActionMask` that does not fit the spaces.

    Raises:
        ValueError: there is no such observation, it does not have A numbers, or all actions are continuous.
    """
    if key not in obs_space.spaces:
        raise ValueError(f"ActionMask.key={key!r} is none of the observations {sorted(obs_space.spaces)}")
    shape = obs_space[key].shape or ()
    if prod(shape) != spec.dim:
        raise ValueError(
            f"ActionMask.key={key!r}: the observation has shape {shape}, but must have {spec.dim} numbers for actions {spec.space}"
        )
    if all(p.kind == "continuous" for p in spec.parts):
        raise ValueError(f"ActionMask.key={key!r}: no part of {spec.space} can be masked; let the environment clip its actions")


def action_mask_key(obs_space: gym.spaces.Dict, spec: ActionSpec) -> str | None:
    """The bound `ActionMask.key`, checked against the spaces; None if none is bound."""
    key = ActionMask()
    if key is not None:
        check_mask(key, obs_space, spec)
    return key
