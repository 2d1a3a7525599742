"""PyTorch's ``flex_attention`` (Dong et al. 2024, arXiv 2412.05496), and sliding windows.

The kernel is compiled for the pattern of `SelfAttention.sees` and skips blocks in which nothing is seen. It needs a CUDA device, because
it has no backward pass on CPUs. Where it cannot run, ``scaled_dot_product_attention`` with a mask computes the same, and one warning says
so. Acting step by step has a single query and never uses the kernel.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import gin
import torch
import torch.nn.functional as F
from torch import Tensor

from amago.nets.attention import SelfAttention, warn_fallback
from amago.nets.kv_cache import CacheSlots
from amago.nets.utils import check_positive


@functools.cache
def _compiled() -> Callable[..., Tensor]:
    """The kernel, compiled at its first call. Uncompiled, it would store all L x L scores."""
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention)


def _refusal(device_type: str, dropout: float) -> str | None:
    """Why the kernel does not support queries on such a device, or None."""
    if device_type != "cuda":
        return f"its kernel has no backward pass for tensors on {device_type}"
    if dropout:
        return f"its kernel has no dropout, and dropout_attn is {dropout}"
    return None


# (device type, dtype, head width, score_mod if any) -> the error of the kernel's first call, or None
_tried: dict[tuple[Any, ...], str | None] = {}


def _failure(q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> str | None:
    """The error of the kernel's first forward and backward pass with tensors of this kind, or None.

    The backward pass is tried even if only the forward pass is needed now: else its failure to compile would end training later.
    """
    key: tuple[Any, ...] = (q.device.type, q.dtype, q.shape[-1])
    key = (*key, options["score_mod"]) if "score_mod" in options else key
    if key not in _tried:
        try:
            with torch.enable_grad():
                copies = [x.detach().clone().requires_grad_() for x in (q, k, v)]
                _compiled()(*copies, **options).sum().backward()
            _tried[key] = None
        except torch.OutOfMemoryError:
            raise
        except Exception as err:
            _tried[key] = f"{type(err).__name__}: {err}".splitlines()[0]
    return _tried[key]


def _indices(scores: Tensor, slots: CacheSlots | None) -> tuple[Tensor, ...]:
    """Batch, head, query and key of each score (B, H, L, S), as int64 tensors that broadcast to it."""
    count = [torch.arange(n, device=scores.device) for n in scores.shape]
    batch, head = count[0][:, None, None, None], count[1][:, None, None]
    if slots is None:
        return batch, head, count[2].unsqueeze(1), count[3]
    return batch, head, (slots.lengths - 1)[:, None, None, None], slots.places[:, None, None]


@gin.configurable(module="amago.nets.transformer")
class FlexAttention(SelfAttention):
    """``flex_attention`` where it runs, else the default with a mask. For another pattern, override `SelfAttention.visible`.

    Block masks are kept for each length, so `visible` and ``mask_mod`` must always give the same answer.

    Args:
        score_mod: (score, batch, head, query, key) -> score, elementwise, as of PyTorch's ``flex_attention``; ``query`` and ``key`` are the
            numbers of two tokens in their sequence. None: scores stay as they are.
        mask_mod: (batch, head, query, key) -> bool, True where the query may see the key, beside `SelfAttention.sees`. None: everywhere.
        causal, dropout: as of `SelfAttention`.
    """

    def __init__(
        self,
        score_mod: Callable[..., Tensor] | None = None,
        mask_mod: Callable[..., Tensor] | None = None,
        causal: bool = True,
        dropout: float = 0.0,
    ) -> None:
        super().__init__(causal, dropout)
        self.score_mod, self.mask_mod = score_mod, mask_mod
        self._block_masks: dict[tuple[int, torch.device], Any] = {}

    def _block_mask(self, length: int, device: torch.device) -> Any:
        from torch.nn.attention.flex_attention import create_block_mask

        key = (length, device)
        if key not in self._block_masks:

            def mask_mod(batch: Tensor, head: Tensor, query: Tensor, key_: Tensor) -> Tensor:
                seen = self.sees(query, key_)
                return seen if self.mask_mod is None else seen & self.mask_mod(batch, head, query, key_)

            if len(self._block_masks) >= 16:  # bounds the memory where lengths vary
                self._block_masks.clear()
            self._block_masks[key] = create_block_mask(mask_mod, None, None, length, length, device=str(device))
        return self._block_masks[key]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_block_masks": {}}  # they hold a closure over this module, which cannot be pickled

    def forward(self, q: Tensor, k: Tensor, v: Tensor, slots: CacheSlots | None = None, real: Tensor | None = None) -> Tensor:
        if slots is not None or real is not None:
            return self._plain(q, k, v, slots, real)
        reason = _refusal(q.device.type, self.dropout if self.training else 0.0)
        if reason is None:
            block_mask = self._block_mask(q.shape[2], q.device)
            options = {"block_mask": block_mask} | ({} if self.score_mod is None else {"score_mod": self.score_mod})
            reason = _failure(q, k, v, options)
            if reason is None:
                return _compiled()(q, k, v, **options)
        warn_fallback("FlexAttention", reason)
        return self._plain(q, k, v)

    def _plain(self, q: Tensor, k: Tensor, v: Tensor, slots: CacheSlots | None = None, real: Tensor | None = None) -> Tensor:
        """The same without the kernel."""
        if self.score_mod is None and self.mask_mod is None:
            return super().forward(q, k, v, slots, real)
        scores, seen = (q @ k.transpose(-1, -2)) / math.sqrt(q.shape[-1]), self.mask(q.shape[2], slots, q.device, real)
        indices = _indices(scores, slots)
        if self.score_mod is not None:
            scores = self.score_mod(scores, *indices)
        hidden = ~(seen if self.mask_mod is None else seen & self.mask_mod(*indices))
        weights = scores.masked_fill(hidden, -torch.inf).softmax(dim=-1).masked_fill(hidden, 0.0)
        return F.dropout(weights, self.dropout, self.training).to(v.dtype) @ v


@gin.configurable(module="amago.nets.transformer")
class VanillaFlexAttention(FlexAttention):
    """`FlexAttention` without modifications."""

    def __init__(self, causal: bool = True, dropout: float = 0.0) -> None:
        super().__init__(causal=causal, dropout=dropout)


@gin.configurable(module="amago.nets.transformer")
class SlidingWindowFlexAttention(FlexAttention):
    """Each token sees itself and the ``window_size`` tokens before it. An actor remembers no more than these.

    With n layers, the output depends on the last n x window_size + 1 tokens.

    Args:
        causal: False extends the window to as many later tokens.
        dropout: probability of dropping an attention weight, in training mode.
        window_size: required; bind it as in ``use_config({"SlidingWindowFlexAttention.window_size": 128})``.

    Raises:
        ValueError: ``window_size`` is below 1.
    """

    def __init__(self, causal: bool = True, dropout: float = 0.0, window_size: int = gin.REQUIRED) -> None:
        super().__init__(causal=causal, dropout=dropout)
        check_positive(window_size=window_size)
        self.window_size = window_size

    def visible(self, distance: Tensor) -> Tensor:
        near = distance <= self.window_size
        return near & (distance >= 0) if self.causal else near & (distance >= -self.window_size)

    def cache_slots(self, context: int) -> int:
        if self.sink_size >= context:
            raise ValueError(f"sink_size={self.sink_size} leaves no room in a memory of {context} timesteps (max_seq_len)")
        return min(self.window_size + 1 + self.sink_size, context)


@gin.configurable(module="amago.nets.transformer")
class SlidingWindowSinkFlexAttention(SlidingWindowFlexAttention):
    """A sliding window, and the first ``sink_size`` tokens of the sequence (Xiao et al. 2023, arXiv 2309.17453).

    In acting these are the first tokens of the episode, in training the first of the sub-sequence.

    Args:
        causal, dropout: as of `SlidingWindowFlexAttention`.
        window_size: required; bind ``SlidingWindowSinkFlexAttention.window_size``.
        sink_size: number of first tokens that are always seen.

    Raises:
        ValueError: ``window_size`` or ``sink_size`` is below 1.
    """

    def __init__(self, causal: bool = True, dropout: float = 0.0, window_size: int = gin.REQUIRED, sink_size: int = 1) -> None:
        super().__init__(causal, dropout, window_size)
        check_positive(sink_size=sink_size)
        self.sink_size = sink_size


@gin.configurable(module="amago.nets.transformer")
class ClippedSlidingSinkAttention(SlidingWindowSinkFlexAttention):
    """`SlidingWindowSinkFlexAttention` whose scores are softly clipped: c tanh(score / c), for c = ``logit_clip`` (Gemma Team 2024, arXiv
    2408.00118).

    Args:
        causal, dropout, window_size, sink_size: as of `SlidingWindowSinkFlexAttention`.
        logit_clip: c.

    Raises:
        ValueError: ``logit_clip`` is not positive; see also `SlidingWindowSinkFlexAttention`.
    """

    def __init__(
        self,
        causal: bool = True,
        dropout: float = 0.0,
        window_size: int = gin.REQUIRED,
        sink_size: int = 1,
        logit_clip: float = 50.0,
    ) -> None:
        super().__init__(causal, dropout, window_size, sink_size)
        if not logit_clip > 0.0:
            raise ValueError(f"logit_clip must be positive, got logit_clip={logit_clip}")
        self.score_mod = functools.partial(_soft_clip, clip=logit_clip)


def _soft_clip(score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor, clip: float) -> Tensor:
    return clip * torch.tanh(score / clip)
