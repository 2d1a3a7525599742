"""An extension of Griffe, which reads the library for the reference.

`a, b: text` in a section `Args:` or `Attributes:` documents two names, and a comment documents a constant.
"""

from __future__ import annotations

import re
from typing import Any

import griffe

_SECTION = re.compile(r"^(?P<indent> *)(Args|Attributes):\n(?P<body>(?:(?P=indent) +.*\n?|\s*\n)+)", flags=re.MULTILINE)
_JOINT = re.compile(r"(\*{0,2}\w+(?:, \*{0,2}\w+)+)( \([^)]*\))?: ")


class Docstrings(griffe.Extension):
    """Changes docstrings before Griffe parses them."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring:
            obj.docstring.value = split(obj.docstring.value)

    def on_attribute_instance(self, *, attr: griffe.Attribute, **_: Any) -> None:
        if attr.docstring is None and attr.name.isupper() and isinstance(attr.parent, griffe.Module):
            attr.docstring = griffe.Docstring(_comment(attr) or "A constant.", parent=attr)


def split(docstring: str) -> str:
    """The docstring with one entry for each name of its sections `Args:` and `Attributes:`."""
    return _SECTION.sub(lambda found: _section(found.group()), docstring)


def _section(section: str) -> str:
    head, *lines = section.splitlines(keepends=True)
    first = next(line for line in lines if line.strip())
    indent = first[: len(first) - len(first.lstrip())]
    entries: list[list[str]] = []
    for line in lines:
        begins = line.startswith(indent) and not line[len(indent)].isspace()
        if begins or not entries:
            entries.append([])
        entries[-1].append(line)
    return head + "".join(_entry(indent, "".join(entry)) for entry in entries)


def _entry(indent: str, text: str) -> str:
    joint = _JOINT.match(text[len(indent) :])
    if joint is None:
        return text
    names, kind, rest = joint.group(1).split(", "), joint.group(2) or "", text[len(indent) + joint.end() :].rstrip("\n")
    return "".join(f"{indent}{name}{kind}: {rest}\n" for name in names) + "\n" * text.endswith("\n\n")


def _comment(attr: griffe.Attribute) -> str:
    """The comment behind a constant, or above it."""
    assert attr.lineno is not None
    assert attr.endlineno is not None
    lines = attr.lines_collection[attr.filepath]  # type: ignore[index]
    behind = lines[attr.endlineno - 1].rpartition("  # ")
    if behind[1] and not behind[2].startswith(("fmt:", "type:", "noqa")):
        return str(behind[2])
    above: list[str] = []
    for line in reversed(lines[: attr.lineno - 1]):
        if not line.startswith("# ") or line.startswith("# ---"):
            break
        above.insert(0, line[2:])
    return " ".join(above)
