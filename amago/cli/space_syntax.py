"""Action spaces as text, for ``amago buffer import --action-space``."""

from __future__ import annotations

import re
from argparse import ArgumentTypeError
from math import prod
from pathlib import Path

import gymnasium as gym
import numpy as np

KINDS = "discrete:N, multidiscrete:N,N,.., box:LOW,HIGH, bits, tuple(SPACE;SPACE;..) or dict(NAME=SPACE;..)"
DETAILS = """\
a SPACE is one of
  discrete:N                  an index from 0 to N-1
  multidiscrete:N,N,..        several indices
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
    "discrete": "discrete:N with N at least 1",
    "multidiscrete": "multidiscrete:N,N,.. with each N at least 1",
    "box": "box:LOW,HIGH with numbers LOW below HIGH, or box:LOW,HIGH,SIZE with a SIZE such as 6 or 2x3",
    "bits": "bits, or bits:SIZE with a SIZE such as 6 or 2x3",
    "tuple": "tuple(SPACE;SPACE;..)",
    "dict": "dict(NAME=SPACE;..), with different names of letters, digits, _, - and .",
}
_LIMIT = 1 << 20  # more numbers than any environment has would fill the memory


def parse_space(text: str, shape: tuple[int, ...] = (1,)) -> gym.Space:
    """Read an action space from text, such as "discrete:4" or "tuple(discrete:3; box:-1,1)"; `DETAILS` explains the syntax.

    ``shape`` is that of a box or of bits without a size; inside a tuple or dict it is (1,). A ValueError quotes the wrong part of the text
    and shows the right form.
    """
    text = text.strip()
    kind = next((kind for kind in _FORMS if text.startswith(kind)), "")
    inside = text.removeprefix(kind).strip()
    refusal = ValueError(f"{text[:200]!r} is not an action space: write {_FORMS.get(kind, KINDS)}; at most {_LIMIT:,} numbers")
    if kind in ("tuple", "dict"):
        parts = _split(inside[1:-1])
        names = [part.partition("=")[0].strip() if kind == "dict" else str(i) for i, part in enumerate(parts)]
        named = len(set(names)) == len(names) and all(re.fullmatch(r"[\w.-]+", name) for name in names)
        if not (inside.startswith("(") and inside.endswith(")") and all(parts) and named):
            raise refusal
        if kind == "tuple":
            return gym.spaces.Tuple(map(parse_space, parts))
        return gym.spaces.Dict([(name, parse_space(part.partition("=")[2])) for name, part in zip(names, parts)])
    words = inside[1:].split(",") if inside else []
    try:
        if kind in ("box", "bits"):
            numbers, sizes = ([float(w) for w in words[:2]], words[2:]) if kind == "box" else ([], words)
            shape = tuple(map(int, sizes[0].split("x"))) if sizes else shape
            if len(sizes) < 2 and min(shape, default=1) > 0 and prod(shape) <= _LIMIT and inside[:1] in ("", ":"):
                if kind == "bits":
                    return gym.spaces.MultiBinary(shape if len(shape) > 1 else prod(shape))
                low, high = np.array(numbers, np.float32)
                if np.isfinite([low, high]).all() and low < high:
                    return gym.spaces.Box(low, high, shape=shape, dtype=np.float32)
        sizes_of = [int(word) for word in words]
        if kind and sizes_of and min(sizes_of) > 0 and max(sizes_of) <= _LIMIT and inside.startswith(":"):
            if kind == "multidiscrete":
                return gym.spaces.MultiDiscrete(sizes_of)
            if kind == "discrete" and len(sizes_of) == 1:
                return gym.spaces.Discrete(sizes_of[0])
    except ValueError:
        raise refusal from None
    raise refusal


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
    """The space of recorded actions, (N, ...) or {part: (N, ...)}.

    ``space`` is a space, a text for `parse_space`, or None: a Box from -1 to 1, if the actions are such numbers. ``path`` is for messages.
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
