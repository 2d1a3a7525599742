"""What `amago train ENV` reaches with nothing but its defaults, in a budget of processor time of one thread.

    python -m benchmarks.suite.shell run --seeds 3 --jobs 2
    python -m benchmarks.suite.shell table --picture docs/images/amago_train.png

A run is the command itself with `--no_async` (all environments in its process, so that their time counts) and frequent evaluations.
It ends when its budget is spent, or by itself after its epochs; with memory, also when three evaluations in a row have reached the goal.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.suite.board import Board, Entry, main
from benchmarks.suite.example import AMAGO_TRAIN, curves_in
from benchmarks.suite.pictures import panels
from benchmarks.suite.statistics import final_score, interpolated, interval, time_to_threshold


@dataclass(frozen=True)
class Goal:
    """The id of an environment, the mean return that counts as learned, the budget in processor seconds, and whether a run ends early, when
    several evaluations in a row have reached that return."""

    env: str
    threshold: float
    budget: float = 300.0
    ends: bool = False

    @property
    def name(self) -> str:
        return self.env.rpartition(":")[2]


GOALS = (
    Goal("CartPole-v1", 475.0),
    Goal("Acrobot-v1", -100.0),
    Goal("FrozenLake-v1", 0.7),
    Goal("Pendulum-v1", -250.0),
    Goal("MountainCarContinuous-v0", 80.0, 900.0),
    *(
        Goal(f"benchmarks.suite.envs:{name}", threshold, ends=True)
        for name, threshold in (
            ("recall8", 0.9), ("autoencode26", 0.8), ("tmaze50", 0.95), ("bandit5", 35.0), ("lake3", 5.0), ("cartpole_positions", 450.0),
            ("pendulum_positions", -250.0), ("mountain_car_positions", 80.0),
        )
    ),
)  # fmt: skip
"""Environments of Gymnasium, whose observations are the state; and tasks that need memory."""


def table(results: Path) -> str:
    """One row for each environment: processor seconds to the threshold by seed, and the final score with its interval."""
    lines = ["| environment | goal | CPU s until reached, by seed | final score, by seed | mean (95%) |", "| --- " * 5 + "|"]
    for goal in GOALS:
        curves = curves_in(results / goal.name)
        if not curves:
            continue
        times = [time_to_threshold(c, goal.threshold) for c in curves]
        finals = [final_score(c) for c in curves]
        low, high = interval(finals)
        shown = ", ".join(f"{t:.0f}" if t < float("inf") else f"not in {c[-1].cpu:.0f}" for t, c in zip(times, curves))
        scores = ", ".join(f"{x:.2f}" for x in finals)
        lines.append(
            f"| {goal.name} | {goal.threshold:g} | {shown} | {scores} | {np.mean(finals):.2f} ({low:.2f} to {high:.2f}) |"
        )
    return "\n".join(lines)


def draw(results: Path, path: Path) -> None:
    """A panel for each environment with a thin line for each seed and the mean."""
    shown = [(goal, curves) for goal in GOALS if (curves := curves_in(results / goal.name))]
    with panels(path, len(shown), 5, (3.2, 2.7), "processor seconds of one thread") as axes:
        for (goal, curves), panel in zip(shown, axes):
            x = np.linspace(0.0, min(goal.budget, max(c[-1].cpu for c in curves)), 120)
            y = np.stack([interpolated(c, x) for c in curves])
            panel.plot(x, y.T, color="tab:blue", alpha=0.35, linewidth=0.9)
            panel.plot(x, y.mean(0), color="tab:blue", linewidth=2.0)
            panel.axhline(goal.threshold, color="grey", linewidth=0.8, linestyle=":")
            panel.set_title(f"{goal.name} ({len(curves)} seeds)", fontsize=9)
        axes[0].set_ylabel("mean return", fontsize=9)


def _entry(goal: Goal) -> Entry:
    words = f"{goal.env} --val_interval 4 --val_episodes 24"
    return Entry(goal.name, AMAGO_TRAIN, words, judged=100, budget=goal.budget, goal=goal.threshold if goal.ends else None)


BOARD = Board("shell", __doc__ or "", [_entry(goal) for goal in GOALS], table, draw, seeds=3)

if __name__ == "__main__":
    sys.exit(main(BOARD))
