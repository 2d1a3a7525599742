"""Self-attention kernels behind one interface.

Shapes: B sequences, H heads, L queries, S keys, D numbers a head. To write a kernel, subclass `SelfAttention`:

- to change *which* tokens are attended to, override `visible`. Training on whole sequences and acting step by step both follow
  it. If old tokens are never attended to again, also override `cache_slots`, so that an actor remembers fewer of them;
- to change *how* attention is computed, override `forward`, and pass the mode that it does not cover to ``super().forward``. A
  kernel written for the original system, ``forward(qkv, key_cache, val_cache, cache_seqlens)``, works as it is
  (`amago.compat.attention`).

Then bind ``TformerTrajEncoder.attention_type`` to the subclass.
"""

from __future__ import annotations

import functools
import importlib
import math
import warnings
from collections.abc import Callable
from typing import Any, Literal

import gin
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from amago import config
from amago.compat.attention import both_forms
from amago.nets.kv_cache import CacheSlots
from amago.nets.utils import check_positive

Pattern = Literal["full", "causal", "masked"]
"""The keys that queries attend to: every key, every key up to their own, or the keys of `SelfAttention.mask`."""


_LONGEST = 256
"""Sequences up to this length are attended by plain products, which keep L^2 weights for the backward pass."""


def attend_in_bf16(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *, dropout_p: float = 0.0, is_causal: bool = False
) -> Tensor:
    """``scaled_dot_product_attention`` of bf16 tensors (B, H, L, D) on CPUs, with the same arguments, for training.

    PyTorch's kernel with a backward pass is slower in bf16 than in float32: an update of 24 sequences of 128 timesteps takes
    0.53 s with it, 0.37 s with attention in float32, and 0.34 s with plain products in bf16 (``Agent`` with a Transformer of 3
    layers, one core of an Intel Xeon with AMX, torch 2.13; docs/notes/performance.md).
    """
    with torch.autocast("cpu", enabled=False):
        if q.shape[2] > _LONGEST or dropout_p > 0.0 or mask is not None:
            attend = F.scaled_dot_product_attention
            return attend(q.float(), k.float(), v.float(), mask, dropout_p=dropout_p, is_causal=is_causal).to(q.dtype)
        shape, length = q.shape, q.shape[2]
        q, k, v = (x.reshape(-1, length, shape[-1]) for x in (q, k, v))
        bias = torch.full((length, length), -math.inf, dtype=q.dtype).triu(1) if is_causal else q.new_zeros(())
        scores = torch.baddbmm(bias, q, k.transpose(1, 2), alpha=shape[-1] ** -0.5)
        return torch.bmm(scores.softmax(dim=-1), v).view(shape)


class SelfAttention(nn.Module):
    """Base of all kernels: PyTorch's ``scaled_dot_product_attention`` over the tokens that `visible` selects.

    Args:
        causal: a token sees itself and earlier tokens only.
        dropout: probability of dropping an attention weight, in training mode.

    Attributes:
        sink_size: the first ``sink_size`` tokens of a sequence are attended to by all later ones, whatever the result of
            `visible`.
        fast: `amago.config.fast_paths` when the kernel was built.

    Raises:
        ValueError: ``dropout`` is outside [0, 1).
    """

    sink_size: int = 0
    _window: tuple[int, int] = (-1, -1)  # (earlier, later) tokens that a token sees beside itself; -1: all
    _sees_past: bool = True  # `visible`, `mask` and `pattern` are not overridden

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        cls._sees_past = all(getattr(cls, x) is getattr(SelfAttention, x) for x in ("visible", "mask", "pattern"))
        if "forward" in cls.__dict__:
            cls.forward = both_forms(cls.forward)  # type: ignore[method-assign]

    def __init__(self, causal: bool = True, dropout: float = 0.0) -> None:
        super().__init__()
        if not 0.0 <= dropout < 1.0:
            raise ValueError(f"dropout of attention must be in [0, 1), got dropout={dropout}")
        self.causal, self.dropout = causal, dropout
        self.fast = config.fast_paths()

    def visible(self, distance: Tensor) -> Tensor:
        """True where a token attends to another ``distance`` steps earlier (negative: later). int64 -> bool, elementwise."""
        seen = distance >= 0 if self.causal else torch.ones_like(distance, dtype=torch.bool)
        earlier, later = self._window
        seen = seen if earlier < 0 else seen & (distance <= earlier)
        return seen if later < 0 else seen & (distance >= -later)

    def sees(self, query: Tensor, key: Tensor) -> Tensor:
        """True where token number ``query`` of a sequence attends to number ``key``: `visible`, and sinks. int64 -> bool."""
        seen = self.visible(query - key)
        if self.sink_size:
            sink = key < self.sink_size
            seen = seen | (sink & (query >= key) if self.causal else sink)
        return seen

    def cache_slots(self, context: int) -> int:
        """Number of tokens (sinks included) that an actor keeps, of at most ``context``."""
        if self.sink_size >= context:
            raise ValueError(f"sink_size={self.sink_size} leaves no room in a memory of {context} timesteps (max_seq_len)")
        return context if self._window[0] < 0 else min(self._window[0] + 1 + self.sink_size, context)

    def pattern(self, length: int, slots: CacheSlots | None = None) -> Pattern:
        """The pattern of attention, so that a kernel can do without a mask, for L and ``slots`` as of `forward`; "masked" where a subclass
        overrides `visible` or `mask`."""
        if not self._sees_past or (slots is not None and (not slots.full or slots.sinks != self.sink_size)):
            return "masked"
        steps = length if slots is None else min(slots.prefix, slots.capacity - slots.sinks)
        earlier, later = (width < 0 or width >= steps - 1 for width in self._window)
        if slots is not None or steps == 1:
            return "full" if earlier else "masked"
        if self.causal or (self._window[1] == 0 and not self.sink_size):
            return "causal" if earlier else "masked"
        return "full" if earlier and later else "masked"

    def mask(self, length: int, slots: CacheSlots | None, device: torch.device, real: Tensor | None = None) -> Tensor:
        """True where a query sees a key: (L, L) for whole sequences, (B, 1, L, L) if ``real`` is given; (B, 1, 1, P) in step
        mode."""
        if slots is not None:
            seen = self.visible(slots.ages)
            if self.sink_size:
                seen = seen | (slots.places < self.sink_size)
            return (seen & (slots.ages >= 0))[:, None, None]
        idx = torch.arange(length, device=device)
        seen = self.sees(idx.unsqueeze(1), idx)
        return seen if real is None else seen & real[:, None, None]

    def weights(
        self, q: Tensor, k: Tensor, slots: CacheSlots | None = None, real: Tensor | None = None, rows: Tensor | None = None
    ) -> Tensor:
        """(B, H, L, S): the share of each key in a query's result, 0 where it is not seen. ``rows`` (L,) int64 are the places in
        their whole sequence of the queries, if ``q`` has only some of them."""
        seen = self.mask(k.shape[2], slots, q.device, real)
        if rows is not None:
            seen = seen[..., rows, :]
        scores, seen = self._scored(q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1]), seen, slots, rows)
        return scores.masked_fill(~seen, -torch.inf).softmax(dim=-1).masked_fill(~seen, 0.0)

    def _scored(self, scores: Tensor, seen: Tensor, slots: CacheSlots | None, rows: Tensor | None) -> tuple[Tensor, Tensor]:
        """Scores (B, H, L, S) and the mask of attended keys, as a subclass changes them."""
        return scores, seen

    def _written_out(self, q: Tensor, k: Tensor, v: Tensor, slots: CacheSlots | None, real: Tensor | None) -> Tensor:
        """The result of `forward`, by all of the `weights`."""
        return F.dropout(self.weights(q, k, slots, real), self.dropout, self.training).to(v.dtype) @ v

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
        if slots is not None and self._sees_past and self._window == (-1, -1):  # the mask of a step is the same in every layer
            mask = None if slots.full else slots.used.to(q.dtype)
            return F.scaled_dot_product_attention(q, k, v, mask, dropout_p=self.dropout if self.training else 0.0)
        length = q.shape[2]
        pattern = self.pattern(length, slots) if real is None else "masked"
        mask = self.mask(length, slots, q.device, real) if pattern == "masked" else None
        dropout = self.dropout if self.training else 0.0
        slow = self.fast and q.requires_grad and q.dtype == torch.bfloat16 and q.is_cpu
        attend = attend_in_bf16 if slow else F.scaled_dot_product_attention
        return attend(q, k, v, mask, dropout_p=dropout, is_causal=pattern == "causal")


@gin.configurable(module="amago.nets.transformer")
class ScaledDotProductAttention(SelfAttention):
    """PyTorch's fused attention, the default: it selects flash attention on devices that have it."""


@gin.configurable(module="amago.nets.transformer")
class VanillaAttention(SelfAttention):
    """softmax(q k^T / sqrt(D)) v, written out with a mask: slow, and the reference for the other kernels."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, slots: CacheSlots | None = None, real: Tensor | None = None) -> Tensor:
        return self._written_out(q, k, v, slots, real)


def flash_attn_module() -> Any:
    """The flash-attn package, or None where it is not usable."""
    try:
        return importlib.import_module("flash_attn")
    except ImportError:
        return None


@functools.cache  # it warns once a process
def warn_fallback(kernel: str, reason: str) -> None:
    """Warn that PyTorch's attention is used in place of a kernel."""
    warnings.warn(
        f"{kernel}: {reason}; using PyTorch's scaled_dot_product_attention (the result is the same; this is shown once)",
        stacklevel=3,
    )


@gin.configurable(module="amago.nets.transformer")
class FlashAttention(SelfAttention):
    """The kernel of the flash-attn package (``pip install flash-attn``).

    It is used where the package is installed, tensors are half precision on a GPU, and no mask is needed; elsewhere the default
    is, with one warning a process. ``window_size``: (earlier, later) tokens that a token sees beside itself; -1: all.
    """

    def __init__(self, causal: bool = True, dropout: float = 0.0, window_size: tuple[int, int] = (-1, -1)) -> None:
        super().__init__(causal, dropout)
        if len(window_size) != 2 or min(window_size) < -1:
            raise ValueError(f"window_size must be (earlier, later) with -1 for all, got window_size={window_size}")
        self.window_size = self._window = (int(window_size[0]), int(window_size[1]))
        package = flash_attn_module()
        self._kernel: Callable[..., Tensor] | None = None if package is None else package.flash_attn_func
        if package is None:
            warn_fallback("FlashAttention", "flash-attn is not usable (it cannot be imported)")

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


@functools.cache
def compiled_flex_attention() -> Callable[..., Tensor]:
    """The kernel, compiled at its first call. Uncompiled, it would store all L x L scores."""
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention)


def _indices(scores: Tensor, slots: CacheSlots | None, rows: Tensor | None) -> tuple[Tensor, ...]:
    """Batch, head, query and key of each score (B, H, L, S), as int64 tensors that broadcast to it."""
    count = [torch.arange(n, device=scores.device) for n in scores.shape]
    batch, head = count[0][:, None, None, None], count[1][:, None, None]
    if slots is None:
        return batch, head, (count[2] if rows is None else rows).unsqueeze(1), count[3]
    return batch, head, (slots.lengths - 1)[:, None, None, None], slots.places[:, None, None]


@gin.configurable(module="amago.nets.transformer")
class FlexAttention(SelfAttention):
    """``flex_attention`` where it runs, else the default with a mask. For another pattern, override `SelfAttention.visible`.

    Block masks are kept for each length, so `visible` and ``mask_mod`` must always give the same result.

    Args:
        score_mod: (score, batch, head, query, key) -> score, elementwise, as of PyTorch's ``flex_attention``; ``query`` and
            ``key`` are the numbers of two tokens in their sequence.
        mask_mod: (batch, head, query, key) -> bool, True where the query may see the key, beside `SelfAttention.sees`.

    Attributes:
        failures: {(device type, dtype, head width): the error of the kernel's first call with such tensors, or None}.
    """

    devices: tuple[str, ...] = ("cuda",)
    """The types of devices on which the kernel has a backward pass."""

    def __init__(
        self,
        score_mod: Callable[..., Tensor] | None = None,
        mask_mod: Callable[..., Tensor] | None = None,
        causal: bool = True,
        dropout: float = 0.0,
    ) -> None:
        super().__init__(causal, dropout)
        self.score_mod, self.mask_mod = score_mod, mask_mod
        self.failures: dict[tuple[Any, ...], str | None] = {}
        self._block_masks: dict[tuple[int, torch.device], Any] = {}

    def _slide(self, window_size: int, sink_size: int | None = None) -> None:
        """See a window, and ``sink_size`` first tokens."""
        check_positive(window_size=window_size, sink_size=1 if sink_size is None else sink_size)
        self.window_size, self.sink_size = window_size, sink_size or 0
        self._window = (window_size, -1 if self.causal else window_size)

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
        return self.__dict__ | {"failures": {}, "_block_masks": {}}  # whose closure over this module cannot be pickled

    def forward(self, q: Tensor, k: Tensor, v: Tensor, slots: CacheSlots | None = None, real: Tensor | None = None) -> Tensor:
        if slots is None and real is None:
            reason = self._fault(q, k, v)
            if reason is None:
                return self._kernel(q, k, v)
            warn_fallback("FlexAttention", reason)
        if self.score_mod is None and self.mask_mod is None:
            return super().forward(q, k, v, slots, real)
        return self._written_out(q, k, v, slots, real)

    def _fault(self, q: Tensor, k: Tensor, v: Tensor) -> str | None:
        """The reason why the kernel cannot be used, or None."""
        if q.device.type not in self.devices:
            return f"its kernel has no backward pass for tensors on {q.device.type}"
        if self.dropout and self.training:
            return f"its kernel has no dropout, and dropout_attn is {self.dropout}"
        key = (q.device.type, q.dtype, q.shape[-1])
        if key not in self.failures:
            self.failures[key] = self._try(q, k, v)
        return self.failures[key]

    def _kernel(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        block_mask = self._block_mask(q.shape[2], q.device)
        return compiled_flex_attention()(q, k, v, score_mod=self.score_mod, block_mask=block_mask)

    def _try(self, q: Tensor, k: Tensor, v: Tensor) -> str | None:
        """The error of a forward and backward pass, or None. Backward is tried too: else its failure to compile would end training
        later."""
        try:
            with torch.enable_grad():
                self._kernel(*(x.detach().clone().requires_grad_() for x in (q, k, v))).sum().backward()
        except torch.OutOfMemoryError:
            raise
        except Exception as err:
            return f"{type(err).__name__}: {err}".splitlines()[0]
        return None

    def _scored(self, scores: Tensor, seen: Tensor, slots: CacheSlots | None, rows: Tensor | None) -> tuple[Tensor, Tensor]:
        indices = _indices(scores, slots, rows)
        if self.score_mod is not None:
            scores = self.score_mod(scores, *indices)
        return scores, seen if self.mask_mod is None else seen & self.mask_mod(*indices)


@gin.configurable(module="amago.nets.transformer")
class VanillaFlexAttention(FlexAttention):
    """`FlexAttention` without modifications."""

    def __init__(self, causal: bool = True, dropout: float = 0.0) -> None:
        super().__init__(causal=causal, dropout=dropout)


@gin.configurable(module="amago.nets.transformer")
class SlidingWindowFlexAttention(FlexAttention):
    """A token sees the ``window_size`` tokens before it. An actor remembers no more than these.

    With n layers, the output depends on the last n x window_size + 1 tokens. Without ``causal`` the window extends to as many later
    tokens. ``window_size`` has to be bound, as in ``use_config({"SlidingWindowFlexAttention.window_size": 128})``.
    """

    def __init__(self, causal: bool = True, dropout: float = 0.0, window_size: int = gin.REQUIRED) -> None:
        super().__init__(causal=causal, dropout=dropout)
        self._slide(window_size)


@gin.configurable(module="amago.nets.transformer")
class SlidingWindowSinkFlexAttention(FlexAttention):
    """The window of `SlidingWindowFlexAttention`, and the first ``sink_size`` tokens of the sequence (Xiao et al. 2023,
    arXiv 2309.17453): in acting the first of the episode, in training the first of the sub-sequence."""

    def __init__(self, causal: bool = True, dropout: float = 0.0, window_size: int = gin.REQUIRED, sink_size: int = 1) -> None:
        super().__init__(causal=causal, dropout=dropout)
        self._slide(window_size, sink_size)


@gin.configurable(module="amago.nets.transformer")
class ClippedSlidingSinkAttention(FlexAttention):
    """`SlidingWindowSinkFlexAttention` whose scores are softly clipped: c tanh(score / c), for c = ``logit_clip`` (Gemma Team
    2024, arXiv 2408.00118)."""

    def __init__(
        self,
        causal: bool = True,
        dropout: float = 0.0,
        window_size: int = gin.REQUIRED,
        sink_size: int = 1,
        logit_clip: float = 50.0,
    ) -> None:
        if not logit_clip > 0.0:
            raise ValueError(f"logit_clip must be positive, got logit_clip={logit_clip}")
        super().__init__(functools.partial(_soft_clip, clip=logit_clip), causal=causal, dropout=dropout)
        self._slide(window_size, sink_size)


def _soft_clip(score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor, clip: float) -> Tensor:
    return clip * torch.tanh(score / clip)
