"""Helpers that scripts written for the original system import: warnings, calls of vectorised environments, dicts of arrays,
optimizers.

The names that need torch are imported on first use, because environments import the others in actors' processes, which have no
torch.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from amago.compat.names import attributes

_WITH_TORCH = (
    "AdamWRel", "avg_over_accelerate", "count_params", "get_constant_schedule_with_warmup", "get_grad_norm", "gin_as_wandb_config",
    "masked_avg", "retry_load_checkpoint", "sum_over_accelerate",
)  # fmt: skip
_OWN = ("AmagoWarning", "amago_warning", "call_async_env", "split_batch", "split_dict", "stack_list_array_dicts")
__all__ = [*_WITH_TORCH, *_OWN]
__getattr__ = attributes(__name__, dict.fromkeys(_WITH_TORCH, "amago.compat.training"))


class AmagoWarning(Warning):
    """The category of warnings of scripts and environments; filter them with ``warnings.simplefilter``."""


def amago_warning(msg: str, category: type[Warning] = AmagoWarning) -> None:
    """Warn with ``msg``, at the line that calls this function."""
    warnings.warn(msg, category, stacklevel=2)


def call_async_env(env: Any, method_name: str, *args: object) -> list[Any]:
    """Call a method of every environment of a vectorised one with ``args``, or read an attribute; returns one entry for each.

    ``env`` has the methods ``call_async`` and ``call_wait`` of `gymnasium.vector.AsyncVectorEnv`.
    """
    env.call_async(method_name, *args)
    return list(env.call_wait())


def stack_list_array_dicts(list_: Sequence[Mapping[str, Any]], axis: int = 0, cat: bool = False) -> dict[str, Any]:
    """Stack the arrays of each key of dicts with the same keys along a new axis; with ``cat`` concatenate them along that axis."""
    if not list_:
        raise ValueError("list_ is empty: there is nothing to stack")
    for i, other in enumerate(list_):
        if set(other) != set(list_[0]):
            raise ValueError(f"the keys of list_[{i}] are {sorted(other)}, and those of list_[0] {sorted(list_[0])}")
    join = np.concatenate if cat else np.stack
    return {key: join([d[key] for d in list_], axis=axis) for key in list_[0]}


def split_batch(arr: NDArray[Any], axis: int) -> list[Any]:
    """The parts of an array (or tensor) along an axis, each of which keeps that axis with length 1."""
    whole = (slice(None),) * (axis % arr.ndim)
    return [arr[(*whole, slice(i, i + 1))] for i in range(arr.shape[axis])]


def split_dict(d: Mapping[str, Any], axis: int = 0) -> list[dict[str, Any]]:
    """A dict of arrays as one dict for each index of their axis, which is kept with length 1; see `split_batch`."""
    parts = {key: split_batch(arr, axis) for key, arr in d.items()}
    if len({len(p) for p in parts.values()}) > 1:
        raise ValueError(f"lengths along axis {axis} differ: { {key: len(p) for key, p in parts.items()} }")
    return [dict(zip(parts, row, strict=True)) for row in zip(*parts.values(), strict=True)]
