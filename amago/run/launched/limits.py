"""Limits on the number of updates for the collected environment steps, as pure functions of both counters."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class UpdateLimits:
    """Keeps the number of updates between ``least`` and ``most`` times the number of environment steps.

    The learner waits while its next update would be too early, and in the first ``warmup`` steps; collectors pause while an update that is
    due is missing. With the same counters never both. A number out of its range is a ValueError.
    """

    least: float = 0.0
    most: float = math.inf
    warmup: int = 0

    def __post_init__(self) -> None:
        if not (0 <= self.least < math.inf and self.most > 0 and self.least <= self.most and self.warmup >= 0):
            raise ValueError(
                "updates per environment step are MIN:MAX, MIN finite and 0 or more, MAX above 0 and not below MIN, from a warmup of 0 or more "
                f"steps on; got {self.least}:{self.most} and {self.warmup}"
            )

    @classmethod
    def parse(cls, text: str, warmup: int = 0) -> UpdateLimits:
        """Limits from "MIN:MAX"; either side may be empty."""
        try:
            least, most = (
                float(part) if part.strip() else default for part, default in zip(text.split(":"), (0.0, math.inf), strict=True)
            )
        except ValueError:
            raise ValueError(f"{text!r} is not of the form MIN:MAX, two numbers of updates per environment step") from None
        return cls(least, most, warmup)

    def learner_waits(self, updates: int, steps: int) -> bool:
        """True if the next update would be too early, after so many updates and environment steps that have arrived in the store."""
        return steps < self.warmup or (self.most < math.inf and updates + 1 > self.most * steps)

    def collectors_pause(self, updates: int, steps: int) -> bool:
        """True if collectors are ahead: an update is due that has not been made. Takes the arguments of `learner_waits`."""
        return steps >= self.warmup and updates + 1 <= self.least * steps

    def __str__(self) -> str:
        most = "" if self.most == math.inf else f"{self.most:g}"
        return f"{self.least:g}:{most}" if self.least or most else "unlimited"
