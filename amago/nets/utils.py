"""Small things every network uses: activations by name, and effective weights that are computed once per version."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook

Activation = Callable[[Tensor], Tensor]


class _LeakyReLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        out = F.leaky_relu(x)
        ctx.save_for_backward(out)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return torch.ops.aten.leaky_relu_backward(grad, ctx.saved_tensors[0], 0.01, True)  # type: ignore[no-any-return]


def leaky_relu(x: Tensor) -> Tensor:
    """``F.leaky_relu``; for backward it keeps its output, which the next layer keeps too, and not its input, which nobody else
    needs: a fifth of what an update of a Transformer keeps."""
    learns = torch.is_grad_enabled() and x.requires_grad and not torch.compiler.is_compiling()
    return _LeakyReLU.apply(x) if learns else F.leaky_relu(x)  # type: ignore[no-any-return]


_ACTIVATIONS: dict[str, Activation] = {
    "leaky_relu": leaky_relu,
    "relu": F.relu,
    "gelu": F.gelu,
    "silu": F.silu,
    "swish": F.silu,
    "elu": F.elu,
    "mish": F.mish,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
}


def activation_switch(name: str) -> Activation:
    """The elementwise function of that name.

    Raises:
        ValueError: no such activation; the message lists those that exist.
    """
    if name not in _ACTIVATIONS:
        raise ValueError(f"activation={name!r} is unknown: use one of {', '.join(sorted(_ACTIVATIONS))}")
    return _ACTIVATIONS[name]


def check_positive(**values: int) -> None:
    """Raise ValueError, naming the argument, for the first value below 1."""
    for name, value in values.items():
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {name}={value}")


def check_dropout(**values: float) -> None:
    """Raise ValueError, naming the argument, for the first probability outside [0, 1)."""
    for name, value in values.items():
        if not 0.0 <= value < 1.0:
            raise ValueError(f"{name} must be in [0, 1), got {name}={value}")


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """The dtype autocast would compute in on ``device``, or None where it is off."""
    kind = device.type
    if kind in ("cpu", "cuda") and not torch.is_autocast_enabled(kind):  # the usual case, asked for some thirty times a step
        return None
    if not torch.amp.is_autocast_available(kind) or not torch.is_autocast_enabled(kind):
        return None
    return torch.get_autocast_dtype(kind)


def at_least_float32(x: Tensor) -> Tensor:
    """Half precision to float32; anything else as it is."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


_optimizer_steps = 0


def _count_optimizer_step(*_: Any) -> None:
    global _optimizer_steps
    _optimizer_steps += 1


# Fused optimizers write to parameters without raising their version counters (seen with AdamW(fused=True), torch 2.13 on CPU),
# so versions alone would leave stale weights behind.
register_optimizer_step_post_hook(_count_optimizer_step)


class WeightCache:
    """Remembers one tensor derived from parameters, for forward passes that train nothing.

    The value is used again while every source is the same storage at the same version and no optimizer has stepped since, so
    training, an EMA update, `load_state_dict` or a move to another device or dtype is noticed. Writes through ``Tensor.data`` bump no version: only
    `clear` (which modules call whenever they enter training mode) covers those.
    """

    def __init__(self) -> None:
        self._key: list[Any] | None = None
        self._value: Any = None

    def clear(self) -> None:
        self._key = self._value = None

    def get(self, sources: tuple[Tensor, ...], compute: Callable[[], Tensor], exact: bool = False) -> Tensor:
        """``compute()``, or what it gave last time, in autocast's dtype where that is on and the value is not to be ``exact``.
        Bypassed where gradients are on or versions are not tracked."""
        if torch.is_grad_enabled() or torch.compiler.is_compiling():
            return compute()
        dtype = None if exact else autocast_dtype(sources[0].device)
        key: list[Any] = [dtype, _optimizer_steps]
        for s in sources:  # written out: a policy asks some twenty times a step
            if s.is_inference():
                return compute()
            key += (s.data_ptr(), s._version, s.dtype, s.device)
        if self._value is None or key != self._key:
            value = compute()
            self._key, self._value = key, value if dtype is None else value.to(dtype)
        return self._value  # type: ignore[no-any-return]

    def __deepcopy__(self, memo: dict[int, Any]) -> WeightCache:
        return WeightCache()

    def __reduce__(self) -> tuple[type[WeightCache], tuple[()]]:
        return WeightCache, ()
