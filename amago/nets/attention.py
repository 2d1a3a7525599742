"""Self-attention kernels behind one interface.

Shapes: B sequences, H heads, L queries, S keys, D numbers a head. To write a kernel, subclass `SelfAttention`:

- to change *which* tokens are seen, override `visible`. Training on whole sequences and acting step by step both follow it. If old
  tokens are never seen again, also override `cache_slots`, so that an actor remembers fewer of them;
- to change *how* attention is computed, override `forward`, and pass the mode that it does not cover to ``super().forward``. A kernel
  written for the original system, ``forward(qkv, key_cache, val_cache, cache_seqlens)``, works as it is (`amago.compat.attention`).

Then bind ``TformerTrajEncoder.attention_type`` to the subclass.
"""

from __future__ import annotations

import importlib
import itertools
import math
import warnings
from typing import Any, Literal

import gin
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from amago import config
from amago.compat.attention import both_forms
from amago.config import NamedArguments
from amago.nets.cpu.attention import attend_in_bf16, suits
from amago.nets.kv_cache import CacheSlots
from amago.nets.utils import check_dropout

Pattern = Literal["full", "causal", "masked"]
"""What the queries see: every key, every key up to their own, or what `SelfAttention.mask` says."""


class SelfAttention(NamedArguments, nn.Module):
    """Base of all kernels: PyTorch's ``scaled_dot_product_attention`` over the tokens that `visible` names.

    Args:
        causal: a token sees itself and earlier tokens only.
        dropout: probability of dropping an attention weight, in training mode.

    Attributes:
        sink_size: the first ``sink_size`` tokens of a sequence are seen by all later ones, whatever `visible` says.
        fast: `amago.config.fast_paths` when the kernel was built.

    Raises:
        ValueError: ``dropout`` is outside [0, 1).
    """

    sink_size: int = 0
    _sees_past: bool = True  # `visible`, `mask` and `pattern` are those of this class

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls._sees_past = all(getattr(cls, x) is getattr(SelfAttention, x) for x in ("visible", "mask", "pattern"))
        if "forward" in cls.__dict__:
            cls.forward = both_forms(cls.forward)  # type: ignore[method-assign]

    def __init__(self, causal: bool = True, dropout: float = 0.0) -> None:
        super().__init__()
        check_dropout(dropout=dropout)
        self.causal, self.dropout = causal, dropout
        self.fast = config.fast_paths()

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
        """Number of tokens (sinks included) that an actor keeps, of at most ``context``."""
        return context

    def pattern(self, length: int, slots: CacheSlots | None = None) -> Pattern:
        """What the queries see, so that a kernel can do without a mask. `visible` is evaluated at every distance that occurs.

        Args:
            length: L.
            slots: as of `forward`.
        """
        if slots is not None and (not slots.full or slots.sinks != self.sink_size):
            return "masked"
        # without tensors of its own, a kernel is asked on the CPU: the answer is needed on the host, and a GPU need not be waited for
        own = next(itertools.chain(self.parameters(), self.buffers()), None)
        device = torch.device("cpu") if own is None else own.device
        if slots is not None:
            ages = torch.arange(min(slots.prefix, slots.capacity - slots.sinks), device=device)
            return "full" if self.visible(ages).all() else "masked"
        distance = torch.arange(1 - length, length, device=device)
        seen = self.visible(distance)
        if seen.all():
            return "full"
        sinks_are_past = self.causal or not self.sink_size
        return "causal" if sinks_are_past and seen.equal(distance >= 0) else "masked"

    def mask(self, length: int, slots: CacheSlots | None, device: torch.device, real: Tensor | None = None) -> Tensor:
        """True where a query sees a key: (L, L) for whole sequences, (B, 1, L, L) if ``real`` is given; (B, 1, 1, P) in step mode."""
        if slots is not None:
            seen = self.visible(slots.ages)
            if self.sink_size:
                seen = seen | (slots.places < self.sink_size)
            return (seen & (slots.ages >= 0))[:, None, None]
        idx = torch.arange(length, device=device)
        seen = self.sees(idx.unsqueeze(1), idx)
        return seen if real is None else seen & real[:, None, None]

    @both_forms
    def forward(self, q: Tensor, k: Tensor, v: Tensor, slots: CacheSlots | None = None, real: Tensor | None = None) -> Tensor:
        """Attend.

        Args:
            q: (B, H, L, D).
            k, v: (B, H, S, D).
            slots: None for whole sequences, where L == S and token i is row i. In step mode L == 1, the keys are the slots of a
                ring buffer in any order, and ``slots.ages`` (B, S) is the number of steps since each was written (-1: empty).
            real: (B, S) bool, False at keys that are padding. It is given for padded sequences if ``causal`` is False; a kernel
                that is always causal needs no such argument.

        Returns:
            (B, H, L, D); 0 where a query sees no key, which happens at padding only.
        """
        if slots is not None and self._sees_past:  # the mask of a step is that of every layer
            mask = None if slots.full else slots.used.to(q.dtype)
            return F.scaled_dot_product_attention(q, k, v, mask, dropout_p=self.dropout if self.training else 0.0)
        length = q.shape[2]
        pattern = self.pattern(length, slots) if real is None else "masked"
        mask = self.mask(length, slots, q.device, real) if pattern == "masked" else None
        dropout = self.dropout if self.training else 0.0
        attend = attend_in_bf16 if self.fast and suits(q) else F.scaled_dot_product_attention
        return attend(q, k, v, mask, dropout_p=dropout, is_causal=pattern == "causal")


@gin.configurable(module="amago.nets.transformer")
class ScaledDotProductAttention(SelfAttention):
    """PyTorch's fused attention, the default: it selects flash attention on devices that have it."""

    def __init__(self, causal: bool = True, dropout: float = 0.0) -> None:
        super().__init__(causal, dropout)


@gin.configurable(module="amago.nets.transformer")
class VanillaAttention(SelfAttention):
    """softmax(q k^T / sqrt(D)) v, written out with a mask: slow, and the reference for the other kernels."""

    def __init__(self, causal: bool = True, dropout: float = 0.0) -> None:
        super().__init__(causal, dropout)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, slots: CacheSlots | None = None, real: Tensor | None = None) -> Tensor:
        scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
        hidden = ~self.mask(q.shape[2], slots, q.device, real)
        weights = scores.masked_fill(hidden, -torch.inf).softmax(dim=-1)
        if real is not None:  # a window at padding may contain no real key, and softmax then gives NaN
            weights = weights.masked_fill(hidden, 0.0)
        weights = F.dropout(weights, self.dropout, self.training)
        return weights.to(v.dtype) @ v


def flash_attn_module() -> Any:
    """The flash-attn package, or None where it is not usable."""
    try:
        return importlib.import_module("flash_attn")
    except ImportError:
        return None


_warned: set[str] = set()


def warn_fallback(kernel: str, reason: str) -> None:
    """Warn, once a process and kernel, that PyTorch's attention is used in its place."""
    if kernel not in _warned:
        _warned.add(kernel)
        warnings.warn(
            f"{kernel}: {reason}; using PyTorch's scaled_dot_product_attention (the result is the same; this is shown once)",
            stacklevel=3,
        )


@gin.configurable(module="amago.nets.transformer")
class FlashAttention(SelfAttention):
    """The kernel of the flash-attn package (``pip install flash-attn``).

    It is used where the package is installed, tensors are half precision on a GPU, and no mask is needed; elsewhere the default is,
    with one warning a process.

    Args:
        causal, dropout: as of `SelfAttention`.
        window_size: (earlier, later) tokens that a token sees beside itself; -1: all.

    Raises:
        ValueError: ``window_size`` is not two numbers from -1 on.
    """

    def __init__(self, causal: bool = True, dropout: float = 0.0, window_size: tuple[int, int] = (-1, -1)) -> None:
        super().__init__(causal, dropout)
        if len(window_size) != 2 or min(window_size) < -1:
            raise ValueError(f"window_size must be (earlier, later) with -1 for all, got window_size={window_size}")
        self.window_size = (int(window_size[0]), int(window_size[1]))
        package = flash_attn_module()
        self._kernel: Any = None if package is None else package.flash_attn_func
        if package is None:
            warn_fallback("FlashAttention", "flash-attn is not usable (it cannot be imported)")

    def visible(self, distance: Tensor) -> Tensor:
        earlier, later = self.window_size
        seen = super().visible(distance)
        seen = seen if earlier < 0 else seen & (distance <= earlier)
        return seen if later < 0 else seen & (distance >= -later)

    def cache_slots(self, context: int) -> int:
        return context if self.window_size[0] < 0 else min(self.window_size[0] + 1, context)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, slots: CacheSlots | None = None, real: Tensor | None = None) -> Tensor:
        if self._kernel is None or real is not None:
            return super().forward(q, k, v, slots, real)
        if not (q.is_cuda and q.dtype in (torch.float16, torch.bfloat16)):
            warn_fallback("FlashAttention", f"tensors are {q.dtype} on {q.device.type}, not half precision on a GPU")
            return super().forward(q, k, v, slots)
        pattern = self.pattern(q.shape[2], slots)
        windowed = self.window_size != (-1, -1) and slots is None
        if pattern == "masked" and not windowed:  # the kernel takes no mask
            return super().forward(q, k, v, slots)
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        dropout = self.dropout if self.training else 0.0
        window = {"window_size": self.window_size} if windowed else {}
        causal = self.causal if windowed else pattern == "causal"
        out: Tensor = self._kernel(q, k, v, dropout_p=dropout, causal=causal, **window)
        return out.transpose(1, 2)
