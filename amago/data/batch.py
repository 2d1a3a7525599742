"""One training sequence, and a padded batch of them with the mask that says what is real."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from amago.data.extras import ExtraField
from amago.data.trajectory import SEQUENCE_ROWS, FrozenTraj, rows_in, rows_of_extra


def rl2_tensor(reward: Tensor, prev_action: Tensor) -> Tensor:
    """(..., 1) rewards and (..., A) vectors of the actions before them -> the policy's input (..., 1 + A)."""
    return torch.cat((reward, prev_action), dim=-1)


@dataclass
class RLData:
    """One training sequence of L transitions.

    Attributes:
        obs: {key: (L + 1, ...)}.
        rl2s: (L + 1, 1 + A) float32: reward, then previous action.
        time_idxs: (L + 1, 1) int64.
        rews: (L, 1) float32.
        dones: (L, 1) bool, terminated only.
        actions: (L, A) float32, vector form (one-hot, [-1, 1], bits).
        extras: {name: (rows, ...)} of declared extra fields (`amago.data.extras.ExtraField`): L + 1, L or 1 rows.
    """

    obs: dict[str, Tensor]
    rl2s: Tensor
    time_idxs: Tensor
    rews: Tensor
    dones: Tensor
    actions: Tensor
    extras: dict[str, Tensor] = field(default_factory=dict)

    def __len__(self) -> int:
        return self.rews.shape[0]

    @classmethod
    def from_traj(cls, traj: FrozenTraj) -> RLData:
        """Tensors that share memory with the arrays of ``traj``."""
        return cls(
            obs={k: torch.from_numpy(v) for k, v in traj.obs.items()},
            extras={k: torch.from_numpy(v) for k, v in traj.extras.items()},
            **{name: torch.from_numpy(getattr(traj, name)) for name in SEQUENCE_ROWS},
        )


@dataclass
class Batch:
    """B sequences padded on the right to the longest, L transitions.

    Values at padded steps are undefined; only ``mask`` says which steps are real.

    Attributes:
        obs: {key: (B, L + 1, ...)}.
        rl2s: (B, L + 1, 1 + A).
        rews: (B, L, 1).
        dones: (B, L, 1) bool.
        actions: (B, L, A) vectors; for discrete actions also int64 indices (B, L, 1).
        time_idxs: (B, L + 1, 1) int64.
        mask: (B, L + 1, 1) bool (0/1 of any dtype is taken), True where the *observation* is real. Transition t is real where
            observation t + 1 is.
        extras: {name: (B, rows, ...)} of the declared extra fields (`amago.data.extras.ExtraField`): L + 1, L or 1 rows.
    """

    obs: dict[str, Tensor]
    rl2s: Tensor
    rews: Tensor
    dones: Tensor
    actions: Tensor
    time_idxs: Tensor
    mask: Tensor
    extras: dict[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.mask = self.mask.to(torch.bool)
        b, length = self.rews.shape[:2]
        found = {name: (getattr(self, name), rows) for name, rows in SEQUENCE_ROWS.items()}
        found["mask"] = self.mask, "T+1"
        found |= {f"obs[{k!r}]": (v, "T+1") for k, v in self.obs.items()}
        for name, (x, rows) in found.items():
            steps = rows_in(rows, 1, length)
            if tuple(x.shape[:2]) != (b, steps):
                raise ValueError(
                    f"Batch.{name} has shape {tuple(x.shape)}; rews {tuple(self.rews.shape)} asks for ({b}, {steps}, ...)"
                )
        for name, x in self.extras.items():
            if len(x) != b:
                raise ValueError(f"Batch.extras[{name!r}] has shape {tuple(x.shape)}; there are {b} sequences")
            rows_of_extra(name, x.shape[1], length)

    @property
    def transition_mask(self) -> Tensor:
        """(B, L, 1) bool, True where a transition is real."""
        return self.mask[:, 1:]

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Batch:
        """A copy on ``device``."""
        return self._map(lambda x: x.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> Batch:
        """A copy in page-locked memory, from which copies to a GPU do not block."""
        return self._map(lambda x: x.pin_memory())

    def _map(self, f: Callable[[Tensor], Tensor]) -> Batch:
        def mapped(value: Any) -> Any:
            return {k: f(v) for k, v in value.items()} if isinstance(value, dict) else f(value)

        return Batch(**{name: mapped(value) for name, value in vars(self).items()})


def collate(samples: Sequence[RLData], extra_fields: Sequence[ExtraField] = ()) -> Batch:
    """Pad on the right to the longest sequence, with zeros.

    Args:
        extra_fields: the batch has exactly these extras, with their defaults in sequences that lack them. By default it has
            the extras of the sequences.

    Raises:
        ValueError: no samples, or samples whose observations, actions or extras differ in keys or shapes.
    """
    if not samples:
        raise ValueError("cannot build a batch of no sequences")
    extras = [_with_defaults(s, extra_fields) for s in samples]
    obs = [s.obs for s in samples]
    for what, parts in (("obs", obs), ("extras", extras)):
        _check_alike(what, parts)
    _check_alike("", [{"actions": s.actions} for s in samples])
    lengths = [len(s) for s in samples]
    longest = max(lengths)
    mask = torch.arange(longest + 1)[None, :, None] <= torch.tensor(lengths)[:, None, None]
    return Batch(
        obs={k: _padded([x[k] for x in obs]) for k in obs[0]},
        extras={k: _padded([x[k] for x in extras]) for k in extras[0]},
        mask=mask,
        **{name: _padded([getattr(s, name) for s in samples]) for name in SEQUENCE_ROWS},
    )


def _with_defaults(sample: RLData, extra_fields: Sequence[ExtraField]) -> dict[str, Tensor]:
    """The extras of a sequence that a batch has.

    Raises:
        ValueError: one has other rows or another shape than was declared.
    """
    out = dict(sample.extras) if not extra_fields else {}
    for x in extra_fields:
        value = sample.extras.get(x.name)
        if value is None:
            value = torch.from_numpy(x.default_rows(len(sample)))
        elif tuple(value.shape) != (right := (rows_in(x.rows, 1, len(sample)), *x.shape)):
            raise ValueError(f"extras[{x.name!r}] of a sequence has shape {tuple(value.shape)}, but must have {right}")
        out[x.name] = value
    return out


def _check_alike(what: str, parts: Sequence[dict[str, Tensor]]) -> None:
    """Raise ValueError unless all have the keys and, rows apart, the shapes of the first."""
    first = parts[0]
    for other in parts:
        if other.keys() != first.keys():
            different = "observations" if what == "obs" else what
            raise ValueError(f"sequences of one batch have different {different}: {sorted(first)} and {sorted(other)}")
        for key, a in first.items():
            b, name = other[key], f"{what}[{key!r}]" if what else key
            if a.shape[1:] != b.shape[1:]:
                raise ValueError(
                    f"sequences of one batch have {name} of different shapes: {tuple(a.shape[1:])} and {tuple(b.shape[1:])}"
                )


def _padded(parts: list[Tensor]) -> Tensor:
    """(B, most rows, ...), with zeros after the rows of the shorter ones."""
    rows = [len(p) for p in parts]
    if all(p.dtype == parts[0].dtype for p in parts):
        return torch.stack(parts) if min(rows) == max(rows) else pad_sequence(parts, batch_first=True)
    out = parts[0].new_zeros((len(parts), max(rows), *parts[0].shape[1:]))
    for i, p in enumerate(parts):
        out[i, : p.shape[0]] = p
    return out
