"""Numbers of runs as curves, and curves of several seeds as one with an interval. Pure functions."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from amago.run.metric_names import AVERAGE_RETURN
from amago.run.report.log import POSITION
from amago.run.report.runs import Group, Run

Array = NDArray[np.float64]
AXES = {"env_steps": "environment steps", "grad_steps": "updates", "wall_time": "hours"}
POINTS = 200
"""Points of an aggregated curve."""
RESAMPLES = 1_000
"""Of a bootstrap interval."""
LATE = 0.2
"""The share of a run, at its end, whose evaluations make up its final score."""
VALUES = ("Q(s, a) (gamma=", "TD Target (gamma=")
"""Beginnings of the names of estimates of returns, which the log has times ``Agent.reward_multiplier``."""
_ATTEMPT = re.compile(r"\b(Attempt|Trial|Episode|Round|Game|Step|Time) (\d+)\b")


@dataclass(frozen=True)
class Curve:
    """Values over an axis; ``low`` and ``high`` are the ends of their interval, where several runs are summed up."""

    x: Array
    y: Array
    low: Array | None = None
    high: Array | None = None
    runs: int = 1


def reward_multiplier(run: Run) -> float:
    """``Agent.reward_multiplier`` of a run; 1 if that is not known."""
    known = [
        v for k, v in (run.settings or {}).items() if k.endswith(".reward_multiplier") and isinstance(v, int | float) and v
    ]
    return float(known[0]) if known else 1.0


def series(run: Run, section: str, name: str, axis: str) -> Curve | None:
    """A metric of a run over an axis (a key of `AXES`); None if the run has no value of it. Values that are not finite are left out.

    Estimates of the critics are divided by the run's `reward_multiplier`, so that they have the unit of returns.
    """
    x, y = run.log.column(section, axis, name)
    if name.startswith(VALUES):
        y = y / reward_multiplier(run)
    return Curve(x / 3600.0 if axis == "wall_time" else x, y) if len(x) else None


# ---- statistics ------------------------------------------------------------------------------------------------------------


def interquartile_mean(values: Array, axis: int = 0) -> Array:
    """The mean without the lowest and the highest quarter (Agarwal et al. 2021, arXiv 2108.13264)."""
    count = values.shape[axis]
    kept = np.arange(count // 4, count - count // 4)
    mean: Array = np.take(np.sort(values, axis=axis), kept, axis=axis).mean(axis=axis)
    return mean


def mean(values: Array, axis: int = 0) -> Array:
    """The mean."""
    out: Array = values.mean(axis=axis)
    return out


STATISTICS: dict[str, Callable[..., Array]] = {"mean": mean, "IQM": interquartile_mean}


def interval(
    values: Array, statistic: Callable[..., Array] = mean, level: float = 0.95, resamples: int = RESAMPLES
) -> tuple[Array, Array]:
    """A percentile-bootstrap interval of a statistic over axis 0, for each column of (runs, points). One run has no spread."""
    rng = np.random.default_rng(0)
    drawn = rng.integers(len(values), size=(resamples, len(values)))
    if statistic is mean:  # as a product of matrices, which is many times faster
        times = np.stack([(drawn == i).sum(axis=1) for i in range(len(values))], axis=1)
        resampled = times @ values.reshape(len(values), -1) / len(values)
        resampled = resampled.reshape(resamples, *values.shape[1:])
    else:
        resampled = np.stack([statistic(values[rows]) for rows in drawn])
    low, high = np.quantile(resampled, [(1.0 - level) / 2, (1.0 + level) / 2], axis=0)
    return low, high


def aggregate(curves: Sequence[Curve], statistic: Callable[..., Array] = mean, points: int = POINTS) -> Curve:
    """Curves of several runs as one, from where all of them have begun to where the first of them ends.

    Beyond that end the statistic would jump, since it would be one over fewer runs. If they do not overlap, the first is returned.
    """
    begin, end = max(c.x[0] for c in curves), min(c.x[-1] for c in curves)
    if len(curves) == 1 or begin > end:
        return curves[0]
    x = np.linspace(begin, end, min(points, max(len(c.x) for c in curves)))
    values = np.stack([np.interp(x, c.x, c.y) for c in curves])
    low, high = interval(values, statistic)
    return Curve(x, statistic(values), low, high, len(curves))


def group_curve(
    group: Group, section: str, name: str, axis: str, statistic: Callable[..., Array] = mean, points: int = POINTS
) -> Curve | None:
    """The curve of a group; None if no run has the metric."""
    curves = [c for c in (series(run, section, name, axis) for run in group.runs) if c is not None]
    return aggregate(curves, statistic, points) if curves else None


def metric_names(runs: Sequence[Run], section: str) -> list[str]:
    """All metrics of a section, in the order in which they were first written."""
    return list(dict.fromkeys(name for run in runs for name in run.log.metric_names(section)))


# ---- scores ----------------------------------------------------------------------------------------------------------------


def by_attempt(names: Sequence[str]) -> dict[str, dict[int, str]]:
    """Metrics that exist for several attempts, trials, episodes, rounds, games, steps or times:
    {"Average ... Attempt # ...": {attempt: name}}."""
    found: dict[str, dict[int, str]] = {}
    for name in names:
        match = _ATTEMPT.search(name)
        if match is not None:
            title = f"{name[: match.start()]}{match[1]} #{name[match.end() :]}"
            found.setdefault(title, {})[int(match[2])] = name
    return {title: dict(sorted(attempts.items())) for title, attempts in found.items() if len(attempts) > 1}


def unit_of(title: str) -> str:
    """What "#" counts in a title of `by_attempt`: "attempt"."""
    return title.partition(" #")[0].split()[-1].lower()


def late_mean(run: Run, section: str, name: str) -> float | None:
    """The mean of a metric over the last `LATE` of a run's updates, or of its steps if it counts no updates; None without values."""
    axis = "grad_steps" if run.log.highest[2] > 0 else "env_steps"
    x, y = run.log.column(section, axis, name)
    return float(y[x >= (1.0 - LATE) * x[-1]].mean()) if len(x) else None


def final_scores(group: Group, section: str, names: Mapping[float, str] | Mapping[int, str]) -> Curve | None:
    """Final scores of several metrics, such as those of attempts: `late_mean` of each run, and the mean over runs with its interval.

    Args:
        names: {place on the axis: metric}. Runs that lack one of them do not count.
    """
    found = [[late_mean(run, section, name) for name in names.values()] for run in group.runs]
    rows = [row for row in found if None not in row]
    if not rows:
        return None
    values, x = np.array(rows, np.float64), np.array(list(names), np.float64)
    if len(rows) == 1:
        return Curve(x, values[0])
    low, high = interval(values)
    return Curve(x, values.mean(axis=0), low, high, len(rows))


def last_return(run: Run) -> tuple[float, str] | None:
    """The newest mean return of tests, validation or collection, in this order, and which of them it is."""
    for section in ("test", "val", "rollout"):
        if section in run.log.latest:
            return float(run.log.latest[section][AVERAGE_RETURN]), section
    return None


# ---- speed -----------------------------------------------------------------------------------------------------------------


def rates(run: Run) -> dict[str, float]:
    """Environment steps and updates a second of all the time that the log covers; {} without time."""
    _, steps, updates, seconds = run.log.highest
    return {"steps/s": steps / seconds, "updates/s": updates / seconds} if seconds > 0 else {}


def recent_rate(run: Run, what: str, share: float = 0.1) -> float | None:
    """Steps, updates or epochs (a key of `POSITION`) a second, over the last ``share`` of the time; None if nothing moved."""
    position = run.log.track.position
    if len(position) < 2:
        return None
    seconds, values = position[:, 3], np.maximum.accumulate(position[:, POSITION.index(what)])
    order = np.argsort(seconds, kind="stable")
    seconds, values = seconds[order], np.maximum.accumulate(values[order])
    end, value = run.log.highest[3], run.log.highest[POSITION.index(what)]
    if end <= seconds[0]:
        return None
    # at least some rows, so that the rate is not that of one phase alone
    begin = min(end - share * (end - seconds[0]), seconds[max(0, len(seconds) - 16)])
    moved = value - float(np.interp(begin, seconds, values))
    return float(moved / (end - begin)) if moved > 0 else None


def rate_curve(run: Run, what: str, points: int = 40) -> Curve | None:
    """Steps or updates (a key of `POSITION`) a second over hours; None where the log is too short to say, or has several writers."""
    if run.log.rows < 8 or run.log.several or not run.log.complete:
        return None
    # from the end of a phase to that of the same phase in the next epoch: within an epoch, steps and updates come in turns
    table = run.log.sections.get({"env_steps": "rollout", "grad_steps": "train"}.get(what, ""), run.log.track)
    position = table.position
    ends = np.flatnonzero(np.diff(np.floor(position[:, 0]), append=np.inf) > 0)
    ends = ends[:: -(-len(ends) // points)] if len(ends) else ends
    seconds, values = position[ends, 3], position[ends, POSITION.index(what)]
    if len(ends) < 3 or not (np.diff(seconds) > 0).all():
        return None
    return Curve((seconds[1:] + seconds[:-1]) / 2 / 3600.0, np.diff(values) / np.diff(seconds))
