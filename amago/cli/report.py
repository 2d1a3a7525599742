"""``amago report RUN...``: a page about training runs."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace

from amago.run.report.curves import STATISTICS
from amago.run.report.figures import EACH


def add_arguments(parser: ArgumentParser) -> None:
    parser.description = (
        "Write a self-contained HTML page about training runs: learning curves with intervals over seeds, adaptation by attempt, "
        "losses, throughput, faults and settings. It opens from disk and needs no network. Example: amago report runs/lake_seed0 runs/lake_seed1"
    )
    parser.add_argument("runs", nargs="+", metavar="RUN", help="directory of a run, or a directory with runs in it")
    parser.add_argument("--out", default="report.html", metavar="FILE.html", help="file to write")
    parser.add_argument(
        "--statistic",
        default="mean",
        choices=[*STATISTICS, EACH],
        help="what sums up several seeds when the page opens",
    )


def run(args: Namespace) -> int:
    from amago.run.report.page import write_report

    try:
        print(f"wrote {write_report(args.runs, args.out, args.statistic)}")
    except FileNotFoundError as err:
        raise ValueError(str(err)) from err  # a mistake in the arguments
    return 0
