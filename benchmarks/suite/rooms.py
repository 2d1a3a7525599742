"""Objects and goals that are seen once: MiniGrid-MemoryS7 and S9, and the proof of memory, by `amago train ENV` with nothing but a number of steps.

    python -m benchmarks.suite.rooms run --seeds 3
    python -m benchmarks.suite.rooms table

Needs ``amago[minigrid]``. A run of a room ends when three evaluations in a row have reached a mean return of .85, or with its steps.
"""

from __future__ import annotations

import sys
from pathlib import Path

from benchmarks.suite.board import Board, Entry, main
from benchmarks.suite.example import AMAGO_TRAIN, read
from benchmarks.suite.statistics import shown_times, time_to_threshold

_EVALUATED = "--val_interval 4 --val_episodes 24"
ENTRIES = (
    Entry("memory_s7", AMAGO_TRAIN, f"benchmarks.suite.envs:memory_s7 --steps 400000 {_EVALUATED}", judged=128, goal=0.85),
    Entry("memory_s9", AMAGO_TRAIN, f"benchmarks.suite.envs:memory_s9 --steps 1000000 {_EVALUATED}", judged=128, goal=0.85),
    Entry("ProofOfMemory", AMAGO_TRAIN, f"benchmarks.suite.envs:ProofOfMemory --steps 25000 {_EVALUATED}", judged=128),
)


def table(results: Path) -> str:
    """One row for each task: the share of rollouts that end at the right object and their returns, the steps from which two evaluations in a
    row have reached .8, and the processor seconds of the run, by seed."""
    lines = ["| task | success, greedy, by seed | return, greedy | sampled | steps until 0.8 | CPU s |", "| --- " * 6 + "|"]
    for entry in ENTRIES:
        if found := read(results / entry.name):
            success = (next(x for name, x in r.metrics.items() if name.startswith("Average Success")) for r in found)
            returns = ([f"{x:.2f}" for x in xs] for xs in (success, (r.greedy for r in found), (r.sampled for r in found)))
            reached = shown_times(time_to_threshold(r.curve, 0.8, "steps") for r in found)
            cells = [entry.name, *(", ".join(cell) for cell in (*returns, reached, [f"{r.cpu:.0f}" for r in found]))]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


BOARD = Board("rooms", __doc__ or "", ENTRIES, table, seeds=3)

if __name__ == "__main__":
    sys.exit(main(BOARD))
