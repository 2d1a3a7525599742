"""The passive T-Maze (Ni et al. 2023, arXiv 2307.03864) by length and sequence model (`examples/04_tmaze.py`), on one thread each.

    python -m benchmarks.suite.tmaze run --jobs 2
    python -m benchmarks.suite.tmaze table

Success is the share of rollouts that turn the right way at the end of a corridor of so many steps; without memory it is a half. Runs that
are done are not repeated, and interrupted ones continue. A run ends when three evaluations in a row have reached a return of 0.95.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.suite.board import Board, Entry, main
from benchmarks.suite.example import read
from benchmarks.suite.statistics import Curve, time_to_threshold
from benchmarks.suite.tables import read as curves
from benchmarks.suite.tasks import TASKS

HORIZONS = (300, 1000, 3000)
MODELS = ("transformer", "gru", "mingru")
SOLVED = 0.95
"""A return that only an agent with memory has: 1 for the right turn, less for each step that was wasted on the way."""
SETTINGS = {
    300: "--parallel_actors 16 --batch_size 16 --grads_per_epoch 50 --epochs 60 --val_interval 3",
    1000: "--parallel_actors 16 --batch_size 8 --grads_per_epoch 50 --epochs 60 --val_interval 3",
    3000: "--parallel_actors 16 --batch_size 4 --grads_per_epoch 50 --epochs 60 --val_interval 3",
}
_SMALL = "--configs zoo/tmaze --memory_layers 1 --learning_rate 2e-3"
_NORMALISED = "--memory_layers 1 --learning_rate 1e-3 --parallel_actors 32 --batch_size 8 --grads_per_epoch 50 --epochs 40 --val_interval 3"
MORE = {(1000, "gru"): " --long_memory --epochs 120", (3000, "gru"): " --long_memory --epochs 120 --batch_size 8"}
"""Settings of single runs. Other models either remember as long without being told to, or learned nothing within 3,000 updates."""
OTHERS = {(1000, "transformer"): f"--configs zoo/tmaze_transformer zoo/tmaze_1000 {_NORMALISED} --timesteps_per_epoch 1000"}
"""Runs whose settings are others throughout."""


SETTLED = "tmaze_transformer"
"""The configuration of the suite with the Transformer's settings in the zoo; its runs are rows of the table, too."""


def table(results: Path) -> str:
    """One row for each length and model with a finished run."""
    lines = [
        "| steps, sequence model | return, greedy, by seed | CPU s until 0.95, by seed | updates/CPU s | environment steps | CPU s |",
        "| --- " * 6 + "|",
    ]
    for horizon in HORIZONS:
        for model in MODELS:
            if found := read(results / f"{horizon}_{model}"):
                steps, cpu = max(r.steps for r in found), [r.cpu for r in found]
                lines.append(_row(f"{horizon:,}, {model}", [r.curve for r in found], [r.greedy for r in found], steps, cpu))
    settled = curves(results.parent / "suite", SETTLED, TASKS)
    for task in (t for t in TASKS if t.name in settled):
        found, last = settled[task.name], [c[-1] for c in settled[task.name]]
        label, steps = f"{task.horizon:,}, `zoo/{SETTLED}`", max(p.steps for p in last)
        lines.append(_row(label, found, [p.score for p in last], steps, [p.cpu for p in last]))
    return "\n".join(lines)


def _row(label: str, found: Sequence[Curve], scores: list[float], steps: int, seconds: list[float]) -> str:
    times = [time_to_threshold(curve, SOLVED) for curve in found]
    shown = ", ".join(f"{t:.0f}" if t < float("inf") else "not reached" for t in times)
    speeds = ", ".join(f"{curve[-1].updates / curve[-1].cpu:.1f}" for curve in found)
    greedy, cpu = ", ".join(f"{x:.2f}" for x in scores), ", ".join(f"{x:.0f}" for x in seconds)
    return f"| {label} | {greedy} | {shown} | {speeds} | {steps:,} | {cpu} |"


def _entries() -> list[Entry]:
    return [
        Entry(
            f"{h}_{m}",
            "04_tmaze.py",
            f"--horizon {h} --traj_encoder {m} {OTHERS.get((h, m), f'{_SMALL} {SETTINGS[h]}{MORE.get((h, m), str())}')}",
            goal=SOLVED,
        )
        for h in HORIZONS
        for m in MODELS
    ]


BOARD = Board("tmaze", __doc__ or "", _entries(), table)

if __name__ == "__main__":
    sys.exit(main(BOARD))
