"""Runs on disk: find them, read them, and group those that differ in the seed alone."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from amago.run.natural import natural
from amago.run.report.follow import METRICS_FILE, Follower
from amago.run.report.log import LIMIT, Log

_LAST_NUMBER = re.compile(r"[_\-]?(?:seed|trial|run)?[_\-]?\d+$", re.IGNORECASE)
NOT_SETTINGS = frozenset(
    {
        "run_name",
        "seed",
        "ckpt_base_dir",
        "dset_root",
        "dset_name",
        "resume",
        "overwrite",
        "share_buffer",
        "verbose",
        "progress",
        "log_to_tensorboard",
        "log_to_wandb",
        "wandb_project",
        "wandb_entity",
        "wandb_group_name",
    }
)
"""Settings in which two runs of one group may differ: where files are, what is shown, and what is random."""
SPECTATORS = frozenset({"amago.policy.filming.RecordVideo"})
"""Callbacks that change nothing in a run."""
_PARTS = frozenset({"ckpts", "buffer", "tensorboard", "wandb"})
NO_SETTINGS = "no settings.json, which runs of earlier versions lack"


@dataclass(frozen=True)
class Run:
    """What a run has written.

    Attributes:
        path: its directory.
        log: its metrics.
        settings: fields of the experiment and gin parameters by name, those in objects as "object.name"; None if the run has no
            ``settings.json``.
        starts: a description of each start of the run: time, machine, versions, command; oldest first.
        problems: what could not be read.
        changed: time of the last change of its metrics (seconds since 1970).
        label: its name on the page, if that is not its directory's.
    """

    path: Path
    log: Log
    settings: dict[str, Any] | None = None
    starts: Sequence[dict[str, Any]] = ()
    problems: Sequence[str] = ()
    changed: float = 0.0
    label: str = ""

    @property
    def name(self) -> str:
        """The directory's name, or the label."""
        return self.label or self.path.name

    @property
    def seed(self) -> Any:
        """The seed, None if it is unknown or was not set."""
        return (self.settings or {}).get("seed")


@dataclass(frozen=True)
class Group:
    """Runs with the same settings, which differ in the seed.

    Attributes:
        name: for legends, unique on the page.
        runs: at least one.
    """

    name: str
    runs: Sequence[Run] = field(default_factory=list)


def walk(root: Path) -> Iterator[Path]:
    """The directories of runs at and below a directory, "r9" before "r10"; links are not followed. What a run itself has
    written (checkpoints, buffer) is not searched, nor what cannot be read."""
    for path, directories, files in os.walk(root):
        is_run = METRICS_FILE in files
        if is_run or "config.txt" in files or "settings.json" in files:
            directories[:] = [d for d in directories if d not in _PARTS]
        directories.sort(key=natural)
        if is_run:
            yield Path(path)


def find_runs(paths: Iterable[str | Path]) -> list[Path]:
    """The directories of runs at some directories, or below those that are no runs, sorted; links are not followed.

    Raises:
        FileNotFoundError: a directory does not exist, or has no run in it.
    """
    found: dict[Path, None] = {}
    for path in map(Path, paths):
        if not path.is_dir():
            raise FileNotFoundError(f"{str(path)!r} is not a directory; give the directory of a run, or one with runs in it")
        own = [path] if (path / METRICS_FILE).is_file() else list(walk(path))
        if not own:
            raise FileNotFoundError(f"no {METRICS_FILE} at or below {str(path)!r}: is that the directory of a run?")
        found |= dict.fromkeys(own)
    return list(found)


def read_run(path: Path, limit: int = LIMIT) -> Run:
    """Read a run. What is damaged or missing is named in `Run.problems`.

    Args:
        limit: most points of a curve; beyond, neighbours are merged.

    Raises:
        FileNotFoundError: there is no ``metrics.jsonl``.
    """
    follower = Follower(path / METRICS_FILE, sample=False, limit=limit)
    follower.refresh()
    follower.finish()
    return with_settings(path, follower)


def with_settings(path: Path, follower: Follower) -> Run:
    """A run whose metrics have been read."""
    settings, starts, problems = read_settings(path)
    return Run(path, follower.log, settings, starts, [*follower.problems, *problems], follower.changed)


def read_settings(path: Path) -> tuple[dict[str, Any] | None, Sequence[dict[str, Any]], list[str]]:
    """Settings, starts and problems of a run, as in `Run`, from its ``settings.json``."""
    try:
        record = json.loads((path / "settings.json").read_text())
        if "fields" not in record:  # a run that has not been started yet, or not by a process that learns
            return None, tuple(record["starts"]), []
        unused = set(record.get("unused", ()))
        parameters = {k: v for k, v in record["parameters"].items() if k not in unused}
        return flattened({**record["fields"], **parameters}), tuple(map(dict, record["starts"])), []
    except FileNotFoundError:
        return None, (), []
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as err:
        return None, (), [f"{path / 'settings.json'} cannot be read: {err!r:.200}"]


def flattened(values: Mapping[str, Any]) -> dict[str, Any]:
    """Objects as "name.attribute", in one level."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            found |= {f"{name}.{k}": v for k, v in flattened(value).items()}
        else:
            found[name] = value
    return found


def base_name(name: str) -> str:
    """The name of a run without the number of its seed: "lake_seed0", "lake_trial_3" and "lake-7" -> "lake"."""
    return "/".join(_LAST_NUMBER.sub("", part) or part for part in name.split("/"))


def labelled(runs: Sequence[Run]) -> list[Run]:
    """The runs, with as much of their path in front of their names as makes them unique."""
    parts = [1] * len(runs)
    while True:
        labels = ["/".join(run.path.absolute().parts[-n:]) for run, n in zip(runs, parts)]
        clashes = [
            i for i, label in enumerate(labels) if labels.count(label) > 1 and parts[i] < len(runs[i].path.absolute().parts)
        ]
        if not clashes:
            return [replace(run, label=label) for run, label in zip(runs, labels)]
        for i in clashes:
            parts[i] += 1


def compared_settings(run: Run) -> dict[str, Any] | None:
    """The settings that make runs alike, `NOT_SETTINGS` left out, also of objects."""
    if run.settings is None:
        return None
    kept = {k: v for k, v in run.settings.items() if not _means_nothing(k)}
    callbacks = kept.get("callbacks")
    if isinstance(callbacks, list):
        kept["callbacks"] = [c for c in callbacks if not (isinstance(c, dict) and c.get("type") in SPECTATORS)]
    return kept


def group_runs(runs: Sequence[Run]) -> list[Group]:
    """Group runs of equal settings; those without ``settings.json`` by `base_name` and ``config.txt``.

    A group is named after its runs, and where several would have one name, after the settings in which they differ.
    """
    groups: dict[str, list[Run]] = {}
    for run in runs:
        settings = compared_settings(run)
        if settings is None:
            key = f"{base_name(run.name)}\n{_text(run.path / 'config.txt')}"
        else:
            key = json.dumps(settings, sort_keys=True)
        groups.setdefault(key, []).append(run)
    members = list(groups.values())
    bases = [m[0].name if len(m) == 1 else base_name(m[0].name) for m in members]
    named: dict[str, Group] = {}
    for base, own in zip(bases, members):
        alike = [m for b, m in zip(bases, members) if b == base]
        name = base if len(alike) == 1 else f"{base}{_distinction(own, alike)}"
        number = 1
        while name in named:
            number += 1
            name = f"{base} ({number})"
        named[name] = Group(name, own)
    return list(named.values())


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def _distinction(own: Sequence[Run], alike: Sequence[Sequence[Run]]) -> str:
    """Up to three settings in which a group differs from others, as ", gamma=0.9"; else the directory of its first run."""
    differ = differences([members[0] for members in alike])
    mine = (own[0].settings or {}).items()
    shown = [f"{k.rpartition('.')[2]}={v}" for k, v in mine if k in differ and not _means_nothing(k) and len(str(v)) < 30]
    return "".join(f", {s}" for s in shown[:3]) or f" in {own[0].path.parent.name}"


def _means_nothing(name: str) -> bool:
    return name.rpartition(".")[2] in NOT_SETTINGS


def differences(runs: Sequence[Run]) -> dict[str, list[Any]]:
    """The settings in which runs differ, seed and names included: {name: a value for each run, or None where it has none}."""
    known = [run.settings or {} for run in runs]
    names = dict.fromkeys(name for settings in known for name in settings)
    by_name = {name: [settings.get(name) for settings in known] for name in names}
    return {k: v for k, v in by_name.items() if any(x != v[0] for x in v)}
