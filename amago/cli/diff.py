"""``amago diff RUN RUN``: the settings in which two runs differ."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import Any

from amago.run.checkpoint import CheckpointError
from amago.run.describe import flattened, shown
from amago.run.record import SETTINGS_FILE, read_record

_OF_EVERY_RUN = ("run_name", "ckpt_base_dir", "resume", "overwrite")  # differ without meaning


def add_arguments(parser: ArgumentParser) -> None:
    parser.description = (
        "Print the settings in which two runs differ, 'name: value -> value': fields of Experiment, parameters, versions of packages, the "
        "git commit of the script, and the machine, as recorded in settings.json. Nothing is printed if there are none. Exit code: 0 no "
        "difference, 1 differences, 2 no record to compare."
    )
    for name in ("first", "second"):
        parser.add_argument(name, type=Path, metavar="RUN", help="directory of a run")


def run(args: Namespace) -> int:
    before, now = _comparable(args.first), _comparable(args.second)
    names = [*before, *(k for k in now if k not in before)]
    differing = [k for k in names if k not in before or k not in now or before[k] != now[k]]
    for name in differing:
        a, b = (shown(side[name]) if name in side else "(none)" for side in (before, now))
        print(f"{name}: {a} -> {b}")
    return 1 if differing else 0


def _comparable(run_dir: Path) -> dict[str, Any]:
    """The settings of a run by name, without its own name and place."""
    record = read_record(run_dir.expanduser())
    if record is None or not record["starts"]:
        raise CheckpointError(
            f"{run_dir} has no record of its settings ({SETTINGS_FILE}): it is no run, or was made by an earlier version"
        )
    fields = {k: v for k, v in record["fields"].items() if k not in _OF_EVERY_RUN}
    found: dict[str, Any] = {"experiment": record["experiment"]}
    for name, value in fields.items():
        found |= flattened(value, name)
    for name in ("dset_root", "dataset.dset_root"):
        if found.get(name) == record["fields"]["ckpt_base_dir"]:
            found[name] = "(ckpt_base_dir)"
    for name in ("dset_name", "dataset.dset_name"):
        if found.get(name) == record["fields"]["run_name"]:
            found[name] = "(run_name)"
    found |= {k: v for k, v in record["parameters"].items() if k not in record["unused"]}
    start = record["starts"][-1]
    for part in ("versions", "git", "machine"):
        found |= flattened(start[part], part)
    found.pop("machine.host", None)
    return found
