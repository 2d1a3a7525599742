"""Critic ensembles on CPUs, in blocks that stay in the core's cache.

`evaluate` computes what `amago.nets.ff.first_layer` and `amago.nets.ff.EnsembleMLP.features` compute layer by layer:
they are its reference, and the tests compare both. With four critics and seven discounts, a hidden layer at batch 24 and
length 128 takes 88 MB, and every addition, activation and gradient moves it to memory and back. Here `ROWS` rows at a time
pass through all layers.

Where parameters need gradients, forward keeps the activations. Where only the action needs one, backward recomputes them, for
the rows whose gradient is not zero: a quarter of them, if the objective is the minimum over four critics.

Shapes: C critics, K samples, N timesteps, G discounts, F inputs beside the state (action and discount), H hidden units, O
outputs. A *row* is one (sample, timestep, discount) of one critic. A *block* is R rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

ROWS = 2048
"""Rows of a block. With 256 hidden units and 1 MB of second-level cache, 512 to 2,048 are equally fast in float32; in bf16
2,048 is fastest (docs/notes/performance.md)."""
GRAIN = 128
"""Backward selects rows in multiples of this: oneDNN generates and keeps code for every matrix shape it meets."""


def slope_of(activation: str) -> float | None:
    """The slope below zero of the activations that this module supports, "leaky_relu" and "relu"; None for others.

    Their derivative follows from their output, so that backward needs the outputs alone.
    """
    return {"leaky_relu": 0.01, "relu": 0.0}.get(activation)


def evaluate(
    slope: float,
    base: Tensor,
    extra: Tensor,
    w_extra: Tensor | None,
    params: Sequence[Tensor],
    value: Callable[[Tensor], Tensor] | None = None,
    normed: bool = False,
) -> Tensor:
    """The output of C networks, given the two parts whose sum is their first layer's output.

    Args:
        slope: of the activation, see `slope_of`.
        base: (C, N, H), the part of the state. Its dtype is the dtype of the computation.
        extra: (K, N, G, F), the inputs beside the state; or, without ``w_extra``, their part (C, G, H), the same for all N.
        w_extra: (C, F, H), the first layer's weights of ``extra``.
        params: weight (C, d_in, d_out) and bias (C, 1, d_out) of each further layer, the output layer last. With ``normed``,
            then gain and bias (C, 1, H) of each hidden layer's LayerNorm.
        value: maps outputs (R, O) to values (R, 1). If given, values are returned, without gradient.
        normed: hidden layers are normalised before their activation.

    Returns:
        (C, K, N, G, O), or (C, K, N, G, 1) with ``value``; K is 1 without ``w_extra``. In float32 where the computation is in
        half precision.
    """
    if value is not None:
        with torch.no_grad():
            return _Layers(slope, base, extra, w_extra, params, normed).forward([], value)
    out: Tensor = _Evaluate.apply(slope, normed, base, extra, w_extra, *params)
    return out


class _Block(NamedTuple):
    critic: int
    sample: int
    steps: slice
    """The block's part of the N timesteps."""
    rows: slice
    """The block's part of the K x N x G rows of the critic."""

    @property
    def size(self) -> int:
        """R."""
        return int(self.rows.stop - self.rows.start)


class _Layers:
    """The arguments of `evaluate`, in the dtype of the computation, and the forward pass of a block.

    Of a hidden layer, the output before the norm is kept if there is a norm, else the activation, which overwrites the output.
    """

    def __init__(
        self, slope: float, base: Tensor, extra: Tensor, w_extra: Tensor | None, params: Sequence[Tensor], normed: bool
    ) -> None:
        dtype = base.dtype
        self.slope, self.base, self.extra = slope, base, extra.to(dtype)
        self.w_extra = None if w_extra is None else w_extra.to(dtype)
        linear = len(params) // 2 if normed else len(params)
        cast = [p.to(dtype) for p in params[:linear]]
        self.weights, self.biases = cast[0::2], cast[1::2]
        self.gains, self.shifts = params[linear::2], params[linear + 1 :: 2]  # in float32, so that the moments of rows are
        self.C, self.N, self.H = base.shape
        self.K, self.G = (1, extra.shape[1]) if w_extra is None else (extra.shape[0], extra.shape[2])

    def blocks(self) -> Iterator[_Block]:
        """All rows of all critics, in blocks of whole timesteps."""
        step = max(1, ROWS // self.G)
        for critic in range(self.C):
            for sample in range(self.K):
                for start in range(0, self.N, step):
                    stop = min(start + step, self.N)
                    rows = slice((sample * self.N + start) * self.G, (sample * self.N + stop) * self.G)
                    yield _Block(critic, sample, slice(start, stop), rows)

    def empty(self, *lead: int) -> list[Tensor]:
        """Empty tensors (*lead, width) for the kept part of each hidden layer."""
        return [self.base.new_empty((*lead, w.shape[1])) for w in self.weights]

    def forward(self, kept: list[Tensor], value: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        """The result of `evaluate`. The kept part of hidden layers is written to ``kept``, (C, K N G, width) each, unless it is
        empty."""
        width = 1 if value else self.weights[-1].shape[-1]
        out = self.base.new_empty(self.C, self.K * self.N * self.G, width, dtype=_exact(self.base))
        scratch = [] if kept else self.empty(max(1, ROWS // self.G) * self.G)
        for block in self.blocks():
            c, rows = block.critic, block.rows
            hidden = [h[c, rows] for h in kept] or [h[: block.size] for h in scratch]
            self.first_layer(block, hidden[0])
            result = torch.mm(self.hidden_layers(c, hidden), self.weights[-1][c]).add_(self.biases[-1][c])
            out[c, rows] = value(result) if value else result
        return out.view(self.C, self.K, self.N, self.G, width)

    def first_layer(self, block: _Block, out: Tensor) -> None:
        """Write the first layer's output (R, H) of a block, before its activation, to ``out``."""
        base = self.base[block.critic, block.steps, None]  # (R / G, 1, H)
        by_step = out.view(-1, self.G, self.H)
        if self.w_extra is None:
            torch.add(base, self.extra[block.critic], out=by_step)
        else:
            torch.mm(self.extra_inputs(block), self.w_extra[block.critic], out=out)
            by_step.add_(base)

    def extra_inputs(self, block: _Block) -> Tensor:
        """The inputs beside the state of a block, (R, F)."""
        return self.extra[block.sample, block.steps].reshape(block.size, -1)

    def hidden_layers(self, critic: int, hidden: list[Tensor]) -> Tensor:
        """Compute the kept part of all hidden layers, in place, from the first layer's output in ``hidden[0]``, before norm and
        activation.

        Returns:
            the activation of the last.
        """
        for layer, h in enumerate(hidden):
            h = F.leaky_relu_(self.normalized(critic, layer, h)[0], self.slope)
            if layer + 1 < len(hidden):  # not addmm, which would first copy the bias to every row
                torch.mm(h, self.weights[layer][critic], out=hidden[layer + 1])
                hidden[layer + 1].add_(self.biases[layer][critic])
        return h

    def normalized(self, critic: int, layer: int, h: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """A layer's output (R, width) after its norm, with the mean and the inverse standard deviation of each row; ``h``
        itself where there is no norm."""
        if not self.gains:
            return h, None, None
        return torch.native_layer_norm(h, h.shape[-1:], self.gains[layer][critic, 0], self.shifts[layer][critic, 0], 1e-5)


class _Evaluate(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, slope: float, normed: bool, base: Tensor, extra: Tensor, w_extra: Tensor | None, *params: Tensor
    ) -> Tensor:
        layers = _Layers(slope, base, extra, w_extra, params, normed)
        kept = layers.empty(layers.C, layers.K * layers.N * layers.G) if any(ctx.needs_input_grad[5:]) else []
        out = layers.forward(kept)
        if kept:
            base = base.new_empty(()).expand(base.shape)  # backward needs its shape only
        ctx.slope, ctx.normed, ctx.num_kept = slope, normed, len(kept)
        ctx.save_for_backward(base, extra, w_extra, *kept, *params)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "the fast path of critics on CPUs cannot be differentiated twice (create_graph=True): bind "
                "amago.config.fast_paths.enabled = False before the agent is built"
            )
        base, extra, w_extra, *rest = ctx.saved_tensors
        kept, params = rest[: ctx.num_kept], rest[ctx.num_kept :]
        with torch.autocast(grad.device.type, enabled=False):
            layers = _Layers(ctx.slope, base, extra, w_extra, params, ctx.normed)
            sums = _Gradients(layers, kept, *ctx.needs_input_grad[2:5])
            grad = grad.reshape(layers.C, -1, grad.shape[-1])
            for block in layers.blocks():
                sums.add(block, grad[block.critic, block.rows].to(layers.base.dtype))
        return None, None, sums.base, sums.extra, sums.w_extra, *sums.params


class _Gradients:
    """Gradients of the arguments of `evaluate`, summed over blocks; None where none is needed.

    Sums over rows are kept in float32 at least, single blocks and the gradient of ``base`` in the dtype of the computation.

    Args:
        layers: the arguments.
        kept: of hidden layers, from `_Layers.forward`; empty where parameters need no gradient.
        base, extra, w_extra: whether these arguments need one.
    """

    def __init__(self, layers: _Layers, kept: list[Tensor], base: bool, extra: bool, w_extra: bool) -> None:
        def zeros(x: Tensor) -> Tensor:
            return torch.zeros_like(x, dtype=_exact(x))

        self.layers, self.kept = layers, kept
        self.base = layers.base.new_zeros(layers.base.shape) if base else None
        self.extra = zeros(layers.extra) if extra else None
        self.w_extra = zeros(layers.w_extra) if w_extra and layers.w_extra is not None else None
        pairs = [*zip(layers.weights, layers.biases), *zip(layers.gains, layers.shifts)]
        self.params = [zeros(p) if kept else None for pair in pairs for p in pair]

    def add(self, block: _Block, grad: Tensor) -> None:
        """Add the part of one block, whose outputs have the gradient ``grad`` (R, O)."""
        # Most rows have none where the objective is the minimum over critics, or where sequences are padded.
        rows = grad.any(dim=-1).nonzero().squeeze(-1)
        if not len(rows):
            return
        selected, grad = _select(rows, grad)
        hidden = self._hidden(block, selected)
        grad = self._hidden_layers(block.critic, hidden, grad)
        self._first_layer(block, selected, grad)

    def _hidden(self, block: _Block, selected: Tensor | None) -> list[Tensor]:
        """The kept part of hidden layers (R', width), for the selected rows of a block: by forward, or recomputed."""
        layers = self.layers
        if self.kept:
            hidden = [h[block.critic, block.rows] for h in self.kept]
            return hidden if selected is None else [h.index_select(0, selected) for h in hidden]
        hidden = layers.empty(block.size)
        layers.first_layer(block, hidden[0])
        if selected is not None:
            hidden = [hidden[0].index_select(0, selected), *(h[: len(selected)] for h in hidden[1:])]
        layers.hidden_layers(block.critic, hidden)
        return hidden

    def _hidden_layers(self, critic: int, hidden: list[Tensor], grad: Tensor) -> Tensor:
        """The gradient of the first layer's output before its activation (R', H), from the gradient of the outputs
        (R', O)."""
        layers = self.layers
        for n in reversed(range(len(hidden))):
            weight, bias = self.params[2 * n], self.params[2 * n + 1]
            active, mean, rstd = layers.normalized(critic, n, hidden[n])
            active = active if mean is None else F.leaky_relu_(active, layers.slope)
            if weight is not None and bias is not None:
                weight[critic] += torch.mm(active.t(), grad)
                bias[critic] += grad.sum(dim=0)
            grad = torch.mm(grad, layers.weights[n][critic].t())
            torch.ops.aten.leaky_relu_backward.grad_input(grad, active, layers.slope, True, grad_input=grad)
            if mean is not None:
                grad = self._norm(critic, n, hidden[n], grad, mean, rstd)
        return grad

    def _norm(self, critic: int, n: int, h: Tensor, grad: Tensor, mean: Tensor, rstd: Tensor | None) -> Tensor:
        """The gradient of a norm's input ``h`` from the gradient of its output, (R', H) all."""
        gain, shift = (x[n][critic, 0] for x in (self.layers.gains, self.layers.shifts))
        place, needed = 2 * (len(self.layers.weights) + n), bool(self.kept)
        grads = torch.ops.aten.native_layer_norm_backward(
            grad, h, h.shape[-1:], mean, rstd, gain, shift, [True, needed, needed]
        )
        for total, part in zip(self.params[place : place + 2], grads[1:]):
            if total is not None:
                total[critic] += part
        return grads[0]  # type: ignore[no-any-return]

    def _first_layer(self, block: _Block, selected: Tensor | None, grad: Tensor) -> None:
        """Add to the gradients of ``base``, ``extra`` and ``w_extra``, given the gradient of the first layer's output
        (R', H)."""
        layers, c = self.layers, block.critic
        if layers.w_extra is not None:
            if self.w_extra is not None:
                inputs = layers.extra_inputs(block)
                inputs = inputs if selected is None else inputs.index_select(0, selected)
                self.w_extra[c] += torch.mm(inputs.t(), grad)
            if self.extra is not None:
                of_inputs = torch.mm(grad, layers.w_extra[c].t()).to(self.extra.dtype)
                total = self.extra[block.sample, block.steps].view(block.size, -1)
                total.add_(of_inputs) if selected is None else total.index_add_(0, selected, of_inputs)
        of_discounts = self.extra if layers.w_extra is None else None
        if self.base is None and of_discounts is None:
            return
        if selected is not None:
            grad = grad.new_zeros(block.size, layers.H).index_add_(0, selected, grad)
        by_step = grad.view(-1, layers.G, layers.H)
        if self.base is not None:
            self.base[c, block.steps] += by_step.sum(dim=1)
        if of_discounts is not None:
            of_discounts[c] += by_step.sum(dim=0)


def _exact(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _select(rows: Tensor, grad: Tensor) -> tuple[Tensor | None, Tensor]:
    """Select ``rows`` of ``grad`` (R, O): their indices (R',) and gradients (R', O); (None, ``grad``) if they are most rows.

    R' is a multiple of `GRAIN`: the first row fills up, with a gradient of zero.
    """
    size = -(-len(rows) // GRAIN) * GRAIN
    if size > 0.75 * len(grad):
        return None, grad
    selected, missing = grad.index_select(0, rows), size - len(rows)
    if not missing:
        return rows, selected
    return torch.cat((rows, rows[:1].expand(missing))), torch.cat((selected, grad.new_zeros(missing, grad.shape[1])))
