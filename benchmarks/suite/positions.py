"""Classic control without velocities, by `amago train ENV` with nothing but a number of steps, beside published figures.

    python -m benchmarks.suite.positions run --seeds 5
    python -m benchmarks.suite.positions table

A run ends after half of the published steps, or, but for the pole, whose published return is the highest there is, when three evaluations in a row have
reached the published return. It is judged by 100 rollouts of its last weights.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np

from amago.report.curves import interquartile_mean
from benchmarks.suite.board import Board, Entry, main
from benchmarks.suite.example import AMAGO_TRAIN, read
from benchmarks.suite.statistics import interval


class Published(NamedTuple):
    """Mean and standard deviation of the returns of one agent of RecurrentPPO, and its steps."""

    mean: float
    deviation: float
    steps: int


PUBLISHED = {
    "cartpole_positions": Published(500.0, 0.0, 100_000),
    "pendulum_positions": Published(-217.9, 140.1, 100_000),
    "mountain_car_positions": Published(91.5, 1.8, 300_000),
}
"""From the benchmark page of rl-baselines3-zoo (22e3ff2): CartPoleNoVel-v1, PendulumNoVel-v1, MountainCarContinuousNoVel-v0."""


def table(results: Path) -> str:
    """One row for each environment: greedy returns by seed, their interquartile mean, steps and processor seconds, beside the published."""
    lines = ["| environment | greedy, by seed | IQM (95%) | steps | CPU s | RecurrentPPO | steps |", "| --- " * 7 + "|"]
    for name, theirs in PUBLISHED.items():
        if not (found := read(results / name)):
            continue
        scores = [r.greedy for r in found]
        middle, (low, high) = interquartile_mean(np.array(scores)), interval(scores, interquartile_mean)
        cells = [name, ", ".join(f"{x:.1f}" for x in scores), f"{middle:.1f} ({low:.1f} to {high:.1f})"]
        cells += [f"{max(r.steps for r in found):,}", ", ".join(f"{r.cpu:.0f}" for r in found)]
        cells += [f"{theirs.mean:g} +- {theirs.deviation:g}", f"{theirs.steps:,}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _entry(name: str) -> Entry:
    words = f"benchmarks.suite.envs:{name} --steps {PUBLISHED[name].steps // 2} --val_interval 4 --val_episodes 24"
    goal = None if name == "cartpole_positions" else PUBLISHED[name].mean
    return Entry(name, AMAGO_TRAIN, words, judged=100, goal=goal)


BOARD = Board("positions", __doc__ or "", [_entry(name) for name in PUBLISHED], table, seeds=5)

if __name__ == "__main__":
    sys.exit(main(BOARD))
