"""The probabilities with which trajectories and sequences of the replay buffer are drawn.

TD errors: Schaul et al. 2016, arXiv 1511.05952; R2D2, Kapturowski et al. 2019.
"""

from __future__ import annotations

import base64
import threading
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray
from torch.utils.data import get_worker_info

from amago.data.batch import expected_transitions, pieces_of
from amago.loading.dataset import DatasetSettings
from amago.store import StoreView

SAMPLING = {"uniform": "", "length": ", by length", "priority": ", by TD error"}
"""The rules by which trajectories are drawn, and their words in summaries."""
SMALLEST = 1e-6
"""Added to every priority, so that a sequence without error is still drawn."""
NOTHING_LEARNED = 0.1
"""Factor of the priority of a sequence without a finite TD error; another window of it may have a loss."""
Indices = NDArray[np.int64]


class SumTree:
    """Weights of n indices; drawing one, or changing one, takes O(log n) additions.

    Every inner node is the sum of its two children, computed anew after each change. Therefore the tree is a function of the
    weights alone, not of the order in which they were set: a tree that is rebuilt from saved weights draws the same indices as
    the old one.

    Args:
        weights: (n,), finite and at least 0.
    """

    def __init__(self, weights: NDArray[np.float64]):
        self._leaves = leaves = 1 << max(0, len(weights) - 1).bit_length()  # a power of two
        self._nodes = nodes = np.zeros(2 * leaves)  # the root is node 1, the children of node i are 2 i and 2 i + 1
        nodes[leaves : leaves + len(weights)] = weights
        while leaves > 1:
            leaves //= 2
            np.add(nodes[2 * leaves : 4 * leaves : 2], nodes[2 * leaves + 1 : 4 * leaves : 2], out=nodes[leaves : 2 * leaves])

    @property
    def total(self) -> float:
        """The sum of all weights."""
        return float(self._nodes[1])

    def __getitem__(self, index: int) -> float:
        return self._nodes.item(self._leaves + index)

    def set(self, indices: Indices, weights: ArrayLike) -> None:
        """Change the weights, (k,), of the indices (k,); of an index that comes twice, the last counts."""
        self._nodes[self._leaves + indices] = weights
        changed = np.unique((self._leaves + indices) >> 1)
        while changed.any():  # the parent of the root is 0
            self._nodes[changed] = self._nodes[2 * changed] + self._nodes[2 * changed + 1]
            changed = np.unique(changed >> 1)

    def draw(self, rng: np.random.Generator) -> int:
        """A random index, with probability weight / `total`; takes one number of ``rng``. Never one of weight 0."""
        item: Callable[[int], float] = self._nodes.item
        node, mass = 1, rng.random() * item(1)
        while node < self._leaves:
            node *= 2
            left = item(node)
            if mass >= left and item(node + 1) > 0:  # rounding may leave a little mass where nothing is on the right
                mass -= left
                node += 1
        return node - self._leaves


class Source(NamedTuple):
    """The origin of a training sequence: sequence number ``unit`` of a file, and the object that receives its TD error.

    Attributes:
        weight: the importance weight of its losses, P^-beta if its group has drawn it with probability P, over the mean of
            these weights in the group: they are 1 on average, so that neither balance nor the weights of a mixture change.
    """

    owner: Sampling
    file: str
    unit: int
    weight: float


class Draw(NamedTuple):
    """Trajectory number ``row`` of a view, to read a sequence of.

    Attributes:
        piece: the part of the range of starts from which the window's is drawn (`amago.data.batch.subsequence`).
        source: of the sequence, if its TD error is wanted.
    """

    view: StoreView
    row: int
    piece: tuple[int, int] = (0, 1)
    source: Source | None = None


class Sampling:
    """The replay buffer's rule for drawing trajectories, and the priorities of its sequences.

    The units of "priority" are sequences of ``max_seq_len`` steps: a trajectory of T transitions has T / ``max_seq_len`` of
    them, rounded up, and the k-th is a window that starts in the k-th part of the possible starts. One that was not trained on
    yet has the largest priority so far.

    Readers may draw while the training thread sets priorities: sums may then be a moment old, which shifts a probability a
    little. Errors that arrive while the probabilities of a new view are computed wait for them.

    Args:
        sampling, balance, priority: the arguments of `amago.loading.DiskTrajDataset`; ``priority`` is (alpha, beta, eta).

    Attributes:
        lock: held while probabilities are computed and priorities change.

    Raises:
        ValueError: one of them is unknown or out of range.
    """

    def __init__(
        self,
        sampling: str = "uniform",
        balance: str | None = None,
        priority: tuple[float, float, float] = (0.9, 0.6, 0.9),
    ):
        if sampling not in SAMPLING:
            raise ValueError(f"sampling must be one of {', '.join(SAMPLING)}; got {sampling!r}")
        if balance not in (None, "env_name"):
            raise ValueError(f"balance must be None or 'env_name', got {balance!r}")
        for name, value in zip(("alpha", "beta", "eta"), priority):
            if not 0 <= value <= 1:
                raise ValueError(f"priority_{name} must be between 0 and 1, got {value}")
        self.sampling, self.balance, self.by_priority = sampling, balance, sampling == "priority"
        self.plain = sampling == "uniform" and balance is None  # no weights are needed
        self.alpha, self.beta, self.eta = priority
        self.lock = threading.RLock() if self.by_priority else nullcontext()  # datasets without priorities can be pickled
        self.largest = 1.0
        self._saved: dict[str, NDArray[np.float32]] = {}  # of files, until there is a view
        self._now: Chances | None = None

    def check(self, settings: DatasetSettings) -> None:
        """Raise ValueError where several processes train, because their priorities are not shared."""
        processes = 1 if settings.experiment is None else settings.experiment.accelerator.num_processes
        if self.by_priority and processes > 1:
            raise ValueError(
                f"sampling='priority' is for one training process, and there are {processes}: choose another sampling"
            )

    def chances(self, view: StoreView, indices: Indices, settings: DatasetSettings) -> Chances:
        """The probabilities of the trajectories of a view; from now on, TD errors change these.

        Args:
            indices: the trajectories to sample, ascending.
            settings: for cutting windows.
        """
        groups = [indices] if self.balance is None else _by_env_name(view, indices)
        cut = settings.max_seq_len, settings.padded_sampling, settings.cut_short_trajectories
        if not self.by_priority:
            lengths = view.lengths
            weights = lengths / expected_transitions(lengths, *cut) if self.sampling == "length" else np.ones(len(view))
            return Chances(self, view, groups, np.ones(len(view), np.int64), weights, {})
        if get_worker_info() is not None:
            raise RuntimeError(
                "sampling='priority' learns from the updates of its own process, and a worker of a torch DataLoader does not see "
                "them: use num_workers=0, or the loader of the Experiment (dloader_workers are threads)"
            )
        with self.lock:
            pieces = pieces_of(view.lengths, *cut)
            priorities = np.full(int(pieces.sum()), self.largest, np.float32)
            self._now, self._saved = Chances(self, view, groups, pieces, priorities, self._by_file()), {}
            return self._now

    def report(self, sources: list[Source], most: NDArray[np.float32], mean: NDArray[np.float32]) -> None:
        """Take the TD errors of sequences that were trained on.

        Args:
            sources: of B sequences.
            most, mean: (B,) maximum and mean of the TD error's magnitude over the steps of each; NaN where none had a loss. A
                number that is not finite lowers the priority (`NOTHING_LEARNED`).
        """
        learned = np.isfinite(most) & np.isfinite(mean)
        most, mean = np.where(learned, most, 0.0), np.where(learned, mean, 0.0)
        priorities = (self.eta * most + (1 - self.eta) * mean + SMALLEST).astype(np.float32)
        with self.lock:
            self.largest = max(self.largest, float(priorities[learned].max(initial=0.0)))
            if self._now is not None:
                self._now.set(sources, np.where(learned, priorities, np.nan))

    def _by_file(self) -> dict[str, NDArray[np.float32]]:
        return self._saved if self._now is None else self._now.by_file()

    def state_dict(self) -> dict[str, Any]:
        """The priorities of all files, as JSON types."""
        with self.lock:
            found = self._by_file()
            every = np.concatenate([np.zeros(0, np.float32), *found.values()]).astype("<f4")
            return {
                "files": list(found), "sequences": [len(p) for p in found.values()], "largest": self.largest,
                "priorities": base64.b64encode(every.tobytes()).decode(),
            }  # fmt: skip

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the priorities; sequences of other files begin with the largest."""
        every = np.frombuffer(base64.b64decode(state["priorities"]), "<f4").astype(np.float32)
        ends = np.cumsum(state["sequences"], dtype=np.int64)
        if sum(state["sequences"]) != len(every) or len(ends) != len(state["files"]):
            raise ValueError(f"there are {len(every)} saved priorities, and should be {sum(state['sequences'])}")
        self._saved = dict(zip(state["files"], np.split(every, ends[:-1]))) if len(ends) else {}
        self.largest, self._now = float(state["largest"]), None

    def __str__(self) -> str:
        """A description in words, for summaries; empty for the default."""
        return SAMPLING[self.sampling] + (", environments in equal parts" if self.balance else "")


class Chances:
    """Draw units of one view: a group of trajectories uniformly, then one of its units with probability p^alpha / sum p^alpha.
    The units are trajectories, or with priorities, their sequences.

    Args:
        owner: its alpha and beta count with priorities alone.
        groups: the trajectories of each, ascending.
        pieces: units of each trajectory of the view.
        weights: p of each unit.
        known: the priorities of files, in place of ``weights``; of another number of sequences than now, they are left out.
    """

    def __init__(
        self,
        owner: Sampling,
        view: StoreView,
        groups: list[Indices],
        pieces: Indices,
        weights: NDArray[Any],
        known: Mapping[str, NDArray[np.float32]],
    ):
        self.view, self._owner, self._pieces, self._weights = view, owner, pieces, weights
        self._first = np.concatenate([np.zeros(1, np.int64), np.cumsum(pieces)])  # the unit of each trajectory
        self._files = {name: (int(self._first[i]), int(self._first[j])) for name, i, j in view.files()}
        for name, (low, high) in self._files.items():
            if name in known and len(known[name]) == high - low:
                weights[low:high] = known[name]
        self._group, self._place = np.full((2, len(weights)), -1, np.int64)  # of each unit
        self._groups: list[tuple[Indices, SumTree, SumTree]] = []  # units, their weights, and these to the power of 1 - beta
        for trajectories in groups:
            units = np.flatnonzero(np.repeat(np.isin(np.arange(len(view)), trajectories), pieces))
            self._group[units], self._place[units] = len(self._groups), np.arange(len(units))
            powers = self._powers(weights[units])
            self._groups.append((units, SumTree(powers), SumTree(self._corrected(powers))))

    def _powers(self, weights: NDArray[Any]) -> NDArray[np.float64]:
        return np.power(weights.astype(np.float64), self._owner.alpha) if self._owner.by_priority else weights

    def _corrected(self, powers: NDArray[np.float64]) -> NDArray[np.float64]:
        return np.where(powers > 0, np.power(powers, 1 - self._owner.beta), 0.0)

    def draw(self, rng: np.random.Generator) -> Draw:
        """A random unit."""
        units, tree, corrected = self._groups[int(rng.integers(len(self._groups))) if len(self._groups) > 1 else 0]
        place = tree.draw(rng)
        unit = int(units[place])
        if not self._owner.by_priority:
            return Draw(self.view, unit)
        row = int(np.searchsorted(self._first, unit, side="right")) - 1
        weight = tree[place] ** -self._owner.beta * tree.total / corrected.total
        name = self.view.file_of(row)
        source = Source(self._owner, name, unit - self._files[name][0], weight)
        return Draw(self.view, row, (unit - int(self._first[row]), int(self._pieces[row])), source)

    def set(self, sources: list[Source], priorities: NDArray[np.float32]) -> None:
        """Change the priorities of sequences, or where they are NaN lower them; those whose file is not in this view are left alone."""
        found: dict[int, float] = {}
        for source, p in zip(sources, priorities):
            if source.file not in self._files:
                continue
            at = self._files[source.file][0] + source.unit
            before = found.get(at, float(self._weights[at]))
            found[at] = max(NOTHING_LEARNED * before, SMALLEST) if np.isnan(p) else float(p)
        units, given = np.array(list(found), np.int64), np.array(list(found.values()), np.float32)
        self._weights[units] = given
        powers = self._powers(given)
        for g, (_, tree, corrected) in enumerate(self._groups):
            own = self._group[units] == g
            tree.set(self._place[units[own]], powers[own])
            corrected.set(self._place[units[own]], self._corrected(powers[own]))

    def by_file(self) -> dict[str, NDArray[np.float32]]:
        """The priorities of the sequences of each file."""
        return {name: self._weights[low:high] for name, (low, high) in self._files.items()}


def _by_env_name(view: StoreView, indices: Indices) -> list[Indices]:
    """The trajectories of each environment, by name."""
    ids, names = view.env_ids()
    found = [indices[ids[indices] == names.index(name)] for name in sorted(names)]
    return [group for group in found if len(group)]
