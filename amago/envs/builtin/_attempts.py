"""Where a rollout of several attempts stands."""

from __future__ import annotations

from amago.envs.metrics import AMAGO_ENV_LOG_PREFIX


class Attempts:
    """Counts the steps of a rollout of ``k`` attempts of ``length`` steps each, and sums up the rewards of each attempt.

    `begin_rollout`, then for each attempt `begin`, `length` times `step`, and `end`.

    Attributes:
        over: attempts that are over; k if no rollout is under way, as at first.
        steps: of this attempt.
    """

    def __init__(self, k: int, length: int) -> None:
        self.k, self.length = k, length
        self.over, self.steps = k, 0
        self._return = 0.0

    @property
    def under_way(self) -> bool:
        """Whether the rollout has attempts left."""
        return self.over < self.k

    @property
    def progress(self) -> tuple[float, float]:
        """Steps of this attempt divided by its length, and attempts that are over divided by k: the end of an observation."""
        return self.steps / self.length, self.over / self.k

    def begin_rollout(self) -> None:
        self.over = 0

    def begin(self) -> None:
        self.steps, self._return = 0, 0.0

    def step(self, reward: float) -> bool:
        """Count a step; whether it was the last of its attempt."""
        self.steps += 1
        self._return += reward
        return self.steps == self.length

    def end(self, metrics: dict[str, float]) -> dict[str, float]:
        """Count the attempt as over; returns what is logged of it as attempt i (from 0): ``metrics`` and its return."""
        prefix = f"{AMAGO_ENV_LOG_PREFIX} Attempt {self.over}"
        self.over += 1
        return {f"{prefix} {name}": value for name, value in {**metrics, "Return": self._return}.items()}
