"""The part of an experiment that is saved: training states, the policy's weights, and the buffer on disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from amago.compat import accelerate_states
from amago.compat.loaders import ForeignLoader, as_loader
from amago.loading import SequenceLoader
from amago.run.changes import refuse
from amago.run.checkpoint import CheckpointError, epoch_of, identity
from amago.run.claimed import ClaimedRun
from amago.run.collect import RunActors
from amago.run.rng import seed_process
from amago.run.state import Progress, StateChange, TrainingParts
from amago.run.weights import load_into


class PersistentRun(ClaimedRun):
    """Base class of `amago.Experiment`: checkpoints.

    Attributes:
        train_dloader: source of batches: any iterable of them.
    """

    train_dloader: Any

    def __post_init__(self) -> None:
        super().__post_init__()
        self._used_loader: SequenceLoader | ForeignLoader | None = None
        self._saved = False

    @property
    def _actors(self) -> RunActors:
        """The actors of the run."""
        raise NotImplementedError

    @property
    def _loader(self) -> SequenceLoader | ForeignLoader:
        """What batches are drawn from: that of ``train_dloader``."""
        known = self._used_loader
        if known is None or (known is not self.train_dloader and getattr(known, "given", None) is not self.train_dloader):
            known = self._used_loader = as_loader(self.train_dloader, self.DEVICE)
        return known

    @property
    def _parts(self) -> TrainingParts:
        return TrainingParts(
            self.accelerator, self.policy, self.optimizer, self.lr_schedule, self.updater, self._loader, self._data,
            self.logger, self._actors.pools, self.batches_per_update, self._callbacks,
        )  # fmt: skip

    def save_checkpoint(self) -> None:
        """Save a complete training state, and a separate file with the policy's weights.

        If that fails, for example because the disk is full, a warning is logged; earlier checkpoints are intact.
        """
        self._require_start("save_checkpoint()")
        with self.acting_weights():
            self._save()

    def _save(self) -> None:
        epoch, done = (self.epoch + 1, (0, 0)) if self._epoch_is_over else (self.epoch, self.done_in_epoch)
        progress = Progress(epoch, *done, self.run_seed, self.frames_by_env)
        ranks = self._gather([self._parts.local_state(self._ranks)])
        if self.accelerator.is_main_process:
            self._saved = self.checkpoints.save(
                progress.checkpoint_epoch,
                self._parts.snapshot(progress, ranks, self._settings_now()),
                self.keep_training_states,
            )
        self.accelerator.wait_for_everyone()
        if self._saved and self.accelerator.is_main_process:
            self._callbacks.call("on_save_checkpoint", self, self.checkpoints.path_of(progress.checkpoint_epoch))

    def _restore(self, path: Path) -> None:
        """Load a training state, and say which settings differ from it and what is lost."""
        if not hasattr(self, "optimizer"):
            raise CheckpointError(
                "this process only collects, and has nothing into which a training state could be loaded: load the weights alone "
                "(resume_training_state=False)"
            )
        if accelerate_states.is_one(path):
            parts = self.policy, self.optimizer, self.lr_schedule
            self.grad_update_counter = accelerate_states.load(path, *parts)
            self._begin_epoch()
            self._epoch, self._epoch_is_over = 1 + epoch_of(path), False
            self.print(f"note: {path.name} was written by Accelerate: frames, batches and random numbers begin anew")
            return
        found = self._changes(path)
        refuse(found, path)
        names = frozenset(c.name.partition(".")[0] for c in found)
        reseed = int(self.seed) if "seed" in names and self.seed is not None else None
        change = StateChange(names, self.run_name, reseed)
        if reseed is not None:
            seed_process((reseed, self.accelerator.process_index, *identity(path)))
        progress = self._parts.restore(path, change)
        self._epoch, self._collected, self._trained = progress.epoch, progress.collected, progress.trained
        self._epoch_is_over = self._has_collected = False
        self.frames_by_env, self.run_seed = progress.frames_by_env, progress.seed
        if found:
            self.print(f"settings that differ from those of {path.name}:\n  " + "\n  ".join(map(str, found)))
        for note in change.notes:
            self.print(f"note: {note}")

    def write_latest_policy(self) -> None:
        """Publish the policy's weights for other processes."""
        self._require_start("write_latest_policy()")
        if self.accelerator.is_main_process:
            with self.acting_weights():
                self.checkpoints.publish(self.policy.state_dict())
            self._role.published(self)

    def write_best_policy(self) -> None:
        """Keep the policy's weights in ``ckpts/best/policy.pt``, which replaces those kept before (`amago.KeepBest`)."""
        self._require_start("write_best_policy()")
        if self.accelerator.is_main_process:
            with self.acting_weights():
                self.checkpoints.keep_best(self.policy.state_dict())

    def read_latest_policy(self) -> None:
        """Load the weights that another process published last, if there are any; never older ones than before."""
        self._require_start("read_latest_policy()", writes=False)
        weights = self.checkpoints.read_latest()
        if weights is not None:
            load_into(self.policy, weights, self.checkpoints.latest)
            self._weights_loaded()
        self._ranks.copy_from_first(
            list(self.policy.state_dict().values())
        )  # the others may have read an older or a newer file

    def delete_buffer_from_disk(self, delete_protected: bool = False, delete_quarantine: bool = False) -> None:
        """Delete the collected trajectories, those in ``buffer/fifo``, in the main process (``dataset.delete()``).

        Args:
            delete_protected: also those in ``buffer/protected``: imported recordings, demonstrations.
            delete_quarantine: also damaged files in ``buffer/quarantine``.
        """
        self._require_start("delete_buffer_from_disk()")
        options = {"delete_protected": delete_protected, "delete_quarantine": delete_quarantine}
        if self.accelerator.is_main_process:
            self._data.delete(**{k: v for k, v in options.items() if v})  # a data set of the user's own may lack the options
