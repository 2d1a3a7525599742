"""Numbers of runs as curves, and curves of several seeds as one with an interval. Pure functions."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from amago.run.report.runs import Group, Run

Array = NDArray[np.float64]
AXES = {"env_steps": "environment steps", "grad_steps": "updates", "wall_time": "hours"}
POINTS = 200
"""Points of an aggregated curve, and most points of a single one."""
_RESAMPLES = 500
_ATTEMPT = re.compile(r"\b(Attempt|Trial) (\d+)\b")


@dataclass(frozen=True)
class Curve:
    """Values over an axis; ``low`` and ``high`` are the ends of their interval, where several runs are summed up."""

    x: Array
    y: Array
    low: Array | None = None
    high: Array | None = None
    runs: int = 1


def series(run: Run, section: str, name: str, axis: str) -> Curve | None:
    """A metric of a run over an axis (a key of `AXES`); None if the run has no value of it. Values that are not finite are left out."""
    scale = 3600.0 if axis == "wall_time" else 1.0
    points = [
        (row[axis] / scale, row["values"][name])
        for row in run.rows
        if row["section"] == section and row["values"].get(name) is not None
    ]
    if not points:
        return None
    x, y = np.array(points, np.float64).T
    return thinned(Curve(x, y))


def thinned(curve: Curve, points: int = POINTS) -> Curve:
    """A curve of at most about ``points`` points, each the mean of neighbours."""
    if len(curve.x) <= points:
        return curve
    edges = np.linspace(0, len(curve.x), points + 1).astype(int)
    counts = np.diff(edges)
    return Curve(np.add.reduceat(curve.x, edges[:-1]) / counts, np.add.reduceat(curve.y, edges[:-1]) / counts)


def interquartile_mean(values: Array) -> Array:
    """The mean over axis 0 without the lowest and the highest quarter (Agarwal et al. 2021, arXiv 2108.13264)."""
    cut = len(values) // 4
    mean: Array = np.sort(values, axis=0)[cut : len(values) - cut].mean(axis=0)
    return mean


def mean(values: Array) -> Array:
    """The mean over axis 0."""
    out: Array = values.mean(axis=0)
    return out


STATISTICS: dict[str, Callable[[Array], Array]] = {"mean": mean, "IQM": interquartile_mean}


def interval(values: Array, statistic: Callable[[Array], Array] = mean, level: float = 0.95) -> tuple[Array, Array]:
    """A percentile-bootstrap interval of a statistic over axis 0, for each column of (runs, points). One run has no spread."""
    rng = np.random.default_rng(0)
    drawn = rng.integers(len(values), size=(_RESAMPLES, len(values)))
    resampled = np.stack([statistic(values[rows]) for rows in drawn])
    low, high = np.quantile(resampled, [(1.0 - level) / 2, (1.0 + level) / 2], axis=0)
    return low, high


def aggregate(curves: Sequence[Curve], statistic: Callable[[Array], Array] = mean) -> Curve:
    """Curves of several runs as one, from where all of them have begun to where the first of them ends.

    Beyond that end the statistic would jump, since it would be one over fewer runs. If they do not overlap, the first is returned.
    """
    begin, end = max(c.x[0] for c in curves), min(c.x[-1] for c in curves)
    if len(curves) == 1 or begin > end:
        return curves[0]
    x = np.linspace(begin, end, min(POINTS, max(len(c.x) for c in curves)))
    values = np.stack([np.interp(x, c.x, c.y) for c in curves])
    low, high = interval(values, statistic)
    return Curve(x, statistic(values), low, high, len(curves))


def group_curve(group: Group, section: str, name: str, axis: str, statistic: Callable[[Array], Array] = mean) -> Curve | None:
    """The curve of a group; None if no run has the metric."""
    curves = [c for c in (series(run, section, name, axis) for run in group.runs) if c is not None]
    return aggregate(curves, statistic) if curves else None


def metric_names(runs: Sequence[Run], section: str) -> list[str]:
    """All metrics of a section, in the order in which they were first written."""
    found: dict[str, None] = {}
    for run in runs:
        for row in run.rows:
            if row["section"] == section:
                found |= dict.fromkeys(row["values"])
    return list(found)


def by_attempt(names: Sequence[str]) -> dict[str, dict[int, str]]:
    """Metrics that exist for several attempts or trials: {"Average ... Attempt # ...": {attempt: name}}."""
    found: dict[str, dict[int, str]] = {}
    for name in names:
        match = _ATTEMPT.search(name)
        if match is not None:
            found.setdefault(_ATTEMPT.sub(rf"{match[1]} #", name), {})[int(match[2])] = name
    return {title: attempts for title, attempts in found.items() if len(attempts) > 1}


def adaptation(group: Group, section: str, attempts: dict[int, str], share: float = 0.2) -> Curve | None:
    """A score by attempt: the mean of each run over the evaluations of the last ``share`` of its updates, then over runs."""
    rows = []
    for run in group.runs:
        own = [r for r in run.rows if r["section"] == section]
        last = max((r["grad_steps"] for r in own), default=0)
        late = [r["values"] for r in own if r["grad_steps"] >= (1.0 - share) * last]
        scores = [[v[name] for v in late if v.get(name) is not None] for _, name in sorted(attempts.items())]
        if all(scores):
            rows.append([float(np.mean(s)) for s in scores])
    if not rows:
        return None
    values, x = np.array(rows), np.array(sorted(attempts), np.float64)
    if len(rows) == 1:
        return Curve(x, values[0])
    low, high = interval(values)
    return Curve(x, values.mean(axis=0), low, high, len(rows))


def seconds_by_phase(run: Run) -> dict[str, float]:
    """Seconds from each row of the log to the one before, added up by what was done meanwhile: {"collection", "training",
    "evaluation"}. The log has a row at the end of each phase; the time between a stop and a resume is not in it."""
    phases = {"rollout": "collection", "train": "training", "val": "evaluation", "test": "evaluation"}
    spent: dict[str, float] = {}
    before = 0.0
    for row in run.rows:
        phase = phases.get(row["section"])
        if phase is not None:
            spent[phase] = spent.get(phase, 0.0) + max(0.0, row["wall_time"] - before)
        before = row["wall_time"]
    return spent


def rates(run: Run) -> dict[str, float]:
    """Environment steps and updates a second of all the time that the log covers; {} without time."""
    if not run.rows or run.rows[-1]["wall_time"] <= 0:
        return {}
    last = run.rows[-1]
    return {"steps/s": last["env_steps"] / last["wall_time"], "updates/s": last["grad_steps"] / last["wall_time"]}


def total(run: Run, name: str) -> float:
    """The sum of a metric over the whole log, all sections."""
    return float(sum(row["values"].get(name) or 0.0 for row in run.rows))
