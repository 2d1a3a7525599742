"""The layers of an ensemble that see every discount and sample, block by block: for CPUs.

Run layer by layer, an update of four critics at batch 24 and length 128 moves 88 MB in and out of memory for every addition,
activation and gradient, which takes longer than the products between them. Here a block of `ROWS` rows goes through all layers while
it is in the core's cache. Activations are kept for backward where parameters learn, written once. Where the gradient goes to the action
alone, backward computes them again, for the rows that have one: with the least of four values as the objective a quarter of them.

Shapes: C critics, K samples, N timesteps, G discounts, F numbers of an action (and its discount), H hidden units, O outputs. A *row* is
one critic's view of one (sample, timestep, discount).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from amago.nets.utils import at_least_float32

ENABLED = True
"""False: ensembles run layer by layer, on CPUs too."""
ROWS = 2048
"""Of a block. On one core with 1 MB of second-level cache (hidden layers of 256) 512, 1,024 and 2,048 are alike in float32; in bf16 an
update takes 1.51, 1.49 and 1.35 s."""
GRAIN = 128
"""Rows that backward picks out of a block come in multiples of this."""


def slope_of(activation: str) -> float | None:
    """The slope below zero of activations whose derivative their own output tells: "leaky_relu", "relu". None for others."""
    return {"leaky_relu": 0.01, "relu": 0.0}.get(activation)


def judge(slope: float, base: Tensor, extra: Tensor, w_extra: Tensor | None, params: list[Tensor]) -> Tensor:
    """All layers of C networks, but for the part of the first that sees the state.

    Args:
        slope: of the activation, see `slope_of`.
        base: (C, N, H), the state's part of the first layer's output. Its type is that of the computation.
        extra: (K, N, G, F), what the networks see beside the state; or (C, G, H), its part of the first layer's output.
        w_extra: (C, F, H), its rows of the first layer's weight; None for the second form.
        params: weight (C, d_in, d_out) and bias (C, 1, d_out) of each further layer, the output layer last.

    Returns:
        (C, K, N, G, O), K being 1 for the second form of ``extra``; never in half precision.
    """
    out: Tensor = _Judge.apply(slope, base, extra, w_extra, *params)
    return out


def judge_values(
    slope: float, base: Tensor, extra: Tensor, w_extra: Tensor | None, params: list[Tensor], value: Callable[[Tensor], Tensor]
) -> Tensor:
    """What ``value`` makes of the outputs (rows, O), one number of each; (C, K, N, G, 1), without gradient."""
    with torch.no_grad():
        return _Layers(slope, base, extra, w_extra, params).forward(None, value)


class _Layers:
    """Arguments of `judge` in the type of the computation, and the loop over blocks."""

    def __init__(self, slope: float, base: Tensor, extra: Tensor, w_extra: Tensor | None, params: Any) -> None:
        dtype = base.dtype
        self.slope, self.base, self.extra = slope, base, extra.to(dtype)
        self.w_extra = None if w_extra is None else w_extra.to(dtype)
        cast = [p.to(dtype) for p in params]
        self.weights, self.biases = cast[0::2], cast[1::2]
        self.C, self.N, self.H = base.shape
        self.K, self.G = (1, extra.shape[1]) if w_extra is None else (extra.shape[0], extra.shape[2])

    def blocks(self) -> Iterator[tuple[int, int, int, int, slice]]:
        """(critic, sample, first timestep, the one after the last, rows of that critic)."""
        step = max(1, ROWS // self.G)
        for c in range(self.C):
            for k in range(self.K):
                for i in range(0, self.N, step):
                    j = min(i + step, self.N)
                    yield c, k, i, j, slice((k * self.N + i) * self.G, (k * self.N + j) * self.G)

    def first(self, c: int, k: int, i: int, j: int, out: Tensor) -> None:
        """The first layer's output of a block, before its activation."""
        by_step = out.view(j - i, self.G, self.H)
        if self.w_extra is None:
            torch.add(self.base[c, i:j, None], self.extra[c], out=by_step)
        else:
            torch.mm(self.extra[k, i:j].reshape(len(out), -1), self.w_extra[c], out=out)
            by_step.add_(self.base[c, i:j, None])

    def buffers(self, rows: int | None = None) -> list[Tensor]:
        """Room for what each hidden layer gives: (rows, H), or for all that there is, (C, K N G, H)."""
        lead = (self.C, self.K * self.N * self.G) if rows is None else (rows,)
        return [self.base.new_empty((*lead, w.shape[1])) for w in self.weights]

    def forward(self, kept: list[Tensor] | None, value: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        """Outputs, or what ``value`` makes of them; activations go to ``kept`` (`buffers`) if that is given."""
        width = 1 if value else self.weights[-1].shape[-1]
        out = at_least_float32(self.base.new_empty(0)).new_empty(self.C, self.K * self.N * self.G, width)
        scratch = self.buffers(max(1, ROWS // self.G) * self.G) if kept is None else []
        for c, k, i, j, rows in self.blocks():
            hidden = [x[: rows.stop - rows.start] for x in scratch] if kept is None else [x[c, rows] for x in kept]
            self.first(c, k, i, j, hidden[0])
            self.activate(c, hidden)
            result = torch.mm(hidden[-1], self.weights[-1][c]).add_(self.biases[-1][c])
            out[c, rows] = value(result) if value else result
        return out.view(self.C, self.K, self.N, self.G, width)

    def activate(self, c: int, hidden: list[Tensor]) -> None:
        """From the first layer's output in ``hidden[0]`` to all hidden layers' activations, in place."""
        for layer, h in enumerate(hidden):
            F.leaky_relu_(h, self.slope)
            if layer + 1 < len(hidden):
                torch.mm(h, self.weights[layer][c], out=hidden[layer + 1])  # addmm would first copy the bias to every row,
                hidden[layer + 1].add_(self.biases[layer][c])  # which takes longer than to add it


class _Judge(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, slope: float, base: Tensor, extra: Tensor, w_extra: Tensor | None, *params: Tensor) -> Tensor:
        layers = _Layers(slope, base, extra, w_extra, params)
        kept = layers.buffers() if any(ctx.needs_input_grad[4:]) else []
        out = layers.forward(kept or None)
        if kept:
            base = base.new_empty(()).expand(base.shape)  # its numbers are not needed again
        ctx.slope, ctx.hidden = slope, len(kept)
        ctx.save_for_backward(base, extra, w_extra, *kept, *params)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "critics in blocks cannot be differentiated twice (create_graph=True): set amago.nets.cpu.blocked.ENABLED = False first"
            )
        base, extra, w_extra, *rest = ctx.saved_tensors
        kept, params = rest[: ctx.hidden], rest[ctx.hidden :]
        need_base, need_extra, need_w_extra = ctx.needs_input_grad[1:4]
        with torch.autocast(grad.device.type, enabled=False):
            layers = _Layers(ctx.slope, base, extra, w_extra, params)
            found = _Gradients(layers, kept, need_base, need_extra, need_w_extra)
            found.add(grad.reshape(layers.C, -1, grad.shape[-1]))
        return None, found.base, found.extra, found.w_extra, *found.params


def _rounded_up(used: Tensor, grad: Tensor) -> tuple[Tensor | None, Tensor]:
    """Indices of rows to take, and the gradients of these; (None, ``grad``) if that is worth less than it costs.

    Their number is a multiple of `GRAIN`, thanks to a row that stands there again with no gradient: oneDNN makes code for every
    shape that it meets, and keeps it (100 MB an update, where the number is whatever it is).
    """
    size = -(-len(used) // GRAIN) * GRAIN
    if size > 0.75 * len(grad):
        return None, grad
    missing = size - len(used)
    if not missing:
        return used, grad.index_select(0, used)
    of_used = torch.cat((grad.index_select(0, used), grad.new_zeros(missing, grad.shape[1])))
    return torch.cat((used, used[:1].expand(missing))), of_used


class _Gradients:
    """Sums over blocks: of parameters in float32 at least, else in the type of the computation. None where none is needed.

    Args:
        kept: activations; empty where parameters need no gradient.
        base, extra, w_extra: whether these need one.
    """

    def __init__(self, layers: _Layers, kept: list[Tensor], base: bool, extra: bool, w_extra: bool) -> None:
        def sums(x: Tensor) -> Tensor:
            return torch.zeros_like(x, dtype=at_least_float32(x.new_empty(0)).dtype)

        self.layers, self.kept = layers, kept
        self.base = layers.base.new_zeros(layers.base.shape) if base else None
        self.extra = sums(layers.extra) if extra else None
        self.w_extra = sums(layers.w_extra) if w_extra and layers.w_extra is not None else None
        pairs = zip(layers.weights, layers.biases)
        self.params = [sums(p) if kept else None for pair in pairs for p in pair]

    def add(self, grad: Tensor) -> None:
        """Take the gradient of the outputs (C, rows, O) into account."""
        for c, k, i, j, rows in self.layers.blocks():
            of_block = grad[c, rows].to(self.layers.base.dtype)
            # Most rows have none where the objective is the least of C values, or where sequences are padded.
            some = of_block.any(dim=-1).nonzero().squeeze(-1)
            if not len(some):
                continue
            used, of_block = _rounded_up(some, of_block)
            hidden = [x[c, rows] for x in self.kept] or self._again(c, k, i, j, used)
            if used is not None and self.kept:
                hidden = [x.index_select(0, used) for x in hidden]
            self._first(c, k, i, j, used, self._hidden(c, of_block, hidden))

    def _again(self, c: int, k: int, i: int, j: int, used: Tensor | None) -> list[Tensor]:
        """The activations of a block, or of its rows ``used``."""
        layers = self.layers
        hidden = layers.buffers((j - i) * layers.G)
        layers.first(c, k, i, j, hidden[0])
        if used is not None:
            hidden = [hidden[0].index_select(0, used), *(h[: len(used)] for h in hidden[1:])]
        layers.activate(c, hidden)
        return hidden

    def _hidden(self, c: int, grad: Tensor, hidden: list[Tensor]) -> Tensor:
        """From the gradient of the output to that of the first layer, before its activation."""
        layers = self.layers
        for n in reversed(range(len(hidden))):
            weight, bias = self.params[2 * n], self.params[2 * n + 1]
            if (
                weight is not None and bias is not None
            ):  # a block's part is rounded to the type of the computation, its sum is not
                weight[c] += torch.mm(hidden[n].t(), grad)
                bias[c] += grad.sum(dim=0)
            grad = torch.mm(grad, layers.weights[n][c].t())
            torch.ops.aten.leaky_relu_backward.grad_input(grad, hidden[n], layers.slope, True, grad_input=grad)
        return grad

    def _first(self, c: int, k: int, i: int, j: int, used: Tensor | None, grad: Tensor) -> None:
        layers, narrow = self.layers, None
        if layers.w_extra is not None:
            narrow = layers.extra[k, i:j].reshape((j - i) * layers.G, -1)
            narrow = narrow if used is None else narrow.index_select(0, used)
            if self.w_extra is not None:
                self.w_extra[c] += torch.mm(narrow.t(), grad)
            if self.extra is not None:
                of_extra = torch.mm(grad, layers.w_extra[c].t()).to(self.extra.dtype)
                into = self.extra[k, i:j].view((j - i) * layers.G, -1)
                into.add_(of_extra) if used is None else into.index_add_(0, used, of_extra)
        if self.base is None and (narrow is not None or self.extra is None):
            return
        if used is not None:
            grad = grad.new_zeros((j - i) * layers.G, layers.H).index_add_(0, used, grad)
        by_step = grad.view(j - i, layers.G, layers.H)
        if self.base is not None:
            self.base[c, i:j] += by_step.sum(dim=1)
        if narrow is None and self.extra is not None:
            self.extra[c] += by_step.sum(dim=0)
