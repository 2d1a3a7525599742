"""One step of a GRU on a CPU, with prepacked weights."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from amago.nets.cpu.packed import linear, pack
from amago.nets.cpu.weight_cache import WeightCache
from amago.nets.utils import autocast_dtype


class GRUStep:
    """The step of a `torch.nn.GRU` without gradients, for a few rows in float32 on a CPU. `torch.nn.GRU` takes no packed weights.

    A step of 3 layers and 16 actors takes 0.66 ms instead of 1.0 on one core of an AMD EPYC 9004. On an Intel Xeon with
    avx512 it saves 4% of a policy's step (1.54 ms instead of 1.61).

    Args:
        rnn: with ``batch_first``, biases and one direction.
    """

    def __init__(self, rnn: nn.GRU) -> None:
        self._caches = {f"weight_{kind}_l{i}": WeightCache() for i in range(rnn.num_layers) for kind in ("ih", "hh")}

    def suits(self, seq: Tensor, hidden_state: Tensor) -> bool:
        """Whether this call is a step that `__call__` can make."""
        acts = seq.shape[1] == 1 and seq.is_cpu and not torch.is_grad_enabled() and not torch.compiler.is_compiling()
        return acts and seq.dtype == hidden_state.dtype == torch.float32 and autocast_dtype(seq.device) is None

    def clear(self) -> None:
        """Forget the packed weights."""
        for cache in self._caches.values():
            cache.clear()

    def __call__(self, rnn: nn.GRU, x: Tensor, hidden_state: Tensor) -> Tensor:
        """One step of every layer.

        Args:
            x: (B, d_inp).
            hidden_state: (n_layers, B, H), overwritten with the new one.

        Returns:
            (B, H), the output of the last layer.
        """
        H = rnn.hidden_size
        for i, h in enumerate(hidden_state.unbind(0)):
            inner = self._product(rnn, f"ih_l{i}", x)
            outer = self._product(rnn, f"hh_l{i}", h)
            gates = (inner[:, : 2 * H] + outer[:, : 2 * H]).sigmoid_()  # reset, update
            new = torch.addcmul(inner[:, 2 * H :], gates[:, :H], outer[:, 2 * H :]).tanh_()
            x = torch.lerp(new, h, gates[:, H:])
            h.copy_(x)
        return x

    def _product(self, rnn: nn.GRU, name: str, x: Tensor) -> Tensor:
        weight: Tensor = getattr(rnn, f"weight_{name}")
        packed = self._caches[f"weight_{name}"].get((weight,), lambda: pack(weight))
        return linear(x, packed, getattr(rnn, f"bias_{name}"))
