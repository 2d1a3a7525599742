"""Trains the reference tasks with a configuration, and compares configurations.

    python -m benchmarks.suite run --config tuned --seeds 3 --jobs 2
    python -m benchmarks.suite run --config tree_backup --files my/tree_backup.gin --tasks lake3 tmaze100
    python -m benchmarks.suite table --config tuned --against tree_backup

Each run is a process of one thread and ends when its budget of processor time is spent. Runs that are done are not repeated, and
interrupted ones continue.
"""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from pathlib import Path

from benchmarks.suite.recorded import IN_A_ROW, in_processes, is_done
from benchmarks.suite.runs import Config, result_path, train
from benchmarks.suite.tables import comparison, draw, read, summary
from benchmarks.suite.tasks import NAMES, TASKS

RESULTS = Path(__file__).parents[1] / "results" / "suite"


def _parser() -> ArgumentParser:
    parser = ArgumentParser(prog="python -m benchmarks.suite", description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, what in (
        ("run", "train"),
        ("table", "print tables of finished runs, and draw them"),
        ("one", "a single run, in this process"),
    ):
        command = commands.add_parser(name, help=what)
        command.add_argument("--config", required=True, help="name of the configuration: the folder of its results")
        command.add_argument("--tasks", nargs="+", choices=NAMES, default=list(NAMES), metavar="TASK", help=", ".join(NAMES))
        command.add_argument(
            "--results", type=Path, default=RESULTS, help="folder of results (default: benchmarks/results/suite)"
        )
        if name != "table":
            command.add_argument(
                "--base", choices=("tuned", "default"), default=None, help="settings below --files; default: tuned"
            )
            command.add_argument("--traj_encoder", default=None, help="the sequence model, by name; default: that of the base")
            command.add_argument("--files", nargs="*", default=(), metavar="FILE.gin", help="settings on top of the base")
            command.add_argument(
                "--work", type=Path, required=name == "one", default=None, help="folder for buffers and states"
            )
            command.add_argument(
                "--budget", type=float, default=None, help="processor seconds of each run, instead of the tasks'"
            )
            command.add_argument(
                "--until_solved",
                action="store_true",
                help=f"end a run early when {IN_A_ROW} evaluations in a row have reached the task's threshold",
            )
        if name == "run":
            command.add_argument("--seeds", type=int, default=3, help="seeds 0 to N - 1")
            command.add_argument("--jobs", type=int, default=1, help="runs side by side")
        if name == "one":
            command.add_argument("--seed", type=int, default=0)
        if name == "table":
            command.add_argument("--against", default=None, help="another configuration")
            command.add_argument("--picture", type=Path, default=None, metavar="FILE.png", help="draw the curves")
            command.add_argument("--axis", choices=("cpu", "steps", "updates"), default="cpu", help="of the picture")
    return parser


def _config(args: Namespace) -> Config:
    base = args.base or ("default" if args.config == "default" else "tuned")
    return Config(args.config, base, tuple(args.files), args.traj_encoder)


def _run_all(args: Namespace) -> int:
    """Start a process for each run that is not done, first all tasks with seed 0; print one line for each."""
    work = args.work or args.results.parent / "work"
    todo = [(t, s) for s in range(args.seeds) for t in args.tasks if not is_done(result_path(args.results, args.config, t, s))]
    print(f"{len(todo)} runs to do, {len(args.tasks) * args.seeds - len(todo)} done before", flush=True)

    return 0 if in_processes(todo, lambda job: _words(*job, args, work), args.jobs) else 1


def _words(task: str, seed: int, args: Namespace, work: Path) -> list[str]:
    words = [
        "benchmarks.suite",
        "one",
        "--config",
        args.config,
        "--tasks",
        task,
        "--seed",
        str(seed),
        "--results",
        str(args.results),
    ]
    words += ["--work", str(work / args.config / f"{task}_{seed}")]
    words += ["--base", args.base] if args.base else []
    words += ["--traj_encoder", args.traj_encoder] if args.traj_encoder else []
    words += ["--files", *args.files] if args.files else []
    words += ["--until_solved"] if args.until_solved else []
    return words + (["--budget", str(args.budget)] if args.budget is not None else [])


def main(argv: list[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    tasks = [t for t in TASKS if t.name in args.tasks]
    if args.command == "run":
        return _run_all(args)
    if args.command == "one":
        import torch

        torch.set_num_threads(1)
        for task in tasks:
            train(task, _config(args), args.seed, args.results, args.work, args.budget, args.until_solved)
        return 0
    names = [args.config] + ([args.against] if args.against else [])
    found = {name: read(args.results, name, tasks) for name in names}
    for name in names:
        print(f"{name}\n\n{summary(found[name])}\n")
    if args.against:
        print(comparison(found[args.config], found[args.against], (args.config, args.against)))
    if args.picture is not None:
        draw(found, args.picture, args.axis)
    return 0


if __name__ == "__main__":
    sys.exit(main())
