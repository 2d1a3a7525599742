"""A dataset that samples from several others, in proportions that may change during training."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import gin
import gymnasium as gym
import numpy as np
from numpy.typing import NDArray

from amago.data.batch import RLData, global_rng
from amago.loading.dataset import DatasetSettings, RLDataset, collection_ended, draw


@dataclass
class _DatasetStatus:
    """A dataset of a mixture: its weights, and the training phase in which it became ready (None: it is not)."""

    dataset: RLDataset
    initial_weight: float
    final_weight: float
    epoch_ready: int | None = None


@gin.configurable(module="amago.loading")
class MixtureOfDatasets(RLDataset):
    """Draw each training sequence from one of several datasets, chosen by weight.

    Only datasets that are ready for training are sampled, with their weights scaled to sum to 1. The mixture is ready as soon
    as a dataset with a positive weight is. Readiness is checked at the end of each collection phase, so that the proportions
    are constant within a training phase.

    With ``smooth_sudden_starts=S``, weights move linearly over S training phases, counted for each dataset from the
    first in which it is ready: from its initial weight to its sampling weight. By default a dataset that is ready when it is
    opened has its sampling weight from the beginning, and one that becomes ready later, such as a replay buffer that is empty
    at the start of the run, begins at 0. The first few rollouts in a replay buffer beside offline data are then not sampled
    again and again.

    Args:
        datasets: the datasets.
        sampling_weights: one number of 0 or more for each.
        initial_sampling_weights: weights at the start; requires ``smooth_sudden_starts``.
        smooth_sudden_starts: S, at least 1; default: sampling weights at once.
        dset_name: of the mixture.
        collect_into: index of the dataset that stores new trajectories. Default: the only one that can. Only this dataset
            may be edited, and `delete` deletes only its data.

    Raises:
        ValueError: wrong weights, or several datasets that can store new trajectories and no ``collect_into``.
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
        if not datasets:
            raise ValueError("datasets must hold at least one dataset, got none")
        for i, d in enumerate(datasets):
            if not isinstance(d, RLDataset):
                raise ValueError(f"datasets[{i}] must be an amago.loading.RLDataset (an instance), got {d!r}")
        self.sampling_weights = _checked("sampling_weights", sampling_weights, len(datasets))
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
        first = last = self.sampling_weights
        if initial_sampling_weights is not None:
            first = _checked("initial_sampling_weights", initial_sampling_weights, len(datasets))
        self.initial_sampling_weights = None if initial_sampling_weights is None else first
        self._dsets_status = [_DatasetStatus(*status) for status in zip(datasets, first.tolist(), last.tolist())]
        self._available_datasets: list[tuple[RLDataset, float]] = []  # the ready ones, with their probabilities
        if collect_into is not None and not 0 <= collect_into < len(datasets):
            raise ValueError(f"collect_into must be an index of datasets, 0 to {len(datasets) - 1}, got {collect_into}")
        self.collect_into = collect_into
        self._phase = 0  # training phases so far

    @property
    def all_datasets(self) -> list[RLDataset]:
        """All datasets, ready or not."""
        return [status.dataset for status in self._dsets_status]

    datasets = all_datasets

    # ---- collection --------------------------------------------------------------------------------------------------

    @property
    def collecting(self) -> int | None:
        """Index of the dataset that stores new trajectories."""
        if self.collect_into is not None:
            return self.collect_into
        takers = [i for i, d in enumerate(self.datasets) if d.save_new_trajs_to is not None]
        if len(takers) > 1:
            raise ValueError(f"datasets {takers} would all take new trajectories; say which with collect_into")
        return takers[0] if takers else None

    @property
    def save_new_trajs_to(self) -> str | None:
        return None if self.collecting is None else self.datasets[self.collecting].save_new_trajs_to

    def delete(self, **options: bool) -> None:
        """Delete the data of the dataset that receives new trajectories (`RLDataset.delete`); the others stay."""
        if self.collecting is not None:
            self.datasets[self.collecting].delete(**options)

    def refused_files(self) -> dict[str, str]:
        return {path: reason for d in self.datasets for path, reason in d.refused_files().items()}

    @property
    def collected_steps(self) -> int | None:
        return None if self.collecting is None else self.datasets[self.collecting].collected_steps

    # ---- preparation -------------------------------------------------------------------------------------------------

    def configure(self, settings: DatasetSettings | None = None, **values: object) -> None:
        super().configure(settings, **values)
        collecting, experiment = self.collecting, self.settings.experiment
        for i, dataset in enumerate(self.datasets):
            overridden = type(dataset).configure_from_experiment is not RLDataset.configure_from_experiment
            if overridden and experiment is not None:
                dataset.configure_from_experiment(experiment)
            else:
                dataset.configure(replace(self.settings, has_edit_rights=self.has_edit_rights and i == collecting))
        self._update_weights(opened=self._phase == 0)

    def check_spaces(self, obs_space: gym.spaces.Dict, action_space: gym.Space[Any]) -> None:
        super().check_spaces(obs_space, action_space)
        for dataset in self.datasets:
            dataset.check_spaces(obs_space, action_space)

    # ---- weights -----------------------------------------------------------------------------------------------------

    def _update_weights(self, opened: bool = False) -> None:
        """Check which datasets are ready, and set the proportions until the next call.

        Args:
            opened: those that have become ready were so when they were opened, before any collection.
        """
        for status in self._dsets_status:
            if not status.dataset.ready_for_training:
                status.epoch_ready = None
            elif status.epoch_ready is None:
                status.epoch_ready = self._phase
                if self.initial_sampling_weights is None:
                    status.initial_weight = status.final_weight if opened else 0.0
        ready = [status for status in self._dsets_status if status.epoch_ready is not None]
        last = np.array([status.final_weight for status in ready])
        weights = last
        if self.smooth_sudden_starts is not None:
            first, since = np.array([(status.initial_weight, status.epoch_ready) for status in ready]).reshape(-1, 2).T
            weights = first + (last - first) * np.minimum(1.0, (self._phase - since) / self.smooth_sudden_starts)
        if not weights.any():  # the weights of all ready datasets still are at 0
            weights = last
        found = zip(ready, (weights / (weights.sum() or 1.0)).tolist())
        self._available_datasets = [(status.dataset, weight) for status, weight in found if weight > 0]

    def update_dset_weights(self, epoch: int) -> None:
        """Check which datasets are ready, and set the proportions of training phase ``epoch``, from 0."""
        self._phase = int(epoch)
        self._update_weights()

    @property
    def current_weights(self) -> list[float]:
        """The probability of each dataset in this epoch; all 0 if none is ready."""
        rest, weights = list(self._available_datasets), []
        for dataset in self.datasets:  # one may be in the list twice
            found = next((i for i, (other, _) in enumerate(rest) if other is dataset), None)
            weights.append(0.0 if found is None else rest.pop(found)[1])
        return weights

    @property
    def ready_for_training(self) -> bool:
        return bool(self._available_datasets)

    @property
    def can_become_ready(self) -> bool:
        return any(d.can_become_ready for d in self.datasets)

    def sample_random_trajectory(self, rng: np.random.Generator | None = None) -> RLData:
        if not (available := self._available_datasets):
            raise RuntimeError("none of the datasets in this mixture is ready for training; collect first, or wait")
        stream = global_rng() if rng is None else rng
        ends = np.cumsum([weight for _, weight in available])
        dataset, _ = available[np.searchsorted(ends[:-1], stream.random() * ends[-1], side="right")]
        return dataset.sample_random_trajectory() if rng is None else draw(dataset, rng)

    # ---- epochs ------------------------------------------------------------------------------------------------------

    def on_end_of_collection(self, experiment: object = None) -> dict[str, float]:
        metrics = self._by_dataset([collection_ended(d) for d in self.datasets])
        self._update_weights()
        return metrics | self._sampling_metrics

    def on_end_of_training(self) -> dict[str, float]:
        self._phase += 1
        return self._by_dataset([d.on_end_of_training() for d in self.datasets])

    def describe(self) -> str:
        return " + ".join(d.describe() for d in self.datasets)

    def close(self) -> None:
        for data in self.datasets:
            data.close()

    def _by_dataset(self, metrics: list[dict[str, float]]) -> dict[str, float]:
        return {f"{label} {name}": value for label, m in zip(self._labels, metrics) for name, value in m.items()}

    @property
    def _labels(self) -> list[str]:
        """The names of the datasets; equal names are numbered, and all names where that is not enough to tell them apart."""
        names = [d.dset_name for d in self.datasets]
        labels = [n if names.count(n) == 1 else f"{n} {names[: i + 1].count(n)}" for i, n in enumerate(names)]
        return labels if len(set(labels)) == len(labels) else [f"{n} {i}" for i, n in enumerate(names, 1)]

    @property
    def _sampling_metrics(self) -> dict[str, float]:
        return {f"{label} Current Sample Weight": w for label, w in zip(self._labels, self.current_weights)}

    def state_dict(self) -> dict[str, Any]:
        return {
            "version": 3,
            "phase": self._phase,
            "ready_since": [status.epoch_ready for status in self._dsets_status],
            "initial_weights": [status.initial_weight for status in self._dsets_status],
            "datasets": [d.state_dict() for d in self.datasets],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if len(state["datasets"]) != len(self.datasets):
            raise ValueError(f"the saved mixture had {len(state['datasets'])} datasets, this one has {len(self.datasets)}")
        self._phase = int(state["phase"])
        for i, (status, since) in enumerate(zip(self._dsets_status, state["ready_since"], strict=True)):
            status.epoch_ready = since
            if self.initial_sampling_weights is None:
                status.initial_weight = state["initial_weights"][i]
        for dataset, saved in zip(self.datasets, state["datasets"]):
            dataset.load_state_dict(saved)
        if self.configured:
            self._update_weights()


def _checked(name: str, weights: Sequence[float], count: int) -> NDArray[np.float64]:
    values = [float(w) for w in weights]
    if len(values) != count:
        raise ValueError(f"{name} has {len(values)} numbers, but there are {count} datasets")
    if not all(math.isfinite(w) and w >= 0 for w in values) or sum(values) == 0:
        raise ValueError(f"{name} must be finite numbers of 0 or more, and not all 0; got {values}")
    return np.array(values)
