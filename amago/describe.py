"""Any value as JSON types, and as text for people: descriptions of settings, durations, lines that fit a terminal."""

from __future__ import annotations

import functools
import html
import math
import re
import shutil
import sys
import textwrap
import types
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import PurePath
from typing import Any

import gymnasium as gym
import numpy as np

_DEPTH, _ITEMS = 4, 200
_CALLABLES = type | types.FunctionType | types.BuiltinFunctionType | types.MethodType | functools._lru_cache_wrapper
_WIDTH = 40  # narrower terminals get lines as they are


def describe(value: Any, depth: int = _DEPTH) -> Any:
    """A description of a value as JSON types, without addresses in memory: equal values have equal descriptions on every machine.

    Classes and functions are "module.name". Other objects are ``{"type": class, attribute: value, ...}`` with their public
    attributes, to a depth of 4; a class may name the attributes that count in ``described_by()``. Arrays are lists, or, if they have
    more than 200 numbers, their shape and dtype.
    """
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, np.generic):
        return describe(value.item())
    if isinstance(value, int | float):
        return value if math.isfinite(value) else str(value)  # JSON has no infinity
    if isinstance(value, _CALLABLES):
        return name_of(value)
    if isinstance(value, functools.partial):
        positional = {"args": [describe(v, depth - 1) for v in value.args]} if value.args else {}
        return {"type": name_of(value.func), **positional, **{k: describe(v, depth - 1) for k, v in value.keywords.items()}}
    if hasattr(value, "shape") and hasattr(value, "tolist"):  # an array or a tensor
        if math.prod(value.shape) <= _ITEMS:
            return describe(value.tolist(), depth)
        return {"type": name_of(type(value)), "shape": list(value.shape), "dtype": str(value.dtype)}
    if isinstance(value, PurePath | gym.Space | complex) or type(value).__module__ == "torch":  # a dtype or a device
        return str(value)
    if depth == 0:
        return name_of(type(value))
    if isinstance(value, Mapping | list | tuple | set | frozenset):
        if len(value) > _ITEMS:
            return {"type": name_of(type(value)), "length": len(value)}
        if isinstance(value, Mapping):
            return {str(k): describe(v, depth - 1) for k, v in value.items()}
        items = [describe(v, depth - 1) for v in value]
        return sorted(items, key=repr) if isinstance(value, set | frozenset) else items
    return {"type": name_of(type(value)), **{k: describe(getattr(value, k, None), depth - 1) for k in _attributes(value)}}


def _attributes(value: object) -> list[str]:
    names = value.described_by() if hasattr(value, "described_by") else getattr(value, "__dict__", None)
    return [k for k in (getattr(value, "__dataclass_fields__", ()) if names is None else names) if not k.startswith("_")]


def name_of(value: object) -> str:
    """ "module.name" of a class or function; for another object, the name of its class."""
    named = value if hasattr(value, "__qualname__") else type(value)
    return f"{named.__module__}.{named.__qualname__}"


def flatten(description: object, name: str = "") -> dict[str, Any]:
    """A description as one level: the attributes of an object are {"name": its type, "name.attribute": ...}."""
    if isinstance(description, list) and any(isinstance(d, dict) for d in description):
        description = {str(i): d for i, d in enumerate(description)}
    if not isinstance(description, dict):
        return {name: description}
    out: dict[str, Any] = {}
    for key, value in description.items():
        out |= {name: value} if key == "type" and name else flatten(value, f"{name}.{key}" if name else key)
    return out or {name: {}}


def format_value(value: object, width: int = 80) -> str:
    """A description as text of at most ``width`` characters."""
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= width else f"{text[: width - 3]}..."


def text_table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table of lines, columns aligned."""
    width = [max(map(len, column)) for column in zip(heads, *rows)]
    return "\n".join("  ".join(cell.ljust(w) for cell, w in zip(row, width)).rstrip() for row in (heads, *rows))


def html_table(heads: Sequence[str], rows: Sequence[Sequence[object]], marks: Sequence[str] = ()) -> str:
    """An HTML table without empty columns; "" without rows. All text is escaped; ``marks`` are attributes of the rows, as HTML."""
    cells = [[html.escape("" if cell is None else format_value(cell, 400)) for cell in row] for row in rows]
    kept = [i for i in range(len(heads)) if any(row[i] for row in cells)]
    head = "".join(f"<th>{html.escape(heads[i])}</th>" for i in kept)
    lines = [
        f"<tr{mark}>{''.join(f'<td>{row[i]}</td>' for i in kept)}</tr>" for mark, row in zip(marks or [""] * len(rows), cells)
    ]
    return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(lines)}</tbody></table>" if rows else ""


def format_duration(seconds: float | None) -> str:
    """A time as text, "0:03:05"; "?" for None."""
    return "?" if seconds is None or not math.isfinite(seconds) else str(timedelta(seconds=round(seconds)))


def format_rate(per_second: float) -> str:
    """A number a second with three digits: "0.0123", "4.56", "1,230"."""
    return f"{per_second:,.0f}" if per_second >= 100 else f"{per_second:.3g}"


def fit_width(line: str, hang: int = 4) -> str:
    """A line broken between words to the width of the terminal; unchanged where standard output is a file or a pipe, for grep.

    Args:
        line: may begin with spaces, and have runs of them.
        hang: spaces at the start of further lines.
    """
    width = shutil.get_terminal_size().columns - 1
    if not sys.stdout.isatty() or len(line) <= width or width < _WIDTH:
        return line
    return textwrap.fill(
        line, width, subsequent_indent=" " * min(hang, width // 2), break_long_words=False, break_on_hyphens=False,
        replace_whitespace=False, drop_whitespace=True,
    )  # fmt: skip


def natural_sort_key(text: str) -> list[tuple[int, str]]:
    """A sort key that puts "Attempt 9" before "Attempt 10"."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.findall(r"\d+|\D", text)]
