"""Data sets written for the original system.

The facts that this serves: ``sample_random_trajectory(self)`` without ``rng`` returns a whole trajectory, which is cut outside;
``on_end_of_collection(self, experiment)`` receives the experiment, as a keyword; ``configure_from_experiment(self, experiment)`` is
overridden; ``DiskTrajDataset._traj_to_rl_data(self, traj)`` receives whole trajectories, and relabels them itself; and subclasses draw from
``all_filenames``, which hold one trajectory each.

A class is looked at once, when it is defined (`form_of`). Everything else here takes data sets by the names of their methods, and
imports none.
"""

from __future__ import annotations

import inspect
import logging
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from amago.data.batch import RLData

if TYPE_CHECKING:
    from amago.loading.dataset import DatasetSettings, RLDataset

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class DatasetForm:
    """What the methods of a data set's class expect. The defaults are those of amago's own.

    Attributes:
        samples_whole: `sample_random_trajectory` takes no ``rng``, and returns whole trajectories.
        hears_experiment: `on_end_of_collection` takes ``experiment``.
        reads_experiment: `configure_from_experiment` is overridden.
        converts_whole: `_traj_to_rl_data` is overridden.
    """

    samples_whole: bool = False
    hears_experiment: bool = False
    reads_experiment: bool = False
    converts_whole: bool = False


def form_of(cls: type[RLDataset], base: type[RLDataset]) -> DatasetForm:
    """The form of a data set's class.

    Args:
        base: `amago.loading.RLDataset`.
    """

    def overridden(name: str) -> bool:
        """Whether a class outside of amago has replaced a method."""
        owner = next((c for c in cls.__mro__ if name in vars(c)), base)
        return owner is not base and not owner.__module__.startswith("amago.")

    return DatasetForm(
        samples_whole=not takes_arguments(cls.sample_random_trajectory, 1, "rng"),
        hears_experiment=takes_arguments(cls.on_end_of_collection, 1, "experiment"),
        reads_experiment=overridden("configure_from_experiment"),
        converts_whole=overridden("_traj_to_rl_data"),
    )


def takes_arguments(method: Callable[..., Any], count: int, name: str) -> bool:
    """Whether a method takes so many positional arguments beside ``self``, or a keyword of this name."""
    parameters = inspect.signature(method).parameters.values()
    if any(p.kind is p.VAR_POSITIONAL or p.name == name for p in parameters):
        return True
    return len([p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]) > count


def reads_files(dataset: Any) -> bool:
    """Whether a data set, or a part of a mixture, draws whole trajectories from a replay buffer by itself. It opens a file for each, so
    that a file must hold one."""
    parts = getattr(dataset, "all_datasets", [dataset])
    return any(getattr(type(d), "form", DatasetForm()).samples_whole and hasattr(d, "all_filenames") for d in parts)


def warn_of_inexact_resume(dataset: RLDataset) -> None:
    """Log once, when it is configured, that a data set draws from a random stream that no checkpoint holds."""
    cls = type(dataset)
    if cls.form.samples_whole and cls not in _warned:
        _warned.add(cls)
        logger.warning(
            "%s.sample_random_trajectory takes no rng and therefore draws from a random stream of its own: a run that is resumed "
            "will train on other sequences than it would have. Take rng, a numpy.random.Generator, and draw from it alone to resume "
            "exactly.",
            cls.__name__,
        )


_warned: set[type] = set()
_one_at_a_time = threading.RLock()


def _after_fork_in_child() -> None:
    global _one_at_a_time
    _one_at_a_time = threading.RLock()


os.register_at_fork(after_in_child=_after_fork_in_child)


def draw(dataset: RLDataset, rng: np.random.Generator) -> RLData:
    """One training sequence of at most ``settings.max_seq_len`` transitions."""
    if not type(dataset).form.samples_whole:
        return dataset.sample_random_trajectory(rng)
    with _one_at_a_time:  # such code was written for processes, while ours is called from several threads
        whole = dataset.sample_random_trajectory()
    if dataset.max_seq_len is None:
        return whole
    cut_short = getattr(dataset, "settings", None) is not None and dataset.settings.cut_short_trajectories
    return whole.random_slice(dataset.max_seq_len, dataset.padded_sampling, rng, cut_short)


def configure(dataset: RLDataset, settings: DatasetSettings) -> None:
    """Configure a data set, by its own `configure_from_experiment` if it has one and the experiment is known."""
    if type(dataset).form.reads_experiment and settings.experiment is not None:
        dataset.configure_from_experiment(settings.experiment)
    else:
        dataset.configure(settings)


def collection_ended(dataset: RLDataset, experiment: Any = None) -> dict[str, Any]:
    """Call `on_end_of_collection`, with the experiment if the method takes it.

    Args:
        experiment: None: the one that has configured the data set.
    """
    if type(dataset).form.hears_experiment:
        settings = getattr(dataset, "settings", None)
        known = None if settings is None else settings.experiment
        return dataset.on_end_of_collection(experiment=known if experiment is None else experiment)
    return dataset.on_end_of_collection()
