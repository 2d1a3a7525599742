"""The checkpoints in a run's directory: which to resume from, saving, and publishing the latest policy."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from amago.run import checkpoint
from amago.run.checkpoint import CheckpointError
from amago.run.state import Snapshot
from amago.run.weights import load_weights_and_version, save_weights, without_aliases
from amago.store.files import free_bytes

log = logging.getLogger(__name__)


class RunCheckpoints:
    """The checkpoints of one run on disk.

    If a checkpoint cannot be written (above all because the disk is full), a warning is logged and training continues; earlier
    checkpoints are intact.

    Args:
        run_dir: the run's directory. Checkpoints are in ``run_dir/ckpts``.
        run_name: the run's name, with which names of training states begin.

    Attributes:
        states: directory of the training states.
        latest: file of the policy published for other processes.
        version: of the published policy that this process wrote or read last, from 1; 0 if there is none. Versions rise by one with
            each publication, also after a resume.
        description: of the policy, as JSON types; every file of weights holds it, so that one can be loaded without the run's directory.
    """

    description: Mapping[str, Any] | None = None

    def __init__(self, run_dir: Path, run_name: str):
        self.run_dir, self.run_name = run_dir, run_name
        self.directory = run_dir / "ckpts"
        self.states = self.directory / "training_states"
        self.latest = self.directory / "latest" / "policy.pt"
        self.best = self.directory / "best" / "policy.pt"
        self.version = 0

    def prepare(self) -> None:
        """Create the directories, and delete temporary files that killed processes have left."""
        for directory in (self.states, self.directory / "policy_weights", self.latest.parent):
            directory.mkdir(parents=True, exist_ok=True)
        for directory in (self.run_dir, self.directory / "policy_weights", self.latest.parent):
            checkpoint.remove_leftovers(directory)

    def choose(self, resume: str | int) -> Path | None:
        """The training state to resume from; None for a fresh start.

        Args:
            resume: "never", "auto" or an epoch, as in `ExperimentSettings`.

        Raises:
            CheckpointError: there is no such epoch, or with "auto" all training states are damaged.
        """
        if resume == "auto":
            return checkpoint.newest_complete(self.states)
        return None if resume == "never" else self.of_epoch(int(resume))

    def of_epoch(self, epoch: int) -> Path:
        """The training state of an epoch.

        Raises:
            CheckpointError: there is none; the message lists the epochs that have one.
        """
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
        return self.directory / "policy_weights" / f"policy_epoch_{epoch}.pt"

    def exist(self) -> bool:
        """Whether the run has any training state, complete or not."""
        return bool(checkpoint.training_states(self.states))

    def save(self, epoch: int, snapshot: Snapshot, keep: int | None) -> bool:
        """Save a training state and a separate file with the policy's weights; returns whether that succeeded.

        Args:
            epoch: for the names.
            keep: number of training states to keep, the newest; None keeps all.
        """
        try:
            checkpoint.prune(self.states, None)  # the remains of interrupted saves take space
            weights, tensors, state = snapshot
            path = self.path_of(epoch)
            checkpoint.save_training_state(path, without_aliases(weights), tensors, state)
            save_weights(weights, self.weights_of_epoch(epoch), description=self.description)
            checkpoint.prune(self.states, keep)
        except OSError as err:
            self._warn(f"the checkpoint of epoch {epoch} could not be saved", err, snapshot[0])
            return False
        return True

    def publish(self, weights: Mapping[str, Tensor]) -> bool:
        """Publish weights for other processes; returns whether that succeeded."""
        try:
            version = max(self.version, self._published()) + 1
            save_weights(weights, self.latest, version, self.description)
            self.version = version
            link = self.run_dir / "policy.pt"
            if not link.is_symlink():
                link.unlink(missing_ok=True)
                link.symlink_to(self.latest.relative_to(self.run_dir))
        except OSError as err:
            self._warn("the latest policy could not be published", err, weights)
            return False
        return True

    def keep_best(self, weights: Mapping[str, Tensor]) -> bool:
        """Keep weights as those of the best evaluation so far; returns whether that succeeded."""
        try:
            self.best.parent.mkdir(exist_ok=True)
            save_weights(weights, self.best, description=self.description)
        except OSError as err:
            self._warn("the weights of the best evaluation could not be kept", err, weights)
            return False
        return True

    def _published(self) -> int:
        """The version of an earlier process, if this one has neither written nor read any."""
        try:
            return load_weights_and_version(self.latest)[1] if self.version == 0 else 0
        except CheckpointError:
            return 0

    def read_latest(self) -> dict[str, Tensor] | None:
        """The published weights; None if there are none, or if they are older than those read before."""
        if not self.latest.is_file():
            return None
        weights, version = load_weights_and_version(self.latest)
        if version < self.version:
            log.warning(
                "%s holds version %d of the policy, older than version %d that was read before: it is ignored",
                self.latest, version, self.version,
            )  # fmt: skip
            return None
        self.version = version
        return weights

    def _warn(self, what: str, err: OSError, weights: Mapping[str, Tensor]) -> None:
        needed = sum(w.numel() * w.element_size() for w in without_aliases(weights).values())
        free = free_bytes(self.directory) or 0
        log.warning(
            "%s: %s; %s has %.1f MB left, and the weights alone take %.1f MB. Earlier checkpoints are intact, and the run continues",
            what, err, self.directory, free / 1e6, needed / 1e6,
        )  # fmt: skip
