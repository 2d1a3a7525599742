"""Whole updates as CUDA graphs (`amago.Experiment.cuda_graphs`): the host starts one graph in place of each kernel."""

from __future__ import annotations

import copy
import logging
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from amago.data.batch import Batch
from amago.run.compiling import bucket

logger = logging.getLogger(__name__)
WARM_UP = 3
"""Updates of each shape before one is captured: libraries and compilers prepare themselves in the first ones."""
Update = Callable[[Batch], dict[str, Any]]


class UpdateGraphs:
    """An update as CUDA graphs, one for each shape of batches.

    The first updates of a shape are ordinary ones, on another stream. If a capture fails, a line is logged, and all updates are ordinary ones
    from then on.

    Args:
        longest: length of the longest sequences; shorter ones are padded to it, or to a half, a quarter or an eighth.
    """

    def __init__(self, longest: int) -> None:
        self._longest, self._failed = longest, False
        self._made: dict[tuple[int, ...], _Graph] = {}
        self._ordinary: Counter[tuple[int, ...]] = Counter()

    def __call__(self, update: Update, batch: Batch) -> dict[str, Any]:
        """``update(batch)``, or the replay of a captured one: tensors of the metrics are new, other values those of the capture."""
        batch = batch.lengthened(bucket(batch.rews.shape[1], self._longest))
        shape = tuple(batch.rews.shape[:2])
        if self._failed:
            return update(batch)
        if self._ordinary[shape] < WARM_UP:
            self._ordinary[shape] += 1
            return _on_a_side_stream(update, batch)
        if shape not in self._made:
            try:
                self._made[shape] = _Graph(update, batch)
            except torch.OutOfMemoryError:
                raise
            except Exception as err:
                self._failed = True
                line = f"{type(err).__name__}: {err}".splitlines()[0]
                logger.warning("updates are not replayed as CUDA graphs, since a capture has failed: %s", line)
                return update(batch)
        return self._made[shape](batch)


class _Graph:
    """An update for batches of one shape."""

    def __init__(self, update: Update, batch: Batch) -> None:
        self._batch = copy.copy(batch).map(torch.clone)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            metrics = update(self._batch)
            self._names = [name for name, value in metrics.items() if isinstance(value, Tensor)]
            self._values = torch.stack([metrics[name].detach().float().reshape(()) for name in self._names])
        self._constant = {name: value for name, value in metrics.items() if not isinstance(value, Tensor)}

    def __call__(self, batch: Batch) -> dict[str, Any]:
        torch._foreach_copy_(self._batch.tensors(), batch.tensors())
        self._graph.replay()
        return self._constant | dict(zip(self._names, self._values.clone().unbind()))


def _on_a_side_stream(update: Update, batch: Batch) -> dict[str, Any]:
    """As PyTorch asks before a capture: what autograd keeps between updates must not belong to the stream that waits for the graph."""
    present, side = torch.cuda.current_stream(), torch.cuda.Stream()
    side.wait_stream(present)
    with torch.cuda.stream(side):
        metrics = update(batch)
    present.wait_stream(side)
    return metrics
