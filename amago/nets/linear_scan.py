"""The linear recurrence h_t = a_t h_{t-1} + b_t over whole sequences.

On a CPU it runs in order, one multiply-add for each timestep; elsewhere in ceil(log2 L) passes over the whole sequence (Hillis & Steele
1986, "Data parallel algorithms"), because there a launch costs more than arithmetic.

Shapes: L timesteps first, then any; usually (L, B, D).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def linear_scan(decay: Tensor, inputs: Tensor, h0: Tensor | None = None) -> Tensor:
    """All states of h_t = decay_t h_{t-1} + inputs_t, elementwise.

    Args:
        decay, inputs: (L, ...), of one shape and dtype.
        h0: (...), the state before the first timestep; no gradient flows to it. None means zeros.

    Returns:
        (L, ...).
    """
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
    def forward(ctx: Any, decay: Tensor, inputs: Tensor) -> Tensor:
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
    if decay.is_cpu:
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
