"""The training state of a run: saved from, and restored to, the parts of an experiment."""

from __future__ import annotations

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
from amago.run.rng import rng_state, set_rng_state
from amago.run.rollout import Rollout
from amago.run.update import Updater
from amago.run.weights import load_into

Snapshot = tuple[dict[str, Tensor], dict[str, Any], dict[str, Any]]
"""(weights, tensors, state), the arguments of `amago.run.checkpoint.save_training_state`."""


@dataclass
class Progress:
    """The progress of a run.

    Attributes:
        epoch: epochs that are finished.
        collected: steps of each actor in the current epoch.
        trained: batches in the current epoch.
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
        """The epoch in a checkpoint's name: the current one if it has begun, otherwise the one before."""
        return max(0, self.epoch - 1) if self.collected == self.trained == 0 else self.epoch


@dataclass
class TrainingParts:
    """The parts of a started experiment that have a state.

    Attributes:
        pools: rollouts by "train" or "val".
    """

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
        """The state that differs between processes: random streams, and the exploration schedules of the actors."""
        return {"rng": rng_state(), "pools": {k: r.pool.state_dict() for k, r in self.pools.items()}}

    def snapshot(self, progress: Progress, ranks: list[dict[str, Any]]) -> Snapshot:
        """The training state, in the main process.

        Args:
            ranks: the `local_state` of each process.
        """
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
        """Gradients accumulated so far in an update of several batches."""
        if self.accelerator.step % self.batches_per_update == 0:
            return {}
        return {name: p.grad for name, p in self.policy.named_parameters() if p.grad is not None}

    def restore(self, path: Path) -> Progress:
        """Load a training state into all parts.

        Raises:
            CheckpointError: it is incomplete or damaged, or was saved for another agent or by another number of processes.
        """
        weights, tensors, state = checkpoint.load_training_state(path)
        saved, now = state.get("processes"), self.accelerator.num_processes
        if saved != now:
            raise CheckpointError(
                f"{path} was saved by {saved} processes and this run has {now}: start as many, "
                "or load the policy alone with resume_training_state=False"
            )
        load_into(self.policy, weights, path)
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
        set_rng_state(local["rng"])
        return Progress(state["epoch"], state["collected"], state["trained"], state["seed"], dict(state["frames_by_env"]))
