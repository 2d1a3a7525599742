"""Extra fields: fields that a user's script adds to the stored fields of a trajectory (numpy only)."""

from __future__ import annotations

import operator
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import gymnasium as gym
import numpy as np
from numpy.typing import NDArray

from amago.data.trajectory import EXTRA, FIELDS, OBS, ROWS, Field, rows_in
from amago.spaces import ActionSpec

Array = NDArray[Any]


@dataclass(frozen=True)
class ExtraField:
    """A stored field declared by a user, such as a privileged state, a teacher's label or a task's embedding.

    It is recorded with each trajectory and arrives as ``batch.extras[name]`` of shape ``(B, rows, *shape)``: L + 1
    rows for "T+1", L for "T", one for "1". The policy never reads it.

    Args:
        name: letters, digits, "_", "-" and "."; with ``source="info"`` also the key in the environment's ``info``.
        rows: "T+1" (the ``info`` of the reset and of each step), "T" (of each step) or "1" (of the reset).
        shape: of one row; () for a number.
        dtype: bool, or an integer or floating-point type of numpy.
        source: "info", or "policy" for what the agent computes with each action
            (`amago.agent.BaseAgent.act_with_extras`); then ``rows`` is "T".
        default: fills all rows in training sequences from a dataset that lacks the field. None: 0.

    Raises:
        ValueError: naming the argument, its value and the values allowed.
    """

    name: str
    rows: str = "T+1"
    shape: tuple[int, ...] = ()
    dtype: str = "float32"
    source: str = "info"
    default: float | None = None

    def __post_init__(self) -> None:
        try:
            shape = tuple(operator.index(n) for n in self.shape)
        except TypeError:
            shape = (0,)
        try:
            dtype = np.dtype(self.dtype)
        except TypeError:
            dtype = np.dtype(object)
        named = isinstance(self.name, str) and re.fullmatch(r"[A-Za-z0-9_-][A-Za-z0-9_.-]{0,99}", self.name)
        for argument, right, wanted in (
            ("name", named, "1 to 100 letters, digits, '_', '-' or '.', the first of them no '.'"),
            ("rows", self.rows in ROWS, f"one of {', '.join(map(repr, ROWS))}"),
            ("source", self.source in ("info", "policy"), "'info' or 'policy'"),
            ("rows", self.source == "info" or self.rows == "T", f"'T' with source={self.source!r}: one value for each action"),
            ("shape", all(n >= 1 for n in shape) and len(shape) <= 16, "a tuple of positive integers, () for a number"),
            (
                "dtype",
                dtype.kind in "biuf" and dtype.itemsize <= 8,
                "bool, an integer or floating-point type of at most 8 bytes",
            ),
        ):
            if not right:
                raise ValueError(f"ExtraField {self.name!r}: {argument} is {vars(self)[argument]!r}, but must be {wanted}")
        object.__setattr__(self, "shape", shape)
        object.__setattr__(self, "dtype", dtype.name)
        if self.default is None:
            object.__setattr__(self, "default", 0.0)
        try:
            as_array(self.default, dtype, ())
        except ValueError as err:
            raise ValueError(f"ExtraField {self.name!r}: default must be one number of dtype {dtype.name}: {err}") from None

    @property
    def field(self) -> Field:
        """The row of the table of stored fields that this declares."""
        return Field(EXTRA + self.name, self.rows, "extra", np.dtype(self.dtype), self.shape, default=self.default)

    def default_rows(self, steps: int) -> Array:
        """The default for a sequence of so many transitions, of shape ``(rows, *shape)``."""
        return np.full((rows_in(self.rows, 1, steps), *self.shape), self.default, dtype=self.dtype)


def as_array(value: object, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Array:
    """``value`` as an array.

    Raises:
        ValueError: it has another shape, does not fit the dtype, or is not finite; the message has the expected and the actual.
    """
    try:
        found = np.asarray(value)
        if found.dtype == object:
            found = np.asarray(found.tolist())
    except (TypeError, ValueError):
        found = np.empty(0, object)
    wanted, shown = f"shape {shape} and dtype {dtype.name}", repr(found.tolist() if found.size else value)[:100]
    if found.dtype.kind not in "biuf":
        raise ValueError(f"expected numbers of {wanted}, found {value!r:.100}")
    if found.shape != shape:
        raise ValueError(f"expected {wanted}, found shape {found.shape}: {shown}")
    with np.errstate(all="ignore"):
        out = found.astype(dtype, copy=False)
    if dtype.kind != "f" and not np.array_equal(out, found):
        raise ValueError(f"expected {wanted}, found {shown}")
    if dtype.kind == "f" and not np.isfinite(out).all():
        raise ValueError(f"expected finite numbers of {wanted}, found {shown}")
    return out


KNOWN_FIELDS = {"log_prob": ExtraField("log_prob", rows="T", source="policy")}
"""The fields that can be declared by their names alone, as in gin files."""


def check_extra_fields(extra_fields: Iterable[ExtraField | str]) -> tuple[ExtraField, ...]:
    """The declared fields as a tuple; names stand for `KNOWN_FIELDS`.

    Raises:
        ValueError: no list, an element is no `ExtraField` and no known name, or two have one name.
    """
    if not isinstance(extra_fields, Iterable) or isinstance(extra_fields, str):
        raise ValueError(f"extra_fields is {extra_fields!r}, but must be a list of amago.ExtraField")
    fields: tuple[Any, ...] = tuple(KNOWN_FIELDS.get(x, x) if isinstance(x, str) else x for x in extra_fields)
    for i, x in enumerate(fields):
        if not isinstance(x, ExtraField):
            known = " or ".join(map(repr, KNOWN_FIELDS))
            raise ValueError(f"extra_fields[{i}] is {x!r}, but must be an amago.ExtraField, or the name {known}")
        if x.name in {other.name for other in fields[:i]}:
            raise ValueError(f"extra_fields has two fields of the name {x.name!r}; every name must differ")
    return fields


def trajectory_fields(
    obs_space: gym.spaces.Dict, spec: ActionSpec, extra_fields: Iterable[ExtraField] = ()
) -> tuple[Field, ...]:
    """All stored fields of an environment's trajectories, with dtype and shape of a row.

    Args:
        obs_space: flat, boxes only (`amago.spaces.obs_spec`).
    """
    observations = [Field(OBS + k, "T+1", "obs", np.dtype(s.dtype), s.shape or ()) for k, s in obs_space.spaces.items()]
    fields: list[Field] = []
    for x in FIELDS:
        if x.role == "obs":
            fields += observations
        elif x.dtype == object:
            fields.append(replace(x, dtype=spec.stored_dtype, shape=(spec.stored_dim,)))
        else:
            fields.append(x)
    return (*fields, *(x.field for x in extra_fields))
