"""Tensors derived from weights (packed, normalised), computed once for many forward passes."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.hooks import RemovableHandle

from amago.nets.dtypes import autocast_dtype


class WeightCache:
    """Caches one tensor that is derived from parameters, for forward passes without gradients.

    The value is valid while every source is the same storage at the same version and no optimizer has stepped. An optimizer
    step, an EMA update, `load_state_dict`, and a move to another device or dtype therefore invalidate it. Writes through
    ``Tensor.data`` raise no version: modules call `clear` when they enter training mode, which covers those.
    """

    def __init__(self) -> None:
        self._key: list[Any] | None = None
        self._value: Any = None

    def clear(self) -> None:
        """Forget the value."""
        self._key = self._value = None
        _steps.discard(self)

    def get(self, sources: tuple[Tensor, ...], compute: Callable[[], Tensor], exact: bool = False) -> Tensor:
        """The cached value, or that of ``compute``.

        Where gradients are on, or a source is an inference tensor (which has no version), nothing is cached.

        Args:
            sources: the tensors that ``compute`` reads.
            compute: makes the value.
            exact: keep the value's dtype under autocast; else it is cast to autocast's.
        """
        if torch.is_grad_enabled() or torch.compiler.is_compiling():
            return compute()
        dtype = None if exact else autocast_dtype(sources[0].device)
        key: list[Any] = [dtype, _steps.count]
        for s in sources:  # a loop, because a policy asks about twenty times a step
            if s.is_inference():
                return compute()
            key += (s.data_ptr(), s._version, s.dtype, s.device)
        if self._value is None or key != self._key:
            key[1] = _steps.watch(self)
            value = compute()
            self._key, self._value = key, value if dtype is None else value.to(dtype)
        return self._value  # type: ignore[no-any-return]

    def __deepcopy__(self, memo: dict[int, Any]) -> WeightCache:
        return WeightCache()

    def __reduce__(self) -> tuple[type[WeightCache], tuple[()]]:
        return WeightCache, ()


class _OptimizerSteps:
    """Counts the steps of all optimizers of the process, while there is a cache with a value.

    Fused optimizers do not raise the version of the parameters that they write (`torch.optim.AdamW(fused=True)`, torch 2.13 on
    a CPU), and an agent does not know which optimizer trains it. PyTorch's hook for all optimizers is installed with the first
    value and removed once none is left.

    Attributes:
        count: steps seen. Between two watches it does not move.
    """

    def __init__(self) -> None:
        self.count = 0
        self._lock = threading.Lock()
        self._caches: weakref.WeakSet[WeightCache] = weakref.WeakSet()
        self._hook: RemovableHandle | None = None

    def watch(self, cache: WeightCache) -> int:
        """Count steps from now on, because ``cache`` gets a value; the count."""
        with self._lock:
            self._caches.add(cache)
            if self._hook is None:
                self._hook = register_optimizer_step_post_hook(self._stepped)
            return self.count

    def discard(self, cache: WeightCache) -> None:
        """``cache`` has no value any more."""
        with self._lock:
            self._caches.discard(cache)
            self._unhook_if_unused()

    def _stepped(self, *_: Any) -> None:
        with self._lock:
            self.count += 1
            self._unhook_if_unused()  # caches that were garbage-collected did not say so

    def _unhook_if_unused(self) -> None:
        if self._hook is not None and not len(self._caches):
            self._hook.remove()
            self._hook = None


_steps = _OptimizerSteps()
