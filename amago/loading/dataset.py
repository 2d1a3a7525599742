"""`RLDataset`, the interface of all sources of training sequences, and the replay buffer on disk."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gin
import gymnasium as gym
import numpy as np

from amago.data.batch import Batch, RLData, collate
from amago.data.extras import ExtraField, check_extra_fields
from amago.data.relabel import NoOpRelabeler, Relabeler, with_extras_of
from amago.data.trajectory import FrozenTraj, StoredTraj
from amago.loading.batching import BatchBuffers
from amago.spaces import ActionSpec, space_differences
from amago.store import EvictedError, StoreView, TrajectoryStore

PADDED_SAMPLING = ("none", "both", "left", "right")


@dataclass(frozen=True)
class DatasetSettings:
    """Settings of an `Experiment` that its data set needs.

    Attributes:
        max_seq_len: L, transitions in a training sequence at most.
        padded_sampling: "none", "left", "right" or "both"; see `subsequence`.
        has_edit_rights: this process may delete old trajectories.
        extra_fields: the declared extra fields; batches have these extras and no others.

    Raises:
        ValueError: an extra field is wrong, or two have one name.
    """

    max_seq_len: int
    padded_sampling: str = "none"
    has_edit_rights: bool = True
    extra_fields: tuple[ExtraField, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "extra_fields", check_extra_fields(self.extra_fields))


class RLDataset(ABC):
    """A source of training sequences. Subclass, and override at least `sample_random_trajectory`.

    ``Experiment`` calls `configure` and then `check_spaces` before training. In each epoch it calls `on_end_of_collection`,
    asks `ready_for_training`, draws batches by `sample_random_trajectory` (from several threads at once), and calls
    `on_end_of_training`. Nothing else may change what is sampled: then batch n depends on (seed, process, n) alone, and a run
    that is resumed goes on with the batches that it would have drawn.
    """

    settings: DatasetSettings

    def configure(self, settings: DatasetSettings) -> None:
        """Called once by ``Experiment.start()``; override to open files (and call ``super().configure``)."""
        if settings.padded_sampling not in PADDED_SAMPLING:
            raise ValueError(f"padded_sampling must be one of {', '.join(PADDED_SAMPLING)}; got {settings.padded_sampling!r}")
        self.settings = settings

    @abstractmethod
    def sample_random_trajectory(self, rng: np.random.Generator) -> RLData:
        """Draw one training sequence of at most ``settings.max_seq_len`` transitions, with ``rng`` as the only randomness."""

    def sample_batch(self, rng: np.random.Generator, batch_size: int) -> Batch:
        """Draw a batch. Default: `sample_random_trajectory` for each sequence, padded to the longest.

        Extra fields that a sequence lacks get their default.
        """
        settings = getattr(self, "settings", None)
        extra_fields = settings.extra_fields if settings is not None else ()
        return collate([self.sample_random_trajectory(rng) for _ in range(batch_size)], extra_fields)

    @property
    def ready_for_training(self) -> bool:
        """Whether there are sequences to sample. Default: True."""
        return True

    @property
    def can_become_ready(self) -> bool:
        """Whether waiting for data makes sense while this is not `ready_for_training`. Default: True."""
        return True

    def close(self) -> None:
        """Called by ``Experiment.close()``: close open files; sampling may open them again. Default: does nothing."""

    @property
    def save_new_trajs_to(self) -> str | None:
        """Directory into which actors write finished trajectories, or None to discard them. Default: None."""
        return None

    def check_spaces(self, obs_space: gym.spaces.Dict, action_space: gym.Space[Any]) -> None:
        """Raise ValueError if sequences from here do not fit a policy for these spaces. Default: no check."""

    def on_end_of_collection(self) -> dict[str, float]:
        """Called after each collection phase (and before the first training phase); returns metrics of section ``buffer``."""
        return {}

    def on_end_of_training(self) -> dict[str, float]:
        """Called after each training phase; returns metrics of section ``buffer``."""
        return {}

    def delete(self) -> None:
        """Delete the data from disk, where that makes sense."""

    def state_dict(self) -> dict[str, Any]:
        """State that a checkpoint must hold, as plain JSON types."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state that `state_dict` returned."""


def subsequence(length: int, max_len: int, padded_sampling: str, rng: np.random.Generator) -> tuple[int, int]:
    """Choose the transitions [start, stop) of a trajectory to train on.

    The window of ``max_len`` transitions starts uniformly in [0, T - L] ("none"), [-L + 1, T - 2] ("both"), [-L + 1, T - L]
    ("left") or [0, T - 2] ("right"), and is then cut to what exists. "left" and "both" make the first steps of a
    trajectory, "right" and "both" its last, as likely to be in the window as any other.

    Args:
        length: T, transitions in the trajectory.
        max_len: L.
    """
    low = 1 - max_len if padded_sampling in ("both", "left") else 0
    high = length - 2 if padded_sampling in ("both", "right") else length - max_len
    start = int(rng.integers(low, max(high, low) + 1))
    return max(start, 0), min(start + max_len, length)


def check_same_spaces(
    what: str,
    found: gym.spaces.Dict,
    found_spec: ActionSpec,
    obs_space: gym.spaces.Dict,
    action_space: gym.Space[Any],
    other: str = "the environment",
) -> None:
    """Raise ValueError unless recorded trajectories have the observations and actions that ``other`` has."""

    def shapes(space: gym.spaces.Dict) -> dict[str, tuple[int, ...] | None]:
        return {k: s.shape for k, s in sorted(space.spaces.items())}

    differing = {d.name for d in space_differences((found, found_spec.space), (obs_space, action_space), dtypes=False)}
    if differing - {"actions"}:
        raise ValueError(
            f"{what} has observations {shapes(found)}, but {other} has {shapes(obs_space)}; both need the same keys and shapes"
        )
    if differing:
        raise ValueError(f"{what} has actions {found_spec.space}, but {other} has {action_space}")


def check_same_box(what: str, found: gym.Space[Any], wanted: gym.Space[Any], other: str = "the environment") -> None:
    """Raise ValueError if two boxes of actions differ: the stored numbers, -1 to 1, would mean different actions."""
    if not (isinstance(found, gym.spaces.Box) and isinstance(wanted, gym.spaces.Box)):
        return
    if not all(np.allclose(getattr(found, side), getattr(wanted, side)) for side in ("low", "high")):
        raise ValueError(
            f"{what} has actions {found}, but {other} has {wanted}: the same number would mean two different actions"
        )


def checked_relabeler(relabeler: Relabeler | None) -> Relabeler | Callable[[FrozenTraj], FrozenTraj]:
    """The relabeler, or one that changes nothing.

    Raises:
        ValueError: a class, or something that cannot be called.
    """
    if isinstance(relabeler, type):
        raise ValueError(f"relabeler must be an instance, got the class {relabeler.__name__}; write {relabeler.__name__}()")
    if relabeler is not None and not callable(relabeler):
        raise ValueError(f"relabeler must be an amago.data.trajectory.Relabeler (an instance, not a class), got {relabeler!r}")
    return NoOpRelabeler() if relabeler is None else relabeler


def sample_window(
    length: int,
    spec: ActionSpec,
    read: Callable[..., StoredTraj],
    relabeler: Relabeler | Callable[[FrozenTraj], FrozenTraj],
    settings: DatasetSettings,
    rng: np.random.Generator,
) -> FrozenTraj:
    """A window (`subsequence`) of one stored trajectory, relabelled.

    Args:
        length: T of the whole trajectory.
        read: ``read()`` gives the whole trajectory, ``read(start, stop)`` a part of it; new arrays either way.
    """
    start, stop = subsequence(length, settings.max_seq_len, settings.padded_sampling, rng)
    if isinstance(relabeler, NoOpRelabeler):
        return read(start, stop).derive(spec)
    frozen = read().derive(spec)
    whole = with_extras_of(frozen, relabeler(frozen, rng) if isinstance(relabeler, Relabeler) else relabeler(frozen))
    if len(whole) != length:  # a relabeler may shorten a trajectory
        start, stop = subsequence(len(whole), settings.max_seq_len, settings.padded_sampling, rng)
    return whole.slice(start, stop)


@gin.configurable(module="amago.loading")
class DiskTrajDataset(RLDataset):
    """The replay buffer: trajectories on disk, sampled uniformly.

    ``{dset_root}/{dset_name}/buffer/fifo`` is written by actors, its oldest files deleted; ``buffer/protected`` is sampled
    and never deleted. A trajectory is drawn uniformly, then a window of it (`subsequence`).

    Args:
        dset_root: directory of all data sets ("~" is expanded).
        dset_name: name of this one.
        dset_max_size: trajectories kept in ``fifo``.
        relabeler: rewrites each trajectory before the window is cut; default: none.
        allow_pickle: load ``.traj`` pickles. They run code: only for files that you wrote yourself.

    Attributes:
        reads_batches: `sample_batch` reads its sequences directly into the batch, which is faster, instead of calling
            `sample_random_trajectory`. A subclass that does not change which sequences are drawn, or how they are read, keeps
            this by ``class Mine(DiskTrajDataset, reads_batches=True)``.
    """

    reads_batches = True

    def __init_subclass__(cls, reads_batches: bool = False, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.reads_batches = reads_batches

    def __init__(
        self,
        dset_root: str | os.PathLike[str],
        dset_name: str,
        dset_max_size: float = float("inf"),
        relabeler: Relabeler | None = None,
        allow_pickle: bool = False,
    ):
        if not dset_max_size >= 1:
            raise ValueError(f"dset_max_size counts trajectories and must be at least 1, got {dset_max_size}")
        self.dset_root, self.dset_name = Path(dset_root).expanduser(), dset_name
        self.dset_max_size = dset_max_size
        self.relabeler = checked_relabeler(relabeler)
        self.allow_pickle = allow_pickle
        self._store: TrajectoryStore | None = None
        self._pending_state: dict[str, Any] | None = None

    @property
    def buffer_dir(self) -> Path:
        return self.dset_root / self.dset_name / "buffer"

    @property
    def save_new_trajs_to(self) -> str:
        return str(self.buffer_dir / "fifo")

    @property
    def store(self) -> TrajectoryStore:
        """The opened store.

        Raises:
            RuntimeError: before `configure`.
        """
        if self._store is None:
            raise RuntimeError("the data set is opened by Experiment.start(), or by configure(DatasetSettings(...))")
        return self._store

    def configure(self, settings: DatasetSettings) -> None:
        super().configure(settings)
        if self._store is not None:
            self._store.close()
        self._store = TrajectoryStore(
            self.buffer_dir, self.dset_max_size, edit=settings.has_edit_rights, allow_pickle=self.allow_pickle
        )
        if self._pending_state is not None:
            self._store.load_state_dict(self._pending_state)
            self._pending_state = None
        self._store.refresh()

    def close(self) -> None:
        if self._store is not None:
            self._store.close()

    def _drawable(self) -> StoreView:
        view = self.store.view()  # does not change when another thread adds or deletes files
        if len(view) == 0:
            raise RuntimeError(f"the replay buffer {self.buffer_dir} is empty: collect first, or check dset_root and dset_name")
        return view

    def sample_random_trajectory(self, rng: np.random.Generator) -> RLData:
        while True:
            view = self._drawable()
            try:
                return RLData.from_traj(self._window(view, int(rng.integers(len(view))), rng))
            except EvictedError:  # deleted since the view was made: draw another
                continue

    def sample_batch(self, rng: np.random.Generator, batch_size: int) -> Batch:
        """Draw a batch: the sequences that `sample_random_trajectory` would draw with the same ``rng``.

        Where `reads_batches` is True and nothing is relabelled, they are read directly into the batch.
        """
        if self.reads_batches and isinstance(self.relabeler, NoOpRelabeler):
            state = rng.bit_generator.state
            buffers = self._filled(rng, batch_size)
            if buffers is not None:
                return buffers.batch()
            rng.bit_generator.state = state
        return super().sample_batch(rng, batch_size)

    def _filled(self, rng: np.random.Generator, batch_size: int) -> BatchBuffers | None:
        """The sequences of a batch, or None where their files have different fields."""
        extra_fields = self.settings.extra_fields
        buffers, row = None, 0
        while row < batch_size:
            view = self._drawable()
            index = int(rng.integers(len(view)))
            start, stop = subsequence(int(view.lengths[index]), self.settings.max_seq_len, self.settings.padded_sampling, rng)
            schema = view.schema(index)
            if buffers is None:
                buffers = BatchBuffers(schema, batch_size, self.settings.max_seq_len, extra_fields)
            if schema is not buffers.schema:
                return None
            try:
                buffers.read(row, view, index, start, stop)
                row += 1
            except EvictedError:  # deleted since the view was made: draw another
                continue
        return buffers

    def _window(self, view: StoreView, index: int, rng: np.random.Generator) -> FrozenTraj:
        def read(start: int = 0, stop: int | None = None) -> StoredTraj:
            return view.read(index, start, stop, extras=self.settings.extra_fields)

        return sample_window(int(view.lengths[index]), view.action_spec(index), read, self.relabeler, self.settings, rng)

    def check_spaces(self, obs_space: gym.spaces.Dict, action_space: gym.Space[Any]) -> None:
        view = self.store.view()
        for index in {0, len(view) - 1} if len(view) else ():
            spec = view.action_spec(index)
            check_same_spaces(f"the replay buffer {self.buffer_dir}", view.obs_space(index), spec, obs_space, action_space)

    @property
    def ready_for_training(self) -> bool:
        return len(self.store) > 0

    def on_end_of_collection(self) -> dict[str, float]:
        self.store.refresh()
        return self.store.info()

    def delete(self) -> None:
        self.store.delete()

    def state_dict(self) -> dict[str, Any]:
        return {"store": self.store.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self._store is None:
            self._pending_state = state["store"]
        else:
            self._store.load_state_dict(state["store"])
            self._store.refresh()


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

    def sample_random_trajectory(self, rng: np.random.Generator) -> RLData:
        """Never called by training.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError("a DoNothingDataset has nothing to train on; set train_batches_per_epoch=0, or give another dataset")
