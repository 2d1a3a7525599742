"""Attention kernels in the form of the original system, and ours in both.

Fact served: a kernel there is a `SelfAttention` whose ``forward(qkv, key_cache=None, val_cache=None, cache_seqlens=None)`` maps
(B, L, 3, H, D) to (B, L, H, D); in step mode it also writes the keys and values of the token, L == 1, into the caches (B, S, H, D) at
``cache_seqlens`` (B,). Kernels here have queries, keys and values apart, heads first, and a ring buffer. `both_forms` is applied to the
``forward`` of every kernel when its class is defined, so that each can be called, and overridden, either way.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from amago.nets.kv_cache import CacheSlots

Forward = Callable[..., Tensor]


def both_forms(forward: Forward) -> Forward:
    """``forward`` of a kernel, to be called with (q, k, v, slots, real) or with (qkv, key_cache, val_cache, cache_seqlens)."""
    theirs = "qkv" in inspect.signature(forward).parameters

    @functools.wraps(forward)
    def either(self: Any, *args: Any, **kwargs: Any) -> Tensor:
        called_theirs = "qkv" in kwargs or (len(args) > 0 and args[0].ndim == 5)
        if called_theirs == theirs:
            return forward(self, *args, **kwargs)
        return (_call_ours if called_theirs else _call_theirs)(functools.partial(forward, self), *args, **kwargs)

    return either


def _call_ours(
    kernel: Forward,
    qkv: Tensor,
    key_cache: Tensor | None = None,
    val_cache: Tensor | None = None,
    cache_seqlens: Tensor | None = None,
) -> Tensor:
    """Serve a call with (B, L, 3, H, D) by a kernel of ours."""
    q, k, v = (x.transpose(1, 2) for x in qkv.unbind(2))
    if key_cache is None or val_cache is None or cache_seqlens is None:
        return kernel(q, k, v).transpose(1, 2)
    past, (rows, capacity) = cache_seqlens.long(), key_cache.shape[:2]
    if q.shape[2] != 1:
        raise ValueError(f"with key_cache, qkv holds one token for each row, got {q.shape[2]}")
    prefix = int(past.max()) + 1
    if prefix > capacity:
        raise ValueError(
            f"cache_seqlens has {prefix - 1}, and the caches have {capacity} slots: there is no room for the token"
        )
    used = (torch.arange(prefix, device=past.device) <= past.unsqueeze(1))[:, None, :, None]
    row = torch.arange(rows, device=past.device)
    kept = []
    for cache, new in ((key_cache, k), (val_cache, v)):
        cache[row, past] = new[:, :, 0].detach().to(cache.dtype)
        kept.append(torch.where(used, cache[:, :prefix].transpose(1, 2), 0.0).to(q.dtype))  # unused slots may hold NaN
    slots = CacheSlots(past + 1, capacity, prefix, full=bool((past + 1 == prefix).all()))
    return kernel(q, kept[0], kept[1], slots).transpose(1, 2)


def _call_theirs(
    kernel: Forward, q: Tensor, k: Tensor, v: Tensor, slots: CacheSlots | None = None, real: Tensor | None = None
) -> Tensor:
    """Serve a call with (B, H, L, D) each by a kernel of the original's form, which ignores padding (``real``)."""
    if slots is None:
        return kernel(torch.stack((q, k, v), dim=2).permute(0, 3, 2, 1, 4)).transpose(1, 2)
    ages = slots.ages
    order = ages.argsort(dim=1, descending=True, stable=True)  # oldest first, empty slots last
    past = (ages >= 0).sum(dim=1) - 1
    rows = slots.rows
    now = [x[rows, :, slots.newest].unsqueeze(1) for x in (k, v)]  # (B, 1, H, D)
    free = torch.arange(ages.shape[1], device=ages.device) >= past.unsqueeze(1)
    caches = [x.transpose(1, 2)[rows.unsqueeze(1), order].masked_fill(free[:, :, None, None], 0.0) for x in (k, v)]
    qkv = torch.stack((q.transpose(1, 2), *now), dim=2)
    return kernel(qkv, key_cache=caches[0], val_cache=caches[1], cache_seqlens=past.int()).transpose(1, 2)
