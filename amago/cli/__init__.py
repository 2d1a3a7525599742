"""The ``amago`` command: one module a subcommand, imported only when it runs."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import traceback
from collections.abc import Sequence

from amago import __version__

COMMANDS = {
    "train": "train an agent on a Gymnasium environment",
    "eval": "evaluate a trained agent",
    "buffer": "import, export, inspect or verify recorded trajectories",
    "demo": "train a small memory agent in a few minutes and draw how it adapts",
}


def _while_at_work(err: BaseException) -> bool:
    """Whether an error came out of training or evaluation, where only its traceback says enough."""
    names = {frame.f_code.co_name for frame, _ in traceback.walk_tb(err.__traceback__)}
    return bool(names & {"learn", "evaluate_test", "evaluate"})


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    argv = list(sys.argv[1:] if argv is None else argv)
    # threads that wait for work must not keep cores busy that environments and other programs want (before torch is imported)
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    parser = argparse.ArgumentParser(
        prog="amago",
        description="Reinforcement learning for agents that adapt through memory.",
        epilog="'amago COMMAND --help' explains the arguments of a command.",
    )
    parser.add_argument("--version", action="version", version=f"amago {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, summary in COMMANDS.items():
        sub = commands.add_parser(
            name, help=summary, description=summary, formatter_class=argparse.ArgumentDefaultsHelpFormatter
        )
        if argv[:1] == [name]:  # the others stay unimported
            module = importlib.import_module(f"amago.cli.{name}")
            module.add_arguments(sub)
            sub.set_defaults(subcommand=module.run)  # "run" is an argument of eval
    args = parser.parse_args(argv)
    from amago.run.checkpoint import CheckpointError

    try:
        return int(args.subcommand(args) or 0)
    except (CheckpointError, ValueError, TypeError, ImportError) as err:
        if _while_at_work(err):
            raise
        print(f"amago {args.command}: {err}", file=sys.stderr)
        return 2
