"""What all networks share: activations by name, normalisation of inputs, metrics of activations, checks of arguments, dtypes."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import gin
import torch
import torch.nn.functional as F
from torch import Tensor

from amago import config
from amago.nets import ranks
from amago.nets.cpu.weight_cache import WeightCache
from amago.nets.dtypes import at_least_float32 as at_least_float32
from amago.nets.dtypes import autocast_dtype as autocast_dtype
from amago.nets.moments import RunningMoments
from amago.ops import symexp as symexp
from amago.ops import symlog as symlog

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


@torch.no_grad()
def add_activation_log(key: str, tensor: Tensor, log_dict: dict[str, Any] | None = None) -> None:
    """Add metrics of a layer's output to ``log_dict``: "activation-{key}-max", "-min", "-std" and "-mean", scalars.

    Args:
        key: name of the layer.
        tensor: its output, of any shape.
        log_dict: None: nothing is computed.
    """
    if log_dict is None:
        return
    x = at_least_float32(tensor.detach())
    spread = x.std() if x.numel() > 1 else torch.zeros_like(x.sum())
    log_dict |= {
        f"activation-{key}-{name}": v for name, v in (("max", x.max()), ("min", x.min()), ("std", spread), ("mean", x.mean()))
    }


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


@gin.configurable
class InputNorm(RunningMoments):
    """Centre and scale each feature by running statistics of the inputs in training mode.

    Features whose sigma is at most ``skip_below`` are only centred; the output is clamped to [-1e4, 1e4]. It is in float32, or in
    float64 for inputs in float64.

    Args:
        dim: number of features.
        beta: rate of the statistics after many updates, see `amago.nets.moments.RunningMoments`.
        init_nu: second moment before any data.
        skip: return inputs as they are. The statistics are then neither updated nor part of the state.
        skip_below: sigma below which a feature is not scaled.
        initial_samples: number of updates that the statistics before any data count as. With 1, as in the original system, they fade
            slowly: a feature of mean 1,000 and standard deviation 1 has a sigma of 99 after 100 updates.
    """

    def __init__(
        self,
        dim: int,
        beta: float = 1e-4,
        init_nu: float = 1.0,
        skip: bool = False,
        skip_below: float = 0.01,
        initial_samples: int = 0,
    ) -> None:
        check_positive(dim=dim)
        super().__init__((dim,), (1,), beta, init_nu, initial_samples)
        self.skip, self.skip_below = skip, skip_below
        if skip:
            self._non_persistent_buffers_set.update(self._buffers)
        self._divisor = WeightCache()  # nine operations on a few numbers, which a policy's step need not repeat

    def train(self, mode: bool = True) -> InputNorm:
        self._divisor.clear()
        return super().train(mode)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        if self.skip:  # the original system stores them all the same
            for name in self._buffers:
                state_dict.pop(prefix + name, None)
        super()._load_from_state_dict(state_dict, prefix, *args)

    @property
    def sigma(self) -> Tensor:
        """(dim,), in [1e-3, 1e6]."""
        return torch.sqrt(self.variance + 1e-5).nan_to_num(nan=1e-3).clamp(1e-3, 1e6)

    @torch.no_grad()
    def update(self, x: Tensor, mask: Tensor | None = None) -> None:
        """Move the statistics towards those of ``x`` (B, L, dim) where ``mask`` (B, L, 1) is True.

        A batch without a real timestep changes nothing; a feature with a non-finite value keeps its statistics.
        """
        x = x.to(self.nu.dtype)
        if mask is None and not ranks.is_joint():
            first, second, real = x.mean((0, 1)), x.square().mean((0, 1)), torch.ones((), dtype=torch.bool, device=x.device)
        else:
            mask = torch.ones((*x.shape[:2], 1), dtype=torch.bool, device=x.device) if mask is None else mask
            kept = torch.where(mask, x, 0.0)
            sums, squares, count = ranks.total(kept.sum((0, 1)), kept.square().sum((0, 1)), mask.sum())
            first, second = (s / count.clamp(min=1) for s in (sums, squares))
            real = count > 0
        self._move(first, second, real & torch.isfinite(first) & torch.isfinite(second), real)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """(B, L, dim) -> the same, normalised; in training mode the statistics are updated first."""
        if self.skip:
            return x
        if self.training:
            self.update(x, mask)
        divisor = self._scale() if self.training else self._divisor.get((self.mu, self.nu), self._scale, exact=True)
        x = at_least_float32(x)
        return ((x - self.mu.to(x.dtype)) / divisor).clamp(-1e4, 1e4)

    def _scale(self) -> Tensor:
        """(dim,), sigma, or 1 for features that are only centred."""
        sigma = self.sigma
        return torch.where(sigma > self.skip_below, sigma, torch.ones_like(sigma))


config.also_known_as(InputNorm, "amago.nets.ff.InputNorm", "nets.ff.InputNorm", "ff.InputNorm")
