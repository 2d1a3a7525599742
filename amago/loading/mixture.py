"""A data set that samples from several others, in proportions that may change during training."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import gin
import gymnasium as gym
import numpy as np
from numpy.typing import NDArray

from amago.compat import datasets as compat
from amago.data.batch import RLData, global_rng
from amago.loading.dataset import DatasetSettings, RLDataset

_OPENED = -1
"""In the place of a training phase: a data set was ready when it was opened, before any collection."""


class _DatasetStatus(NamedTuple):
    """A data set of a mixture: its weights, and the training phase in which it became ready (None: it is not)."""

    dataset: RLDataset
    initial_weight: float
    final_weight: float
    epoch_ready: int | None


@gin.configurable(module="amago.loading")
class MixtureOfDatasets(RLDataset):
    """Draws each training sequence from one of several data sets, chosen by weight.

    Only data sets that are ready for training are sampled, with their weights scaled to sum to 1. The mixture is ready as soon
    as a data set with a positive weight is. Readiness is checked at the end of each collection phase, so that the proportions
    are constant within a training phase.

    With ``smooth_sudden_starts=S``, weights move linearly over S training phases, counted for each data set from the
    first in which it is ready: from its initial weight to its sampling weight. By default a data set that is ready when it is
    opened has its sampling weight from the beginning, and one that becomes ready later, such as a replay buffer that is empty
    at the start of the run, begins at 0. The first few rollouts in a replay buffer beside offline data are then not sampled again
    and again.

    Args:
        datasets: the data sets.
        sampling_weights: one number of 0 or more for each.
        initial_sampling_weights: weights at the start; requires ``smooth_sudden_starts``.
        smooth_sudden_starts: S, at least 1; default: sampling weights at once.
        dset_name: of the mixture.
        collect_into: index of the data set that stores new trajectories. Default: the only one that can. Only this data set
            may be edited, and `delete` deletes only its data.

    Raises:
        ValueError: wrong weights, or several data sets that can store new trajectories and no ``collect_into``.
    """

    def __init__(
        self,
        datasets: Sequence[RLDataset],
        sampling_weights: Sequence[float],
        initial_sampling_weights: Sequence[float] | None = None,
        smooth_sudden_starts: int | None = None,
        dset_name: str | None = None,
        collect_into: int | None = None,
    ):
        super().__init__(dset_name)
        self.datasets = list(datasets)
        if not self.datasets:
            raise ValueError("datasets must hold at least one data set, got none")
        for i, d in enumerate(self.datasets):
            if not isinstance(d, RLDataset):
                raise ValueError(f"datasets[{i}] must be an amago.loading.RLDataset (an instance), got {d!r}")
        self.sampling_weights = self._checked("sampling_weights", sampling_weights)
        if smooth_sudden_starts is not None and not smooth_sudden_starts >= 1:
            raise ValueError(
                f"smooth_sudden_starts must be a number of training phases of at least 1, got {smooth_sudden_starts!r}"
            )
        if initial_sampling_weights is not None and smooth_sudden_starts is None:
            raise ValueError(
                f"initial_sampling_weights={list(initial_sampling_weights)} ask for smooth_sudden_starts, the number of epochs in "
                "which the weights move to sampling_weights"
            )
        self.smooth_sudden_starts = smooth_sudden_starts
        self.initial_sampling_weights = (
            None if initial_sampling_weights is None else self._checked("initial_sampling_weights", initial_sampling_weights)
        )
        if collect_into is not None and not 0 <= collect_into < len(self.datasets):
            raise ValueError(f"collect_into must be an index of datasets, 0 to {len(self.datasets) - 1}, got {collect_into}")
        self.collect_into = collect_into
        self._phase = 0  # training phases so far
        self._ready_since: list[int | None] = [None] * len(self.datasets)  # training phase, or `_OPENED`
        self._chances: NDArray[np.float64] | None = None

    def _checked(self, name: str, weights: Sequence[float]) -> NDArray[np.float64]:
        values = [float(w) for w in weights]
        if len(values) != len(self.datasets):
            raise ValueError(f"{name} has {len(values)} numbers, but there are {len(self.datasets)} datasets")
        if not all(math.isfinite(w) and w >= 0 for w in values) or sum(values) == 0:
            raise ValueError(f"{name} must be finite numbers of 0 or more, and not all 0; got {values}")
        return np.array(values)

    # ---- collection --------------------------------------------------------------------------------------------------

    @property
    def collecting(self) -> int | None:
        """Index of the data set that stores new trajectories."""
        if self.collect_into is not None:
            return self.collect_into
        takers = [i for i, d in enumerate(self.datasets) if d.save_new_trajs_to is not None]
        if len(takers) > 1:
            raise ValueError(f"datasets {takers} would all take new trajectories; say which with collect_into")
        return takers[0] if takers else None

    @property
    def save_new_trajs_to(self) -> str | None:
        i = self.collecting
        return None if i is None else self.datasets[i].save_new_trajs_to

    def delete(self, **options: bool) -> None:
        """Delete the data of the data set that receives new trajectories (`RLDataset.delete`); the others stay."""
        i = self.collecting
        if i is not None:
            self.datasets[i].delete(**options)

    def refused_files(self) -> dict[str, str]:
        return {path: reason for d in self.datasets for path, reason in d.refused_files().items()}

    @property
    def collected_steps(self) -> int | None:
        i = self.collecting
        return None if i is None else self.datasets[i].collected_steps

    # ---- preparation -------------------------------------------------------------------------------------------------

    def configure(self, settings: DatasetSettings | None = None, **values: Any) -> None:
        super().configure(settings, **values)
        collecting = self.collecting
        for i, dataset in enumerate(self.datasets):
            compat.configure(dataset, replace(self.settings, has_edit_rights=self.has_edit_rights and i == collecting))
        self._update_weights(_OPENED if self._phase == 0 else self._phase)

    def check_spaces(self, obs_space: gym.spaces.Dict, action_space: gym.Space[Any]) -> None:
        super().check_spaces(obs_space, action_space)
        for dataset in self.datasets:
            dataset.check_spaces(obs_space, action_space)

    # ---- weights -----------------------------------------------------------------------------------------------------

    def _update_weights(self, phase: int) -> None:
        """Check which data sets are ready, and set the proportions until the next call.

        Args:
            phase: first training phase of those that have become ready, or `_OPENED`.
        """
        for i, dataset in enumerate(self.datasets):
            if not dataset.ready_for_training:
                self._ready_since[i] = None
            elif self._ready_since[i] is None:
                self._ready_since[i] = phase
        weights = np.array([self._weight(i) for i in range(len(self.datasets))])
        if weights.sum() == 0:  # the weights of all ready data sets still are at 0
            weights = self.sampling_weights * [since is not None for since in self._ready_since]
        self._chances = weights / weights.sum() if weights.sum() > 0 else None

    def _weight(self, i: int) -> float:
        since, final = self._ready_since[i], float(self.sampling_weights[i])
        if since is None:
            return 0.0
        if self.smooth_sudden_starts is None:
            return final
        if self.initial_sampling_weights is not None:
            first = float(self.initial_sampling_weights[i])
        else:
            first = final if since == _OPENED else 0.0
        done = min(1.0, (self._phase - max(0, since)) / self.smooth_sudden_starts)
        return first + (final - first) * done

    def update_dset_weights(self, epoch: int) -> None:
        """Check which data sets are ready, and set the proportions of a training phase.

        Args:
            epoch: number of the phase, from 0.
        """
        self._phase = int(epoch)
        self._update_weights(self._phase)

    @property
    def all_datasets(self) -> list[RLDataset]:
        """All data sets, ready or not."""
        return self.datasets

    @property
    def _dsets_status(self) -> list[_DatasetStatus]:
        initial = self.initial_sampling_weights if self.initial_sampling_weights is not None else self.sampling_weights
        ready = [None if since is None else max(0, since) for since in self._ready_since]
        return [_DatasetStatus(*x) for x in zip(self.datasets, initial.tolist(), self.sampling_weights.tolist(), ready)]

    @property
    def _available_datasets(self) -> list[tuple[RLDataset, float]]:
        """The data sets that are drawn from, with their probabilities."""
        return [(d, w) for d, w in zip(self.datasets, self.current_weights) if w > 0]

    @property
    def current_weights(self) -> list[float]:
        """The probability of each data set in this epoch; all 0 if none is ready."""
        return [0.0] * len(self.datasets) if self._chances is None else self._chances.tolist()

    @property
    def ready_for_training(self) -> bool:
        return self._chances is not None

    @property
    def can_become_ready(self) -> bool:
        return any(d.can_become_ready for d in self.datasets)

    def sample_random_trajectory(self, rng: np.random.Generator | None = None) -> RLData:
        chances = self._chances
        if chances is None:
            raise RuntimeError("none of the datasets in this mixture is ready for training; collect first, or wait")
        possible = np.flatnonzero(chances)
        stream = global_rng() if rng is None else rng
        i = np.searchsorted(np.cumsum(chances[possible])[:-1], stream.random(), side="right")
        dataset = self.datasets[possible[i]]
        return dataset.sample_random_trajectory() if rng is None else compat.draw(dataset, rng)

    # ---- epochs ------------------------------------------------------------------------------------------------------

    def on_end_of_collection(self, experiment: Any = None) -> dict[str, float]:
        metrics = self._gathered([compat.collection_ended(d) for d in self.datasets])
        self._update_weights(self._phase)
        return metrics | self._sampling_metrics

    def on_end_of_training(self) -> dict[str, float]:
        self._phase += 1
        return self._gathered([d.on_end_of_training() for d in self.datasets])

    def describe(self) -> str:
        return " + ".join(d.describe() for d in self.datasets)

    def close(self) -> None:
        for data in self.datasets:
            data.close()

    def _gathered(self, metrics: list[dict[str, float]]) -> dict[str, float]:
        return {f"{label} {name}": value for label, m in zip(self._labels, metrics) for name, value in m.items()}

    @property
    def _labels(self) -> list[str]:
        """The names of the data sets; those that have the same are numbered."""
        names = [d.dset_name for d in self.datasets]
        return [f"{name} {names[:i].count(name) + 1}" if names.count(name) > 1 else name for i, name in enumerate(names)]

    @property
    def _sampling_metrics(self) -> dict[str, float]:
        return {f"{label} Current Sample Weight": w for label, w in zip(self._labels, self.current_weights)}

    def state_dict(self) -> dict[str, Any]:
        return {
            "version": 2,
            "phase": self._phase,
            "ready_since": list(self._ready_since),
            "datasets": [d.state_dict() for d in self.datasets],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if len(state["datasets"]) != len(self.datasets):
            raise ValueError(f"the saved mixture had {len(state['datasets'])} datasets, this one has {len(self.datasets)}")
        self._phase, self._ready_since = int(state["phase"]), list(state["ready_since"])
        if "version" not in state:  # had 0 for what was ready at the first training phase, whose weight was not smoothed
            self._ready_since = [_OPENED if since == 0 else since for since in self._ready_since]
        for dataset, saved in zip(self.datasets, state["datasets"]):
            dataset.load_state_dict(saved)
        if hasattr(self, "settings"):
            self._update_weights(self._phase)
