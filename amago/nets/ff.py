"""Feed-forward networks: a multi-layer perceptron, a residual block, normalisation by name, and input normalisation."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from amago.nets.cpu.packed import Linear
from amago.nets.utils import activation_switch, check_dropout, check_positive


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


class InputNorm(nn.Module):
    """Centre and scale each feature by running statistics of the inputs in training mode.

    Mean and second moment move with rate beta / (1 - (1 - beta)^t). Features whose sigma is at most ``skip_below`` are only
    centred; the output is clamped to [-1e4, 1e4]. Always computed in float32.

    Args:
        d_inp: number of features.
        beta: rate of the statistics for large t.
        init_nu: second moment before any data.
        skip_below: sigma below which a feature is not scaled.
    """

    mu: Tensor
    nu: Tensor
    _t: Tensor

    def __init__(self, d_inp: int, beta: float = 1e-4, init_nu: float = 1.0, skip_below: float = 0.01) -> None:
        super().__init__()
        check_positive(d_inp=d_inp)
        if not 0.0 < beta < 1.0:
            raise ValueError(f"beta must be in (0, 1), got beta={beta}")
        self.beta, self.skip_below = beta, skip_below
        self.register_buffer("mu", torch.zeros(d_inp))
        self.register_buffer("nu", torch.full((d_inp,), float(init_nu)))
        self.register_buffer("_t", torch.ones(1))

    @property
    def sigma(self) -> Tensor:
        """(d_inp,), in [1e-3, 1e6]."""
        return torch.sqrt(self.nu - self.mu.square() + 1e-5).nan_to_num(nan=1e-3).clamp(1e-3, 1e6)

    @torch.no_grad()
    def update(self, x: Tensor, mask: Tensor | None = None) -> None:
        """Move the statistics towards those of ``x`` (B, L, d_inp) where ``mask`` (B, L, 1) is True.

        A batch without a real timestep changes nothing; a feature with a non-finite value keeps its statistics.
        """
        x = x.float()
        if mask is None:
            first, second, real = x.mean((0, 1)), x.square().mean((0, 1)), torch.ones((), dtype=torch.bool, device=x.device)
        else:
            kept = torch.where(mask, x, 0.0)
            count = mask.sum()
            first, second = (k.sum((0, 1)) / count.clamp(min=1) for k in (kept, kept.square()))
            real = count > 0
        t = self._t + 1
        rate = self.beta / (1 - (1 - self.beta) ** t)
        use = real & torch.isfinite(first) & torch.isfinite(second)
        self._t.copy_(torch.where(real, t, self._t))
        self.mu.copy_(torch.where(use, (1 - rate) * self.mu + rate * first, self.mu))
        self.nu.copy_(torch.where(use, (1 - rate) * self.nu + rate * second, self.nu))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """(B, L, d_inp) -> the same, normalised; in training mode the statistics are updated first."""
        if self.training:
            self.update(x, mask)
        sigma = self.sigma
        divisor = torch.where(sigma > self.skip_below, sigma, torch.ones_like(sigma))
        return ((x.float() - self.mu) / divisor).clamp(-1e4, 1e4)
