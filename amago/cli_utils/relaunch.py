"""``--collectors``: a script runs itself again, through the launcher."""

from __future__ import annotations

import os
import sys
from argparse import Namespace
from pathlib import Path

from amago.distributed.api import command
from amago.run.roles.protocol import VARIABLE


def relaunch_if_asked(args: Namespace) -> None:
    """Replace this process by a launcher that runs the same command line with several processes, if ``--collectors`` asks for it.

    In the processes that the launcher starts, and without ``--collectors``, this does nothing.

    Raises:
        ValueError: the arguments contradict ``--collectors``, or this process was not started by a command line that has it.
    """
    if os.environ.get(VARIABLE):
        return
    if not getattr(args, "collectors", 0):
        if getattr(args, "ray", None) is not None:
            raise ValueError(f"--ray {args.ray} says where collectors run, but there are none: give --collectors N")
        return
    if args.mode != "both":
        raise ValueError(
            f"--collectors starts a learner and collectors, and --mode {args.mode} is one of them: give one of the two"
        )
    if args.trials != 1:
        raise ValueError(f"--collectors launches one run, and --trials {args.trials} asks for several: give one of the two")
    if not any(word.split("=")[0] == "--collectors" for word in sys.argv[1:]):
        raise ValueError(
            "collectors is set, but not on the command line: call amago.distributed.launch(script, argv, collectors=...)"
        )
    words = command(
        *_program(),
        args.collectors,
        args.learners,
        args.updates_per_step,
        quiet=args.quiet,
        max_policy_lag=args.max_policy_lag,
        max_undelivered=args.max_undelivered,
        ray=args.ray,
        node_dir=args.node_dir,
    )
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(words[0], words)


def _program() -> tuple[str, list[str]]:
    """The program of this process, and its arguments."""
    main = sys.modules["__main__"]
    spec, file = getattr(main, "__spec__", None), getattr(main, "__file__", None)
    if spec is not None and spec.name:
        return "-m", [spec.name.removesuffix(".__main__"), *sys.argv[1:]]
    if file is None or not Path(file).is_file():
        raise ValueError("--collectors needs a script in a file, which each process can run")
    if (
        Path(file).name == "amago" and Path(file).parent == Path(sys.executable).parent
    ):  # the command, which other machines have elsewhere
        return "-m", ["amago.cli", *sys.argv[1:]]
    return file, sys.argv[1:]
