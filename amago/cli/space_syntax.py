"""Action spaces as one writes them on a command line, and the other way round."""

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
  discrete:N                  one of 0 to N-1; or discrete:FIRST..LAST
  multidiscrete:N,N,..        several of these; FIRST..LAST here too
  box:LOW,HIGH,SIZE           numbers: so many (6), or of a shape (2x3)
  bits:SIZE                   bits, likewise
  'tuple(SPACE;SPACE;..)'     several spaces, nested or not; in quotes, as
  'dict(NAME=SPACE;..)'       the shell would read ( and ; itself
Without ,SIZE or :SIZE, a box or bits is one number inside a tuple or dict,
else of the shape that the recording has. The numbers of a tuple or dict lie
side by side in each row of actions, in the order written here; or an .npz
file has an array actions/NAME for each part ("arm/grip" for a part of a part,
"0", "1", .. for those of a tuple). Example:
  --action-space 'dict(drive=discrete:3; steer=box:-30,30; switches=bits:2)'
"""

_MOST = 1 << 20  # numbers of one part
_DEEPEST = 20  # tuples and dicts inside each other
_LONG = 200  # characters of a text that a message quotes
_NUMBER = r"-?[0-9]{1,15}"
_NAME = r"[\w.-]+"


class _Wrong(Exception):
    def __init__(self, part: str, right: str) -> None:
        self.part, self.right = part, right


def parse_space(text: str, shape: tuple[int, ...] = (1,)) -> gym.Space[Any]:
    """The space that a text stands for; `DETAILS` explains the syntax.

    Args:
        text: such as "discrete:4", "multidiscrete:3,4", "tuple(discrete:3; box:-1,1)".
        shape: of a box or of bits without a size. Inside a tuple or dict that is one number.

    Returns:
        a Discrete, MultiDiscrete, Box (float32) or MultiBinary, or a Tuple or Dict of these. A Dict keeps the order of the text.

    Raises:
        ValueError: the text means nothing; the message quotes the part at fault and says what would be right there.
    """
    try:
        return _space(text.strip(), shape, 0)
    except _Wrong as wrong:
        within = "" if wrong.part == text.strip() else f" in {_quoted(text)}"
        raise ValueError(f"{_quoted(wrong.part)}{within} is no action space: {wrong.right}") from None


def space_argument(text: str) -> str:
    """An argument type: what `parse_space` reads, left as it is, since the recording may have to say a size."""
    try:
        parse_space(text)
    except ValueError as err:
        raise ArgumentTypeError(str(err)) from err
    return text


def fitted(space: gym.Space[Any] | str | None, actions: Any, path: Path) -> gym.Space[Any]:
    """The space of recorded actions.

    Args:
        space: what is known of it: all, a text for `parse_space`, or nothing: then it is a Box from -1 to 1.
        actions: (N, ...), or {part: (N, ...)}.
        path: names them in errors.

    Raises:
        ValueError: it cannot be a Box from -1 to 1.
    """
    if isinstance(space, gym.Space):
        return space
    if isinstance(actions, dict):
        if space is None:
            raise ValueError(
                f"{path} has actions/{', actions/'.join(sorted(actions))}; say what they are with --action-space "
                "'dict(NAME=SPACE;..)' or --env"
            )
        return parse_space(space)
    if space is None:
        if actions.dtype.kind != "f" or not np.abs(actions).max(initial=0.0) <= 1:
            raise ValueError(
                f"{path}: actions of dtype {actions.dtype} and shape {actions.shape} are not in a Box from -1 to 1; say what they are with "
                f"--action-space ({KINDS}) or --env"
            )
        space = "box:-1,1"
    return parse_space(space, actions.shape[1:])


def _quoted(text: str) -> str:
    return repr(text if len(text) <= _LONG else f"{text[: _LONG - 3]}...")


def space_text(space: gym.Space[Any]) -> str | None:
    """What `parse_space` reads as this space; None where the syntax has no word for it (as for bounds that differ within a box)."""
    text = _written(space)
    try:
        return text if text and action_spec(parse_space(text)).space == space else None
    except (ValueError, TypeError):
        return None


def _space(text: str, shape: tuple[int, ...], depth: int) -> gym.Space[Any]:
    if depth > _DEEPEST:
        raise _Wrong(text, f"no more than {_DEEPEST} tuples and dicts may lie inside each other")
    if found := re.fullmatch(r"(tuple|dict)\s*\((.*)\)", text, re.DOTALL):
        return _tuple(text, found[2], depth) if found[1] == "tuple" else _dict(text, found[2], depth)
    kind, colon, rest = text.partition(":")
    rest = rest.strip()
    if kind == "discrete" and colon:
        first, n = _choices(text, rest, "write discrete:N with N from 1, or discrete:FIRST..LAST")
        return gym.spaces.Discrete(n, start=first)
    if kind == "multidiscrete" and colon:
        right = "write multidiscrete:N,N,.. with each N from 1, or FIRST..LAST in its place"
        pairs = [_choices(text, part.strip(), right) for part in rest.split(",")]
        return gym.spaces.MultiDiscrete([n for _, n in pairs], start=[first for first, _ in pairs])
    if kind == "box" and colon:
        return _box(text, rest, shape)
    if kind == "bits":
        if colon:
            shape = _shape(text, rest, "write bits:SIZE, with a SIZE such as 6 or 2x3")
        return gym.spaces.MultiBinary(shape if len(shape) > 1 else prod(shape))
    if found := re.match(r"(tuple|dict)\b", text):
        raise _Wrong(text, "write " + ("tuple(SPACE;SPACE;..)" if found[1] == "tuple" else "dict(NAME=SPACE;..)"))
    raise _Wrong(text, f"write {KINDS}")


def _pieces(text: str, inside: str) -> list[str]:
    """What semicolons separate that are in no brackets of their own."""
    pieces, depth = [""], 0
    for c in inside:
        depth += (c == "(") - (c == ")")
        if depth < 0:
            raise _Wrong(text, "a bracket is closed that was not opened")
        if c == ";" and depth == 0:
            pieces.append("")
        else:
            pieces[-1] += c
    if depth:
        raise _Wrong(text, "a bracket is opened that is not closed")
    return [piece.strip() for piece in pieces]


def _tuple(text: str, inside: str, depth: int) -> gym.Space[Any]:
    pieces = _pieces(text, inside)
    if "" in pieces:
        raise _Wrong(text, "write tuple(SPACE;SPACE;..), with a space on each side of every semicolon")
    return gym.spaces.Tuple([_space(piece, (1,), depth + 1) for piece in pieces])


def _dict(text: str, inside: str, depth: int) -> gym.Space[Any]:
    spaces: OrderedDict[str, gym.Space[Any]] = OrderedDict()
    for piece in _pieces(text, inside):
        name, equals, space = (part.strip() for part in piece.partition("="))
        if not equals or not re.fullmatch(_NAME, name):
            raise _Wrong(piece or text, "a part of a dict is NAME=SPACE, with a name of letters, digits, _, - and .")
        if name in spaces:
            raise _Wrong(text, f"two of its parts are called {name}")
        spaces[name] = _space(space, (1,), depth + 1)
    return gym.spaces.Dict(spaces)


def _choices(text: str, part: str, right: str) -> tuple[int, int]:
    """(first, count) of N or FIRST..LAST."""
    found = re.fullmatch(rf"({_NUMBER})(?:\.\.({_NUMBER}))?", part)
    if found is None:
        raise _Wrong(text, right)
    first, last = (0, int(found[1]) - 1) if found[2] is None else (int(found[1]), int(found[2]))
    if last < first:
        raise _Wrong(text, right)
    if last - first >= _MOST:
        raise _Wrong(text, f"{last - first + 1:,} choices are more than the {_MOST:,} that are possible")
    return first, last - first + 1


def _box(text: str, rest: str, shape: tuple[int, ...]) -> gym.Space[Any]:
    right = "write box:LOW,HIGH with numbers LOW below HIGH, or box:LOW,HIGH,SIZE with a SIZE such as 6 or 2x3"
    low, high, size = ([part.strip() for part in rest.split(",")] + [""] * 3)[:3]
    if rest.count(",") > 2 or (rest.count(",") == 2 and not size):
        raise _Wrong(text, right)
    if size:
        shape = _shape(text, size, right)
    try:
        bounds = float(low), float(high)
    except ValueError:
        raise _Wrong(text, right) from None
    most = float(np.finfo(np.float32).max)
    if not all(abs(x) <= most for x in bounds) or not np.float32(bounds[0]) < np.float32(bounds[1]):
        raise _Wrong(text, right)
    return gym.spaces.Box(*bounds, shape=shape, dtype=np.float32)


def _shape(text: str, size: str, right: str) -> tuple[int, ...]:
    if not re.fullmatch(r"[1-9][0-9]{0,6}(x[1-9][0-9]{0,6}){0,7}", size):
        raise _Wrong(text, right)
    shape = tuple(int(n) for n in size.split("x"))
    if prod(shape) > _MOST:
        raise _Wrong(text, f"{prod(shape):,} numbers are more than the {_MOST:,} that are possible")
    return shape


def _written(space: gym.Space[Any]) -> str | None:
    """The text of a space, right or, where the syntax has none, wrong."""
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
