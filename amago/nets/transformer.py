"""A causal transformer tuned for stability in reinforcement learning.

What is notable: the linear layers of attention and feed-forward are sigma-reparametrised (Zhai et al. 2023, arXiv 2303.06296);
NormFormer's extra norms and head scales (Shleifer et al. 2021, arXiv 2110.09456); positions are *time indices* of the
episode, not places in the sequence; whole sequences to train on, one step at a time to act.
"""

from __future__ import annotations

import math
from typing import Any

import gin
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from amago.nets.attention import FlashAttention, ScaledDotProductAttention, SelfAttention, VanillaAttention
from amago.nets.cpu.packed import Linear, linear, pack
from amago.nets.cpu.weight_cache import WeightCache
from amago.nets.ff import Normalization
from amago.nets.flex_attention import FlexAttention, SlidingWindowFlexAttention, SlidingWindowSinkFlexAttention
from amago.nets.kv_cache import CacheSlots, KVCache
from amago.nets.utils import activation_switch, check_dropout, check_positive

__all__ = [
    "AttentionLayer",
    "FixedPosEmb",
    "FlashAttention",
    "FlexAttention",
    "LearnedPosEmb",
    "ScaledDotProductAttention",
    "SelfAttention",
    "SigmaReparam",
    "SlidingWindowFlexAttention",
    "SlidingWindowSinkFlexAttention",
    "Transformer",
    "TransformerLayer",
    "VanillaAttention",
    "rope_angles",
    "rotate",
]


class SigmaReparam(nn.Module):
    """x (gamma / sigma(W) W)^T + b, where sigma(W) is the spectral norm: gamma alone says how far the layer can stretch.

    sigma = u W v; each forward in training mode first improves u and v by one power iteration. Eval mode changes nothing, and
    without gradients it computes the effective weight once per version of the parameters.
    """

    u: Tensor
    v: Tensor

    def __init__(self, d_in: int, d_out: int, bias: bool = True) -> None:
        super().__init__()
        check_positive(d_in=d_in, d_out=d_out)
        self.weight = nn.Parameter(nn.init.trunc_normal_(torch.empty(d_out, d_in), std=0.02))
        self.bias = nn.Parameter(torch.zeros(d_out)) if bias else None
        self.gamma = nn.Parameter(torch.ones(1))
        left, _, right = torch.linalg.svd(self.weight.detach(), full_matrices=False)
        self.register_buffer("u", left[:, 0].clone())
        self.register_buffer("v", right[0].clone())

    def effective_weight(self) -> Tensor:
        """gamma / sigma(W) W, (d_out, d_in); in training mode after one power iteration."""
        with torch.autocast(self.weight.device.type, enabled=False):  # a half-precision sigma would not be good enough
            u, v = self.u, self.v
            if self.training:
                with torch.no_grad():
                    u = F.normalize(self.weight @ v, dim=0)
                    v = F.normalize(self.weight.t() @ u, dim=0)
                    self.u.copy_(u)
                    self.v.copy_(v)
            else:  # a later training forward writes to the buffers; the graph of this one must not change
                u, v = (u.clone(), v.clone()) if torch.is_grad_enabled() else (u, v)
            sigma = torch.dot(u, torch.mv(self.weight, v))
            return self.weight * (self.gamma / sigma)

    def forward(self, x: Tensor) -> Tensor:
        """(..., d_in) -> (..., d_out)."""
        return F.linear(x, self.effective_weight(), self.bias)

    @property
    def weight_sources(self) -> tuple[Tensor, ...]:
        """The tensors that `effective_weight` depends on."""
        return (self.weight, self.gamma, self.u, self.v)


class _PlainLinear(nn.Linear):
    """A linear layer with the interface of `SigmaReparam`."""

    def effective_weight(self) -> Tensor:
        return self.weight

    @property
    def weight_sources(self) -> tuple[Tensor, ...]:
        return (self.weight,)


class _CachedLinears(nn.Module):
    """A module that applies `SigmaReparam` (or plain) layers through caches of their effective weights."""

    def __init__(self) -> None:
        super().__init__()
        self._caches: dict[str, WeightCache] = {}

    def train(self, mode: bool = True) -> Any:
        for cache in self._caches.values():
            cache.clear()
        return super().train(mode)

    def _weight(self, name: str, layer: Any) -> Tensor:
        """The effective weight of the ``layer`` of that name."""
        if self.training:
            return self._arrange(name, layer.effective_weight())
        cache = self._caches.get(name)
        if cache is None:
            cache = self._caches[name] = WeightCache()
        return cache.get(layer.weight_sources, lambda: pack(self._arrange(name, layer.effective_weight())))

    def _arrange(self, name: str, weight: Tensor) -> Tensor:
        return weight

    def _linear(self, name: str, x: Tensor) -> Tensor:
        layer: Any = getattr(self, name)
        return linear(x, self._weight(name, layer), layer.bias)


def _make_linear(sigma_reparam: bool, d_in: int, d_out: int, bias: bool = True) -> SigmaReparam | _PlainLinear:
    return SigmaReparam(d_in, d_out, bias) if sigma_reparam else _PlainLinear(d_in, d_out, bias)


def _frequencies(width: int, device: torch.device, base: float = 10_000.0) -> Tensor:
    """base^(-2i / width) for i = 0 .. width / 2 - 1, float32 whatever the model's dtype: bf16 cannot tell t from t + 1."""
    return torch.exp(torch.arange(0, width, 2, device=device, dtype=torch.float32) * (-math.log(base) / width))


class FixedPosEmb(nn.Module):
    """sin(t / 10000^(2i/D)) in the even places 2i, cos of the same in the odd ones; t is any time index."""

    def __init__(self, d_model: int) -> None:
        super().__init__()
        if d_model % 2:
            raise ValueError(f"d_model must be even for fixed position embeddings, got d_model={d_model}")
        self.d_model = d_model

    def forward(self, time_idxs: Tensor) -> Tensor:
        """(B, L) int64 -> (B, L, D) float32."""
        angles = time_idxs.unsqueeze(-1) * _frequencies(self.d_model, time_idxs.device)
        return torch.stack((angles.sin(), angles.cos()), dim=-1).flatten(-2)


@gin.configurable
class LearnedPosEmb(nn.Module):
    """A table of learned vectors by time index.

    Args:
        d_model: their width.
        max_time_idx: last entry; later times share it.
    """

    def __init__(self, d_model: int, max_time_idx: int = 4096) -> None:
        super().__init__()
        check_positive(max_time_idx=max_time_idx)
        self.embedding = nn.Embedding(max_time_idx + 1, d_model)
        nn.init.normal_(self.embedding.weight, std=0.02)

    def forward(self, time_idxs: Tensor) -> Tensor:
        """(B, L) int64 -> (B, L, D)."""
        return self.embedding(time_idxs.clamp(0, self.embedding.num_embeddings - 1))


def rope_angles(time_idxs: Tensor, head_dim: int, base: float = 10_000.0) -> tuple[Tensor, Tensor]:
    """cos and sin, each (B, 1, L, head_dim / 2) float32, of the rotations of time indices (B, L) (Su et al. 2021)."""
    angles = time_idxs[:, None, :, None] * _frequencies(head_dim, time_idxs.device, base)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate (B, H, L, D): the first half of D against the second."""
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


class AttentionLayer(_CachedLinears):
    """Multi-head self-attention with a learned scale for each head, (B, L, d_model) -> (B, L, d_model).

    Args:
        self_attention: the kernel.
        d_model, n_heads: d_model divides by n_heads.
        dropout_qkv: on queries, keys and values.
        head_scaling: learn the scale of each head; else it stays what it is (1, or what a checkpoint says).
        sigma_reparam: reparametrise both linear layers.
    """

    def __init__(
        self,
        self_attention: SelfAttention,
        d_model: int,
        n_heads: int,
        dropout_qkv: float = 0.0,
        head_scaling: bool = True,
        sigma_reparam: bool = True,
    ) -> None:
        super().__init__()
        check_positive(d_model=d_model, n_heads=n_heads)
        check_dropout(dropout_qkv=dropout_qkv)
        if d_model % n_heads:
            raise ValueError(f"d_model must divide by n_heads, got d_model={d_model}, n_heads={n_heads}")
        self.self_attention = self_attention
        self.n_heads, self.head_dim = n_heads, d_model // n_heads
        self.qkv_projection = _make_linear(sigma_reparam, d_model, 3 * d_model, bias=False)
        self.out_projection = _make_linear(sigma_reparam, d_model, d_model)
        self.dropout_qkv = nn.Dropout(dropout_qkv)
        self.head_scaler = nn.Parameter(torch.ones(1, 1, n_heads, 1), requires_grad=head_scaling)

    def _arrange(self, name: str, weight: Tensor) -> Tensor:
        if name != "qkv_projection":
            return weight
        # Checkpoints lay the output out as (3, head_dim, heads), which would leave every head strided. Sorting the rows of the
        # weight costs far less than sorting activations.
        rows = weight.view(3, self.head_dim, self.n_heads, -1).transpose(1, 2)
        return rows.reshape(weight.shape)

    def forward(
        self,
        x: Tensor,
        rope: tuple[Tensor, Tensor] | None = None,
        cache: tuple[KVCache, int, CacheSlots] | None = None,
    ) -> Tensor:
        """Attend over the sequence, or (L == 1) over the ``cache``'s layer after the token is written to it.

        Args:
            x: (B, L, d_model).
            rope: what `rope_angles` gives for queries and keys, if they are to be rotated.
            cache: (cache, index of this layer, slots of this step).
        """
        B, L, _ = x.shape
        qkv = self.dropout_qkv(self._linear("qkv_projection", x))
        q, k, v = qkv.view(B, L, 3, self.n_heads, self.head_dim).permute(2, 0, 3, 1, 4)
        if rope is not None:
            q, k = rotate(q, *rope), rotate(k, *rope)
        if cache is None:
            out = self.self_attention(q, k, v)
        else:
            store, layer, slots = cache
            k, v = store.write(layer, k, v, slots)
            out = self.self_attention(q.to(k.dtype), k, v, slots).to(q.dtype)
        out = out.transpose(1, 2)
        return self._linear("out_projection", (out * self.head_scaler).reshape(B, L, -1))

    def step(self, x: Tensor, rope: tuple[Tensor, Tensor] | None, cache: tuple[KVCache, int, CacheSlots]) -> Tensor:
        """`forward` of one token without gradient, (B, d_model) -> (B, d_model), in fewer operations."""
        store, layer, slots = cache
        qkv = self._linear("qkv_projection", x).view(len(x), 3, self.n_heads, self.head_dim)
        if rope is not None:
            qkv = torch.cat((rotate(qkv[:, :2], *rope), qkv[:, 2:]), dim=1)
        k, v = store.write_pair(layer, qkv[:, 1:], slots)
        q = qkv[:, 0].unsqueeze(2).to(k.dtype)
        out = self.self_attention(q, k, v, slots).to(qkv.dtype)  # (B, H, 1, D)
        out = out.view(len(x), self.n_heads, self.head_dim) * self.head_scaler[0, 0]
        return self._linear("out_projection", out.flatten(1))


class TransformerLayer(_CachedLinears):
    """x + N2(Attn(N1 x)), then x + FF2(N4(act(FF1(N3 x)))); N2 and N4 are the extra norms of NormFormer."""

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
        check_dropout(dropout_ff=dropout_ff)
        self.attention_layer = attention_layer
        self.ff1 = _make_linear(sigma_reparam, d_model, d_ff)
        self.ff2 = _make_linear(sigma_reparam, d_ff, d_model)
        self.norm1 = Normalization(norm, d_model)
        self.norm2 = Normalization(norm, d_model) if normformer_norms else nn.Identity()
        self.norm3 = Normalization(norm, d_model)
        self.norm4 = Normalization(norm, d_ff) if normformer_norms else nn.Identity()
        self.dropout_ff = nn.Dropout(dropout_ff)
        self.activation = activation_switch(activation, inplace=True)

    def forward(
        self,
        x: Tensor,
        rope: tuple[Tensor, Tensor] | None = None,
        cache: tuple[KVCache, int, CacheSlots] | None = None,
    ) -> Tensor:
        x = x + self.norm2(self.attention_layer(self.norm1(x), rope, cache))
        h = self.norm4(self.activation(self._linear("ff1", self.norm3(x))))
        return x + self.dropout_ff(self._linear("ff2", h))

    def step(self, x: Tensor, rope: tuple[Tensor, Tensor] | None, cache: tuple[KVCache, int, CacheSlots]) -> Tensor:
        """`forward` of one token without gradient or dropout, (B, d_model) -> (B, d_model)."""
        x = x + self.norm2(self.attention_layer.step(self.norm1(x), rope, cache))
        return x + self._linear("ff2", self.norm4(self.activation(self._linear("ff1", self.norm3(x)))))


_POS_EMBS = ("fixed", "learned", "learnable", "rope")


class Transformer(nn.Module):
    """A linear input layer, positions, ``layers`` and a last norm: (B, L, d_inp) -> (B, L, d_model).

    Args:
        d_inp, d_model: widths.
        layers: the `TransformerLayer`s.
        dropout_emb: on the embedded input.
        norm: of the output, by name.
        pos_emb: "fixed", "learned" ("learnable" is the same) or "rope".
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
        check_dropout(dropout_emb=dropout_emb)
        if pos_emb not in _POS_EMBS:
            raise ValueError(f"pos_emb={pos_emb!r} is unknown: use one of {', '.join(_POS_EMBS)}")
        self.head_dim = layers[0].attention_layer.head_dim
        self.n_heads = layers[0].attention_layer.n_heads
        if pos_emb == "rope" and self.head_dim % 2:
            raise ValueError(f"rope needs heads of even width, got d_model / n_heads = {self.head_dim}")
        self.inp = Linear(d_inp, d_model)
        self.pos_emb: nn.Module | None = None
        if pos_emb == "fixed":
            self.pos_emb = FixedPosEmb(d_model)
        elif pos_emb != "rope":
            self.pos_emb = LearnedPosEmb(d_model)
        self.dropout_emb = nn.Dropout(dropout_emb)
        self.layers = nn.ModuleList(layers)
        self.norm = Normalization(norm, d_model)

    def forward(self, seq: Tensor, time_idxs: Tensor, cache: KVCache | None = None) -> Tensor:
        """Whole sequences, or one step (L == 1) against a ``cache``, which is updated in place.

        Args:
            seq: (B, L, d_inp).
            time_idxs: (B, L) int64, index of each step in its episode.
            cache: see above.
        """
        if isinstance(cache, KVCache) and not self.training and not torch.is_grad_enabled():
            return self._step(seq, time_idxs, cache)
        x = self.inp(seq)
        if self.pos_emb is not None:
            x = x + self.pos_emb(time_idxs).to(x.dtype)
        x = self.dropout_emb(x)
        rope = rope_angles(time_idxs, self.head_dim) if self.pos_emb is None else None
        slots = None if cache is None else cache.advance()
        for i, layer in enumerate(self.layers):
            x = layer(x, rope, None if cache is None or slots is None else (cache, i, slots))
        return self.norm(x)

    def _step(self, seq: Tensor, time_idxs: Tensor, cache: KVCache) -> Tensor:
        """`forward` of one step that nobody trains on, without the dimension of length, dropout and what else would take time."""
        x = self.inp(seq[:, 0])
        rope = None
        if self.pos_emb is None:
            rope = rope_angles(time_idxs, self.head_dim)
        else:
            x = x + self.pos_emb(time_idxs)[:, 0].to(x.dtype)
        slots = cache.advance()
        for i, layer in enumerate(self.layers):
            x = layer.step(x, rope, (cache, i, slots))  # type: ignore[operator]
        return self.norm(x).unsqueeze(1)
