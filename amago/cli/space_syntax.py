"""Action spaces as text, for ``amago buffer import --action-space``."""

from __future__ import annotations

import re
from argparse import ArgumentTypeError
from math import prod
from pathlib import Path

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
_FORMS = {
    "discrete": "discrete:N with N at least 1, or discrete:FIRST..LAST",
    "multidiscrete": "multidiscrete:N,N,.. with each N at least 1, or FIRST..LAST in its place",
    "box": "box:LOW,HIGH with numbers LOW below HIGH, or box:LOW,HIGH,SIZE with a SIZE such as 6 or 2x3",
    "bits": "bits, or bits:SIZE with a SIZE such as 6 or 2x3",
    "tuple": "tuple(SPACE;SPACE;..)",
    "dict": "dict(NAME=SPACE;..), with different names of letters, digits, _, - and .",
}
_LIMIT = 1 << 20  # more numbers than any environment has would fill the memory
_LARGEST = float(np.finfo(np.float32).max)


def parse_space(text: str, shape: tuple[int, ...] = (1,)) -> gym.Space:
    """Read an action space from text; `DETAILS` explains the syntax.

    Args:
        text: such as "discrete:4", "multidiscrete:3,4", "tuple(discrete:3; box:-1,1)".
        shape: of a box or of bits without a size; inside a tuple or dict it is (1,).

    Returns:
        a Discrete, MultiDiscrete, Box (float32) or MultiBinary, or a Tuple or Dict of these. A Dict keeps the order of the text.

    Raises:
        ValueError: the text is not a space; the message quotes the wrong part and shows the right form.
    """
    if len(text) > 1000:
        raise ValueError(f"{text[:100]!r} is not an action space: it has more than 1,000 characters")
    text = text.strip()
    found = re.fullmatch(r"(discrete|multidiscrete|box|bits)(?::(.*))?|(tuple|dict)\s*\((.*)\)", text, re.DOTALL)
    kind = found and (found[1] or found[3])
    if found is None or kind is None:
        form = next((form for kind, form in _FORMS.items() if text.startswith(kind)), KINDS)
        raise ValueError(f"{text[:200]!r} is not an action space: write {form}")
    if kind in ("tuple", "dict"):
        return _parse_parts(text, kind, _split(found[4]))
    try:
        return _parse_numbers(kind, found[2].split(",") if found[2] is not None else [], shape)
    except ValueError:
        limit = f", and at most {_LIMIT:,} numbers or choices"
        raise ValueError(f"{text[:200]!r} is not an action space: write {_FORMS[kind]}{limit}") from None


def _parse_parts(text: str, kind: str, parts: list[str]) -> gym.Space:
    if kind == "tuple" and "" not in parts:
        return gym.spaces.Tuple([parse_space(part) for part in parts])
    pairs = {name.strip(): space for name, _, space in (part.partition("=") for part in parts)}
    if kind == "tuple" or len(pairs) < len(parts) or not all(re.fullmatch(r"[\w.-]+", name) for name in pairs):
        raise ValueError(f"{text[:200]!r} is not an action space: write {_FORMS[kind]}")
    return gym.spaces.Dict([(name, parse_space(space)) for name, space in pairs.items()])  # a list keeps the order


def _parse_numbers(kind: str, words: list[str], shape: tuple[int, ...]) -> gym.Space:
    if kind in ("box", "bits"):
        size = words[2 if kind == "box" else 0 :]
        shape = tuple(map(int, size[0].split("x"))) if size else shape
        if len(size) > 1 or min(shape, default=1) < 1 or prod(shape) > _LIMIT:
            raise ValueError
        if kind == "bits":
            return gym.spaces.MultiBinary(shape if len(shape) > 1 else prod(shape))
        low, high = map(float, words[:2])
        if not (low >= -_LARGEST and high <= _LARGEST and np.float32(low) < np.float32(high)):
            raise ValueError
        return gym.spaces.Box(low, high, shape=shape, dtype=np.float32)
    ranges = []
    for word in words:
        first, dots, last = word.partition("..")
        low, high = (int(first), int(last)) if dots else (0, int(first) - 1)
        if not (low <= high < low + _LIMIT and abs(low) < 1e15):
            raise ValueError
        ranges.append((low, high - low + 1))
    if kind == "multidiscrete" and ranges:
        return gym.spaces.MultiDiscrete([n for _, n in ranges], start=[first for first, _ in ranges])
    ((first_index, n),) = ranges
    return gym.spaces.Discrete(n, start=first_index)


def _split(inside: str) -> list[str]:
    """Split at the semicolons that are outside of brackets."""
    parts, depth = [""], 0
    for c in inside:
        depth += (c == "(") - (c == ")")
        if c == ";" and depth == 0:
            parts.append("")
        else:
            parts[-1] += c
    return [part.strip() for part in parts]


def space_argument(text: str) -> str:
    """The type of ``--action-space``: checks the text and returns it. It is parsed later, when the shape of actions is known."""
    try:
        parse_space(text)
    except ValueError as err:
        raise ArgumentTypeError(f"{text[:200]!r}: {err}") from err
    return text


def space_of_actions(space: gym.Space | str | None, actions: np.ndarray | dict[str, np.ndarray], path: Path) -> gym.Space:
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
            named = ", actions/".join(sorted(actions))
            raise ValueError(
                f"{path} has actions/{named}; name their spaces with --action-space 'dict(NAME=SPACE;..)' or --env"
            )
        return parse_space(space)
    if space is None and (actions.dtype.kind != "f" or not np.abs(actions).max(initial=0.0) <= 1):
        raise ValueError(
            f"{path}: actions of dtype {actions.dtype} and shape {actions.shape} are not in a Box from -1 to 1; name their space "
            f"with --action-space ({KINDS}) or --env"
        )
    return parse_space(space or "box:-1,1", actions.shape[1:])


def space_text(space: gym.Space) -> str | None:
    """The text that `parse_space` reads as this space; None where the syntax cannot express it, such as bounds that differ within
    a box."""
    text = _write(space)
    try:
        return text if action_spec(parse_space(text)).space == space else None
    except (ValueError, TypeError):
        return None


def _write(space: gym.Space) -> str:
    """The text of a space; wrong where the syntax cannot express it."""
    spaces = gym.spaces
    if isinstance(space, spaces.Discrete | spaces.MultiDiscrete):
        single = isinstance(space, spaces.Discrete)
        pairs = zip(np.ravel(space.start), np.ravel(space.n if isinstance(space, spaces.Discrete) else space.nvec))
        ranges = ",".join(str(n) if first == 0 else f"{first}..{first + n - 1}" for first, n in pairs)
        return f"{'discrete' if single else 'multidiscrete'}:{ranges}"
    if isinstance(space, spaces.MultiBinary):
        return f"bits:{'x'.join(map(str, space.shape))}"
    if isinstance(space, spaces.Box) and space.low.size:
        low, high = (str(float(bound.flat[0])).removesuffix(".0") for bound in (space.low, space.high))
        return f"box:{low},{high},{'x'.join(map(str, space.shape))}"
    if isinstance(space, spaces.Tuple):
        return f"tuple({';'.join(map(_write, space.spaces))})"
    if isinstance(space, spaces.Dict):
        return f"dict({';'.join(f'{name}={_write(sub)}' for name, sub in space.spaces.items())})"
    return ""
