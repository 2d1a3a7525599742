"""A batch of the replay buffer, read from the files directly into the arrays of the batch."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from amago import config
from amago.data.batch import Batch, sources_of
from amago.data.extras import ExtraField
from amago.data.trajectory import MAGIC_PAD_VAL, rl2
from amago.loading.recycler import Recycler
from amago.store.schema import Schema
from amago.store.view import SliceBuffers, StoreView


@cache
def _allocator() -> Callable[[tuple[int, ...], np.dtype], NDArray]:
    return Recycler().empty if config.fast_paths() else np.empty


class BatchBuffers:
    """Arrays for a batch, filled sequence by sequence and then made a `Batch`.

    The result equals ``collate`` of the same sequences. Reading each sequence into arrays of its own and copying them would
    take about twice as long for vectors, and several times as long for images.

    Args:
        schema: of the files of all sequences.
        batch, steps: B, and the most transitions of a sequence.
        extra_fields: the declared extra fields; sequences from files without them get their defaults.
    """

    def __init__(self, schema: Schema, batch: int, steps: int, extra_fields: tuple[ExtraField, ...] = ()):
        self.schema, empty = schema, _allocator()
        self._slots = schema.slots(extras=extra_fields)
        self._arrays = [empty((batch, s.take(steps), *s.row), s.dtype) for s in self._slots]
        self._sliced = [(a, s.each, s.more) for s, a in zip(self._slots, self._arrays)]
        self._extra_order = [x.name for x in extra_fields]
        self.sources: list[Any] = []  # of the sequences read, in their order
        self._times, self._lengths = np.zeros((batch, 1), np.int64), np.zeros((batch, 1), np.int64)

    def read(self, i: int, view: StoreView, index: int, start: int, stop: int) -> None:
        """Fill sequence ``i`` with transitions [start, stop) of a trajectory; errors are those of `StoreView.read`."""
        n = stop - start
        parts = [a[i, : n * each + more] for a, each, more in self._sliced]
        self._times[i], self._lengths[i] = view.read_into(index, start, SliceBuffers(self._slots, parts, n)), n

    def batch(self) -> Batch:
        """What was read, padded to the longest sequence as `amago.data.batch.collate` does."""
        longest = int(self._lengths.max())
        steps = np.arange(longest + 1)
        mask = steps <= self._lengths  # (B, L + 1)
        groups: dict[str, dict[str, NDArray]] = {"obs": {}, "extras": {}, "": {}}
        for slot, a in zip(self._slots, self._arrays):
            rows = slot.take(longest)
            real = np.ones_like(mask[:, :1]) if slot.rows == "1" else mask[:, longest + 1 - rows :]
            groups[slot.group][slot.key] = _cut(a, rows, real, slot.pad)
        found = groups[""]
        actions, rews = found.pop("actions"), found.pop("rews")  # with what came before the first observation
        vectors = self.schema.action_spec.to_vector(actions)
        vectors[~mask] = MAGIC_PAD_VAL
        rl2s = rl2(rews, vectors)
        rl2s[self._times[:, 0] == 0, 0] = 0.0  # nothing comes before the first observation of a rollout
        found |= {
            "rl2s": rl2s,
            "rews": np.ascontiguousarray(rews[:, 1:]),
            "actions": np.ascontiguousarray(vectors[:, 1:]),
            "time_idxs": np.where(mask, self._times + steps, int(MAGIC_PAD_VAL))[..., None],
            "mask": mask[..., None],
        }
        tensors = {name: torch.from_numpy(a) for name, a in found.items()}
        obs = {key: torch.from_numpy(a) for key, a in groups["obs"].items()}
        extras = {key: torch.from_numpy(groups["extras"][key]) for key in self._extra_order}
        return Batch(obs=obs, extras=extras, sources=sources_of(self.sources), **tensors)


def _cut(a: NDArray, rows: int, mask: NDArray[np.bool_], pad: Any) -> NDArray:
    """The first ``rows`` of each sequence, with ``pad`` where ``mask`` is False."""
    out = np.ascontiguousarray(a[:, :rows])
    if not mask.all():
        out[~mask] = pad
    return out
