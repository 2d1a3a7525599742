"""``amago watch DIR``: a live page about all runs below a directory."""

from __future__ import annotations

import os
import secrets
import time
from argparse import ArgumentParser, Namespace
from pathlib import Path

TOKEN_VARIABLE = "AMAGO_WATCH_TOKEN"


def add_arguments(parser: ArgumentParser) -> None:
    parser.description = (
        "Serve a page about all runs below a directory, which follows them while they train: what runs, how far it is, when it will be "
        "done, rates, faults, and all that 'amago report' draws. Ctrl-C ends it; the runs are only read. Example: amago watch runs"
    )
    parser.add_argument("directories", nargs="+", metavar="DIR", help="directory with runs in it, now or later")
    parser.add_argument(
        "--host",
        default="127.0.0.1",
        help="address to serve at. With another one than this machine's own, visitors need a token, which is part of the printed "
        f"address and is drawn at random unless the variable {TOKEN_VARIABLE} holds one",
    )
    parser.add_argument("--port", type=int, default=6060, help="port to serve at; 0: any that is free")


def run(args: Namespace) -> int:
    from amago.run.report.server import WatchServer, is_local
    from amago.run.report.watch import Watcher

    for directory in args.directories:
        if not Path(directory).is_dir():
            raise ValueError(f"{directory!r} is not a directory; give one with runs in it")
    if not 0 <= args.port <= 65535:
        raise ValueError(f"--port must be from 0 to 65535, got {args.port}")
    token = os.environ.get(TOKEN_VARIABLE) or (None if is_local(args.host) else secrets.token_urlsafe(24))
    watcher = Watcher([Path(directory) for directory in args.directories])
    began = time.monotonic()
    try:
        server = WatchServer((args.host, args.port), watcher, token)
    except OSError as err:
        raise ValueError(
            f"cannot serve at {args.host}, port {args.port}: {err.strerror or err}; --port 0 takes a free port"
        ) from err
    watcher.start()
    try:
        print(f"watching {', '.join(args.directories)} at {server.url}  (Ctrl-C ends)", flush=True)
        print(f"{watcher.state()['text']}; read within {time.monotonic() - began:.1f} s", flush=True)
        server.serve_forever()
    except KeyboardInterrupt:
        print()
    finally:
        server.server_close()
        watcher.stop()
    return 0
