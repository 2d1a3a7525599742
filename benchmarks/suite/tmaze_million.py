"""Passive T-Mazes of 20 to 500 steps within a million environment steps, beside published figures of PPO.

    python -m benchmarks.suite.tmaze_million run --seeds 5
    python -m benchmarks.suite.tmaze_million table

A run ends when three evaluations in a row have reached a return of 0.95, or after 60 epochs, which are less than a million steps.
"""

from __future__ import annotations

import sys
from pathlib import Path

from benchmarks.suite.board import Board, Entry, main
from benchmarks.suite.example import read
from benchmarks.suite.tmaze import SOLVED

PUBLISHED = {
    "gru": {20: 0.98, 50: 0.88, 100: 0.68, 250: 0.53, 500: 0.51},
    "transformer": {20: 0.99, 50: 0.98, 100: 0.96, 250: 0.94, 500: 0.92},
}
"""Returns of PPO after 10^6 steps by length, mean of five seeds, as the README of a submission of 2026 has them."""
_LOOP = "--memory_layers 1 --batch_size 16 --grads_per_epoch 50 --val_interval 3"
WORDS = {
    "gru": f"--configs zoo/tmaze --learning_rate 2e-3 --parallel_actors 16 --epochs 60 {_LOOP}",
    "transformer": f"--configs zoo/tmaze_transformer --learning_rate 1e-3 --parallel_actors 32 --epochs 40 {_LOOP}",
}


def table(results: Path) -> str:
    """One row for each length: the return of each seed, the most steps that one took, and the published return."""
    lines = [
        "| steps | GRU, greedy, by seed | steps taken | PPO, GRU | Transformer, greedy, by seed | steps taken | PPO, Transformer |"
    ]
    lines.append("| --- " * 7 + "|")
    for length in PUBLISHED["gru"]:
        cells = []
        for model, theirs in PUBLISHED.items():
            found = read(results / f"{length}_{model}")
            scores = ", ".join(f"{r.greedy:.2f}" for r in found)
            cells += [scores or "not run", f"{max((r.steps for r in found), default=0):,}", f"{theirs[length]:.2f}"]
        lines.append(f"| {length} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _entry(length: int, model: str) -> Entry:
    words = f"--horizon {length} --traj_encoder {model} {WORDS[model]}"
    if model == "transformer":
        words += f" --timesteps_per_epoch {length}"
    elif length > 300:
        words += " --long_memory"
    return Entry(f"{length}_{model}", "04_tmaze.py", words, goal=SOLVED)


ENTRIES = [_entry(length, model) for model in PUBLISHED for length in PUBLISHED[model]]
BOARD = Board("tmaze_million", __doc__ or "", ENTRIES, table, seeds=5)

if __name__ == "__main__":
    sys.exit(main(BOARD))
