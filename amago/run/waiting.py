"""Waiting for the data of other processes, and noticing that none ever came."""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Mapping

from amago.compat.datasets import collection_ended
from amago.loading import RLDataset
from amago.run.ranks import Ranks
from amago.run.settings import ExperimentSettings

logger = logging.getLogger(__name__)

_SHOWN = 10


class NoReadableDataError(RuntimeError):
    """Files were found, but none that can be sampled; the message says why each was refused."""


class NothingTrainedError(RuntimeError):
    """A run was to train, and is over without a single update; the message says why."""


def check_trained(s: ExperimentSettings, dataset: RLDataset, skipped: int, restarts: int) -> None:
    """Refuse to end, as if all were well, a run without updates that was to train.

    Args:
        skipped: updates that were skipped because the loss or its gradient was not finite.
        restarts: environments that were replaced.

    Raises:
        NothingTrainedError: unless no training was asked for, or the data set never has any data.
    """
    if not s.train_batches_per_epoch or s.start_learning_at_epoch >= s.epochs or not dataset.can_become_ready:
        return
    if skipped:
        why = f"all {skipped} updates were skipped, because the loss or its gradient was not finite: look for huge observations or rewards"
    elif not s.collects:
        why = "this process does not collect, and there was no data of others"
    else:
        why = (
            f"no rollout ended and was saved, within train_timesteps_per_epoch={s.train_timesteps_per_epoch} steps of each actor in each of "
            f"epochs={s.epochs} epochs: collect for longer, give the environment a time limit, or save rollouts in pieces (traj_save_len)"
        )
        why += f"; {restarts} environments failed and were replaced, see the log" if restarts else ""
    raise NothingTrainedError(f"the run is over and has trained on nothing: {why}")


def wait_for_data(dataset: RLDataset, refused_timeout: float, pause: Callable[[], bool], ranks: Ranks | None = None) -> bool:
    """Wait until a data set is ready for training, in all ranks.

    While nothing is found, wait without limit, as other processes may begin to collect later. Files that are refused are a
    mistake rather than a delay: another format, another place, damage.

    Args:
        refused_timeout: seconds to wait for others while there are refused files alone.
        pause: waits a moment; whether to go on waiting, equally in all ranks.
        ranks: that wait together; None: this process alone.

    Returns:
        whether it is ready.

    Raises:
        NoReadableDataError: that time is over.
    """
    ranks = ranks or Ranks()
    since = None  # when there were refused files for the first time
    while not ranks.all(dataset.ready_for_training):
        refused, now = dataset.refused_files(), time.monotonic()
        if not refused:
            since = None
        elif since is None:
            since = now
            logger.warning(
                "no file that was found can be sampled; the run fails after %g s: %s", refused_timeout, _listed(refused)
            )
        if ranks.any(since is not None and now - since >= refused_timeout):
            raise NoReadableDataError(
                f"there is nothing to train on: this process does not collect, all {len(refused):,} files that were found were "
                f"refused, and no others came within refused_data_timeout={refused_timeout:g} seconds. Remove these files, or convert "
                f"recordings of other systems ('amago buffer import'); start processes that collect before this one:{_listed(refused)}"
            )
        if not pause():
            return False
        collection_ended(dataset)
    return True


def _listed(refused: Mapping[str, str]) -> str:
    lines = [f"\n  - {path}: {reason}" for path, reason in itertools.islice(refused.items(), _SHOWN)]
    return "".join(lines) + (f"\n  - and {len(refused) - _SHOWN:,} more" if len(refused) > _SHOWN else "")
