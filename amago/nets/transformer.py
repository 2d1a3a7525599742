"""A causal transformer whose training is stable in reinforcement learning.

The linear layers of attention and feed-forward are sigma-reparametrised (Zhai et al. 2023, arXiv 2303.06296). It has the
extra norms and head scales of NormFormer (Shleifer et al. 2021, arXiv 2110.09456). Positions are *time indices* of the episode,
not places in the sequence. It reads whole sequences in training and single steps, against a cache of keys and values, in
acting.

Shapes: B sequences or actors, L timesteps, H heads.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import gin
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from amago import config
from amago.compat.hidden_state import Cache
from amago.compat.names import attributes
from amago.nets.attention import (
    ClippedSlidingSinkAttention,
    FlashAttention,
    FlexAttention,
    ScaledDotProductAttention,
    SelfAttention,
    SlidingWindowFlexAttention,
    SlidingWindowSinkFlexAttention,
    VanillaAttention,
    VanillaFlexAttention,
    flash_attn_module,
)  # fmt: skip
from amago.nets.ff import Normalization
from amago.nets.kv_cache import CacheSlots, KVCache
from amago.nets.kv_cache import TformerHiddenState as TformerHiddenState
from amago.nets.utils import (
    CachedWeights,
    Linear,
    WeightCache,
    activation_switch,
    autocast_dtype,
    check_positive,
)

__all__ = [
    "AttentionLayer", "Cache", "ClippedSlidingSinkAttention", "FixedPosEmb", "FlashAttention", "FlexAttention", "LearnablePosEmb", "LearnedPosEmb",
    "RotaryPosEmb", "ScaledDotProductAttention", "SelfAttention", "SigmaReparam", "SlidingWindowFlexAttention", "SlidingWindowSinkFlexAttention",
    "TformerHiddenState", "Transformer", "TransformerLayer", "VanillaAttention", "VanillaFlexAttention", "rope_angles", "rotate",
]  # fmt: skip

CacheStep: TypeAlias = tuple[KVCache, int, CacheSlots]
"""The place of a layer's keys and values: the cache, the index of the layer, and the slots of the current step."""

_find = attributes(__name__)


def __getattr__(name: str) -> Any:
    return flash_attn_module() if name == "flash_attn" else _find(name)  # None without the package: scripts test for that


def _frequencies(width: int, device: torch.device, base: float = 10_000.0) -> Tensor:
    """base^(-2i / width) for i = 0 .. width / 2 - 1. Always float32: in bf16, t and t + 1 are the same number from 256 on."""
    return torch.exp(torch.arange(0, width, 2, device=device, dtype=torch.float32) * (-math.log(base) / width))


class FixedPosEmb(nn.Module):
    """sin(t / 10000^(2i / d_model)) at index 2i and the cosine of the same at 2i + 1, for time index t and even ``d_model``
    (Vaswani et al. 2017)."""

    def __init__(self, d_model: int) -> None:
        super().__init__()
        if d_model % 2:
            raise ValueError(f"d_model must be even for fixed position embeddings, got d_model={d_model}")
        self.d_model = d_model

    def forward(self, time_idxs: Tensor) -> Tensor:
        """(B, L) int64 -> (B, L, d_model) float32."""
        angles = time_idxs.unsqueeze(-1) * _frequencies(self.d_model, time_idxs.device)
        return torch.stack((angles.sin(), angles.cos()), dim=-1).flatten(-2)


@gin.configurable
class LearnablePosEmb(nn.Module):
    """A learned vector for each time index up to ``max_time_idx``; later ones share the last."""

    def __init__(self, d_model: int, max_time_idx: int = 4096) -> None:
        super().__init__()
        check_positive(max_time_idx=max_time_idx)
        self.embedding = nn.Embedding(max_time_idx + 1, d_model)
        nn.init.normal_(self.embedding.weight, std=0.02)

    def forward(self, time_idxs: Tensor) -> Tensor:
        """(B, L) int64 -> (B, L, d_model)."""
        return self.embedding(time_idxs.clamp(0, self.embedding.num_embeddings - 1))


LearnedPosEmb = LearnablePosEmb
config.also_known_as(LearnablePosEmb, "LearnedPosEmb", "transformer.LearnedPosEmb", "amago.nets.transformer.LearnedPosEmb")


def rope_angles(time_idxs: Tensor, head_dim: int, base: float = 10_000.0) -> tuple[Tensor, Tensor]:
    """cos and sin, each (B, 1, L, head_dim / 2) float32, for rotary embeddings of time indices (B, L) (Su et al. 2021,
    arXiv 2104.09864)."""
    angles = time_idxs[:, None, :, None] * _frequencies(head_dim, time_idxs.device, base)
    return angles.cos(), angles.sin()


class RotaryPosEmb(nn.Module):
    """`rope_angles` as a module, for heads of an even number ``head_dim`` of numbers; it has no parameters."""

    def __init__(self, head_dim: int, base: float = 10_000.0) -> None:
        super().__init__()
        if head_dim % 2:
            raise ValueError(f"rope needs heads of even width, got d_model / n_heads = {head_dim}")
        self.head_dim, self.base = head_dim, base

    def forward(self, time_idxs: Tensor) -> tuple[Tensor, Tensor]:
        """(B, L) int64 -> cos and sin, each (B, 1, L, head_dim / 2), as `rotate` takes them."""
        return rope_angles(time_idxs, self.head_dim, self.base)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate (B, H, L, head_dim): number i of the first half together with number i of the second."""
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


@gin.configurable
class SigmaReparam(CachedWeights):
    """A linear layer of given spectral norm: x (gamma / sigma(W) W)^T + b, where sigma(W) is the spectral norm of W.

    sigma = u W v. In training mode, each forward pass first improves u and v by one power iteration; evaluation mode does not.

    Args:
        d_in, d_out: widths.
        bias: add b.
        fast_init: find u and v of a new layer by 15 power iterations instead of a singular value decomposition, whose time
            grows with the cube of the width. sigma then starts a few percent below the norm, and training improves it.
    """

    u: Tensor
    v: Tensor

    def __init__(self, d_in: int, d_out: int, bias: bool = True, fast_init: bool = False) -> None:
        super().__init__()
        check_positive(d_in=d_in, d_out=d_out)
        self.in_features, self.out_features = d_in, d_out
        self.weight = nn.Parameter(nn.init.trunc_normal_(torch.empty(d_out, d_in), std=0.02))
        self.bias = nn.Parameter(torch.zeros(d_out)) if bias else None
        self.gamma = nn.Parameter(torch.ones(1))
        weight = self.weight.detach()
        if fast_init:
            v = F.normalize(torch.randn(d_in), dim=0)
            for _ in range(15):
                u = F.normalize(weight @ v, dim=0)
                v = F.normalize(weight.t() @ u, dim=0)
        else:
            left, _, right = torch.linalg.svd(weight, full_matrices=False)
            u, v = left[:, 0].clone(), right[0].clone()
        self.register_buffer("u", u)
        self.register_buffer("v", v)
        self._cache = WeightCache()

    def effective_weight(self) -> Tensor:
        """gamma / sigma(W) W, (d_out, d_in); in training mode after one power iteration."""
        with torch.autocast(self.weight.device.type, enabled=False):  # half precision is too coarse for sigma
            u, v = self.u, self.v
            if self.training:
                with torch.no_grad():
                    u = F.normalize(self.weight @ v, dim=0)
                    v = F.normalize(self.weight.t() @ u, dim=0)
                    self.u.copy_(u)
                    self.v.copy_(v)
            else:  # the graph of this call must not contain the buffers, to which a later one in training mode writes
                u, v = (u.clone(), v.clone()) if torch.is_grad_enabled() else (u, v)
            sigma = torch.dot(u, torch.mv(self.weight, v))
            return self.weight * (self.gamma / sigma)

    def forward(self, x: Tensor) -> Tensor:
        """(..., d_in) -> (..., d_out)."""
        return self._product(x, self, self.effective_weight, self._cache)


def make_linear(sigma_reparam: bool, d_in: int, d_out: int, bias: bool = True) -> SigmaReparam | Linear:
    """`SigmaReparam`, or a plain linear layer."""
    return SigmaReparam(d_in, d_out, bias) if sigma_reparam else Linear(d_in, d_out, bias)


class AttentionLayer(CachedWeights):
    """Multi-head self-attention with a learned scale for each head, (B, L, d_model) -> (B, L, d_model).

    Args:
        self_attention: the kernel.
        d_model: a multiple of ``n_heads``.
        n_heads: H.
        dropout_qkv: probability of dropping a number of queries, keys and values.
        head_scaling: learn the scale of each head; False keeps it at 1, or at the value in a checkpoint.
        sigma_reparam: reparametrise both linear layers.
        qk_norm: t, or one for each head: scores are t cos(q, k), between -t and t (Henry et al. 2020, arXiv 2010.04245). None:
            they are q k / sqrt(head width).
    """

    no_weight_decay = ("head_scaler",)
    temperature: Tensor | None

    def __init__(
        self,
        self_attention: SelfAttention,
        d_model: int,
        n_heads: int,
        dropout_qkv: float = 0.0,
        head_scaling: bool = True,
        sigma_reparam: bool = True,
        qk_norm: float | Sequence[float] | None = None,
    ) -> None:
        super().__init__()
        check_positive(d_model=d_model, n_heads=n_heads)
        if d_model % n_heads:
            raise ValueError(f"d_model must divide by n_heads, got d_model={d_model}, n_heads={n_heads}")
        self.self_attention = self_attention
        self.n_heads, self.head_dim = n_heads, d_model // n_heads
        self.qkv_projection = make_linear(sigma_reparam, d_model, 3 * d_model, bias=False)
        self.out_projection = make_linear(sigma_reparam, d_model, d_model)
        self.dropout_qkv = nn.Dropout(dropout_qkv)
        self._cache, self._out_cache = WeightCache(), WeightCache()
        self.head_scaler = nn.Parameter(torch.ones(1, 1, n_heads, 1), requires_grad=head_scaling)
        t = None if isinstance(qk_norm, str | bool | None) else torch.as_tensor(qk_norm, dtype=torch.float32).reshape(-1, 1, 1)
        if (t is None) != (qk_norm is None) or (t is not None and (len(t) not in (1, n_heads) or not (t > 0).all())):
            raise ValueError(
                f"qk_norm must be a positive number, one for each of {n_heads} heads, or None, got qk_norm={qk_norm!r}"
            )
        # kernels divide scores by the root of the head's width, and so does the norm of each RMS-normalised key
        self.register_buffer("temperature", None if t is None else t / math.sqrt(self.head_dim), persistent=False)

    def _qkv_weight(self) -> Tensor:
        """The effective weight of the projection, with the rows of each head together.

        Checkpoints order the output as (3, head_dim, H). Rows of the weight are reordered because activations are larger.
        """
        weight = self.qkv_projection.effective_weight()
        rows = weight.view(3, self.head_dim, self.n_heads, -1).transpose(1, 2)
        return rows.reshape(weight.shape)

    def _out_weight(self) -> Tensor:
        """The effective weight of the output projection, whose columns are multiplied by the scales of heads: activations are larger."""
        weight = self.out_projection.effective_weight()
        return (weight.unflatten(1, (self.n_heads, -1)) * self.head_scaler.view(-1, 1)).flatten(1)

    def forward(
        self, x: Tensor, rope: tuple[Tensor, Tensor] | None = None, cache: CacheStep | None = None, real: Tensor | None = None
    ) -> Tensor:
        """Attend over the sequence or, with a ``cache``, from one token (L == 1) to those in the cache and itself.

        Args:
            x: (B, L, d_model).
            rope: result of `rope_angles`, to rotate queries and keys.
            cache: is updated with the token.
            real: (B, L) bool, False at tokens that none may see; None: no such token.
        """
        B, L, _ = x.shape
        qkv = self._product(x, self.qkv_projection, self._qkv_weight, self._cache, self.head_scaler)
        if self.training:
            qkv = self.dropout_qkv(qkv)
        q, k, v = qkv.view(B, L, 3, self.n_heads, self.head_dim).permute(2, 0, 3, 1, 4)
        if self.temperature is not None:
            q, k = (F.rms_norm(x, (self.head_dim,), eps=1e-12) for x in (q, k))
            q = q * self.temperature.to(q.dtype)
        if rope is not None:
            q, k = rotate(q, *rope), rotate(k, *rope)
        if cache is None:
            out = self.self_attention(q, k, v) if real is None else self.self_attention(q, k, v, real=real)
        else:
            store, index, slots = cache
            k, v = store.write(index, k, v, slots)
            out = self.self_attention(q.to(k.dtype), k, v, slots).to(q.dtype)
        out = out.transpose(1, 2).reshape(B, L, -1)
        return self._product(out, self.out_projection, self._out_weight, self._out_cache, self.head_scaler)


class TransformerLayer(nn.Module):
    """x + N2(Attn(N1 x)), then x + FF2(N4(act(FF1(N3 x)))). N2 and N4 are the extra norms of NormFormer.

    Args:
        attention_layer: Attn.
        d_model, d_ff: widths of x, and between FF1 and FF2.
        dropout_ff: probability of dropping a number of FF2's output.
        activation, norm: names, as of `amago.nets.utils.activation_switch` and `amago.nets.ff.Normalization`.
        sigma_reparam: reparametrise both linear layers.
        normformer_norms: use N2 and N4.
    """

    def __init__(
        self,
        attention_layer: AttentionLayer,
        d_model: int,
        d_ff: int,
        dropout_ff: float = 0.05,
        activation: str = "leaky_relu",
        norm: str = "layer",
        sigma_reparam: bool = True,
        normformer_norms: bool = True,
    ) -> None:
        super().__init__()
        check_positive(d_ff=d_ff)
        self.d_model, self.attention_layer = d_model, attention_layer
        self.ff1 = make_linear(sigma_reparam, d_model, d_ff)
        self.ff2 = make_linear(sigma_reparam, d_ff, d_model)
        self.norm1 = Normalization(norm, d_model)
        self.norm2 = Normalization(norm, d_model) if normformer_norms else nn.Identity()
        self.norm3 = Normalization(norm, d_model)
        self.norm4 = Normalization(norm, d_ff) if normformer_norms else nn.Identity()
        self.dropout_ff = nn.Dropout(dropout_ff)
        self.activation = activation_switch(activation, inplace=True)

    def forward(
        self, x: Tensor, rope: tuple[Tensor, Tensor] | None = None, cache: CacheStep | None = None, real: Tensor | None = None
    ) -> Tensor:
        """(B, L, d_model) -> (B, L, d_model); ``rope``, ``cache`` and ``real`` as of `AttentionLayer.forward`."""
        x = x + self.norm2(self.attention_layer(self.norm1(x), rope, cache, real))
        h = self.norm4(self.activation(self.ff1(self.norm3(x))))
        h = self.ff2(h)
        return x + (self.dropout_ff(h) if self.training else h)


class Transformer(nn.Module):
    """A linear input layer, a position embedding, ``layers`` and a norm: (B, L, d_inp) -> (B, L, d_model).

    Args:
        d_inp, d_model: widths.
        layers: the `TransformerLayer`s.
        dropout_emb: probability of dropping a number of the embedded input.
        norm: of the output, as of `amago.nets.ff.Normalization`.
        pos_emb: "fixed" (`FixedPosEmb`), "learned" or "learnable" (`LearnablePosEmb`), "rope" (`rotate`), or "none": the order
            shows only in which steps each one sees.
    """

    def __init__(
        self,
        d_inp: int,
        d_model: int,
        layers: list[TransformerLayer],
        dropout_emb: float = 0.05,
        norm: str = "layer",
        pos_emb: str = "fixed",
    ) -> None:
        super().__init__()
        check_positive(d_inp=d_inp, d_model=d_model, n_layers=len(layers))
        self.n_heads, self.head_dim, self.d_model = (
            layers[0].attention_layer.n_heads,
            layers[0].attention_layer.head_dim,
            d_model,
        )
        kinds: dict[str, Callable[[], nn.Module]] = {
            "fixed": lambda: FixedPosEmb(d_model),
            **dict.fromkeys(("learned", "learnable"), lambda: LearnablePosEmb(d_model)),
            "rope": lambda: RotaryPosEmb(self.head_dim),
            "none": nn.Identity,
        }
        if pos_emb not in kinds:
            raise ValueError(f"pos_emb={pos_emb!r} is unknown: use one of {', '.join(kinds)}")
        self.inp = Linear(d_inp, d_model)
        self.pos_emb = kinds[pos_emb]()
        self.dropout_emb = nn.Dropout(dropout_emb)
        self.layers = nn.ModuleList(layers)
        self.norm = Normalization(norm, d_model)

    def forward(
        self, seq: Tensor, time_idxs: Tensor, hidden_state: Any = None, real: Tensor | None = None
    ) -> tuple[Tensor, Any]:
        """Map whole sequences or, with a ``hidden_state``, one step (L == 1).

        Args:
            seq: (B, L, d_inp).
            time_idxs: (B, L) or (B, L, 1) int64, index of each step in its episode.
            hidden_state: keys and values of earlier steps (`KVCache`), which are updated.
            real: (B, L) bool, False at tokens that none may see; None: no such token.

        Returns:
            (B, L, d_model), and ``hidden_state``.
        """
        if hidden_state is None:
            return self.training_forward(seq, time_idxs, real), None
        return self.inference_forward(seq, time_idxs, hidden_state)

    def preprocess_seq(self, seq: Tensor, time_idxs: Tensor) -> Tensor:
        """Embed inputs and times, (B, L, d_inp) -> (B, L, d_model), as the first layer takes them."""
        x = self.inp(seq)
        if not isinstance(self.pos_emb, RotaryPosEmb | nn.Identity):
            summed = x + self.pos_emb(_flat(time_idxs))  # float32 under autocast too, as is the residual stream
            x = summed if autocast_dtype(x.device) else summed.to(x.dtype)
        return self.dropout_emb(x) if self.training else x

    def training_forward(self, seq: Tensor, time_idxs: Tensor, real: Tensor | None = None) -> Tensor:
        """Map whole sequences; arguments as of `forward`."""
        x, rope = self.preprocess_seq(seq, time_idxs), self._angles(time_idxs)
        for layer in self.layers:
            x = layer(x, rope, None, real)
        return self.norm(x)

    def inference_forward(self, seq: Tensor, time_idxs: Tensor, hidden_state: Any) -> tuple[Tensor, Any]:
        """Map one step, and remember it; arguments as of `forward`."""
        x, rope, slots = self.preprocess_seq(seq, time_idxs), self._angles(time_idxs), hidden_state.advance()
        for i, layer in enumerate(self.layers):
            x = layer(x, rope, (hidden_state, i, slots))
        return self.norm(x), hidden_state

    def _angles(self, time_idxs: Tensor) -> tuple[Tensor, Tensor] | None:
        return self.pos_emb(_flat(time_idxs)) if isinstance(self.pos_emb, RotaryPosEmb) else None

    @property
    def position_embedding(self) -> nn.Module:
        """The position embedding."""
        return self.pos_emb

    @property
    def dropout(self) -> nn.Dropout:
        """The dropout of the embedded input."""
        return self.dropout_emb


def _flat(time_idxs: Tensor) -> Tensor:
    return time_idxs.squeeze(-1) if time_idxs.ndim == 3 else time_idxs
