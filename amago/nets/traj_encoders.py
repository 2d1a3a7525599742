"""Sequence models: e_0..e_T -> s_0..s_T, causally; whole sequences to train on, one step at a time to act."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import gin
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from amago.nets import transformer
from amago.nets.cpu.packed import Linear, linear, pack
from amago.nets.cpu.weight_cache import WeightCache
from amago.nets.ff import FFBlock, Normalization
from amago.nets.kv_cache import KVCache
from amago.nets.mamba import Mamba, MambaBlock, MambaState
from amago.nets.utils import activation_switch, at_least_float32, autocast_dtype, check_dropout, check_positive

Dones = NDArray[np.bool_] | Tensor


class TrajEncoder(nn.Module, ABC):
    """Base of all sequence models. A subclass writes `emb_dim` and `forward`, and, if it remembers anything, the methods about
    hidden states; those of this class are for models without memory.

    Args:
        tstep_dim: D, width of the input.
        max_seq_len: length of the context, in transitions (training sequences have one more observation).
    """

    def __init__(self, tstep_dim: int, max_seq_len: int) -> None:
        super().__init__()
        check_positive(tstep_dim=tstep_dim, max_seq_len=max_seq_len)
        self.tstep_dim = tstep_dim
        self.max_seq_len = max_seq_len

    @property
    @abstractmethod
    def emb_dim(self) -> int:
        """E, width of the output."""

    @abstractmethod
    def forward(
        self, seq: Tensor, time_idxs: Tensor, hidden_state: Any = None, log_dict: dict[str, Any] | None = None
    ) -> tuple[Tensor, Any]:
        """Map a sequence.

        Args:
            seq: (B, L, D).
            time_idxs: (B, L, 1) int64, index of each step in its episode.
            hidden_state: None: ``seq`` is whole, to be trained on. Otherwise what `init_hidden_state` or the last call gave:
                ``seq`` continues from there. Hidden states are for acting, no gradient flows through them, and they may be
                updated in place.
            log_dict: to put metrics in, if given.

        Returns:
            (B, L, E), and the next hidden state.
        """

    def init_hidden_state(self, batch_size: int, device: torch.device | str) -> Any:
        """The state of ``batch_size`` actors that have seen nothing; None where there is no memory."""
        return None

    def reset_hidden_state(self, hidden_state: Any, dones: Dones) -> Any:
        """Make those rows new where ``dones`` (B,) is True; works in place where it can. Other rows stay as they are."""
        return hidden_state

    def slice_hidden_state(self, hidden_state: Any, start: int, stop: int) -> Any:
        """Rows ``start`` to ``stop`` - 1, sharing storage: acting with either is seen by both."""
        if hidden_state is None:
            return None
        raise NotImplementedError(f"{type(self).__name__} does not say how to slice its hidden state")

    def can_slice_hidden_state(self, hidden_state: Any) -> bool:
        """Whether `slice_hidden_state` is implemented; called once, at the start of acting. The default tries the first row."""
        try:
            self.slice_hidden_state(hidden_state, 0, 1)
        except NotImplementedError:
            return False
        return True

    def _check_input(self, seq: Tensor, time_idxs: Tensor) -> None:
        B, L = seq.shape[:2]
        if seq.ndim != 3 or seq.shape[-1] != self.tstep_dim:
            raise ValueError(f"seq must be (batch, length, {self.tstep_dim}), got shape {tuple(seq.shape)}")
        if time_idxs.shape != (B, L, 1):
            raise ValueError(f"time_idxs must be ({B}, {L}, 1) for this seq, got shape {tuple(time_idxs.shape)}")


@gin.configurable
class FFTrajEncoder(TrajEncoder):
    """Residual feed-forward blocks on each timestep alone: no memory.

    Args:
        d_model: width; d_ff: inner width of a block, 4 x d_model if None.
        n_layers: number of blocks.
        dropout, activation, norm: as named.
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
        norm: str = "layer",
    ) -> None:
        super().__init__(tstep_dim, max_seq_len)
        check_positive(d_model=d_model, n_layers=n_layers)
        check_dropout(dropout=dropout)
        d_ff = 4 * d_model if d_ff is None else d_ff
        self.traj_emb = Linear(tstep_dim, d_model)
        self.traj_blocks = nn.ModuleList(FFBlock(d_model, d_ff, dropout, activation) for _ in range(n_layers))
        self.traj_last = Linear(d_model, d_model)
        self.out_norm = Normalization(norm, d_model)
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


@gin.configurable
class GRUTrajEncoder(TrajEncoder):
    """A GRU. Its hidden state is a tensor (n_layers, B, d_hidden).

    Args:
        d_hidden, n_layers: of the GRU.
        d_output: width after a linear layer.
        norm: of the output, by name.
    """

    def __init__(
        self,
        tstep_dim: int,
        max_seq_len: int,
        d_hidden: int = 256,
        n_layers: int = 2,
        d_output: int = 256,
        norm: str = "layer",
    ) -> None:
        super().__init__(tstep_dim, max_seq_len)
        check_positive(d_hidden=d_hidden, n_layers=n_layers, d_output=d_output)
        self.rnn = nn.GRU(tstep_dim, d_hidden, num_layers=n_layers, batch_first=True)
        self.out = Linear(d_hidden, d_output)
        self.out_norm = Normalization(norm, d_output)
        self._emb_dim = d_output
        self._packed = {name: WeightCache() for name, p in self.rnn.named_parameters() if p.ndim == 2}

    def train(self, mode: bool = True) -> GRUTrajEncoder:
        for cache in self._packed.values():
            cache.clear()
        return super().train(mode)

    @property
    def emb_dim(self) -> int:
        return self._emb_dim

    def init_hidden_state(self, batch_size: int, device: torch.device | str) -> Tensor:
        check_positive(batch_size=batch_size)
        dtype = self.out.weight.dtype
        return torch.zeros((self.rnn.num_layers, batch_size, self.rnn.hidden_size), device=device, dtype=dtype)

    def reset_hidden_state(self, hidden_state: Tensor, dones: Dones) -> Tensor:
        rows = torch.as_tensor(dones, device=hidden_state.device).to(torch.bool)
        if rows.shape != hidden_state.shape[1:2]:
            raise ValueError(f"dones must have shape ({hidden_state.shape[1]},), got {tuple(rows.shape)}")
        return hidden_state.masked_fill_(rows[None, :, None], 0.0)

    def slice_hidden_state(self, hidden_state: Tensor, start: int, stop: int) -> Tensor:
        if not 0 <= start < stop <= hidden_state.shape[1]:
            raise ValueError(f"rows {start}:{stop} are not within a batch of {hidden_state.shape[1]}")
        return hidden_state[:, start:stop]

    def forward(
        self, seq: Tensor, time_idxs: Tensor, hidden_state: Tensor | None = None, log_dict: dict[str, Any] | None = None
    ) -> tuple[Tensor, Tensor | None]:
        self._check_input(seq, time_idxs)
        if hidden_state is None:
            x, _ = self.rnn(seq)
        else:
            _check_batch(seq.shape[0], hidden_state.shape[1])
            if self._steps_alone(seq, hidden_state):
                x = self._step(seq[:, 0], hidden_state).unsqueeze(1)
            else:
                x, new = self.rnn(seq, hidden_state.clone())  # the graph must not see the write below
                hidden_state.detach().copy_(new.detach())
        return self.out_norm(self.out(x)), hidden_state

    def _steps_alone(self, seq: Tensor, hidden_state: Tensor) -> bool:
        """Whether this is a step of a policy on a CPU, which `_step` can do."""
        acts = seq.shape[1] == 1 and not self.training and not torch.is_grad_enabled() and not torch.compiler.is_compiling()
        return acts and seq.is_cpu and seq.dtype == hidden_state.dtype == torch.float32 and autocast_dtype(seq.device) is None

    def _step(self, x: Tensor, hidden_state: Tensor) -> Tensor:
        """One step of every layer, (B, D) -> (B, d_hidden), with packed weights, which `torch.nn.GRU` does not take (3 layers for 16
        actors, one core: 0.66 ms instead of 1.0)."""
        H, rnn = self.rnn.hidden_size, self.rnn
        for i, h in enumerate(hidden_state.unbind(0)):
            inner = self._product(f"weight_ih_l{i}", x, getattr(rnn, f"bias_ih_l{i}"))
            outer = self._product(f"weight_hh_l{i}", h, getattr(rnn, f"bias_hh_l{i}"))
            gates = (inner[:, : 2 * H] + outer[:, : 2 * H]).sigmoid_()  # r, z
            new = torch.addcmul(inner[:, 2 * H :], gates[:, :H], outer[:, 2 * H :]).tanh_()
            x = torch.lerp(new, h, gates[:, H:])
            h.copy_(x)
        return x

    def _product(self, name: str, x: Tensor, bias: Tensor) -> Tensor:
        weight: Tensor = getattr(self.rnn, name)
        return linear(x, self._packed[name].get((weight,), lambda: pack(weight)), bias)


@gin.configurable
class MambaTrajEncoder(TrajEncoder):
    """Selective state-space layers (Gu & Dao 2023, arXiv 2312.00752). The hidden state is a `amago.nets.mamba.MambaState`:
    constant in size and work, however long the episode.

    Plain PyTorch; on a GPU, the scan of the ``mamba_ssm`` package where that is installed.

    Args:
        d_model: width.
        d_state: numbers of state a channel; ``expand`` x d_model channels.
        d_conv: timesteps that the convolution in front of each scan sees.
        n_layers: number of layers, each with a residual connection.
        norm: in front of each layer and of the output, by name.
        dt_min, dt_max, A_scale: how long states remember at the start of training, see `amago.nets.mamba.Mamba`. The defaults
            are the paper's, made for text. To carry one bit over a hundred equal steps, ``0.5, 2.0, 3e-4`` learns several
            times sooner.
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
        self.inp = nn.Linear(tstep_dim, d_model)
        self.mambas = nn.ModuleList(
            MambaBlock(Mamba(d_model, d_state, d_conv, expand, dt_min, dt_max, A_scale), Normalization(norm, d_model))
            for _ in range(n_layers)
        )
        self.out_norm = Normalization(norm, d_model)
        self._state_shapes = (d_conv - 1, expand * d_model), (d_state, expand * d_model)
        self._emb_dim = d_model

    @property
    def emb_dim(self) -> int:
        return self._emb_dim

    def init_hidden_state(self, batch_size: int, device: torch.device | str) -> MambaState:
        check_positive(batch_size=batch_size)
        weight = self.inp.weight
        conv, ssm = ((len(self.mambas), batch_size, *shape) for shape in self._state_shapes)
        exact = at_least_float32(weight.new_empty(0)).dtype
        return MambaState(torch.zeros(conv, device=device, dtype=weight.dtype), torch.zeros(ssm, device=device, dtype=exact))

    def reset_hidden_state(self, hidden_state: MambaState, dones: Dones) -> MambaState:
        hidden_state.reset(dones)
        return hidden_state

    def slice_hidden_state(self, hidden_state: MambaState, start: int, stop: int) -> MambaState:
        return hidden_state.slice(start, stop)

    def forward(
        self, seq: Tensor, time_idxs: Tensor, hidden_state: MambaState | None = None, log_dict: dict[str, Any] | None = None
    ) -> tuple[Tensor, MambaState | None]:
        self._check_input(seq, time_idxs)
        if hidden_state is not None:
            _check_batch(seq.shape[0], hidden_state.batch_size)
        x = self.inp(seq)
        for i, block in enumerate(self.mambas):
            x = block(x, None if hidden_state is None else hidden_state.layer(i))
        return self.out_norm(x), hidden_state


@gin.configurable
class TformerTrajEncoder(TrajEncoder):
    """A causal transformer. Its hidden state is a `amago.nets.kv_cache.KVCache` of max_seq_len + 1 slots, or of as few as its
    kind of attention needs.

    Once an episode is longer than the cache, each layer attends to the last max_seq_len + 1 tokens (attention with sinks: to
    these, of which the first ones of the episode are some).

    Args:
        d_model, n_heads, d_ff, n_layers: sizes; d_model divides by n_heads.
        dropout_ff, dropout_emb, dropout_attn, dropout_qkv: on the feed-forward output, the embedded input, the
            attention weights, and queries, keys and values.
        activation, norm: by name.
        pos_emb: "fixed", "learned" or "rope", of the time index.
        causal: False lets tokens see the future; such a model cannot act step by step.
        sigma_reparam: reparametrise linear layers by their spectral norm.
        normformer_norms: the extra norms of NormFormer.
        head_scaling: a learned scale for each head.
        attention_type: the kernel, a `amago.nets.transformer.SelfAttention`.
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
        self._kernel.cache_slots(max_seq_len + 1)  # refuses what does not fit

    @property
    def emb_dim(self) -> int:
        return self._emb_dim

    @property
    def _kernel(self) -> transformer.SelfAttention:
        kernel = self.tformer.layers[0].attention_layer.self_attention  # type: ignore[union-attr]
        assert isinstance(kernel, transformer.SelfAttention)
        return kernel

    def init_hidden_state(self, batch_size: int, device: torch.device | str, dtype: torch.dtype | None = None) -> KVCache:
        """An empty cache. ``dtype`` None: what the model computes in (autocast's dtype where that is on, else the weights')."""
        check_positive(batch_size=batch_size)
        if not self.causal:
            raise ValueError("causal=False: a model whose tokens see the future cannot act step by step")
        if dtype is None:
            dtype = autocast_dtype(torch.device(device)) or self.tformer.inp.weight.dtype
        tformer, kernel = self.tformer, self._kernel
        slots = kernel.cache_slots(self.max_seq_len + 1)
        sizes = (len(tformer.layers), batch_size, tformer.n_heads, slots, tformer.head_dim)
        return KVCache(*sizes, device=device, dtype=dtype, sinks=kernel.sink_size)

    def reset_hidden_state(self, hidden_state: KVCache, dones: Dones) -> KVCache:
        hidden_state.reset(dones)
        return hidden_state

    def slice_hidden_state(self, hidden_state: KVCache, start: int, stop: int) -> KVCache:
        return hidden_state.slice(start, stop)

    def forward(
        self, seq: Tensor, time_idxs: Tensor, hidden_state: KVCache | None = None, log_dict: dict[str, Any] | None = None
    ) -> tuple[Tensor, KVCache | None]:
        self._check_input(seq, time_idxs)
        times = time_idxs.squeeze(-1)
        if hidden_state is None:
            return self.tformer(seq, times), None
        _check_batch(seq.shape[0], hidden_state.batch_size)
        steps = [self.tformer(seq[:, i : i + 1], times[:, i : i + 1], hidden_state) for i in range(seq.shape[1])]
        return (steps[0] if len(steps) == 1 else torch.cat(steps, dim=1)), hidden_state


def _make_kernel(kernel: type[transformer.SelfAttention], causal: bool, dropout: float) -> transformer.SelfAttention:
    try:
        return kernel(causal=causal, dropout=dropout)
    except RuntimeError as err:  # what gin raises for a default of gin.REQUIRED
        if "Required bindings" not in str(err):
            raise
        raise ValueError(
            f"attention_type={kernel.__name__} has settings without a default; bind them before it is used, "
            f"as in use_config({{'{kernel.__name__}.window_size': 128}}) ({err})"
        ) from err


def _check_batch(batch: int, rows: int) -> None:
    if batch != rows:
        raise ValueError(f"hidden_state has {rows} rows, but seq has a batch of {batch}")
