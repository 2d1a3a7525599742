"""Pickles of what a worker needs, with classes and functions of ``__main__`` by value, also those that gin configures."""

from __future__ import annotations

import io
import types
from collections.abc import Callable
from typing import Any

import cloudpickle
import gin


def dumps(value: Any) -> bytes:
    """Like ``cloudpickle.dumps``. A class of ``__main__`` with ``@gin.configurable`` is registered again where it is unpickled, so
    that bindings reach it there."""
    with io.BytesIO() as file:
        _Pickler(file).dump(value)
        return file.getvalue()


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]  # cloudpickle has no types
    def reducer_override(self, obj: Any) -> Any:
        selector = _selector(obj)
        if selector is not None and obj.__module__ == "__main__":
            return _configurable, (obj.__wrapped__, selector)
        return super().reducer_override(obj)


def _selector(obj: Any) -> str | None:
    """The full name under which gin binds the arguments of a function that it has wrapped; None for other objects."""
    if not isinstance(obj, types.FunctionType) or not hasattr(obj, "__wrapped__") or obj.__code__.co_name != "gin_wrapper":
        return None
    cells = dict(zip(obj.__code__.co_freevars, obj.__closure__ or ()))
    return str(cells["selector"].cell_contents) if "selector" in cells else None


def _configurable(function: Callable[..., Any], selector: str) -> Callable[..., Any]:
    """Wrap a function, or the constructor of a class, as gin did."""
    module, _, name = selector.rpartition(".")
    with gin.config.interactive_mode():  # another environment of this worker may have brought it
        return gin.external_configurable(function, name=name, module=module or None)  # type: ignore[no-any-return]
