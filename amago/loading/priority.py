"""Sequences drawn by their TD errors (Schaul et al. 2016, arXiv 1511.05952; R2D2, Kapturowski et al. 2019)."""

from __future__ import annotations

import base64
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from amago.data.windows import pieces_of
from amago.loading.sum_tree import SumTree
from amago.store import StoreView

SMALLEST = 1e-6
"""Added to every priority, so that a sequence without error is still drawn."""
Indices = NDArray[np.int64]


class Source(NamedTuple):
    """Where a training sequence comes from, and how much its losses count.

    Attributes:
        owner: to whom its TD error is told.
        file, unit: the file, and the number of the sequence in it.
        weight: the importance weight, (N P)^-beta, for N sequences of which this one is drawn with probability P.
    """

    owner: Priorities
    file: str
    unit: int
    weight: float


class Priorities:
    """The priorities of the sequences in a buffer, for all views of it.

    The units are sequences of ``max_seq_len`` steps: a trajectory of T transitions has T / ``max_seq_len`` of them, rounded up, and the
    k-th is a window that starts in the k-th part of the possible starts. One that was not trained on yet has the largest priority so far.

    Readers may draw while the training thread sets priorities: sums may then be a moment old, which shifts a probability a little.

    Args:
        alpha, beta, eta: see `amago.loading.DiskTrajDataset`.
    """

    def __init__(self, alpha: float, beta: float, eta: float):
        self.alpha, self.beta, self.eta = alpha, beta, eta
        self.largest = 1.0
        self._saved: dict[str, NDArray[np.float32]] = {}  # of files, until there is a view
        self._now: PriorityChances | None = None

    def chances(self, view: StoreView, groups: list[Indices], settings: Any) -> PriorityChances:
        """The probabilities of the sequences of a view, which are those to update from now on."""
        self._now = PriorityChances(self, view, groups, settings, self._by_file())
        self._saved = {}
        return self._now

    def report(self, sources: list[Source], most: NDArray[np.float32], mean: NDArray[np.float32]) -> None:
        """Take the TD errors of sequences that were trained on.

        Args:
            sources: of B sequences.
            most, mean: (B,) maximum and mean of the TD error's magnitude over the steps of each; not finite: the priority stays.
        """
        if self._now is None:
            return
        finite = np.flatnonzero(np.isfinite(most) & np.isfinite(mean))
        priorities = (self.eta * most[finite] + (1 - self.eta) * mean[finite] + SMALLEST).astype(np.float32)
        self.largest = max(self.largest, float(priorities.max(initial=0.0)))
        self._now.set([sources[i] for i in finite], priorities)

    def _by_file(self) -> dict[str, NDArray[np.float32]]:
        return self._saved if self._now is None else self._now.by_file()

    def state_dict(self) -> dict[str, Any]:
        """The priorities of all files, as JSON types."""
        found = self._by_file()
        every = np.concatenate([np.zeros(0, np.float32), *found.values()]).astype("<f4")
        return {
            "files": list(found), "sequences": [len(p) for p in found.values()], "largest": self.largest,
            "priorities": base64.b64encode(every.tobytes()).decode(),
        }  # fmt: skip

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the priorities; those of other files begin with the largest."""
        every = np.frombuffer(base64.b64decode(state["priorities"]), "<f4").astype(np.float32)
        ends = np.cumsum(state["sequences"], dtype=np.int64)
        if (ends[-1] if len(ends) else 0) != len(every) or len(ends) != len(state["files"]):
            raise ValueError(f"there are {len(every)} saved priorities, and should be {ends[-1] if len(ends) else 0}")
        self._saved = dict(zip(state["files"], np.split(every, ends[:-1]))) if len(ends) else {}
        self.largest, self._now = float(state["largest"]), None


class PriorityChances:
    """Draws sequences of one view: a group of trajectories uniformly, then one of its sequences with probability p^alpha / sum p^alpha.

    Args:
        groups: the trajectories of each, ascending.
        settings: `amago.loading.DatasetSettings`, that windows are cut with.
        known: the priorities of files; of another number of sequences than now, they are left out.
    """

    def __init__(
        self, owner: Priorities, view: StoreView, groups: list[Indices], settings: Any, known: dict[str, NDArray[np.float32]]
    ):
        self.view, self._owner = view, owner
        cut = settings.max_seq_len, settings.padded_sampling, settings.cut_short_trajectories
        self._pieces = pieces_of(view.lengths, *cut)
        self._first = np.concatenate([np.zeros(1, np.int64), np.cumsum(self._pieces)])  # the unit of each trajectory
        self._priority = np.full(self._first[-1], owner.largest, np.float32)
        self._files = {name: (int(self._first[i]), int(self._first[j])) for name, i, j in view.files()}
        for name, (low, high) in self._files.items():
            if name in known and len(known[name]) == high - low:
                self._priority[low:high] = known[name]
        self._names = list(self._files)
        self._file_starts = np.array([low for low, _ in self._files.values()], np.int64)
        self._group, self._place = np.full((2, len(self._priority)), -1, np.int64)  # of each unit
        self._groups: list[tuple[Indices, SumTree]] = []
        for trajectories in groups:
            chosen = np.zeros(len(view), bool)
            chosen[trajectories] = True
            units = np.flatnonzero(np.repeat(chosen, self._pieces))
            self._group[units], self._place[units] = len(self._groups), np.arange(len(units))
            self._groups.append((units, SumTree(self._powers(self._priority[units]))))
        self._count = sum(len(units) for units, _ in self._groups)

    def _powers(self, priorities: NDArray[np.float32]) -> NDArray[np.float64]:
        return np.power(priorities.astype(np.float64), self._owner.alpha)

    def draw(self, rng: np.random.Generator) -> tuple[int, tuple[int, int], Source] | None:
        """A random sequence: its trajectory, its piece (`amago.data.windows.subsequence`) and its source; None if there is none left."""
        ready = [group for group in self._groups if group[1].total > 0]
        if not ready:
            return None
        units, tree = ready[int(rng.integers(len(ready)))] if len(ready) > 1 else ready[0]
        place = tree.draw(rng)
        unit, chance = int(units[place]), tree[place] / tree.total / len(ready)
        index = int(np.searchsorted(self._first, unit, side="right")) - 1
        file = int(np.searchsorted(self._file_starts, unit, side="right")) - 1
        weight = float(self._count * chance) ** -self._owner.beta
        source = Source(self._owner, self._names[file], unit - int(self._file_starts[file]), weight)
        return index, (unit - int(self._first[index]), int(self._pieces[index])), source

    def exclude(self, index: int) -> None:
        """Draw no more sequences of the file that holds this trajectory: it cannot be read."""
        first, stop = self.view.file_range(index)
        self._weigh(np.arange(self._first[first], self._first[stop]), np.zeros(1))

    def set(self, sources: list[Source], priorities: NDArray[np.float32]) -> None:
        """Change the priorities of sequences; those whose file is not in this view, or cannot be read, are left alone."""
        known = [(self._files[s.file][0] + s.unit, p) for s, p in zip(sources, priorities) if s.file in self._files]
        found = {
            at: p for at, p in known if self._group[at] >= 0 and self._groups[self._group[at]][1][int(self._place[at])] > 0
        }
        units, given = np.array(list(found), np.int64), np.array(list(found.values()), np.float32)
        self._priority[units] = given
        self._weigh(units, self._powers(given))

    def _weigh(self, units: Indices, weight: NDArray[np.float64]) -> None:
        for g, (_, tree) in enumerate(self._groups):
            own = self._group[units] == g
            tree.set(self._place[units[own]], np.broadcast_to(weight, units.shape)[own])

    def by_file(self) -> dict[str, NDArray[np.float32]]:
        """The priorities of the sequences of each file."""
        return {name: self._priority[low:high] for name, (low, high) in self._files.items()}
