"""Self-attention kernels behind one interface.

Shapes: B sequences, H heads, L queries, S keys, D numbers a head. To write a kernel of your own, subclass `SelfAttention`:

- to change *which* tokens are seen, override `visible`; both modes (whole sequences, and one step at a time over the ring of
  `amago.nets.kv_cache`) follow it. If old tokens are never seen again, `cache_slots` says how few an actor has to remember;
- to change *how* attention is computed, override `forward`, and hand the mode you do not cover to ``super().forward``.

Then bind ``TformerTrajEncoder.attention_type`` to it.
"""

from __future__ import annotations

import importlib
import math
import warnings
from typing import Any

import gin
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from amago.nets.kv_cache import CacheSlots
from amago.nets.utils import check_dropout

_COPIED = 1 << 22  # numbers that are copied sooner than multiplied part by part


class SelfAttention(nn.Module):
    """Base of all kernels; itself PyTorch's ``scaled_dot_product_attention``.

    Args:
        causal: a token sees itself and what came before.
        dropout: probability of dropping an attention weight, in training mode.

    Attributes:
        sink_size: the first ``sink_size`` tokens of a sequence are seen by all later ones, whatever `visible` says.
    """

    sink_size: int = 0

    def __init__(self, causal: bool = True, dropout: float = 0.0) -> None:
        super().__init__()
        check_dropout(dropout=dropout)
        self.causal, self.dropout = causal, dropout

    def visible(self, distance: Tensor) -> Tensor:
        """Whether a token sees another that came ``distance`` steps earlier (negative: later). int64 -> bool, elementwise."""
        return distance >= 0 if self.causal else torch.ones_like(distance, dtype=torch.bool)

    def sees(self, query: Tensor, key: Tensor) -> Tensor:
        """Whether token number ``query`` of a sequence sees token number ``key``: `visible`, and sinks. int64 -> bool."""
        seen = self.visible(query - key)
        if self.sink_size:
            sink = key < self.sink_size
            seen = seen | (sink & (query >= key) if self.causal else sink)
        return seen

    def cache_slots(self, context: int) -> int:
        """How many tokens (sinks included) an actor must remember, if it may remember ``context``."""
        return context

    @property
    def plain(self) -> bool:
        """Neither `visible` nor `sink_size` is changed: kernels may use their causal fast path."""
        return type(self).visible is SelfAttention.visible and not self.sink_size

    def sees_whole_cache(self, slots: CacheSlots) -> bool:
        """Whether the current token sees every slot that holds one, so that a full cache needs no mask."""
        return self.plain

    def mask(self, length: int, slots: CacheSlots | None, device: torch.device) -> Tensor:
        """True where a query sees a key: (L, L) for whole sequences; (B, 1, 1, P) in step mode."""
        if slots is not None:
            seen = self.visible(slots.ages)
            if self.sink_size:
                seen = seen | (slots.places < self.sink_size)
            return (seen & (slots.ages >= 0))[:, None, None]
        idx = torch.arange(length, device=device)
        return self.sees(idx.unsqueeze(1), idx)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, slots: CacheSlots | None = None) -> Tensor:
        """Attend.

        Args:
            q: (B, H, L, D).
            k, v: (B, H, S, D).
            slots: None for whole sequences, where L == S and token i is row i. In step mode L == 1, the keys are the slots of a
                ring buffer in any order, and ``slots.ages`` (B, S) tells how many steps ago each was written (-1: empty).

        Returns:
            (B, H, L, D).
        """
        dropout = self.dropout if self.training else 0.0
        if slots is None:
            if self.plain:
                if q.requires_grad and q.dtype == torch.bfloat16 and q.device.type == "cpu":
                    return _bf16_on_cpu(q, k, v, self.causal, dropout)
                return F.scaled_dot_product_attention(q, k, v, is_causal=self.causal, dropout_p=dropout)
            return F.scaled_dot_product_attention(q, k, v, self.mask(q.shape[2], None, q.device), dropout_p=dropout)
        if q.is_cpu and not dropout and not torch.is_grad_enabled() and not torch.compiler.is_compiling():
            return self._attend_once(q, k, v, slots)
        mask = None if slots.full and self.sees_whole_cache(slots) else self.mask(1, slots, q.device)
        return F.scaled_dot_product_attention(q, k, v, mask, dropout_p=dropout)

    def _attend_once(self, q: Tensor, k: Tensor, v: Tensor, slots: CacheSlots) -> Tensor:
        """Step mode for actors on a CPU: two batched products and a softmax.

        A single query leaves ``scaled_dot_product_attention`` nothing to fuse, and its blocks of one row read the cache at two thirds of
        the speed (16 actors, 8 heads of 32, one core: 38 us against 55 at 16 tokens, 0.73 ms against 1.1 at 513, 15 against 23 at
        10,001; in bf16 15 against 70).
        """
        B, H, P, D = k.shape
        scores = _row_products(q.flatten(0, 1), k.flatten(0, 1).mT, 1.0 / math.sqrt(D))
        if self.plain:
            bias = slots.emptiness
        elif slots.full and self.sees_whole_cache(slots):
            bias = None
        else:
            seen = self.mask(1, slots, q.device)
            bias = torch.zeros(seen.shape).masked_fill_(~seen, -torch.inf)
        if bias is not None:
            scores.view(B, H, 1, P).add_(bias)
        weights = scores.softmax(dim=-1, dtype=torch.float32).to(v.dtype)
        return _row_products(weights, v.flatten(0, 1), 1.0).view(B, H, 1, D)


def _bf16_on_cpu(q: Tensor, k: Tensor, v: Tensor, causal: bool, dropout: float) -> Tensor:
    """Attention of whole sequences that learns. PyTorch's kernel takes 81 ms forward and back (24 sequences of 129 tokens, 8 heads of
    32, torch 2.13), in float32 31 ms, and plain products 18 ms; they keep L^2 weights, and lose at length 512."""
    with torch.autocast("cpu", enabled=False):
        if q.shape[2] > 256 or dropout > 0.0:
            q, k, v = q.float(), k.float(), v.float()
            return F.scaled_dot_product_attention(q, k, v, is_causal=causal, dropout_p=dropout).to(torch.bfloat16)
        shape, length = q.shape, q.shape[2]
        q, k, v = (x.reshape(-1, length, shape[-1]) for x in (q, k, v))
        unseen = torch.full((length, length), -math.inf, dtype=q.dtype).triu(1) if causal else q.new_zeros(())
        scores = torch.baddbmm(unseen, q, k.transpose(1, 2), alpha=shape[-1] ** -0.5)
        return torch.bmm(scores.softmax(dim=-1), v).view(shape)


def _row_products(rows: Tensor, matrices: Tensor, factor: float) -> Tensor:
    """``factor`` times (N, 1, J) by (N, J, K) -> (N, 1, K), on a CPU."""
    N, _, K = matrices.shape
    if matrices.dtype == torch.float32 or matrices.numel() < _COPIED or matrices.mT.is_contiguous() or matrices.is_contiguous():
        return torch.baddbmm(rows.new_empty(()), rows, matrices, beta=0, alpha=factor)
    # Part of a half-precision cache: the batched product would copy it first (half of 10,000 tokens: 65 ms instead of 12).
    out = rows.new_empty((N, 1, K))
    for row, matrix, into in zip(rows.unbind(0), matrices.unbind(0), out.unbind(0), strict=True):
        torch.mm(row, matrix, out=into)
    return out if factor == 1.0 else out.mul_(factor)


@gin.configurable(module="amago.nets.transformer")
class ScaledDotProductAttention(SelfAttention):
    """PyTorch's fused attention, the default: flash attention on devices that have it, fast on CPU."""

    def __init__(self, causal: bool = True, dropout: float = 0.0) -> None:
        super().__init__(causal, dropout)


@gin.configurable(module="amago.nets.transformer")
class VanillaAttention(SelfAttention):
    """softmax(q k^T / sqrt(D)) v, written out: slow, and the yardstick for the others."""

    def __init__(self, causal: bool = True, dropout: float = 0.0) -> None:
        super().__init__(causal, dropout)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, slots: CacheSlots | None = None) -> Tensor:
        scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
        scores = scores.masked_fill(~self.mask(q.shape[2], slots, q.device), -torch.inf)
        weights = F.dropout(scores.softmax(dim=-1), self.dropout, self.training)
        return weights.to(v.dtype) @ v


_fallback_warned = False


def _warn_fallback(reason: str) -> None:
    global _fallback_warned
    if not _fallback_warned:
        _fallback_warned = True
        warnings.warn(
            f"FlashAttention: {reason}; using PyTorch's scaled_dot_product_attention (the same result, and said only once)",
            stacklevel=3,
        )


@gin.configurable(module="amago.nets.transformer")
class FlashAttention(SelfAttention):
    """The flash-attn package's kernel, where it is installed and tensors are half precision on a GPU; else the default, with
    one warning a process. ``pip install flash-attn`` provides it."""

    def __init__(self, causal: bool = True, dropout: float = 0.0) -> None:
        super().__init__(causal, dropout)
        self._kernel: Any = None
        try:
            self._kernel = importlib.import_module("flash_attn").flash_attn_func
        except ImportError as err:
            _warn_fallback(f"flash-attn is not usable ({err})")

    def forward(self, q: Tensor, k: Tensor, v: Tensor, slots: CacheSlots | None = None) -> Tensor:
        if self._kernel is None or not self.plain:
            return super().forward(q, k, v, slots)
        if not (q.is_cuda and q.dtype in (torch.float16, torch.bfloat16)):
            _warn_fallback(f"tensors are {q.dtype} on {q.device.type}, not half precision on a GPU")
            return super().forward(q, k, v, slots)
        if slots is not None and not slots.full:  # the kernel takes no mask
            return super().forward(q, k, v, slots)
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        dropout = self.dropout if self.training else 0.0
        out: Tensor = self._kernel(q, k, v, dropout_p=dropout, causal=self.causal and slots is None)
        return out.transpose(1, 2)
