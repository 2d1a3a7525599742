"""Sequence models with a state of fixed size: GRU, minimal GRU, Mamba. The cost of a step does not depend on the length of an episode.

Shapes: B sequences or actors, L timesteps, D numbers of a timestep's input, E of its output.
"""

from __future__ import annotations

from typing import Any

import gin
import torch
from torch import Tensor, nn

from amago.config import fast_paths
from amago.nets.cpu.gru import GRUStep
from amago.nets.cpu.packed import Linear
from amago.nets.ff import FFBlock, Normalization
from amago.nets.gated_recurrence import GatedRecurrenceBlock, MinGRU, set_forgetting
from amago.nets.mamba import Mamba, MambaBlock, MambaState
from amago.nets.registry import named_traj_encoder
from amago.nets.traj_base import Dones, LayeredStateEncoder, TrajEncoder, check_batch
from amago.nets.utils import at_least_float32, check_positive


@named_traj_encoder("gru", "rnn", sizes=lambda size: {"d_hidden": size, "d_output": size})
@gin.configurable(module="amago.nets.traj_encoders")
class GRUTrajEncoder(LayeredStateEncoder):
    """A GRU (Cho et al. 2014, arXiv 1406.1078). The hidden state is a tensor (n_layers, B, d_hidden), written in place.

    A whole sequence, without a hidden state, returns the one after its last step.

    Args:
        d_hidden, n_layers: width and number of layers of the GRU.
        d_output: E, after a linear layer.
        norm: of the output: "layer", "rmsnorm" or "none".
        longest: at the start, the numbers of state forget over 1 to ``longest`` timesteps, see
            `amago.nets.gated_recurrence.set_forgetting`. None: PyTorch's initial values, with which they forget over two.
        shortcut: add a linear function of the timestep itself to the output, before its norm, so that what is seen now need not pass
            through the gates (Ni et al. 2022, arXiv 2110.05038, give it to actor and critics).
    """

    __module__ = "amago.nets.traj_encoders"  # where it is imported from, and what saved runs call it

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
        self.rnn = nn.GRU(tstep_dim, d_hidden, num_layers=n_layers, batch_first=True)
        if longest is not None:
            self._remember(longest)
        self.fast, self._fast_step = fast_paths(), GRUStep(self.rnn)
        self.out = Linear(d_hidden, d_output)
        self.shortcut = Linear(tstep_dim, d_output) if shortcut else None
        self.out_norm = Normalization(norm, d_output)
        self._emb_dim = d_output

    def _remember(self, longest: float) -> None:
        updates = slice(self.rnn.hidden_size, 2 * self.rnn.hidden_size)  # of the biases of reset, update and new gates
        for layer in range(self.rnn.num_layers):
            set_forgetting(getattr(self.rnn, f"bias_ih_l{layer}")[updates], longest)
            nn.init.zeros_(getattr(self.rnn, f"bias_hh_l{layer}")[updates])

    def train(self, mode: bool = True) -> GRUTrajEncoder:
        self._fast_step.clear()
        return super().train(mode)

    @property
    def emb_dim(self) -> int:
        return self._emb_dim

    def init_hidden_state(self, batch_size: int, device: torch.device | str) -> Tensor:
        check_positive(batch_size=batch_size)
        dtype = self.out.weight.dtype
        return torch.zeros((self.rnn.num_layers, batch_size, self.rnn.hidden_size), device=device, dtype=dtype)

    def forward(
        self, seq: Tensor, time_idxs: Tensor, hidden_state: Tensor | None = None, log_dict: dict[str, Any] | None = None
    ) -> tuple[Tensor, Tensor | None]:
        self._check_input(seq, time_idxs)
        if hidden_state is None:
            x, state = self.rnn(seq)
            hidden_state = state.detach()
        else:
            check_batch(seq.shape[0], hidden_state.shape[1])
            if self.fast and not self.training and self._fast_step.suits(seq, hidden_state):
                x = self._fast_step(self.rnn, seq[:, 0], hidden_state).unsqueeze(1)
            else:
                # a graph of this call must not contain the tensor that is written next
                x, new = self.rnn(seq, hidden_state.clone())
                hidden_state.detach().copy_(new.detach())
        out = self.out(x)
        return self.out_norm(out if self.shortcut is None else out + self.shortcut(seq)), hidden_state


@named_traj_encoder("mingru")
@gin.configurable(module="amago.nets.traj_encoders")
class MinGRUTrajEncoder(LayeredStateEncoder):
    """Linear recurrences with gates that depend on the input alone (`amago.nets.gated_recurrence.MinGRU`), each followed by a
    feed-forward block. Training computes every matrix product for the whole sequence at once, on any machine and without a compiled
    kernel; a step of acting costs the same whatever the length of the episode.

    The hidden state is a tensor (n_layers, B, d_hidden) in at least float32, written in place.

    Args:
        d_model: E.
        d_hidden: numbers of state in each layer; None: ``d_model``.
        d_ff: inner width of a feed-forward block; None: 2 x ``d_model``.
        n_layers: number of layers.
        dropout: probability, after the activations of the feed-forward blocks.
        activation: of the feed-forward blocks, a name as of `amago.nets.utils.activation_switch`.
        norm: before each part and of the output: "layer", "rmsnorm" or "none".
        longest: at the start, the numbers of state forget over 1 to ``longest`` timesteps; None: ``max_seq_len``.
    """

    __module__ = "amago.nets.traj_encoders"  # where it is imported from, and what saved runs call it

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

    @property
    def emb_dim(self) -> int:
        return self._emb_dim

    def init_hidden_state(self, batch_size: int, device: torch.device | str) -> Tensor:
        check_positive(batch_size=batch_size)
        exact = at_least_float32(self.inp.weight.new_empty(0)).dtype
        return torch.zeros((len(self.layers), batch_size, self.d_hidden), device=device, dtype=exact)

    def forward(
        self, seq: Tensor, time_idxs: Tensor, hidden_state: Tensor | None = None, log_dict: dict[str, Any] | None = None
    ) -> tuple[Tensor, Tensor | None]:
        self._check_input(seq, time_idxs)
        if hidden_state is not None:
            check_batch(seq.shape[0], hidden_state.shape[1])
        x = self.inp(seq).transpose(0, 1).contiguous()  # time first: each step of the recurrence is then one block of memory
        for i, layer in enumerate(self.layers):
            x = layer(x, None if hidden_state is None else hidden_state[i])
        return self.out_norm(x).transpose(0, 1), hidden_state


@named_traj_encoder("mamba")
@gin.configurable(module="amago.nets.traj_encoders")
class MambaTrajEncoder(TrajEncoder):
    """Selective state-space layers with residual connections (Gu & Dao 2023, arXiv 2312.00752).

    The hidden state is a `amago.nets.mamba.MambaState`. Its size and the cost of a step do not depend on the length of the episode.
    The scan is written in PyTorch; on a GPU, training uses that of the ``mamba_ssm`` package if it is installed.

    Args:
        d_model: E.
        d_state: numbers of state of each of the ``expand`` x d_model channels.
        d_conv: timesteps that the convolution before each scan sees.
        expand: channels for each number of ``d_model``.
        n_layers: number of layers.
        norm: before each layer and of the output: "layer", "rmsnorm" or "none".
        dt_min, dt_max, A_scale: set the time over which a new model remembers, see `amago.nets.mamba.Mamba`. The defaults are those
            of the paper, for text. To carry one bit over a hundred equal timesteps, ``0.5, 2.0, 3e-4`` takes fewer updates.
    """

    __module__ = "amago.nets.traj_encoders"  # where it is imported from, and what saved runs call it

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

    def export_hidden_state(self, hidden_state: MambaState) -> dict[str, Tensor]:
        return {"conv": hidden_state.conv, "ssm": hidden_state.ssm}

    def import_hidden_state(self, tensors: dict[str, Tensor], dones: Tensor) -> MambaState:
        return self.reset_hidden_state(MambaState(tensors["conv"].clone(), tensors["ssm"].clone()), dones)

    def forward(
        self, seq: Tensor, time_idxs: Tensor, hidden_state: MambaState | None = None, log_dict: dict[str, Any] | None = None
    ) -> tuple[Tensor, MambaState | None]:
        self._check_input(seq, time_idxs)
        if hidden_state is not None:
            check_batch(seq.shape[0], hidden_state.batch_size)
        x = self.inp(seq)
        for i, block in enumerate(self.mambas):
            x = block(x, None if hidden_state is None else hidden_state.layer(i))
        return self.out_norm(x), hidden_state
