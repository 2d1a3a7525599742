"""The memory of a transformer that acts: a ring of keys and values for each actor.

Every row of the batch has a length of its own, so actors reset one by one; a step costs the same however long the episode
is, and nothing is shifted: token n of a row lies in slot n mod S. Where the first K tokens of an episode are to stay (K sinks), they
keep slots 0 to K - 1, and the ring is the other S - K.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


class CacheSlots:
    """Which slots of the cache the current step reads, and how old each is.

    Attributes:
        lengths: (B,) tokens of each row since its reset, the current one included.
        capacity: S, slots of the ring.
        prefix: P, slots 0 to P - 1 are read; the others are empty in every row.
        full: every slot of the prefix holds a token in every row.
        sinks: K, slots at the front that are never written again.
    """

    def __init__(self, lengths: Tensor, capacity: int, prefix: int, full: bool, newest: int | None, sinks: int = 0) -> None:
        self.lengths, self.capacity, self.prefix, self.full, self.sinks = lengths, capacity, prefix, full, sinks
        self._newest = newest

    @property
    def newest(self) -> int | None:
        """The slot of the current token where it is one slot for all rows, else None."""
        return self._newest

    @cached_property
    def newest_per_row(self) -> Tensor:
        """(B,) slot of the current token."""
        return _slot_of(self.lengths - 1, self.capacity, self.sinks)

    @cached_property
    def ages(self) -> Tensor:
        """(B, P) int64: steps since each slot was written, 0 for the current token, -1 for a slot that holds nothing."""
        slot = torch.arange(self.prefix, device=self.lengths.device)
        since = self.lengths.unsqueeze(1) - 1 - slot
        age = since % (self.capacity - self.sinks)
        if self.sinks:
            age = torch.where(slot < self.sinks, since, age)
        return torch.where(since >= 0, age, -1)

    @cached_property
    def emptiness(self) -> Tensor | None:
        """(B, 1, 1, P) float32: 0 for a slot that holds a token, -inf for one that holds nothing; None if all hold one."""
        if self.full:
            return None
        empty = torch.arange(self.prefix, device=self.lengths.device) >= self.lengths.unsqueeze(1)
        return torch.zeros(empty.shape, device=empty.device).masked_fill_(empty, -torch.inf)[:, None, None]

    @cached_property
    def rows(self) -> Tensor:
        """(B,) 0, 1, ..."""
        return torch.arange(len(self.lengths), device=self.lengths.device)

    @property
    def places(self) -> Tensor:
        """(B, P) int64: each slot's token is which of its episode, from 0; meaningless where `ages` is -1."""
        return self.lengths.unsqueeze(1) - 1 - self.ages


def _slot_of(token: Any, capacity: int, sinks: int) -> Any:
    """The slot of a row's token of this number, from 0 (arrays and tensors alike)."""
    if not sinks:
        return token % capacity
    ring = sinks + (token - sinks) % (capacity - sinks)
    return token * (token < sinks) + ring * (token >= sinks)


class KVCache:
    """Keys and values of N layers for B rows, written in place.

    Args:
        n_layers, batch_size, n_heads, slots, head_dim: N, B, H, S, D of the buffers.
        device, dtype: where they are and of what kind.
        sinks: K of the slots keep the first K tokens since a reset.

    Attributes:
        keys, values: (N, B, H, S, D).
        pairs: (2, N, B, H, S, D), the storage of both.

    Raises:
        ValueError: the sinks leave no slot for the others.
    """

    def __init__(
        self,
        n_layers: int,
        batch_size: int,
        n_heads: int,
        slots: int,
        head_dim: int,
        device: torch.device | str,
        dtype: torch.dtype = torch.float32,
        sinks: int = 0,
    ) -> None:
        if not 0 <= sinks < slots:
            raise ValueError(f"sinks must be in [0, slots), got sinks={sinks}, slots={slots}")
        self.sinks = sinks
        self.pairs = torch.zeros((2, n_layers, batch_size, n_heads, slots, head_dim), device=device, dtype=dtype)
        self.keys, self.values = self.pairs.unbind(0)
        self.lengths = torch.zeros(batch_size, device=device, dtype=torch.int64)
        # the same numbers on the host, so that no step waits for the device to learn how much of the ring is in use
        self.host_lengths: NDArray[np.int64] = np.zeros(batch_size, dtype=np.int64)

    @property
    def batch_size(self) -> int:
        return self.keys.shape[1]

    @property
    def capacity(self) -> int:
        """S."""
        return self.keys.shape[3]

    def advance(self) -> CacheSlots:
        """Make room for one more token in every row; each layer then calls `write`."""
        self.host_lengths += 1
        self.lengths += 1
        shortest, longest = int(self.host_lengths.min()), int(self.host_lengths.max())
        prefix = min(longest, self.capacity)
        newest = _slot_of(self.host_lengths - 1, self.capacity, self.sinks)
        same = int(newest[0]) if (newest == newest[0]).all() else None
        return CacheSlots(self.lengths.clone(), self.capacity, prefix, shortest >= prefix, same, self.sinks)

    def write(self, layer: int, k: Tensor, v: Tensor, slots: CacheSlots) -> tuple[Tensor, Tensor]:
        """Put the current token's k and v (B, H, 1, D) in their slots.

        Returns:
            All keys and values of the layer up to the prefix, (B, H, P, D): views, or copies where gradients are on (the graph
            of a step would not survive the writes of the next).
        """
        keys, values = self.write_pair(layer, torch.cat((k, v), dim=2).detach().transpose(1, 2), slots)
        return (keys.clone(), values.clone()) if torch.is_grad_enabled() else (keys, values)

    def write_pair(self, layer: int, pair: Tensor, slots: CacheSlots) -> tuple[Tensor, Tensor]:
        """Put the current token's key and value, (B, 2, H, D), in their slots.

        Returns:
            All keys and values of the layer up to the prefix, (B, H, P, D): views.
        """
        buffer = self.pairs[:, layer]
        if slots.newest is not None:
            buffer[:, :, :, slots.newest] = pair.transpose(0, 1)
        else:
            buffer[:, slots.rows, :, slots.newest_per_row] = pair.to(buffer.dtype)  # the indexed dimension comes first
        keys, values = buffer[:, :, :, : slots.prefix].unbind(0)
        return keys, values

    def reset(self, dones: NDArray[np.bool_] | Tensor) -> None:
        """Forget everything in the rows where ``dones`` (B,) is True. Other rows are not touched."""
        host = dones.detach().cpu().numpy() if isinstance(dones, Tensor) else np.asarray(dones)
        host = host.astype(bool)
        if host.shape != (self.batch_size,):
            raise ValueError(f"dones must have shape ({self.batch_size},), got {host.shape}")
        if not host.any():
            return
        self.host_lengths[host] = 0
        self.lengths.masked_fill_(torch.from_numpy(host).to(self.lengths.device), 0)

    def slice(self, start: int, stop: int) -> KVCache:
        """Rows ``start`` to ``stop`` - 1 as a cache that shares our storage: what is written to one is in the other."""
        if not 0 <= start < stop <= self.batch_size:
            raise ValueError(f"rows {start}:{stop} are not within a batch of {self.batch_size}")
        view = object.__new__(KVCache)
        view.sinks = self.sinks
        view.pairs = self.pairs[:, :, start:stop]
        view.keys, view.values = view.pairs.unbind(0)
        view.lengths, view.host_lengths = self.lengths[start:stop], self.host_lengths[start:stop]
        return view
