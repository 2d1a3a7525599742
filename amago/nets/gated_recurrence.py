"""Layers of linear recurrences with gates that depend on the input alone: no timestep waits for another one's matrix products.

Shapes: L timesteps first, then B sequences; E numbers of a timestep.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx, once_differentiable

from amago.nets.ff import FFBlock, Normalization
from amago.nets.utils import Linear, at_least_float32, check_positive


def set_forgetting(bias: Tensor, longest: float) -> None:
    """Set the biases of gates that keep the state such that, at the start, its numbers forget over 1 to ``longest`` timesteps
    (Tallec & Ollivier 2018, arXiv 1804.11188)."""
    if not longest >= 1.0:
        raise ValueError(f"longest must be at least 1 timestep, got {longest}")
    with torch.no_grad():
        bias.uniform_(0.0, math.log(longest))


class MinGRU(nn.Module):
    """The minimal GRU (Feng et al. 2024, arXiv 2410.01201): h_t = (1 - z_t) h_{t-1} + z_t c_t, whose gate z and candidate c are
    functions of the input, multiplied by a gate on the way out. (L, B, d_model) -> (L, B, d_model), with ``d_hidden`` numbers of
    state; ``longest`` as of `set_forgetting`."""

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
    """A recurrent layer, then a feed-forward one, each with a norm before it and added to its input. (L, B, d_model) -> the
    same."""

    def __init__(self, recurrence: nn.Module, ff: FFBlock, norm: Normalization) -> None:
        super().__init__()
        self.recurrence, self.ff, self.norm = recurrence, ff, norm

    def forward(self, x: Tensor, state: Tensor | None = None) -> Tensor:
        out: Tensor = self.ff(x + self.recurrence(self.norm(x), state))
        return out


def linear_scan(decay: Tensor, inputs: Tensor, h0: Tensor | None = None) -> Tensor:
    """All states (L, ...) of h_t = decay_t h_{t-1} + inputs_t, elementwise, for ``decay`` and ``inputs`` (L, ...) of one dtype. No
    gradient flows to ``h0`` (...), the state before the first timestep; None means zeros."""
    if h0 is not None:
        before = h0.detach().to(inputs.dtype).clone()  # callers write the next state into h0
        first = torch.addcmul(inputs[:1], decay[:1], before.unsqueeze(0))
        if len(decay) == 1:
            return first
        inputs = torch.cat((first, inputs[1:]))
    states: Tensor = _Scan.apply(decay, inputs)
    return states


class _Scan(torch.autograd.Function):
    """`linear_scan` from zeros."""

    @staticmethod
    def forward(ctx: FunctionCtx, decay: Tensor, inputs: Tensor) -> Tensor:
        states = scan_(decay[1:], inputs.clone(memory_format=torch.contiguous_format))
        ctx.save_for_backward(decay, states)
        return states

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        decay, states = ctx.saved_tensors
        with torch.autocast(grad.device.type, enabled=False):
            g = scan_(decay[1:], grad.clone(memory_format=torch.contiguous_format), backwards=True)
            d_decay = torch.zeros_like(decay)
            torch.mul(g[1:], states[:-1], out=d_decay[1:])
        return d_decay, g


def scan_(between: Tensor, states: Tensor, backwards: bool = False) -> Tensor:
    """The recurrence s_t + between_{t-1} s_{t-1} from the first timestep on, or s_t + between_t s_{t+1} from the last one back, for
    ``between`` (L - 1, ...) and ``states`` (L, ...), which may be overwritten. No gradients."""
    if not states.is_cpu or torch.compiler.is_compiling():
        return scan_in_pairs(between, states, backwards)
    rows, factors = list(states.unbind(0)), list(between.unbind(0))
    if backwards:
        rows.reverse()
        factors.reverse()
    for before, row, a in zip(rows, rows[1:], factors):
        row.addcmul_(a, before)
    return states


def scan_in_pairs(between: Tensor, states: Tensor, backwards: bool = False) -> Tensor:
    """`scan_` for GPUs, into new memory: within pairs of timesteps, over the pairs in the same way, and back. It takes few kernels for each
    doubling of L, and reads and writes a number of bytes proportional to L."""
    n, pairs = len(states), len(states) // 2
    if n == 1:
        return states
    odd = n % 2 if backwards else 0  # pairs begin here; the timestep that is left over comes before or after them
    first, second = states[odd : odd + 2 * pairs : 2], states[odd + 1 : odd + 2 * pairs : 2]
    within, across = between[odd : odd + 2 * pairs : 2], between[odd + 1 : odd + 2 * pairs - 1 : 2]
    left, link = (states[:odd], between[:odd]) if backwards else (states[2 * pairs :], between[2 * pairs - 1 :])
    if backwards:
        first = scan_in_pairs(across * within[:-1], torch.addcmul(first, within, second), True)
        second = torch.cat((torch.addcmul(second[:-1], across, first[1:]), second[-1:]))
        left = torch.addcmul(left, link, first[:1]) if odd else left
    else:
        second = scan_in_pairs(across * within[1:], torch.addcmul(second, within, first))
        first = torch.cat((first[:1], torch.addcmul(first[1:], across, second[:-1])))
        left = torch.addcmul(left, link, second[-1:]) if len(left) else left
    both = torch.stack((first, second), 1).flatten(0, 1)
    return torch.cat((left, both) if backwards else (both, left)) if len(left) else both
