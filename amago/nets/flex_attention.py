"""PyTorch's ``flex_attention`` (Dong et al. 2024, arXiv 2412.05496), and the sliding windows that it makes cheap.

The kernel is compiled for the pattern of a subclass's `SelfAttention.sees` and skips the blocks in which nothing is seen. It needs a
CUDA device: on CPUs it has no backward pass. Where it cannot run, the same pattern is computed as a masked
``scaled_dot_product_attention``, gradients included, and one warning says so. A step of an actor reads one query only and never
uses the kernel.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import gin
import torch
from torch import Tensor

from amago.nets.attention import SelfAttention
from amago.nets.kv_cache import CacheSlots
from amago.nets.utils import check_positive

_fallback_warned = False


def _warn_fallback(reason: str) -> None:
    global _fallback_warned
    if not _fallback_warned:
        _fallback_warned = True
        warnings.warn(
            f"FlexAttention: {reason}; using PyTorch's scaled_dot_product_attention with a mask (the same result, and said only once)",
            stacklevel=3,
        )


@functools.cache
def _compiled() -> Callable[..., Tensor]:
    """The kernel, compiled at its first call; uncompiled it would write out all scores."""
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention)


def _refusal(q: Tensor, dropout: float) -> str | None:
    """Why the kernel cannot take these queries, if it is known beforehand."""
    if not q.is_cuda:
        return f"its kernel has no backward pass for tensors on {q.device.type}"
    if dropout:
        return f"its kernel has no dropout, and dropout_attn is {dropout}"
    return None


# (device type, dtype, head width) -> what the kernel raised when it was first tried, or None
_tried: dict[tuple[str, torch.dtype, int], str | None] = {}


def _failure(q: Tensor, k: Tensor, v: Tensor, block_mask: Any) -> str | None:
    """Try the kernel, forward and backward, on the first tensors of their kind: what fails to compile would fail in training."""
    key = (q.device.type, q.dtype, q.shape[-1])
    if key not in _tried:
        try:
            with torch.enable_grad():
                copies = [x.detach().clone().requires_grad_() for x in (q, k, v)]
                _compiled()(*copies, block_mask=block_mask).sum().backward()
            _tried[key] = None
        except torch.OutOfMemoryError:
            raise
        except Exception as err:
            _tried[key] = f"{type(err).__name__}: {err}".splitlines()[0]
    return _tried[key]


@gin.configurable(module="amago.nets.transformer")
class FlexAttention(SelfAttention):
    """``flex_attention`` where it runs, else the default with a mask. Subclass it, and override `SelfAttention.visible`, for a
    pattern of your own."""

    def __init__(self, causal: bool = True, dropout: float = 0.0) -> None:
        super().__init__(causal, dropout)
        self._block_masks: dict[tuple[int, torch.device], Any] = {}

    def _block_mask(self, length: int, device: torch.device) -> Any:
        from torch.nn.attention.flex_attention import create_block_mask

        key = (length, device)
        if key not in self._block_masks:

            def mask_mod(batch: Tensor, head: Tensor, query: Tensor, key_: Tensor) -> Tensor:
                return self.sees(query, key_)

            if len(self._block_masks) >= 16:  # few lengths are usual; many would pile up
                self._block_masks.clear()
            self._block_masks[key] = create_block_mask(mask_mod, None, None, length, length, device=str(device))
        return self._block_masks[key]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_block_masks": {}}  # they close over this module: neither copied nor pickled

    def forward(self, q: Tensor, k: Tensor, v: Tensor, slots: CacheSlots | None = None) -> Tensor:
        if slots is not None:
            return super().forward(q, k, v, slots)
        reason = _refusal(q, self.dropout if self.training else 0.0)
        if reason is None:
            block_mask = self._block_mask(q.shape[2], q.device)
            reason = _failure(q, k, v, block_mask)
            if reason is None:
                return _compiled()(q, k, v, block_mask=block_mask)
        _warn_fallback(reason)
        return super().forward(q, k, v)


@gin.configurable(module="amago.nets.transformer")
class SlidingWindowFlexAttention(FlexAttention):
    """Each token sees the last ``window_size`` tokens, itself included; an actor remembers no more than these.

    With n layers, what happened up to n x (window_size - 1) steps ago can still reach the output.

    Args:
        causal: else the window reaches as far to the other side.
        dropout: of attention weights.
        window_size: has to be bound, ``use_config({"SlidingWindowFlexAttention.window_size": 128})``.

    Raises:
        ValueError: ``window_size`` is below 1.
    """

    def __init__(self, causal: bool = True, dropout: float = 0.0, window_size: int = gin.REQUIRED) -> None:
        super().__init__(causal, dropout)
        check_positive(window_size=window_size)
        self.window_size = window_size

    def visible(self, distance: Tensor) -> Tensor:
        near = distance < self.window_size
        return near & (distance >= 0) if self.causal else near & (distance > -self.window_size)

    def cache_slots(self, context: int) -> int:
        if self.sink_size >= context:
            raise ValueError(f"sink_size={self.sink_size} leaves no room in a memory of {context} timesteps (max_seq_len + 1)")
        return min(self.window_size + self.sink_size, context)

    def sees_whole_cache(self, slots: CacheSlots) -> bool:
        return slots.sinks == self.sink_size and slots.capacity - slots.sinks <= self.window_size


@gin.configurable(module="amago.nets.transformer")
class SlidingWindowSinkFlexAttention(SlidingWindowFlexAttention):
    """A sliding window that also sees the first ``sink_size`` tokens of the sequence (Xiao et al. 2023, arXiv 2309.17453).

    An actor keeps the first tokens of its episode; in training they are the first of the sub-sequence.

    Args:
        causal, dropout, window_size: as of `SlidingWindowFlexAttention`; ``SlidingWindowSinkFlexAttention.window_size`` has to
            be bound.
        sink_size: tokens at the front that stay in sight.
    """

    def __init__(self, causal: bool = True, dropout: float = 0.0, window_size: int = gin.REQUIRED, sink_size: int = 1) -> None:
        super().__init__(causal, dropout, window_size)
        check_positive(sink_size=sink_size)
        self.sink_size = sink_size
