"""The passive T-Maze (Ni et al. 2023, arXiv 2307.03864) by length and sequence model (`examples/04_tmaze.py`), on one thread each.

    python -m benchmarks.suite.tmaze run --jobs 2
    python -m benchmarks.suite.tmaze table

Success is the share of rollouts that turn the right way at the end of a corridor of so many steps; without memory it is a half. Runs that
are done are not repeated, and interrupted ones continue.
"""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from pathlib import Path

from benchmarks.suite.example import Result, read, train
from benchmarks.suite.recorded import in_processes, is_done
from benchmarks.suite.statistics import time_to_threshold

RESULTS = Path(__file__).parents[2] / "results" / "tmaze"
HORIZONS = (300, 1000, 3000)
MODELS = ("transformer", "gru", "mingru")
BUDGET = 3600.0
SOLVED = 0.95
"""A return that only an agent with memory has: 1 for the right turn, less for each step that was wasted on the way."""
SETTINGS = {
    300: "--parallel_actors 16 --batch_size 16 --grads_per_epoch 50 --epochs 60 --val_interval 3",
    1000: "--parallel_actors 16 --batch_size 8 --grads_per_epoch 50 --epochs 60 --val_interval 3",
    3000: "--parallel_actors 16 --batch_size 4 --grads_per_epoch 50 --epochs 60 --val_interval 3",
}
SHARED = "--configs zoo/tmaze_10k --memory_layers 1 --learning_rate 1e-3"


def table(results: Path) -> str:
    """One row for each length and model with a finished run."""
    lines = [
        "| steps | sequence model | return, greedy, by seed | CPU s until 0.95, by seed | updates/CPU s | environment steps | CPU s |",
        "| --- " * 7 + "|",
    ]
    for horizon in HORIZONS:
        for model in MODELS:
            if found := read(results / f"{horizon}_{model}"):
                lines.append(_row(horizon, model, found))
    return "\n".join(lines)


def _row(horizon: int, model: str, found: list[Result]) -> str:
    times = [time_to_threshold(r.curve, SOLVED) for r in found]
    shown = ", ".join(f"{t:.0f}" if t < float("inf") else "not reached" for t in times)
    speeds = ", ".join(f"{r.curve[-1].updates / r.curve[-1].cpu:.1f}" for r in found)
    greedy, cpu = ", ".join(f"{r.greedy:.2f}" for r in found), ", ".join(f"{r.cpu:.0f}" for r in found)
    return f"| {horizon:,} | {model} | {greedy} | {shown} | {speeds} | {max(r.steps for r in found):,} | {cpu} |"


def main(argv: list[str] | None = None) -> int:
    parser = ArgumentParser(
        prog="python -m benchmarks.suite.tmaze", description=__doc__, formatter_class=RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "command", choices=("run", "one", "table"), help="train, a single run in this process, or print results"
    )
    parser.add_argument(
        "--horizons", nargs="+", type=int, choices=HORIZONS, default=list(HORIZONS), help="lengths (default: all)"
    )
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS), help="sequence models (default: all)")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of results (default: results/tmaze)")
    parser.add_argument("--seeds", type=int, default=1, help="run: seeds 0 to N - 1; one: the seed")
    parser.add_argument("--jobs", type=int, default=1, help="runs side by side")
    parser.add_argument("--budget", type=float, default=BUDGET, help="processor seconds of each run (default: %(default)s)")
    parser.add_argument("--more", default="", help="further arguments of the example, in one word")
    args = parser.parse_args(argv)
    if args.command == "table":
        print(table(args.results))
        return 0
    cases = [(h, m) for h in args.horizons for m in args.models]
    if args.command == "one":
        import torch

        torch.set_num_threads(1)
        for horizon, model in cases:
            name = f"{horizon}_{model}"
            words = f"--horizon {horizon} --traj_encoder {model} {SHARED} {SETTINGS[horizon]} {args.more}".strip()
            path, work = (
                _path(args, horizon, model, args.seeds),
                args.results.parent / "work" / "tmaze" / f"{name}_{args.seeds}",
            )
            train("04_tmaze.py", words, f"tmaze {horizon} {model}", args.seeds, path, work, args.budget)
        return 0
    jobs = [(h, m, s) for s in range(args.seeds) for h, m in cases if not is_done(_path(args, h, m, s))]
    return 0 if in_processes(jobs, lambda job: _words(*job, args), args.jobs) else 1


def _path(args: Namespace, horizon: int, model: str, seed: int) -> Path:
    return Path(args.results) / f"{horizon}_{model}" / f"seed{seed}.jsonl"


def _words(horizon: int, model: str, seed: int, args: Namespace) -> list[str]:
    words = ["benchmarks.suite.tmaze", "one", "--horizons", str(horizon), "--models", model, "--seeds", str(seed)]
    return [*words, "--results", str(args.results), "--budget", str(args.budget), f"--more={args.more}"]


if __name__ == "__main__":
    sys.exit(main())
