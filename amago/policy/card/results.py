"""What a card says that an agent reaches: returns of complete rollouts, with intervals."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from amago.envs import AMAGOEnv
from amago.policy.acting import Policy
from amago.policy.memory.study import Estimate
from amago.policy.playing import play


@dataclass(frozen=True)
class Score:
    """A number that each of several rollouts has.

    Attributes:
        mean, low, high: the mean, and the ends of its 95% percentile-bootstrap interval over rollouts.
        std: standard deviation of the rollouts (not of the mean).
        rollouts: how many.
    """

    mean: float
    low: float
    high: float
    std: float
    rollouts: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Score:
        """The score of at least one rollout; values that are not finite do not count."""
        kept = np.asarray([v for v in values if math.isfinite(v)], np.float64)
        if not len(kept):
            return cls(math.nan, math.nan, math.nan, math.nan, 0)
        estimate = Estimate.of(kept)
        return cls(estimate.mean, estimate.low, estimate.high, float(kept.std()), len(kept))

    def __str__(self) -> str:
        return f"{self.mean:.4g} ({self.low:.4g} to {self.high:.4g})"


@dataclass(frozen=True)
class Results:
    """What an agent reached, without exploration.

    Attributes:
        returns: sum of rewards of each rollout, by environment name.
        metrics: what the environments themselves log, by name.
        steps: of all rollouts.
        greedy: actions were the mode of the policy; else they were sampled from it.
        seed: of the first environment (the others have the numbers that follow) and of the policy's samples.
        broken_off: rollouts that had not ended after the most steps that were allowed; their rewards until then count.
    """

    returns: dict[str, list[float]]
    metrics: dict[str, list[float]] = field(default_factory=dict)
    steps: int = 0
    greedy: bool = False
    seed: int = 0
    broken_off: int = 0

    @property
    def scores(self) -> dict[str, Score]:
        """The returns, by environment name."""
        return {name: Score.of(values) for name, values in self.returns.items()}

    def as_json(self) -> dict[str, Any]:
        """Everything as JSON types, each rollout's return included."""

        def summary(values: list[float]) -> dict[str, Any]:
            score = Score.of(values)
            numbers = {"mean": score.mean, "interval_95": [score.low, score.high], "std": score.std}
            return {k: _finite(v) for k, v in numbers.items()} | {"rollouts": score.rollouts}

        return {
            "returns": {name: summary(v) | {"of_each": [_finite(x) for x in v]} for name, v in self.returns.items()},
            "metrics": {name: summary(v) for name, v in self.metrics.items()},
            "steps": self.steps, "actions": "mode" if self.greedy else "sampled", "seed": self.seed,
            "rollouts_broken_off": self.broken_off,
        }  # fmt: skip


def _finite(value: Any) -> Any:
    """JSON has no NaN."""
    if isinstance(value, list):
        return [_finite(v) for v in value]
    return value if math.isfinite(value) else None


def measure(
    policy: Policy,
    envs: Sequence[AMAGOEnv],
    episodes: int,
    max_steps: int,
    greedy: bool = False,
    seed: int = 0,
    on_step: Callable[[int], None] | None = None,
) -> Results:
    """Play complete rollouts.

    Args:
        envs: of one row each, played side by side; they stay open.
        episodes: rollouts, at least 2, since an interval needs two.
        max_steps: a rollout that has not ended after so many is broken off.
        greedy: take the mode of the policy instead of sampling from it.
        seed: rollout i is that of an environment that is reset with ``seed + i``.
        on_step: see `amago.policy.playing.play`.

    Raises:
        ValueError: there are fewer than two rollouts, no environments, or one with several rows.
    """
    if episodes < 2:
        raise ValueError(f"an interval needs at least 2 rollouts, got episodes={episodes}")
    seeds = [seed + i for i in range(episodes)]
    played = play(
        policy.agent, envs, seeds, max_steps, sample=not greedy, device=policy.device, seed=seed, on_step=on_step
    )  # fmt: skip
    returns: dict[str, list[float]] = {}
    metrics: dict[str, list[float]] = {}
    for p in played:
        returns.setdefault(p.name, []).append(float(sum(p.rewards)))
        for name, value in p.metrics.items():
            metrics.setdefault(name, []).append(value)
    broken_off = sum(not p.ended for p in played)
    return Results(returns, metrics, sum(len(p.rewards) for p in played), greedy, seed, broken_off)
