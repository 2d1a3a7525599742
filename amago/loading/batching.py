"""A batch of the replay buffer, read straight to where its numbers belong."""

from __future__ import annotations

import weakref
from collections import deque
from math import prod

import numpy as np
import torch
from numpy.typing import NDArray

from amago.data.batch import Batch
from amago.store.schema import Schema
from amago.store.view import Room, StoreView


class Recycler:
    """Hands out arrays, and big ones again once nothing refers to them any more.

    A block of many megabytes comes from the kernel page by page, each cleared first, and goes back when it is freed: for 24
    sequences of 129 images of 64x64x3 that takes three times as long as reading them (virtual machine, 2 cores).

    Args:
        keep: unused blocks kept at most.
        at_least: bytes of an array that is worth it.
    """

    def __init__(self, keep: int = 4, at_least: int = 1 << 20):
        self.at_least = at_least
        self._free: deque[NDArray[np.uint8]] = deque(maxlen=keep)  # full, it drops the one that was freed first

    def empty(self, shape: tuple[int, ...], dtype: np.dtype) -> NDArray:
        """An array of any content."""
        size = prod(shape) * dtype.itemsize
        if size < self.at_least:
            return np.empty(shape, dtype)
        block = self._unused(size)
        # every view of ``whole`` keeps it alive, since numpy looks no further for the owner than a buffer that is no array
        whole = np.frombuffer(memoryview(block), np.uint8)  # type: ignore[arg-type]
        weakref.finalize(whole, self._free.append, block).atexit = False
        return whole.view(dtype).reshape(shape)

    def _unused(self, size: int) -> NDArray[np.uint8]:
        for _ in range(len(self._free)):
            try:
                block = self._free.popleft()  # atomic: other threads do the same
            except IndexError:
                break
            if block.size == size:
                return block
            self._free.append(block)
        return np.empty(size, np.uint8)  # 4 MB and more: numpy asks for huge pages


_memory = Recycler()


class BatchRoom:
    """Memory for a batch, filled row by row and then made a `Batch`.

    It equals ``collate`` of the same sequences. Reading each sequence into arrays of its own and copying them costs as much again as reading
    for vectors, and several times as much for images: a block of many megabytes comes anew from the kernel, page by page.

    Args:
        schema: of all rows.
        batch, steps: B, and the most transitions of a row.
    """

    def __init__(self, schema: Schema, batch: int, steps: int):
        self.schema = schema
        dones, rews, actions = (schema.parts[i] for i in schema.transitions[:3])

        def room(part_row: tuple[int, ...], dtype: np.dtype, rows: int) -> NDArray:
            return _memory.empty((batch, rows, *part_row), dtype)

        parts = {key: schema.parts[i] for key, i in schema.obs}
        self._obs = {key: room(p.row, p.dtype, steps + 1) for key, p in parts.items()}
        self._actions, self._rews = room(actions.row, actions.dtype, steps + 1), room(rews.row, rews.dtype, steps + 1)
        self._dones = room(dones.row, dones.dtype, steps)
        self._times, self._lengths = np.zeros((batch, 1), np.int64), np.zeros((batch, 1), np.int64)

    def read(self, i: int, view: StoreView, index: int, start: int, stop: int) -> None:
        """Fill row ``i`` with transitions [start, stop) of a trajectory; errors are those of `StoreView.read`."""
        n = stop - start
        obs = {key: a[i, : n + 1] for key, a in self._obs.items()}
        row = Room(obs, self._actions[i, : n + 1], self._rews[i, : n + 1], self._dones[i, :n])
        self._times[i], self._lengths[i] = view.read_into(index, start, row), n

    def batch(self) -> Batch:
        """What was read, padded with zeros to the longest row."""
        longest = int(self._lengths.max())
        steps = np.arange(longest + 1)
        mask = steps <= self._lengths  # (B, L + 1)
        obs = {key: _cut(a, longest + 1, mask) for key, a in self._obs.items()}
        actions, rews = _cut(self._actions, longest + 1, mask), _cut(self._rews, longest + 1, mask)
        vectors = self.schema.action_spec.to_vector(actions)
        vectors[~mask] = 0.0
        rl2s = np.concatenate((rews, vectors), axis=-1, dtype=np.float32)
        rl2s[self._times[:, 0] == 0, 0] = 0.0  # nothing came with the first observation of a rollout
        arrays = {
            "rl2s": rl2s,
            "rews": np.ascontiguousarray(rews[:, 1:]),
            "dones": _cut(self._dones, longest, mask[:, 1:]),
            "actions": np.ascontiguousarray(vectors[:, 1:]),
            "time_idxs": np.where(mask, self._times + steps, 0)[..., None],
            "mask": mask[..., None],
        }
        tensors = {name: torch.from_numpy(a) for name, a in arrays.items()}
        return Batch(obs={key: torch.from_numpy(a) for key, a in obs.items()}, **tensors)


def _cut(a: NDArray, steps: int, mask: NDArray[np.bool_]) -> NDArray:
    """The first ``steps`` of each row, zeros where ``mask`` is False."""
    out = np.ascontiguousarray(a[:, :steps])
    if not mask.all():
        out[~mask] = 0
    return out
