"""``amago report`` and ``amago watch``: a page about training runs, written once, or served while they train."""

from __future__ import annotations

import os
import secrets
from argparse import ArgumentParser, Namespace
from pathlib import Path

from amago.report.curves import EACH, STATISTICS

TOKEN_VARIABLE = "AMAGO_WATCH_TOKEN"


def add_arguments(parser: ArgumentParser) -> None:
    parser.description = (
        "Write a self-contained HTML page about training runs: learning curves with intervals over seeds, adaptation by attempt, "
        "losses, throughput, faults and settings. It opens from disk and needs no network. Example: amago report runs/lake_seed0 runs/lake_seed1"
    )
    parser.add_argument("runs", nargs="+", metavar="RUN", help="directory of a run, or a directory with runs in it")
    parser.add_argument("--out", default="report.html", metavar="FILE.html", help="file to write")
    statistic = "what sums up several seeds when the page opens"
    parser.add_argument("--statistic", default="mean", choices=[*STATISTICS, EACH], help=statistic)


def run(args: Namespace) -> int:
    from amago.report.page import write_report

    print(f"wrote {write_report(args.runs, args.out, args.statistic)}")
    return 0


def add_watch_arguments(parser: ArgumentParser) -> None:
    parser.description = (
        "Serve the page of 'amago report' about all runs below a directory, written again while they train: what runs, how far it is, when it will be "
        "done, rates, faults, curves. Ctrl-C ends it; the runs are only read. Example: amago watch runs"
    )
    parser.add_argument("directories", nargs="+", type=Path, metavar="DIR", help="directory with runs in it, now or later")
    parser.add_argument(
        "--host",
        default="127.0.0.1",
        help="address to serve at. With another one than this machine's own, visitors need a token, which is part of the printed "
        f"address and is drawn at random unless the variable {TOKEN_VARIABLE} holds one",
    )
    parser.add_argument("--port", type=int, default=6060, help="port to serve at; 0: any that is free")


def watch(args: Namespace) -> int:
    from amago.report.page import LOCAL, WatchServer

    for directory in args.directories:
        if not directory.is_dir():
            raise ValueError(f"{directory} is not a directory; give one with runs in it")
    token = os.environ.get(TOKEN_VARIABLE) or (None if args.host in LOCAL else secrets.token_urlsafe(24))
    try:
        server = WatchServer((args.host, args.port), args.directories, token)
    except (OSError, OverflowError) as err:
        raise ValueError(f"cannot serve at {args.host}, --port {args.port}: {err}; --port 0 takes a free port") from err
    try:
        print(f"watching {', '.join(map(str, args.directories))} at {server.url}  (Ctrl-C ends)", flush=True)
        server.serve_forever()
    except KeyboardInterrupt:
        print()
    finally:
        server.server_close()
    return 0
