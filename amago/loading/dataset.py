"""`RLDataset`, the interface of all sources of training sequences, and what its subclasses share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import gin
import gymnasium as gym
import numpy as np

from amago.data.batch import Batch, RLData, collate
from amago.data.extras import ExtraField, check_extra_fields
from amago.data.relabel import NoOpRelabeler, Relabeler, with_extras_of
from amago.data.trajectory import FrozenTraj, StoredTraj
from amago.spaces import ActionSpec, space_differences

PADDED_SAMPLING = ("none", "both", "left", "right")


@dataclass(frozen=True)
class DatasetSettings:
    """Settings of an `Experiment` that its data set needs.

    Attributes:
        max_seq_len: L, transitions in a training sequence at most.
        padded_sampling: "none", "left", "right" or "both"; see `subsequence`.
        has_edit_rights: this process may delete old trajectories.
        extra_fields: the declared extra fields; batches have these extras and no others.
        cut_short_trajectories: ``padded_sampling`` also cuts trajectories that fit into ``max_seq_len``.

    Raises:
        ValueError: an extra field is wrong, or two have one name.
    """

    max_seq_len: int
    padded_sampling: str = "none"
    has_edit_rights: bool = True
    extra_fields: tuple[ExtraField, ...] = ()
    cut_short_trajectories: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "extra_fields", check_extra_fields(self.extra_fields))

    def window(self, length: int, rng: np.random.Generator) -> tuple[int, int]:
        """The transitions to train on, of a trajectory of ``length``: `subsequence` with these settings."""
        return subsequence(length, self.max_seq_len, self.padded_sampling, rng, self.cut_short_trajectories)


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

    def describe(self) -> str:
        """The data set in the summary of a run that collects nothing, after `configure`. Default: the name of the class."""
        return type(self).__name__

    def delete(self, *, delete_protected: bool = False, delete_quarantine: bool = False) -> None:
        """Delete the data that was collected from disk. Default: does nothing.

        Args:
            delete_protected: also data that is never deleted otherwise, such as imported recordings.
            delete_quarantine: also damaged files that were moved to quarantine.
        """

    def refused_files(self) -> dict[str, str]:
        """{path: reason} of the files that were found but cannot be sampled. Default: none.

        While there are some and this is not `ready_for_training`, a process that never collects waits for
        ``Experiment.refused_data_timeout`` seconds at most.
        """
        return {}

    def state_dict(self) -> dict[str, Any]:
        """State that a checkpoint must hold, as plain JSON types."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state that `state_dict` returned."""


def subsequence(
    length: int, max_len: int, padded_sampling: str, rng: np.random.Generator, cut_short: bool = False
) -> tuple[int, int]:
    """Choose the transitions [start, stop) of a trajectory to train on.

    All of a trajectory with T <= L. Of a longer one, the window of ``max_len`` transitions starts uniformly in [0, T - L]
    ("none"), [-L + 1, T - 2] ("both"), [-L + 1, T - L] ("left") or [0, T - 2] ("right"), and is then cut to what exists. "left"
    and "both" make the first steps of a trajectory, "right" and "both" its last, as likely to be in the window as any other.

    Args:
        length: T, transitions in the trajectory.
        max_len: L.
        cut_short: draw a window of a trajectory with T <= L in the same way. With "both", half of the trajectory is then missing
            on average where T = L: what an agent has to remember and what it is for are hardly ever in one sequence.
    """
    if length <= max_len and not cut_short:
        return 0, length
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
    """Refuse recorded trajectories whose observations or actions differ from those of ``other``.

    Observations must have the same keys, shapes and dtypes, and bounds that do not contradict each other
    (`amago.spaces.same_range`); a policy would take pixels from 0 to 255 for pixels from 0 to 1.

    Raises:
        ValueError: names both, and what to convert.
    """

    def shapes(space: gym.spaces.Dict) -> dict[str, tuple[int, ...] | None]:
        return {k: s.shape for k, s in sorted(space.spaces.items())}

    both = (found, found_spec.space), (obs_space, action_space)
    differing = {d.name for d in space_differences(*both, dtypes=False)}
    if differing - {"actions"}:
        raise ValueError(
            f"{what} has observations {shapes(found)}, but {other} has {shapes(obs_space)}; both need the same keys and shapes"
        )
    if differing:
        raise ValueError(f"{what} has actions {found_spec.space}, but {other} has {action_space}")
    for d in space_differences(*both, ranges=True):
        raise ValueError(
            f"{what} has {d.name} {d.first}, but {other} has {d.second}: convert the recorded numbers, or wrap the environment "
            "(gymnasium.wrappers.TransformObservation), so that dtype and range agree; if the numbers mean the same already, "
            "declare the same observation space"
        )


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
    start, stop = settings.window(length, rng)
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

    def sample_random_trajectory(self, rng: np.random.Generator) -> RLData:
        """Never called by training.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError("a DoNothingDataset has nothing to train on; set train_batches_per_epoch=0, or give another dataset")
