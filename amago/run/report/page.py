"""The HTML page about runs. `write_report` puts everything into one file; `amago watch` serves the same page and fills it as it is read."""

from __future__ import annotations

import html
import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from importlib import resources
from pathlib import Path
from typing import Any

from amago.run.report.content import Content, Section
from amago.run.report.curves import AXES, STATISTICS
from amago.run.report.figures import EACH, Choice, Figure, all_choices
from amago.run.report.runs import Run, find_runs, group_runs, labelled, read_run
from amago.run.report.sections import SECTIONS


def write_report(paths: Sequence[str | Path], out: str | Path, statistic: str = "mean") -> Path:
    """Write a page about the runs at and below some directories.

    Args:
        paths: directories of runs, or with runs in them.
        out: file to write; it is replaced when the page is complete.
        statistic: what sums up several seeds when the page opens: a key of `amago.run.report.curves.STATISTICS`, or "each run".

    Returns:
        the file.

    Raises:
        FileNotFoundError: a directory does not exist, or has no run in it.
        ImportError: Plotly is not installed; names the extra.
        ValueError: the statistic is unknown.
    """
    if statistic not in (*STATISTICS, EACH):
        raise ValueError(f"statistic={statistic!r} is unknown: use one of {', '.join((*STATISTICS, EACH))}")
    script = plotly_script()
    runs = labelled([read_run(path) for path in find_runs(paths)])
    groups = group_runs(runs)
    content = Content(groups, all_choices(groups))
    text = page([make(content) for make in SECTIONS.values()], title_of(runs), script, Choice(statistic=statistic))
    out = Path(out)
    out.parent.mkdir(parents=True, exist_ok=True)
    part = out.with_name(f".{out.name}.part")
    part.write_text(text, encoding="utf-8")
    part.replace(out)
    return out


def plotly_script() -> str:
    """The source of plotly.js, from the Python package.

    Raises:
        ImportError: Plotly is not installed; names the extra.
    """
    try:
        from plotly.offline import get_plotlyjs
    except ImportError as err:
        raise ImportError("pages about runs need Plotly: pip install 'amago[report]'") from err
    script: str = get_plotlyjs()
    return script


def title_of(runs: Sequence[Run]) -> str:
    return runs[0].name if len(runs) == 1 else f"{len(runs)} runs"


def body_of(section: Section) -> tuple[str, list[Figure]]:
    """The HTML of a section, below its heading, and the figures to be drawn into it, in order."""
    drawn: list[Figure] = []
    content = []
    for item in section.parts:
        if isinstance(item, str):
            content.append(item)
        else:
            content.append(f'<div class="figure" data-section="{section.key}" data-index="{len(drawn)}"></div>')
            drawn.append(item)
    for reason in section.missing:
        content.append(f'<p class="missing">Left out: {html.escape(reason)}.</p>')
    return "".join(content), drawn


def for_script(value: Any) -> str:
    """JSON that may stand inside a script element."""
    return json.dumps(value, allow_nan=False).replace("<", "\\u003c")


def page(sections: Sequence[Section], title: str, script: str, choice: Choice) -> str:
    """A page that needs nothing else.

    Args:
        script: source of plotly.js.
        choice: what is shown when the page opens.
    """
    bodies = {section.key: body_of(section) for section in sections}
    body = "".join(_section(s.key, s.title, bodies[s.key][0]) for s in sections)
    written = f"written {datetime.now().astimezone():%Y-%m-%d %H:%M}"
    figures = {key: drawn for key, (_, drawn) in bodies.items()}
    return _filled(title, written, body, {"live": False, "figures": figures}, choice, f"<script>{script}</script>")


def live_page(title: str, seconds: float) -> str:
    """A page that asks the server for its sections every so many ``seconds``."""
    body = "".join(_section(key, "", '<p class="missing">being read</p>') for key in SECTIONS)
    data = {"live": True, "figures": {}, "seconds": seconds}
    return _filled(title, "live", body, data, Choice(), '<script src="plotly.js"></script>')


def _section(key: str, title: str, body: str) -> str:
    return f'<section id="{key}"><h2>{html.escape(title)}</h2><div class="content">{body}</div></section>'


def _filled(title: str, written: str, body: str, data: Mapping[str, Any], choice: Choice, script: str) -> str:
    own = {"axes": AXES, "statistics": [*STATISTICS, EACH], "axis": choice.axis, "statistic": choice.statistic}
    template = resources.files("amago.run.report").joinpath("page.html").read_text(encoding="utf-8")
    filled = {
        "TITLE": html.escape(title), "WRITTEN": html.escape(written), "BODY": body, "DATA": for_script({**own, **data}), "PLOTLY": script,
    }  # fmt: skip
    parts = template.split("<!--")
    # what is put in may hold the mark of another place, so nothing is replaced twice
    return parts[0] + "".join(filled[mark] + rest for mark, rest in (part.split("-->", 1) for part in parts[1:]))
