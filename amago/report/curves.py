"""Numbers of runs as curves, and curves of several seeds as one with an interval. Pure functions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from amago.report.runs import Array, Group, Run
from amago.run.results import interval

AXES = {"env_steps": "environment steps", "grad_steps": "updates", "wall_time": "hours"}
POINTS = 200
"""Points of an aggregated curve."""
LATE = 0.2
"""The share of a run, at its end, whose evaluations make up its final score."""
EACH = "each run"
"""The choice that draws every run by itself, in addition to `STATISTICS`."""
_VALUES = ("Q(s, a) (gamma=", "TD Target (gamma=")  # estimates of returns, which the log has times the reward multiplier
_NEAR = 0.05  # of an axis: a run that ends so shortly before the last one of its group counts to the end


class Curve(NamedTuple):
    """Values over an axis; ``low`` and ``high`` are the ends of their interval, where several runs are summed up, of which ``last`` have a value
    at the end."""

    x: Array
    y: Array
    low: Array | None = None
    high: Array | None = None
    runs: int = 1
    last: int = 1


def series(run: Run, section: str, name: str, axis: str) -> Curve | None:
    """A metric of a run over an axis (a key of `AXES`); None if the run has no value of it. Values that are not finite are left out.

    Estimates of the critics are divided by ``Agent.reward_multiplier``, if that is known, so that they have the unit of returns.
    """
    x, y = run.log.column(section, axis, name)
    if name.startswith(_VALUES):
        known = (v for k, v in (run.settings or {}).items() if k.endswith(".reward_multiplier") and isinstance(v, int | float))
        y = y / next(filter(None, known), 1.0)
    return Curve(x / 3600.0 if axis == "wall_time" else x, y) if len(x) else None


# ---- statistics ------------------------------------------------------------------------------------------------------------


def interquartile_mean(values: Array, axis: int = 0) -> Array:
    """The mean without the lowest and the highest quarter (Agarwal et al. 2021, arXiv 2108.13264)."""
    count = values.shape[axis]
    kept = np.arange(count // 4, count - count // 4)
    return np.take(np.sort(values, axis=axis), kept, axis=axis).mean(axis=axis)  # type: ignore[no-any-return]


Statistic = Callable[..., Array]
STATISTICS: dict[str, Statistic] = {"mean": np.mean, "IQM": interquartile_mean}


def aggregate(curves: Sequence[Curve], statistic: Statistic = np.mean, points: int = POINTS) -> Curve:
    """Curves of several runs as one, at the places where a run has a value: at each over the runs that have begun, and have not ended.

    A run that ends within 5% of the axis before the last one counts to the end, so that the statistic makes no step there.
    """
    if len(curves) == 1:
        return curves[0]
    x = np.unique(np.concatenate([c.x for c in curves]))
    if len(x) > points:
        x = np.linspace(x[0], x[-1], points)
    near = _NEAR * (x[-1] - x[0])
    values = np.stack(
        [
            np.interp(
                x, c.x, c.y,
                left=c.y[0] if c.x[0] <= x[0] + near else np.nan,
                right=c.y[-1] if c.x[-1] >= x[-1] - near else np.nan,
            )
            for c in curves
        ]
    )  # fmt: skip
    known = ~np.isnan(values)
    y, low, high = np.full((3, len(x)), np.nan)
    for who in np.unique(known, axis=1).T:
        here = (known == who[:, None]).all(axis=0)
        own = values[np.ix_(who, here)]
        if len(own):
            y[here] = statistic(own, axis=0)
            low[here], high[here] = interval(own, statistic)
    return Curve(x, y, low, high, len(curves), int(known[:, -1].sum()))


def group_curve(
    group: Group, section: str, name: str, axis: str, statistic: Statistic = np.mean, points: int = POINTS
) -> Curve | None:
    """The curve of a group; None if no run has the metric."""
    curves = [c for c in (series(run, section, name, axis) for run in group.seeds) if c is not None]
    return aggregate(curves, statistic, points) if curves else None


def metric_names(runs: Sequence[Run], section: str) -> list[str]:
    """All metrics of a section, in the order in which they were first written."""
    return list(dict.fromkeys(name for run in runs for name in run.log.names.get(section, ())))


# ---- scores ----------------------------------------------------------------------------------------------------------------


def late_mean(run: Run, section: str, name: str) -> float | None:
    """The mean of a metric over the last `LATE` of a run's updates, or of its steps if it counts no updates; None without values."""
    axis = "grad_steps" if run.log.highest[2] > 0 else "env_steps"
    x, y = run.log.column(section, axis, name)
    return float(y[x >= (1.0 - LATE) * x[-1]].mean()) if len(x) else None


def final_scores(group: Group, section: str, names: Mapping[int, str]) -> Curve | None:
    """Final scores of several metrics, {place on the axis: metric}, such as one for each attempt: the mean of the `late_mean` of those
    runs that have all of them, with its interval."""
    found = [[late_mean(run, section, name) for name in names.values()] for run in group.seeds]
    x = np.array(list(names), np.float64)
    curves = [Curve(x, np.array(row, np.float64)) for row in found if None not in row]
    return aggregate(curves) if curves else None
