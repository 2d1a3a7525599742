"""Plotly figures of runs, as JSON types: {"data": [...], "layout": {...}}."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from amago.run.plots import COLORS
from amago.run.report.curves import (
    AXES,
    Array,
    Curve,
    adaptation,
    by_attempt,
    group_curve,
    metric_names,
    seconds_by_phase,
)
from amago.run.report.runs import Group, Run

Figure = dict[str, Any]


def _line(curve: Curve, name: str, color: str, mode: str = "lines", shown: bool = True) -> list[dict[str, Any]]:
    """The traces of a curve: its interval as a band, if it has one, and its line above that."""
    x = curve.x.tolist()
    traces: list[dict[str, Any]] = []
    if curve.low is not None and curve.high is not None:
        band = {"x": x + x[::-1], "y": curve.high.tolist() + curve.low.tolist()[::-1], "fill": "toself", "fillcolor": color}
        traces.append(
            {**band, "type": "scatter", "mode": "lines", "line": {"width": 0}, "opacity": 0.2, "hoverinfo": "skip",
             "showlegend": False, "legendgroup": name}
        )  # fmt: skip
    label = f"{name} ({curve.runs} seeds)" if curve.runs > 1 else name
    traces.append(
        {"type": "scatter", "mode": mode, "x": x, "y": curve.y.tolist(), "name": label, "line": {"color": color, "width": 2},
         "legendgroup": name, "showlegend": shown}
    )  # fmt: skip
    return traces


def _layout(title: str, x: str, y: str = "") -> dict[str, Any]:
    return {"title": {"text": title}, "xaxis": {"title": {"text": x}}, "yaxis": {"title": {"text": y}}}


def curves(
    groups: Sequence[Group], section: str, name: str, axis: str, statistic: Callable[[Array], Array], title: str | None = None
) -> Figure | None:
    """A metric of all groups over an axis, a line for each group; None if none has it."""
    data: list[dict[str, Any]] = []
    for i, group in enumerate(groups):
        curve = group_curve(group, section, name, axis, statistic)
        if curve is not None:
            data += _line(curve, group.name, COLORS[i % len(COLORS)], "lines+markers" if len(curve.x) < 30 else "lines")
    return {"data": data, "layout": _layout(title or name, AXES[axis])} if data else None


def adaptations(groups: Sequence[Group]) -> list[Figure]:
    """A figure for each score that the runs have by attempt, from tests if there are any, else from validation."""
    figures = []
    runs = [run for group in groups for run in group.runs]
    for section in ("test", "val"):
        for title, attempts in by_attempt(metric_names(runs, section)).items():
            data: list[dict[str, Any]] = []
            for i, group in enumerate(groups):
                curve = adaptation(group, section, attempts)
                if curve is not None:
                    data += _line(curve, group.name, COLORS[i % len(COLORS)], "lines+markers")
            if data:
                layout = _layout(f"{title} ({section})", "attempt")
                layout["xaxis"]["dtick"] = 1
                figures.append({"data": data, "layout": layout})
        if figures:
            break
    return figures


def several(
    groups: Sequence[Group], section: str, names: Sequence[str], axis: str, statistic: Callable[[Array], Array]
) -> list[Figure]:
    """A figure for each metric that some group has."""
    made = (curves(groups, section, name, axis, statistic) for name in names)
    return [figure for figure in made if figure is not None]


def time_spent(runs: Sequence[Run]) -> Figure | None:
    """Where the time of each run went, as bars; None if the logs do not say."""
    spent = {run.name: seconds_by_phase(run) for run in runs}
    phases = list(dict.fromkeys(phase for own in spent.values() for phase in own))
    data = [
        {"type": "bar", "orientation": "h", "name": phase, "y": list(spent), "x": [own.get(phase, 0.0) / 60 for own in spent.values()],
         "marker": {"color": COLORS[i]}}
        for i, phase in enumerate(phases)
    ]  # fmt: skip
    layout = _layout("Where the time went", "minutes") | {"barmode": "stack", "yaxis": {"automargin": True}}
    return {"data": data, "layout": layout} if data else None


def switchable(figures: Mapping[str, Figure]) -> Figure:
    """Figures of the same lines over several axes as one with a menu, the first of which is shown."""
    first, *_ = figures.values()
    buttons, data, begin = [], [], 0
    total = sum(len(f["data"]) for f in figures.values())
    for label, figure in figures.items():
        visible = [begin <= i < begin + len(figure["data"]) for i in range(total)]
        data += [{**trace, "visible": begin == 0} for trace in figure["data"]]
        begin += len(figure["data"])
        axis = figure["layout"]["xaxis"]["title"]["text"]
        buttons.append({"label": label, "method": "update", "args": [{"visible": visible}, {"xaxis.title.text": axis}]})
    menu = {
        "type": "buttons",
        "direction": "right",
        "buttons": buttons,
        "x": 0,
        "xanchor": "left",
        "y": 1.02,
        "yanchor": "bottom",
    }
    return {"data": data, "layout": {**first["layout"], "updatemenus": [menu]}}
