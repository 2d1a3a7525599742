"""Tools of all networks: activations by name, dtypes, checks of arguments, cached weights, running statistics, input norm."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from operator import attrgetter
from typing import Any, TypeAlias

import gin
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from amago import config
from amago.nets import ranks
from amago.ops import symexp as symexp
from amago.ops import symlog as symlog

Activation = Callable[[Tensor], Tensor]
Log: TypeAlias = dict[str, Any] | None
"""Takes metrics by name; None: none are computed."""


def _identity(x: Tensor) -> Tensor:
    return x


_ACTIVATIONS: dict[str, Activation] = {
    "leaky_relu": F.leaky_relu,
    "relu": F.relu,
    "gelu": F.gelu,
    "silu": F.silu,
    "swish": F.silu,
    "elu": F.elu,
    "mish": F.mish,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "identity": _identity,
}


def activation_switch(name: str, inplace: bool = False) -> Activation:
    """The elementwise function of that name: "leaky_relu", "relu", "gelu", "silu" (or "swish"), "elu", "mish", "tanh", "sigmoid", or
    "identity", with which layers are linear.

    With ``inplace`` leaky ReLU overwrites its input, which must be a tensor that nothing else uses, such as the output of a linear
    layer. Backward then keeps one tensor instead of two: a fifth of the memory of a Transformer's update.
    """
    if name not in _ACTIVATIONS:
        raise ValueError(f"activation={name!r} is unknown: use one of {', '.join(sorted(_ACTIVATIONS))}")
    return functools.partial(F.leaky_relu, inplace=True) if inplace and name == "leaky_relu" else _ACTIVATIONS[name]


@torch.no_grad()
def add_activation_log(root_key: str, activation: Tensor, log_dict: Log = None) -> None:
    """Add metrics of a layer's output to ``log_dict``: "activation-{root_key}-max", "-min", "-std" and "-mean", scalars."""
    if log_dict is None:
        return
    x = at_least_float32(activation.detach())
    spread = x.std() if x.numel() > 1 else torch.zeros_like(x.sum())
    log_dict |= {
        f"activation-{root_key}-{name}": v
        for name, v in (("max", x.max()), ("min", x.min()), ("std", spread), ("mean", x.mean()))
    }


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """The dtype autocast would compute in on ``device``, or None where it is off."""
    kind = device.type  # of the two common ones, the slow question is not asked: this is called about thirty times a step
    usable = kind in ("cpu", "cuda") or torch.amp.is_autocast_available(kind)
    return torch.get_autocast_dtype(kind) if usable and torch.is_autocast_enabled(kind) else None


def at_least_float32(x: Tensor) -> Tensor:
    """Half precision to float32; anything else as it is."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def has_argument(function: Callable[..., Any], name: str) -> bool:
    """True if a function can be called with a keyword argument of that name."""
    parameters = inspect.signature(function).parameters.values()
    return any(p.name == name or p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters)


def check_positive(**values: int) -> None:
    """Raise ValueError, naming the argument, for the first value below 1."""
    for name, value in values.items():
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {name}={value}")


_steps: list[int] = []  # one number, of the steps of all optimizers, once there is a cached value: fused ones raise no version


def _count_step(*_: object) -> None:
    _steps[0] += 1


PACKED_NUMEL = (1 << 16) + 1
"""Numbers of the smallest weight that is packed: with 256 x 256 and 16 rows the call of oneDNN costs more than it saves."""


@functools.cache
def _onednn() -> tuple[Any, Any] | None:
    """The functions that pack a weight and multiply by it, or None where they do not pay (without AVX-512) or do not work.

    PyTorch's compiler uses them for frozen weights; they are not part of its public interface.
    """
    if "AVX512" not in torch.backends.cpu.get_cpu_capability():
        return None
    try:
        pack, multiply = torch.ops.mkldnn._reorder_linear_weight.default, torch.ops.mkldnn._linear_pointwise.default
        with torch.inference_mode():
            x, weight = torch.linspace(-1, 1, 24).view(2, 12), torch.linspace(-1, 2, 60).view(5, 12)
            same = torch.allclose(multiply(x, pack(weight), None, "none", [], ""), F.linear(x, weight), rtol=1e-4, atol=1e-5)
            return (pack, multiply) if same else None
    except (AttributeError, RuntimeError, NotImplementedError, TypeError):
        return None


def caches_nothing() -> bool:
    """True where gradients are on, or a model is compiled, exported or traced."""
    return torch.is_grad_enabled() or torch.compiler.is_compiling() or torch.jit.is_tracing()


def capturing(x: Tensor) -> bool:
    """True while a CUDA graph is captured, which computes with ``x`` again at each replay."""
    return x.is_cuda and torch.cuda.is_current_stream_capturing()


_version = attrgetter("_version")  # without Python code for each of many weights
read_by_graph: list[Tensor] = []
"""The cached values that the CUDA graph reads which is captured now. Whoever captures empties it before, and keeps them with the graph."""


def state_of_weights(weights: Iterable[Tensor]) -> list[int]:
    """Numbers that change where one of the tensors is written in place, or an optimizer steps. Inference tensors have no such number."""
    return [*_steps, *map(_version, weights)]


class WeightCache:
    """Cache one tensor that is derived from parameters, for forward passes without gradients.

    It is valid while every source is the same storage at the same version, and no optimizer has stepped. Writes through
    ``Tensor.data`` raise no version: modules call `clear` when they change their mode, which covers updates in training. Where
    gradients are on, or where a source is an inference tensor (which has no version), nothing is cached. The capture of a CUDA
    graph reads what is cached, which it must keep (`read_by_graph`), and computes the rest at each replay: `state_of_weights`
    tells when to capture again. Threads may share a cache; copies of it are empty.
    """

    def __init__(self) -> None:
        self.fast = config.fast_paths()
        self.clear()

    def clear(self) -> None:
        """Forget the value."""
        self._entry: tuple[list[Any], Tensor, list[Tensor]] | None = None  # with the storages, which no other tensor gets then

    def get(
        self, sources: Iterable[Tensor | None], compute: Callable[[], Tensor], exact: bool = False, pack: bool = False
    ) -> Tensor:
        """The cached value, or the result of ``compute``, which reads ``sources``; in autocast's dtype unless ``exact``. With
        ``pack``, a large weight in float32 is packed for oneDNN (`linear`)."""
        if caches_nothing():
            return compute()
        if not _steps:
            _steps.append(0)
            register_optimizer_step_post_hook(_count_step)
        key: list[Any] = [*_steps, pack]
        given: list[Tensor] = []
        for s in sources:  # ten times a step: a loop takes half as long as comprehensions
            if s is not None:
                if s.is_inference():
                    return compute()
                given.append(s)
                key += (s.data_ptr(), s._version)
        dtype = None if exact else autocast_dtype(given[0].device)
        key.append(dtype)
        entry, captured = self._entry, capturing(given[0])
        if entry is not None and entry[0] == key:
            if captured:
                read_by_graph.append(entry[1])
            return entry[1]
        if captured:
            return compute()
        value = compute() if dtype is None else compute().to(dtype)
        if pack and self.packs(value.numel()) and value.is_cpu and value.dtype == torch.float32:
            value = _onednn()[0](value.detach())  # type: ignore[index]
        self._entry = key, value, [s.detach() for s in given]
        return value

    def packs(self, numel: int) -> bool:
        """True if weights of so many numbers are packed."""
        return self.fast and numel >= PACKED_NUMEL and _onednn() is not None

    def linear(
        self, x: Tensor, sources: Iterable[Tensor | None], weight: Callable[[], Tensor], bias: Tensor | None = None
    ) -> Tensor:
        """(..., d_in) -> (..., d_out) by ``weight`` (d_out, d_in), which reads ``sources``, and ``bias``.

        A matrix library rearranges both factors before it multiplies. With few rows, as in a step of a few actors, that takes as
        long as the product; the weight is therefore packed once, unless there is a single row (docs/notes/performance.md).
        """
        if caches_nothing():  # also no condition on a number of rows that is a variable
            return F.linear(x, weight(), bias)
        pack = self.fast and x.dtype == torch.float32 and x.numel() > x.shape[-1]
        found = self.get(sources, weight, pack=pack)
        return _onednn()[1](x, found, bias, "none", [], "") if found.is_mkldnn else F.linear(x, found, bias)  # type: ignore[index, no-any-return]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_entry": None}


class CachedWeights(nn.Module):
    """Base of modules with attributes of type `WeightCache`, which are cleared when their mode changes."""

    _cache: WeightCache

    def train(self, mode: bool = True) -> Any:
        for cache in vars(self).values():
            if isinstance(cache, WeightCache):
                cache.clear()
        return super().train(mode)

    def _product(self, x: Tensor, layer: Any, weight: Callable[[], Tensor], cache: WeightCache, *sources: Tensor) -> Tensor:
        """(..., d_in) -> (..., d_out) by the bias of ``layer`` and a ``weight`` that is made of its parameters and ``sources``; in
        evaluation mode it is cached."""
        if self.training:
            return F.linear(x, weight(), layer.bias)
        own = (*layer._parameters.values(), *layer._buffers.values())  # by attribute takes five times as long
        return cache.linear(x, (*own, *sources), weight, layer.bias)


class Linear(CachedWeights, nn.Linear):
    """`torch.nn.Linear` whose weight is packed in evaluation mode without gradients (`WeightCache.linear`)."""

    def __init__(self, in_features: int, out_features: int, bias: bool = True) -> None:
        super().__init__(in_features, out_features, bias)
        self._cache = WeightCache()
        self.packs = self._cache.packs(in_features * out_features)

    def effective_weight(self) -> Tensor:
        """The weight, as of `amago.nets.transformer.SigmaReparam`."""
        return self.weight

    def forward(self, x: Tensor) -> Tensor:
        """(..., in_features) -> (..., out_features)."""
        if self.training or not self.packs:
            return F.linear(x, self.weight, self.bias)
        return self._cache.linear(x, (self.weight,), self.effective_weight, self.bias)


class RunningMoments(nn.Module):
    """Mean ``mu`` and second moment ``nu``, which move with rate beta / (1 - (1 - beta)^t) at the t-th update.

    Early in training they are therefore the averages over all updates so far. They are kept in float64: in float32, nu - mu^2
    has no correct digit where the standard deviation is below 1/3,000 of the mean. On devices without float64 (Apple's MPS)
    they are in float32.

    Args:
        shape: of both.
        count_shape: of t, broadcast against ``shape``.
        beta: rate for large t.
        init_nu: ``nu`` before any data; ``mu`` is 0.
        initial_samples: number of updates that these initial moments count as.
    """

    mu: Tensor
    nu: Tensor
    _t: Tensor

    def __init__(
        self, shape: tuple[int, ...], count_shape: tuple[int, ...], beta: float, init_nu: float, initial_samples: int
    ) -> None:
        super().__init__()
        if not 0.0 < beta < 1.0:
            raise ValueError(f"beta must be in (0, 1), got beta={beta}")
        if not init_nu > 0.0:
            raise ValueError(f"init_nu must be positive, got init_nu={init_nu}")
        if initial_samples < 0:
            raise ValueError(f"initial_samples must not be negative, got initial_samples={initial_samples}")
        self.beta, self.initial_samples = beta, initial_samples
        self.register_buffer("mu", torch.zeros(shape, dtype=torch.float64))
        self.register_buffer("nu", torch.full(shape, float(init_nu), dtype=torch.float64))
        self.register_buffer("_t", torch.full(count_shape, float(initial_samples)))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        try:
            return super()._apply(fn, recurse)
        except TypeError:  # PyTorch's error where a device has no float64
            self.mu, self.nu = self.mu.float(), self.nu.float()
            return super()._apply(fn, recurse)

    @property
    def variance(self) -> Tensor:
        """nu - mu^2, in the dtype of a model's parameters (and of t); rounding may leave it just below 0."""
        return (self.nu - self.mu.square()).to(self._t.dtype)

    @torch.no_grad()
    def _move(self, first: Tensor, second: Tensor, use: Tensor, counts: Tensor) -> None:
        """Move ``mu`` towards ``first`` and ``nu`` towards ``second`` where ``use`` is True; add to t where ``counts`` is."""
        t = self._t + 1
        rate = self.beta / (1 - (1 - self.beta) ** t)
        rate = torch.where(t == 1, 1.0, rate).to(self.nu.dtype)  # rounding would leave 0.02% of what was there before any data
        self._t.copy_(torch.where(counts, t, self._t))
        self.mu.copy_(torch.where(use, (1 - rate) * self.mu + rate * first, self.mu))
        self.nu.copy_(torch.where(use, (1 - rate) * self.nu + rate * second, self.nu))


SMALL_SIGMA = 0.01
"""Standard deviation up to which the original system does not scale a feature."""


@gin.configurable
class InputNorm(CachedWeights, RunningMoments):
    """Centre and scale each feature by running statistics of the inputs in training mode.

    Features that do not vary are only centred. The output is clamped to [-1e4, 1e4], and to [-10, 10] for features whose sigma
    is at most 0.01, such as flags that are hardly ever set. It is in float32, or in float64 for inputs in float64.

    Args:
        dim: number of features.
        beta: rate of the statistics after many updates, see `amago.nets.utils.RunningMoments`.
        init_nu: second moment before any data.
        skip: return inputs as they are. The statistics are then not updated; they stay in the state, as in the original system.
        skip_below: sigma up to which a feature is only centred, as if it did not vary; 0.01 in the original system. None:
            features of any size are scaled.
        initial_samples: number of updates that the statistics before any data count as. With 1, as in the original system, they
            fade slowly: a feature of mean 1,000 and standard deviation 1 has a sigma of 99 after 100 updates.
    """

    def __init__(
        self,
        dim: int,
        beta: float = 1e-4,
        init_nu: float = 1.0,
        skip: bool = False,
        skip_below: float | None = None,
        initial_samples: int = 0,
    ) -> None:
        check_positive(dim=dim)
        super().__init__((dim,), (1,), beta, init_nu, initial_samples)
        self.skip, self.skip_below = skip, skip_below
        self._cache = WeightCache()  # nine operations on a few numbers, which a policy's step need not repeat

    @property
    def sigma(self) -> Tensor:
        """(dim,), of at least 1e-3."""
        return torch.sqrt(self.variance + 1e-5).nan_to_num(nan=1e-3).clamp(1e-3, 1e30)

    @torch.no_grad()
    def update_stats(self, x: Tensor, mask: Tensor | None = None) -> None:
        """Move the statistics towards the statistics of ``x`` (B, L, dim) where ``mask`` (B, L, 1) is True.

        A batch without a real timestep changes nothing; a feature with a non-finite value keeps its statistics.
        """
        x = x.to(self.nu.dtype)
        mask = torch.ones((*x.shape[:2], 1), dtype=torch.bool, device=x.device) if mask is None else mask
        kept = torch.where(mask, x, 0.0)
        sums, squares, count = ranks.total(kept.sum((0, 1)), kept.square().sum((0, 1)), mask.sum())
        first, second = (s / count.clamp(min=1) for s in (sums, squares))
        self._move(first, second, (count > 0) & torch.isfinite(first) & torch.isfinite(second), count > 0)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """(B, L, dim) -> the same, normalised; in training mode the statistics are updated first."""
        if self.skip:
            return x
        if self.training:
            self.update_stats(x, mask)
        return self.normalize_values(x)

    def normalize_values(self, x: Tensor) -> Tensor:
        """Centre and scale (..., dim)."""
        scale = self._scale() if self.training else self._cache.get((self.mu, self.nu), self._scale, exact=True)
        divisor, limit = scale.unbind()
        x = at_least_float32(x)
        return ((x - self.mu.to(x.dtype)) / divisor).clamp(-limit, limit)

    def denormalize_values(self, x: Tensor) -> Tensor:
        """The values (..., dim) of which `normalize_values` makes ``x``."""
        x = at_least_float32(x)
        return x * self._scale()[0] + self.mu.to(x.dtype)

    def _scale(self) -> Tensor:
        """(2, dim): sigma, or 1 for features that are only centred; and the largest output."""
        sigma = self.sigma
        if self.skip_below is not None:
            divisor = torch.where(sigma > self.skip_below, sigma, 1.0)
            return torch.stack((divisor, torch.full_like(divisor, 1e4)))
        variance = self.nu - self.mu.square()
        rounding = 1e4 * torch.finfo(self.nu.dtype).eps * self.nu  # smaller values are not variance
        own = torch.where(variance > rounding, variance.clamp(min=0.0).sqrt(), 1.0).to(sigma.dtype)
        small = sigma <= SMALL_SIGMA
        return torch.stack((torch.where(small, own, sigma), torch.where(small, 10.0, 1e4)))


config.also_known_as(InputNorm, "amago.nets.ff.InputNorm", "nets.ff.InputNorm", "ff.InputNorm")
