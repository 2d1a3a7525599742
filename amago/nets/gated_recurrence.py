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


BLOCK, LEVELS = 8, 2
"""Timesteps of a block of `scan_in_blocks`, and the levels of blocks of blocks that a compiler looks into."""


def scan_(between: Tensor, states: Tensor, backwards: bool = False) -> Tensor:
    """The recurrence s_t + between_{t-1} s_{t-1} from the first timestep on, or s_t + between_t s_{t+1} from the last one back, for
    ``between`` (L - 1, ...) and ``states`` (L, ...), which may be overwritten. No gradients."""
    if torch.compiler.is_compiling() or not (states.is_cpu or len(states) <= 4 * BLOCK):
        return scan_in_blocks(between, states, backwards)
    rows, factors = list(states.unbind(0)), list(between.unbind(0))
    if backwards:
        rows.reverse()
        factors.reverse()
    for before, row, a in zip(rows, rows[1:], factors):
        row.addcmul_(a, before)
    return states


def scan_in_blocks(between: Tensor, states: Tensor, backwards: bool = False) -> Tensor:
    """`scan_` for GPUs and compilers, into new memory: within all blocks of `BLOCK` timesteps at once, over the ends of the blocks in the
    same way, and from there into the blocks. It reads and writes a number of bytes proportional to L, and is compiled once for all L."""
    none = torch.zeros_like(states[:1])
    return _scan_in_blocks(torch.cat((between, none) if backwards else (none, between)), states, backwards, LEVELS)


def _scan_in_blocks(factors: Tensor, states: Tensor, backwards: bool, levels: int) -> Tensor:
    """`scan_in_blocks` with the ``factors`` (L, ...) of all states; that of the state with which the scan begins is 0."""
    if torch.compiler.is_compiling() and levels == 0:
        return _opaque_scan(factors, states, backwards)
    if not torch.compiler.is_compiling() and levels < LEVELS:
        return scan_(factors[:-1] if backwards else factors[1:], states, backwards)
    n, blocks = len(states), max(len(states) // BLOCK + 1, 2)  # one block, or no padding, would be compiled apart
    after = states.new_zeros((BLOCK * blocks - n, *states.shape[1:]))
    parts = [list(torch.cat((x, after)).unflatten(0, (blocks, BLOCK)).unbind(1)) for x in (states, factors)]
    for part in parts if backwards else ():
        part.reverse()
    (value, *more), (product, *factors_of_more) = parts
    sums, products = [value], [product]
    for value, factor in zip(more, factors_of_more):
        sums.append(torch.addcmul(value, factor, sums[-1]))
        products.append(factor * products[-1])
    ends, none = _scan_in_blocks(products.pop(), sums.pop(), backwards, levels - 1), torch.zeros_like(after[:1])
    entering = torch.cat((ends, none))[1:] if backwards else torch.cat((none, ends))[:-1]
    found = [*(torch.addcmul(x, p, entering) for x, p in zip(sums, products)), ends]
    return torch.stack(found[::-1] if backwards else found, 1).flatten(0, 1)[:n]


@torch.library.custom_op("amago::scan", mutates_args=(), schema="(Tensor factors, Tensor states, bool backwards) -> Tensor")
def _opaque_scan(factors: Tensor, states: Tensor, backwards: bool) -> Tensor:
    """One operation for a compiler, which would compile a loop over each number of states apart."""
    states = states.clone(memory_format=torch.contiguous_format)
    return scan_(factors[:-1] if backwards else factors[1:], states, backwards)


@_opaque_scan.register_fake
def _(factors: Tensor, states: Tensor, backwards: bool) -> Tensor:
    return states.new_empty(states.shape)
