"""Sequence models: causal maps from e_0..e_T to s_0..s_T, over whole sequences in training and one step at a time in acting.

A new one is a subclass of `TrajEncoder`; the decorator `register_traj_encoder` gives it a name on command lines.

Arguments that mean the same everywhere: ``d_model`` is E; ``n_layers`` the number of layers; ``dropout`` a probability;
``activation`` a name as of `amago.nets.utils.activation_switch`; ``norm`` a method of `amago.nets.ff.Normalization`, before each
layer and of the output. ``longest``: at the start, the numbers of state forget over 1 to ``longest`` timesteps, see
`amago.nets.gated_recurrence.set_forgetting`.

Shapes: B sequences or actors, L timesteps, D numbers of a timestep's input, E of its output.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar, Literal, TypeAlias

import gin
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from amago.nets import transformer
from amago.nets.ff import FFBlock, LayerType, Normalization
from amago.nets.gated_recurrence import GatedRecurrenceBlock, MinGRU, set_forgetting
from amago.nets.kv_cache import KVCache, TracedCache
from amago.nets.mamba import Mamba, MambaBlock, MambaState
from amago.nets.traj_base import TRAJ_ENCODERS, LayeredState
from amago.nets.traj_base import Dones as Dones
from amago.nets.traj_base import TrajEncoder as TrajEncoder
from amago.nets.utils import (
    CachedWeights,
    Linear,
    Log,
    WeightCache,
    activation_switch,
    autocast_dtype,
    caches_nothing,
    check_positive,
)

State: TypeAlias = Tensor | None
register_traj_encoder = TRAJ_ENCODERS.register
get_traj_encoder_cls = TRAJ_ENCODERS.find
list_registered_traj_encoders = TRAJ_ENCODERS.names


@register_traj_encoder("identity")
@gin.configurable
class IdentityTrajEncoder(TrajEncoder):
    """No model: the output of the timestep encoder as it is, without memory."""

    def __init__(self, tstep_dim: int, max_seq_len: int) -> None:
        super().__init__(tstep_dim, max_seq_len)
        self._emb_dim = tstep_dim

    def forward(
        self, seq: Tensor, time_idxs: Tensor, hidden_state: object = None, log_dict: Log = None
    ) -> tuple[Tensor, object]:
        self._check_input(seq, time_idxs)
        return seq, hidden_state


@register_traj_encoder("ff")
@gin.configurable
class FFTrajEncoder(TrajEncoder):
    """Residual feed-forward blocks on each timestep alone: no memory.

    Args:
        d_ff: inner width of a block; None means 4 x d_model.
        norm, out_norm: of each block's input, and of the output.
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
        d_ff = 4 * d_model if d_ff is None else d_ff
        self.traj_emb = Linear(tstep_dim, d_model)
        blocks = (FFBlock(d_model, d_ff, dropout, activation, norm, layer_type) for _ in range(n_layers))
        self.traj_blocks = nn.Sequential(*blocks)
        self.traj_last = Linear(d_model, d_model)
        self.out_norm = Normalization(out_norm, d_model)
        self.dropout = nn.Dropout(dropout)
        self.activation = activation_switch(activation, inplace=True)
        self._emb_dim = d_model

    def forward(
        self, seq: Tensor, time_idxs: Tensor, hidden_state: object = None, log_dict: Log = None
    ) -> tuple[Tensor, object]:
        self._check_input(seq, time_idxs)
        x = self.activation(self.traj_emb(seq))
        if self.training:
            x = self.dropout(x)
        return self.out_norm(self.traj_last(self.traj_blocks(x))), hidden_state


class RNNTrajEncoder(LayeredState, TrajEncoder):
    """Base of PyTorch's recurrent layers, each with a gate that keeps its state second among its gates.

    A whole sequence, without a hidden state, returns the one after its last step.

    Args:
        d_hidden: width of the recurrence.
        d_output: E, after a linear layer.
        norm: of the output alone.
        longest: None: PyTorch's initial values, with which the numbers of state forget over two timesteps.
        shortcut: add a linear function of the timestep itself to the output, before its norm, so that the present input need
            not pass through the gates (Ni et al. 2022, arXiv 2110.05038, give it to actor and critics).
    """

    layer: ClassVar[type[nn.GRU | nn.LSTM]]

    def __init__(
        self,
        tstep_dim: int,
        max_seq_len: int,
        d_hidden: int = 256,
        n_layers: int = 2,
        d_output: int = 256,
        norm: str = "layer",
        longest: float | None = None,
        shortcut: bool = False,
    ) -> None:
        super().__init__(tstep_dim, max_seq_len)
        check_positive(d_hidden=d_hidden, n_layers=n_layers, d_output=d_output)
        self.rnn = self.layer(input_size=tstep_dim, hidden_size=d_hidden, num_layers=n_layers, batch_first=True)
        if longest is not None:
            keeping = slice(d_hidden, 2 * d_hidden)  # of the biases: a GRU's update gates, an LSTM's forget gates
            for layer in range(n_layers):
                set_forgetting(self.rnn.get_parameter(f"bias_ih_l{layer}")[keeping], longest)
                nn.init.zeros_(self.rnn.get_parameter(f"bias_hh_l{layer}")[keeping])
        self.out = Linear(d_hidden, d_output)
        self.shortcut = Linear(tstep_dim, d_output) if shortcut else None
        self.out_norm = Normalization(norm, d_output)
        self._emb_dim = d_output

    @classmethod
    def size_arguments(cls, size: int) -> dict[str, int]:
        return {"d_hidden": size, "d_output": size}

    def init_hidden_state(self, batch_size: int, device: torch.device | str) -> Any:
        dtype = self.out.weight.dtype
        return torch.zeros((self.rnn.num_layers, batch_size, self.rnn.hidden_size), device=device, dtype=dtype)

    def forward(self, seq: Tensor, time_idxs: Tensor, hidden_state: Any = None, log_dict: Log = None) -> tuple[Tensor, Any]:
        self._check_input(seq, time_idxs, None if hidden_state is None else pytree.tree_leaves(hidden_state)[0].shape[1])
        if hidden_state is None:
            x, state = self.rnn(seq)
            hidden_state = pytree.tree_map(Tensor.detach, state)
        else:
            x = self._advanced(seq, hidden_state)
        out = self.out(x)
        return self.out_norm(out if self.shortcut is None else out + self.shortcut(seq)), hidden_state

    def _advanced(self, seq: Tensor, hidden_state: Any) -> Tensor:
        """The output of the recurrent layers for the steps after a state, which is overwritten with the new one."""
        # a graph of this call must not contain the tensor that is written next
        x, new = self.rnn(seq, pytree.tree_map(Tensor.clone, hidden_state))
        pytree.tree_map(lambda before, after: before.detach().copy_(after.detach()), hidden_state, new)
        return x  # type: ignore[no-any-return]


@register_traj_encoder("gru", "rnn")
@gin.configurable
class GRUTrajEncoder(CachedWeights, RNNTrajEncoder):
    """A GRU (Cho et al. 2014, arXiv 1406.1078). The hidden state is a tensor (n_layers, B, d_hidden), written in place. Its arguments are
    those of `RNNTrajEncoder`."""

    layer = nn.GRU

    def _advanced(self, seq: Tensor, hidden_state: Tensor) -> Tensor:
        if seq.shape[1] > 1 or not self._steps_by_packed_weights(seq):
            return super()._advanced(seq, hidden_state)
        x, keeps = seq[:, 0], 2 * self.rnn.hidden_size
        for layer, h in enumerate(hidden_state.unbind()):
            given, recalled = self._by_weight(x, f"ih_l{layer}"), self._by_weight(h, f"hh_l{layer}")
            reset, update = (given[:, :keeps] + recalled[:, :keeps]).sigmoid_().chunk(2, -1)
            new = torch.addcmul(given[:, keeps:], reset, recalled[:, keeps:]).tanh_()
            x = h.copy_(torch.lerp(new, h, update))
        return x.unsqueeze(1)

    def _steps_by_packed_weights(self, seq: Tensor) -> bool:
        """True where these save time over PyTorch's layer, which takes none (docs/notes/performance.md)."""
        if self.training or caches_nothing():  # also no condition on a number of rows that is a variable
            return False
        return len(seq) >= 16 and seq.is_cpu and seq.dtype == torch.float32 and autocast_dtype(seq.device) is None

    def _by_weight(self, x: Tensor, name: str) -> Tensor:
        weight, cache = self.rnn.get_parameter(f"weight_{name}"), vars(self).get(f"_{name}")
        if cache is None:
            cache = vars(self)[f"_{name}"] = WeightCache()
        return cache.linear(x, (weight,), lambda: weight, getattr(self.rnn, f"bias_{name}"))  # type: ignore[no-any-return]


# programs written for the original system register an LSTM of their own
@register_traj_encoder("lstm", replaceable=True)
@gin.configurable
class LSTMTrajEncoder(RNNTrajEncoder):
    """An LSTM (Hochreiter & Schmidhuber 1997; forget gates: Gers et al. 2000). The hidden state is (h, c), each (n_layers, B, d_hidden),
    written in place. Its arguments are those of `RNNTrajEncoder`."""

    layer = nn.LSTM

    def init_hidden_state(self, batch_size: int, device: torch.device | str) -> tuple[Tensor, Tensor]:
        h = super().init_hidden_state(batch_size, device)
        return h, torch.zeros_like(h)


@register_traj_encoder("mingru")
@gin.configurable
class MinGRUTrajEncoder(LayeredState, TrajEncoder):
    """Linear recurrences with gates that depend on the input alone (`amago.nets.gated_recurrence.MinGRU`), each followed by a
    feed-forward block. Training computes every matrix product for the whole sequence at once, on any machine and without a
    compiled kernel; a step of acting costs the same whatever the length of the episode.

    The hidden state is a tensor (n_layers, B, d_hidden) in at least float32, written in place.

    Args:
        d_hidden: numbers of state in each layer; None: ``d_model``.
        d_ff: inner width of a feed-forward block; None: 2 x ``d_model``.
        longest: None: ``max_seq_len``.
    """

    def __init__(
        self,
        tstep_dim: int,
        max_seq_len: int,
        d_model: int = 256,
        d_hidden: int | None = None,
        d_ff: int | None = None,
        n_layers: int = 2,
        dropout: float = 0.0,
        activation: str = "leaky_relu",
        norm: str = "layer",
        longest: float | None = None,
    ) -> None:
        super().__init__(tstep_dim, max_seq_len)
        check_positive(d_model=d_model, n_layers=n_layers)
        self.d_hidden = d_model if d_hidden is None else d_hidden
        horizon = float(max_seq_len) if longest is None else longest
        self.inp = Linear(tstep_dim, d_model)
        self.layers = nn.ModuleList(
            GatedRecurrenceBlock(
                MinGRU(d_model, self.d_hidden, horizon),
                FFBlock(d_model, 2 * d_model if d_ff is None else d_ff, dropout, activation, norm),
                Normalization(norm, d_model),
            )
            for _ in range(n_layers)
        )
        self.out_norm = Normalization(norm, d_model)
        self._emb_dim = d_model

    def init_hidden_state(self, batch_size: int, device: torch.device | str) -> Tensor:
        exact = torch.promote_types(self.inp.weight.dtype, torch.float32)
        return torch.zeros((len(self.layers), batch_size, self.d_hidden), device=device, dtype=exact)

    def forward(self, seq: Tensor, time_idxs: Tensor, hidden_state: State = None, log_dict: Log = None) -> tuple[Tensor, State]:
        self._check_input(seq, time_idxs, None if hidden_state is None else hidden_state.shape[1])
        x = self.inp(seq).transpose(0, 1).contiguous()  # time first: each step of the recurrence is then one block of memory
        for i, layer in enumerate(self.layers):
            x = layer(x, None if hidden_state is None else hidden_state[i])
        return self.out_norm(x).transpose(0, 1), hidden_state


@register_traj_encoder("mamba")
@gin.configurable
class MambaTrajEncoder(LayeredState, TrajEncoder):
    """Selective state-space layers with residual connections (Gu & Dao 2023, arXiv 2312.00752).

    The hidden state is a `amago.nets.mamba.MambaState`. Its size and the cost of a step do not depend on the length of the
    episode. The scan is written in PyTorch; on a GPU, training uses the scan of the ``mamba_ssm`` package if it is installed.

    Args:
        d_state, d_conv, expand: sizes of each layer, see `amago.nets.mamba.Mamba`.
        dt_min, dt_max, A_scale: set the time over which a new model remembers, see there. The defaults are the paper's, for
            text. To carry one bit over a hundred equal timesteps, ``0.5, 2.0, 3e-4`` takes fewer updates.
    """

    def __init__(
        self,
        tstep_dim: int,
        max_seq_len: int,
        d_model: int = 256,
        d_state: int = 16,
        d_conv: int = 4,
        expand: int = 2,
        n_layers: int = 3,
        norm: str = "layer",
        dt_min: float = 1e-3,
        dt_max: float = 0.1,
        A_scale: float = 1.0,
    ) -> None:
        super().__init__(tstep_dim, max_seq_len)
        check_positive(n_layers=n_layers)
        self.inp = Linear(tstep_dim, d_model)
        self.mambas = nn.ModuleList(
            MambaBlock(Mamba(d_model, d_state, d_conv, expand, dt_min, dt_max, A_scale), Normalization(norm, d_model))
            for _ in range(n_layers)
        )
        self.out_norm = Normalization(norm, d_model)
        self._state_shapes = (d_conv - 1, expand * d_model), (d_state, expand * d_model)
        self._emb_dim = d_model

    def init_hidden_state(self, batch_size: int, device: torch.device | str) -> MambaState:
        weight = self.inp.weight
        conv, ssm = ((len(self.mambas), batch_size, *shape) for shape in self._state_shapes)
        exact = torch.promote_types(weight.dtype, torch.float32)
        return MambaState(torch.zeros(conv, device=device, dtype=weight.dtype), torch.zeros(ssm, device=device, dtype=exact))

    def forward(
        self, seq: Tensor, time_idxs: Tensor, hidden_state: MambaState | None = None, log_dict: Log = None
    ) -> tuple[Tensor, Any]:
        self._check_input(seq, time_idxs, None if hidden_state is None else hidden_state.ssm.shape[1])
        x = self.inp(seq)
        for i, block in enumerate(self.mambas):
            x = block(x, None if hidden_state is None else (hidden_state.conv[i], hidden_state.ssm[i]))
        return self.out_norm(x), hidden_state


@register_traj_encoder("transformer")
@gin.configurable
class TformerTrajEncoder(TrajEncoder):
    """A causal transformer, see `amago.nets.transformer`.

    The hidden state is a `amago.nets.kv_cache.KVCache` of max_seq_len slots, or of fewer if its kind of attention needs fewer.
    In an episode longer than the cache, each layer attends to the last tokens that fit, and to the sinks of attention that has
    them. Losses are computed at the first max_seq_len of a sequence's max_seq_len + 1 tokens, so an actor attends to no more
    than a trained token did. (The last token, which attends to all, only gives the value from which the last target is
    bootstrapped.)

    Args:
        d_model: E, a multiple of ``n_heads``.
        d_ff: inner width of the feed-forward part of a layer.
        dropout_ff, dropout_emb, dropout_attn, dropout_qkv: probabilities of dropping a number of the feed-forward output, the
            embedded input, the attention weights, and the queries, keys and values.
        pos_emb: position embedding of the time index: "fixed", "learned", "rope" or "none".
        causal: False lets tokens attend to later ones, but not to padding; such a model cannot act step by step.
        sigma_reparam: reparametrise linear layers by their spectral norm.
        normformer_norms: use the extra norms of NormFormer.
        head_scaling: learn a scale for each head.
        attention_type: the attention kernel, a subclass of `amago.nets.transformer.SelfAttention`.
        qk_norm: t, or one for each head: the score of a query and a key is t times the cosine of their angle, so that attention
            can single out a timestep from the start. "length": t is 2 ln(max_seq_len + 1), so it changes with max_seq_len.
            None: the score is their product over the root of their width.

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
        qk_norm: float | Sequence[float] | Literal["length"] | None = None,
    ) -> None:
        super().__init__(tstep_dim, max_seq_len)
        self.causal = causal
        t = 2.0 * math.log(max_seq_len + 1) if qk_norm == "length" else qk_norm

        def make_layer() -> transformer.TransformerLayer:
            kernel = attention_type(causal=causal, dropout=dropout_attn)
            attention = transformer.AttentionLayer(kernel, d_model, n_heads, dropout_qkv, head_scaling, sigma_reparam, t)
            return transformer.TransformerLayer(
                attention, d_model, d_ff, dropout_ff, activation, norm, sigma_reparam, normformer_norms
            )

        layers = [make_layer() for _ in range(n_layers)]
        self.tformer = transformer.Transformer(tstep_dim, d_model, layers, dropout_emb=dropout_emb, norm=norm, pos_emb=pos_emb)
        self.d_model, self.n_layers, self.n_heads, self.head_dim = d_model, n_layers, n_heads, self.tformer.head_dim
        self._emb_dim, self.attention_type = d_model, attention_type
        self._kernel().cache_slots(max_seq_len)  # raises if the sinks do not fit

    @classmethod
    def size_arguments(cls, size: int) -> dict[str, int]:
        return {"d_model": size, "d_ff": 4 * size}

    def _kernel(self) -> transformer.SelfAttention:
        return self.tformer.layers[0].attention_layer.self_attention  # type: ignore[union-attr,return-value]

    def attention(self, seq: Tensor, time_idxs: Tensor, rows: Tensor) -> Tensor:
        """(layers, B, heads, Q, L): how much the steps number ``rows`` (Q,) of whole sequences attend to each step."""
        found: list[Tensor] = []

        def keep(kernel: nn.Module, args: tuple[Tensor, ...]) -> None:
            assert isinstance(kernel, transformer.SelfAttention)
            found.append(kernel.weights(args[0][:, :, rows], args[1], rows=rows))

        hooks = [layer.attention_layer.self_attention.register_forward_pre_hook(keep) for layer in self.tformer.layers]  # type: ignore[union-attr]
        try:
            self(seq, time_idxs)
        finally:
            for hook in hooks:
                hook.remove()
        return torch.stack(found)

    def init_hidden_state(self, batch_size: int, device: torch.device | str, dtype: torch.dtype | None = None) -> KVCache:
        """An empty cache, whose ``dtype`` is None: autocast's where that is on, else the weights'.

        Raises:
            ValueError: the model is not causal.
        """
        if not self.causal:
            raise ValueError("causal=False: a model whose tokens see the future cannot act step by step")
        if dtype is None:
            dtype = autocast_dtype(torch.device(device)) or self.tformer.inp.weight.dtype
        kernel = self._kernel()
        sizes = (self.n_layers, batch_size, self.n_heads, kernel.cache_slots(self.max_seq_len), self.head_dim)
        return transformer.TformerHiddenState.empty(*sizes, device=device, dtype=dtype, sinks=kernel.sink_size)

    def reset_hidden_state(self, hidden_state: KVCache, dones: Dones) -> KVCache:
        hidden_state.reset(dones)
        return hidden_state

    def slice_hidden_state(self, hidden_state: KVCache, start: int, stop: int) -> KVCache:
        return hidden_state.slice(start, stop)

    def export_hidden_state(self, hidden_state: KVCache) -> dict[str, Tensor]:
        return hidden_state.tensors()

    def import_hidden_state(self, tensors: dict[str, Tensor], dones: Tensor) -> KVCache:
        lengths = torch.where(dones, 0, tensors["lengths"])
        return TracedCache(tensors | {"lengths": lengths}, self._kernel().sink_size)

    def forward(
        self,
        seq: Tensor,
        time_idxs: Tensor,
        hidden_state: KVCache | None = None,
        log_dict: Log = None,
        mask: Tensor | None = None,
    ) -> tuple[Tensor, Any]:
        self._check_input(seq, time_idxs, None if hidden_state is None else hidden_state.batch_size)
        times = time_idxs.squeeze(-1)
        if hidden_state is None:  # padding comes last, where a causal model does not look
            return self.tformer(seq, times, real=None if self.causal or mask is None else mask.squeeze(-1))
        steps = [self.tformer(seq[:, i : i + 1], times[:, i : i + 1], hidden_state)[0] for i in range(seq.shape[1])]
        return (steps[0] if len(steps) == 1 else torch.cat(steps, dim=1)), hidden_state
