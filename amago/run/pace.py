"""How fast the phases of a run are, and the time that is left of it."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from amago.run.settings import ExperimentSettings

COLLECT, TRAIN, EVALUATE = "collect", "train", "evaluate"
UNITS = {COLLECT: "steps", TRAIN: "updates"}
_REMEMBERED = 20
_LEAST_SECONDS = 1.0  # of a phase in progress before it says anything about those to come


class Pace:
    """Mean seconds of a unit of each phase, over its last 20 occurrences, and of an epoch's remaining work.

    Units are environment steps (`COLLECT`), batches (`TRAIN`), evaluations (`EVALUATE`) and epochs (for what is outside the phases,
    such as checkpoints).
    """

    def __init__(self) -> None:
        self._seen: dict[str, deque[tuple[float, float]]] = {}

    def add(self, kind: str, units: float, seconds: float) -> None:
        """Note how long so many units have taken."""
        if units > 0:
            self._seen.setdefault(kind, deque(maxlen=_REMEMBERED)).append((units, seconds))

    def seconds_per_unit(self, kind: str) -> float | None:
        """None as long as nothing is known."""
        seen = self._seen.get(kind)
        return sum(s for _, s in seen) / sum(u for u, _ in seen) if seen else None

    def time(self, work: Mapping[str, float], current: tuple[str, float, float] | None = None) -> float | None:
        """Seconds that so much work takes; None if that is not known yet.

        Args:
            work: units of each kind.
            current: (kind, units, seconds) of a phase in progress.
        """
        total = 0.0
        for kind, units in work.items():
            if units <= 0:
                continue
            each = self.seconds_per_unit(kind)
            if each is None and current is not None and current[0] == kind and current[1] > 0 and current[2] >= _LEAST_SECONDS:
                each = current[2] / current[1]
            if each is None and kind in UNITS:
                return None
            total += units * (each or 0.0)  # an evaluation, or the rest of an epoch, that was never seen: no guess
        return total


def work(s: ExperimentSettings, first: int, last: int) -> dict[str, float]:
    """The work of the epochs from ``first`` to ``last`` (excluded), in the units of `Pace`."""

    def epochs_from(start: float) -> float:
        return max(0.0, last - max(float(first), start))

    every = s.val_interval
    evaluations = 0 if every is None else len(range(first + -first % every, last, every))
    steps = s.parallel_actors * (s.train_timesteps_per_epoch or 0)
    return {
        COLLECT: steps * epochs_from(s.start_collecting_at_epoch) if steps else 0.0,
        TRAIN: s.train_batches_per_epoch * epochs_from(s.start_learning_at_epoch) if s.train_batches_per_epoch else 0.0,
        EVALUATE: float(evaluations),
        "rest": float(max(0, last - first)),
    }


def duration(seconds: float | None) -> str:
    """A time as a person says it: "40 s", "3:05 min", "2:10 h", "3 d 4 h"; "?" for None."""
    if seconds is None or not math.isfinite(seconds):
        return "?"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60}:{whole % 60:02d} min"
    minutes = round(seconds / 60)
    if minutes < 48 * 60:
        return f"{minutes // 60}:{minutes % 60:02d} h"
    hours = round(seconds / 3600)
    return f"{hours // 24} d {hours % 24} h"


def rate(per_second: float) -> str:
    """A number a second with three digits: "0.0123", "4.56", "1,230"."""
    if per_second >= 100:
        return f"{per_second:,.0f}"
    return f"{per_second:.3g}"
