"""The memory of a transformer that acts, as the original system lays it out.

Fact served: a hidden state there has ``key_cache.data`` and ``val_cache.data``, (layers, B, max_seq_len, heads, head_dim) with the oldest
token first and NaN where unused, and ``seq_lens``, (B,) int32. Clients read and write them between steps. `amago.nets.kv_cache.KVCache` is
a ring buffer: tensors that a client reads are copied out of it, and copied back before the cache is used next.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class Shown:
    """A copy of a cache in the original's layout.

    Args:
        cache: a `amago.nets.kv_cache.KVCache`.

    Attributes:
        keys, values: (layers, B, S, heads, head_dim), oldest token first, NaN where unused.
        seq_lens: (B,) int32. At most S - 1: the slot of the next token is free, so the oldest token of a full ring is left out, which
            that token would replace.
    """

    def __init__(self, cache: Any) -> None:
        self.cache = cache
        slots, lengths, device = cache.capacity, cache.lengths, cache.keys.device
        place = torch.arange(slots, device=device)
        ages = cache.ages()
        order = ages.argsort(dim=1, descending=True, stable=True)
        if slots > 1:  # a full ring: the oldest token that is no sink goes to the end
            without = torch.cat(
                (order[:, : cache.sinks], order[:, cache.sinks + 1 :], order[:, cache.sinks : cache.sinks + 1]), dim=1
            )
            order = torch.where((lengths >= slots).unsqueeze(1), without, order)
        self.seq_lens = lengths.clamp(max=slots - 1).int()
        rows = torch.arange(len(lengths), device=device).unsqueeze(1)
        unused = (place >= self.seq_lens.unsqueeze(1))[None, :, :, None, None]
        self.keys, self.values = (
            x.transpose(2, 3)[:, rows, order].masked_fill(unused, torch.nan) for x in (cache.keys, cache.values)
        )

    def write_back(self) -> None:
        """Write the copy's contents back into the cache.

        Raises:
            ValueError: a client has set a length that the cache has no room for.
        """
        cache, lengths = self.cache, self.seq_lens.long()
        if int(lengths.min()) < 0 or int(lengths.max()) > cache.capacity:
            raise ValueError(f"seq_lens must be from 0 to {cache.capacity} (max_seq_len), got {self.seq_lens.tolist()}")
        used = (torch.arange(cache.capacity, device=lengths.device) < lengths.unsqueeze(1))[None, :, :, None, None]
        for kept, shown in ((cache.keys, self.keys), (cache.values, self.values)):
            kept.copy_(torch.where(used, shown, 0.0).transpose(2, 3))
        cache.set_lengths(lengths)

    def update(self) -> None:
        """Count the token that a client has written at ``seq_lens`` in every row; a full row drops its oldest token."""
        self.seq_lens += 1
        full = self.seq_lens >= self.keys.shape[2]
        for data in (self.keys, self.values):
            rolled = data.roll(-1, dims=2)
            rolled[:, :, -1] = torch.nan
            data.copy_(torch.where(full[None, :, None, None, None], rolled, data))
        self.seq_lens[full] -= 1


class Cache:
    """The keys, or the values, of a hidden state: at first a tensor that is empty, until a `TformerHiddenState` is made of it."""

    def __init__(
        self,
        device: torch.device | str,
        dtype: torch.dtype,
        layers: int,
        batch_size: int,
        max_seq_len: int,
        n_heads: int,
        head_dim: int,
    ) -> None:
        sizes = (layers, batch_size, max_seq_len, n_heads, head_dim)
        self._own = torch.full(sizes, torch.nan, dtype=dtype, device=device)
        self._state: Any = None

    @classmethod
    def of(cls, state: object, name: str) -> Cache:
        """The ``name``, "keys" or "values", of a `amago.nets.kv_cache.KVCache`."""
        cache = object.__new__(cls)
        cache.belong(state, name)
        return cache

    def belong(self, state: object, name: str) -> None:
        """Show the tensor of a hidden state from now on."""
        self._state, self._name = state, name

    @property
    def data(self) -> Tensor:
        """(layers, B, max_seq_len, heads, head_dim), oldest token first, NaN where unused. Changes count from the next step on;
        read it again after that."""
        return self._own if self._state is None else vars(self._state.shown())[self._name]

    @data.setter
    def data(self, new: Tensor) -> None:
        self.data.copy_(new)

    @property
    def max_seq_len(self) -> int:
        """Tokens that fit."""
        return int(self.data.shape[2])
