"""Four games of POPGym within two million steps, their returns normalised to [0, 1], beside published figures of PPO.

python -m benchmarks.suite.popgym_2m run --seeds 3
python -m benchmarks.suite.popgym_2m table
"""

from __future__ import annotations

import sys
from pathlib import Path

from benchmarks.suite.board import Board, Entry, main
from benchmarks.suite.example import read
from benchmarks.suite.popgym import ANSWERS, CARDS

PUBLISHED = {
    "RepeatPreviousEasy": (0.84, 0.79),
    "AutoencodeEasy": (0.78, 0.72),
    "ConcentrationEasy": (0.46, 0.74),
    "BattleshipEasy": (0.52, 0.71),
}
"""(GRU, Transformer) of PPO after 2 million steps, mean of five seeds, as the README of a submission of 2026 has them."""
WORDS = {
    "RepeatPreviousEasy": f"{CARDS} --epochs 20 --val_interval 2", "AutoencodeEasy": f"{ANSWERS} --epochs 50 --val_interval 5",
    "ConcentrationEasy": "--configs zoo/popgym zoo/popgym_long zoo/popgym_board zoo/popgym_concentration --traj_encoder identity "
    "--parallel_actors 32 --learning_rate 1e-3 --batch_size 32 --epochs 60 --timesteps_per_epoch 1040 --grads_per_epoch 60 --val_interval 5",
    "BattleshipEasy": "--configs zoo/popgym zoo/popgym_long zoo/popgym_board --flat_actions --traj_encoder gru --memory_size 128 --memory_layers 1 "
    "--parallel_actors 32 --learning_rate 1e-3 --batch_size 64 --epochs 40 --timesteps_per_epoch 1560 --grads_per_epoch 100 --val_interval 4",
}  # fmt: skip


def table(results: Path) -> str:
    """One row for each game: returns by seed, greedy and with drawn actions, normalised, the most steps that one took, and the published
    figures."""
    lines = ["| environment | greedy, by seed | sampled | steps | PPO, GRU | PPO, Transformer |", "| --- " * 6 + "|"]
    for name, theirs in PUBLISHED.items():
        found = read(results / name)
        greedy, sampled = (_normalised(scores) for scores in ([r.greedy for r in found], [r.sampled for r in found]))
        steps = max((r.steps for r in found), default=0)
        lines.append(f"| {name} | {greedy} | {sampled} | {steps:,} | {theirs[0]:.2f} | {theirs[1]:.2f} |")
    return "\n".join(lines)


def _normalised(returns: list[float]) -> str:
    return ", ".join(f"{(x + 1) / 2:.2f}" for x in returns) or "not run"


ENTRIES = [Entry(name, "03_popgym_suite.py", f"{words} --lr_cooldown 0.5 --env {name}") for name, words in WORDS.items()]
BOARD = Board("popgym_2m", __doc__ or "", ENTRIES, table, seeds=5)

if __name__ == "__main__":
    sys.exit(main(BOARD))
