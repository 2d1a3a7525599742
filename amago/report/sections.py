"""The sections of a page about runs: figures and tables, and why something is missing.

A figure is JSON for Plotly, {"layout", "variants": {"AXIS STATISTIC": traces}}; "" is a variant for any choice.
"""

from __future__ import annotations

import html
import itertools
import re
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from amago.describe import flatten, format_duration, format_rate, html_table
from amago.report import curves as c
from amago.report.curves import AXES, EACH, LATE, POINTS, STATISTICS, Curve, metric_names
from amago.report.runs import FAULTS, NOT_SETTINGS, PHASES, Array, Group, Run, differences, status_of
from amago.run.metric_names import AVERAGE_RETURN, RETURN_OF, ROLLOUT_LENGTH, STEPS_PER_SECOND, UPDATES_PER_SECOND
from amago.run.plots import COLORS
from amago.run.results import by_attempt

Figure = dict[str, Any]
Trace = dict[str, Any]
VALUES = "Values and returns"


class Plot(NamedTuple):
    """A figure over the axis that the reader chooses: its section of the page, title, section of the log, and metric."""

    section: str
    title: str
    of: str
    name: str


FIGURES = (
    Plot("learning", "Mean return, evaluation", "val", AVERAGE_RETURN),
    Plot("learning", "Mean return, collection (with exploration)", "rollout", AVERAGE_RETURN),
    Plot("rollouts", "Mean length of rollouts, evaluation", "val", ROLLOUT_LENGTH),
    Plot("rollouts", "Mean length of rollouts, collection", "rollout", ROLLOUT_LENGTH),
    Plot("rollouts", "Epsilon of the exploration", "rollout", "Epsilon"),
    Plot("updates", VALUES, "val", AVERAGE_RETURN),
    Plot("throughput", STEPS_PER_SECOND, "rollout", STEPS_PER_SECOND),
    Plot("throughput", UPDATES_PER_SECOND, "train", UPDATES_PER_SECOND),
    *(Plot("updates", name, "train", name) for name in (
        "Critic Loss", "Actor Loss", "Mean |TD Error| (main gamma)", "Gradient Norm", "Policy Entropy", "Advantage (main gamma)",
        "Pct. of Actions Approved by Filter (main gamma)", "Learning Rate",
    )),
)  # fmt: skip
"""The figures that every page has; `all_figures` adds those of environments and of metrics that no other figure draws."""
MOST_FIGURES = 40
_STARTS = {
    "time": "started", "role": "role", "resumed": "from", "machine.host": "host", "machine.cpu": "CPU", "machine.cores": "cores",
    "machine.memory_gb": "memory (GiB)", "machine.gpus": "GPUs",
    **{f"versions.{name}": name for name in ("python", "amago", "torch", "numpy", "gymnasium", "accelerate")},
    "git.commit": "commit", "git.changed": "changed files", "command": "command",
}  # fmt: skip
_DASHES = ("solid", "dash", "dot", "dashdot")


class Content(NamedTuple):
    """Groups of runs, and why some runs are ``unreadable``."""

    groups: Sequence[Group]
    unreadable: Sequence[str] = ()

    @property
    def runs(self) -> list[Run]:
        """All runs, by group."""
        return [run for group in self.groups for run in group.runs]


class Section:
    """A part of the page: HTML with places for some of the page's figures, and why something is ``missing``, one sentence each."""

    def __init__(self, figures: list[Figure]) -> None:
        self.figures = figures
        self.text = ""
        self.missing: list[str] = []

    def add(self, part: str | Figure | None, otherwise: str = "") -> None:
        """Add a figure or HTML, or why there is none."""
        if isinstance(part, dict):
            self.text += f'<div class="figure" data-index="{len(self.figures)}"></div>'
            self.figures.append(part)
        elif part:
            self.text += part
        elif otherwise:
            self.missing.append(otherwise)

    def note(self, text: str) -> None:
        """Add an explanation."""
        self.text += f"<p class=note>{html.escape(text)}</p>"


# ---- drawing ---------------------------------------------------------------------------------------------------------------


def traces(curve: Curve | None, name: str, i: int, suffix: str = "", **more: Any) -> list[Trace]:
    """A curve as a line, above its interval as a band; where there are few points, with markers.

    ``name`` is the group's, by which the page's filter finds the traces; ``i`` its number, for the colour; ``suffix`` follows it in the
    legend; ``more`` are further attributes of the line's trace.
    """
    if curve is None:
        return []
    x, y = _numbers(curve.x), _numbers(curve.y)
    colors = COLORS[:-1]  # the last is black, which does not show on a dark page
    dash = _DASHES[i // len(colors) % len(_DASHES)]
    look = {"color": colors[i % len(colors)], "dash": dash, "width": 2, **more.pop("look", {})}
    common = {"type": "scatter", "legendgroup": html.escape(name), "meta": name}
    to_the_end = f", {curve.last} to the end" if curve.last < curve.runs else ""
    seeds = f" ({curve.runs} seeds{to_the_end})" if curve.runs > 1 else ""
    line = {
        **common, "mode": "lines+markers" if len(x) < 30 else "lines", "x": x, "y": y, "line": look,
        "name": html.escape(f"{name}{suffix}{seeds}", quote=False), "showlegend": True, **more,
    }  # fmt: skip
    if curve.low is None or curve.high is None:
        return [line]
    known = np.isfinite(curve.low)
    ends, low, high = _numbers(curve.x[known]), _numbers(curve.low[known]), _numbers(curve.high[known])
    band = {
        **common, "x": ends + ends[::-1], "y": high + low[::-1], "fill": "toself", "fillcolor": look["color"], "mode": "lines",
        "line": {"width": 0}, "opacity": 0.2, "hoverinfo": "skip", "showlegend": False,
    }  # fmt: skip
    return [band, line]


def _numbers(values: Array) -> list[float | None]:
    """Numbers for JSON, to six digits: a page of many curves is a third as large."""
    return [float(f"{v:.6g}") if np.isfinite(v) else None for v in values.tolist()]


def figure(title: str, variants: Mapping[str, list[Trace]], x: str = "", y: str = "", **yaxis: object) -> Figure | None:
    """A figure; None if nothing is drawn in it."""
    if not any(variants.values()):
        return None
    titles = [{"title": {"text": html.escape(text, quote=False)}} for text in (title, x, y)]
    return {"layout": {**titles[0], "xaxis": titles[1], "yaxis": {**titles[2], **yaxis}}, "variants": dict(variants)}


def all_figures(content: Content) -> list[Plot]:
    """`FIGURES`, one for each environment where there are several, and those of all other metrics, of a program's own first."""
    returns = [n for n in metric_names(content.runs, "val") if n.startswith(RETURN_OF)]
    named = [Plot("environments", n.removeprefix(RETURN_OF), "val", n) for n in returns if len(returns) > 1]
    drawn = {(plot.of, plot.name) for plot in FIGURES}
    rest = [
        Plot("others", f"{name} ({PHASES.get(of, of)})", of, name)
        for of, name in dict.fromkeys(
            (of, name) for run in content.runs for of, names in run.log.names.items() for name in names
        )
        if (of, name) not in drawn and not name.startswith((RETURN_OF, "TD Target (", "Q(s, a) (")) and name not in FAULTS
    ]
    order = ("val", "test", "rollout", "train", "buffer")
    rest.sort(key=lambda plot: order.index(plot.of) if plot.of in order else -1)
    return [*FIGURES, *named, *rest]


def draw(content: Content, section: Section, plots: Sequence[Plot]) -> None:
    """Add the first `MOST_FIGURES` figures of a section; say what is not in the logs."""
    missing = []
    for plot in plots[:MOST_FIGURES]:
        made = curve_figure(content, plot)
        section.add(made)
        missing += [] if made else [plot.title]
    if missing:
        section.missing.append(f"not in the logs: {', '.join(missing)}")
    if len(plots) > MOST_FIGURES:
        section.missing.append(f"{len(plots) - MOST_FIGURES} of {len(plots)} metrics, so that the page can be read")


def curve_figure(content: Content, plot: Plot) -> Figure | None:
    """The lines of a plot for all groups; None without any. Of very many groups, and in small figures, curves have fewer points."""
    points = max(40, min(60 if plot.section in ("environments", "others") else POINTS, 6_000 // max(1, len(content.groups))))
    variants: dict[str, list[Trace]] = {}
    # without seeds to sum up there is one statistic
    statistics = (*STATISTICS, EACH) if any(len(g.runs) > 1 for g in content.groups) else ("mean",)
    lines = [(i, group, j, line) for i, group in enumerate(content.groups) for j, line in enumerate(_lines_of(plot, group))]
    for axis, statistic in itertools.product(AXES, statistics):
        found = variants.setdefault(f"{axis} {statistic}", [])
        for i, group, j, (of, name, words) in lines:
            look: dict[str, object] = {"dash": _DASHES[j]} if words else {}
            if statistic != EACH:
                curve = c.group_curve(group, of, name, axis, STATISTICS[statistic], points)
                found += traces(curve, group.name, i, words, look=look)
                continue
            each = [(run, curve) for run in group.runs if (curve := c.series(run, of, name, axis)) is not None]
            for k, (run, curve) in enumerate(each):
                more = {"showlegend": k == 0, "hovertext": html.escape(run.name), "mode": "lines"}
                found += traces(curve, group.name, i, words, look={**look, "width": 1}, **more)
    made = figure(plot.title, variants, **({"type": "log"} if plot.title.endswith("Norm") else {}))
    return made and {**made, "axes": AXES}


def _lines_of(plot: Plot, group: Group) -> list[tuple[str, str, str]]:
    """(section of the log, metric, words for the legend) of each line of a plot for a group. Values are those of its longest discount."""
    if plot.title != VALUES:
        return [(plot.of, plot.name, "")]
    discounts = re.findall(r"Q\(s, a\) \(gamma=([^)]+)\)", "\n".join(metric_names(group.runs, "train")))
    if not discounts:
        return []
    longest = max(discounts, key=float)
    return [
        ("train", f"Q(s, a) (gamma={longest})", f": Q(s, a), discount {longest}"),
        ("train", f"TD Target (gamma={longest})", ": its target"),
        (plot.of, plot.name, ": return of evaluations"),
    ]


def table(heads: Sequence[str], rows: Sequence[Sequence[object]], groups: Sequence[str] = ()) -> str:
    """`html_table` in a place that scrolls; ``groups`` name the group of each row, for the filter."""
    inside = html_table(heads, rows, [f' data-group="{html.escape(g)}"' for g in groups])
    return inside and f'<div class="scroll">{inside}</div>'


def run_table(content: Content, cells: Callable[[Run], Sequence[Mapping[str, object]]]) -> str:
    """A table with rows for each run: {head: cell}, the same heads for all."""
    found = [(run, group.name, row) for group in content.groups for run in group.runs for row in cells(run)]
    heads = list(dict.fromkeys(head for _, _, row in found for head in row))
    return table(["run", *heads], [[run.name, *row.values()] for run, _, row in found], [name for _, name, _ in found])


# ---- sections --------------------------------------------------------------------------------------------------------------


def overview(content: Content, section: Section) -> None:
    """A row for each run: its state, its progress, its rates, its newest return."""
    now = time.time()
    of_group = {run.path: group.name for group in content.groups for run in group.runs}

    def cells(run: Run) -> list[dict[str, object]]:
        status = status_of(run, now)
        epoch, steps, updates, seconds = run.log.highest
        score = run.log.last_return()
        of = f" of {status.epochs:,} ({100 * min(1.0, status.done / status.epochs):.0f}%)" if status.epochs else ""
        clock = "" if status.left is None else time.strftime("%a %H:%M", time.localtime(now + status.left))
        rates = [n / seconds if seconds else None for n in (steps, updates)]
        faults = ", ".join(f"{run.log.faults[k]:,.0f} {words}" for k, words in FAULTS.items() if run.log.faults.get(k))
        return [
            {"state": status.state, "epochs": f"{status.done if status.epochs else epoch:,.0f}{of}",
             "time left": "" if status.left is None else f"{format_duration(status.left)} ({clock})",
             "mean return": "none yet" if score is None else f"{score[0]:.4g} ({score[1]})", "steps": f"{steps:,}",
             "updates": f"{updates:,}", "time": format_duration(seconds),
             **{head: format_rate(rate) if rate else "" for head, rate in zip(("steps/s", "updates/s"), rates)},
             "faults": faults or "none", "sign of life": status.why, "group": of_group[run.path]}
        ]  # fmt: skip

    section.add(run_table(content, cells), "there is no run here yet")
    section.missing += [*content.unreadable, *(problem for run in content.runs for problem in run.problems)]
    section.note(
        "Curves are over the seeds of a group that have a value there, bands 95% bootstrap intervals of them (1,000 resamples of runs)."
    )
    for group in content.groups:
        if len(group.seeds) < len(group.runs):
            section.note(f"{group.name}: of the runs with one seed, statistics over seeds count the newest alone.")


def adaptation(content: Content, section: Section) -> None:
    """Scores by attempt."""
    for of, words in (("val", "evaluations"), ("test", "tests")):
        for title, attempts in by_attempt(metric_names(content.runs, of)).items():
            scores = [(i, group, c.final_scores(group, of, attempts)) for i, group in enumerate(content.groups)]
            drawn = [t for i, group, score in scores for t in traces(score, group.name, i, mode="lines+markers")]
            unit = title.partition(" #")[0].split()[-1].lower()
            section.add(figure(f"{title} ({words})", {"": drawn}, unit, rangemode="tozero"))
    if section.text:
        section.note(f"Means of the evaluations in the last {100 * LATE:.0f}% of each run's updates; intervals are over seeds.")
    else:
        section.missing.append("scores by attempt: no metric of these environments has a number (such as 'Attempt 0 Success')")


def environments(content: Content, section: Section) -> None:
    """Returns by environment name: the final ones, and a curve each."""
    names = [n for n in metric_names(content.runs, "val") if n.startswith(RETURN_OF)]
    if len(names) < 2:
        section.missing.append("the runs evaluate a single environment name" if names else "no evaluation has ended yet")
        return
    rows = []
    for group, name in itertools.product(content.groups, names):
        score = c.final_scores(group, "val", {0: name})
        if score is not None:
            ends = "" if score.low is None or score.high is None else f"{score.low[0]:.4g} to {score.high[0]:.4g}"
            rows.append([group.name, name.removeprefix(RETURN_OF), f"{score.y[0]:.4g}", ends])
    heads = ["group", "environment", "final return", "95% interval"]
    section.add(table(heads, rows, [row[0] for row in rows]), "no return yet")


def throughput(content: Content, section: Section) -> None:
    """Time by activity."""
    phases = list(dict.fromkeys(PHASES.values()))
    alone = [run for run in content.runs if run.log.seconds and not run.log.several]
    rows = [[run.name, *(format_duration(run.log.seconds.get(p)) for p in phases)] for run in alone]
    section.add(table(["run", *phases], rows), "where the time went: the logs do not say")
    several = [run.name for run in content.runs if run.log.several]
    section.missing += [f"the time of {n}: a learner and collectors write its log, each with a separate clock" for n in several]


def faults(content: Content, section: Section) -> None:
    """Faults that did not end the run."""

    def cells(run: Run) -> list[dict[str, object]]:
        row = {words: run.log.faults.get(name, 0.0) for name, words in FAULTS.items()} | {
            "resumed from an earlier state": run.log.went_back, "values that were not finite": run.log.not_finite,
            "further starts": max(0, len(run.starts) - 1),
        }  # fmt: skip
        return [{head: f"{count:,.0f}" for head, count in row.items()}] if any(row.values()) else []

    nothing = "no update was skipped, no environment restarted, no rollout dropped, no file damaged, and no run went back"
    section.add(run_table(content, cells), nothing)


def settings(content: Content, section: Section) -> None:
    """Settings that differ between the runs, and settings that all share."""
    known = [(run, run.settings) for run in content.runs if run.settings is not None]
    section.missing += [f"settings of {run.name}: no settings.json" for run in content.runs if run.settings is None]
    if not known:
        return
    differ = differences([own for _, own in known])
    if differ:
        rows = [[name, *values] for name, values in differ.items()]
        section.add("<h3>What differs</h3>" + table(["setting", *(run.name for run, _ in known)], rows))
    same = sorted((k, v) for k, v in known[0][1].items() if k not in differ)
    body = table(["setting", "value"], same)
    section.add(f"<details><summary>{len(same)} settings that are the same everywhere</summary>{body}</details>")


def machines(content: Content, section: Section) -> None:
    """Machine, versions and changed settings of each start of a run."""

    def cells(run: Run) -> list[dict[str, object]]:
        found = []
        for start in run.starts:
            row = flatten(start)
            changed = {k: v for k, v in (start.get("changed") or {}).items() if k not in NOT_SETTINGS}
            found.append(
                {head: row.get(key) for key, head in _STARTS.items()} | {"changed on resume [before, now]": changed or None}
            )
        return found

    section.add(run_table(content, cells), "the runs have no settings.json")


SECTIONS: dict[str, tuple[str, Callable[[Content, Section], None] | None]] = {
    "runs": ("Runs", overview),
    "learning": ("Learning curves", None),
    "adaptation": ("Adaptation", adaptation),
    "environments": ("Returns by environment", environments),
    "rollouts": ("Rollouts: length, exploration", None),
    "updates": ("Updates: losses, gradients, values", None),
    "others": ("Other metrics", None),
    "throughput": ("Throughput", throughput),
    "faults": ("Faults", faults),
    "settings": ("Settings", settings),
    "machines": ("Machine and versions", machines),
}
"""{name in addresses: (title, function that adds more than figures)}, in the order of the page."""
