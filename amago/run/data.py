"""The batches of a run: the loader that draws them, and the wait for the data of other processes."""

from __future__ import annotations

import logging
import time
import warnings
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import torch

from amago.compat.parts import ForeignLoader, as_loader
from amago.data.batch import Batch
from amago.loading import RLDataset, SequenceLoader
from amago.loading.dataset import collection_ended
from amago.run.callbacks import Run
from amago.run.group import Ranks
from amago.run.settings import ExperimentSettings

logger = logging.getLogger(__name__)
REFUSED_SECONDS = 60.0
"""Time that a process which never collects waits for others while all files that it has found were refused."""


class NothingTrainedError(RuntimeError):
    """A run was to train, and is over without a single update, or all files that it has found are refused; the message gives the reasons."""


class Batches:
    """The source of training batches."""

    def __init__(self) -> None:
        self._given: object = None
        self._device = torch.device("cpu")
        self._used: SequenceLoader | ForeignLoader | None = None

    @property
    def given(self) -> Any:
        """An experiment's ``train_dloader``: a `SequenceLoader`, or any iterable of batches. A new `SequenceLoader` goes on where the one
        before it was: it draws batches by their number."""
        return self._given

    @given.setter
    def given(self, now: object) -> None:
        before = self._given
        if now is before:
            return
        self._given, self._used = now, None
        if isinstance(now, SequenceLoader) and isinstance(before, SequenceLoader):
            now.next_batch = max(now.next_batch, before.next_batch)
            before.close()

    def make(self, s: ExperimentSettings, data: RLDataset, seed: int, rank: int, device: torch.device) -> SequenceLoader:
        """The library's loader for the present settings, or the one before, if it was made for the same."""
        before, arguments = self.given, (data, s.batch_size, s.dloader_workers)
        if isinstance(before, SequenceLoader) and (before.dataset, before.batch_size, before.workers) == arguments:
            before.length = s.train_batches_per_epoch
            return before
        return SequenceLoader(*arguments, seed, rank, device, s.train_batches_per_epoch)

    def renew(self, make: Callable[[], Any], device: torch.device) -> None:
        """Call an experiment's ``init_dloaders``."""
        self._device = device
        if (made := make()) is not None:
            self.given = made

    @property
    def loader(self) -> SequenceLoader | ForeignLoader:
        """``given``, or a loader that reads from it."""
        if self._used is None:
            self._used = as_loader(self._given, self._device)
        return self._used

    def count(self, left: int, planned: int) -> int:
        """Batches left in an epoch of ``planned`` batches, of which ``left`` are; a foreign loader may have a length of its own."""
        loader = self.loader
        return loader.count(left, planned) if isinstance(loader, ForeignLoader) else left

    def take(self, count: int) -> Iterator[Batch]:
        """The next batches."""
        return self.loader.batches(count)

    def close(self) -> None:
        """Stop the loader's threads."""
        if isinstance(self._given, SequenceLoader):
            self._given.close()


def _nothing_ended(run: Run) -> str:
    return (
        f"no rollout ended and was saved within train_timesteps_per_epoch={run.train_timesteps_per_epoch} steps of each actor an epoch: collect "
        "for longer, give the environment a time limit, or save rollouts in pieces (traj_save_len)"
    )


def warn_if_nothing_saved(run: Run) -> None:
    """Warn after a phase of collection if there is nothing to learn from although every actor has taken 1,000 steps: long rollouts are not a
    mistake. Others may have taken away what this process has saved."""
    taken = (run.epoch + 1 - max(0, run.start_collecting_at_epoch)) * (run.train_timesteps_per_epoch or 0)
    nothing = run.data.save_new_trajs_to is not None and not run.data.ready_for_training and not run.actors.saved
    if nothing and taken >= 1000:
        warnings.warn(f"there is nothing to learn from yet: {_nothing_ended(run)}", stacklevel=2)


def check_trained(run: Run) -> None:
    """Refuse to end, as if all were well, a run without updates that was to train, unless the dataset never has any data, or a training phase
    of the user's own skipped none: a `NothingTrainedError` names the reason, from the updates that were skipped and the environments that
    were replaced."""
    skipped, restarts = run.learner.skipped, run.actors.restarts
    if run.grad_update_counter or not run.learns or not run.data.can_become_ready or (run.position.has_trained and not skipped):
        return
    if skipped:
        why = f"all {skipped} updates were skipped, because the loss or its gradient was not finite: look for huge observations or rewards"
    elif not run.collects:
        why = "this process does not collect, and there was no data of others"
    else:
        why = _nothing_ended(run) + (f"; {restarts} environments failed and were replaced, see the log" if restarts else "")
    raise NothingTrainedError(f"the run is over and has trained on nothing: {why}")


def wait_for_data(dataset: RLDataset, refused_timeout: float, pause: Callable[[], object], ranks: Ranks | None = None) -> None:
    """Wait until a dataset is ready for training, in all ranks.

    While nothing is found, wait without limit, because other processes may begin to collect later. Files that are refused are a
    mistake rather than a delay: another format, another place, damage.

    Args:
        refused_timeout: seconds to wait for others while there are refused files alone.
        pause: waits a moment, equally in all ranks; may raise to end the wait.

    Raises:
        NothingTrainedError: that time is over.
    """
    ranks = ranks or Ranks()
    since = None  # when there were refused files for the first time
    while not ranks.all(dataset.ready_for_training):
        refused, now = dataset.refused_files(), time.monotonic()
        listed = "".join(f"\n  - {path}: {reason}" for path, reason in islice(refused.items(), 10))
        listed += f"\n  - and {len(refused) - 10:,} more" if len(refused) > 10 else ""
        if refused and since is None:
            logger.warning("no file that was found can be sampled; the run fails after %g s: %s", refused_timeout, listed)
        since = (since or now) if refused else None
        if ranks.any(since is not None and now - since >= refused_timeout):
            raise NothingTrainedError(
                f"there is nothing to train on: this process does not collect, all {len(refused):,} files that were found were "
                f"refused, and no others came within {refused_timeout:g} seconds. Remove these files, or convert recordings of other "
                f"systems ('amago buffer import'); start processes that collect before this one:{listed}"
            )
        pause()
        collection_ended(dataset)
