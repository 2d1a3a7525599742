"""The ``amago`` command: one module a subcommand, imported only when it runs."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

from amago import __version__

COMMANDS = {
    "train": "train an agent on a Gymnasium environment",
    "eval": "evaluate a trained agent",
    "demo": "train a small memory agent in a few minutes and draw how it adapts",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    argv = list(sys.argv[1:] if argv is None else argv)
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
    from amago.checkpoint import CheckpointError

    try:
        return int(args.subcommand(args) or 0)
    except (CheckpointError, ValueError, TypeError, ImportError) as err:
        print(f"amago {args.command}: {err}", file=sys.stderr)
        return 2
