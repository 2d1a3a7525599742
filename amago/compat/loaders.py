"""Loaders of batches of a client's own.

Fact served: ``Experiment.init_dloaders`` is overridden and sets ``train_dloader`` to, or returns, any iterable of batches, such as a
`torch.utils.data.DataLoader` that was prepared by Accelerate; each epoch trains on all that one pass over it yields.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sized
from typing import Any

import torch

from amago.data.batch import Batch
from amago.loading import SequenceLoader


class ForeignLoader:
    """An iterable of batches, with what a run needs of a `SequenceLoader`. Which batches it yields is in no checkpoint.

    Args:
        batches: yields batches. If it has a length, an epoch is one pass over it; else the number of batches of the experiment.
        device: batches are moved there.

    Attributes:
        next_batch: batches that were taken, ever.
        seed: of the run; not used.
    """

    def __init__(self, batches: Iterable[Batch], device: torch.device | str):
        self.given, self.device = batches, torch.device(device)
        self.next_batch = self.seed = 0
        self.dataset: Any = getattr(batches, "dataset", None)

    def count(self, left: int, planned: int) -> int:
        """How many batches an epoch still has.

        Args:
            left: of those that the experiment plans.
            planned: that the experiment plans for an epoch.
        """
        return left if not isinstance(self.given, Sized) else max(0, len(self.given) - (planned - left))

    def batches(self, count: int) -> Iterator[Batch]:
        """The first ``count`` batches of a new pass, on the device."""
        for batch in itertools.islice(self.given, count):
            self.next_batch += 1
            yield batch if batch.rl2s.device == self.device else batch.to(self.device)

    def close(self) -> None:
        """Nothing is open."""


def as_loader(made: Any, device: torch.device | str) -> SequenceLoader | ForeignLoader:
    """What a run draws batches from.

    Raises:
        TypeError: it cannot be iterated over.
    """
    if isinstance(made, SequenceLoader | ForeignLoader):
        return made
    if not isinstance(made, Iterable):
        raise TypeError(f"init_dloaders must make an iterable of batches, but train_dloader is {made!r}")
    return ForeignLoader(made, device)
