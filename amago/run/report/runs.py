"""Runs on disk: find them, read them, and group those that differ in the seed alone."""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from amago.run.plots import read_metrics

_LAST_NUMBER = re.compile(r"[_\-]?(?:seed|trial|run)?[_\-]?\d+$", re.IGNORECASE)
NOT_SETTINGS = frozenset(
    {
        "run_name",
        "seed",
        "ckpt_base_dir",
        "dset_root",
        "dset_name",
        "resume",
        "verbose",
        "wandb_group_name",
        "dataset",
        "overwrite",
        "share_buffer",
    }
)
"""Fields of an experiment in which two runs of one group may differ: where files are, and what is random."""


@dataclass(frozen=True)
class Run:
    """What a run has written.

    Attributes:
        path: its directory.
        rows: of ``metrics.jsonl``, see `amago.run.plots.read_metrics`.
        settings: fields of the experiment and gin parameters by name; None if the run has no ``settings.json``.
        starts: a description of each start of the run: time, machine, versions, command; oldest first.
        problems: what could not be read.
    """

    path: Path
    rows: Sequence[dict[str, Any]]
    settings: dict[str, Any] | None = None
    starts: Sequence[dict[str, Any]] = ()
    problems: Sequence[str] = ()

    @property
    def name(self) -> str:
        """The directory's name."""
        return self.path.name

    def sections(self) -> set[str]:
        """Sections of the log that have rows."""
        return {row["section"] for row in self.rows}


@dataclass(frozen=True)
class Group:
    """Runs with the same settings, which differ in the seed.

    Attributes:
        name: for legends, unique on the page.
        runs: at least one.
    """

    name: str
    runs: Sequence[Run] = field(default_factory=list)


def find_runs(paths: Iterable[str | Path]) -> list[Path]:
    """The directories of runs at and below some directories, sorted; links are not followed.

    Raises:
        FileNotFoundError: a directory does not exist, or has no run in it.
    """
    found: dict[Path, None] = {}
    for path in map(Path, paths):
        if not path.is_dir():
            raise FileNotFoundError(f"{str(path)!r} is not a directory; give the directory of a run, or one with runs in it")
        own = [path] if (path / "metrics.jsonl").is_file() else sorted(p.parent for p in path.rglob("metrics.jsonl"))
        if not own:
            raise FileNotFoundError(f"no metrics.jsonl at or below {str(path)!r}: is that the directory of a run?")
        found |= dict.fromkeys(own)
    return list(found)


def read_run(path: Path) -> Run:
    """Read a run. What is damaged or missing is named in `Run.problems`.

    Raises:
        FileNotFoundError, ValueError: see `amago.run.plots.read_metrics`.
    """
    problems = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        rows = read_metrics(path)
    problems += [str(w.message) for w in caught]
    settings, starts = None, ()
    try:
        record = json.loads((path / "settings.json").read_text())
        settings, starts = {**record["fields"], **record["parameters"]}, tuple(record["starts"])
    except FileNotFoundError:
        problems.append(f"{path.name} has no settings.json, so its settings are unknown")
    except (OSError, ValueError, KeyError, TypeError) as err:
        problems.append(f"{path / 'settings.json'} cannot be read: {err!r:.200}")
    return Run(path, rows, settings, starts, problems)


def base_name(name: str) -> str:
    """The name of a run without the number of its seed: "lake_seed0", "lake_trial_3" and "lake-7" -> "lake"."""
    return _LAST_NUMBER.sub("", name) or name


def compared_settings(run: Run) -> dict[str, Any] | None:
    """The settings that make runs alike, `NOT_SETTINGS` left out."""
    return None if run.settings is None else {k: v for k, v in run.settings.items() if k not in NOT_SETTINGS}


def group_runs(runs: Sequence[Run]) -> list[Group]:
    """Group runs of equal settings; those without ``settings.json`` by `base_name` and ``config.txt``."""
    groups: dict[str, list[Run]] = {}
    for run in runs:
        settings = compared_settings(run)
        if settings is None:
            config = run.path / "config.txt"
            key = base_name(run.name) + (config.read_text(errors="replace") if config.is_file() else "")
        else:
            key = json.dumps(settings, sort_keys=True)
        groups.setdefault(key, []).append(run)
    named: list[Group] = []
    taken: dict[str, int] = {}
    for members in groups.values():
        name = members[0].name if len(members) == 1 else base_name(members[0].name)
        taken[name] = taken.get(name, 0) + 1
        named.append(Group(name if taken[name] == 1 else f"{name} ({taken[name]})", members))
    return named


def differences(runs: Sequence[Run]) -> dict[str, list[Any]]:
    """The settings in which runs differ, seed and names included: {name: a value for each run, or None where it has none}."""
    known = [run.settings or {} for run in runs]
    names = sorted({name for settings in known for name in settings})
    by_name = {name: [settings.get(name) for settings in known] for name in names}
    return {k: v for k, v in by_name.items() if any(x != v[0] for x in v)}
