"""Action spaces as text, for ``amago buffer import --action-space``."""

from __future__ import annotations

import re
from argparse import ArgumentTypeError
from collections import OrderedDict
from math import prod
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np

from amago.spaces.actions import action_spec

KINDS = "discrete:N, multidiscrete:N,N,.., box:LOW,HIGH, bits, tuple(SPACE;SPACE;..) or dict(NAME=SPACE;..)"
DETAILS = """\
a SPACE is one of
  discrete:N                  an index from 0 to N-1; or discrete:FIRST..LAST
  multidiscrete:N,N,..        several indices; FIRST..LAST here too
  box:LOW,HIGH,SIZE           numbers; SIZE is their count (6) or shape (2x3)
  bits:SIZE                   bits; SIZE likewise
  'tuple(SPACE;SPACE;..)'     several spaces, which may be nested; quoted,
  'dict(NAME=SPACE;..)'       because the shell would interpret ( and ;
Without a SIZE, box and bits have the shape of the recorded actions; inside a
tuple or dict they are one number. The numbers of a tuple or dict lie side by
side in each row of actions, in the order written here; or an .npz file has an
array actions/NAME for each part ("arm/grip" for a part of a part, "0", "1", ..
for those of a tuple). Example:
  --action-space 'dict(drive=discrete:3; steer=box:-30,30; switches=bits:2)'
"""

_MAX_NUMBERS = 1 << 20  # numbers in a box or bits, choices of an index
_MAX_DEPTH = 20  # of nested tuples and dicts
_MAX_QUOTED = 200  # characters of the text that a message quotes
_INDEX = r"(?:-?[0-9]{1,15}\.\.)?-?[0-9]{1,15}"
_SIZE = r"[1-9][0-9]{0,6}(?:x[1-9][0-9]{0,6}){0,7}"
_FORMS = {  # kind -> (pattern of what follows it, how to write it)
    "discrete": (rf":\s*({_INDEX})", "discrete:N with N at least 1, or discrete:FIRST..LAST"),
    "multidiscrete": (
        rf":\s*({_INDEX}(?:\s*,\s*{_INDEX})*)",
        "multidiscrete:N,N,.. with each N at least 1, or FIRST..LAST in its place",
    ),
    "box": (
        rf":\s*([^,]+),([^,]+?)(?:,\s*({_SIZE}))?",
        "box:LOW,HIGH with numbers LOW below HIGH, or box:LOW,HIGH,SIZE with a SIZE such as 6 or 2x3",
    ),
    "bits": (rf"(?::\s*({_SIZE}))?", "bits, or bits:SIZE with a SIZE such as 6 or 2x3"),
    "tuple": (r"\s*\((.*)\)", "tuple(SPACE;SPACE;..), with a SPACE on each side of every semicolon"),
    "dict": (r"\s*\((.*)\)", "dict(NAME=SPACE;..), with names of letters, digits, _, - and ."),
}


class _SyntaxError(Exception):
    def __init__(self, part: str, problem: str) -> None:
        self.part, self.problem = part, problem


def parse_space(text: str, shape: tuple[int, ...] = (1,)) -> gym.Space[Any]:
    """Read an action space from text; `DETAILS` explains the syntax.

    Args:
        text: such as "discrete:4", "multidiscrete:3,4", "tuple(discrete:3; box:-1,1)".
        shape: of a box or of bits without a size; inside a tuple or dict it is (1,).

    Returns:
        a Discrete, MultiDiscrete, Box (float32) or MultiBinary, or a Tuple or Dict of these. A Dict keeps the order of the text.

    Raises:
        ValueError: the text is not a space; the message quotes the wrong part and says how to write it.
    """
    try:
        return _parse(text.strip(), shape, 0)
    except _SyntaxError as err:
        within = "" if err.part == text.strip() else f" in {_quoted(text)}"
        raise ValueError(f"{_quoted(err.part)}{within} is not an action space: {err.problem}") from None


def space_argument(text: str) -> str:
    """The type of ``--action-space``: checks the text and returns it. It is parsed later, when the shape of actions is known."""
    try:
        parse_space(text)
    except ValueError as err:
        raise ArgumentTypeError(str(err)) from err
    return text


def fitted(space: gym.Space[Any] | str | None, actions: Any, path: Path) -> gym.Space[Any]:
    """The space of recorded actions.

    Args:
        space: the space, a text for `parse_space`, or None: a Box from -1 to 1.
        actions: (N, ...), or {part: (N, ...)}.
        path: the file of the actions, for messages.

    Raises:
        ValueError: the space is None, and the actions are not numbers from -1 to 1.
    """
    if isinstance(space, gym.Space):
        return space
    if isinstance(actions, dict):
        if space is None:
            raise ValueError(
                f"{path} has actions/{', actions/'.join(sorted(actions))}; name their spaces with --action-space "
                "'dict(NAME=SPACE;..)' or --env"
            )
        return parse_space(space)
    if space is None:
        if actions.dtype.kind != "f" or not np.abs(actions).max(initial=0.0) <= 1:
            raise ValueError(
                f"{path}: actions of dtype {actions.dtype} and shape {actions.shape} are not in a Box from -1 to 1; name their space "
                f"with --action-space ({KINDS}) or --env"
            )
        space = "box:-1,1"
    return parse_space(space, actions.shape[1:])


def space_text(space: gym.Space[Any]) -> str | None:
    """The text that `parse_space` reads as this space; None where the syntax cannot express it, such as bounds that differ within
    a box."""
    text = _written(space)
    try:
        return text if text and action_spec(parse_space(text)).space == space else None
    except (ValueError, TypeError):
        return None


# ---- reading ---------------------------------------------------------------------------------------------------------------


def _parse(text: str, shape: tuple[int, ...], depth: int) -> gym.Space[Any]:
    kind = text[: len(text) - len(text.lstrip("abcdefghijklmnopqrstuvwxyz"))]
    if kind not in _FORMS:
        raise _SyntaxError(text, f"write {KINDS}")
    if depth > _MAX_DEPTH:
        raise _SyntaxError(text, f"tuples and dicts may be nested {_MAX_DEPTH} deep")
    pattern, form = _FORMS[kind]
    found = re.fullmatch(pattern, text[len(kind) :], re.DOTALL)
    if found is None:
        raise _SyntaxError(text, f"write {form}")
    if kind in ("tuple", "dict"):
        parts = _split(text, found[1])
        return _tuple(text, parts, depth) if kind == "tuple" else _dict(text, parts, depth)
    if kind == "box":
        return _box(text, found[1], found[2], _shape(text, found[3], shape))
    if kind == "bits":
        shape = _shape(text, found[1], shape)
        return gym.spaces.MultiBinary(shape if len(shape) > 1 else prod(shape))
    ranges = [_first_and_count(text, part.strip(), form) for part in found[1].split(",")]
    firsts, counts = [first for first, _ in ranges], [count for _, count in ranges]
    if kind == "discrete":
        return gym.spaces.Discrete(counts[0], start=firsts[0])
    return gym.spaces.MultiDiscrete(counts, start=firsts)


def _split(text: str, inside: str) -> list[str]:
    """Split at the semicolons that are outside of brackets."""
    parts, depth = [""], 0
    for c in inside:
        depth += (c == "(") - (c == ")")
        if depth < 0:
            raise _SyntaxError(text, "it has a closing bracket without an opening one")
        if c == ";" and depth == 0:
            parts.append("")
        else:
            parts[-1] += c
    if depth:
        raise _SyntaxError(text, "it has an opening bracket without a closing one")
    return [part.strip() for part in parts]


def _tuple(text: str, parts: list[str], depth: int) -> gym.Space[Any]:
    if "" in parts:
        raise _SyntaxError(text, f"write {_FORMS['tuple'][1]}")
    return gym.spaces.Tuple([_parse(part, (1,), depth + 1) for part in parts])


def _dict(text: str, parts: list[str], depth: int) -> gym.Space[Any]:
    spaces: OrderedDict[str, gym.Space[Any]] = OrderedDict()
    for part in parts:
        name, equals, space = (word.strip() for word in part.partition("="))
        if not equals or not re.fullmatch(r"[\w.-]+", name):
            raise _SyntaxError(part or text, f"write {_FORMS['dict'][1]}")
        if name in spaces:
            raise _SyntaxError(text, f"two of its parts are called {name}")
        spaces[name] = _parse(space, (1,), depth + 1)
    return gym.spaces.Dict(spaces)


def _first_and_count(text: str, index: str, form: str) -> tuple[int, int]:
    first, dots, last = index.partition("..")
    low, high = (int(first), int(last)) if dots else (0, int(index) - 1)
    if high < low:
        raise _SyntaxError(text, f"write {form}")
    if high - low >= _MAX_NUMBERS:
        raise _SyntaxError(text, f"{high - low + 1:,} choices are more than the {_MAX_NUMBERS:,} that are supported")
    return low, high - low + 1


def _box(text: str, low: str, high: str, shape: tuple[int, ...]) -> gym.Space[Any]:
    try:
        bounds = float(low), float(high)
    except ValueError:
        bounds = np.nan, np.nan
    finite = all(abs(bound) <= float(np.finfo(np.float32).max) for bound in bounds)
    if not finite or not np.float32(bounds[0]) < np.float32(bounds[1]):
        raise _SyntaxError(text, f"write {_FORMS['box'][1]}")
    return gym.spaces.Box(bounds[0], bounds[1], shape=shape, dtype=np.float32)


def _shape(text: str, size: str | None, default: tuple[int, ...]) -> tuple[int, ...]:
    if size is None:
        return default
    shape = tuple(int(n) for n in size.split("x"))
    if prod(shape) > _MAX_NUMBERS:
        raise _SyntaxError(text, f"{prod(shape):,} numbers are more than the {_MAX_NUMBERS:,} that are supported")
    return shape


def _quoted(text: str) -> str:
    return repr(text if len(text) <= _MAX_QUOTED else f"{text[: _MAX_QUOTED - 3]}...")


# ---- writing ---------------------------------------------------------------------------------------------------------------


def _written(space: gym.Space[Any]) -> str | None:
    """The text of a space; wrong where the syntax cannot express it."""
    if isinstance(space, gym.spaces.Discrete):
        return f"discrete:{_range(int(space.start), int(space.n))}"
    if isinstance(space, gym.spaces.MultiDiscrete):
        pairs = zip(np.ravel(space.start), np.ravel(space.nvec), strict=True)
        return "multidiscrete:" + ",".join(_range(int(first), int(n)) for first, n in pairs)
    if isinstance(space, gym.spaces.MultiBinary):
        return f"bits:{'x'.join(map(str, space.shape))}"
    if isinstance(space, gym.spaces.Box) and space.low.size:
        low, high = (str(float(bound.flat[0])).removesuffix(".0") for bound in (space.low, space.high))
        return f"box:{low},{high},{'x'.join(map(str, space.shape))}"
    if isinstance(space, gym.spaces.Tuple):
        return f"tuple({';'.join(_written(sub) or '' for sub in space.spaces)})"
    if isinstance(space, gym.spaces.Dict):
        return f"dict({';'.join(f'{name}={_written(sub)}' for name, sub in space.spaces.items())})"
    return None


def _range(first: int, n: int) -> str:
    return str(n) if first == 0 else f"{first}..{first + n - 1}"
