"""Selective state-space blocks (Gu & Dao 2023, arXiv 2312.00752) in plain PyTorch.

Parameter names and layouts equal ``mamba_ssm.Mamba``'s, so weights can be copied in both directions. The scan
works on chunks of the sequence, stores one state for each, and computes the others again in the backward pass: its memory grows
with the length of a chunk. On a GPU with the ``mamba_ssm`` package, training uses the fused scan of that package.

Shapes: B sequences, L timesteps, C timesteps of a chunk, D channels (``expand`` x d_model), N numbers of state a channel.
States are (B, N, D), with the longest dimension last for the vector units of CPUs.
"""

from __future__ import annotations

import functools
import importlib
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from amago.nets.ff import Normalization
from amago.nets.gated_recurrence import scan_
from amago.nets.utils import Linear, at_least_float32, check_positive


def _fused_scan() -> Callable[..., Tensor] | None:
    """``selective_scan_fn`` of mamba_ssm, or None where the package is not installed."""
    return _imported_scan()


# as torch.compiler.assume_constant_result does, which would import the compiler: else the compiler stops at the import
_fused_scan._dynamo_marked_constant = True  # type: ignore[attr-defined]


@functools.cache
def _imported_scan() -> Callable[..., Tensor] | None:
    try:
        kernel: Callable[..., Tensor] = importlib.import_module("mamba_ssm.ops.selective_scan_interface").selective_scan_fn
    except ImportError:
        return None
    return kernel


def _decays(dt: Tensor, A: Tensor) -> Tensor:
    """exp(dt A), (C, B, N, D), from dt (C, B, D) and A (N, D)."""
    return (dt.unsqueeze(2) * A).exp_()


def _recur(states: Tensor, decays: Tensor, inputs: Tensor, b: Tensor) -> Tensor:
    """All states (C + 1, B, N, D), of which ``states`` has the first: h_t = decay_t h_{t-1} + b_t (dt x)_t, where ``inputs`` is dt x."""
    torch.mul(b.unsqueeze(-1), inputs.unsqueeze(2), out=states[1:])
    return scan_(decays, states)


class _Scan(torch.autograd.Function):
    """`selective_scan` in chunks, time first: x, dt (L, B, D); A (N, D); b, c (L, B, N); h0 (B, N, D), without gradient.

    Returns y (L, B, D) and the last state (B, N, D).
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, dt: Tensor, A: Tensor, b: Tensor, c: Tensor, h0: Tensor, chunk: int
    ) -> tuple[Tensor, Tensor]:
        L, B, D = x.shape
        y = torch.empty_like(x)
        parts = _parts(L, chunk)
        buffer = x.new_empty((parts[0].stop + 1, B, A.shape[0], D))
        starts = []
        last = h0
        for part in parts:
            states = buffer[: part.stop - part.start + 1]
            starts.append(last.clone())
            states[0] = starts[-1]
            decays = _decays(dt[part], A)
            states = _recur(states, decays, dt[part] * x[part], b[part])
            y[part] = torch.mul(states[1:], c[part].unsqueeze(-1), out=decays).sum(2)
            last = states[-1]
        last = last.clone()
        ctx.chunk = chunk
        ctx.save_for_backward(x, dt, A, b, c, torch.stack(starts))
        ctx.mark_non_differentiable(last)
        return y, last

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_y: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        x, dt, A, b, c, starts = ctx.saved_tensors
        with torch.autocast(x.device.type, enabled=False):
            return (*_scan_backward(grad_y.contiguous(), x, dt, A, b, c, starts, ctx.chunk), None, None)


def _scan_backward(
    grad_y: Tensor, x: Tensor, dt: Tensor, A: Tensor, b: Tensor, c: Tensor, starts: Tensor, chunk: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of x, dt, A, b, c: the recurrence g_t = c_t dy_t + decay_{t+1} g_{t+1} backwards, chunk by chunk."""
    L, B, D = x.shape
    dx, ddt, db, dc = (torch.empty_like(z) for z in (x, dt, b, c))
    dA = torch.zeros_like(A)
    parts = _parts(L, chunk)
    buffer = x.new_empty((parts[0].stop + 1, B, A.shape[0], D))
    later = torch.zeros_like(starts[0])  # decay_{t+1} g_{t+1} of the following chunk
    for i, part in reversed(list(enumerate(parts))):
        states = buffer[: part.stop - part.start + 1]
        states[0] = starts[i]
        decays, inputs = _decays(dt[part], A), dt[part] * x[part]
        states = _recur(states, decays, inputs, b[part])
        g = c[part].unsqueeze(-1) * grad_y[part].unsqueeze(2)  # (C, B, N, D)
        g[-1] += later
        g = scan_(decays[1:], g, backwards=True)
        later = decays[0] * g[0]
        product = torch.empty_like(g)
        dc[part] = torch.mul(states[1:], grad_y[part].unsqueeze(2), out=product).sum(3)
        db[part] = torch.mul(g, inputs.unsqueeze(2), out=product).sum(3)
        d_inputs = torch.mul(g, b[part].unsqueeze(-1), out=product).sum(2)
        dx[part] = d_inputs * dt[part]
        d_exponent = g.mul_(states[:-1]).mul_(decays)  # gradient of dt A
        dA += torch.mul(d_exponent, dt[part].unsqueeze(2), out=decays).sum((0, 1))
        ddt[part] = torch.addcmul(d_exponent.mul_(A).sum(2), d_inputs, x[part])
    return dx, ddt, dA, db, dc


def _parts(length: int, chunk: int) -> list[slice]:
    """The chunks of a sequence, as slices."""
    parts, stop = [], 0
    while stop < length:  # with a range or a minimum, a compiler would compile each length apart
        start, stop = stop, stop + chunk if stop + chunk < length else length
        parts.append(slice(start, stop))
    return parts


def selective_scan(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, h0: Tensor | None = None, chunk: int | None = None
) -> tuple[Tensor, Tensor | None]:
    """The selective scan: h_t = exp(dt_t A) h_{t-1} + dt_t B_t x_t and y_t = C_t h_t, for each channel separately.

    Args:
        x, dt: (B, L, D).
        A: (D, N), negative.
        B, C: (B, L, N).
        h0: (B, N, D), the state before the first timestep; no gradient flows to it. None means zeros, and that the last state
            is not needed, so that the kernel of mamba_ssm can be used.
        chunk: timesteps of a chunk, which affects speed and memory only; None chooses it.

    Returns:
        y (B, L, D) in at least float32, and the last state (None if ``h0`` is None).
    """
    batch, length, channels = x.shape
    x, dt, A, B, C = (at_least_float32(z) for z in (x, dt, A, B, C))
    with torch.autocast(x.device.type, enabled=False):
        kernel = _fused_scan() if h0 is None and x.is_cuda and x.dtype == torch.float32 else None
        if kernel is not None:  # whose sequences are (B, D, L)
            u, delta, b, c = (z.transpose(1, 2).contiguous() for z in (x, dt, B, C))
            return kernel(u, delta, A, b, c).transpose(1, 2), None
        if length == 1 and h0 is not None:
            state = (dt.transpose(1, 2) * A).exp().mT * h0 + B.mT * (dt * x)
            return C @ state, state
        if chunk is None:  # it fits the cache of a CPU; on a GPU its states take at most a GiB
            fit = (2**28 if x.is_cuda else 2**18) // max(batch * channels * A.shape[1], 1)
            chunk = max(fit, 4) if x.is_cuda else min(max(fit, 4), 64)
        first = x.new_zeros((batch, A.shape[1], channels)) if h0 is None else h0.to(x.dtype)
        xs, dts, bs, cs = (z.transpose(0, 1).contiguous() for z in (x, dt, B, C))
        y, last = _Scan.apply(xs, dts, A.t().contiguous(), bs, cs, first, chunk)
    return y.transpose(0, 1), None if h0 is None else last


class Mamba(nn.Module):
    """One selective state-space layer, (B, L, d_model) -> (B, L, d_model).

    Args:
        d_model: width.
        d_state: N.
        d_conv: timesteps that the causal convolution before the scan sees.
        expand: D is ``expand`` x d_model.
        dt_min, dt_max: range of the initial dt, which is drawn log-uniformly for each channel.
        A_scale: the initial A is ``-A_scale`` x (1, ..., N). State n then decays over 1 / (dt A_scale n) timesteps. The
            gradient of the parameters that select what is remembered is proportional to dt: at equal decay, a larger dt with a
            smaller ``A_scale`` learns the selection in fewer updates.
    """

    no_weight_decay = ("A_log",)

    def __init__(
        self,
        d_model: int,
        d_state: int = 16,
        d_conv: int = 4,
        expand: int = 2,
        dt_min: float = 1e-3,
        dt_max: float = 0.1,
        A_scale: float = 1.0,
    ) -> None:
        super().__init__()
        check_positive(d_model=d_model, d_state=d_state, d_conv=d_conv, expand=expand)
        if not 0.0 < dt_min <= dt_max:
            raise ValueError(f"dt_min must be positive and at most dt_max, got dt_min={dt_min}, dt_max={dt_max}")
        if not A_scale > 0.0:
            raise ValueError(f"A_scale must be positive, got {A_scale}")
        self.d_inner, self.d_state, self.d_conv, self.dt_rank = expand * d_model, d_state, d_conv, math.ceil(d_model / 16)
        self.in_proj = Linear(d_model, 2 * self.d_inner, bias=False)
        self.conv1d = nn.Conv1d(self.d_inner, self.d_inner, d_conv, groups=self.d_inner, padding=d_conv - 1)
        self.x_proj = Linear(self.d_inner, self.dt_rank + 2 * d_state, bias=False)
        self.dt_proj = Linear(self.dt_rank, self.d_inner)
        self.A_log = nn.Parameter((A_scale * torch.arange(1.0, d_state + 1)).log().repeat(self.d_inner, 1))
        self.D = nn.Parameter(torch.ones(self.d_inner))
        self.out_proj = Linear(self.d_inner, d_model, bias=False)
        nn.init.uniform_(self.dt_proj.weight, -(self.dt_rank**-0.5), self.dt_rank**-0.5)
        dt = torch.empty(self.d_inner).uniform_(math.log(dt_min), math.log(dt_max)).exp()
        self.dt_proj.bias.data.copy_(dt + torch.log(-torch.expm1(-dt)))  # softplus gives dt back

    def forward(self, u: Tensor, state: tuple[Tensor, Tensor] | None = None) -> Tensor:
        """Map (B, L, d_model) to the same shape: a whole sequence, or one that continues from ``state``, the parts of a `MambaState`
        for this layer, which are updated in place."""
        x, z = self.in_proj(u).chunk(2, dim=-1)
        past = x.new_zeros((x.shape[0], self.d_conv - 1, self.d_inner)) if state is None else state[0].to(x.dtype)
        window = torch.cat((past, x), dim=1)
        x = F.silu(self._convolve(window, x.shape[1]))
        dt, B, C = self.x_proj(x).split((self.dt_rank, self.d_state, self.d_state), dim=-1)
        dt = self.dt_proj(dt).transpose(0, 1).contiguous()  # as the scan reads it, and has its gradient
        dt = F.softplus(at_least_float32(dt)).transpose(0, 1)
        A = -torch.exp(at_least_float32(self.A_log))
        # the state is cloned because the graph of this call must not contain the tensor that is written below
        y, last = selective_scan(x, dt, A, B, C, None if state is None else state[1].clone())
        if state is not None and last is not None:
            state[0].copy_(window[:, window.shape[1] - (self.d_conv - 1) :].detach())
            state[1].copy_(last.detach())
        y = y + x * self.D
        return self.out_proj((y * F.silu(z)).to(u.dtype))

    def _convolve(self, window: Tensor, length: int) -> Tensor:
        """The depthwise convolution of (B, d_conv - 1 + L, D), as d_conv multiply-adds: `torch.nn.Conv1d` would need transposed
        copies."""
        weight = self.conv1d.weight.squeeze(1)  # (D, d_conv)
        out = self.conv1d.bias
        assert out is not None
        for i in range(self.d_conv):
            out = torch.addcmul(out, window[:, i : i + length], weight[:, i])
        return out


class MambaBlock(nn.Module):
    """x + Mamba(norm(x)), (B, L, d_model) -> (B, L, d_model)."""

    def __init__(self, mamba: Mamba, norm: Normalization) -> None:
        super().__init__()
        self.mamba, self.norm = mamba, norm

    def forward(self, x: Tensor, state: tuple[Tensor, Tensor] | None = None) -> Tensor:
        return x + self.mamba(self.norm(x), state)


class MambaState(NamedTuple):
    """The hidden state of a `amago.nets.traj_encoders.MambaTrajEncoder`, constant in size and updated in place.

    Attributes:
        conv: (layers, B, d_conv - 1, D), the last inputs of each convolution.
        ssm: (layers, B, N, D), the states of the scans, in at least float32.
    """

    conv: Tensor
    ssm: Tensor
