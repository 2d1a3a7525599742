"""A causal transformer whose training is stable in reinforcement learning.

What is notable: the linear layers of attention and feed-forward are sigma-reparametrised (Zhai et al. 2023, arXiv 2303.06296). It has the
extra norms and head scales of NormFormer (Shleifer et al. 2021, arXiv 2110.09456). Positions are *time indices* of the episode, not
places in the sequence. It reads whole sequences in training and single steps, against a cache of keys and values, in acting.

Shapes: B sequences or actors, L timesteps, H heads.
"""

from __future__ import annotations

import math
from typing import Any, TypeAlias

import gin
import torch
from torch import Tensor, nn

from amago import config
from amago.compat.hidden_state import Cache
from amago.config import NamedArguments
from amago.nets.attention import FlashAttention, ScaledDotProductAttention, SelfAttention, VanillaAttention, flash_attn_module
from amago.nets.cpu.packed import Linear
from amago.nets.ff import Normalization
from amago.nets.flex_attention import (
    ClippedSlidingSinkAttention,
    FlexAttention,
    SlidingWindowFlexAttention,
    SlidingWindowSinkFlexAttention,
    VanillaFlexAttention,
)
from amago.nets.kv_cache import CacheSlots, KVCache
from amago.nets.sigma_reparam import CachedLinears, SigmaReparam, make_linear
from amago.nets.tensor_cache import TensorCache
from amago.nets.utils import activation_switch, autocast_dtype, check_dropout, check_positive

__all__ = [
    "AttentionLayer",
    "Cache",
    "ClippedSlidingSinkAttention",
    "FixedPosEmb",
    "FlashAttention",
    "FlexAttention",
    "LearnablePosEmb",
    "LearnedPosEmb",
    "ScaledDotProductAttention",
    "SelfAttention",
    "SigmaReparam",
    "SlidingWindowFlexAttention",
    "SlidingWindowSinkFlexAttention",
    "TformerHiddenState",
    "Transformer",
    "TransformerLayer",
    "VanillaAttention",
    "VanillaFlexAttention",
    "rope_angles",
    "rotate",
]


CacheStep: TypeAlias = tuple[KVCache | TensorCache, int, CacheSlots]
"""Where a layer keeps its keys and values: the cache, the index of the layer, and the slots of the current step."""

TformerHiddenState = KVCache
"""What `amago.nets.traj_encoders.TformerTrajEncoder` remembers while it acts."""


def __getattr__(name: str) -> Any:
    if name != "flash_attn":
        raise AttributeError(f"module 'amago.nets.transformer' has no attribute {name!r}")
    return flash_attn_module()  # None without the package: scripts test for that


def _frequencies(width: int, device: torch.device, base: float = 10_000.0) -> Tensor:
    """base^(-2i / width) for i = 0 .. width / 2 - 1. Always float32: in bf16, t and t + 1 are the same number from 256 on."""
    return torch.exp(torch.arange(0, width, 2, device=device, dtype=torch.float32) * (-math.log(base) / width))


class FixedPosEmb(nn.Module):
    """sin(t / 10000^(2i / d_model)) at index 2i and the cosine of the same at 2i + 1, for time index t (Vaswani et al. 2017).

    Args:
        d_model: even.

    Raises:
        ValueError: ``d_model`` is odd.
    """

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
class LearnablePosEmb(NamedArguments, nn.Module):
    """A learned vector for each time index.

    Args:
        d_model: width of the vectors.
        max_time_idx: last time index with a vector of its own; later ones share it.

    Raises:
        ValueError: ``max_time_idx`` is below 1.
    """

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
    """cos and sin, each (B, 1, L, head_dim / 2) float32, for rotary embeddings of time indices (B, L) (Su et al. 2021, arXiv 2104.09864)."""
    angles = time_idxs[:, None, :, None] * _frequencies(head_dim, time_idxs.device, base)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate (B, H, L, head_dim): number i of the first half together with number i of the second."""
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


class AttentionLayer(CachedLinears):
    """Multi-head self-attention with a learned scale for each head, (B, L, d_model) -> (B, L, d_model).

    Args:
        self_attention: the kernel.
        d_model: a multiple of ``n_heads``.
        n_heads: H.
        dropout_qkv: probability of dropping a number of queries, keys and values.
        head_scaling: learn the scale of each head; False keeps it at 1, or at the value in a checkpoint.
        sigma_reparam: reparametrise both linear layers.

    Raises:
        ValueError: ``d_model`` is no multiple of ``n_heads``, or a number is out of range.
    """

    no_weight_decay = ("head_scaler",)

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
        self.qkv_projection = make_linear(sigma_reparam, d_model, 3 * d_model, bias=False)
        self.out_projection = make_linear(sigma_reparam, d_model, d_model)
        self.dropout_qkv = nn.Dropout(dropout_qkv)
        self.head_scaler = nn.Parameter(torch.ones(1, 1, n_heads, 1), requires_grad=head_scaling)

    def _arrange(self, name: str, weight: Tensor) -> Tensor:
        if name != "qkv_projection":
            return weight
        # Checkpoints order the output as (3, head_dim, H), in which the numbers of a head are not contiguous. Rows of the weight are
        # reordered because activations are larger.
        rows = weight.view(3, self.head_dim, self.n_heads, -1).transpose(1, 2)
        return rows.reshape(weight.shape)

    def forward(
        self,
        x: Tensor,
        rope: tuple[Tensor, Tensor] | None = None,
        cache: CacheStep | None = None,
        real: Tensor | None = None,
    ) -> Tensor:
        """Attend over the sequence or, with a ``cache``, from one token (L == 1) to those in the cache and itself.

        Args:
            x: (B, L, d_model).
            rope: result of `rope_angles`, to rotate queries and keys.
            cache: is updated with the token.
            real: (B, L) bool, False at tokens that none may see; None: no such token.
        """
        B, L, _ = x.shape
        qkv = self._linear("qkv_projection", x)
        if self.training:  # in evaluation mode the module's call would do nothing
            qkv = self.dropout_qkv(qkv)
        q, k, v = qkv.view(B, L, 3, self.n_heads, self.head_dim).permute(2, 0, 3, 1, 4)
        if rope is not None:
            q, k = rotate(q, *rope), rotate(k, *rope)
        if cache is None:
            out = self.self_attention(q, k, v) if real is None else self.self_attention(q, k, v, real=real)
        else:
            store, layer, slots = cache
            k, v = store.write(layer, k, v, slots)
            out = self.self_attention(q.to(k.dtype), k, v, slots).to(q.dtype)
        out = out.transpose(1, 2) * self.head_scaler
        return self._linear("out_projection", out.reshape(B, L, -1))


class TransformerLayer(CachedLinears):
    """x + N2(Attn(N1 x)), then x + FF2(N4(act(FF1(N3 x)))). N2 and N4 are the extra norms of NormFormer.

    Args:
        attention_layer: Attn.
        d_model: width of x.
        d_ff: width between FF1 and FF2.
        dropout_ff: probability of dropping a number of FF2's output.
        activation: name, as of `amago.nets.utils.activation_switch`.
        norm: "layer", "rmsnorm" or "none".
        sigma_reparam: reparametrise both linear layers.
        normformer_norms: use N2 and N4.

    Raises:
        ValueError: a number is out of range, or a name unknown.
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
        check_dropout(dropout_ff=dropout_ff)
        self.attention_layer = attention_layer
        self.ff1 = make_linear(sigma_reparam, d_model, d_ff)
        self.ff2 = make_linear(sigma_reparam, d_ff, d_model)
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
        cache: CacheStep | None = None,
        real: Tensor | None = None,
    ) -> Tensor:
        """(B, L, d_model) -> (B, L, d_model); ``rope``, ``cache`` and ``real`` as of `AttentionLayer.forward`."""
        x = x + self.norm2(self.attention_layer(self.norm1(x), rope, cache, real))
        h = self.norm4(self.activation(self._linear("ff1", self.norm3(x))))
        h = self._linear("ff2", h)
        return x + (self.dropout_ff(h) if self.training else h)


_POS_EMBS = ("fixed", "learned", "learnable", "rope")


class Transformer(nn.Module):
    """A linear input layer, a position embedding, ``layers`` and a norm: (B, L, d_inp) -> (B, L, d_model).

    Args:
        d_inp, d_model: widths.
        layers: the `TransformerLayer`s.
        dropout_emb: probability of dropping a number of the embedded input.
        norm: of the output: "layer", "rmsnorm" or "none".
        pos_emb: "fixed" (`FixedPosEmb`), "learned" or "learnable" (`LearnablePosEmb`), or "rope" (`rotate`).

    Raises:
        ValueError: ``pos_emb`` is unknown, or rope with heads of odd width.
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
            self.pos_emb = LearnablePosEmb(d_model)
        self.dropout_emb = nn.Dropout(dropout_emb)
        self.layers = nn.ModuleList(layers)
        self.norm = Normalization(norm, d_model)

    def forward(
        self,
        seq: Tensor,
        time_idxs: Tensor,
        cache: KVCache | TensorCache | None = None,
        real: Tensor | None = None,
    ) -> Tensor:
        """Map whole sequences or, with a ``cache``, one step (L == 1).

        Args:
            seq: (B, L, d_inp).
            time_idxs: (B, L) int64, index of each step in its episode.
            cache: keys and values of earlier steps; it is updated.
            real: (B, L) bool, False at tokens that none may see; None: no such token.
        """
        x = self.inp(seq)
        if self.pos_emb is not None:
            summed = x + self.pos_emb(time_idxs)  # float32 under autocast too, and with it what the layers add to
            x = summed if autocast_dtype(x.device) else summed.to(x.dtype)
        if self.training:
            x = self.dropout_emb(x)
        rope = rope_angles(time_idxs, self.head_dim) if self.pos_emb is None else None
        slots = None if cache is None else cache.advance()
        for i, layer in enumerate(self.layers):
            x = layer(x, rope, None if cache is None or slots is None else (cache, i, slots), real)
        return self.norm(x)

    @property
    def position_embedding(self) -> nn.Module | None:
        """The position embedding; None with "rope"."""
        return self.pos_emb

    @property
    def dropout(self) -> nn.Dropout:
        """The dropout of the embedded input."""
        return self.dropout_emb
