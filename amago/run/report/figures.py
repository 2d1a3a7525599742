"""Plotly figures of runs, as JSON types: {"layout", "variants": {"AXIS STATISTIC": traces}}; "" is a variant for any choice."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from amago.run.metric_names import AVERAGE_RETURN, RETURN_OF
from amago.run.plots import COLORS
from amago.run.report.curves import (
    AXES,
    STATISTICS,
    Array,
    Curve,
    by_attempt,
    final_scores,
    group_curve,
    metric_names,
    rate_curve,
    series,
    unit_of,
)
from amago.run.report.runs import Group, Run

Figure = dict[str, Any]
Trace = dict[str, Any]
EACH = "each run"
"""The choice that draws every run by itself, beside those of `STATISTICS`."""
_COLORS = COLORS[:-1]  # the last is black, which does not show on a dark page
_DASHES = ("solid", "dash", "dot", "dashdot")
MOST_NAMES = 40


@dataclass(frozen=True)
class Choice:
    """What curves are drawn over, and how seeds are summed up.

    Attributes:
        axis: a key of `AXES`.
        statistic: a key of `STATISTICS`, or `EACH`.
    """

    axis: str = "env_steps"
    statistic: str = "mean"

    def __str__(self) -> str:
        return f"{self.axis} {self.statistic}"


def all_choices(groups: Sequence[Group]) -> list[Choice]:
    """All that make a difference: without seeds to sum up there is one statistic."""
    statistics = (*STATISTICS, EACH) if any(len(g.runs) > 1 for g in groups) else ("mean",)
    return [Choice(axis, statistic) for axis in AXES for statistic in statistics]


def label(text: str) -> str:
    """Text for Plotly, which reads HTML."""
    return html.escape(text, quote=False)


def style(i: int) -> dict[str, Any]:
    """Colour and dash of the i-th line."""
    return {"color": _COLORS[i % len(_COLORS)], "dash": _DASHES[i // len(_COLORS) % len(_DASHES)], "width": 2}


def numbers(values: Array) -> list[float | None]:
    """Numbers for JSON, to six digits: a page of many curves is a third as large."""
    return [float(f"{v:.6g}") if v == v and abs(v) != float("inf") else None for v in values.tolist()]


def line(curve: Curve, name: str, look: Mapping[str, Any], shown: bool = True, suffix: str = "", mode: str = "") -> list[Trace]:
    """The traces of a curve: its interval as a band, if it has one, and its line above that.

    Args:
        name: of the group, by which the page's filter finds the traces.
        shown: whether the legend names it.
        suffix: for the legend, after the name.
        mode: of Plotly; "": with markers where there are few points.
    """
    x = numbers(curve.x)
    traces: list[Trace] = []
    common = {"type": "scatter", "x": x, "legendgroup": label(name), "meta": name}
    if curve.low is not None and curve.high is not None:
        band = {
            "x": x + x[::-1],
            "y": numbers(curve.high) + numbers(curve.low)[::-1],
            "fill": "toself",
            "fillcolor": look["color"],
        }
        hidden = {"mode": "lines", "line": {"width": 0}, "opacity": 0.2, "hoverinfo": "skip", "showlegend": False}
        traces.append({**common, **band, **hidden})
    seeds = f" ({curve.runs} seeds)" if curve.runs > 1 else ""
    mode = mode or ("lines+markers" if len(x) < 30 else "lines")
    traces.append(
        {**common, "mode": mode, "y": numbers(curve.y), "name": label(f"{name}{suffix}{seeds}"), "line": dict(look), "showlegend": shown}
    )  # fmt: skip
    return traces


def layout(title: str, x: str = "", y: str = "") -> dict[str, Any]:
    return {"title": {"text": label(title)}, "xaxis": {"title": {"text": label(x)}}, "yaxis": {"title": {"text": label(y)}}}


def figure(title: str, data: list[Trace], x: str = "", y: str = "") -> Figure:
    """A figure without choices."""
    return {"layout": layout(title, x, y), "variants": {"": data}}


def curves(
    groups: Sequence[Group],
    metrics: Sequence[tuple[str, str]],
    title: str,
    choices: Sequence[Choice],
    points: int,
    names: Sequence[str] = (),
) -> Figure | None:
    """Metrics of all groups over an axis; None if no run has one.

    Args:
        metrics: (section, name) of each, which differ in their dashes.
        choices: a variant each.
        points: most points of a curve.
        names: of the metrics, for the legend, if there are several.
    """
    variants = {}
    for choice in choices:
        data: list[Trace] = []
        for i, group in enumerate(groups):
            for j, (section, metric) in enumerate(metrics):
                look = style(i) if len(metrics) == 1 else {**style(i), "dash": _DASHES[j % len(_DASHES)]}
                data += _lines(group, section, metric, choice, points, look, f": {names[j]}" if names else "")
        if data:
            variants[str(choice)] = data
    return {"layout": layout(title), "variants": variants, "axes": AXES} if variants else None


def _lines(
    group: Group, section: str, metric: str, choice: Choice, points: int, look: Mapping[str, Any], suffix: str
) -> list[Trace]:
    if choice.statistic != EACH:
        curve = group_curve(group, section, metric, choice.axis, STATISTICS[choice.statistic], points)
        return [] if curve is None else line(curve, group.name, look, suffix=suffix)
    found: list[Trace] = []
    for run in group.runs:
        curve = series(run, section, metric, choice.axis)
        if curve is not None:
            (own,) = line(curve, group.name, {**look, "width": 1}, shown=not found, suffix=suffix, mode="lines")
            found.append({**own, "hovertext": label(run.name)})
    return found


def returns(groups: Sequence[Group], section: str, title: str, choices: Sequence[Choice], points: int) -> Figure | None:
    """The mean return of a section."""
    return curves(groups, [(section, AVERAGE_RETURN)], title, choices, points)


def values_and_returns(groups: Sequence[Group], choices: Sequence[Choice], points: int) -> Figure | None:
    """Estimates of the critics for each group's longest discount, their targets, and the mean return of rollouts, undiscounted."""
    drawn: list[list[tuple[str, str, str, str]]] = []  # for each group: section, metric, dash, words
    for group in groups:
        estimates = [n for n in metric_names(group.runs, "train") if n.startswith("Q(s, a) (gamma=")]
        discounts = [n.partition("(gamma=")[2].rstrip(")") for n in estimates]
        longest = max(discounts, key=float, default=None)
        own = [("train", f"Q(s, a) (gamma={longest})", "solid", f"Q(s, a), discount {longest}")] if longest else []
        own += [("train", f"TD Target (gamma={longest})", "dash", "its target")] if longest else []
        drawn.append([*own, ("val", AVERAGE_RETURN, "dot", "return of evaluations")])
    if all(len(own) == 1 for own in drawn):
        return None
    variants: dict[str, list[Trace]] = {}
    for choice in choices:
        for i, (group, own) in enumerate(zip(groups, drawn)):
            for section, metric, dash, words in own:
                look = {**style(i), "dash": dash}
                variants.setdefault(str(choice), []).extend(_lines(group, section, metric, choice, points, look, f": {words}"))
    return {"layout": layout("Values and returns"), "variants": variants, "axes": AXES}


def adaptations(groups: Sequence[Group]) -> list[Figure]:
    """A figure for each score that the runs have by attempt, from tests if there are any, else from evaluations."""
    found = []
    runs = [run for group in groups for run in group.runs]
    for section, words in (("test", "tests"), ("val", "evaluations")):
        for title, attempts in by_attempt(metric_names(runs, section)).items():
            data: list[Trace] = []
            for i, group in enumerate(groups):
                curve = final_scores(group, section, attempts)
                if curve is not None:
                    data += line(curve, group.name, style(i), mode="lines+markers")
            if data:
                one = figure(f"{title} ({words})", data, unit_of(title))
                if len(attempts) < 20:
                    one["layout"]["xaxis"]["dtick"] = 1
                found.append(one)
        if found:
            break
    return found


def by_environment(groups: Sequence[Group], names: Sequence[str]) -> Figure:
    """The final return of each group in each environment, with intervals over seeds.

    Args:
        names: of the metrics; the first `MOST_NAMES` are drawn.
    """
    names = names[:MOST_NAMES]
    shown = [name.removeprefix(RETURN_OF) for name in names]
    data: list[Trace] = []
    for i, group in enumerate(groups):
        places: list[str] = []
        scores: list[Curve] = []
        for name, place in zip(names, shown):
            score = final_scores(group, "val", {0: name})
            if score is not None:
                places.append(label(place))
                scores.append(score)
        if scores:
            data.append(_dots(group.name, places, scores, style(i)["color"]))
    made = figure("Final return by environment", data, "mean return", "")
    made["layout"]["yaxis"] = {"automargin": True, "autorange": "reversed", "type": "category"}
    made["height"] = 140 + 26 * len(names)
    return made


def _dots(name: str, places: list[str], scores: Sequence[Curve], color: str) -> Trace:
    y = [float(s.y[0]) for s in scores]
    up = [float(s.high[0]) - v if s.high is not None else 0.0 for s, v in zip(scores, y)]
    down = [v - float(s.low[0]) if s.low is not None else 0.0 for s, v in zip(scores, y)]
    error = {"type": "data", "symmetric": False, "array": up, "arrayminus": down, "visible": any(up) or any(down)}
    return {
        "type": "scatter", "mode": "markers", "x": y, "y": places, "name": label(name), "legendgroup": label(name), "meta": name,
        "error_x": error, "marker": {"color": color, "size": 9},
    }  # fmt: skip


def time_spent(runs: Sequence[Run]) -> Figure | None:
    """Where the time of each run went, as bars; None if the logs do not say."""
    spent = {run.name: run.log.seconds for run in runs if run.log.complete and not run.log.several}
    phases = list(dict.fromkeys(phase for own in spent.values() for phase in own))
    data = [
        {"type": "bar", "orientation": "h", "name": phase, "y": [label(n) for n in spent],
         "x": [own.get(phase, 0.0) / 60 for own in spent.values()], "marker": {"color": _COLORS[i]}}
        for i, phase in enumerate(phases)
    ]  # fmt: skip
    if not data:
        return None
    made = figure("Where the time went", data, "minutes")
    made["layout"] |= {"barmode": "stack", "yaxis": {"automargin": True, "type": "category"}}
    made["height"] = 170 + 24 * len(spent)
    return made


def speed(groups: Sequence[Group]) -> list[Figure]:
    """Steps and updates a second over time, a line for each run."""
    found = []
    for what, title in (("env_steps", "Environment steps a second"), ("grad_steps", "Updates a second")):
        data: list[Trace] = []
        for i, group in enumerate(groups):
            first = True
            for run in group.runs:
                curve = rate_curve(run, what)
                if curve is not None and curve.y.any():
                    data += line(curve, group.name, style(i), shown=first)
                    first = False
        if data:
            found.append(figure(title, data, "hours"))
    return found
