"""Which trajectories of the replay buffer are drawn, and how often."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import get_worker_info

from amago.data.windows import expected_transitions
from amago.loading.priority import Priorities, PriorityChances, Source
from amago.loading.sum_tree import SumTree
from amago.store import StoreView

if TYPE_CHECKING:
    from amago.loading.dataset import DatasetSettings

SAMPLING = ("uniform", "length", "recent", "priority")
BALANCE = ("env_name",)
Indices = NDArray[np.int64]


class Draw(NamedTuple):
    """A trajectory to read a sequence of.

    Attributes:
        row: its index in ``view``.
        piece: the part of the range of starts from which the window's is drawn (`amago.data.windows.subsequence`).
        source: of a sequence whose TD error is wanted.
    """

    view: StoreView
    row: int
    piece: tuple[int, int] = (0, 1)
    source: Source | None = None


class Sampling:
    """How the replay buffer chooses trajectories: the arguments of `amago.loading.DiskTrajDataset`.

    Args:
        sampling, half_life, balance, priority: see there.

    Attributes:
        priorities: of "priority".

    Raises:
        ValueError: one of them is unknown or out of range, or ``half_life`` does not go with ``sampling``.
    """

    def __init__(
        self,
        sampling: str = "uniform",
        half_life: float | None = None,
        balance: str | None = None,
        priority: tuple[float, float, float] = (0.9, 0.6, 0.9),
    ):
        if sampling not in SAMPLING:
            raise ValueError(f"sampling must be one of {', '.join(SAMPLING)}; got {sampling!r}")
        if balance is not None and balance not in BALANCE:
            raise ValueError(f"balance must be None or 'env_name', got {balance!r}")
        if sampling == "recent" and half_life is None:
            raise ValueError(
                "sampling='recent' needs half_life, the number of newer trajectories that halves a trajectory's chance"
            )
        if sampling != "recent" and half_life is not None:
            raise ValueError(f"half_life={half_life} goes with sampling='recent'; sampling is {sampling!r}")
        if half_life is not None and not (np.isfinite(half_life) and half_life > 0):
            raise ValueError(f"half_life counts trajectories and must be finite and more than 0, got {half_life}")
        for name, value in zip(("alpha", "beta", "eta"), priority):
            if not 0 <= value <= 1:
                raise ValueError(f"priority_{name} must be between 0 and 1, got {value}")
        self.sampling, self.half_life, self.balance = sampling, half_life, balance
        self.priorities = Priorities(*priority) if sampling == "priority" else None

    def check(self, settings: DatasetSettings) -> None:
        """Raise ValueError where several processes train, which would not know each other's priorities."""
        processes = getattr(getattr(settings.experiment, "accelerator", None), "num_processes", 1)
        if self.priorities is not None and processes > 1:
            raise ValueError(
                f"sampling='priority' is for one training process, and there are {processes}: choose another sampling"
            )

    @property
    def plain(self) -> bool:
        """Whether every trajectory is as likely as any other, so that no weights are needed."""
        return self.sampling == "uniform" and self.balance is None

    def chances(self, view: StoreView, indices: Indices | None, settings: DatasetSettings) -> Chances | PriorityChances:
        """The probabilities of the trajectories of a view.

        Args:
            indices: the trajectories to sample, ascending; None: all.
            settings: those that windows are cut with.
        """
        every = np.arange(len(view)) if indices is None else indices
        groups = [every] if self.balance is None else _by_env_name(view, every)
        if self.priorities is not None:
            if get_worker_info() is not None:
                raise RuntimeError(
                    "sampling='priority' learns from the updates of its own process, and a worker of a torch DataLoader does not see "
                    "them: use num_workers=0, or the loader of the Experiment (dloader_workers are threads)"
                )
            return self.priorities.chances(view, groups, settings)
        return Chances(view, [(group, self._weights(view, group, settings)) for group in groups if len(group)])

    def _weights(self, view: StoreView, group: Indices, settings: DatasetSettings) -> NDArray[np.float64]:
        if self.sampling == "length":
            lengths = view.lengths[group]
            return lengths / expected_transitions(
                lengths, settings.max_seq_len, settings.padded_sampling, settings.cut_short_trajectories
            )
        if self.half_life is not None:
            age = np.arange(len(group) - 1, -1, -1)  # indices ascend from the oldest to the newest
            return np.exp2(-age / self.half_life)
        return np.ones(len(group))

    def __str__(self) -> str:
        """In words, for summaries; empty for the default."""
        how = {"uniform": "", "length": ", by length", "priority": ", by TD error", "recent": f", half-life {self.half_life:g} trajectories"
               if self.half_life is not None else ""}[self.sampling]  # fmt: skip
        return how + (", environments in equal parts" if self.balance else "")


class Chances:
    """Draws trajectories of one view: a group of them uniformly, then one of the group by its weight.

    Args:
        groups: for each, the indices of its trajectories and their weights.
    """

    def __init__(self, view: StoreView, groups: list[tuple[Indices, NDArray[np.float64]]]):
        self.view = view
        self._groups = [(indices, SumTree(weights)) for indices, weights in groups]

    def draw(self, rng: np.random.Generator) -> tuple[int, tuple[int, int], None] | None:
        """The index of a random trajectory, all of it, and no source; None if there is none left."""
        groups = self._groups
        if not groups:
            return None
        indices, tree = groups[0] if len(groups) == 1 else groups[int(rng.integers(len(groups)))]
        return int(indices[tree.draw(rng)]), (0, 1), None

    def exclude(self, index: int) -> None:
        """Draw no more trajectories of the file that holds this one: it cannot be read.

        Without this, a file with nearly all of the weight would be drawn again and again until the store has a new view.
        """
        first, stop = self.view.file_range(index)
        for indices, tree in self._groups:
            low, high = np.searchsorted(indices, (first, stop))
            tree.set(np.arange(low, high), 0.0)
        self._groups = [(indices, tree) for indices, tree in self._groups if tree.total > 0]


def _by_env_name(view: StoreView, indices: Indices) -> list[Indices]:
    """The trajectories of each environment, by name."""
    ids, names = view.env_ids()
    return [indices[ids[indices] == names.index(name)] for name in sorted(names)]
