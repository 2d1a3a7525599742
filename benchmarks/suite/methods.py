"""Judges the methods of the library, each a few settings on top of "tuned": how soon each task is solved, beside without it.

    python -m benchmarks.suite.methods run --seeds 2 --jobs 2
    python -m benchmarks.suite.methods table

A method is a file in ``benchmarks/suite/method_files``, whose first line says what it is, or another sequence model. A run ends when its task is
solved or its budget is spent. Runs that are done are not repeated, and interrupted ones continue.
"""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.suite.__main__ import RESULTS
from benchmarks.suite.__main__ import main as suite
from benchmarks.suite.statistics import probability_of_improvement, time_to_threshold
from benchmarks.suite.tables import Results, read, times, with_two_seeds
from benchmarks.suite.tasks import NAMES, TASKS, Task

FILES = Path(__file__).parent / "method_files"
JUDGES = ("lake3", "tmaze100", "recall8", "poles", "bandit")
"""The tasks that are run unless others are named: one for each way to fail, five minutes or ten at most."""


@dataclass(frozen=True)
class Method:
    """A configuration that is compared with "tuned".

    Attributes:
        name: of its folder of results, and of its file, if it has one.
        what: one line for the table.
        file: settings on top of "tuned".
        traj_encoder: the sequence model, by name; None: that of "tuned".
    """

    name: str
    what: str
    file: Path | None = None
    traj_encoder: str | None = None


def _of_file(path: Path) -> Method:
    return Method(path.stem, path.read_text().splitlines()[0].removeprefix("# ").rstrip("."), path)


_TUNED = Method("tuned", "`tuned`: settings of the zoo, most with a Transformer")
METHODS = (
    Method("gru", "a GRU in place of the Transformer", traj_encoder="gru"),
    Method("mingru", "a linear recurrence, the minGRU, in place of the Transformer", traj_encoder="mingru"),
    *(_of_file(path) for path in sorted(FILES.glob("*.gin"))),
)


def run(args: Namespace) -> int:
    """All configurations with seed 0, then with seed 1, and so on; returns the highest exit code."""
    configs = [_TUNED, *(m for m in METHODS if m.name in args.methods)]
    return max(suite(_words(config, seeds, args)) for seeds in range(1, args.seeds + 1) for config in configs)


def _words(method: Method, seeds: int, args: Namespace) -> list[str]:
    words = ["run", "--config", method.name, "--until_solved", "--seeds", str(seeds), "--jobs", str(args.jobs)]
    words += ["--results", str(args.results), "--tasks", *args.tasks]
    words += ["--files", str(method.file)] if method.file else []
    words += ["--traj_encoder", method.traj_encoder] if method.traj_encoder else []
    words += ["--work", str(args.work)] if args.work else []
    return words + (["--budget", str(args.budget)] if args.budget is not None else [])


def table(results: Path, tasks: Sequence[Task]) -> str:
    """One row for each configuration with finished runs: median processor seconds until each task is solved, and the probability that
    it is sooner solved than without the method."""
    found = {name: read(results, name, tasks) for name in ("tuned", *(m.name for m in METHODS))}
    tasks = [t for t in tasks if any(t.name in of for of in found.values())]
    lines = [f"| configuration | {' | '.join(t.name for t in tasks)} | P(sooner) |", "| --- " * (len(tasks) + 2) + "|"]
    for method in (_TUNED, *METHODS):
        if with_it := found[method.name]:
            shown = [times(t, with_it.get(t.name, ())) for t in tasks]
            sooner = "" if method is _TUNED else _sooner(with_it, found["tuned"], tasks)
            lines.append(f"| {method.what} | {' | '.join(shown)} | {sooner} |")
    return "\n".join(lines)


def _sooner(with_it: Results, without: Results, tasks: Sequence[Task]) -> str:
    if not set(with_it) & set(without):
        return ""
    common = with_two_seeds(with_it, without)
    if not common:
        return "one seed"
    speeds = [
        {t.name: [-time_to_threshold(c, t.threshold) for c in of[t.name]] for t in tasks if t.name in common}
        for of in (with_it, without)
    ]
    p, low, high = probability_of_improvement(*speeds)
    tasks_of_both = f"{len(common)} task{'s' if len(common) > 1 else ''}"
    return f"{p:.2f} ({low:.2f} to {high:.2f}) on {tasks_of_both}"


def main(argv: list[str] | None = None) -> int:
    parser = ArgumentParser(
        prog="python -m benchmarks.suite.methods", description=__doc__, formatter_class=RawDescriptionHelpFormatter
    )
    names = [m.name for m in METHODS]
    parser.add_argument("command", choices=("run", "table"), help="train, or print results")
    parser.add_argument("--methods", nargs="+", choices=names, default=names, metavar="METHOD", help=", ".join(names))
    parser.add_argument("--tasks", nargs="+", choices=NAMES, default=list(JUDGES), metavar="TASK", help=", ".join(NAMES))
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of results (default: benchmarks/results/suite)")
    parser.add_argument("--seeds", type=int, default=2, help="seeds 0 to N - 1 (default: %(default)s)")
    parser.add_argument("--jobs", type=int, default=1, help="runs side by side")
    parser.add_argument("--budget", type=float, default=None, help="processor seconds of each run, instead of the tasks'")
    parser.add_argument("--work", type=Path, default=None, help="folder for buffers and states")
    args = parser.parse_args(argv)
    if args.command == "table":
        print(table(args.results, [t for t in TASKS if t.name in args.tasks]))
        return 0
    return run(args)


if __name__ == "__main__":
    sys.exit(main())
