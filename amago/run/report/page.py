"""The HTML page of a report: sections of figures and tables. It needs no network."""

from __future__ import annotations

import html
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from importlib import resources
from pathlib import Path
from typing import Any

from amago.run.evaluate import AVERAGE_RETURN
from amago.run.report import figures
from amago.run.report.curves import AXES, STATISTICS, Array, metric_names, rates, total
from amago.run.report.figures import Figure
from amago.run.report.runs import Group, Run, differences, find_runs, group_runs, read_run

RETURN_OF = "Average Total Return in "
_TRAINING = (
    "Critic Loss", "Actor Loss", "Gradient Norm", "Policy Entropy", "Learning Rate", "Mean |TD Error| (main gamma)",
    "Advantage (main gamma)", "Pct. of Actions Approved by Filter (main gamma)",
)  # fmt: skip
_FAULTS = ("Skipped Updates", "Restarted Environments", "Dropped Rollouts")


@dataclass
class Section:
    """A part of the page.

    Attributes:
        title: its heading.
        parts: tables as HTML, and figures.
        missing: why the section, or a part of it, is empty.
    """

    title: str
    parts: list[str | Figure] = field(default_factory=list)
    missing: str = ""


def write_report(paths: Sequence[str | Path], out: str | Path, statistic: str = "mean") -> Path:
    """Write a page about the runs at and below some directories.

    Args:
        paths: directories of runs, or with runs in them.
        out: file to write; it is replaced.
        statistic: what sums up several seeds, a key of `amago.run.report.curves.STATISTICS`.

    Returns:
        the file.

    Raises:
        FileNotFoundError: a directory does not exist, or has no run in it.
        ImportError: Plotly is not installed; names the extra.
        ValueError: the statistic is unknown, or a log is no log.
    """
    if statistic not in STATISTICS:
        raise ValueError(f"statistic={statistic!r} is unknown: use one of {', '.join(STATISTICS)}")
    script = plotly_script()
    runs = [read_run(path) for path in find_runs(paths)]
    out = Path(out)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(page(sections(runs, STATISTICS[statistic]), script, title_of(runs)), encoding="utf-8")
    return out


def plotly_script() -> str:
    """The source of plotly.js, from the Python package.

    Raises:
        ImportError: Plotly is not installed; names the extra.
    """
    try:
        from plotly.offline import get_plotlyjs
    except ImportError as err:
        raise ImportError("reports need Plotly: pip install 'amago[report]'") from err
    script: str = get_plotlyjs()
    return script


def title_of(runs: Sequence[Run]) -> str:
    return runs[0].name if len(runs) == 1 else f"{len(runs)} runs"


# ---- sections ------------------------------------------------------------------------------------------------------------


def sections(runs: Sequence[Run], statistic: Callable[[Array], Array]) -> list[Section]:
    """All sections of the page, in order."""
    groups = group_runs(runs)
    return [
        _overview(groups),
        _learning(groups, statistic),
        _adaptation(groups),
        _by_environment(groups, statistic),
        _training(groups, statistic),
        _time(runs),
        _faults(runs),
        _settings(runs),
        _machines(runs),
    ]


def _overview(groups: Sequence[Group]) -> Section:
    rows = []
    for group in groups:
        for run in group.runs:
            last = run.rows[-1] if run.rows else {"epoch": 0, "env_steps": 0, "grad_steps": 0, "wall_time": 0.0}
            score, section = _last_return(run)
            rows.append(
                [group.name, run.name, f"{last['epoch']:,}", f"{last['env_steps']:,}", f"{last['grad_steps']:,}",
                 duration(last["wall_time"]), score, section]
            )  # fmt: skip
    heads = ["group", "run", "epoch", "steps", "updates", "time", "last mean return", "from"]
    problems = [p for group in groups for run in group.runs for p in run.problems]
    notes = [table(["note"], [[p] for p in problems])] if problems else []
    return Section("Runs", [table(heads, rows), *notes])


def _last_return(run: Run) -> tuple[str, str]:
    """The newest mean return of tests, validation or collection, in this order, and which of them it is."""
    for section in ("test", "val", "rollout"):
        values = [r["values"].get(AVERAGE_RETURN) for r in run.rows if r["section"] == section]
        found = [v for v in values if v is not None]
        if found:
            return f"{found[-1]:.4g}", section
    return "none yet", ""


def _learning(groups: Sequence[Group], statistic: Callable[[Array], Array]) -> Section:
    part = Section("Learning curves")
    for section, title in (("val", "Mean return, evaluation"), ("rollout", "Mean return, collection (with exploration)")):
        by_axis = {
            label: figures.curves(groups, section, AVERAGE_RETURN, axis, statistic, title) for axis, label in AXES.items()
        }
        shown = {label: figure for label, figure in by_axis.items() if figure is not None}
        if shown:
            part.parts.append(figures.switchable(shown))
    if not part.parts:
        part.missing = "no rollout has ended yet"
    return part


def _adaptation(groups: Sequence[Group]) -> Section:
    made = figures.adaptations(groups)
    missing = "" if made else "no metric of these environments is given by attempt (such as 'Attempt 0 Success')"
    return Section("Adaptation", list(made), missing)


def _by_environment(groups: Sequence[Group], statistic: Callable[[Array], Array]) -> Section:
    names = [n for n in metric_names([r for g in groups for r in g.runs], "val") if n.startswith(RETURN_OF)]
    if len(names) < 2:
        return Section("Returns by environment", missing="the runs evaluate a single environment name")
    return Section("Returns by environment", list(figures.several(groups, "val", names, "env_steps", statistic)))


def _training(groups: Sequence[Group], statistic: Callable[[Array], Array]) -> Section:
    runs = [run for group in groups for run in group.runs]
    values = [n for n in metric_names(runs, "train") if n.startswith(("Q(s, a) (", "TD Target ("))]
    made = figures.several(groups, "train", [*_TRAINING, *values], "grad_steps", statistic)
    return Section("Updates: losses, gradients, values", list(made), "" if made else "no update was logged")


def _time(runs: Sequence[Run]) -> Section:
    spent = figures.time_spent(runs)
    rows = [[run.name, *(f"{rates(run).get(k, 0.0):,.0f}" for k in ("steps/s", "updates/s"))] for run in runs if rates(run)]
    if spent is None or not rows:
        return Section("Throughput", missing="the logs do not say where time went")
    return Section("Throughput", [spent, table(["run", "environment steps/s", "updates/s"], rows)])


def _faults(runs: Sequence[Run]) -> Section:
    counts = [[run.name, *(f"{total(run, name):,.0f}" for name in _FAULTS)] for run in runs]
    if not any(value != "0" for row in counts for value in row[1:]):
        return Section("Faults", missing="no update was skipped, no environment restarted, no rollout dropped")
    return Section("Faults", [table(["run", *(n.lower() for n in _FAULTS)], counts)])


def _settings(runs: Sequence[Run]) -> Section:
    part = Section("Settings")
    known = [run for run in runs if run.settings is not None]
    if not known:
        part.missing = "no run has a settings.json"
        return part
    differ = differences(known)
    if len(known) > 1:
        rows = [[name, *(_short(v) for v in values)] for name, values in differ.items()]
        part.parts.append("<h3>What differs</h3>" + table(["setting", *(r.name for r in known)], rows))
    same = {k: v for k, v in (known[0].settings or {}).items() if k not in differ}
    body = table(["setting", "value"], [[k, _short(v)] for k, v in sorted(same.items())])
    part.parts.append(
        f"<details><summary>{len(same)} settings of {'all runs' if len(known) > 1 else 'the run'}</summary>{body}</details>"
    )
    return part


def _machines(runs: Sequence[Run]) -> Section:
    parts: list[str | Figure] = []
    for run in runs:
        for start in run.starts:
            rows = [[k, _short(v)] for k, v in start.items() if v not in (None, {}, [])]
            title = html.escape(f"{run.name}, started {start.get('time', 'at an unknown time')}")
            parts.append(f"<details><summary>{title}</summary>{table(['', ''], rows)}</details>")
    return Section("Machine and versions", parts, "" if parts else "no run has a settings.json")


# ---- HTML ----------------------------------------------------------------------------------------------------------------


def duration(seconds: float) -> str:
    """ "1 h 02 min", "3 min 20 s" or "12 s"."""
    whole = int(seconds)
    if whole >= 3600:
        return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
    return f"{whole // 60} min {whole % 60:02d} s" if whole >= 60 else f"{whole} s"


def _short(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """An HTML table that scrolls sideways on narrow screens; all text is escaped."""
    head = "".join(f"<th>{html.escape(h)}</th>" for h in heads)
    body = "".join("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _for_script(value: Any) -> str:
    """JSON that may stand inside a script element."""
    return json.dumps(value, allow_nan=False).replace("<", "\\u003c")


def page(parts: Sequence[Section], script: str, title: str) -> str:
    """The whole page.

    Args:
        script: source of plotly.js.
    """
    figures_: list[Figure] = []
    body = []
    for part in parts:
        content = []
        for item in part.parts:
            if isinstance(item, str):
                content.append(item)
            else:
                content.append(f'<div class="figure" id="figure{len(figures_)}"></div>')
                figures_.append(item)
        if part.missing:
            content.append(f'<p class="missing">Left out: {html.escape(part.missing)}.</p>')
        body.append(f"<section><h2>{html.escape(part.title)}</h2>{''.join(content)}</section>")
    template = resources.files("amago.run.report").joinpath("page.html").read_text(encoding="utf-8")
    filled = {
        "TITLE": html.escape(title), "WRITTEN": datetime.now().astimezone().strftime("%Y-%m-%d %H:%M"), "BODY": "".join(body),
        "FIGURES": _for_script(figures_), "PLOTLY": script,
    }  # fmt: skip
    for key, text in filled.items():
        template = template.replace(f"<!--{key}-->", text)
    return template
