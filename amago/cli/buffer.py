"""``amago buffer``: import data into a run's replay buffer, export it, and inspect or verify the buffer."""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import Any

from amago.cli import space_syntax
from amago.cli.buffer_copy import export_, import_
from amago.cli.buffer_look import head, info, verify
from amago.cli_utils import whole_number
from amago.cli_utils.arguments import DefaultsHelpFormatter
from amago.store import StoreError
from amago.store.store import FIFO, PROTECTED

FORMATS = ("auto", "minari", "d4rl", "npz", "original")


def add_arguments(parser: ArgumentParser) -> None:
    parser.description = (
        "Import, export, inspect or verify the replay buffer of a run. RUN is the run's directory, or the buffer directory in it. "
        "Example: amago buffer import halfcheetah_medium.hdf5 runs/demo"
    )
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)

    def add(name: str, summary: str, example: str) -> ArgumentParser:
        return actions.add_parser(
            name, help=summary, description=f"{summary[0].upper()}{summary[1:]}. Example: amago buffer {example}",
            formatter_class=DefaultsHelpFormatter,
        )  # fmt: skip

    _add_import(add)
    sub = add("export", "write the trajectories of a buffer as a new Minari data set", "export runs/demo demo/cartpole-v0")
    sub.add_argument("run", metavar="RUN", type=Path, help="run directory")
    sub.add_argument(
        "dataset",
        metavar="ID",
        help="id of the new data set, NAME-vN or NAMESPACE/NAME-vN; it is written to $MINARI_DATASETS_PATH",
    )
    sub.add_argument("--part", choices=("all", FIFO, PROTECTED), default="all", help="part of the buffer to export")
    sub.add_argument("--limit", type=whole_number, default=None, help="export only this many trajectories, the first ones")
    sub.add_argument("--quiet", action="store_true", help="show no progress bar")
    sub = add("info", "summarise a buffer: files, trajectories, spaces, returns", "info runs/demo")
    sub.add_argument("run", metavar="RUN", type=Path, help="run directory")
    sub = add("verify", "read every file of a buffer and compare it with its checksums; changes nothing", "verify runs/demo")
    sub.add_argument("run", metavar="RUN", type=Path, help="run directory")
    sub.add_argument("--quiet", action="store_true", help="show no progress bar")
    sub = add("head", "print the first trajectories of a buffer", "head runs/demo -n 3 --steps 5")
    sub.add_argument("run", metavar="RUN", type=Path, help="run directory")
    sub.add_argument("-n", "--count", type=whole_number, default=10, help="number of trajectories to print")
    sub.add_argument("--steps", type=whole_number, default=0, help="number of steps to print of each trajectory")


def _add_import(add: Any) -> None:
    sub = add(
        "import",
        "copy recorded data into buffer/protected, which is sampled and never deleted",
        "import D4RL/pointmaze/umaze-v2 runs/demo",
    )
    sub.add_argument(
        "source", metavar="SOURCE",
        help="id or directory of a local Minari data set, a D4RL .hdf5 file, or an .npz file with the arrays observations, actions, "
        "rewards, terminations (rows of transitions) and, if known, truncations, next_observations; or a directory with files of "
        "the original system",
    )  # fmt: skip
    sub.epilog = space_syntax.DETAILS
    sub.add_argument("run", metavar="RUN", type=Path, help="run directory; created if it does not exist")
    sub.add_argument("--format", choices=FORMATS, default="auto", help="format of SOURCE; auto decides by the file name")
    sub.add_argument(
        "--env", default=None, help="id of the Gymnasium environment whose spaces the data has (d4rl, npz, original)"
    )
    sub.add_argument(
        "--action-space", type=space_syntax.space_argument, default=None, metavar="SPACE",
        help=f"{space_syntax.KINDS}, as explained below (d4rl, npz, original); default: that of --env, else box:-1,1 (original: none)",
    )  # fmt: skip
    sub.add_argument(
        "--max-episode-steps",
        type=whole_number,
        default=None,
        help="time limit of episodes in steps (d4rl files without timeouts)",
    )
    sub.add_argument("--obs-keys", nargs="+", default=None, metavar="KEY", help="observations to keep (minari); default: all")
    sub.add_argument(
        "--env-name",
        default=None,
        help="name of the environment in statistics; default: the recorded name, or that of the file",
    )
    sub.add_argument(
        "--allow-pickle", action="store_true",
        help="also read the .traj files of the original system. They are pickles, which could run any code of their author: only for "
        "files that you trust. Whatever is not an array or a trajectory is refused",
    )  # fmt: skip
    sub.add_argument("--limit", type=whole_number, default=None, help="import only this many trajectories, the first ones")
    sub.add_argument(
        "--save-as", choices=("segments", "npz", "npz-compressed"), default="segments", help="format of the files to write"
    )
    sub.add_argument("--replace", action="store_true", help="delete the trajectories of an earlier import of SOURCE")
    sub.add_argument("--quiet", action="store_true", help="show no progress bar")


def run(args: Namespace) -> int:
    actions = {"import": import_, "export": export_, "info": info, "verify": verify, "head": head}
    try:
        return actions[args.action](args)
    except KeyboardInterrupt:
        print(f"amago buffer {args.action}: stopped", file=sys.stderr)
        return 130
    except (StoreError, OSError) as err:
        raise ValueError(str(err)) from err
