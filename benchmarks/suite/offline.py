"""Learning from recorded rollouts alone: cloning filtered by advantage or weighted by it, and of all, on lakes, a Minari dataset and files of D4RL;
then online, on the hopper.

    python -m benchmarks.suite.offline run --seeds 2 --jobs 2
    python -m benchmarks.suite.offline table

Each run is an example with one thread and 60 processor seconds, or 600 for the hopper and the walker, and 900 online. The records are made first:

    amago demo --out demo_half --epochs 6
    amago train Pendulum-v1 --run-name pendulum --buffer-dir runs --seed 0 --no_async --epochs 10
    MINARI_DATASETS_PATH=runs/minari amago buffer export runs/pendulum recorded/pendulum-v0
    python -m benchmarks.suite.sac_record Hopper-v5 recorded/hopper-medium-replay.hdf5 --until 1065 --steps 168847
    python -m benchmarks.suite.sac_record Walker2d-v5 recorded/walker2d-medium-replay.hdf5 --until 1530

The lakes are recorded from an agent that has begun to learn; Pendulum's record is all that an agent met while it learned, the others all that SAC met. Set
MINARI_DATASETS_PATH for `run`, too. Runs that are done are not repeated, and interrupted ones continue.
"""

from __future__ import annotations

import sys
from pathlib import Path

from benchmarks.suite.board import Board, Entry, main
from benchmarks.suite.example import read

SETTINGS = Path("benchmarks/suite/offline_files")
METHODS = {
    "cloning": "all cloned",
    "binary": "binary filter",
    "exponential": "exponential filter, beta 3",
}
"""What imitates the record; the settings of each are a file of that name in `SETTINGS`."""
_LAKE = "--val_interval 5 --epochs 60 --configs zoo/solve_lake"
_PENDULUM = (
    "--dataset recorded/pendulum-v0 --env Pendulum-v1 --traj_encoder ff --memory_layers 1 --memory_size 64 --grads_per_epoch 250 "
    "--epochs 60 --val_interval 4 --learning_rate 1e-3 --max_seq_len 8 --batch_size 32 --parallel_actors 24 --configs zoo/pendulum"
)
_LOCOMOTION = (
    "--traj_encoder ff --memory_layers 1 --memory_size 128 --grads_per_epoch 500 "
    "--epochs 40 --val_interval 4 --max_seq_len 16 --batch_size 16 --learning_rate 1e-3 --configs zoo/d4rl zoo/d4rl_hopper"
)
_ONLINE = "zoo/d4rl_online --online_after 0 --parallel_actors 8 --timesteps_per_epoch 250 --epochs 30 --val_interval 3 --learning_rate 3e-4"
"""What the run that goes on has after the words of the one before, which end with its ``--configs``."""
DATA = {
    "lake": ("20_offline_lake.py", f"--recorder demo_half/transformer {_LAKE}", 60),
    "pendulum": ("14_d4rl.py", _PENDULUM, 60),
    "hopper": ("14_d4rl.py", f"--dataset recorded/hopper-medium-replay.hdf5 --env Hopper-v5 {_LOCOMOTION}", 600),
    "walker2d": ("14_d4rl.py", f"--dataset recorded/walker2d-medium-replay.hdf5 --env Walker2d-v5 {_LOCOMOTION}", 600),
}
"""Records: the example that learns from each, its arguments without the method's file, and processor seconds."""
_SHOWN = {
    "lake": "Meta-FrozenLake 3x3, 6 attempts, half learned", "pendulum": "Pendulum-v1, all of training (Minari)",
    "hopper": "Hopper-v5, the first 168,847 steps of SAC (D4RL)",
    "walker2d": "Walker2d-v5, 167,958 steps of SAC until it returned 1,530 (D4RL)",
}  # fmt: skip


def _entries() -> list[Entry]:
    entries = [
        Entry(f"{data}_{method}", script, f"{words} {SETTINGS / method}.gin", budget=budget)
        for data, (script, words, budget) in DATA.items()
        for method in METHODS
    ]
    before = next(entry for entry in entries if entry.name == "hopper_exponential")
    return [*entries, Entry("hopper_online", before.script, f"{before.words} {_ONLINE}", budget=900, after=before.name)]


def table(results: Path) -> str:
    """One row for each record: greedy mean returns after training, by seed, for each method that has been run."""
    columns = METHODS | {"online": "the last, then 900 s online"}
    methods = {m: shown for m, shown in columns.items() if any(read(results / f"{data}_{m}") for data in DATA)}
    lines = [f"| record | {' | '.join(methods.values())} |", "| --- " * (len(methods) + 1) + "|"]
    for data, shown in _SHOWN.items():
        found = [read(results / f"{data}_{method}") for method in methods]
        if any(found):
            lines.append(f"| {shown} | {' | '.join(', '.join(f'{r.greedy:.2f}' for r in of) for of in found)} |")
    return "\n".join(lines)


BOARD = Board("offline", __doc__ or "", _entries(), table, seeds=2)

if __name__ == "__main__":
    sys.exit(main(BOARD))
