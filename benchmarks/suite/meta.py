"""Tasks in which an agent meets a new world in each rollout: lakes, rooms, speeds, goals, chemistries, rules, missions.

    python -m benchmarks.suite.meta run --tasks lake5 room9 --jobs 2
    python -m benchmarks.suite.meta table

Each run is an example with one thread and an hour of processor time. Besides lakes and rooms they need extras of the library
(docs/benchmarks.md). Runs that are done are not repeated, and interrupted ones continue.
"""

from __future__ import annotations

import sys
from pathlib import Path

from benchmarks.suite.board import Board, Entry, main
from benchmarks.suite.example import read

_WITHOUT = "--traj_encoder ff --memory_layers 1"
_SPEEDS = "--train_range 0 3 --test_range 0 3 --parallel_actors 16 --batch_size 32 --grads_per_epoch 250 --epochs 200 --val_interval 5"
_MISSIONS = "--k_episodes 2 --val_interval 10"
ENTRIES = (
    Entry("lake5", "00_meta_frozen_lake.py", "--lake_size 5 --k_episodes 10 --val_interval 3"),
    Entry("lake5 without memory", "00_meta_frozen_lake.py", f"--lake_size 5 --k_episodes 10 --val_interval 3 {_WITHOUT}"),
    Entry("room9", "05_dark_key_door.py", "--room_size 9 --episode_length 50 --meta_horizon 500 --epochs 200 --val_interval 5"),
    Entry(
        "cheetah", "12_half_cheetah_vel.py", f"--traj_encoder gru --memory_size 64 --memory_layers 1 --max_seq_len 32 {_SPEEDS}"
    ),
    Entry("cheetah without memory", "12_half_cheetah_vel.py", f"--max_seq_len 8 --memory_size 32 {_SPEEDS} {_WITHOUT}"),
    Entry("ml1 reach", "07_metaworld.py", "--benchmark reach-v3 --k 3 --val_interval 5", 64),
    Entry("alchemy from numbers", "06_alchemy.py", "--val_interval 10"),
    Entry("xland trivial", "11_xland_minigrid.py", "--rulesets trivial --k_shots 3 --val_interval 10"),
    Entry("xland small", "11_xland_minigrid.py", "--rulesets small --k_shots 3 --val_interval 10"),
    Entry("babyai GoToRedBall", "10_babyai.py", f"--levels GoToRedBall {_MISSIONS}"),
    Entry("babyai GoToLocal", "10_babyai.py", f"--levels GoToLocal {_MISSIONS}"),
    Entry("babyai PickupLoc", "10_babyai.py", f"--levels PickupLoc {_MISSIONS}"),
)
_SHOWN = ("Success", "Error")  # in the names of further metrics for the table


def table(results: Path) -> str:
    """One row for each task with a finished run: returns, what else measures success, and what it took."""
    lines = ["| task | return, greedy, by seed | sampled | further, greedy, seed 0 | steps | CPU s |", "| --- " * 6 + "|"]
    for entry in ENTRIES:
        found = read(results / entry.name)
        if not found:
            continue
        greedy, sampled = (", ".join(f"{getattr(r, name):.2f}" for r in found) for name in ("greedy", "sampled"))
        further = {k: v for k, v in found[0].metrics.items() if any(word in k for word in _SHOWN)}
        shown = "; ".join(
            f"{name.partition(' in ')[0].removeprefix('Average ')} {value:.2f}" for name, value in sorted(further.items())
        )
        took = f"{max(r.steps for r in found):,} | {', '.join(f'{r.cpu:.0f}' for r in found)}"
        lines.append(f"| {entry.name} | {greedy} | {sampled} | {shown} | {took} |")
    return "\n".join(lines)


BOARD = Board("meta", __doc__ or "", ENTRIES, table)

if __name__ == "__main__":
    sys.exit(main(BOARD))
