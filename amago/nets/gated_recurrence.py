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
        states = _scan(decay, inputs)
        ctx.save_for_backward(decay, states)
        return states

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        decay, states = ctx.saved_tensors
        with torch.autocast(grad.device.type, enabled=False):
            later = torch.cat((decay[1:], torch.zeros_like(decay[:1])))  # g_t = grad_t + decay_{t+1} g_{t+1}
            g = _scan(later, grad, backwards=True)
            d_decay = torch.zeros_like(decay)
            torch.mul(g[1:], states[:-1], out=d_decay[1:])
        return d_decay, g


def _scan(decay: Tensor, inputs: Tensor, backwards: bool = False) -> Tensor:
    """The recurrence from the first timestep on, or from the last one back."""
    if decay.is_cpu and not torch.compiler.is_compiling():
        states = inputs.clone(memory_format=torch.contiguous_format)
        rows, decays = list(states.unbind(0)), list(decay.unbind(0))
        if backwards:
            rows.reverse()
            decays.reverse()
        for before, row, a in zip(rows, rows[1:], decays[1:]):
            row.addcmul_(a, before)
        return states
    return _doubling(decay.flip(0), inputs.flip(0)).flip(0) if backwards else _doubling(decay, inputs)


def _doubling(decay: Tensor, states: Tensor) -> Tensor:
    reach = 1  # each state holds the inputs of its last ``reach`` timesteps
    while reach < len(states):
        states = torch.cat((states[:reach], torch.addcmul(states[reach:], decay[reach:], states[:-reach])))
        decay = torch.cat((decay[:reach], decay[reach:] * decay[:-reach]))
        reach *= 2
    return states
