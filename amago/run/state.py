"""What a run saves, how it goes on from that, and which checkpoint it goes on from."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor

from amago.agent import BaseAgent
from amago.loading import RLDataset, SequenceLoader
from amago.run import checkpoint
from amago.run.checkpoint import CheckpointError
from amago.run.metrics import MetricsLogger
from amago.run.rollout import Rollout
from amago.run.update import Updater
from amago.store.files import free_bytes

log = logging.getLogger(__name__)
Snapshot = tuple[dict[str, Tensor], dict[str, Any], dict[str, Any]]
"""(weights, tensors, state), as `amago.run.checkpoint.save_training_state` takes them."""


@dataclass
class Progress:
    """How far a run is.

    Attributes:
        collected, trained: steps of each actor, and batches, of the epoch that has begun.
        seed: of the run.
        frames_by_env: environment steps collected by this process, by environment name.
    """

    epoch: int
    collected: int
    trained: int
    seed: int
    frames_by_env: dict[str, int]

    @property
    def checkpoint_epoch(self) -> int:
        """The number that a checkpoint of now has: of the epoch that has begun, or else of the one before."""
        return max(0, self.epoch - 1) if self.collected == self.trained == 0 else self.epoch


@dataclass
class TrainingParts:
    """The parts of a started experiment that have a state."""

    accelerator: Accelerator
    policy: BaseAgent
    optimizer: torch.optim.Optimizer
    schedule: torch.optim.lr_scheduler.LambdaLR
    updater: Updater
    loader: SequenceLoader
    dataset: RLDataset
    logger: MetricsLogger | None
    pools: dict[str, Rollout]
    batches_per_update: int

    def local_state(self) -> dict[str, Any]:
        """What each process has of its own: random streams, and the schedules of its actors' exploration."""
        return {"rng": checkpoint.rng_state(), "pools": {k: r.pool.state_dict() for k, r in self.pools.items()}}

    def snapshot(self, progress: Progress, ranks: list[dict[str, Any]]) -> Snapshot:
        """Everything, in the main process; ``ranks`` holds the `local_state` of each."""
        assert self.logger is not None
        state = {
            "epoch": progress.epoch, "collected": progress.collected, "trained": progress.trained, "seed": progress.seed,
            "frames_by_env": progress.frames_by_env, "updater": self.updater.state_dict(),
            "schedule": self.schedule.state_dict(), "next_batch": self.loader.next_batch,
            "wall_time": self.logger.wall_time, "dataset": self.dataset.state_dict(),
            "processes": self.accelerator.num_processes, "ranks": ranks,
            "batches_in_update": self.accelerator.step % self.batches_per_update,
        }  # fmt: skip
        tensors = {"optimizer": self.optimizer.state_dict(), "gradients": self._unused_gradients()}
        if self.accelerator.scaler is not None:
            tensors["scaler"] = self.accelerator.scaler.state_dict()
        return self.policy.state_dict(), tensors, state

    def _unused_gradients(self) -> dict[str, Tensor]:
        """Those of an update that has not seen all of its ``batches_per_update`` yet."""
        if self.accelerator.step % self.batches_per_update == 0:
            return {}
        return {name: p.grad for name, p in self.policy.named_parameters() if p.grad is not None}

    def restore(self, path: Path) -> Progress:
        """Go on from a training state.

        Raises:
            CheckpointError: it is incomplete or damaged, of another agent, or of another number of processes.
        """
        weights, tensors, state = checkpoint.load_training_state(path)
        saved, now = state.get("processes"), self.accelerator.num_processes
        if saved != now:
            raise CheckpointError(
                f"{path} was saved by {saved} processes and this run has {now}: start as many, "
                "or load the policy alone with resume_training_state=False"
            )
        checkpoint.load_into(self.policy, weights, path)
        try:
            return self._restore(tensors, state)
        except KeyError as err:
            raise CheckpointError(f"{path} lacks {err}: it was not saved by this version of amago") from err

    def _restore(self, tensors: Mapping[str, Any], state: Mapping[str, Any]) -> Progress:
        for name, p in self.policy.named_parameters():
            p.grad = tensors["gradients"][name].to(p.device) if name in tensors["gradients"] else None
        self.optimizer.load_state_dict(tensors["optimizer"])
        if self.accelerator.scaler is not None and "scaler" in tensors:
            self.accelerator.scaler.load_state_dict(tensors["scaler"])
        self.updater.load_state_dict(state["updater"])
        self.schedule.load_state_dict(state["schedule"])
        self.loader.seed, self.loader.next_batch = state["seed"], state["next_batch"]
        self.accelerator.step = state["batches_in_update"]
        self.dataset.load_state_dict(state["dataset"])
        if self.logger is not None:
            self.logger.rewind(state["wall_time"])
        local = state["ranks"][self.accelerator.process_index]
        for kind, saved in local["pools"].items():
            if kind in self.pools:
                self.pools[kind].pool.load_state_dict(saved)
        checkpoint.set_rng_state(local["rng"])
        return Progress(state["epoch"], state["collected"], state["trained"], state["seed"], dict(state["frames_by_env"]))


class RunCheckpoints:
    """The checkpoints of one run on disk.

    What cannot be written (above all when the disk is full) is told with a warning, and training goes on: what was saved
    before is as it was.

    Args:
        run_dir: the run's directory; they lie in ``ckpts`` below it.
        run_name: the run's name.

    Attributes:
        states: where the training states lie.
        latest: the policy that is published for other processes.
        version: of the published policy that this process has written or read last; 0 before. It rises by one with each
            publication, through all parts of a run.
    """

    def __init__(self, run_dir: Path, run_name: str):
        self.run_dir, self.run_name = run_dir, run_name
        self.directory = run_dir / "ckpts"
        self.states = self.directory / "training_states"
        self.latest = self.directory / "latest" / "policy.pt"
        self.version = 0

    def prepare(self) -> None:
        """Create the directories, and delete what killed processes have left half written in them."""
        for directory in (self.states, self.directory / "policy_weights", self.latest.parent):
            directory.mkdir(parents=True, exist_ok=True)
        for directory in (self.run_dir, self.directory / "policy_weights", self.latest.parent):
            checkpoint.remove_leftovers(directory)

    def choose(self, resume: str | int) -> Path | None:
        """The training state to go on from, as ``Experiment.resume`` says; None to start afresh.

        Raises:
            CheckpointError: no such epoch; or "auto", and there are some but all are damaged.
        """
        if resume == "auto":
            return checkpoint.newest_complete(self.states)
        return None if resume == "never" else self.of_epoch(int(resume))

    def of_epoch(self, epoch: int) -> Path:
        """The training state of an epoch."""
        states = {checkpoint.epoch_of(path): path for path in checkpoint.training_states(self.states)}
        if epoch not in states:
            known = ", ".join(map(str, sorted(states))) or "none"
            raise CheckpointError(f"run {self.run_name!r} has no training state of epoch {epoch}; there are: {known}")
        return states[epoch]

    def weights_of_epoch(self, epoch: int) -> Path:
        """The file with the policy's weights alone of an epoch."""
        return self.directory / "policy_weights" / f"policy_epoch_{epoch}.pt"

    def exist(self) -> bool:
        """Whether the run has any training state, complete or not."""
        return bool(checkpoint.training_states(self.states))

    def save(self, epoch: int, snapshot: Snapshot, keep: int | None) -> bool:
        """Save a complete training state, and the policy's weights by themselves; whether that was possible.

        Args:
            keep: delete all training states but the newest so many afterwards.
        """
        try:
            checkpoint.prune(self.states, None)  # what a killed save has left takes space
            checkpoint.save_training_state(self.states / f"{self.run_name}_epoch_{epoch}", *snapshot)
            checkpoint.save_weights(snapshot[0], self.weights_of_epoch(epoch))
            checkpoint.prune(self.states, keep)
        except OSError as err:
            self._warn(f"the checkpoint of epoch {epoch} could not be saved", err, snapshot[0])
            return False
        return True

    def publish(self, weights: Mapping[str, Tensor]) -> bool:
        """Publish weights for processes that only act; whether that was possible."""
        try:
            version = max(self.version, self._published()) + 1
            checkpoint.save_weights(weights, self.latest, version)
            self.version = version
            link = self.run_dir / "policy.pt"
            if not link.is_symlink():
                link.unlink(missing_ok=True)
                link.symlink_to(self.latest.relative_to(self.run_dir))
        except OSError as err:
            self._warn("the latest policy could not be published", err, weights)
            return False
        return True

    def _published(self) -> int:
        try:
            return checkpoint.load_weights_and_version(self.latest)[1] if self.version == 0 else 0
        except CheckpointError:
            return 0

    def read_latest(self) -> dict[str, Tensor] | None:
        """The published weights; None if there are none yet, or if they are older than those read before."""
        if not self.latest.is_file():
            return None
        weights, version = checkpoint.load_weights_and_version(self.latest)
        if version < self.version:
            log.warning(
                "%s holds version %d of the policy, older than version %d that was read before: it is not taken",
                self.latest, version, self.version,
            )  # fmt: skip
            return None
        self.version = version
        return weights

    def _warn(self, what: str, err: OSError, weights: Mapping[str, Tensor]) -> None:
        needed = sum(w.numel() * w.element_size() for w in weights.values())
        free = free_bytes(self.directory) or 0
        log.warning(
            "%s: %s; %s has %.1f MB left, and the weights alone take %.1f MB. Earlier checkpoints are intact, and the run goes on",
            what, err, self.directory, free / 1e6, needed / 1e6,
        )  # fmt: skip
