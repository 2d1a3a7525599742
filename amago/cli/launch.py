"""``amago launch SCRIPT`` and ``amago collect SCRIPT``: a training script with one learner and several collectors, here and elsewhere."""

from __future__ import annotations

import contextlib
from argparse import REMAINDER, ArgumentParser, ArgumentTypeError, Namespace
from pathlib import Path

from amago.launch import collectors_on_ray, node
from amago.launch.launcher import Launcher
from amago.launch.node import MOST_WAITING_BYTES, Task
from amago.launch.processes import STEP_SECONDS
from amago.run.launched.protocol import UpdateLimits


def add_arguments(parser: ArgumentParser) -> None:
    parser.description = (
        "Run a training script as one learner and several collectors, which overlap, on this machine and (--bus) on others. "
        "The script is as it would be for one process. "
        "Ctrl-C and SIGTERM end all processes, after the learner has saved a training state. Collectors that die or hang are replaced. "
        "Example: amago launch --collectors 4 train.py --run_name demo --buffer_dir runs"
    )
    add = parser.add_argument
    collectors = "processes that act, each with all of the script's actors: on this machine, or with --ray on its nodes (default with --bus: 0)"
    add("--collectors", type=int, help=collectors)
    add("--learners", type=int, default=1, help="processes that train together")
    limits = (
        "updates per environment step: collectors pause below MIN, the learner waits at MAX; either may be left out, ':' is no limit "
        "(default: from half to twice the ratio of the script in one process)"
    )
    add("--updates-per-step", type=_limits, metavar="MIN:MAX", help=limits)
    bus = (
        "directory or URL (s3://bucket/run, sftp://host/path) through which collectors on other machines deliver; there, start "
        "amago collect --bus URL --collectors N SCRIPT"
    )
    add("--bus", metavar="URL", help=bus)
    ray = "Ray starts the collectors on the nodes of a cluster: auto, or HOST:PORT; needs --bus, a token, and pip install 'amago[ray]'"
    add("--ray", metavar="ADDRESS", help=ray)
    add_shared_arguments(parser)


def add_shared_arguments(parser: ArgumentParser) -> None:
    """Add the arguments that ``amago launch`` and ``amago collect`` share."""
    add = parser.add_argument
    hang = "seconds without a step after which a collector is replaced, and without an update after which the learner is started again"
    add("--hang-timeout", type=_positive, default=STEP_SECONDS, metavar="SECONDS", help=hang)
    lag = "collectors whose policy is more than N versions older than the newest end their phase, and wait until they have read a newer one"
    add("--max-policy-lag", type=_versions, metavar="N", help=lag)
    most = MOST_WAITING_BYTES / 1e9
    waiting = "collectors pause while so much waits on the disk that cannot be delivered"
    add("--max-undelivered", type=_positive, default=most, metavar="GB", help=waiting)
    add("--quiet", action="store_true", help="no progress line")
    add("-m", dest="module", action="store_true", help="SCRIPT is the name of a module")
    add("script", metavar="SCRIPT", help="the training script")
    add("arguments", nargs=REMAINDER, metavar="ARGS", help="the script's own arguments")


def _task(args: Namespace, collectors: int, least: int = 1) -> Task:
    """The task that the arguments describe, with so many collectors here."""
    for name, value, lowest in (("collectors", args.collectors or 0, least), ("learners", vars(args).get("learners", 1), 1)):
        if value < lowest:
            raise ValueError(f"--{name} must be at least {lowest}, got {value}")
    program = [*(["-m"] if args.module else []), args.script, *args.arguments]
    return Task(program, collectors, args.hang_timeout, args.max_policy_lag, 1e9 * args.max_undelivered)


def _limits(text: str) -> str:
    try:
        UpdateLimits.parse(text)
        return text
    except ValueError as err:
        raise ArgumentTypeError(str(err)) from None


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise ArgumentTypeError(f"{text!r} is not a number above 0")
    return value


def _versions(text: str) -> int:
    if not text.isdecimal():
        raise ArgumentTypeError(f"{text!r} is not a number of versions, 0 or more")
    return int(text)


def run(args: Namespace) -> int:
    if args.ray is not None and args.bus is None:
        raise ValueError(
            "--ray starts collectors on other machines, whose files go by a bus: give --bus URL, such as a shared directory"
        )
    if args.collectors is None and args.bus is None:
        raise ValueError("give --collectors N, or --bus URL for collectors on other machines")
    wanted = args.collectors or 0
    task = _task(args, 0 if args.ray else wanted, least=0 if args.bus else 1)
    launcher = Launcher(task, args.learners, args.updates_per_step, args.bus, args.quiet)
    words = [f"--bus={args.bus}", f"--hang-timeout={args.hang_timeout}", f"--max-undelivered={args.max_undelivered}"]
    words += [] if args.max_policy_lag is None else [f"--max-policy-lag={args.max_policy_lag}"]
    with collectors_on_ray(args.ray, [*words, *task.program], wanted) if args.ray else contextlib.nullcontext():
        return launcher.run()


def add_collect_arguments(parser: ArgumentParser) -> None:
    parser.description = (
        "Run collectors for `amago launch --bus URL SCRIPT`, on any machine that reaches the bus, started by any scheduler at any time, "
        "before the launch too. They end with it, and with Ctrl-C and SIGTERM; what they have collected is delivered first, or the next time. "
        "Example: amago collect --bus s3://bucket/run --collectors 16 train.py"
    )
    parser.add_argument("--bus", metavar="URL", required=True, help="directory or URL of the launch")
    parser.add_argument("--collectors", type=int, required=True, help="processes that act, on this machine")
    node = (
        "directory of your own for what is not delivered yet, best on the machine's own disk (default: ~/.cache/amago/collect)"
    )
    parser.add_argument("--node-dir", type=Path, metavar="DIR", help=node)
    add_shared_arguments(parser)


def collect(args: Namespace) -> int:
    home = args.node_dir or Path.home() / ".cache" / "amago" / "collect"
    return node.collect(_task(args, args.collectors), args.bus, home.absolute())
