"""The keys and values of a transformer that is exported: a cache that never writes in place."""

from __future__ import annotations

import torch
from torch import Tensor

from amago.nets.kv_cache import CacheSlots


class TensorCache:
    """`amago.nets.kv_cache.KVCache` as a function of tensors, traceable by ``torch.export``: arguments stay as they are.

    Args:
        keys, values: (N, B, H, S, D) of N layers, B rows, H heads, S slots and D numbers a head.
        lengths: (B,) int64, tokens of each row since its reset.
        sinks: K, slots that keep the first tokens of an episode.
    """

    def __init__(self, keys: Tensor, values: Tensor, lengths: Tensor, sinks: int) -> None:
        self.keys, self.values, self.lengths, self.sinks = list(keys.unbind(0)), list(values.unbind(0)), lengths, sinks

    @property
    def batch_size(self) -> int:
        """B."""
        return self.lengths.shape[0]

    def advance(self) -> CacheSlots:
        """Add one token to every row. All slots are read, because the host does not know how many are in use."""
        self.lengths = self.lengths + 1
        slots = self.keys[0].shape[2]
        return CacheSlots(self.lengths, slots, slots, full=False, sinks=self.sinks)

    def write(self, layer: int, k: Tensor, v: Tensor, slots: CacheSlots) -> tuple[Tensor, Tensor]:
        """Store the current token's k and v, (B, H, 1, D). Returns keys and values of the layer, (B, H, S, D) each."""
        here = (torch.arange(slots.capacity, device=k.device) == slots.newest.unsqueeze(1))[:, None, :, None]
        for buffers, new in ((self.keys, k), (self.values, v)):
            buffers[layer] = torch.where(here, new.to(buffers[layer].dtype), buffers[layer])
        return self.keys[layer], self.values[layer]

    def tensors(self) -> dict[str, Tensor]:
        """Keys, values and lengths, as arguments of a new cache."""
        return {"keys": torch.stack(self.keys), "values": torch.stack(self.values), "lengths": self.lengths}
