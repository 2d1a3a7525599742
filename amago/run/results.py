"""Figures of rollouts: means with bootstrap intervals, scores by attempt, and their tables and JSON."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from amago.describe import html_table, text_table

Array = NDArray[np.float64]
RESAMPLES = 1_000
"""Of a bootstrap interval."""
ATTEMPT = re.compile(r"\b(Attempt|Trial|Episode|Round|Game|Step|Time) (\d+)\b")


def interval(values: Array, statistic: Callable[..., Array] = np.mean) -> tuple[Array, Array]:
    """The 95% percentile-bootstrap interval of a statistic over axis 0, for each column of (runs, points). One run has no spread."""
    drawn = np.random.default_rng(0).integers(len(values), size=(RESAMPLES, len(values)))
    low, high = np.quantile(statistic(values[drawn], axis=1), [0.025, 0.975], axis=0)
    return low, high


class Estimate(NamedTuple):
    """A mean over rollouts.

    Attributes:
        low, high: the ends of its 95% percentile-bootstrap interval.
        std: standard deviation of the rollouts (not of the mean).
        rollouts: their number.
    """

    mean: float
    low: float = np.nan
    high: float = np.nan
    std: float = np.nan
    rollouts: int = 0

    @classmethod
    def of(cls, values: ArrayLike) -> Estimate:
        """From one value a rollout (n,); values that are not finite are left out."""
        array = np.asarray(values, np.float64)
        kept = array[np.isfinite(array)]
        if not len(kept):
            return cls(np.nan)
        low, high = interval(kept[:, None])
        return cls(float(kept.mean()), float(low[0]), float(high[0]), float(kept.std()), len(kept))

    def __str__(self) -> str:
        return f"{self.mean:.3g} [{self.low:.3g}, {self.high:.3g}]"

    def as_json(self) -> dict[str, Any]:
        """By name as JSON types."""
        ends = [finite(self.low), finite(self.high)]
        return {"mean": finite(self.mean), "interval_95": ends, "std": finite(self.std), "rollouts": self.rollouts}


def finite(value: float) -> float | None:
    """A number for JSON, which has no NaN."""
    return value if math.isfinite(value) else None


def by_attempt(names: Sequence[str]) -> dict[str, dict[int, str]]:
    """Metrics that exist for several attempts, trials, episodes, rounds, games, steps or times:
    {"Average ... Attempt # ...": {attempt, from 1: name}}. Steps and times keep their numbers."""
    found: dict[str, dict[int, str]] = {}
    for name in names:
        match = ATTEMPT.search(name)
        if match is not None:
            title = f"{name[: match.start()]}{match[1]} #{name[match.end() :]}"
            found.setdefault(title, {})[int(match[2])] = name
    several = {title: dict(sorted(own.items())) for title, own in found.items() if len(own) > 1}
    first = {title: int(0 in own and not re.search(r"(Step|Time) #", title)) for title, own in several.items()}
    return {title: {number + first[title]: name for number, name in own.items()} for title, own in several.items()}


class Figures:
    """Figures of the rollouts of an evaluation.

    Attributes:
        returns: sum of rewards of each rollout, by environment name.
        metrics: the environments' own metrics of each rollout, by name.
    """

    returns: dict[str, list[float]]
    metrics: dict[str, list[float]]

    @property
    def scores(self) -> dict[str, Estimate]:
        """The returns, by environment name."""
        return {name: Estimate.of(values) for name, values in self.returns.items()}

    @property
    def attempts(self) -> dict[str, dict[int, Estimate]]:
        """The metrics that have a number, such as "Attempt # Success in NAME", by attempt, from 1."""
        found = by_attempt(list(self.metrics))
        return {title: {i: Estimate.of(self.metrics[name]) for i, name in own.items()} for title, own in found.items()}

    def as_json(self) -> dict[str, Any]:
        """Everything as JSON types, each rollout's return included."""
        returns = {name: Estimate.of(v).as_json() | {"of_each": [*map(finite, v)]} for name, v in self.returns.items()}
        attempts = {title: {str(i): e.as_json() for i, e in own.items()} for title, own in self.attempts.items()}
        return {
            "returns": returns,
            "metrics": {k: Estimate.of(v).as_json() for k, v in self.metrics.items()},
            "attempts": attempts,
        }

    def tables(self) -> Iterator[tuple[list[str], list[list[str]]]]:
        """Heads and rows of the table of returns, and of that of scores by attempt, if there are any, with 95% intervals."""
        rows = [[name, str(e), f"{e.std:.3g}", str(e.rollouts)] for name, e in self.scores.items()]
        yield ["return in", "mean, 95% interval", "std", "rollouts"], rows
        if attempts := self.attempts:
            numbers = sorted({i for own in attempts.values() for i in own})
            cells = [[str(i), *(str(own[i]) if i in own else "" for own in attempts.values())] for i in numbers]
            yield ["attempt", *(title.replace("Attempt # ", "") for title in attempts)], cells

    def __str__(self) -> str:
        return "\n\n".join(text_table(*table) for table in self.tables())

    def _repr_html_(self) -> str:
        return "".join(html_table(*table) for table in self.tables())


class Evaluation(Figures, dict[str, float]):
    """The result of an evaluation: metrics by name, and the figures of each rollout. ``print`` shows it as tables."""

    def __init__(
        self, values: Mapping[str, float], returns: Mapping[str, Sequence[float]], metrics: Mapping[str, Sequence[float]]
    ):
        super().__init__(values)
        self.returns, self.metrics = ({k: list(v) for k, v in by_name.items()} for by_name in (returns, metrics))
