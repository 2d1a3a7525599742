"""Passive T-Mazes of all lengths side by side: actors' corridors are of 10 to 300, 1,000, 3,000 or 10,000 steps.

    python -m benchmarks.suite.tmaze_lengths run --seeds 5
    python -m benchmarks.suite.tmaze_lengths table

A Transformer learns those of up to 300 and up to 1,000 steps from new weights; for 3,000 it goes on with the weights of 1,000, and for 10,000
with those of 3,000. Evaluations are of the longest corridor alone. A run ends when three of them in a row have reached a return of 0.95;
without memory a half is the best.
"""

from __future__ import annotations

import sys
from pathlib import Path

from benchmarks.suite.board import Board, Entry, main
from benchmarks.suite.example import read
from benchmarks.suite.recorded import is_done
from benchmarks.suite.statistics import shown_times, time_to_threshold
from benchmarks.suite.tmaze import SOLVED

SETTINGS = {
    300: "--timesteps_per_epoch 300 --batch_size 16 --epochs 40",
    1000: "--timesteps_per_epoch 1000 --batch_size 16 --epochs 40",
    3000: "--timesteps_per_epoch 1000 --batch_size 16 --epochs 60 --dset_max_size 30000",
    10000: "--timesteps_per_epoch 1000 --batch_size 8 --epochs 60 --dset_max_size 30000 --eval_timesteps 10001",
}
AFTER = {3000: "1000", 10000: "3000"}
_ALL = (
    "--shortest 10 --configs zoo/tmaze_transformer zoo/tmaze_lengths --traj_encoder transformer --memory_layers 1 --learning_rate 1e-3 "
    "--grads_per_epoch 50 --val_interval 1 --parallel_actors 32"
)
JUDGED = {300: 256, 1000: 256, 3000: 64, 10000: 32}
BUDGET = {3000: 3600.0, 10000: 7200.0}


def table(results: Path) -> str:
    """One row for each length, by seed: greedy returns, updates, and processor seconds until the threshold, in this run and with those whose
    weights it goes on with."""
    lines = ["| steps | greedy, by seed | updates | CPU s until 0.95 | with the runs before |", "| --- " * 5 + "|"]
    spent: dict[str, dict[str, float]] = {}  # by length and seed, with the runs before
    for h in SETTINGS:
        if not (found := read(results / str(h))):
            continue
        seeds = [path.stem for path in sorted((results / str(h)).glob("seed*.jsonl")) if is_done(path)]
        before = spent.get(AFTER.get(h, ""), {})
        spent[str(h)] = {seed: before.get(seed, 0.0) + r.cpu for seed, r in zip(seeds, found, strict=True)}
        times = [time_to_threshold(r.curve, SOLVED) for r in found]
        totals = [before.get(seed, 0.0) + t for seed, t in zip(seeds, times, strict=True)]
        columns = [f"{r.greedy:.2f}" for r in found], [f"{r.updates:,}" for r in found], shown_times(times), shown_times(totals)
        lines.append(f"| 10 to {h:,} | {' | '.join(', '.join(column) for column in columns)} |")
    return "\n".join(lines)


ENTRIES = [
    Entry(
        str(h),
        "04_tmaze.py",
        f"--horizon {h} {_ALL} {words}",
        judged=JUDGED[h],
        goal=SOLVED,
        budget=BUDGET.get(h, 1800.0),
        after=AFTER.get(h),
    )
    for h, words in SETTINGS.items()
]
BOARD = Board("tmaze_lengths", __doc__ or "", ENTRIES, table, seeds=5)

if __name__ == "__main__":
    sys.exit(main(BOARD))
