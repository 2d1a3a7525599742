"""Layers of linear recurrences with gates that depend on the input alone: no timestep waits for another one's matrix products.

Shapes: L timesteps first, then B sequences; E numbers of a timestep.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from amago.nets.cpu.packed import Linear
from amago.nets.ff import FFBlock, Normalization
from amago.nets.linear_scan import linear_scan
from amago.nets.utils import at_least_float32, check_positive


def set_forgetting(bias: Tensor, longest: float) -> None:
    """Set the biases of gates that keep the state such that, at the start, its numbers forget over 1 to ``longest`` timesteps (Tallec &
    Ollivier 2018, arXiv 1804.11188).

    Raises:
        ValueError: ``longest`` is less than 1.
    """
    if not longest >= 1.0:
        raise ValueError(f"longest must be at least 1 timestep, got {longest}")
    with torch.no_grad():
        bias.uniform_(0.0, math.log(longest))


class MinGRU(nn.Module):
    """The minimal GRU (Feng et al. 2024, arXiv 2410.01201): h_t = (1 - z_t) h_{t-1} + z_t c_t, whose gate z and candidate c are functions
    of the input, multiplied by a gate on the way out. (L, B, d_model) -> (L, B, d_model).

    Args:
        d_model: E.
        d_hidden: numbers of state.
        longest: at the start, the numbers of state forget over 1 to ``longest`` timesteps, see `set_forgetting`.
    """

    def __init__(self, d_model: int, d_hidden: int, longest: float) -> None:
        super().__init__()
        check_positive(d_model=d_model, d_hidden=d_hidden)
        self.inp = Linear(d_model, 3 * d_hidden)
        self.out = Linear(d_hidden, d_model)
        with torch.no_grad():
            set_forgetting(self.inp.bias[:d_hidden], longest)
            self.inp.bias[:d_hidden].neg_()

    def forward(self, x: Tensor, state: Tensor | None = None) -> Tensor:
        """Map a sequence; from ``state`` (B, d_hidden), which is written in place, or from zeros."""
        z, c, gate = self.inp(x).chunk(3, dim=-1)
        z, c = at_least_float32(z), at_least_float32(c)
        with torch.autocast(x.device.type, enabled=False):
            h = linear_scan(torch.sigmoid(-z), torch.sigmoid(z) * c, state)
        if state is not None:
            state.copy_(h[-1].detach())
        return self.out(h.to(gate.dtype) * F.silu(gate))


class GatedRecurrenceBlock(nn.Module):
    """A recurrent layer, then a feed-forward one, each with a norm before it and added to its input. (L, B, d_model) -> the same."""

    def __init__(self, recurrence: nn.Module, ff: FFBlock, norm: Normalization) -> None:
        super().__init__()
        self.recurrence, self.ff, self.norm = recurrence, ff, norm

    def forward(self, x: Tensor, state: Tensor | None = None) -> Tensor:
        out: Tensor = self.ff(x + self.recurrence(self.norm(x), state))
        return out
