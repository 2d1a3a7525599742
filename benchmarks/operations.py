"""Counts the floating-point operations of an update on a GPU, and the bytes that it saves for the backward pass.

A multiplication and an addition are two operations. Of causal attention half of the operations are counted; its backward pass
computes the scores again instead of saving them.

Counts are made with few short sequences and extrapolated exactly: they are quadratic in the length of sequences and linear in
their number.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from fractions import Fraction
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from amago.agent import BaseAgent
from amago.loading import Batch
from benchmarks.learner import Learner

FEW, LENGTHS = (2, 3), (2, 4, 8)
"""The numbers and lengths of sequences that are counted. A single sequence is a special case of some operations."""


class BatchLearner(Learner):
    """Updates of an agent on one batch."""

    def __init__(self, agent: BaseAgent, batch: Batch) -> None:
        torch.manual_seed(0)
        AcceleratorState._reset_state()
        self.accelerator = Accelerator(cpu=True, mixed_precision="no")
        self.prepare(agent.train())
        self.batch = batch


def attention_forward(q: Any, k: Any, v: Any, *_: Any, **__: Any) -> int:
    """Operations of causal attention, from shapes (B, H, L, D): scores and the weighted sum, half of each."""
    b, h, length, d = q
    return 2 * int(b * h * length * k[2] * d)


def attention_backward(grad: Any, q: Any, k: Any, v: Any, *_: Any, **__: Any) -> int:
    """The scores once more, and four gradients: of weights, values, queries and keys."""
    return 5 * attention_forward(q, k, v) // 2


_KERNEL = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_ATTENTION = {
    _KERNEL: attention_forward,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: attention_backward,
}


@contextmanager
def as_on_a_gpu(agent: BaseAgent) -> Iterator[None]:
    """Switch off the agent's fast paths for CPUs, so that critics compute all rows at once."""
    fast = [m for m in agent.modules() if getattr(m, "fast", False)]
    for module in fast:
        module.fast = False  # type: ignore[assignment]
    try:
        yield
    finally:
        for module in fast:
            module.fast = True  # type: ignore[assignment]


def count(agent: BaseAgent, batch: Batch) -> tuple[int, int]:
    """Operations of an update, and bytes that it saves for the backward pass."""
    learner, kept = BatchLearner(agent, batch), dict[int, int]()
    own = {p.untyped_storage().data_ptr() for p in agent.parameters()}

    def keep(x: Tensor) -> Tensor:
        if x.untyped_storage().data_ptr() not in own:
            kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    counter = FlopCounterMode(display=False, custom_mapping=_ATTENTION)
    with as_on_a_gpu(agent), counter, torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        learner.update()
    return int(counter.get_total_flops()), sum(kept.values())


def at_length(counts: Mapping[int, float], length: int) -> float:
    """The value at ``length`` of the polynomial through the points ``{length: count}``."""
    total = Fraction(0)
    for x, y in counts.items():
        term = Fraction(y)
        for other in counts:
            term *= Fraction(length - other, x - other) if other != x else 1
        total += term
    return float(total)


def in_batch(counts: Mapping[tuple[int, int], float], batch: int, length: int) -> float:
    """Extrapolate counts ``{(number of sequences, length): count}`` to a batch of ``batch`` sequences of ``length`` steps."""
    two, three = (at_length({n: c for (b, n), c in counts.items() if b == few}, length) for few in FEW)
    return two + (batch - 2) * (three - two)


def of_update(agent: BaseAgent, make_batch: Callable[[int, int], Batch], batch: int, length: int) -> tuple[float, float]:
    """Operations and saved bytes of an update; ``make_batch(batch, length)`` must return sequences without padding."""
    found = {(b, n): count(agent, make_batch(b, n)) for b in FEW for n in LENGTHS}
    operations, kept = (in_batch({size: c[i] for size, c in found.items()}, batch, length) for i in range(2))
    return operations, kept
