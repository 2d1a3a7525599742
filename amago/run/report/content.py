"""What a page about runs is made of: its content, its sections, and tables."""

from __future__ import annotations

import html
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from amago.run.report.curves import POINTS
from amago.run.report.figures import Choice, Figure
from amago.run.report.runs import Group, Run


@dataclass
class Section:
    """A part of the page.

    Attributes:
        key: its name in addresses.
        title: its heading.
        parts: HTML, and figures.
        missing: why the section, or a part of it, is empty; one sentence each.
    """

    key: str
    title: str
    parts: list[str | Figure] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)

    def add(self, part: Figure | None, otherwise: str) -> None:
        """Add a figure, or why there is none."""
        if part is None:
            self.missing.append(otherwise)
        else:
            self.parts.append(part)


@dataclass(frozen=True)
class Content:
    """What a page is about.

    Attributes:
        groups: of runs.
        choices: what curves are drawn over, and how seeds are summed up: a variant of each figure.
        live: the page is `amago watch`'s, which does not open replay buffers.
    """

    groups: Sequence[Group]
    choices: Sequence[Choice]
    live: bool = False

    @property
    def runs(self) -> list[Run]:
        """All runs, by group."""
        return [run for group in self.groups for run in group.runs]

    @property
    def points(self) -> int:
        """Most points of a curve: fewer where there are very many curves."""
        return max(40, min(POINTS, 6_000 // max(1, len(self.groups))))


def table(heads: Sequence[str], rows: Sequence[Sequence[str]], groups: Sequence[str] = ()) -> str:
    """An HTML table that scrolls sideways on narrow screens; all text is escaped.

    Args:
        groups: the group of each row, for the page's filter.
    """
    head = "".join(f"<th>{html.escape(h)}</th>" for h in heads)
    marks = [f' data-group="{html.escape(g)}"' for g in groups] or [""] * len(rows)
    body = "".join(
        f"<tr{mark}>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for mark, row in zip(marks, rows)
    )
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def shown(value: Any) -> str:
    """A value of a setting in a table."""
    return value if isinstance(value, str) else json.dumps(value)
