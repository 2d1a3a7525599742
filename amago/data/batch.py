"""One training sequence, and a padded batch of them with the mask that says what is real."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from amago.data.extras import ExtraField
from amago.data.trajectory import MAGIC_PAD_VAL, SEQUENCE_ROWS, FrozenTraj, cut, cut_extras, pad_value, rows_in, rows_of_extra
from amago.data.windows import check_padded_sampling, subsequence


def rl2_tensor(reward: Tensor, prev_action: Tensor) -> Tensor:
    """(..., 1) rewards and (..., A) vectors of the actions before them -> the policy's input (..., 1 + A)."""
    return torch.cat((reward, prev_action), dim=-1)


def global_rng() -> np.random.Generator:
    """A random stream that begins where torch's global one is: seeded by ``torch.manual_seed``, and in each worker of a DataLoader."""
    return np.random.default_rng(int(torch.randint(2**63 - 1, ())))


@dataclass
class RLData:
    """One training sequence of L transitions. Arrays of numpy become tensors that share their memory.

    Attributes:
        obs: {key: (L + 1, ...)}.
        rews: (L, 1) float32.
        dones: (L, 1) bool, terminated only.
        actions: (L, A) float32, vector form (one-hot, [-1, 1], bits).
        time_idxs: (L + 1, 1) int64. Of L rows the last is added.
        rl2s: (L + 1, 1 + A) float32: reward, then previous action. Default: rewards and actions one step later, after a row of
            zeros, as at the start of a rollout.
        extras: {name: (rows, ...)} of declared extra fields (`amago.data.extras.ExtraField`): L + 1, L or 1 rows.
        source: where the sequence comes from (`amago.loading.priority.Source`), if its TD error is wanted there.
    """

    obs: dict[str, Tensor]
    rews: Tensor
    dones: Tensor
    actions: Tensor
    time_idxs: Tensor
    rl2s: Tensor = None  # type: ignore[assignment]  # None is replaced
    extras: dict[str, Tensor] = field(default_factory=dict)
    source: Any = None

    def __post_init__(self) -> None:
        if isinstance(self.rews, np.ndarray):
            for name in ("rews", "dones", "actions", "time_idxs", "rl2s"):
                value = getattr(self, name)
                setattr(self, name, None if value is None else torch.as_tensor(value))
            self.obs, self.extras = ({k: torch.as_tensor(v) for k, v in d.items()} for d in (self.obs, self.extras))
        if self.rl2s is None:
            later = rl2_tensor(self.rews.float(), self.actions.float())
            self.rl2s = torch.cat((torch.zeros_like(later[:1]), later))
        if len(self.time_idxs) == len(self):
            self.time_idxs = torch.cat((self.time_idxs, self.time_idxs[-1:] + 1))

    def __len__(self) -> int:
        return self.rews.shape[0]

    def random_slice(
        self,
        length: int,
        padded_sampling: str = "none",
        rng: np.random.Generator | None = None,
        cut_short: bool = True,
    ) -> RLData:
        """Keep a random window of at most ``length`` transitions (`amago.data.windows.subsequence`); returns self.

        Args:
            padded_sampling: "none", "left", "right" or "both".
            rng: default: a stream seeded by torch's global one.
            cut_short: also cut sequences that fit into ``length``, unless ``padded_sampling`` is "none".
        """
        check_padded_sampling(padded_sampling)
        total = len(self)
        if total <= length and (padded_sampling == "none" or not cut_short):
            return self
        start, stop = subsequence(total, length, padded_sampling, global_rng() if rng is None else rng, cut_short)
        self.obs = {k: cut(v, "T+1", start, stop) for k, v in self.obs.items()}
        self.extras = cut_extras(self.extras, total, start, stop)
        for name, rows in SEQUENCE_ROWS.items():
            setattr(self, name, cut(getattr(self, name), rows, start, stop))
        return self

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

    ``mask`` says which steps are real. Padding holds `MAGIC_PAD_VAL`, 4.0, in every field (bool: True; integers: 4, or the nearest
    that the observation's space contains), except extra fields, where it is 0.

    Attributes:
        obs: {key: (B, L + 1, ...)}.
        rl2s: (B, L + 1, 1 + A).
        rews: (B, L, 1).
        dones: (B, L, 1) bool.
        actions: (B, L, A) vectors; for discrete actions also int64 indices (B, L, 1).
        time_idxs: (B, L + 1, 1) int64.
        mask: (B, L + 1, 1) bool (0/1 of any dtype is taken), True where the *observation* is real. Transition t is real where
            observation t + 1 is. Default: False where the whole rl2 is 4.0.
        extras: {name: (B, rows, ...)} of the declared extra fields (`amago.data.extras.ExtraField`): L + 1, L or 1 rows.
        sources: of the sequences, with their importance weights, if they were drawn by priority: `RLData.source`, B of them. None:
            the losses of all sequences count alike.
    """

    obs: dict[str, Tensor]
    rl2s: Tensor
    rews: Tensor
    dones: Tensor
    actions: Tensor
    time_idxs: Tensor
    mask: Tensor = None  # type: ignore[assignment]  # None is replaced
    extras: dict[str, Tensor] = field(default_factory=dict)
    sources: Any = None

    def __post_init__(self) -> None:
        if self.mask is None:
            self.mask = ~(self.rl2s == MAGIC_PAD_VAL).all(dim=-1, keepdim=True)
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

    @property
    def weights(self) -> Tensor | None:
        """(B,) importance weights of the sequences, on the device of the batch; None: all alike."""
        if self.sources is None:
            return None
        return torch.tensor([1.0 if s is None else s.weight for s in self.sources], device=self.rews.device)

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Batch:
        """Move every tensor to ``device``; returns self."""
        return self._map(lambda x: x.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> Batch:
        """Move every tensor to page-locked memory, from which copies to a GPU do not block; returns self."""
        return self._map(lambda x: x.pin_memory())

    def _map(self, f: Callable[[Tensor], Tensor]) -> Batch:
        for name, value in vars(self).items():
            if name != "sources":
                setattr(self, name, {k: f(v) for k, v in value.items()} if isinstance(value, dict) else f(value))
        return self


def collate(
    samples: Sequence[RLData], extra_fields: Sequence[ExtraField] = (), obs_space: gym.spaces.Dict | None = None
) -> Batch:
    """Pad on the right to the longest sequence, with `MAGIC_PAD_VAL` (`Batch` says what that is in each field).

    Args:
        extra_fields: the batch has exactly these extras, with their defaults in sequences that lack them. By default it has
            the extras of the sequences.
        obs_space: of the observations; within its bounds padded integers stay. Default: they are 4.

    Raises:
        ValueError: no samples, or samples that differ in keys, in shapes or in dtypes, which are not converted.
    """
    if not samples:
        raise ValueError("cannot build a batch of no sequences")
    extras = [_with_defaults(s, extra_fields) for s in samples]
    obs = [s.obs for s in samples]
    for what, parts in (("obs", obs), ("extras", extras)):
        _check_alike(what, parts)
    _check_alike("", [{name: getattr(s, name) for name in SEQUENCE_ROWS} for s in samples])
    lengths = [len(s) for s in samples]
    longest = max(lengths)
    mask = torch.arange(longest + 1)[None, :, None] <= torch.tensor(lengths)[:, None, None]
    return Batch(
        obs={k: _padded([x[k] for x in obs], _bounds(obs_space, k)) for k in obs[0]},
        extras={k: _padded([x[k] for x in extras], value=0.0) for k in extras[0]},
        mask=mask,
        sources=sources_of([s.source for s in samples]),
        **{name: _padded([getattr(s, name) for s in samples]) for name in SEQUENCE_ROWS},
    )


def sources_of(sources: list[Any]) -> list[Any] | None:
    """The sources of the sequences of a batch; None if none has any."""
    return sources if any(s is not None for s in sources) else None


def _bounds(obs_space: gym.spaces.Dict | None, key: str) -> gym.spaces.Box | None:
    space = None if obs_space is None else obs_space.spaces.get(key)
    return space if isinstance(space, gym.spaces.Box) else None


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
    """Raise ValueError unless all have the keys, the dtypes and, rows apart, the shapes of the first."""
    first = parts[0]
    for other in parts:
        if other.keys() != first.keys():
            different = "observations" if what == "obs" else what
            raise ValueError(f"sequences of one batch have different {different}: {sorted(first)} and {sorted(other)}")
        for key, a in first.items():
            b, name = other[key], f"{what}[{key!r}]" if what else key
            for of, x, y in (("shapes", tuple(a.shape[1:]), tuple(b.shape[1:])), ("dtypes", a.dtype, b.dtype)):
                if x != y:
                    raise ValueError(f"sequences of one batch have {name} of different {of}: {x} and {y}")


def _padded(parts: list[Tensor], within: gym.spaces.Box | None = None, value: float = MAGIC_PAD_VAL) -> Tensor:
    """(B, most rows, ...), with ``value`` after the rows of the shorter ones; integers stay in the box ``within``."""
    rows = [len(p) for p in parts]
    if min(rows) == max(rows):
        return torch.stack(parts)
    if within is None or parts[0].is_floating_point() or parts[0].dtype == torch.bool:
        return pad_sequence(parts, batch_first=True, padding_value=value)
    out = pad_sequence(parts, batch_first=True)
    fill = torch.as_tensor(pad_value(np.dtype(str(out.dtype).removeprefix("torch.")), within.low, within.high))
    for row, n in zip(out, rows):
        row[n:] = fill
    return out
