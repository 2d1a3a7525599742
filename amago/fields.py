"""Fields of settings and of options: each is declared in one line, with a rule for its values."""

from __future__ import annotations

import dataclasses
import math
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

_WHOLE, _REAL = int | np.integer, int | float | np.integer | np.floating
Check = Callable[[str, Any], str | None]
"""Returns the fault of a field, given by its name and its value; None if it has none."""


@dataclass(frozen=True)
class Rule:
    """A `Check` whose message is "must be WHAT" unless ``ok`` returns True for the value."""

    what: str
    ok: Callable[[Any], bool]

    def __call__(self, name: str, value: object) -> str | None:
        return None if self.ok(value) else f"{name} must be {self.what}, got {value!r}"


def whole(least: int) -> Rule:
    """A whole number from 0 or 1 on."""
    what = "a whole number of 0 or more" if least == 0 else f"a whole number of at least {least}"
    return Rule(what, lambda v: isinstance(v, _WHOLE) and not isinstance(v, bool) and v >= least)


def number(least: float | None = None, above: float = -math.inf, finite: bool = False) -> Rule:
    """A number of at least ``least``, or greater than ``above``; infinity counts unless ``finite``."""
    bound = "" if above == -math.inf else f" above {above:g}"
    bound = bound if least is None else " of 0 or more" if least == 0 else f" of at least {least:g}"

    def ok(v: object) -> bool:
        if not isinstance(v, _REAL) or isinstance(v, bool) or math.isnan(v) or (finite and math.isinf(v)):
            return False
        return bool(v > above if least is None else v >= least)

    return Rule(f"a {'finite ' if finite else ''}number{bound}", ok)


def within(interval: str, ok: Callable[[float], bool]) -> Rule:
    """A number in an interval, such as "[0, 1)"."""
    return Rule(f"a number in {interval}", lambda v: isinstance(v, _REAL) and not isinstance(v, bool) and ok(v))


def one_of(*known: object) -> Rule:
    """One of some texts, or None if that is one of them."""
    return Rule(f"one of {', '.join(map(repr, known))}", lambda v: (v is None or isinstance(v, str)) and v in known)


def text(what: str, pattern: str = r"(?s).*") -> Rule:
    """A text of some pattern."""
    return Rule(what, lambda v: isinstance(v, str) and re.fullmatch(pattern, v) is not None)


def optional(rule: Rule) -> Rule:
    """A rule that allows None and the values that another rule allows."""
    return Rule(f"None or {rule.what}", lambda v: v is None or rule.ok(v))


switch = Rule("True or False", lambda v: isinstance(v, bool))
path = Rule("a path", lambda v: isinstance(v, str | os.PathLike) and bool(os.fspath(v)))


def declare(default: object, check: Check | None = None, **about: object) -> Any:
    """A field of a dataclass.

    Args:
        default: its value, or a function, which is no class, that makes it.
        check: of a value; None: there is none.
        about: further metadata.
    """
    made = callable(default) and not isinstance(default, type)
    return dataclasses.field(**{"default_factory" if made else "default": default}, metadata={"check": check, **about})  # type: ignore[call-overload]


def faults(obj: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
    """(name, fault) of each field of a dataclass, with this prefix, whose check refuses its value."""
    values = vars(obj)
    for f in dataclasses.fields(obj):
        check = f.metadata.get("check")
        if check is not None and f.name.startswith(prefix) and (fault := check(f.name, values[f.name])) is not None:
            yield f.name, fault
