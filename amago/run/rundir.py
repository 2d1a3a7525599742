"""A run's directory: claimed for one writer, its checkpoints, the earlier run that it continues, and a record of each start."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import gymnasium as gym
from torch import Tensor, nn

from amago import config
from amago.compat.parts import TextPath, is_accelerate_state
from amago.loading import DiskTrajDataset, MixtureOfDatasets, RLDataset
from amago.run import checkpoint
from amago.run.checkpoint import (
    CheckpointError,
    Snapshot,
    identity,
    load_weight_file,
    save_weights,
    settings_in,
    without_aliases,
    write_json,
    write_text,
)
from amago.run.group import Ranks
from amago.run.launched.protocol import STAGING, read_small
from amago.run.locks import HeldError, RunLock
from amago.run.record import SETTINGS_FILE, Calls, fields_of, has_learned, note_start, read_record, run_id, settings_of
from amago.run.settings import ExperimentSettings, SettingsError
from amago.run.state import Change, changes, refuse
from amago.spaces import space_differences
from amago.store.files import TEMPORARY, is_stale
from amago.store.formats import ORIGINAL_NAME

log = logging.getLogger(__name__)


class RunCheckpoints:
    """The checkpoints of one run, in ``run_dir/ckpts``; names of training states begin with ``run_name``.

    If a checkpoint cannot be written (above all because the disk is full), a warning is logged and training continues; earlier
    checkpoints are intact.

    Attributes:
        states, weights: directories of the training states, and of the policy's weights.
        latest, best: files of the policy published for other processes, and of the weights of the best evaluation.
        version: of the published policy that this process wrote or read last, from 1; 0 if there is none. Versions rise by one with
            each publication, also after a resume.
        note: on the policy that this process read last; None if there is none.
        saved: training states that this process has saved.
        description: of the policy, as JSON types; every file of weights holds it, so that one can be loaded without the run's directory.
    """

    description: Mapping[str, Any] | None = None
    note: Mapping[str, Any] | None = None

    def __init__(self, run_dir: Path, run_name: str):
        self.run_dir, self.run_name, self.version, self.saved = run_dir, run_name, 0, 0
        self.directory = TextPath(run_dir / "ckpts")
        self.states, self.weights = self.directory / "training_states", self.directory / "policy_weights"
        self.latest, self.best = (self.directory / name / "policy.pt" for name in ("latest", "best"))

    def prepare(self) -> None:
        """Create the directories, and delete temporary files that killed processes have left."""
        for directory in (self.states, self.weights, self.latest.parent):
            directory.mkdir(parents=True, exist_ok=True)
        for directory in (self.run_dir, self.weights, self.latest.parent):
            for path in directory.glob(f"{TEMPORARY}*"):
                if is_stale(directory, path.name):
                    path.unlink(missing_ok=True)

    def choose(self, resume: str | int) -> Path | None:
        """The training state for the setting ``resume``; None for a fresh start, `CheckpointError` if it is not there or damaged."""
        if resume == "auto":
            return checkpoint.newest_complete(self.states)
        return None if resume == "never" else self.of_epoch(int(resume))

    def of_epoch(self, epoch: int) -> Path:
        """The training state of an epoch, or a `CheckpointError` that lists the epochs that have one."""
        states = {checkpoint.epoch_of(path): path for path in checkpoint.training_states(self.states)}
        if epoch not in states:
            known = ", ".join(map(str, sorted(states))) or "none"
            raise CheckpointError(f"run {self.run_name!r} has no training state of epoch {epoch}; there are: {known}")
        return states[epoch]

    def path_of(self, epoch: int) -> Path:
        """The directory of the training state that this run saves in an epoch."""
        return self.states / f"{self.run_name}_epoch_{epoch}"

    def weights_of_epoch(self, epoch: int) -> Path:
        """The file with the policy's weights of an epoch."""
        return self.weights / f"policy_epoch_{epoch}.pt"

    def save(self, epoch: int, snapshot: Snapshot, keep: int | None, keep_weights: int | None = None) -> bool:
        """Save a training state and a separate file with the policy's weights, both named by their epoch, and delete all training states but
        the ``keep`` newest, and all such files but the ``keep_weights`` newest (None: none); returns whether that succeeded."""
        weights, tensors, state = snapshot

        def write() -> None:
            checkpoint.prune(self.states, None)  # the remains of interrupted saves take space
            # before the training state: a kill in between leaves weights without a state, never a state without its weights
            save_weights(weights, self.weights_of_epoch(epoch), description=self.description)
            checkpoint.save_training_state(self.path_of(epoch), without_aliases(weights), tensors, state)
            checkpoint.prune(self.states, keep)
            files = sorted(self.weights.glob("policy_epoch_*.pt"), key=lambda path: path.stat().st_mtime_ns)
            for path in [] if keep_weights is None else files[:-keep_weights]:
                path.unlink(missing_ok=True)

        succeeded = self._try(write, f"the checkpoint of epoch {epoch} could not be saved", weights)
        self.saved += succeeded
        return succeeded

    def publish(self, weights: Mapping[str, Tensor], note: Mapping[str, Any] | None = None) -> bool:
        """Publish weights for other processes, with a note on them; returns whether that succeeded."""

        def write() -> None:
            version = max(self.version, self._published()) + 1
            save_weights(weights, self.latest, version, self.description, note)
            self.version = version
            link = self.run_dir / "policy.pt"
            if not link.is_symlink():
                link.unlink(missing_ok=True)
                link.symlink_to(self.latest.relative_to(self.run_dir))

        return self._try(write, "the latest policy could not be published", weights)

    def keep_best(self, weights: Mapping[str, Tensor], note: Mapping[str, Any] | None = None) -> bool:
        """Keep weights as the best ones so far, with a note on them; returns whether that succeeded."""
        write = lambda: save_weights(weights, self.best, description=self.description, note=note)  # noqa: E731
        return self._try(write, "the weights of the best evaluation could not be kept", weights)

    def _try(self, write: Callable[[], None], problem: str, weights: Mapping[str, Tensor]) -> bool:
        """Call a function that writes; an OSError is logged."""
        try:
            write()
        except OSError as err:
            needed = sum(w.numel() * w.element_size() for w in without_aliases(weights).values())
            log.warning(
                "%s: %s; %s has %.1f MB left, and the weights alone take %.1f MB. Earlier checkpoints are intact, and the run continues",
                problem, err, self.directory, shutil.disk_usage(self.states).free / 1e6, needed / 1e6,
            )  # fmt: skip
            return False
        return True

    def _published(self) -> int:
        """The version of an earlier process, if this one has neither written nor read any."""
        try:
            return load_weight_file(self.latest).version if self.version == 0 else 0
        except CheckpointError:
            return 0

    def read_latest(self) -> dict[str, Tensor] | None:
        """The published weights; None if there are none, or none newer than those that were read or published here."""
        if not self.latest.is_file():
            return None
        weights, version, _, note = load_weight_file(self.latest)
        if version < self.version:
            log.warning(
                "%s holds version %d of the policy, older than version %d that was read before: it is ignored",
                self.latest, version, self.version,
            )  # fmt: skip
        if version < self.version or 0 < version == self.version:  # a file without a version may be new
            return None
        self.version, self.note = version, note
        return weights

    def skip_latest(self) -> None:
        """Never read the weights that are published now, because a training state of the run is loaded instead."""
        self.version = max(self.version, self._published())


LOCK_FILE = ".lock"
OWNER_FILE = "owner.json"
SETTINGS_YAML = "settings.yaml"
_FILES = (
    "metrics.jsonl",
    "metrics.csv",
    SETTINGS_FILE,
    SETTINGS_YAML,
    "config.txt",
    "policy.json",
    "policy.pt",
    "train_args.json",  # of earlier versions
)
FILMS = "videos"
"""The directory of films, in which users may keep others."""
_DIRECTORIES = ("ckpts", "tensorboard", "wandb", "launch")


class RunExistsError(SettingsError):
    """A run, or the data of one, is where a new one would begin."""


class RunInUseError(SettingsError):
    """Another process writes the run."""


class RunDir:
    """The directory of a run, and the buffer into which it collects, claimed for one writer.

    A process that learns is the only one of its run, and begins where there is no earlier run. Others join the run: they collect
    for it, or evaluate. Only the main process claims and writes.

    Attributes:
        claimed: `claim` has ended.
        refusal: the error to raise at a write, because nothing was loaded of an earlier run; None if writing is allowed.
        to_resume: the training state to load; None: there is none, or it was loaded.
        settings_at_start: the settings (`amago.run.record.settings_of`) with which the run was started.
    """

    settings_at_start: dict[str, Any]

    def __init__(self, settings: ExperimentSettings):
        self.settings = settings
        self.refusal: RunExistsError | None = None
        self.to_resume: Path | None = None
        self.claimed = self._main = self._replaces = self._noted = False
        self._lock: RunLock | None = None

    @cached_property
    def checkpoints(self) -> RunCheckpoints:
        """The run's checkpoints."""
        return RunCheckpoints(self.settings.run_dir, self.settings.run_name)

    def claim(self, data: RLDataset, group: Ranks) -> Path | None:
        """Claim the directory and the buffer of ``data``; returns the training state to resume from, None to begin.

        Raises:
            RunInUseError: another process that learns writes the run.
            RunExistsError: the buffer is of another run. (An earlier run of this name is `refusal`, raised when something is to be written,
                as `amago.Experiment.load_checkpoint` may continue it.)
            SettingsError: the training state is of other networks.
            CheckpointError: there is no training state to resume from.
        """
        s, self._main = self.settings, group.index == 0
        self.path, self.data, self.buffer = s.run_dir, data, buffer_of(data)
        vars(self).pop("checkpoints", None)  # of a name that the run had before
        self.settings_at_start = settings_of(s)
        failed, resumed = None, None
        try:
            if self._main:
                self._claim()
                resumed = self.checkpoints.choose(s.resume)
        except Exception as err:
            failed = err
        failed, self.refusal, self.to_resume = group.of_first((failed, self.refusal, resumed))
        if failed is not None:
            raise failed
        self.checkpoints.prepare()
        if self.to_resume is not None:
            refuse(self.changes(self.to_resume, started=False), self.to_resume)
        self.claimed = True
        return self.to_resume

    @property
    def is_open(self) -> bool:
        """True if this process may write here."""
        return self.claimed and self.refusal is None

    def check_writable(self) -> None:
        """Raise `refusal`, if there is one."""
        if self.refusal is not None:
            raise self.refusal

    def _claim(self) -> None:
        """Lock the run, if this process learns, and refuse files of another run. No file but the lock is changed on refusal."""
        s = self.settings
        if s.learns:
            self._take_lock()
        own_weights = s.init_from is not None and Path(s.init_from).expanduser().resolve().is_relative_to(self.path.resolve())
        begins = s.learns and s.resume == "never" and not own_weights
        earlier = files_of_a_run(self.path) if begins and not s.overwrite else []
        if earlier:
            self.refusal = RunExistsError(
                f"run {s.run_name!r} exists: {self.path} has {', '.join(earlier)}, and with resume='never' a second run would be mixed "
                "with it. Choose: resume='auto' (--resume auto) continues it, as does load_checkpoint(N) after start(); another run_name (--run_name) begins a new one beside it; "
                "overwrite=True (--overwrite) deletes its checkpoints, its metrics and the trajectories that it collected"
            )
        self._check_buffer(begins and not earlier)
        self._replaces = begins and s.overwrite
        if self.refusal is None:
            self._register()
        else:
            self.release()  # nothing is written, and another experiment may begin in its place

    def _take_lock(self) -> None:
        if self._lock is None:
            lock = RunLock(self.path / LOCK_FILE)
            try:
                lock.acquire()
            except HeldError as err:
                raise RunInUseError(
                    f"run {self.settings.run_name!r} ({self.path}) is {err}. Wait for its end, choose another run_name, or let this "
                    "process only collect (--mode collect)"
                ) from err
            self._lock = lock

    def _check_buffer(self, begins: bool) -> None:
        """Refuse a buffer with trajectories that another run collected."""
        s, buffer = self.settings, self.buffer
        changes_it = s.collects or (s.learns and s.has_dset_edit_rights)
        if buffer is None or s.share_buffer or not changes_it or not has_trajectories(buffer):
            return
        owner = owner_of(buffer)
        if owner is None and not (begins and s.collects):
            return
        if self._owns(buffer) and (owner is not None or s.overwrite):
            return
        whose = f"run {owner['run']!r} ({owner['directory']})" if owner is not None else "an unknown run"
        raise RunExistsError(
            f"the buffer {buffer / 'fifo'} holds the trajectories of {whose}, and run {s.run_name!r} would train on them, add its own, and "
            "delete the oldest. Choose another dset_name, or share_buffer=True (--share_buffer) if that is what you want; to train on data "
            "that is never deleted, move the files to buffer/protected"
        )

    def _owns(self, buffer: Path) -> bool:
        """True if a buffer belongs to this run, or, where no owner is recorded, lies in its directory."""
        owner, record = owner_of(buffer), read_record(self.path)
        if owner is None:
            return buffer.resolve().is_relative_to(self.path.resolve())
        return record is not None and owner["id"] == record["id"]

    def _register(self, renew: bool = False) -> None:
        """Record the run as the owner of its buffer, if the buffer has no owner."""
        own_id = run_id(self.path, renew=renew)
        if self.buffer is None or not self.settings.collects or (self.settings.share_buffer and has_trajectories(self.buffer)):
            return
        if (owner_of(self.buffer) or {}).get("id") != own_id:
            content = {"id": own_id, "run": self.settings.run_name, "directory": str(self.path.absolute())}
            write_json(self.buffer / OWNER_FILE, content)

    def replace(self) -> bool:
        """Delete the earlier run of this name, if ``overwrite`` is set: its files, and the trajectories that it collected. Other files
        and ``buffer/protected`` stay. Returns True if there was something to delete."""
        if not self._replaces:
            return False
        self._replaces = False
        existed = bool(files_of_a_run(self.path))
        if self.buffer is not None and has_trajectories(self.buffer) and self._owns(self.buffer):
            self.data.delete()
            shutil.rmtree(self.buffer / STAGING, ignore_errors=True)
            existed = True
        for name in _DIRECTORIES:
            shutil.rmtree(self.path / name, ignore_errors=True)
        for path in (*(self.path / name for name in _FILES), *(self.path / FILMS).glob("epoch_*")):
            path.unlink(missing_ok=True)
        self._register(renew=True)
        if existed:
            self.checkpoints.prepare()
        return existed

    def continues(self, path: Path) -> bool:
        """True if a loaded file belongs to the earlier run, which this process then continues."""
        if self.refusal is None or not path.expanduser().resolve().is_relative_to(self.path.resolve()):
            return False
        if self._main:
            if self.settings.learns:
                self._take_lock()
            self._register()
        self.refusal = None
        return True

    def describe_start(self, resumed: Path | None, epoch: int, steps: str) -> str:
        """The result of ``resume``, for the console: the state from `claim`, the first epoch to run, and the steps taken, as text."""
        if self.refusal is not None:
            return f"learn() will be refused, unless load_checkpoint(N) comes before it: {self.refusal}"
        if resumed is not None:
            return f"resumed {resumed} at epoch {epoch}, {steps}"
        return (
            "" if self.settings.resume == "never" else f"nothing to resume in {self.checkpoints.directory}; starting at epoch 0"
        )

    def release(self) -> None:
        """Let other processes write the run; twice is fine."""
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def note_start(self, agent: nn.Module, calls: Calls | None, epoch: int, resumed: Path | None) -> bool:
        """Write ``settings.json`` and ``config.txt``, and remember the settings for training states, unless that is done or may not be;
        returns True if it was. ``calls`` come from `amago.run.record.recording` while the agent was built; ``epoch`` is the first to
        run, and ``resumed`` the training state from which the run goes on."""
        if self._noted or not self.is_open:
            return False
        self._noted = True
        self.settings_at_start = {**settings_of(self.settings, agent, calls), "fields": self.settings_at_start["fields"]}
        config.mark_as_used()
        if not self._main:
            return True
        for directory in (self.path, self.checkpoints.directory):  # where this library and the original system have it
            write_text(directory / "config.txt", config.operative_config())
        before, state = None, None
        if resumed is not None and not is_accelerate_state(resumed):
            before, state, epoch = settings_in(resumed), resumed.name, identity(resumed)[0]
        elif (record := read_record(self.path)) is not None and has_learned(record) and not self.settings.learns:
            before = record
        changed = {} if before is None else {c.name: [c.before, c.now] for c in changes(before, self.settings_at_start)}
        roles = [role for role, plays in (("collect", self.settings.collects), ("learn", self.settings.learns)) if plays]
        start = {"role": " and ".join(roles) or "evaluate", "epoch": epoch, "resumed": state, "changed": changed}
        note_start(self.path, self.settings_at_start, start)
        return True

    def settings_now(self) -> dict[str, Any]:
        """The settings (`amago.run.record.settings_of`) with the fields that were changed since the start."""
        at_start = self.settings_at_start
        return {**at_start, "fields": {**fields_of(self.settings), "dataset": at_start["fields"]["dataset"]}}

    def changes(self, path: Path, started: bool) -> list[Change]:
        """Differences between the settings and a training state's; nothing for a state of Accelerate's, which has none."""
        saved = settings_in(path)
        return [] if saved is None else changes(saved, self.settings_now() if started else self.settings_at_start)


def files_of_a_run(run_dir: Path) -> list[str]:
    """Descriptions of files that a process that learns has left in a directory."""
    found = [f"training state {p.name}" for p in checkpoint.training_states(run_dir / "ckpts" / "training_states")[-1:]]
    metrics = run_dir / "metrics.jsonl"
    record = read_record(run_dir)
    if metrics.is_file() and metrics.stat().st_size and (record is None or has_learned(record)):
        found.append("metrics.jsonl")
    return found


def buffer_of(data: RLDataset) -> Path | None:
    """The directory ``buffer`` of the dataset into which a run collects; None if the dataset has none."""
    while isinstance(data, MixtureOfDatasets):
        if data.collecting is None:
            return None
        data = data.datasets[data.collecting]
    return data.buffer_dir if isinstance(data, DiskTrajDataset) else None


def check_buffer(dataset: RLDataset, obs_space: gym.spaces.Dict, action_space: gym.Space[Any]) -> None:
    """Refuse a buffer (of a `DiskTrajDataset`) whose trajectories, such as an older run's, have other spaces than the environments."""
    if not isinstance(dataset, DiskTrajDataset):
        return
    try:
        dataset.store.set_spaces(obs_space, action_space)
    except ValueError as err:
        raise SettingsError(f"{err}: choose another run_name or dset_name, or move the file away") from err
    view = dataset.store.view()
    for index, schema in view.kinds():
        recorded = schema.obs_space, schema.action_spec.space
        if differences := space_differences(recorded, (obs_space, action_space), ranges=True):
            text = "; ".join(f"{d.name}: {d.first} there, {d.second} now" for d in differences)
            raise SettingsError(
                f"the buffer {dataset.buffer_dir} holds trajectories of {view.env_name(index)!r} that do not fit the environments of "
                f"this run ({text}): choose another run_name or dset_name, or delete the buffer"
            )


def has_trajectories(buffer: Path) -> bool:
    """True if ``buffer/fifo`` holds finished files other than the original system's, which are never changed or deleted."""
    try:
        with os.scandir(buffer / "fifo") as entries:
            return any(not e.name.startswith(".") and not ORIGINAL_NAME.fullmatch(e.name) for e in entries)
    except (FileNotFoundError, NotADirectoryError):
        return False


def owner_of(buffer: Path) -> dict[str, Any] | None:
    """{"id", "run", "directory"} of the run that a buffer belongs to; None if that is not recorded."""
    found = read_small(buffer / OWNER_FILE) or {}
    return found if all(isinstance(found.get(k), str) for k in ("id", "run", "directory")) else None
