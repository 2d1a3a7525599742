"""One training sequence, and a padded batch of them with the mask that says what is real."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from amago.data.trajectory import FrozenTraj


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
    """

    obs: dict[str, Tensor]
    rl2s: Tensor
    time_idxs: Tensor
    rews: Tensor
    dones: Tensor
    actions: Tensor

    def __len__(self) -> int:
        return self.rews.shape[0]

    @classmethod
    def from_traj(cls, traj: FrozenTraj) -> RLData:
        """Tensors that share memory with the arrays of ``traj``."""
        return cls(
            obs={k: torch.from_numpy(v) for k, v in traj.obs.items()},
            rl2s=torch.from_numpy(traj.rl2s),
            time_idxs=torch.from_numpy(traj.time_idxs),
            rews=torch.from_numpy(traj.rews),
            dones=torch.from_numpy(traj.dones),
            actions=torch.from_numpy(traj.actions),
        )


@dataclass
class Batch:
    """B sequences padded on the right to the longest, L transitions.

    The padding's value means nothing; only ``mask`` says what is real.

    Attributes:
        obs: {key: (B, L + 1, ...)}.
        rl2s: (B, L + 1, 1 + A).
        rews: (B, L, 1).
        dones: (B, L, 1) bool.
        actions: (B, L, A) vectors; for discrete actions also int64 indices (B, L, 1).
        time_idxs: (B, L + 1, 1) int64.
        mask: (B, L + 1, 1) bool (0/1 of any dtype is taken), True where the *observation* is real. Transition t is real where
            observation t + 1 is.
    """

    obs: dict[str, Tensor]
    rl2s: Tensor
    rews: Tensor
    dones: Tensor
    actions: Tensor
    time_idxs: Tensor
    mask: Tensor

    def __post_init__(self) -> None:
        self.mask = self.mask.to(torch.bool)
        b, length = self.rews.shape[:2]
        want = {"rl2s": length + 1, "dones": length, "actions": length, "time_idxs": length + 1, "mask": length + 1}
        found = {name: getattr(self, name) for name in want} | {f"obs[{k!r}]": v for k, v in self.obs.items()}
        for name, x in found.items():
            steps = want.get(name, length + 1)
            if tuple(x.shape[:2]) != (b, steps):
                raise ValueError(
                    f"Batch.{name} has shape {tuple(x.shape)}; rews {tuple(self.rews.shape)} asks for ({b}, {steps}, ...)"
                )

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
        tensors = {x.name: f(getattr(self, x.name)) for x in fields(self) if x.name != "obs"}
        return Batch(obs={k: f(v) for k, v in self.obs.items()}, **tensors)


def collate(samples: Sequence[RLData]) -> Batch:
    """Pad on the right to the longest sequence, with zeros.

    Raises:
        ValueError: no samples, or samples whose observations or actions differ in keys or shapes.
    """
    if not samples:
        raise ValueError("cannot build a batch of no sequences")
    keys = list(samples[0].obs)
    for s in samples:
        if list(s.obs) != keys and set(s.obs) != set(keys):
            raise ValueError(f"sequences of one batch have different observations: {sorted(keys)} and {sorted(s.obs)}")
        for what, a, b in (
            ("actions", samples[0].actions, s.actions),
            *((f"obs[{k!r}]", samples[0].obs[k], s.obs[k]) for k in keys),
        ):
            if a.shape[1:] != b.shape[1:]:
                raise ValueError(
                    f"sequences of one batch have {what} of different shapes: {tuple(a.shape[1:])} and {tuple(b.shape[1:])}"
                )
    lengths = [len(s) for s in samples]
    longest = max(lengths)

    def pad(parts: list[Tensor], steps: int) -> Tensor:
        if all(p.dtype == parts[0].dtype for p in parts):
            return torch.stack(parts) if min(lengths) == longest else pad_sequence(parts, batch_first=True)
        out = parts[0].new_zeros((len(parts), steps, *parts[0].shape[1:]))
        for i, p in enumerate(parts):
            out[i, : p.shape[0]] = p
        return out

    mask = torch.arange(longest + 1)[None, :, None] <= torch.tensor(lengths)[:, None, None]
    return Batch(
        obs={k: pad([s.obs[k] for s in samples], longest + 1) for k in keys},
        rl2s=pad([s.rl2s for s in samples], longest + 1),
        rews=pad([s.rews for s in samples], longest),
        dones=pad([s.dones for s in samples], longest),
        actions=pad([s.actions for s in samples], longest),
        time_idxs=pad([s.time_idxs for s in samples], longest + 1),
        mask=mask,
    )
