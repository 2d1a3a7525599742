"""Bookkeeping for environments whose rollouts consist of several attempts."""

from __future__ import annotations

from amago.envs.metrics import AMAGO_ENV_LOG_PREFIX


class Attempts:
    """Counts the attempts of a rollout and the steps of the current attempt, and sums the rewards of the current attempt.

    Call `begin_rollout` once a rollout; for each attempt call `begin`, `step` after every step, and `end`.

    Args:
        k: attempts per rollout.
        length: maximum number of steps per attempt.

    Attributes:
        over: number of finished attempts; ``k`` while no rollout is under way, including before the first.
        steps: number of steps taken in the current attempt.
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
        """``steps / length`` and ``over / k``, which environments append to their observations."""
        return self.steps / self.length, self.over / self.k

    def begin_rollout(self) -> None:
        self.over = 0

    def begin(self) -> None:
        self.steps, self._return = 0, 0.0

    def step(self, reward: float) -> bool:
        """Count a step; returns whether the attempt has reached its maximum length."""
        self.steps += 1
        self._return += reward
        return self.steps == self.length

    def end(self, metrics: dict[str, float]) -> dict[str, float]:
        """Count the attempt as finished; returns its ``metrics`` and its return, under names that contain its index (from
        0)."""
        prefix = f"{AMAGO_ENV_LOG_PREFIX} Attempt {self.over}"
        self.over += 1
        return {f"{prefix} {name}": value for name, value in {**metrics, "Return": self._return}.items()}
