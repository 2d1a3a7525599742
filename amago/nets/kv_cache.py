"""Keys and values that a transformer remembers while it acts: a ring buffer for each actor.

Each row of the batch has its own length, so actors reset one by one. Token n of a row lies in slot n mod S: the cost of a step
does not depend on the length of the episode, and nothing is shifted. With K sinks, the first K tokens of an episode keep slots
0 to K - 1, and the ring is the other S - K slots.

Shapes: N layers, B rows, H heads, S slots, D numbers a head; P <= S is the prefix of slots in use.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from amago.compat.hidden_state import Cache, Shown
from amago.nets.utils import capturing


@dataclass(eq=False)
class CacheSlots:
    """The slots of the cache that the current step reads, and the age of each.

    Attributes:
        lengths: (B,) tokens of each row since its reset, the current one included.
        capacity: S.
        prefix: P; slots 0 to P - 1 are read, the others are empty in every row.
        full: every slot of the prefix holds a token in every row.
        sinks: K.
    """

    lengths: Tensor
    capacity: int
    prefix: int
    full: bool
    sinks: int = 0

    @cached_property
    def newest(self) -> Tensor:
        """(B,) int64: the slot of the current token."""
        token = self.lengths - 1
        if not self.sinks:
            return token % self.capacity
        ring = self.sinks + (token - self.sinks) % (self.capacity - self.sinks)
        return torch.where(token < self.sinks, token, ring)

    @cached_property
    def ages(self) -> Tensor:
        """(B, P) int64: steps since each slot was written, 0 for the current token, -1 for an empty slot."""
        slot = torch.arange(self.prefix, device=self.lengths.device)
        since = self.lengths.unsqueeze(1) - 1 - slot
        age = since % (self.capacity - self.sinks)
        if self.sinks:
            age = torch.where(slot < self.sinks, since, age)
        return torch.where(since >= 0, age, -1)

    @property
    def places(self) -> Tensor:
        """(B, P) int64: the index in its episode of each slot's token, from 0; undefined where `ages` is -1."""
        return self.lengths.unsqueeze(1) - 1 - self.ages

    @cached_property
    def used(self) -> Tensor:
        """(B, 1, 1, P) float32, to be added to scores: 0 where a slot holds a token, -inf where it is empty."""
        empty = torch.arange(self.prefix, device=self.lengths.device) >= self.lengths.unsqueeze(1)
        return torch.zeros(empty.shape, device=empty.device).masked_fill_(empty, -torch.inf)[:, None, None]

    @cached_property
    def rows(self) -> Tensor:
        """(B,) 0, 1, ..."""
        return torch.arange(len(self.lengths), device=self.lengths.device)


class KVCache:
    """Keys and values of all layers and rows, written in place; for N, B, H, S, D and K sinks, in this order.

    Attributes:
        keys, values: (N, B, H, S, D).
        lengths: (B,) int64, tokens of each row since its reset.
        host_lengths: the same numbers in NumPy, or more where a GPU decided which rows to reset. The host needs them each step, and
            reading ``lengths`` would wait for the GPU.

    Raises:
        ValueError: ``sinks`` is not in [0, slots).
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
        self.keys, self.values = torch.zeros((2, n_layers, batch_size, n_heads, slots, head_dim), device=device, dtype=dtype)
        self.lengths = torch.zeros(batch_size, device=device, dtype=torch.int64)
        self.host_lengths, self._least = np.zeros((2, batch_size), dtype=np.int64)  # at most, and at least, so many tokens
        self._shown: list[Shown] = []  # copies that may differ from the cache; slices share the list

    @property
    def batch_size(self) -> int:
        """B."""
        return self.lengths.shape[0]

    @property
    def capacity(self) -> int:
        """S."""
        return self.keys.shape[3]

    def advance(self) -> CacheSlots:
        """Add one token to every row. Each layer then calls `write` with its keys and values."""
        if self._shown:
            self._take_back()
        self.host_lengths += 1
        self._least += 1
        if capturing(self.lengths):  # a graph reads every slot in each step, and does not count here
            self.host_lengths[:], self._least[:] = self.capacity, 0
        self.lengths += 1
        prefix = min(int(self.host_lengths.max()), self.capacity)
        full = int(self._least.min()) >= prefix
        return CacheSlots(self.lengths.clone(), self.capacity, prefix, full, self.sinks)

    def write(self, layer: int, k: Tensor, v: Tensor, slots: CacheSlots) -> tuple[Tensor, Tensor]:
        """Store the current token's k and v, (B, H, 1, D), and return the layer's keys and values (B, H, P, D): views, or copies
        where gradients are on (the graph of a step would not survive the writes of the next)."""
        keys, values = self.keys[layer], self.values[layer]
        for buffer, new in ((keys, k), (values, v)):
            buffer[slots.rows, :, slots.newest] = new[:, :, 0].detach().to(buffer.dtype)
        keys, values = keys[:, :, : slots.prefix], values[:, :, : slots.prefix]
        return (keys.clone(), values.clone()) if torch.is_grad_enabled() else (keys, values)

    def reset(self, dones: NDArray[np.bool_] | Tensor) -> None:
        """Empty the rows where ``dones`` (B,) is True, or the rows in a list of integers. Other rows are not touched. The host does not
        wait for a tensor on a GPU."""
        if self._shown:
            self._take_back()
        if isinstance(dones, Tensor) and dones.is_cuda and dones.dtype == torch.bool and dones.shape == self.lengths.shape:
            self._least[:] = 0
            self.lengths.masked_fill_(dones, 0)
            return
        host = dones.detach().cpu().numpy() if isinstance(dones, Tensor) else np.asarray(dones)
        if np.issubdtype(host.dtype, np.integer):
            host = np.isin(np.arange(self.batch_size), host)
        if host.shape != (self.batch_size,):
            raise ValueError(f"dones must have shape ({self.batch_size},), got {host.shape}")
        host = host.astype(bool)
        if not host.any():
            return
        self.host_lengths[host] = self._least[host] = 0
        rows = torch.from_numpy(host)
        rows = rows.pin_memory() if self.lengths.is_cuda else rows
        self.lengths.masked_fill_(rows.to(self.lengths.device, non_blocking=True), 0)

    def slice(self, start: int, stop: int) -> KVCache:
        """Rows ``start`` to ``stop`` - 1 as a cache that shares this one's storage."""
        if not 0 <= start < stop <= self.batch_size:
            raise ValueError(f"rows {start}:{stop} are not within a batch of {self.batch_size}")
        view = copy.copy(self)
        view.keys, view.values = self.keys[:, start:stop], self.values[:, start:stop]
        view.lengths, view.host_lengths = self.lengths[start:stop], self.host_lengths[start:stop]
        view._least = self._least[start:stop]
        return view

    def tensors(self) -> dict[str, Tensor]:
        """The tensors that an exported step takes and returns (`TracedCache`)."""
        return {"keys": self.keys, "values": self.values, "lengths": self.lengths}

    def ages(self) -> Tensor:
        """(B, S) int64: number of tokens after the token of each slot, -1 for an empty slot."""
        return CacheSlots(self.lengths, self.capacity, self.capacity, full=False, sinks=self.sinks).ages

    def set_lengths(self, lengths: Tensor) -> None:
        """Let row i hold ``lengths[i]`` tokens, at most S, token n in slot n."""
        self.lengths.copy_(lengths)
        self.host_lengths[:] = self._least[:] = lengths.cpu().numpy()

    def shown(self) -> Shown:
        """A copy in the layout of the original system; changes of the copy are copied back at the next use of the cache."""
        for shown in self._shown:
            if shown.cache is self:
                return shown
        if self._shown:  # of a slice that overlaps with this one
            self._take_back()
        self._shown.append(Shown(self))
        return self._shown[-1]

    def _take_back(self) -> None:
        while self._shown:
            self._shown.pop().write_back()

    @property
    def key_cache(self) -> Cache:
        """The keys in the layout of the original system."""
        return Cache.of(self, "keys")

    @property
    def val_cache(self) -> Cache:
        """The values in the layout of the original system."""
        return Cache.of(self, "values")

    @property
    def seq_lens(self) -> Tensor:
        """(B,) int32: tokens of each row in `key_cache` and `val_cache`."""
        return self.shown().seq_lens

    @seq_lens.setter
    def seq_lens(self, lengths: Tensor) -> None:
        self.shown().seq_lens.copy_(lengths)

    @property
    def max_seq_len(self) -> int:
        """S."""
        return self.capacity

    def update(self) -> None:
        """Count a token that was written into `key_cache` and `val_cache` from outside; a step does so by itself."""
        self.shown().update()


class TracedCache(KVCache):
    """A cache as a function of tensors, traceable by ``torch.export``: ``tensors``, of `KVCache.tensors`, stay as they are."""

    def __init__(self, tensors: dict[str, Tensor], sinks: int) -> None:
        self.layers = [list(tensors[name].unbind(0)) for name in ("keys", "values")]
        self.lengths, self.sinks = tensors["lengths"], sinks

    def advance(self) -> CacheSlots:
        """Read all slots, because the host has no count of the slots in use."""
        self.lengths = self.lengths + 1
        slots = self.layers[0][0].shape[2]
        return CacheSlots(self.lengths, slots, slots, full=False, sinks=self.sinks)

    def write(self, layer: int, k: Tensor, v: Tensor, slots: CacheSlots) -> tuple[Tensor, Tensor]:
        here = (torch.arange(slots.capacity, device=k.device) == slots.newest.unsqueeze(1))[:, None, :, None]
        for buffers, new in zip(self.layers, (k, v)):
            buffers[layer] = torch.where(here, new.to(buffers[layer].dtype), buffers[layer])
        return self.layers[0][layer], self.layers[1][layer]

    def tensors(self) -> dict[str, Tensor]:
        keys, values = (torch.stack(buffers) for buffers in self.layers)
        return {"keys": keys, "values": values, "lengths": self.lengths}


class TformerHiddenState(KVCache):
    """The hidden state of `amago.nets.traj_encoders.TformerTrajEncoder`. The constructor copies keys and values in the layout of
    the original system, which then show this state, and the tokens of each row ``seq_lens`` (B,)."""

    def __init__(self, key_cache: Cache, val_cache: Cache, seq_lens: Tensor) -> None:
        layers, rows, slots, heads, width = key_cache.data.shape
        super().__init__(layers, rows, heads, slots, width, key_cache.data.device, key_cache.data.dtype)
        shown = self.shown()
        shown.keys.copy_(key_cache.data)
        shown.values.copy_(val_cache.data)
        shown.seq_lens.copy_(seq_lens)
        key_cache.belong(self, "keys")
        val_cache.belong(self, "values")

    @classmethod
    def empty(cls, *args: Any, **kwargs: Any) -> TformerHiddenState:
        """One without tokens; arguments as of `KVCache`."""
        state = object.__new__(cls)
        KVCache.__init__(state, *args, **kwargs)
        return state

    @property
    def n_layers(self) -> int:
        """N."""
        return len(self.keys)

    def __getitem__(self, layer: int) -> tuple[Tensor, Tensor, Tensor]:
        """Keys and values of a layer, (B, S, H, D), and `seq_lens`."""
        return self.key_cache.data[layer], self.val_cache.data[layer], self.seq_lens
