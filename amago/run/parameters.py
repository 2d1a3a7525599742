"""The parameters of configurables: which a run uses, with which values, defaults included."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import gin

from amago import config

Calls = dict[str, dict[str, Any]]
"""{selector: {parameter: value}} of configurables that were called, without the arguments that the caller gave."""


@contextmanager
def recording() -> Iterator[Calls]:
    """Within the block, record which configurables are called. The result is complete when the block has ended."""
    calls: Calls = {}
    operative = gin.config._OPERATIVE_CONFIG
    before = {key: dict(values) for key, values in operative.items()}
    operative.clear()
    try:
        yield calls
    finally:
        for (_, selector), values in operative.items():
            calls.setdefault(selector, {}).update(values)
        for key, values in before.items():
            operative[key] = {**values, **operative.get(key, {})}


def parameters_in_force(parts: Iterable[Any], calls: Calls | None = None) -> dict[str, Any]:
    """The parameters of configurables with their values, {"selector.parameter": value}, defaults included.

    Args:
        parts: classes or functions, configurable or not. Base classes count, for the parameters that a class has not named anew, and
            so do configurables that are the value of a parameter, such as ``Agent.critic_type``.
        calls: of `recording`; these configurables count, too, and parameters that their callers gave do not.
    """
    bound, found = resolved_bindings(), {}
    waiting = [*parts, *(config._registry()[selector].wrapped for selector in calls or ())]
    seen = set()
    while waiting:
        part = waiting.pop()
        if id(part) in seen:
            continue
        seen.add(id(part))
        names: set[str] = set()  # that a class nearer to the part has
        for selectors in _selectors_of(part):
            new = {f"{selector}.{k}": v for selector in selectors for k, v in defaults_of(selector).items() if k not in names}
            names |= {full.rpartition(".")[2] for full in new}
            for full, default in new.items():
                selector, _, name = full.rpartition(".")
                called = None if calls is None else calls.get(selector)
                if called is not None and name not in called and gin.config._is_literally_representable(default):
                    continue  # gin records all such defaults: the caller gave another value
                value = found[full] = bound.get(full, default)
                waiting += [value] if callable(value) else []
    return found


def _selectors_of(part: Any) -> list[list[str]]:
    """The full names of a function, or of a class and then of each of its base classes; [] for one that is not configurable."""
    family = part.__mro__ if isinstance(part, type) else (part,)
    entries = config._registry().items()
    return [[full for full, entry in entries if entry.wrapped is p or entry.wrapper is p] for p in family]


def default_of(parameter: str) -> Any:
    """The default in the signature of a parameter, given as "selector.parameter" or "scope/selector.parameter".

    Raises:
        KeyError: there is no such configurable in this process, or it has no such default.
    """
    selector, _, name = parameter.rpartition("/")[2].rpartition(".")
    return defaults_of(selector)[name]


def configurable(selector: str) -> Any:
    """The class or function with this full name; None if this process has imported none."""
    return config._registry()[selector].wrapped if selector in config._registry() else None


def defaults_of(selector: str) -> dict[str, Any]:
    """The parameters of a configurable that have a default value, which is not necessarily in force."""
    wrapped = config._registry()[selector].wrapped
    signature = inspect.signature(wrapped.__init__ if inspect.isclass(wrapped) else wrapped)
    return {
        name: p.default
        for name, p in signature.parameters.items()
        if p.default is not p.empty and p.default is not gin.REQUIRED
    }


def resolved_bindings() -> dict[str, Any]:
    """`bindings`, with the classes and functions that ``@Name`` in a gin file refers to."""
    reference = gin.config.ConfigurableReference
    return {k: v.configurable.wrapped if isinstance(v, reference) else v for k, v in config.bindings().items()}
