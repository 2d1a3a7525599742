"""The ``amago`` command. Each subcommand is a module, imported only when it runs, with ``add_arguments`` and ``run``."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence

from amago import __version__

COMMANDS = {
    "train": "train an agent on a Gymnasium environment",
    "resume": "continue a run from its directory",
    "rerun": "train again with the settings and the seed of a run, from its directory alone",
    "launch": "run a training script as one learner and several collectors",
    "collect": "run collectors on another machine, for a launch with --bus",
    "eval": "evaluate a trained agent",
    "card": "write a directory with a trained agent, its scores and a page about it, to be handed on",
    "push": "upload a card to the Hugging Face Hub",
    "pull": "download a card from the Hugging Face Hub",
    "tune": "search for good settings: a study of many runs",
    "report": "write a page about training runs: curves, adaptation, faults, settings",
    "watch": "serve a live page about all runs below a directory",
    "buffer": "import, export, inspect or verify recorded trajectories",
    "list": "list the built-in environments, the settings that come with the library, or its extras",
    "doctor": "examine this machine and installation, a run, or in which settings two runs differ",
    "demo": "train a small memory agent in a few minutes and draw how it adapts",
}

_PLACES = {
    "resume": ("train", "add_run_arguments", "resume"),
    "rerun": ("train", "add_run_arguments", "rerun"),
    "collect": ("launch", "add_collect_arguments", "collect"),
    "push": ("card", "add_push_arguments", "push"),
    "pull": ("card", "add_pull_arguments", "pull"),
    "watch": ("report", "add_watch_arguments", "watch"),
    "list": ("lists", "add_arguments", "run"),
}
"""(module, function that adds the arguments, function that runs) of the commands that have no module of their own name."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line, ``sys.argv[1:]`` unless other words are given, and return its exit code.

    0; 2 after a mistake in the arguments; 1 if the environment cannot be used, if there was nothing to train on, or if the Hub cannot be
    reached. Of these, the message is printed without a traceback.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    if os.getcwd() not in sys.path:  # for modules of the user, which the command, unlike "python -m", would not find
        sys.path.append(os.getcwd())
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
            module_name, add_arguments, run = _PLACES.get(name, (name, "add_arguments", "run"))
            functions = vars(importlib.import_module(f"amago.cli.{module_name}"))
            functions[add_arguments](sub)
            sub.formatter_class = _help_formatter  # not before: add_argument() makes one
            sub.set_defaults(subcommand=functions[run], words=argv[1:])  # "run" is an argument of eval
            command = sub
    args, words = parser.parse_known_args(argv)
    try:
        if words and "configs" not in vars(args):
            command.error(f"unrecognized arguments: {' '.join(words)}")
        if words or "sweep" in vars(args):
            from amago.cli_utils.settings import take_settings

            take_settings(command, args, words)
            if args.command == "train" and (args.sweep or args.seeds > 1):
                args.subcommand = importlib.import_module("amago.cli.tune").sweep
        done = int(args.subcommand(args) or 0)
        sys.stdout.flush()
        return done
    except BrokenPipeError:
        try:
            print(flush=True)
        except BrokenPipeError:  # its reader has closed it, as in ``amago list envs | head -1``
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # drops what is still to be written
            return 1
        raise  # another pipe is broken
    except Exception as err:
        code = _exit_code(err)
        if code is None:
            raise
        print(f"amago {args.command}: {err}", file=sys.stderr)
        return code


# Imported here, after an error: these modules import torch, which commands without training do not need.


def _help_formatter(prog: str) -> argparse.HelpFormatter:
    from amago.cli_utils.arguments import DefaultsHelpFormatter

    return DefaultsHelpFormatter(prog)


def _exit_code(err: BaseException) -> int | None:
    """The exit code after an error whose message suffices; None if the traceback is needed."""
    from amago.cli_utils.scripts import raised_while_running
    from amago.envs.pool import ActorError
    from amago.policy.card import HubError
    from amago.run.checkpoint import CheckpointError
    from amago.run.data import NothingTrainedError

    if isinstance(err, ActorError | HubError | MemoryError | NothingTrainedError):
        return 1
    told = isinstance(err, CheckpointError | ValueError | TypeError | ImportError) and not raised_while_running(err)
    return 2 if told else None
