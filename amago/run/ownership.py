"""Whose a run's directory and buffer are: what a start may find there, what it may replace, and who writes."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

from amago.loading import DiskTrajDataset, MixtureOfDatasets, RLDataset
from amago.run import checkpoint
from amago.run.checkpoint import write_json
from amago.run.checks import SettingsError
from amago.run.locks import HeldError, RunLock
from amago.run.record import SETTINGS_FILE, has_learned, read_record, run_id
from amago.run.roles.protocol import STAGING
from amago.run.settings import ExperimentSettings
from amago.store.original import NAME as ORIGINAL_NAME

LOCK_FILE = ".lock"
OWNER_FILE = "owner.json"
_FILES = ("metrics.jsonl", SETTINGS_FILE, "config.txt", "policy.json", "policy.pt", "train_args.json")
FILMS = "videos"
"""The directory of films, in which users may keep others."""
_DIRECTORIES = ("ckpts", "tensorboard", "wandb", "launch")


class RunExistsError(SettingsError):
    """A run, or the data of one, is where a new one would begin."""


class RunInUseError(SettingsError):
    """Another process writes the run."""


class Ownership:
    """A run's claim to its directory, and to the buffer into which it collects.

    A process that learns is the only one of its run, and begins where there is no earlier run. Others join the run: they collect
    for it, or evaluate.

    Args:
        settings: of the run.
        data: its data set.

    Attributes:
        refusal: why a new run may not begin here; None where it may. It is lifted when the earlier run is continued.
    """

    def __init__(self, settings: ExperimentSettings, data: RLDataset):
        self.settings, self.run_dir = settings, settings.run_dir
        self.buffer = buffer_of(data)
        self._lock: RunLock | None = None
        self._replaces = False
        self.refusal: RunExistsError | None = None

    def claim(self) -> None:
        """Lock the run, if this process learns, and refuse what is of another run. Nothing is changed on refusal.

        An earlier run of this name is not refused here: `refusal` is set, and is to be raised before anything is written.

        Raises:
            RunInUseError: another process that learns writes the run.
            RunExistsError: the buffer is of another run.
        """
        s = self.settings
        if s.learns and self.run_dir.is_dir():
            self._take_lock()
        begins = s.learns and s.resume == "never" and not self._goes_on_from_own_weights
        earlier = files_of_a_run(self.run_dir) if begins else []
        if earlier and not s.overwrite:
            self.refusal = RunExistsError(
                f"run {s.run_name!r} exists: {self.run_dir} has {', '.join(earlier)}, and with resume='never' a second run would be mixed "
                "with it. Choose: resume='auto' (--resume auto) continues it, as does load_checkpoint(N) after start(); another run_name (--run_name) begins a new one beside it; "
                "overwrite=True (--overwrite) deletes its checkpoints, its metrics and the trajectories that it collected"
            )
        record = read_record(self.run_dir)
        known = None if record is None else record["id"]
        self._check_buffer(known, begins and self.refusal is None)
        if s.learns and self._lock is None:
            self._take_lock()
        self._replaces = begins and s.overwrite
        if self.refusal is None:
            self._register(run_id(self.run_dir))

    def accept(self) -> None:
        """Go on with the earlier run, of which weights or a training state were loaded."""
        self.refusal = None
        self._register(run_id(self.run_dir))

    @property
    def _goes_on_from_own_weights(self) -> bool:
        """Whether ``init_from`` names weights of this very run, which asks to go on in its directory."""
        path = self.settings.init_from
        return path is not None and Path(path).expanduser().resolve().is_relative_to(self.run_dir.resolve())

    def _take_lock(self) -> None:
        lock = RunLock(self.run_dir / LOCK_FILE)
        try:
            lock.acquire()
        except HeldError as err:
            raise RunInUseError(
                f"run {self.settings.run_name!r} ({self.run_dir}) is {err}. Wait for its end, choose another run_name, or let this process "
                "only collect (--mode collect)"
            ) from err
        self._lock = lock

    def _check_buffer(self, known: str | None, begins: bool) -> None:
        """Refuse a buffer with collected trajectories that are not of this run."""
        s, buffer = self.settings, self.buffer
        changes_it = s.collects or (s.learns and s.has_dset_edit_rights)
        if buffer is None or s.share_buffer or not changes_it or not has_trajectories(buffer):
            return
        owner = owner_of(buffer)
        if owner is not None and owner["id"] == known:
            return
        if owner is None and (not begins or not s.collects or (s.overwrite and self._is_own(buffer))):
            return  # an earlier version of the library recorded no owner
        whose = (
            "trajectories of an unknown run"
            if owner is None
            else f"the trajectories of run {owner['run']!r} ({owner['directory']})"
        )
        raise RunExistsError(
            f"the buffer {buffer / 'fifo'} holds {whose}, and run {s.run_name!r} would train on them, add its own, and delete the oldest. "
            "Choose another dset_name, or share_buffer=True (--share_buffer) if that is what you want; to train on data that is never "
            "deleted, move the files to buffer/protected"
        )

    def _is_own(self, buffer: Path) -> bool:
        """Whether a buffer belongs to this run, or, where no owner is recorded, lies in its directory."""
        owner = owner_of(buffer)
        if owner is None:
            return buffer.resolve().is_relative_to(self.run_dir.resolve())
        return bool(owner["id"] == run_id(self.run_dir))

    def _register(self, own_id: str) -> None:
        """Record the run as the owner of its buffer, if that has none."""
        if self.buffer is None or not self.settings.collects or (self.settings.share_buffer and has_trajectories(self.buffer)):
            return
        if (owner_of(self.buffer) or {}).get("id") != own_id:
            content = {"id": own_id, "run": self.settings.run_name, "directory": str(self.run_dir.absolute())}
            write_json(self.buffer / OWNER_FILE, content)

    def replace(self, data: RLDataset) -> bool:
        """Delete the earlier run, if that was asked for: its files, and the trajectories that it collected.

        Files that the library has not written, and ``buffer/protected``, stay.

        Args:
            data: configured.

        Returns:
            whether there was something to delete.
        """
        if not self._replaces:
            return False
        self._replaces = False
        existed = bool(files_of_a_run(self.run_dir))
        if self.buffer is not None and has_trajectories(self.buffer) and self._is_own(self.buffer):
            data.delete()
            shutil.rmtree(self.buffer / STAGING, ignore_errors=True)
            existed = True
        for name in _DIRECTORIES:
            shutil.rmtree(self.run_dir / name, ignore_errors=True)
        for name in _FILES:
            (self.run_dir / name).unlink(missing_ok=True)
        for path in (self.run_dir / FILMS).glob("epoch_*"):
            path.unlink(missing_ok=True)
        self._register(run_id(self.run_dir, renew=True))
        return existed

    def release(self) -> None:
        """Give the lock back; twice is fine."""
        if self._lock is not None:
            self._lock.release()
            self._lock = None


def files_of_a_run(run_dir: Path) -> list[str]:
    """What shows that a process that learns has been in a directory, in words; empty if none has."""
    found = [f"training state {p.name}" for p in checkpoint.training_states(run_dir / "ckpts" / "training_states")[-1:]]
    metrics = run_dir / "metrics.jsonl"
    record = read_record(run_dir)
    if metrics.is_file() and metrics.stat().st_size and (record is None or has_learned(record)):
        found.append("metrics.jsonl")
    return found


def buffer_of(data: RLDataset) -> Path | None:
    """The directory ``buffer`` of the data set into which a run collects; None if the data set has none."""
    while isinstance(data, MixtureOfDatasets):
        if data.collecting is None:
            return None
        data = data.datasets[data.collecting]
    return data.buffer_dir if isinstance(data, DiskTrajDataset) else None


def has_trajectories(buffer: Path) -> bool:
    """Whether ``buffer/fifo`` holds finished files. Those of the original system, which are never changed or deleted, do not count."""
    try:
        with os.scandir(buffer / "fifo") as entries:
            return any(not e.name.startswith(".") and not ORIGINAL_NAME.fullmatch(e.name) for e in entries)
    except (FileNotFoundError, NotADirectoryError):
        return False


def owner_of(buffer: Path) -> dict[str, Any] | None:
    """{"id", "run", "directory"} of the run that a buffer belongs to; None if that is not recorded."""
    try:
        found = json.loads((buffer / OWNER_FILE).read_text())
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) and all(isinstance(found.get(k), str) for k in ("id", "run", "directory")) else None
