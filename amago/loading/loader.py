"""Batches read ahead by threads, reproducible whatever the number of threads."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import torch

from amago.data.batch import Batch
from amago.loading.dataset import RLDataset


class SequenceLoader:
    """Yields batches of random training sequences.

    Batch number n is drawn with a random stream of its own, made from (seed, rank, n). Therefore threads may read ahead in
    any order, and a resumed run that sets ``next_batch`` draws what it would have drawn.

    Threads rather than processes: reading releases the interpreter, an index that changes after each collection phase is
    shared rather than copied, and nothing is started again for each epoch.

    Args:
        dataset: where sequences come from; must be configured.
        batch_size: sequences in a batch.
        workers: reading threads; 0 reads when asked.
        seed: of the random streams.
        rank: index of this process among those that train together.
        device: batches are copied there.
        length: batches of one iteration; None: as many as the data set has items.
    """

    def __init__(
        self,
        dataset: RLDataset,
        batch_size: int,
        workers: int = 0,
        seed: int = 0,
        rank: int = 0,
        device: torch.device | str = "cpu",
        length: int | None = None,
    ):
        if batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {batch_size}")
        if workers < 0:
            raise ValueError(f"workers must not be negative, got {workers}")
        self.dataset, self.batch_size, self.seed, self.rank = dataset, batch_size, seed, rank
        self.device = torch.device(device)
        self.next_batch, self.workers, self.length = 0, workers, length
        threads = min(workers, os.cpu_count() or 1)
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="amago-loader") if threads else None
        self._ahead = 2 * threads

    def draw(self, number: int) -> Batch:
        """Batch ``number`` in this process's sequence, in host memory."""
        rng = np.random.default_rng(np.random.SeedSequence((self.seed, self.rank, number)))
        batch = self.dataset.sample_batch(rng, self.batch_size)
        return batch.pin_memory() if self.device.type == "cuda" else batch

    def __len__(self) -> int:
        """Batches of one iteration: those of an epoch, as the data set was configured."""
        self.dataset.check_configured()
        return self.dataset.items_per_epoch // self.batch_size if self.length is None else self.length

    def __iter__(self) -> Iterator[Batch]:
        """The next ``len(self)`` batches, on the device."""
        return self.batches(len(self))

    def batches(self, count: int) -> Iterator[Batch]:
        """The next ``count`` batches, on the device. Stopping early counts only those that were taken."""
        first, last = self.next_batch, self.next_batch + count
        queue: deque[Future[Batch]] = deque()
        submitted = first
        try:
            for number in range(first, last):
                if self._pool is None:
                    batch = self.draw(number)
                else:
                    while submitted < min(last, number + self._ahead):
                        queue.append(self._pool.submit(self.draw, submitted))
                        submitted += 1
                    batch = queue.popleft().result()
                self.next_batch = number + 1
                yield batch if self.device.type == "cpu" else batch.to(self.device, non_blocking=True)
        finally:
            for future in queue:
                future.cancel()

    def close(self) -> None:
        """Stop the threads; twice is fine."""
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)
            self._pool, self._ahead = None, 0
