"""Values as JSON, for records of settings: equal settings have equal descriptions, in every process and on every machine."""

from __future__ import annotations

import functools
import inspect
import math
import types
from collections.abc import Iterable, Mapping
from pathlib import PurePath
from typing import Any

import gymnasium as gym
import numpy as np
import torch

from amago.loading import RLDataset

_DEPTH = 4
_ITEMS = 200


def described(value: Any, depth: int = _DEPTH) -> Any:
    """A description of a value as JSON types, without addresses in memory, so that descriptions can be compared.

    Classes and functions are "module.name". Other objects are ``{"type": class, attribute: value, ...}`` with their public
    attributes, to a depth of 4. Arrays are lists, or, if they have more than 200 numbers, their shape and dtype.
    """
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int | float | np.generic) and np.ndim(value) == 0:
        return _number(value)
    if isinstance(value, PurePath):
        return str(value)
    if isinstance(value, functools.partial):
        keywords = {k: described(v, depth - 1) for k, v in value.keywords.items()}
        positional = [described(v, depth - 1) for v in value.args]
        return {"type": name_of(value.func), **({"args": positional} if positional else {}), **keywords}
    if isinstance(
        value, type | types.FunctionType | types.BuiltinFunctionType | types.MethodType | functools._lru_cache_wrapper
    ):
        return name_of(value)
    if isinstance(value, np.ndarray | torch.Tensor):
        small = value.numel() if isinstance(value, torch.Tensor) else value.size
        return described(value.tolist(), depth) if small <= _ITEMS else _large(value)
    if isinstance(value, gym.Space | torch.dtype | torch.device):
        return str(value)
    if depth == 0:
        return name_of(type(value))
    if isinstance(value, Mapping) and len(value) <= _ITEMS:
        return {str(k): described(v, depth - 1) for k, v in value.items()}
    if isinstance(value, Mapping | list | tuple | set | frozenset):
        if len(value) > _ITEMS:
            return {"type": name_of(type(value)), "length": len(value)}
        items = [described(v, depth - 1) for v in value]
        return sorted(items, key=repr) if isinstance(value, set | frozenset) else items
    return {"type": name_of(type(value)), **_attributes(value, depth)}


def _number(value: Any) -> Any:
    number = value.item() if isinstance(value, np.generic) else value
    if isinstance(number, float) and not math.isfinite(number):
        return str(number)  # JSON has no infinity
    return number if isinstance(number, bool | int | float | str) else str(number)


def _large(array: Any) -> dict[str, Any]:
    return {"type": name_of(type(array)), "shape": list(array.shape), "dtype": str(array.dtype)}


def _attributes(value: Any, depth: int) -> dict[str, Any]:
    found = getattr(value, "__dict__", None)
    names: Iterable[str] = found if isinstance(found, dict) else getattr(type(value), "__dataclass_fields__", ())
    public = [k for k in names if not k.startswith("_")]
    if isinstance(value, RLDataset):  # its arguments; other attributes are what it has found in its files
        public = [k for k in inspect.signature(type(value).__init__).parameters if k != "self" and hasattr(value, k)]
    return {k: described(getattr(value, k, None), depth - 1) for k in public}


def name_of(value: Any) -> str:
    """ "module.name" of a class or function; of another object, that of its class."""
    if not hasattr(value, "__qualname__"):
        value = type(value)
    return f"{value.__module__}.{value.__qualname__}"


def flattened(description: Any, name: str) -> dict[str, Any]:
    """A description as {"name": ...}; the attributes of an object are {"name": its type, "name.attribute": ...}."""
    if isinstance(description, list) and any(isinstance(d, dict) for d in description):
        description = {str(i): d for i, d in enumerate(description)}
    if not isinstance(description, dict):
        return {name: description}
    out: dict[str, Any] = {}
    for key, value in description.items():
        out |= {name: value} if key == "type" else flattened(value, f"{name}.{key}")
    return out or {name: {}}


def shown(value: Any) -> str:
    """A description as text for a message, at most 80 characters."""
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
