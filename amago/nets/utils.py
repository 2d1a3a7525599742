"""What all networks share: activations by name, checks of arguments, dtypes."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Activation = Callable[[Tensor], Tensor]


_ACTIVATIONS: dict[str, Activation] = {
    "leaky_relu": F.leaky_relu,
    "relu": F.relu,
    "gelu": F.gelu,
    "silu": F.silu,
    "swish": F.silu,
    "elu": F.elu,
    "mish": F.mish,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
}


def activation_switch(name: str, inplace: bool = False) -> Activation:
    """The elementwise function of that name.

    Args:
        name: "leaky_relu", "relu", "gelu", "silu" (or "swish"), "elu", "mish", "tanh" or "sigmoid".
        inplace: let leaky ReLU overwrite its input, which must be a tensor that nothing else uses, such as the output of a
            linear layer. Backward then keeps one tensor instead of two: a fifth of what an update of a Transformer keeps.

    Raises:
        ValueError: no such activation; the message lists those that exist.
    """
    if name not in _ACTIVATIONS:
        raise ValueError(f"activation={name!r} is unknown: use one of {', '.join(sorted(_ACTIVATIONS))}")
    return partial(F.leaky_relu, inplace=True) if inplace and name == "leaky_relu" else _ACTIVATIONS[name]


def has_argument(function: Callable[..., Any], name: str) -> bool:
    """Whether a function can be called with a keyword argument of that name."""
    parameters = inspect.signature(function).parameters.values()
    return any(p.name == name or p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters)


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
    if kind in ("cpu", "cuda") and not torch.is_autocast_enabled(kind):  # shortcut: asked about thirty times a step
        return None
    if not torch.amp.is_autocast_available(kind) or not torch.is_autocast_enabled(kind):
        return None
    return torch.get_autocast_dtype(kind)


def at_least_float32(x: Tensor) -> Tensor:
    """Half precision to float32; anything else as it is."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
