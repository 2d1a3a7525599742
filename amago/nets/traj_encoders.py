"""Sequence models: causal maps from e_0..e_T to s_0..s_T, over whole sequences in training and one step at a time in acting.

A new one is a subclass of `TrajEncoder`; the decorator `amago.nets.registry.named_traj_encoder` gives it a name on command lines.

Shapes: B sequences or actors, L timesteps, D numbers of a timestep's input, E of its output.
"""

from __future__ import annotations

from typing import Any

import gin
import torch
from torch import Tensor, nn

from amago.nets import transformer
from amago.nets.cpu.packed import Linear
from amago.nets.ff import FFBlock, LayerType, Normalization
from amago.nets.kv_cache import KVCache
from amago.nets.recurrent import GRUTrajEncoder as GRUTrajEncoder
from amago.nets.recurrent import MambaTrajEncoder as MambaTrajEncoder
from amago.nets.recurrent import MinGRUTrajEncoder as MinGRUTrajEncoder
from amago.nets.registry import TRAJ_ENCODERS, named_traj_encoder
from amago.nets.tensor_cache import TensorCache
from amago.nets.traj_base import Dones as Dones
from amago.nets.traj_base import TrajEncoder as TrajEncoder
from amago.nets.traj_base import check_batch
from amago.nets.utils import activation_switch, autocast_dtype, check_dropout, check_positive

register_traj_encoder = TRAJ_ENCODERS.register
get_traj_encoder_cls = TRAJ_ENCODERS.find
list_registered_traj_encoders = TRAJ_ENCODERS.names


@named_traj_encoder("identity")
@gin.configurable
class IdentityTrajEncoder(TrajEncoder):
    """No model: the output of the timestep encoder as it is, without memory."""

    def __init__(self, tstep_dim: int, max_seq_len: int) -> None:
        super().__init__(tstep_dim, max_seq_len)

    @property
    def emb_dim(self) -> int:
        return self.tstep_dim

    def forward(
        self, seq: Tensor, time_idxs: Tensor, hidden_state: Any = None, log_dict: dict[str, Any] | None = None
    ) -> tuple[Tensor, Any]:
        self._check_input(seq, time_idxs)
        return seq, hidden_state


@named_traj_encoder("ff")
@gin.configurable
class FFTrajEncoder(TrajEncoder):
    """Residual feed-forward blocks on each timestep alone: no memory.

    Args:
        d_model: E.
        d_ff: inner width of a block; None means 4 x d_model.
        n_layers: number of blocks.
        dropout: probability, after the input layer and within blocks.
        activation: name, as of `amago.nets.utils.activation_switch`.
        norm: of each block's input, a method of `amago.nets.ff.Normalization`; None: none.
        out_norm: of the output, a method of it.
        layer_type: the linear layers of the blocks, as of `amago.nets.ff.FFBlock`.
    """

    def __init__(
        self,
        tstep_dim: int,
        max_seq_len: int,
        d_model: int = 256,
        d_ff: int | None = None,
        n_layers: int = 1,
        dropout: float = 0.0,
        activation: str = "leaky_relu",
        norm: str | None = None,
        out_norm: str = "layer",
        layer_type: LayerType = Linear,
    ) -> None:
        super().__init__(tstep_dim, max_seq_len)
        check_positive(d_model=d_model, n_layers=n_layers)
        check_dropout(dropout=dropout)
        d_ff = 4 * d_model if d_ff is None else d_ff
        self.traj_emb = Linear(tstep_dim, d_model)
        self.traj_blocks = nn.ModuleList(FFBlock(d_model, d_ff, dropout, activation, norm, layer_type) for _ in range(n_layers))
        self.traj_last = Linear(d_model, d_model)
        self.out_norm = Normalization(out_norm, d_model)
        self.dropout = nn.Dropout(dropout)
        self.activation = activation_switch(activation, inplace=True)
        self._emb_dim = d_model

    @property
    def emb_dim(self) -> int:
        return self._emb_dim

    def forward(
        self, seq: Tensor, time_idxs: Tensor, hidden_state: Any = None, log_dict: dict[str, Any] | None = None
    ) -> tuple[Tensor, Any]:
        self._check_input(seq, time_idxs)
        x = self.activation(self.traj_emb(seq))
        if self.training:
            x = self.dropout(x)
        for block in self.traj_blocks:
            x = block(x)
        return self.out_norm(self.traj_last(x)), hidden_state


@named_traj_encoder("transformer", sizes=lambda size: {"d_model": size, "d_ff": 4 * size})
@gin.configurable
class TformerTrajEncoder(TrajEncoder):
    """A causal transformer, see `amago.nets.transformer`.

    The hidden state is a `amago.nets.kv_cache.KVCache` of max_seq_len slots, or of fewer if its kind of attention needs fewer. In an
    episode longer than the cache, each layer attends to the last tokens that fit, and to the sinks of attention that has them. Losses
    are computed at the first max_seq_len of a sequence's max_seq_len + 1 tokens, so an actor sees no more than a trained token did. (The
    last token, which sees all, only gives the value from which the last target is bootstrapped.)

    Args:
        d_model: E, a multiple of ``n_heads``.
        n_heads: attention heads of each layer.
        d_ff: inner width of the feed-forward part of a layer.
        n_layers: number of layers.
        dropout_ff: probability of dropping a number of the feed-forward output.
        dropout_emb: the same of the embedded input.
        dropout_attn: the same of the attention weights.
        dropout_qkv: the same of queries, keys and values.
        activation: name, as of `amago.nets.utils.activation_switch`.
        norm: "layer", "rmsnorm" or "none".
        pos_emb: position embedding of the time index: "fixed", "learned" or "rope".
        causal: False lets tokens see later ones, but no padding; such a model cannot act step by step.
        sigma_reparam: reparametrise linear layers by their spectral norm.
        normformer_norms: use the extra norms of NormFormer.
        head_scaling: learn a scale for each head.
        attention_type: the attention kernel, a subclass of `amago.nets.transformer.SelfAttention`.

    Raises:
        ValueError: sizes that do not fit each other, or an unknown name.
    """

    def __init__(
        self,
        tstep_dim: int,
        max_seq_len: int,
        d_model: int = 256,
        n_heads: int = 8,
        d_ff: int = 1024,
        n_layers: int = 3,
        dropout_ff: float = 0.05,
        dropout_emb: float = 0.05,
        dropout_attn: float = 0.00,
        dropout_qkv: float = 0.00,
        activation: str = "leaky_relu",
        norm: str = "layer",
        pos_emb: str = "fixed",
        causal: bool = True,
        sigma_reparam: bool = True,
        normformer_norms: bool = True,
        head_scaling: bool = True,
        attention_type: type[transformer.SelfAttention] = transformer.ScaledDotProductAttention,
    ) -> None:
        super().__init__(tstep_dim, max_seq_len)
        check_positive(d_model=d_model, n_heads=n_heads, d_ff=d_ff, n_layers=n_layers)
        check_dropout(dropout_attn=dropout_attn)
        self.causal = causal

        def make_layer() -> transformer.TransformerLayer:
            attention_layer = transformer.AttentionLayer(
                _make_kernel(attention_type, causal, dropout_attn),
                d_model=d_model,
                n_heads=n_heads,
                dropout_qkv=dropout_qkv,
                head_scaling=head_scaling,
                sigma_reparam=sigma_reparam,
            )
            return transformer.TransformerLayer(
                attention_layer,
                d_model=d_model,
                d_ff=d_ff,
                dropout_ff=dropout_ff,
                activation=activation,
                norm=norm,
                sigma_reparam=sigma_reparam,
                normformer_norms=normformer_norms,
            )

        layers = [make_layer() for _ in range(n_layers)]
        self.tformer = transformer.Transformer(tstep_dim, d_model, layers, dropout_emb=dropout_emb, norm=norm, pos_emb=pos_emb)
        self._emb_dim = d_model
        self._kernel.cache_slots(max_seq_len)  # raises if the sinks do not fit

    @property
    def emb_dim(self) -> int:
        return self._emb_dim

    @property
    def _kernel(self) -> transformer.SelfAttention:
        kernel = self.tformer.layers[0].attention_layer.self_attention  # type: ignore[union-attr]
        assert isinstance(kernel, transformer.SelfAttention)
        return kernel

    def init_hidden_state(self, batch_size: int, device: torch.device | str, dtype: torch.dtype | None = None) -> KVCache:
        """An empty cache.

        Args:
            batch_size, device: as of `TrajEncoder.init_hidden_state`.
            dtype: of keys and values. None: autocast's dtype where that is on, else the weights'.

        Raises:
            ValueError: the model is not causal.
        """
        check_positive(batch_size=batch_size)
        if not self.causal:
            raise ValueError("causal=False: a model whose tokens see the future cannot act step by step")
        if dtype is None:
            dtype = autocast_dtype(torch.device(device)) or self.tformer.inp.weight.dtype
        tformer, kernel = self.tformer, self._kernel
        slots = kernel.cache_slots(self.max_seq_len)
        sizes = (len(tformer.layers), batch_size, tformer.n_heads, slots, tformer.head_dim)
        return KVCache(*sizes, device=device, dtype=dtype, sinks=kernel.sink_size)

    def reset_hidden_state(self, hidden_state: KVCache, dones: Dones) -> KVCache:
        hidden_state.reset(dones)
        return hidden_state

    def slice_hidden_state(self, hidden_state: KVCache, start: int, stop: int) -> KVCache:
        return hidden_state.slice(start, stop)

    def export_hidden_state(self, hidden_state: KVCache | TensorCache) -> dict[str, Tensor]:
        if isinstance(hidden_state, TensorCache):
            return hidden_state.tensors()
        return {"keys": hidden_state.keys, "values": hidden_state.values, "lengths": hidden_state.lengths}

    def import_hidden_state(self, tensors: dict[str, Tensor], dones: Tensor) -> TensorCache:
        lengths = torch.where(dones, 0, tensors["lengths"])
        return TensorCache(tensors["keys"], tensors["values"], lengths, self._kernel.sink_size)

    def forward(
        self,
        seq: Tensor,
        time_idxs: Tensor,
        hidden_state: Any = None,
        log_dict: dict[str, Any] | None = None,
        mask: Tensor | None = None,
    ) -> tuple[Tensor, Any]:
        self._check_input(seq, time_idxs)
        times = time_idxs.squeeze(-1)
        if hidden_state is None:  # padding comes last, where a causal model does not look
            return self.tformer(seq, times, real=None if self.causal or mask is None else mask.squeeze(-1)), None
        check_batch(seq.shape[0], hidden_state.batch_size)
        steps = [self.tformer(seq[:, i : i + 1], times[:, i : i + 1], hidden_state) for i in range(seq.shape[1])]
        return (steps[0] if len(steps) == 1 else torch.cat(steps, dim=1)), hidden_state


def _make_kernel(kernel: type[transformer.SelfAttention], causal: bool, dropout: float) -> transformer.SelfAttention:
    try:
        return kernel(causal=causal, dropout=dropout)
    except RuntimeError as err:  # gin's error for a default of gin.REQUIRED
        if "Required bindings" not in str(err):
            raise
        raise ValueError(
            f"attention_type={kernel.__name__} has settings without a default; bind them before it is used, "
            f"as in use_config({{'{kernel.__name__}.window_size': 128}}) ({err})"
        ) from err
