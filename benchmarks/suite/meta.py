"""Tasks in which an agent meets a new world in each rollout: lakes, rooms, speeds, goals, chemistries, rules, missions.

    python -m benchmarks.suite.meta run --tasks lake5 room9 --jobs 2
    python -m benchmarks.suite.meta table --picture docs/images/new_worlds.png

Each run is an example with one thread and 450 to 1,800 processor seconds. Besides lakes and rooms they need extras of the library
(docs/benchmarks.md). Runs that are done are not repeated, and interrupted ones continue.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.suite.board import Board, Entry, main
from benchmarks.suite.example import curves_in, read
from benchmarks.suite.pictures import panels

_WITHOUT = " --traj_encoder ff --memory_size 64 --memory_layers 1"
_GRU = " --traj_encoder gru --memory_size 64 --memory_layers 1"
_LOOP = "--parallel_actors 64 --batch_size 24 --grads_per_epoch 50 --val_interval 10 --learning_rate 1e-3"
_LAKE = f"--lake_size 5 --k_episodes 10 --configs zoo/solve_lake --timesteps_per_epoch 250 --epochs 400 {_LOOP}"
_SPEEDS = (
    "--configs zoo/half_cheetah_vel_wide --train_range 0 3 --test_range 0 3 --parallel_actors 16 --grads_per_epoch 250 --epochs 160 "
    "--val_interval 10 --learning_rate 5e-4 --lr_cooldown 0.4 --batch_size 32"
)
_ROOM = (
    "--room_size 9 --episode_length 50 --meta_horizon 500 --configs zoo/key_door --parallel_actors 64 --batch_size 12 "
    "--grads_per_epoch 50 --epochs 80 --val_interval 8 --learning_rate 1e-3 --lr_cooldown 0.4"
)
_REACH = (
    "--benchmark reach-v3 --k 3 --episode_length 200 --validate_on test --configs zoo/metaworld_reach --parallel_actors 16 --batch_size 24 "
    "--max_seq_len 24 --timesteps_per_epoch 200 --grads_per_epoch 250 --epochs 160 --val_interval 10 --learning_rate 5e-4"
)
_ALCHEMY = "--parallel_actors 256 --batch_size 48 --grads_per_epoch 40 --epochs 100 --val_interval 5 --learning_rate 2e-3"
_MISSIONS = "--k_episodes 2 --val_interval 10"
ENTRIES = (
    Entry("lake5", "00_meta_frozen_lake.py", _LAKE + _GRU, budget=900),
    Entry("lake5 without memory", "00_meta_frozen_lake.py", _LAKE + _WITHOUT, budget=450),
    Entry("room9", "05_dark_key_door.py", _ROOM + _GRU, budget=1500),
    Entry("cheetah", "12_half_cheetah_vel.py", f"{_SPEEDS} --max_seq_len 16{_GRU}", budget=1800),
    Entry("cheetah without memory", "12_half_cheetah_vel.py", f"{_SPEEDS} --max_seq_len 8{_WITHOUT}", budget=1800),
    Entry("ml1 reach", "07_metaworld.py", _REACH + _GRU, budget=1300),
    Entry("alchemy from numbers", "06_alchemy.py", _ALCHEMY + _GRU, budget=1500),
    Entry("xland trivial", "11_xland_minigrid.py", f"--rulesets trivial --k_shots 3 --epochs 120 {_LOOP}{_GRU}", budget=700),
    Entry(
        "xland small",
        "11_xland_minigrid.py",
        f"--rulesets small --configs zoo/xland --k_shots 3 --epochs 120 {_LOOP}{_GRU}",
        budget=700,
    ),
    Entry("babyai GoToRedBall", "10_babyai.py", f"--levels GoToRedBall {_MISSIONS}", budget=450),
    Entry("babyai GoToLocal", "10_babyai.py", f"--levels GoToLocal {_MISSIONS}", budget=450),
    Entry("babyai PickupLoc", "10_babyai.py", f"--levels PickupLoc {_MISSIONS}", budget=450),
)
_BLIND = " without memory"
"""Ends the name of a row whose agent has no memory; the row before has the same task."""
_MEASURES = {"room9": "Doors Opened", "cheetah": "Velocity Error", "alchemy": "Return"}
"""Beside the return, by the first word of a row's name; of others "Success"."""
_PART = r"(?:in )?(?:Attempt|Trial|Shot) (\d+)"


def table(results: Path) -> str:
    """One row for each task with a finished run: returns, what else measures success, and what it took."""
    lines = [
        "| task | return, greedy, by seed | sampled | further, greedy, by seed | updates, steps | CPU s |",
        "| --- " * 6 + "|",
    ]
    for entry in ENTRIES:
        found = read(results / entry.name)
        if not found:
            continue
        greedy, sampled = (", ".join(f"{getattr(r, name):.2f}" for r in found) for name in ("greedy", "sampled"))
        measure = _MEASURES.get(entry.name.split()[0], "Success")
        took = f"{found[0].updates:,}, {found[0].steps / 1e6:.2f}M | {', '.join(f'{r.cpu:.0f}' for r in found)}"
        lines.append(f"| {entry.name} | {greedy} | {sampled} | {further([r.metrics for r in found], measure)} | {took} |")
    return "\n".join(lines)


def further(seeds: Sequence[Mapping[str, float]], measure: str) -> str:
    """A measure beside the return, in few words: by attempt the first and the last, where it is counted by attempt; the seeds' in turn."""
    found = [_measured(metrics, measure) for metrics in seeds]
    if all(len(parts) > 1 for parts in found):
        last = max(found[0])
        first, final = (", ".join(f"{parts[n]:.2f}" for parts in found) for n in (min(found[0]), last))
        return f"{measure.lower()} {first} in attempt 1; {final} in attempt {last + 1}"
    return f"{measure.lower()} {', '.join(f'{next(iter(parts.values()), math.nan):.2f}' for parts in found)}"


def _measured(metrics: Mapping[str, float], measure: str) -> dict[int, float]:
    """A measure by attempt, from 0; where it is not counted by attempt, under 0."""
    whole, parts = math.nan, {}
    for name, value in metrics.items():  # "Average Attempt 3 Success in room" or "Average Success in Shot 3 in room"
        words = name.rpartition(" in ")[0].removeprefix("Average ")
        if re.sub(_PART, "", words).strip() != measure:
            continue
        if number := re.search(_PART, words):
            parts[int(number[1])] = value
        else:
            whole = value
    return parts or {0: whole}


def draw(results: Path, path: Path) -> None:
    """Mean return in training against processor seconds, a panel for each task, a line for each seed; dashed without memory."""
    found = {e.name: curves for e in ENTRIES if (curves := curves_in(results / e.name))}
    shown = [name for name in found if not name.endswith(_BLIND)]
    with panels(path, len(shown), 4, (3.0, 2.3), "processor seconds of one thread") as axes:
        for name, panel in zip(shown, axes):
            for row, style in ((name, "-"), (name + _BLIND, "--")):
                for curve in found.get(row, ()):
                    panel.plot([p.cpu for p in curve], [p.score for p in curve], style, color="tab:blue", linewidth=1.4)
            panel.set_title(f"{name} ({len(found[name])})", fontsize=8)


BOARD = Board("meta", __doc__ or "", ENTRIES, table, draw)

if __name__ == "__main__":
    sys.exit(main(BOARD))
