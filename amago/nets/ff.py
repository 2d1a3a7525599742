"""Feed-forward networks: a multi-layer perceptron, a residual block, normalisation by name, and input normalisation."""

from __future__ import annotations

import gin
import torch
from torch import Tensor, nn

from amago.nets.cpu.packed import Linear
from amago.nets.cpu.weight_cache import WeightCache
from amago.nets.moments import RunningMoments
from amago.nets.utils import activation_switch, at_least_float32, check_dropout, check_positive


class Normalization(nn.Module):
    """Normalise the last dimension: "layer" (LayerNorm), "rmsnorm" (RMSNorm, eps 1e-5) or "none".

    Args:
        method: one of these names.
        d_model: width of the last dimension.

    Raises:
        ValueError: another method.
    """

    def __init__(self, method: str, d_model: int) -> None:
        super().__init__()
        if method == "layer":
            self.norm: nn.Module = nn.LayerNorm(d_model)
        elif method == "rmsnorm":
            self.norm = nn.RMSNorm(d_model, eps=1e-5)
        elif method == "none":
            self.norm = nn.Identity()
        else:
            raise ValueError(f"unknown normalization {method!r}: use 'layer', 'rmsnorm' or 'none'")

    def forward(self, x: Tensor) -> Tensor:
        norm = self.norm
        if norm.__class__ is nn.LayerNorm:  # without the module's call: there are 14 norms in a step
            return torch.layer_norm(x, norm.normalized_shape, norm.weight, norm.bias, norm.eps)
        return norm(x)


class MLP(nn.Module):
    """(..., d_inp) -> (..., d_output) through ``n_layers`` hidden layers of ``d_hidden``; no activation at the end."""

    def __init__(
        self,
        d_inp: int,
        d_hidden: int,
        n_layers: int,
        d_output: int,
        dropout_p: float = 0.0,
        activation: str = "leaky_relu",
    ) -> None:
        super().__init__()
        check_positive(d_inp=d_inp, d_hidden=d_hidden, n_layers=n_layers, d_output=d_output)
        check_dropout(dropout_p=dropout_p)
        self.in_layer = Linear(d_inp, d_hidden)
        self.layers = nn.ModuleList(Linear(d_hidden, d_hidden) for _ in range(n_layers - 1))
        self.out_layer = Linear(d_hidden, d_output)
        self.dropout = nn.Dropout(dropout_p)
        self.activation = activation_switch(activation, inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        for layer in (self.in_layer, *self.layers):
            x = self.activation(layer(x))
            if self.training:  # in evaluation mode the module's call would do nothing
                x = self.dropout(x)
        return self.out_layer(x)


class FFBlock(nn.Module):
    """Residual block x + act(W2 act(W1 x)), (..., d_model) -> (..., d_model)."""

    def __init__(self, d_model: int, d_ff: int, dropout: float = 0.0, activation: str = "leaky_relu") -> None:
        super().__init__()
        check_positive(d_model=d_model, d_ff=d_ff)
        check_dropout(dropout=dropout)
        self.ff1 = Linear(d_model, d_ff)
        self.ff2 = Linear(d_ff, d_model)
        self.dropout = nn.Dropout(dropout)
        self.activation = activation_switch(activation, inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        h = self.activation(self.ff1(x))
        if self.training:
            h = self.dropout(h)
        h = self.activation(self.ff2(h))
        return x + (self.dropout(h) if self.training else h)


@gin.configurable
class InputNorm(RunningMoments):
    """Centre and scale each feature by running statistics of the inputs in training mode.

    Features whose sigma is at most ``skip_below`` are only centred; the output is clamped to [-1e4, 1e4]. It is in float32, or in
    float64 for inputs in float64.

    Args:
        d_inp: number of features.
        beta: rate of the statistics after many updates, see `amago.nets.moments.RunningMoments`.
        init_nu: second moment before any data.
        skip_below: sigma below which a feature is not scaled.
        initial_samples: number of updates that the statistics before any data count as. With 1, as in the original system, they fade
            slowly: a feature of mean 1,000 and standard deviation 1 has a sigma of 99 after 100 updates.
    """

    def __init__(
        self, d_inp: int, beta: float = 1e-4, init_nu: float = 1.0, skip_below: float = 0.01, initial_samples: int = 0
    ) -> None:
        check_positive(d_inp=d_inp)
        super().__init__((d_inp,), (1,), beta, init_nu, initial_samples)
        self.skip_below = skip_below
        self._divisor = WeightCache()  # nine operations on a few numbers, which a policy's step need not repeat

    def train(self, mode: bool = True) -> InputNorm:
        self._divisor.clear()
        return super().train(mode)

    @property
    def sigma(self) -> Tensor:
        """(d_inp,), in [1e-3, 1e6]."""
        return torch.sqrt(self.variance + 1e-5).nan_to_num(nan=1e-3).clamp(1e-3, 1e6)

    @torch.no_grad()
    def update(self, x: Tensor, mask: Tensor | None = None) -> None:
        """Move the statistics towards those of ``x`` (B, L, d_inp) where ``mask`` (B, L, 1) is True.

        A batch without a real timestep changes nothing; a feature with a non-finite value keeps its statistics.
        """
        x = x.to(self.nu.dtype)
        if mask is None:
            first, second, real = x.mean((0, 1)), x.square().mean((0, 1)), torch.ones((), dtype=torch.bool, device=x.device)
        else:
            kept = torch.where(mask, x, 0.0)
            count = mask.sum()
            first, second = (k.sum((0, 1)) / count.clamp(min=1) for k in (kept, kept.square()))
            real = count > 0
        self._move(first, second, real & torch.isfinite(first) & torch.isfinite(second), real)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """(B, L, d_inp) -> the same, normalised; in training mode the statistics are updated first."""
        if self.training:
            self.update(x, mask)
        divisor = self._scale() if self.training else self._divisor.get((self.mu, self.nu), self._scale, exact=True)
        x = at_least_float32(x)
        return ((x - self.mu.to(x.dtype)) / divisor).clamp(-1e4, 1e4)

    def _scale(self) -> Tensor:
        """(d_inp,), sigma, or 1 for features that are only centred."""
        sigma = self.sigma
        return torch.where(sigma > self.skip_below, sigma, torch.ones_like(sigma))
