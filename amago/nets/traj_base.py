"""The base class of all sequence models.

Shapes: B sequences or actors, L timesteps, D numbers of a timestep's input, E of its output.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from amago.config import NamedArguments
from amago.nets.utils import check_positive, has_argument

Dones = NDArray[np.bool_] | Tensor


class TrajEncoder(NamedArguments, nn.Module, ABC):
    """Base of all sequence models.

    A subclass defines `emb_dim` and `forward`. A model with memory also defines `init_hidden_state` and `reset_hidden_state`;
    `slice_hidden_state`, `export_hidden_state` and `import_hidden_state` are optional.

    A model that is not causal adds an argument ``mask`` to `forward`: (B, L, 1) bool, False at padding, which comes after the real steps;
    or None where there is no padding.

    Args:
        tstep_dim: D.
        max_seq_len: length of the context in transitions; training sequences have one observation more.

    Attributes:
        takes_mask: `forward` has an argument ``mask``. Its signature says so when the class is defined.

    Raises:
        ValueError: an argument is below 1.
    """

    takes_mask: ClassVar[bool] = False

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.takes_mask = has_argument(cls.forward, "mask")

    def __init__(self, tstep_dim: int, max_seq_len: int) -> None:
        super().__init__()
        check_positive(tstep_dim=tstep_dim, max_seq_len=max_seq_len)
        self.tstep_dim = tstep_dim
        self.max_seq_len = max_seq_len

    @property
    @abstractmethod
    def emb_dim(self) -> int:
        """E."""

    @abstractmethod
    def forward(
        self, seq: Tensor, time_idxs: Tensor, hidden_state: Any = None, log_dict: dict[str, Any] | None = None
    ) -> tuple[Tensor, Any]:
        """Map a sequence.

        Args:
            seq: (B, L, D).
            time_idxs: (B, L, 1) int64, index of each step in its episode.
            hidden_state: None for whole sequences, as in training. Otherwise the result of `init_hidden_state` or of the previous
                call, and ``seq`` continues from there. Hidden states are for acting: no gradient flows through them, and they may
                be updated in place.
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
        """The hidden state with the rows cleared where ``dones`` (B,) is True; other rows stay as they are. May work in place."""
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
        """Whether `slice_hidden_state` is implemented; called once, at the start of acting. The default tries the first row."""
        try:
            self.slice_hidden_state(hidden_state, 0, 1)
        except NotImplementedError:
            return False
        return True

    def export_hidden_state(self, hidden_state: Any) -> dict[str, Tensor]:
        """The hidden state as named tensors, for `amago.policy.export`. Each has one dimension of size B.

        Optional. The methods here suit a hidden state that is None, a tensor, or tuples, named tuples, lists and dicts of these, in any
        depth, such as the (h, c) of an LSTM. Any other model that is to be exported overrides this method and `import_hidden_state`.

        Returns:
            {"hidden": tensor}; of several tensors "hidden.0", "hidden.1", or "hidden.KEY". Empty for None.

        Raises:
            ValueError: the hidden state holds something else.
        """
        return dict(_named(hidden_state, "hidden", type(self).__name__))

    def import_hidden_state(self, tensors: dict[str, Tensor], dones: Tensor) -> Any:
        """The inverse of `export_hidden_state`, traceable by ``torch.export``. `forward` takes a step from its result.

        Args:
            tensors: as `export_hidden_state` names them. They must not be changed: copy what is written in place.
            dones: (B,) bool, True in rows whose memory is cleared first.
        """
        if not tensors:
            return None
        structure = self.init_hidden_state(1, dones.device)
        return self.reset_hidden_state(_filled(structure, tensors, "hidden"), dones)

    def _check_input(self, seq: Tensor, time_idxs: Tensor) -> None:
        B, L = seq.shape[:2]
        if seq.ndim != 3 or seq.shape[-1] != self.tstep_dim:
            raise ValueError(f"seq must be (batch, length, {self.tstep_dim}), got shape {tuple(seq.shape)}")
        if time_idxs.shape != (B, L, 1):
            raise ValueError(f"time_idxs must be ({B}, {L}, 1) for this seq, got shape {tuple(time_idxs.shape)}")


class LayeredStateEncoder(TrajEncoder):
    """Base of models whose hidden state is one tensor (n_layers, B, width), written in place."""

    def reset_hidden_state(self, hidden_state: Tensor | None, dones: Dones) -> Tensor | None:
        if hidden_state is None:  # of actors that have not begun
            return None
        rows = torch.as_tensor(dones, device=hidden_state.device).to(torch.bool)
        if rows.shape != hidden_state.shape[1:2]:
            raise ValueError(f"dones must have shape ({hidden_state.shape[1]},), got {tuple(rows.shape)}")
        return hidden_state.masked_fill_(rows[None, :, None], 0.0)

    def slice_hidden_state(self, hidden_state: Tensor, start: int, stop: int) -> Tensor:
        if not 0 <= start < stop <= hidden_state.shape[1]:
            raise ValueError(f"rows {start}:{stop} are not within a batch of {hidden_state.shape[1]}")
        return hidden_state[:, start:stop]


def _children(state: tuple[Any, ...] | list[Any] | dict[Any, Any]) -> Iterable[tuple[Any, Any]]:
    """(key, value) of each part of a hidden state that is not a tensor; the names of a named tuple are its keys."""
    if isinstance(state, dict):
        return state.items()
    return zip(getattr(state, "_fields", range(len(state))), state)


def _named(state: Any, name: str, owner: str) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) of each tensor of a hidden state; ``owner`` is for the message."""
    if isinstance(state, Tensor):
        yield name, state
    elif isinstance(state, (tuple, list, dict)):
        for key, value in _children(state):
            yield from _named(value, f"{name}.{key}", owner)
    elif state is not None:
        where = "" if name == "hidden" else f" ({name.replace('hidden', 'hidden_state', 1)})"
        raise ValueError(
            f"{owner} has a {type(state).__name__} in its hidden state{where}, which is none of None, tensors, tuples, lists and dicts; to "
            "export it, override export_hidden_state and import_hidden_state"
        )


def _filled(structure: Any, tensors: dict[str, Tensor], name: str) -> Any:
    """A hidden state of the same structure, with copies of named tensors."""
    if isinstance(structure, Tensor):
        return tensors[name].clone()
    if isinstance(structure, dict):
        return type(structure)((key, _filled(value, tensors, f"{name}.{key}")) for key, value in structure.items())
    if isinstance(structure, (tuple, list)):
        parts = [_filled(value, tensors, f"{name}.{key}") for key, value in _children(structure)]
        return type(structure)(*parts) if hasattr(structure, "_fields") else type(structure)(parts)
    return structure


def check_batch(batch: int, rows: int) -> None:
    """Raise ValueError where a sequence and a hidden state differ in B."""
    if batch != rows:
        raise ValueError(f"hidden_state has {rows} rows, but seq has a batch of {batch}")
