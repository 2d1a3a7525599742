"""Runs on disk: their logs without rows that a killed run has abandoned, their settings, their state, and groups that differ in the
seed alone."""

from __future__ import annotations

import json
import math
import os
import re
import socket
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import psutil
from numpy.typing import NDArray

from amago.describe import flatten, format_duration, format_value, natural_sort_key
from amago.run.metric_names import AVERAGE_RETURN, RETURN_OF

Array = NDArray[np.float64]
Position = tuple[float, ...]
METRICS_FILE = "metrics.jsonl"
POSITION = ("epoch", "env_steps", "grad_steps", "wall_time")
"""The position of a row in its run."""
LIMIT = 400
"""Most points of a curve. Beyond, neighbours are merged into their mean."""
FAULTS = {
    "Skipped Updates": "skipped updates", "Restarted Environments": "restarted environments", "Dropped Rollouts": "dropped rollouts",
    "quarantined": "damaged files",
}  # fmt: skip
_COUNTED = ("Skipped Updates", "quarantined")  # from the start of the run on; the others for each phase by itself
PHASES = {"rollout": "collection", "train": "training", "val": "evaluation", "test": "evaluation"}
NOT_SETTINGS = frozenset({
    "run_name", "seed", "ckpt_base_dir", "dset_root", "dset_name", "resume", "overwrite", "share_buffer", "verbose", "progress",
    "log_to", "log_to_tensorboard", "log_to_wandb", "wandb_project", "wandb_entity", "wandb_group_name",
})  # fmt: skip
"""Settings in which two runs of one group may differ: places of files, output, and seeds."""
LOCK_FILE = ".lock"
PATIENCE = 120.0
"""Seconds without a row after which a run of unknown process no longer counts as running, if its rows come faster than that."""
_CLOCK = 60.0  # clocks may have been set since
_SPECTATOR = "amago.policy.filming.RecordVideo"  # a callback that changes nothing in a run
_PARTS = frozenset({"ckpts", "buffer", "tensorboard", "wandb", "launch"})  # the learner logs what launched collectors report
_LAST_NUMBER = re.compile(r"(?:[_\-]?(?:seed|trial|run))?[_\-]?\d+$", re.IGNORECASE)


class Log:
    """A ``metrics.jsonl``.

    A run that was killed goes on from its last training state, so that positions go back; the rows after that state then belong to
    nothing that still exists, and are dropped.

    Attributes:
        kept: (position, section, values) of the rows, dropped ones left out.
        rows: rows read, dropped ones included.
        faults: {name of `FAULTS`: how often}.
        seconds: {"collection", "training", "evaluation": seconds spent}. The log has a row at the end of each phase; the time
            between a stop and a resume is not in it.
        went_back: how often a run that was killed has gone on from an earlier state.
        several: processes that count on their own write this log (a learner and collectors), so that times do not add up.
        not_finite: values that were infinite or NaN.
    """

    def __init__(self, rows: Iterable[Any] = ()) -> None:
        self.kept: list[tuple[Position, str, Mapping[str, Any]]] = []
        self.rows = self.went_back = self.not_finite = 0
        self.faults: dict[str, float] = {}
        self.seconds: dict[str, float] = {}
        self.several = False
        self._last: Position = (0, 0, 0, 0.0)
        for row in rows:
            self.add(row)

    def add(self, row: Any) -> None:
        """Add a row; ValueError if it is no row of a log."""
        try:
            position: Position = tuple(row[name] + 0 for name in POSITION)
            section, values = row["section"] + "", row["values"]
            math.fsum(v for v in values.values() if v is not None)
        except (KeyError, TypeError, AttributeError) as err:
            raise ValueError(f"no row of a log: {err}") from err
        self.rows += 1
        self.not_finite += sum(v is None for v in values.values())
        before, self._last = self._last, position
        if position[2] < before[2]:
            joined = position[2] == 0 and before[1] == 0  # a collector beside a learner, which counts no steps
            if position[1] > before[1] or position[3] > before[3] or joined:
                self.several = True
            else:  # the run goes on from an earlier state: drop the rows after it
                self.went_back += 1
                self.kept = [own for own in self.kept if any(a < b for a, b in zip(own[0][:3], position))]
        self.kept.append((position, section, values))
        if section in PHASES:
            phase = PHASES[section]
            self.seconds[phase] = self.seconds.get(phase, 0.0) + max(0.0, position[3] - before[3])
        for name in FAULTS:
            value = values.get(name)
            if name not in _COUNTED:
                self.faults[name] = self.faults.get(name, 0.0) + (value or 0.0)
            elif value is not None:
                self.faults[name] = math.ceil(value - 1e-6)  # a row may hold the mean over its updates

    @cached_property
    def highest(self) -> Position:
        """The highest of each `POSITION`."""
        return tuple(max(column) for column in zip((0, 0, 0, 0.0), *(row[0] for row in self.kept)))

    def column(self, section: str, axis: str, name: str) -> tuple[Array, Array]:
        """The values of a metric, and where they stand on an axis of `POSITION`, in its order; both (n,), empty without values."""
        i = POSITION.index(axis)
        found = [(p[i], v[name]) for p, own, v in self.kept if own == section and v.get(name) is not None]
        both = np.array(found, np.float64).reshape(len(found), 2)
        both = both[np.argsort(both[:, 0], kind="stable")]
        width = -(-len(both) // LIMIT)
        if width > 1:
            starts = np.arange(0, len(both), width)
            both = np.add.reduceat(both, starts) / np.diff(starts, append=len(both))[:, None]
        return both[:, 0], both[:, 1]

    @cached_property
    def names(self) -> dict[str, list[str]]:
        """The metrics of each section, in the order in which they were first written."""
        found: dict[str, dict[str, None]] = {}
        for _, section, values in self.kept:
            found.setdefault(section, {}).update(dict.fromkeys(values))
        return {section: list(names) for section, names in found.items()}

    def last_return(self) -> tuple[float, str] | None:
        """The newest mean return of tests, validation or collection, in this order, and which of them it is."""
        for section in ("test", "val", "rollout"):
            _, values = self.column(section, "epoch", AVERAGE_RETURN)
            if len(values):
                return float(values[-1]), section
        return None


@dataclass(eq=False)
class Run:
    """The files of a run, as read for a page.

    Attributes:
        path: its directory.
        log: its metrics.
        settings: fields of the experiment and gin parameters by name, those in objects as "object.name"; None if the run has no
            ``settings.json`` of a process that learns.
        starts: a description of each start of the run: time, machine, versions, command; oldest first.
        problems: descriptions of the files that could not be read.
        changed: time of the last change of its metrics (seconds since 1970).
        name: on the page.
    """

    path: Path
    log: Log
    settings: dict[str, Any] | None = None
    starts: Sequence[dict[str, Any]] = ()
    problems: Sequence[str] = ()
    changed: float = 0.0

    def __post_init__(self) -> None:
        self.name = self.path.name

    @cached_property
    def environments(self) -> frozenset[str]:
        """The names of its environments, as far as a rollout has ended."""
        return frozenset(n for names in self.log.names.values() for n in names if n.startswith(RETURN_OF))

    @cached_property
    def compared(self) -> dict[str, Any]:
        """All that makes runs alike: settings but for `NOT_SETTINGS`, and the code: its commit, and the library's version."""
        known = {"path": str(self.path)} if self.settings is None else self.settings
        kept = {k: v for k, v in known.items() if k.rpartition(".")[2] not in NOT_SETTINGS}
        start = flatten(self.starts[-1]) if self.starts else {}
        code = {"commit": "git.commit", "changed files": "git.changed", "amago": "versions.amago"}
        return kept | {name: start[key] for name, key in code.items() if start.get(key) is not None}


class Group(NamedTuple):
    """Runs with the same settings, environments and code, which differ in the seed; ``name`` is unique on the page."""

    name: str
    runs: Sequence[Run]

    @property
    def seeds(self) -> list[Run]:
        """One run for each seed, the newest: a seed that was run twice is no second sample."""
        found: dict[object, Run] = {}
        for run in sorted(self.runs, key=lambda run: run.changed):
            seed = (run.settings or {}).get("seed")
            found[run.path if seed is None else repr(seed)] = run
        return [run for run in self.runs if run in found.values()]


def walk(root: Path) -> Iterator[Path]:
    """The directories of runs at and below a directory, "r9" before "r10"; links are not followed. A run's own directories
    (checkpoints, buffer) are not searched, nor unreadable ones."""
    for path, directories, files in os.walk(root):
        if METRICS_FILE in files or "settings.json" in files:
            directories[:] = [d for d in directories if d not in _PARTS]
        directories.sort(key=natural_sort_key)
        if METRICS_FILE in files and os.path.isfile(os.path.join(path, METRICS_FILE)):
            yield Path(path)


def find_runs(paths: Iterable[str | Path]) -> list[Path]:
    """The directories of runs at or below some directories, each once; ValueError if one has none."""
    found: dict[Path, None] = {}
    for path in paths:
        own = dict.fromkeys(walk(Path(path)))
        if not own:
            raise ValueError(
                f"no {METRICS_FILE} at or below {str(path)!r}: give the directory of a run, or one with runs in it"
            )
        found |= own
    return list(found)


def read_run(path: Path) -> Run:
    """Read a run. Damaged or missing files are named in `Run.problems`. A last line without an end is being written."""
    log, damaged = Log(), list[str]()
    *lines, last = (path / METRICS_FILE).read_bytes().split(b"\n")
    for line in filter(bytes.strip, (*lines, last)):
        try:
            log.add(json.loads(line))
        except (ValueError, RecursionError) as err:
            if line is not last:
                damaged.append(f"{line[:60]!r} ({err})"[:200])
    count = "an unreadable line was" if len(damaged) == 1 else f"{len(damaged)} unreadable lines were"
    problems = [f"{path / METRICS_FILE}: {count} left out: {damaged[0]}"] if damaged else []
    settings: dict[str, Any] | None = None
    starts: list[dict[str, Any]] = []
    try:
        record = json.loads((path / "settings.json").read_text(encoding="utf-8"))
        starts = [dict(start) for start in record["starts"]]
        if "fields" in record:  # a process that learns has been started
            used = {k: v for k, v in record["parameters"].items() if k not in record.get("unused", ())}
            callbacks = [
                c for c in record["fields"].get("callbacks") or [] if not (isinstance(c, dict) and c.get("type") == _SPECTATOR)
            ]
            settings = flatten(record["fields"] | {"callbacks": callbacks} | used)
    except FileNotFoundError:
        pass
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as err:
        problems.append(f"{path / 'settings.json'} cannot be read: {err!r:.200}")
    return Run(path, log, settings, starts, problems, (path / METRICS_FILE).stat().st_mtime)


def name_runs(runs: Sequence[Run]) -> None:
    """Put the path from their common directory in front of the names of runs that have the same."""
    paths = [run.path.absolute() for run in runs]
    for run, path in zip(runs, paths):
        if sum(other.name == path.name for other in paths) > 1:
            run.name = os.path.relpath(path, os.path.commonpath([other.parent for other in paths]))


def base_name(name: str) -> str:
    """The name of a run without the number of its seed: "lake_seed0", "lake_trial_3" and "lake-7" -> "lake"; "trial_0" -> ""."""
    return "/".join(filter(None, (_LAST_NUMBER.sub("", part) for part in name.split("/"))))


def group_runs(runs: Sequence[Run]) -> list[Group]:
    """Group runs of equal settings, environments and code.

    A group is named after its runs, and, where several would have one name, after what differs between them. A run none of whose
    rollouts has ended joins the runs of its settings.
    """
    groups: list[list[Run]] = []
    for run in sorted(runs, key=lambda run: -len(run.environments)):
        alike = [g for g in groups if g[0].compared == run.compared and run.environments <= g[0].environments]
        if alike:
            alike[0].append(run)
        else:
            groups.append([run])
    groups = sorted((sorted(own, key=runs.index) for own in groups), key=lambda own: runs.index(own[0]))
    bases = [base_name(own[0].name) for own in groups]
    named: dict[str, Group] = {}
    for base, own in zip(bases, groups):
        same_base = [other[0] for b, other in zip(bases, groups) if b == base]
        name = (len(own) > 1 and base) or own[0].name
        if len(same_base) > 1:
            name = ", ".join(filter(None, [base, *_distinction(own[0], same_base)])) or own[0].name
        if name in named:
            name = f"{name} ({own[0].path})"
        named[name] = Group(name, own)
    return list(named.values())


def _distinction(own: Run, alike: Sequence[Run]) -> list[str]:
    """Up to three settings in which a run differs from others, such as "gamma=0.9", or else its environments or its name."""
    differ = differences([run.compared for run in alike])
    words = [f"{k.rpartition('.')[2]}={format_value(v)}" for k, v in own.compared.items() if k in differ]
    words = [re.sub(r"=(?:[A-Za-z_]\w*\.)+", "=", word) for word in words]  # classes without their modules
    words = [word[:19] if word.startswith("commit=") else word for word in words if len(word) < 60]
    if not words and len({run.environments for run in alike}) > 1:
        words = [" and ".join(sorted(n.removeprefix(RETURN_OF) for n in own.environments)) or "no rollout yet"]
    return words[:3] or [own.name]


def differences(settings: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """The settings in which runs differ: {name: a value for each run, or None where it has none}."""
    names = dict.fromkeys(name for own in settings for name in own)
    by_name = {name: [own.get(name) for own in settings] for name in names}
    return {k: v for k, v in by_name.items() if any(x != v[0] for x in v)}


# ---- state and progress ------------------------------------------------------------------------------------------------------


class Status(NamedTuple):
    """State, progress and remaining time of a run."""

    state: str  # "running", "finished" (all its epochs are trained), "stopped", or "starting" (it runs, and has no row yet)
    why: str  # how that is known, in words
    epochs: int | None  # that the run will have
    done: float  # epochs
    left: float | None  # seconds until it is done, at its mean rate; None if it does not run or nothing is known


def status_of(run: Run, now: float | None = None) -> Status:
    """Find the state, progress and remaining time of a run at a time in seconds since 1970; None: the present.

    A run whose lock names a process of this machine is running while that process lives. Another one counts as running for three of its
    longest pauses between rows, and for at least `PATIENCE` seconds, after its newest row.
    """
    epochs = (run.settings or {}).get("epochs")
    epochs = epochs if isinstance(epochs, int) and epochs > 0 else None
    # epochs of which the last phase has been logged: training, or collection if the run does not train
    newest = {section: position[0] for position, section, _ in run.log.kept}
    done = run.log.highest[0]
    done += next((newest[section] >= done for section in ("train", "rollout", "buffer") if section in newest), False)
    finished = epochs is not None and done >= epochs
    silent = max(0.0, (now or time.time()) - run.changed)
    quiet = silent > max(PATIENCE, 3.0 * np.diff([position[3] for position, *_ in run.log.kept]).max(initial=0.0))
    alive, process = _holder(run.path)
    if (not quiet if alive is None else alive) and not (finished and quiet):
        state = "running" if run.log.rows else "starting"
    else:
        state = "finished" if finished else "stopped"
    left = max(0.0, run.log.highest[3] * (epochs - done) / done) if state == "running" and epochs and done else None
    return Status(state, f"{process}newest row {format_duration(silent)} ago", epochs, done, left)


def _holder(path: Path) -> tuple[bool | None, str]:
    """Whether the process that had a run's lock last lives, and words about it; (None, "") if it is unknown, or on another machine."""
    try:
        found = json.loads((path / LOCK_FILE).read_bytes())
        pid, since = int(found["pid"]), datetime.fromisoformat(found["since"])
        if found["host"] != socket.gethostname():
            return None, ""
        process = psutil.Process(pid)
        # ids are reused, above all in containers
        alive = process.status() != psutil.STATUS_ZOMBIE and process.create_time() <= since.timestamp() + _CLOCK
    except (OSError, ValueError, KeyError, TypeError):
        return None, ""
    except psutil.NoSuchProcess:
        alive = False
    return alive, f"process {pid} since {found['since']}, " if alive else f"process {pid} has ended, "
