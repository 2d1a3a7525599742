"""The ``amago`` command. Each subcommand is a module, imported only when it runs, with ``add_arguments`` and ``run``."""

from __future__ import annotations

import argparse
import importlib
import os
import select
import sys
from collections.abc import Sequence
from typing import TextIO

from amago import __version__

COMMANDS = {
    "train": "train an agent on a Gymnasium environment",
    "launch": "run a training script as one learner and several collectors",
    "eval": "evaluate a trained agent",
    "card": "write a directory with a trained agent, its scores and a page about it, to be handed on",
    "push": "upload a card to the Hugging Face Hub",
    "pull": "download a card from the Hugging Face Hub",
    "tune": "search for good settings: a study of many runs",
    "report": "write a page about training runs: curves, adaptation, faults, settings",
    "watch": "serve a live page about all runs below a directory",
    "buffer": "import, export, inspect or verify recorded trajectories",
    "diff": "show in which settings two runs differ",
    "envs": "list the built-in environments: spaces, packages, examples, settings",
    "zoo": "list the settings that come with the library, and what they reached",
    "doctor": "look at this machine and installation, and say what is missing for what",
    "demo": "train a small memory agent in a few minutes and draw how it adapts",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        argv: the words after ``amago``; None: ``sys.argv[1:]``.

    Returns:
        the exit code: 0; 2 after a mistake in the arguments; 1 if the environment cannot be used, if there was nothing to train on, or if
        the Hub cannot be reached.
        Of these, the message is printed without a traceback.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    # OpenMP threads that spin while they wait take cores from the environments; it must be set before torch is imported
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    parser = argparse.ArgumentParser(
        prog="amago",
        description="Reinforcement learning for agents that adapt through memory.",
        epilog="'amago COMMAND --help' explains the arguments of a command.",
    )
    parser.add_argument("--version", action="version", version=f"amago {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, summary in COMMANDS.items():
        sub = commands.add_parser(name, help=summary, description=summary)
        if argv[:1] == [name]:
            module = importlib.import_module(f"amago.cli.{name}")
            module.add_arguments(sub)
            sub.formatter_class = _help_formatter  # not before: add_argument() makes one
            sub.set_defaults(subcommand=module.run)  # "run" is an argument of eval
    args = parser.parse_args(argv)
    try:
        done = int(args.subcommand(args) or 0)
        sys.stdout.flush()
        return done
    except BrokenPipeError:
        if not _reader_has_gone():
            raise
        return 1
    except Exception as err:
        code = _exit_code(err)
        if code is None:
            raise
        print(f"amago {args.command}: {err}", file=sys.stderr)
        return code


def _reader_has_gone() -> bool:
    """Whether nobody reads the standard output any more, as with ``amago envs | head -1``; what is still buffered is dropped then."""
    try:
        sys.stdout.flush()
        gone = _is_broken(sys.stdout)  # print() drops what it could not write, and may have left nothing to flush
    except BrokenPipeError:
        gone = True
    if gone:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return gone


def _is_broken(output: TextIO) -> bool:
    """Whether an output is a pipe that nobody reads any more."""
    try:
        poll = select.poll()
        poll.register(output.fileno(), 0)
        return any(event & select.POLLERR for _, event in poll.poll(0))
    except (OSError, ValueError):  # no file of the system
        return False


# What these import imports torch, which commands that train nothing do without; and they are needed when something is wrong alone.


def _help_formatter(prog: str) -> argparse.HelpFormatter:
    from amago.cli_utils.arguments import DefaultsHelpFormatter

    return DefaultsHelpFormatter(prog)


def _exit_code(err: BaseException) -> int | None:
    """The exit code after an error that is told in one line; None if it needs its traceback."""
    from amago.cli_utils.errors import raised_while_running
    from amago.envs.pool import ActorError
    from amago.policy.card import HubError
    from amago.run.checkpoint import CheckpointError
    from amago.run.waiting import NoReadableDataError, NothingTrainedError

    if isinstance(err, ActorError | HubError | MemoryError | NoReadableDataError | NothingTrainedError):
        return 1
    told = isinstance(err, CheckpointError | ValueError | TypeError | ImportError) and not raised_while_running(err)
    return 2 if told else None
