"""The training state of a run: saved from, and restored to, the parts of an experiment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor

from amago.agent import BaseAgent
from amago.compat.loaders import ForeignLoader
from amago.loading import RLDataset, SequenceLoader
from amago.run import checkpoint
from amago.run.callbacks import CallbackList
from amago.run.carry_over import load_dataset_state, load_pool_state
from amago.run.checkpoint import CheckpointError
from amago.run.metrics import MetricsLogger
from amago.run.param_groups import GROUPING, names_in, regrouped
from amago.run.ranks import Ranks
from amago.run.rng import rng_state, seed_process, set_rng_state
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
        frames_by_env: environment steps collected by all ranks, by environment name.
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
class StateChange:
    """How a run differs from the training state that it resumes from.

    Attributes:
        fields: the settings that differ.
        run_name: of the run now.
        new_seed: another seed than that of the run; None: go on with that.
        notes: what is lost; extended by `TrainingParts.restore`.
    """

    fields: frozenset[str]
    run_name: str
    new_seed: int | None = None
    notes: list[str] = field(default_factory=list)


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
    loader: SequenceLoader | ForeignLoader
    dataset: RLDataset
    logger: MetricsLogger | None
    pools: dict[str, Rollout]
    batches_per_update: int
    callbacks: CallbackList

    def local_state(self, ranks: Ranks) -> dict[str, Any]:
        """The state that differs between ranks: random streams, and the exploration schedules of the actors.

        Gradients of an update of several batches differ too until it ends, which takes their mean. Here they become it already, so that
        rank 0 can save them for all.
        """
        if ranks.count > 1:
            parameters, found = dict(self.policy.named_parameters()), self._unused_gradients()
            for name in sorted(set().union(*ranks.gather([list(found)]))):
                if name not in found:
                    found[name] = parameters[name].grad = torch.zeros_like(parameters[name])
                ranks.average([found[name]])
        return {"rng": rng_state(), "pools": {k: r.pool.state_dict() for k, r in self.pools.items()}}

    def snapshot(self, progress: Progress, ranks: list[dict[str, Any]], settings: dict[str, Any]) -> Snapshot:
        """The training state, in the main process. Its weights are those that act; with an average, the trained ones are beside them.

        Args:
            ranks: the `local_state` of each process.
            settings: of the run (`amago.run.record.settings_of`).
        """
        state = {
            "epoch": progress.epoch, "collected": progress.collected, "trained": progress.trained, "seed": progress.seed,
            "frames_by_env": progress.frames_by_env, "frames_of_all_ranks": True, "updater": self.updater.state_dict(),
            "schedule": self.schedule.state_dict(), "next_batch": self.loader.next_batch,
            "wall_time": 0.0 if self.logger is None else self.logger.wall_time, "dataset": self.dataset.state_dict(),
            "processes": self.accelerator.num_processes, "ranks": ranks, "settings": settings,
            "batches_in_update": self.accelerator.step % self.batches_per_update, "optimizer_parameters": names_in(self.optimizer, self.policy),
        }  # fmt: skip
        tensors = {"optimizer": self.optimizer.state_dict(), "gradients": self._unused_gradients()}
        if self.updater.average is not None:
            tensors["trained"] = self.updater.average.state_dict()
        if self.accelerator.scaler is not None:
            tensors["scaler"] = self.accelerator.scaler.state_dict()
        if callbacks := self.callbacks.state_dict():
            tensors["callbacks"] = callbacks
        return self.policy.state_dict(), tensors, state

    def _unused_gradients(self) -> dict[str, Tensor]:
        """Gradients accumulated so far in an update of several batches."""
        if self.accelerator.step % self.batches_per_update == 0:
            return {}
        return {name: p.grad for name, p in self.policy.named_parameters() if p.grad is not None}

    def restore(self, path: Path, change: StateChange) -> Progress:
        """Load a training state into all parts; the present settings of optimizer and schedule remain.

        Args:
            change: what the run has changed since; its ``notes`` are extended by what is lost.

        Raises:
            CheckpointError: it is incomplete or damaged, or was saved for another agent.
        """
        weights, tensors, state = checkpoint.load_training_state(path)
        load_into(self.policy, weights, path)
        self._restore_average(tensors.get("trained"))
        try:
            progress = self._restore(tensors, state, change)
        except KeyError as err:
            raise CheckpointError(f"{path} lacks {err}: it was not saved by this version of amago") from err
        except ValueError as err:
            raise CheckpointError(f"{path} does not fit this run: {err}") from err
        for key in self.callbacks.load_state_dict(tensors.get("callbacks", {})):
            change.notes.append(f"the state of the callback {key} is not used: this run has no such callback")
        return progress

    def _restore(self, tensors: Mapping[str, Any], state: Mapping[str, Any], change: StateChange) -> Progress:
        saved, now = state["processes"], self.accelerator.num_processes
        same_update = saved == now and "batches_per_update" not in change.fields
        gradients = tensors["gradients"] if same_update else {}
        for name, p in self.policy.named_parameters():
            p.grad = gradients[name].to(p.device) if name in gradients else None
        names = state.get("optimizer_parameters") if GROUPING & change.fields else None
        self._load_optimizer(tensors["optimizer"], state["schedule"], names)
        if self.accelerator.scaler is not None and "scaler" in tensors:
            self.accelerator.scaler.load_state_dict(tensors["scaler"])
        self.updater.load_state_dict(state["updater"])
        self.loader.seed = state["seed"] if change.new_seed is None else change.new_seed
        self.loader.next_batch = state["next_batch"]
        self.accelerator.step = state["batches_in_update"] if same_update else 0
        settings = state.get("settings")
        before = {} if settings is None else settings["fields"]
        note = load_dataset_state(
            self.dataset, state["dataset"], before.get("dataset"), change.run_name, before.get("run_name")
        )
        change.notes.extend([note] if note else [])
        if self.logger is not None:
            self.logger.rewind(state["wall_time"])
        self._restore_process(state["ranks"], change)
        frames = dict(state["frames_by_env"])
        if not state.get("frames_of_all_ranks"):  # an earlier version saved those of rank 0
            frames = {name: n * saved for name, n in frames.items()}
        if saved != now:
            change.notes.append(f"{saved} processes saved it, and there are {now}: the run is not repeated exactly")
        return Progress(state["epoch"], state["collected"], state["trained"], self.loader.seed, frames)

    def _restore_average(self, trained: Mapping[str, Tensor] | None) -> None:
        """Begin the average, if there is to be one, with the weights that act, which are loaded; put the trained ones in their place."""
        if self.updater.average is not None:
            self.updater.average.restart()
        if trained is not None:
            self.policy.load_state_dict(trained, strict=False)

    def _restore_process(self, ranks: list[dict[str, Any]], change: StateChange) -> None:
        """Random streams and actors; processes that were not there before have actors of another, and streams of their own."""
        rank = self.accelerator.process_index
        local = ranks[rank % len(ranks)]
        for kind, saved in local["pools"].items():
            if kind in self.pools:
                pool = self.pools[kind].pool
                known = saved if rank < len(ranks) else {**saved, "actors": {f"-{k}": v for k, v in saved["actors"].items()}}
                load_pool_state(pool, known, "exploration_wrapper_type" in change.fields)
        if rank < len(ranks) and change.new_seed is None:
            set_rng_state(local["rng"])
        elif change.new_seed is None:
            seed_process((self.loader.seed, rank, len(ranks)))

    def _load_optimizer(self, saved: dict[str, Any], schedule: dict[str, Any], names: list[str] | None) -> None:
        """Restore the optimizer's moments and the place in the schedule. Rates, weight decay and the like are those of now.

        Args:
            names: of the parameters, in the order of ``saved``, if settings now divide them into other groups.
        """
        now = self.optimizer.state_dict()["param_groups"]
        if names is not None:
            saved = regrouped(saved, names, names_in(self.optimizer, self.policy), now) or saved
        if [len(g["params"]) for g in now] != [len(g["params"]) for g in saved["param_groups"]]:
            raise ValueError(
                f"the optimizer had groups of {[len(g['params']) for g in saved['param_groups']]} parameters, and now has groups of "
                f"{[len(g['params']) for g in now]}"
            )
        own: Any = getattr(self.schedule, "scheduler", self.schedule)  # Accelerate's wrapper around one
        base = list(own.base_lrs)
        groups = [{**new, "params": old["params"]} for new, old in zip(now, saved["param_groups"])]
        self.optimizer.load_state_dict({**saved, "param_groups": groups})
        own.load_state_dict({**schedule, "base_lrs": base})
        if isinstance(own, torch.optim.lr_scheduler.LambdaLR):
            for group, rate, factor in zip(self.optimizer.param_groups, base, own.lr_lambdas):
                group["lr"] = rate * factor(own.last_epoch)
            own._last_lr = [group["lr"] for group in self.optimizer.param_groups]
