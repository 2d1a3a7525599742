"""Passive T-Mazes that grow: a Transformer learns a corridor of 300 steps, and goes on in 1,000, 3,000 and 10,000 with the weights of before.

    python -m benchmarks.suite.tmaze_longer run --seeds 5 --tasks 300 1000 3000
    python -m benchmarks.suite.tmaze_longer table

A run ends when three evaluations in a row have reached a return of 0.95; without memory a half is the best.
"""

from __future__ import annotations

import sys
from pathlib import Path

from benchmarks.suite.board import Board, Entry, main
from benchmarks.suite.example import read
from benchmarks.suite.recorded import is_done
from benchmarks.suite.statistics import time_to_threshold
from benchmarks.suite.tmaze import SOLVED

HORIZONS = (300, 1000, 3000, 10000)
SETTINGS = {
    300: "--parallel_actors 32 --batch_size 16 --epochs 40 --learning_rate 1e-3",
    1000: "--parallel_actors 32 --batch_size 8 --epochs 20 --learning_rate 1e-3",
    3000: "--parallel_actors 32 --batch_size 4 --epochs 20 --learning_rate 1e-4",
    10000: "--parallel_actors 16 --batch_size 2 --epochs 40 --learning_rate 1e-4 --grads_per_epoch 20 --eval_timesteps 10001",
}
_ALL = (
    "--configs zoo/tmaze_transformer zoo/tmaze_longer --traj_encoder transformer --memory_layers 1 "
    "--grads_per_epoch 50 --val_interval 1"
)
JUDGED = {300: 256, 1000: 256, 3000: 64, 10000: 16}
BUDGET = {3000: 3600.0, 10000: 10800.0}


def table(results: Path) -> str:
    """One row for each length: greedy returns, updates and processor seconds until the threshold, and those of all lengths until then."""
    lines = ["| steps | greedy, by seed | updates | CPU s until 0.95 | with the lengths before |", "| --- " * 5 + "|"]
    before: dict[str, float] = {}  # of each seed
    for h in HORIZONS:
        if not (found := read(results / str(h))):
            continue
        seeds = [path.stem for path in sorted((results / str(h)).glob("seed*.jsonl")) if is_done(path)]
        times, totals = [time_to_threshold(r.curve, SOLVED) for r in found], []
        for seed, r, reached in zip(seeds, found, times, strict=True):
            totals.append(before.get(seed, 0.0) + reached)
            before[seed] = before.get(seed, 0.0) + r.cpu
        columns = [f"{r.greedy:.2f}" for r in found], [f"{r.updates:,}" for r in found], *map(_seconds, (times, totals))
        lines.append(f"| {h:,}, growing | {' | '.join(', '.join(column) for column in columns)} |")
    return "\n".join(lines)


def _seconds(times: list[float]) -> list[str]:
    return [f"{t:,.0f}" if t < float("inf") else "not reached" for t in times]


ENTRIES = [
    Entry(
        str(h), "04_tmaze.py", f"--horizon {h} --timesteps_per_epoch {h} {_ALL} {SETTINGS[h]}", judged=JUDGED[h], goal=SOLVED,
        budget=BUDGET.get(h, 1800.0), after=str(earlier) if earlier else None,
    )
    for earlier, h in zip((None, *HORIZONS), HORIZONS)
]  # fmt: skip
BOARD = Board("tmaze_longer", __doc__ or "", ENTRIES, table, seeds=5)

if __name__ == "__main__":
    sys.exit(main(BOARD))
