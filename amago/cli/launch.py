"""``amago launch SCRIPT``: run a training script with one learner and several collectors."""

from __future__ import annotations

import dataclasses
import functools
from argparse import REMAINDER, ArgumentParser, ArgumentTypeError, Namespace

from amago.distributed.children import Patience
from amago.distributed.launcher import Plan, run_plan
from amago.distributed.mirror import MOST_WAITING_BYTES
from amago.distributed.ray_place import RayPlace
from amago.run.roles.limits import UpdateLimits


def add_arguments(parser: ArgumentParser) -> None:
    parser.description = (
        "Run a training script as one learner and several collectors, which overlap, on this machine or (--ray) on those of a Ray cluster. "
        "The script is as it would be for one process. "
        "Ctrl-C and SIGTERM end all processes, after the learner has saved a training state. Collectors that die or hang are replaced. "
        "Example: amago launch --collectors 4 train.py --run_name demo --buffer_dir runs"
    )
    parser.add_argument(
        "--collectors", type=int, required=True, help="processes that act, each with all of the script's actors"
    )
    parser.add_argument("--learners", type=int, default=1, help="processes that train together")
    parser.add_argument(
        "--updates-per-step",
        type=_limits,
        default=UpdateLimits(),
        metavar="MIN:MAX",
        help="updates per environment step: collectors pause below MIN, the learner waits at MAX; either may be left out",
    )
    parser.add_argument(
        "--hang-timeout",
        type=_seconds,
        default=Patience.step,
        help="seconds without a step after which a collector is replaced, and without an update after which the learner is started again",
    )
    parser.add_argument(
        "--max-policy-lag",
        type=_versions,
        metavar="N",
        help="collectors whose policy is more than N versions older than the newest end their phase, and wait until they have read a newer one",
    )
    parser.add_argument(
        "--max-undelivered",
        type=_gigabytes,
        default=MOST_WAITING_BYTES,
        metavar="GB",
        help=f"collectors pause while so much waits on the disk that cannot be delivered (default: {MOST_WAITING_BYTES / 1e9:g})",
    )
    parser.add_argument(
        "--ray",
        default=None,
        metavar="ADDRESS",
        help="collectors run on all nodes of a Ray cluster, of which this machine is one: auto, or HOST:PORT; needs pip install 'amago[ray]'",
    )
    parser.add_argument(
        "--node-dir",
        default=None,
        metavar="DIR",
        help="with --ray: directory of each node for what is not delivered yet; variables of the environment, {host}, {user} and {tmp} are "
        "replaced there; if not given, {tmp}/amago-{user}",
    )
    parser.add_argument("--quiet", action="store_true", help="no progress line")
    parser.add_argument("-m", dest="module", action="store_true", help="SCRIPT is the name of a module")
    parser.add_argument("script", metavar="SCRIPT", help="the training script")
    parser.add_argument("arguments", nargs=REMAINDER, metavar="ARGS", help="the script's own arguments")


def _limits(text: str) -> UpdateLimits:
    try:
        return UpdateLimits.parse(text)
    except ValueError as err:
        raise ArgumentTypeError(str(err)) from None


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise ArgumentTypeError(f"{text!r} is not a number of seconds above 0")
    return value


def _versions(text: str) -> int:
    if not text.isdecimal():
        raise ArgumentTypeError(f"{text!r} is not a number of versions, 0 or more")
    return int(text)


def _gigabytes(text: str) -> float:
    try:
        value = 1e9 * float(text)
    except ValueError:
        value = 0.0
    if not value > 0:
        raise ArgumentTypeError(f"{text!r} is not a number of gigabytes above 0")
    return value


def run(args: Namespace) -> int:
    program = [*(["-m"] if args.module else []), args.script, *args.arguments]
    patience = dataclasses.replace(Patience(), step=args.hang_timeout)
    if args.node_dir is not None and args.ray is None:
        raise ValueError("--node-dir is of no use without --ray: on one machine everything is in the run's directory")
    plan = Plan(
        program, args.collectors, args.learners, args.updates_per_step, patience, args.quiet, max_policy_lag=args.max_policy_lag,
        max_undelivered=args.max_undelivered,
    )  # fmt: skip
    if args.ray is not None:
        plan.place = functools.partial(RayPlace, address=args.ray, node_dir=args.node_dir)
    return run_plan(plan)
