"""The choice of a training sequence within a trajectory; one sequence; a padded batch of them with a mask of the real steps."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from amago.data.extras import ExtraField
from amago.data.trajectory import (
    MAGIC_PAD_VAL,
    SEQUENCE_ROWS,
    FrozenTraj,
    columns,
    cut_fields,
    pad_value,
    rows_in,
    rows_of_extra,
)


def rl2_tensor(reward: Tensor, prev_action: Tensor) -> Tensor:
    """(..., 1) rewards and (..., A) vectors of the actions before them -> the policy's input (..., 1 + A)."""
    return torch.cat((reward, prev_action), dim=-1)


def global_rng() -> np.random.Generator:
    """A random stream that begins where torch's global one is: seeded by ``torch.manual_seed``, and in each worker of a
    DataLoader."""
    return np.random.default_rng(int(torch.randint(2**63 - 1, ())))


@dataclass
class RLData:
    """One training sequence of L transitions. Arrays of numpy become tensors that share their memory.

    Attributes:
        obs: {key: (L + 1, ...)}.
        rews: (L, 1) float32.
        dones: (L, 1) bool, terminated only.
        actions: (L, A) float32, vector form (one-hot, [-1, 1], bits).
        time_idxs: (L + 1, 1) int64. If there are only L rows, the last is added.
        rl2s: (L + 1, 1 + A) float32: reward, then previous action. Default: rewards and actions one step later, after a row of
            zeros, as at the start of a rollout.
        extras: {name: (rows, ...)} of declared extra fields (`amago.data.extras.ExtraField`): L + 1, L or 1 rows.
        source: origin of the sequence (`amago.loading.sampling.Source`), if its TD error is wanted there.
    """

    obs: dict[str, Tensor]
    rews: Tensor
    dones: Tensor
    actions: Tensor
    time_idxs: Tensor
    rl2s: Tensor = None  # type: ignore[assignment]  # None is replaced
    extras: dict[str, Tensor] = field(default_factory=dict)
    source: object = None

    def __post_init__(self) -> None:
        if isinstance(self.rews, np.ndarray):
            vars(self).update({k: None if v is None else torch.as_tensor(v) for k, v in columns(self).items()})
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
        """Keep a random window of at most ``length`` transitions (`amago.data.batch.subsequence`); returns self.

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
        vars(self).update(cut_fields(self, start, stop))
        return self

    @classmethod
    def from_traj(cls, traj: FrozenTraj) -> RLData:
        """Tensors that share memory with the arrays of ``traj``."""
        obs: Any = traj.obs
        extras: Any = traj.extras
        return cls(obs=obs, extras=extras, **columns(traj))


class Packing:
    """Tensors side by side in one piece of memory, so that all are copied at once.

    Args:
        tensors: by name; their dtypes and shapes count.

    Attributes:
        nbytes: of the piece.
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.nbytes, self._places = 0, {}
        for name, x in tensors.items():
            self._places[name] = slice(self.nbytes, self.nbytes + x.nbytes), x.dtype, x.shape
            self.nbytes = -(-(self.nbytes + x.nbytes) // 64) * 64

    def views(self, memory: Tensor) -> dict[str, Tensor]:
        """The tensors in a piece of memory, (nbytes,) uint8."""
        return {name: memory[at].view(dtype).view(shape) for name, (at, dtype, shape) in self._places.items()}


@dataclass
class Batch:
    """B sequences padded on the right to the longest, L transitions.

    ``mask`` is True at real steps. Padding holds `MAGIC_PAD_VAL`, 4.0, in every field (bool: True; integers: 4, or the nearest
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
        sources: of the sequences, with their importance weights, if they were drawn by priority: `RLData.source`, B of them.
            None: the losses of all sequences count alike.
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
        found = {f"obs[{k!r}]": (x.shape, "T+1") for k, x in self.obs.items()}
        found |= {name: (vars(self)[name].shape, rows) for name, rows in (SEQUENCE_ROWS | {"mask": "T+1"}).items()}
        found |= {f"extras[{k!r}]": (x.shape, rows_of_extra(k, x.shape[1], length)) for k, x in self.extras.items()}
        for name, (shape, rows) in found.items():
            if tuple(shape[:2]) != (b, steps := rows_in(rows, 1, length)):
                raise ValueError(
                    f"Batch.{name} has shape {tuple(shape)}; rews {tuple(self.rews.shape)} asks for ({b}, {steps}, ...)"
                )

    @property
    def transition_mask(self) -> Tensor:
        """(B, L, 1) bool, True where a transition is real."""
        return self.mask[:, 1:]

    @property
    def weights(self) -> Tensor | None:
        """(B,) importance weights of the sequences, on the device of the batch; None: all alike."""
        if self.sources is None:
            return None
        weights = torch.tensor([1.0 if s is None else s.weight for s in self.sources])
        return weights.pin_memory().to(self.rews.device, non_blocking=True) if self.rews.is_cuda else weights

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Batch:
        """Move every tensor to ``device``, those of `pin_memory` in one copy; returns self."""
        whole: dict[int, Tensor] = {}

        def move(x: Tensor) -> Tensor:
            memory = x.untyped_storage()
            if memory.nbytes() == x.nbytes or not x.is_pinned():
                return x.to(device, non_blocking=non_blocking)
            if memory.data_ptr() not in whole:
                part = torch.empty(0, dtype=torch.uint8).set_(memory)  # type: ignore[call-overload]
                whole[memory.data_ptr()] = part.to(device, non_blocking=non_blocking)
            there = whole[memory.data_ptr()].untyped_storage()
            return torch.empty(0, dtype=x.dtype, device=device).set_(there, x.storage_offset(), x.shape, x.stride())  # type: ignore[call-overload, no-any-return]

        return self.map(move)

    def pin_memory(self) -> Batch:
        """Move every tensor into one piece of page-locked memory, which PyTorch uses again and from which copies to a GPU do not block; returns
        self."""
        packing = Packing({str(i): x for i, x in enumerate(self.tensors())})
        places = iter(packing.views(torch.empty(packing.nbytes, dtype=torch.uint8, pin_memory=True)).values())
        return self.map(lambda x: next(places).copy_(x))

    def lengthened(self, length: int) -> Batch:
        """The same sequences with more padding, to ``length`` transitions; a batch that is as long, or of single transitions, as it is."""
        rows = self.rews.shape[1]
        if (more := length - rows) <= 0 or rows == 1:
            return self

        def longer(x: Tensor) -> Tensor:
            last = x[:, -1:].expand(-1, more if x.shape[1] >= rows else 0, *x.shape[2:])  # integers stay within their tables
            return torch.cat((x, torch.full_like(last, MAGIC_PAD_VAL) if x.is_floating_point() else last), dim=1)

        made = copy.copy(self).map(longer)
        made.mask[:, rows + 1 :] = False
        made.extras = {
            k: torch.cat((x, torch.zeros_like(made.extras[k][:, x.shape[1] :])), dim=1) for k, x in self.extras.items()
        }
        return made

    def tensors(self) -> list[Tensor]:
        """All tensors, in the order of the fields."""
        found: list[Tensor] = []
        self.map(lambda x: found.append(x) or x)  # type: ignore[func-returns-value]
        return found

    def map(self, f: Callable[[Tensor], Tensor]) -> Batch:
        """Replace every tensor x by f(x), in the order of the fields; returns self."""
        for name in (x.name for x in fields(self) if x.name != "sources"):
            value = vars(self)[name]
            vars(self)[name] = {k: f(v) for k, v in value.items()} if isinstance(value, dict) else f(value)
        return self


def collate(
    samples: Sequence[RLData], extra_fields: Sequence[ExtraField] = (), obs_space: gym.spaces.Dict | None = None
) -> Batch:
    """Pad on the right to the longest sequence, with `MAGIC_PAD_VAL` (its value in each field: see `Batch`).

    Args:
        extra_fields: the batch has exactly these extras, with their defaults in sequences that lack them. By default it has
            the extras of the sequences.
        obs_space: of the observations; padded integers stay within its bounds. Default: they are 4.

    Raises:
        ValueError: no samples, or samples that differ in keys, in shapes or in dtypes, which are not converted.
    """
    if not samples:
        raise ValueError("cannot build a batch of no sequences")
    parts = {"": [columns(s) for s in samples], "obs": [s.obs for s in samples]}
    parts["extras"] = [_with_defaults(s, extra_fields) for s in samples]
    padded: dict[str, dict[str, Tensor]] = {}
    for group, each in parts.items():
        _check_alike(group, each)
        boxes = {} if group != "obs" or obs_space is None else obs_space.spaces
        pad = 0.0 if group == "extras" else MAGIC_PAD_VAL
        padded[group] = {k: _padded([x[k] for x in each], boxes.get(k), pad) for k in each[0]}
    lengths = torch.tensor([len(s) for s in samples])[:, None, None]
    mask = torch.arange(int(lengths.max()) + 1)[None, :, None] <= lengths
    sources = sources_of([s.source for s in samples])
    return Batch(obs=padded["obs"], extras=padded["extras"], mask=mask, sources=sources, **padded[""])


def sources_of(sources: list[Any]) -> list[Any] | None:
    """The sources of the sequences of a batch; None if none has any."""
    return sources if any(s is not None for s in sources) else None


def _with_defaults(sample: RLData, extra_fields: Sequence[ExtraField]) -> dict[str, Tensor]:
    """The extras of a sequence that a batch has; ValueError: one has other rows or another shape than was declared."""
    out = {} if extra_fields else sample.extras
    for x in extra_fields:
        default = torch.from_numpy(x.default_rows(len(sample)))
        out[x.name] = given = sample.extras.get(x.name, default)
        if given.shape != default.shape:
            raise ValueError(
                f"extras[{x.name!r}] of a sequence has shape {tuple(given.shape)}, but must have {tuple(default.shape)}"
            )
    return out


def _check_alike(group: str, parts: Sequence[dict[str, Tensor]]) -> None:
    """Raise ValueError unless all have the keys, the dtypes and, rows apart, the shapes of the first."""
    first = {k: (tuple(x.shape[1:]), x.dtype) for k, x in parts[0].items()}
    for other in parts[1:]:
        if other.keys() != first.keys():
            different = "observations" if group == "obs" else group
            raise ValueError(f"sequences of one batch have different {different}: {sorted(first)} and {sorted(other)}")
        for key, x in other.items():
            if (found := (tuple(x.shape[1:]), x.dtype)) != first[key]:
                name = f"{group}[{key!r}]" if group else key
                raise ValueError(f"sequences of one batch have {name} of different shapes or dtypes: {first[key]} and {found}")


def _padded(parts: list[Tensor], within: gym.Space[Any] | None, value: float) -> Tensor:
    """(B, most rows, ...), with ``value`` after the rows of the shorter ones; integers stay in the box ``within``."""
    rows = [len(p) for p in parts]
    if min(rows) == max(rows):
        return torch.stack(parts)
    out = pad_sequence(parts, batch_first=True, padding_value=value)
    if isinstance(within, gym.spaces.Box) and not out.is_floating_point() and out.dtype != torch.bool:
        fill = torch.as_tensor(pad_value(np.dtype(str(out.dtype).removeprefix("torch.")), within.low, within.high))
        for row, n in zip(out, rows):
            row[n:] = fill
    return out


# ---- windows of trajectories ---

PADDED_SAMPLING = ("none", "both", "left", "right")


def subsequence(
    length: int,
    max_len: int,
    padded_sampling: str,
    rng: np.random.Generator,
    cut_short: bool = False,
    piece: tuple[int, int] = (0, 1),
) -> tuple[int, int]:
    """Choose the transitions [start, stop) of a trajectory to train on.

    All of a trajectory with T <= L. Of a longer one, the window of ``max_len`` transitions starts uniformly in [0, T - L]
    ("none"), [-L + 1, T - 2] ("both"), [-L + 1, T - L] ("left") or [0, T - 2] ("right"), and is then cut to what exists. "left"
    and "both" make the first steps of a trajectory, "right" and "both" its last, as likely to be in the window as any other.

    Args:
        length: T, transitions in the trajectory.
        max_len: L.
        cut_short: draw a window of a trajectory with T <= L in the same way. With "both", half of the trajectory is then
            missing on average where T = L: the cue that an agent has to remember and its use are hardly ever in one sequence.
        piece: (k, K): the start is drawn from the k-th of K equal parts of its range, k from 0.
    """
    if length <= max_len and not cut_short:
        return 0, length
    low, high = _starts(length, max_len, padded_sampling)
    starts, (k, pieces) = int(high) + 1 - low, piece
    start = int(rng.integers(low + k * starts // pieces, low + (k + 1) * starts // pieces))
    return max(start, 0), min(start + max_len, length)


def _starts(lengths: int | NDArray[np.int64], max_len: int, padded_sampling: str) -> tuple[int, NDArray[np.int64]]:
    """The first and the last start of a window of each trajectory."""
    low = 1 - max_len if padded_sampling in ("both", "left") else 0
    return low, np.maximum(lengths - 2 if padded_sampling in ("both", "right") else lengths - max_len, low)


def expected_transitions(
    lengths: NDArray[np.int64], max_len: int, padded_sampling: str, cut_short: bool = False
) -> NDArray[np.float64]:
    """The mean number of transitions that `subsequence` chooses of a trajectory, over its random starts.

    Args:
        lengths: (n,), T of each trajectory, at least 1.
        max_len, padded_sampling, cut_short: as there.

    Returns:
        (n,): L for T > L with "none", and at most T.
    """
    lengths = np.asarray(lengths, np.int64)
    low, high = _starts(lengths, max_len, padded_sampling)
    after = lengths - max_len  # a window that starts after this has start - after transitions less than L at the end
    lost = _sum_to(after - low) - _sum_to(after - high - 1) + _sum_to(high) - _sum_to(low - 1)
    mean = lengths - lost / (high - low + 1)
    return mean if cut_short else np.where(lengths <= max_len, lengths, mean)


def pieces_of(lengths: NDArray[np.int64], max_len: int, padded_sampling: str, cut_short: bool = False) -> NDArray[np.int64]:
    """The number of sequences, T / L rounded up, into which each trajectory divides: the K of `subsequence` with one start in
    each part at least."""
    lengths = np.asarray(lengths, np.int64)
    low, high = _starts(lengths, max_len, padded_sampling)
    return np.minimum(-(-lengths // max_len), high - low + 1)


def _sum_to(n: NDArray[np.int64] | int) -> NDArray[np.float64]:
    """1 + 2 + ... + n; 0 for n below 1."""
    positive = np.maximum(n, 0).astype(np.float64)
    return positive * (positive + 1) / 2


def check_padded_sampling(value: str) -> None:
    """Raise ValueError, naming the value, unless it is one of `PADDED_SAMPLING`."""
    if value not in PADDED_SAMPLING:
        raise ValueError(f"padded_sampling must be one of {', '.join(PADDED_SAMPLING)}; got {value!r}")
