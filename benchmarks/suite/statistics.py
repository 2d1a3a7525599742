"""Statistics over a few runs of a task (Agarwal et al. 2021, arXiv 2108.13264): intervals by bootstrap, probability of improvement.

Everything here is a pure function of curves, lists of `Point`, one for each seed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from amago.report import curves
from benchmarks.suite.recorded import Point

Curve = Sequence[Point]
RESAMPLES = 2_000


def time_to_threshold(curve: Curve, threshold: float, axis: str = "cpu") -> float:
    """The first value of ``axis`` ("cpu", "steps" or "updates") from which two evaluations in a row reach the threshold on average, the
    first of them alone, too; infinity if there is none. One evaluation by itself may be luck."""
    for now, after in zip(curve, curve[1:]):
        if now.score >= threshold and (now.score + after.score) / 2 >= threshold:
            return float(getattr(now, axis))
    return math.inf


def shown_times(times: Iterable[float]) -> list[str]:
    """Results of `time_to_threshold` for a table."""
    return [f"{t:,.0f}" if math.isfinite(t) else "not reached" for t in times]


def final_score(curve: Curve, share: float = 0.2) -> float:
    """The mean score of the evaluations in the last ``share`` of the processor time."""
    end = curve[-1].cpu
    return float(np.mean([p.score for p in curve if p.cpu >= (1.0 - share) * end]))


def interpolated(curve: Curve, at: NDArray[np.float64], axis: str = "cpu") -> NDArray[np.float64]:
    """Scores at the places ``at`` of an axis; before the first evaluation its score, after the last its score."""
    x = [float(getattr(p, axis)) for p in curve]
    return np.interp(at, x, [p.score for p in curve])


def interval(values: Sequence[float], statistic: curves.Statistic = np.mean) -> tuple[float, float]:
    """The 95% percentile-bootstrap interval of a statistic over seeds. With one seed both ends are its value."""
    low, high = curves.interval(np.asarray(values, float)[:, None], statistic)
    return float(low[0]), float(high[0])


def better(a: Sequence[float], b: Sequence[float]) -> float:
    """The share of pairs in which a value of ``a`` is higher than one of ``b``; equal ones count half (Mann and Whitney)."""
    x, y = np.asarray(a, float)[:, None], np.asarray(b, float)[None]
    return float(np.mean((x > y) + 0.5 * (x == y)))


def probability_of_improvement(
    a: Mapping[str, Sequence[float]], b: Mapping[str, Sequence[float]], level: float = 0.95
) -> tuple[float, float, float]:
    """The probability that a run of ``a`` beats one of ``b`` on a task drawn at random, with a bootstrap interval.

    Args:
        a, b: values by task, one for each seed; more is better. Only tasks of both count. Seeds are resampled within each task.

    Returns:
        the mean over tasks, and both ends of its interval.

    Raises:
        ValueError: they have no task in common.
    """
    tasks = sorted(set(a) & set(b))
    if not tasks:
        raise ValueError(f"no task in common: {sorted(a)} and {sorted(b)}")
    rng = np.random.default_rng(0)

    def drawn(x: Sequence[float]) -> NDArray[np.float64]:
        return rng.choice(np.asarray(x, float), len(x))

    means = [np.mean([better(drawn(a[t]), drawn(b[t])) for t in tasks]) for _ in range(RESAMPLES)]
    low, high = np.quantile(means, [(1 - level) / 2, (1 + level) / 2])
    return float(np.mean([better(a[t], b[t]) for t in tasks])), float(low), float(high)
