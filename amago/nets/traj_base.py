"""The base classes of sequence models, and their names on command lines.

Shapes: B sequences or actors, L timesteps, D numbers of a timestep's input, E of its output.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import astuple
from typing import Any, ClassVar, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from amago.nets.utils import Log, check_positive, has_argument
from amago.registry import Registry

Dones = NDArray[np.bool_] | Tensor
S = TypeVar("S")


class TrajEncoder(nn.Module, ABC):
    """Base of all sequence models.

    A subclass defines `forward`, and `emb_dim` or its value ``_emb_dim``. A model with memory also defines `init_hidden_state`
    and `reset_hidden_state`; `slice_hidden_state`, `export_hidden_state` and `import_hidden_state` are optional.

    A model that is not causal adds an argument ``mask`` to `forward`: (B, L, 1) bool, False at padding, which comes after the
    real steps; or None where there is no padding.

    Args:
        tstep_dim: D.
        max_seq_len: length of the context in transitions; training sequences have one observation more.

    Attributes:
        takes_mask: `forward` has an argument ``mask``, by its signature when the class is defined.

    Raises:
        ValueError: an argument is below 1.
    """

    takes_mask: ClassVar[bool] = False
    _emb_dim: int

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        cls.takes_mask = has_argument(cls.forward, "mask")

    def __init__(self, tstep_dim: int, max_seq_len: int) -> None:
        super().__init__()
        check_positive(tstep_dim=tstep_dim, max_seq_len=max_seq_len)
        self.tstep_dim, self.max_seq_len = tstep_dim, max_seq_len

    @property
    def emb_dim(self) -> int:
        """E."""
        return self._emb_dim

    @classmethod
    def size_arguments(cls, size: int) -> dict[str, int]:
        """The arguments that make a model ``size`` wide (``--memory_size`` on command lines)."""
        return {"d_model": size}

    @abstractmethod
    def forward(self, seq: Tensor, time_idxs: Tensor, hidden_state: Any = None, log_dict: Log = None) -> tuple[Tensor, Any]:
        """Map a sequence.

        Args:
            seq: (B, L, D).
            time_idxs: (B, L, 1) int64, index of each step in its episode.
            hidden_state: None for whole sequences, as in training. Otherwise the result of `init_hidden_state` or of the
                previous call, and ``seq`` continues from there. Hidden states are for acting: no gradient flows through them,
                and they may be updated in place.
            log_dict: takes metrics by name, if given.

        Returns:
            (B, L, E), and the next hidden state. Both ways of calling give the same output.

        Raises:
            ValueError: the shapes do not fit each other or the model.
        """

    def init_hidden_state(self, batch_size: int, device: torch.device | str) -> Any:
        """The hidden state of ``batch_size`` actors at the start of their episodes; None for a model without memory."""
        return None

    def reset_hidden_state(self, hidden_state: Any, dones: Dones) -> Any:
        """The hidden state with the rows cleared where ``dones`` (B,) is True; other rows stay as they are. May work in
        place."""
        return hidden_state

    def slice_hidden_state(self, hidden_state: Any, start: int, stop: int) -> Any:
        """Rows ``start`` to ``stop`` - 1 of a hidden state, sharing its storage.

        Optional. Groups of actors whose hidden states are slices of a common one can act together in one call.

        Raises:
            NotImplementedError: the model does not define this method. Its groups of actors then act one after another.
        """
        if hidden_state is None:
            return None
        raise NotImplementedError(f"{type(self).__name__} does not say how to slice its hidden state")

    def can_slice_hidden_state(self, hidden_state: Any) -> bool:
        """True if `slice_hidden_state` is implemented; called once, at the start of acting. The default tries the first row."""
        try:
            self.slice_hidden_state(hidden_state, 0, 1)
        except NotImplementedError:
            return False
        return True

    def export_hidden_state(self, hidden_state: Any) -> dict[str, Tensor]:
        """The hidden state as named tensors, for `amago.policy.export`. Each has one dimension of size B.

        Optional. The methods here suit a hidden state that is None, a tensor, or tuples, named tuples, lists and dicts of
        these, in any depth, such as the (h, c) of an LSTM. Any other model that is to be exported overrides this method and
        `import_hidden_state`.

        Returns:
            {"hidden": tensor}; of several tensors "hidden.0", "hidden.1", or "hidden.KEY". Empty for None.

        Raises:
            ValueError: the hidden state holds something else.
        """
        named = {name: part for name, part in _named(hidden_state)[0] if part is not None}
        for name, part in named.items():
            if not isinstance(part, Tensor):
                raise ValueError(
                    f"{type(self).__name__}: {name.replace('hidden', 'hidden_state', 1)} is a {type(part).__name__}, which is none of None, tensors, tuples, lists and dicts; to "
                    "export it, override export_hidden_state and import_hidden_state"
                )
        return named

    def import_hidden_state(self, tensors: dict[str, Tensor], dones: Tensor) -> Any:
        """The inverse of `export_hidden_state`, traceable by ``torch.export``. `forward` takes a step from its result.

        Args:
            tensors: as `export_hidden_state` names them. They must not be changed: copy what is written in place.
            dones: (B,) bool, True in rows whose memory is cleared first.
        """
        if not tensors:
            return None
        parts, structure = _named(self.init_hidden_state(1, dones.device))
        copies = [None if part is None else tensors[name].clone() for name, part in parts]
        return self.reset_hidden_state(pytree.tree_unflatten(copies, structure), dones)

    def _check_input(self, seq: Tensor, time_idxs: Tensor, rows: int | None = None) -> None:
        """Raise ValueError for shapes that do not fit the model, each other, or the ``rows`` of a hidden state."""
        B, L = seq.shape[:2]
        if seq.ndim != 3 or seq.shape[-1] != self.tstep_dim:
            raise ValueError(f"seq must be (batch, length, {self.tstep_dim}), got shape {tuple(seq.shape)}")
        if time_idxs.shape != (B, L, 1):
            raise ValueError(f"time_idxs must be ({B}, {L}, 1) for this seq, got shape {tuple(time_idxs.shape)}")
        if rows not in (None, B):
            raise ValueError(f"hidden_state has {rows} rows, but seq has a batch of {B}")


def _named(state: object) -> tuple[list[tuple[str, Any]], pytree.TreeSpec]:
    """(name, part) of each part of a hidden state, and its structure; the names of a named tuple are its keys."""
    leaves, structure = pytree.tree_flatten_with_path(state)
    names = [".".join(("hidden", *(str(astuple(key)[0]) for key in path))) for path, _ in leaves]  # type: ignore[call-overload]
    return list(zip(names, (leaf for _, leaf in leaves))), structure


class LayeredState:
    """The methods of models whose hidden state is a tensor (n_layers, B, ...), or a tuple of such tensors, written in place."""

    def reset_hidden_state(self, hidden_state: S, dones: Dones) -> S:
        for part in _tensors(hidden_state):
            rows = torch.as_tensor(dones, device=part.device).to(torch.bool)
            if rows.shape != part.shape[1:2]:
                raise ValueError(f"dones must have shape ({part.shape[1]},), got {tuple(rows.shape)}")
            part.masked_fill_(rows.view(1, -1, *(1,) * (part.ndim - 2)), 0.0)
        return hidden_state

    def slice_hidden_state(self, hidden_state: S, start: int, stop: int) -> S:
        if not 0 <= start < stop <= (rows := _tensors(hidden_state)[0].shape[1]):
            raise ValueError(f"rows {start}:{stop} are not within a batch of {rows}")
        return pytree.tree_map(lambda part: part[:, start:stop], hidden_state)  # type: ignore[no-any-return]


def _tensors(state: object) -> list[Tensor]:
    """The tensors of the hidden state of a `LayeredState` model; none of actors that have not begun."""
    return [part for part in pytree.tree_leaves(state) if part is not None]


TRAJ_ENCODERS: Registry[type[TrajEncoder]] = Registry("traj_encoder")
"""The sequence model of each name."""
