"""`RLDataset`, the interface of all sources of training sequences, and helpers of its subclasses."""

from __future__ import annotations

import inspect
import logging
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import gin
import gymnasium as gym
import numpy as np
from torch.utils.data import Dataset

from amago import system
from amago.data.batch import Batch, RLData, check_padded_sampling, collate, global_rng, subsequence
from amago.data.extras import ExtraField, check_extra_fields
from amago.data.trajectory import FrozenTraj, StoredTraj
from amago.relabeling import NoOpRelabeler, Relabeler, with_extras_of
from amago.spaces import ActionSpec, space_differences

logger = logging.getLogger(__name__)


_one_at_a_time = threading.RLock()


def _after_fork_in_child() -> None:
    global _one_at_a_time
    _one_at_a_time = threading.RLock()


system.after_fork_in_child(_after_fork_in_child)


def _takes(method: Callable[..., Any], *args: object, **kwargs: object) -> bool:
    try:
        inspect.signature(method).bind(*args, **kwargs)
    except TypeError:
        return False
    return True


def reads_files(dataset: object) -> bool:
    """True if a dataset, or a part of a mixture, draws whole trajectories from a replay buffer by itself. It opens one file
    for each trajectory, so that a file must hold one."""
    return isinstance(dataset, RLDataset) and any(d.samples_whole and d.lists_files for d in dataset.all_datasets)


def draw(dataset: RLDataset, rng: np.random.Generator) -> RLData:
    """One training sequence of at most ``settings.max_seq_len`` transitions."""
    if not dataset.samples_whole:
        return dataset.sample_random_trajectory(rng)
    with _one_at_a_time:  # such code was written for processes, while ours is called from several threads
        whole = dataset.sample_random_trajectory()
    if dataset.max_seq_len is None:
        return whole
    cut_short = dataset.settings is not None and dataset.settings.cut_short_trajectories
    return whole.random_slice(dataset.max_seq_len, dataset.padded_sampling, rng, cut_short)


def collection_ended(dataset: RLDataset, experiment: object = None) -> dict[str, Any]:
    """Call `on_end_of_collection`, with the experiment (default: the one that has configured the dataset) if it takes one."""
    method = dataset.on_end_of_collection
    if experiment is None and dataset.settings is not None:
        experiment = dataset.settings.experiment
    return method(experiment=experiment) if _takes(method, experiment=experiment) else method()


@dataclass(frozen=True)
class DatasetSettings:
    """Settings of an `Experiment` that its dataset needs.

    Attributes:
        max_seq_len: L, transitions in a training sequence at most.
        padded_sampling: "none", "left", "right" or "both"; see `subsequence`.
        has_edit_rights: this process may delete old trajectories.
        extra_fields: the declared extra fields; batches have these extras and no others.
        cut_short_trajectories: ``padded_sampling`` also cuts trajectories that fit into ``max_seq_len``.
        items_per_epoch: training sequences in an epoch, of all processes.
        experiment: the experiment with these settings, if any; not copied to other processes.

    Raises:
        ValueError: ``padded_sampling`` is unknown, an extra field is wrong, or two have one name.
    """

    max_seq_len: int
    padded_sampling: str = "none"
    has_edit_rights: bool = True
    extra_fields: tuple[ExtraField, ...] = ()
    cut_short_trajectories: bool = False
    items_per_epoch: int = 0
    experiment: Any = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_padded_sampling(self.padded_sampling)
        object.__setattr__(self, "extra_fields", check_extra_fields(self.extra_fields))

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"experiment": None}

    @classmethod
    def of(cls, experiment: Any) -> DatasetSettings:
        """The settings of an `Experiment`, or of an object with its fields."""
        accelerator = experiment.accelerator
        items = experiment.train_batches_per_epoch * experiment.batch_size * accelerator.num_processes
        return cls(
            experiment.max_seq_len,
            experiment.padded_sampling,
            experiment.has_dset_edit_rights and getattr(accelerator, "is_main_process", True),
            tuple(getattr(experiment, "extra_fields", ())),
            getattr(experiment, "cut_short_trajectories", False),
            items,
            experiment,
        )

    def window(self, length: int, rng: np.random.Generator, piece: tuple[int, int] = (0, 1)) -> tuple[int, int]:
        """The transitions to train on, of a trajectory of ``length``: `subsequence` with these settings."""
        return subsequence(length, self.max_seq_len, self.padded_sampling, rng, self.cut_short_trajectories, piece)

    def drawing(self, rng: np.random.Generator | None) -> tuple[DatasetSettings, np.random.Generator]:
        """The settings and the random stream of `RLDataset.sample_random_trajectory`; without ``rng``, for whole
        trajectories."""
        if rng is not None:
            return self, rng
        return replace(self, max_seq_len=sys.maxsize, cut_short_trajectories=False), global_rng()


class RLDataset(Dataset[RLData], ABC):
    """A source of training sequences. Subclass, and override at least `sample_random_trajectory`.

    ``Experiment`` calls `configure_from_experiment` and then `check_spaces` before training. In each epoch it calls
    `on_end_of_collection`, checks `ready_for_training`, draws batches by `sample_random_trajectory` (from several threads at
    once), and calls `on_end_of_training`. Nothing else may change the sampled sequences: then batch n depends on (seed,
    process, n) alone, and a run that is resumed goes on with the batches that it would have drawn.

    It also is a dataset of torch, of ``items_per_epoch`` random sequences, for a
    ``torch.utils.data.DataLoader(dataset, batch_size, collate_fn=RLData_pad_collate, num_workers=2)``.

    Args:
        dset_name: in metrics; default: the name of the class. A subclass need not call this constructor.

    Attributes:
        settings: since `configure`; None before.
        max_seq_len, padded_sampling, has_edit_rights, items_per_epoch: of ``settings``; None, "none", False and 0 before.
        samples_whole: `sample_random_trajectory` takes no ``rng``, as in code written for the original system.
    """

    settings: DatasetSettings = None  # type: ignore[assignment]  # until `configure`
    max_seq_len: int | None = None
    padded_sampling: str = "none"
    has_edit_rights: bool = False
    items_per_epoch: int = 0
    samples_whole: ClassVar[bool] = False
    lists_files: ClassVar[bool] = False  # True: it has `all_filenames`
    _dset_name: str | None = None
    _obs_space: gym.spaces.Dict | None = None  # of the policy

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        cls.samples_whole = not _takes(cls.sample_random_trajectory, "self", "rng")

    def __init__(self, dset_name: str | None = None):
        self.dset_name = dset_name

    @property
    def dset_name(self) -> str:
        """The name of the dataset in metrics."""
        return type(self).__name__ if self._dset_name is None else self._dset_name

    @dset_name.setter
    def dset_name(self, name: str | None) -> None:
        self._dset_name = name

    def get_description(self) -> str:
        """The dataset in a few words, for summaries. Default: its name."""
        return self.dset_name

    def configure(self, settings: DatasetSettings | None = None, **values: Any) -> None:
        """Called once before training; override to open files (and call ``super().configure``).

        Args:
            settings: or, in its place, its attributes as keywords: ``configure(max_seq_len=64, items_per_epoch=1000)``.
        """
        self.settings = settings = DatasetSettings(**values) if settings is None else settings
        self.max_seq_len, self.padded_sampling = settings.max_seq_len, settings.padded_sampling
        self.has_edit_rights, self.items_per_epoch = settings.has_edit_rights, settings.items_per_epoch
        if self.samples_whole:
            logger.warning(
                "%s.sample_random_trajectory takes no rng and therefore draws from a random stream of its own: a run that is resumed "
                "will train on other sequences than it would have. Take rng, a numpy.random.Generator, and draw from it alone to "
                "resume exactly.",
                type(self).__name__,
            )

    def configure_from_experiment(self, experiment: Any) -> None:
        """`configure` with the fields of an `Experiment`, which calls this in ``start()``.

        Args:
            experiment: its ``accelerator`` must exist.
        """
        self.configure(DatasetSettings.of(experiment))

    @property
    def all_datasets(self) -> Sequence[RLDataset]:
        """The datasets that this one mixes; itself, if it is no mixture."""
        return [self]

    @property
    def configured(self) -> bool:
        """True if `configure` was called."""
        return self.max_seq_len is not None

    def check_configured(self) -> None:
        """Raise ValueError before `configure`."""
        if not self.configured:
            raise ValueError(
                f"the dataset {self.dset_name!r} is not configured: Experiment.start() does it, or call "
                "configure(DatasetSettings(...)) or configure_from_experiment(experiment)"
            )

    @abstractmethod
    def sample_random_trajectory(self, rng: np.random.Generator | None = None) -> RLData:
        """Draw one training sequence of at most ``settings.max_seq_len`` transitions, with ``rng`` as the only randomness.

        Without ``rng`` a dataset of amago draws a whole trajectory, from a stream seeded by torch's global one. A subclass
        whose method takes no ``rng`` may return whole trajectories of any length, which are cut afterwards; its draws cannot be
        repeated when a run is resumed.
        """

    def sample_batch(self, rng: np.random.Generator, batch_size: int) -> Batch:
        """Draw a batch. Default: `sample_random_trajectory` for each sequence, padded to the longest.

        Extra fields that a sequence lacks get their default.
        """
        extra_fields = () if self.settings is None else self.settings.extra_fields
        return collate([draw(self, rng) for _ in range(batch_size)], extra_fields, self._obs_space)

    def __len__(self) -> int:
        """``items_per_epoch``.

        Raises:
            ValueError: before `configure`.
        """
        self.check_configured()
        return self.items_per_epoch

    def __bool__(self) -> bool:
        return True

    def __getitem__(self, i: int) -> RLData:
        """A random training sequence, whatever ``i``, drawn from a stream seeded by torch's global one.

        Raises:
            ValueError: before `configure`.
        """
        self.check_configured()
        if not -len(self) <= i < len(self):
            raise IndexError(f"index {i} of {len(self)} sequences")
        return draw(self, global_rng())

    @property
    def ready_for_training(self) -> bool:
        """True if there are sequences to sample. Default: once `configure` was called."""
        return self.configured

    @property
    def can_become_ready(self) -> bool:
        """True if data may still arrive while this is not `ready_for_training`. Default: True."""
        return True

    def close(self) -> None:
        """Called by ``Experiment.close()``: close open files; sampling may open them again. Default: does nothing."""

    @property
    def save_new_trajs_to(self) -> str | None:
        """Directory into which actors write finished trajectories, or None to discard them. Default: None."""
        return None

    def check_spaces(self, obs_space: gym.spaces.Dict, action_space: gym.Space[Any]) -> None:
        """Raise ValueError if sequences from here do not fit a policy for these spaces. Default: no check.

        Override it, and call ``super().check_spaces``.
        """
        self._obs_space = obs_space

    def on_end_of_collection(self, experiment: object = None) -> dict[str, float]:
        """Called after each collection phase (and before the first training phase); returns metrics of section ``buffer``.

        Args:
            experiment: that collected, if known. An override may leave the argument out.
        """
        return {}

    def on_end_of_training(self) -> dict[str, float]:
        """Called after each training phase; returns metrics of section ``buffer``."""
        return {}

    def describe(self) -> str:
        """The dataset in the summary of a run that collects nothing, after `configure`. Default: the name of the class."""
        return type(self).__name__

    def described_by(self) -> list[str]:
        """The attributes that `amago.describe.describe` shows: the arguments; the others come from files."""
        return [name for name in inspect.signature(type(self).__init__).parameters if hasattr(self, name)]

    def delete(self, *, delete_protected: bool = False, delete_quarantine: bool = False) -> None:
        """Delete the data that was collected from disk. Default: does nothing.

        Args:
            delete_protected: also data that is never deleted otherwise, such as imported recordings.
            delete_quarantine: also damaged files that were moved to quarantine.
        """

    def refused_files(self) -> dict[str, str]:
        """{path: reason} of the files that were found but cannot be sampled. Default: none.

        While there are some and this is not `ready_for_training`, a process that never collects waits for a minute at most.
        """
        return {}

    @property
    def collected_steps(self) -> int | None:
        """Transitions that actors have ever delivered, deleted ones included; None (the default) if they are not counted.

        A process that trains and never collects reports them as its environment steps.
        """
        return None

    def state_dict(self) -> dict[str, Any]:
        """The state for a checkpoint, as plain JSON types."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state returned by `state_dict`."""


def check_same_spaces(
    what: str,
    found: gym.spaces.Dict,
    found_spec: ActionSpec,
    obs_space: gym.spaces.Dict,
    action_space: gym.Space[Any],
    other: str = "the environment",
) -> None:
    """Refuse recorded trajectories with other observations or actions than ``other``.

    Observations must have the same keys, shapes and dtypes, and bounds that do not contradict each other
    (`amago.spaces.same_range`); a policy would read pixels from 0 to 255 as pixels from 0 to 1.

    Raises:
        ValueError: names both, and the conversion that is needed.
    """
    own = found_spec.space
    here, there = ({key: box.shape for key, box in sorted(space.spaces.items())} for space in (found, obs_space))
    if here != there:
        raise ValueError(f"{what} has observations {here}, but {other} has {there}; both need the same keys and shapes")
    for name, first, second in space_differences((found, own), (obs_space, action_space), ranges=True):
        if name == "actions":
            raise ValueError(f"{what} has actions {own}, but {other} has {action_space}")
        raise ValueError(
            f"{what} has {name} {first}, but {other} has {second}: convert the recorded numbers, or wrap the environment "
            "(gymnasium.wrappers.TransformObservation), so that dtype and range agree; if the numbers mean the same already, "
            "declare the same observation space"
        )
    bounds = [(x.low, x.high) for x in (own, action_space) if isinstance(x, gym.spaces.Box)]
    if len(bounds) == 2 and not all(map(np.allclose, *bounds)):  # their numbers are stored from -1 to 1
        raise ValueError(
            f"{what} has actions {own}, but {other} has {action_space}: the same number would mean two different actions"
        )


Rewriting = Relabeler | Callable[[FrozenTraj], FrozenTraj]


def checked_relabeler(relabeler: Rewriting | None) -> Rewriting:
    """The relabeler, or one that changes nothing; ValueError for a class, or something that cannot be called."""
    if isinstance(relabeler, type):
        raise ValueError(f"relabeler must be an instance, got the class {relabeler.__name__}; write {relabeler.__name__}()")
    if relabeler is not None and not callable(relabeler):
        raise ValueError(f"relabeler must be an amago.hindsight.Relabeler (an instance, not a class), got {relabeler!r}")
    return NoOpRelabeler() if relabeler is None else relabeler


def sample_window(
    length: int,
    spec: ActionSpec,
    read: Callable[..., StoredTraj],
    relabeler: Rewriting,
    settings: DatasetSettings,
    rng: np.random.Generator,
    piece: tuple[int, int] = (0, 1),
) -> FrozenTraj:
    """A window (`subsequence`) of one stored trajectory, relabelled.

    Args:
        length: T of the whole trajectory.
        read: ``read()`` gives the whole trajectory, ``read(start, stop)`` a part of it; new arrays either way.
        piece: see `subsequence`; of a trajectory that the relabeler makes longer or shorter, the window is drawn from all of
            it.
    """
    start, stop = settings.window(length, rng, piece)
    if isinstance(relabeler, NoOpRelabeler):
        return read(start, stop).derive(spec)
    frozen = read().derive(spec)
    whole = with_extras_of(frozen, relabeler(frozen, rng) if isinstance(relabeler, Relabeler) else relabeler(frozen))
    if len(whole) != length:  # a relabeler may shorten a trajectory
        start, stop = settings.window(len(whole), rng)
    return whole.slice(start, stop)


@gin.configurable(module="amago.loading")
class DoNothingDataset(RLDataset):
    """Has no data and keeps none: for processes that only act, evaluate, or load a policy.

    Never ready for training, so that epochs pass without updates; new trajectories are thrown away.
    """

    @property
    def ready_for_training(self) -> bool:
        return False

    @property
    def can_become_ready(self) -> bool:
        return False

    def sample_random_trajectory(self, rng: np.random.Generator | None = None) -> RLData:
        """Never called by training.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError("a DoNothingDataset has nothing to train on; set train_batches_per_epoch=0, or give another dataset")
