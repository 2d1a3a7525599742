"""The command of a scoreboard.

It runs examples, or `amago train`, in processes of one thread each, with a budget of processor time, and continues them after interruptions.
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.suite.example import JUDGED, train
from benchmarks.suite.recorded import claimed, in_processes, is_done

ROOT = Path(__file__).parents[1] / "results"
BUDGET = 3600.0


@dataclass(frozen=True)
class Entry:
    """A row of a scoreboard.

    Attributes:
        name: of its folder of results.
        script: in ``examples/``; or "amago train".
        words: its arguments.
        judged: rollouts of the evaluations after training.
        budget: processor seconds, unless the command gives others.
        goal: mean return; a run ends early when several evaluations in a row have reached it. None: it does not.
        after: name of the row before, with whose last weights a run of the same seed begins. None: with new ones.
    """

    name: str
    script: str
    words: str
    judged: int = JUDGED
    budget: float = BUDGET
    goal: float | None = None
    after: str | None = None


@dataclass(frozen=True)
class Board:
    """A scoreboard.

    Attributes:
        module: that is called, after "benchmarks.suite.".
        doc: its description.
        entries: its rows.
        table: the text of its table, from the folder of results.
        draw: draws its curves, from the folder of results into a file; None: it has no picture.
        seeds: of ``run``, unless the command gives another number.
    """

    module: str
    doc: str
    entries: Sequence[Entry]
    table: Callable[[Path], str]
    draw: Callable[[Path, Path], None] | None = None
    seeds: int = 1


def result_path(results: Path, name: str, seed: int) -> Path:
    return results / name / f"seed{seed}.jsonl"


def main(board: Board, argv: list[str] | None = None) -> int:
    """Run the command of a scoreboard; returns its exit code."""
    args = _parser(board).parse_args(argv)
    if args.command == "table":
        print(board.table(args.results))
        if args.picture is not None and board.draw is not None:
            board.draw(args.results, args.picture)
        return 0
    if args.command == "one":
        import torch

        torch.set_num_threads(1)
        for entry in (e for e in board.entries if e.name in args.tasks):
            path = result_path(args.results, entry.name, args.seeds)
            works = args.work or args.results.parent / "work" / args.results.name
            work = works / f"{entry.name}_{args.seeds}"
            words = f"{entry.words} {args.more}".strip()
            begins = None if entry.after is None else works / f"{entry.after}_{args.seeds}.pt"
            keeps = works / f"{entry.name}_{args.seeds}.pt" if any(e.after == entry.name for e in board.entries) else None
            budget = entry.budget if args.budget is None else args.budget
            with claimed(path):
                train(entry.script, words, entry.name, args.seeds, path, work, budget, entry.judged, entry.goal, begins, keeps)
        return 0
    chains = [args.tasks] if any(e.after for e in board.entries) else [[t] for t in args.tasks]
    todo = [(c, s) for s in range(args.seeds) for c in chains]
    jobs = [(*c, s) for c, s in todo if not all(is_done(result_path(args.results, t, s)) for t in c)]
    return 0 if in_processes(jobs, lambda job: _words(board, job[:-1], job[-1], args), args.jobs) else 1


def _parser(board: Board) -> ArgumentParser:
    parser = ArgumentParser(
        prog=f"python -m benchmarks.suite.{board.module}", description=board.doc, formatter_class=RawDescriptionHelpFormatter
    )
    names, folder = [e.name for e in board.entries], ROOT / board.module
    parser.add_argument(
        "command", choices=("run", "one", "table"), help="train, a single run in this process, or print results"
    )
    parser.add_argument("--tasks", nargs="+", choices=names, default=names, metavar="TASK", help=", ".join(names))
    parser.add_argument(
        "--results", type=Path, default=folder, help=f"folder of results (default: benchmarks/results/{board.module})"
    )
    parser.add_argument(
        "--seeds", type=int, default=board.seeds, help="run: seeds 0 to N - 1 (default: %(default)s); one: the seed"
    )
    parser.add_argument("--jobs", type=int, default=1, help="runs side by side")
    parser.add_argument("--budget", type=float, default=None, help="processor seconds of each run, instead of its own")
    parser.add_argument("--work", type=Path, default=None, help="folder for buffers and states (default: beside the results)")
    parser.add_argument("--more", default="", help="further arguments of the runs, in one word")
    if board.draw is not None:
        parser.add_argument("--picture", type=Path, default=None, metavar="FILE.png", help="table: draw the curves")
    else:
        parser.set_defaults(picture=None)
    return parser


def _words(board: Board, tasks: Sequence[str], seed: int, args: Namespace) -> list[str]:
    words = [f"benchmarks.suite.{board.module}", "one", "--tasks", *tasks, "--seeds", str(seed), "--results", str(args.results)]
    words += [f"--more={args.more}"] + ([] if args.budget is None else ["--budget", str(args.budget)])
    return words + (["--work", str(args.work)] if args.work is not None else [])
