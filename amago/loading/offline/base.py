"""Recorded trajectories of other systems, converted to stored form, and the base class of their datasets."""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from math import prod
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
from numpy.typing import NDArray

from amago.data.batch import RLData
from amago.data.extras import ExtraField
from amago.data.trajectory import StoredTraj
from amago.loading.dataset import DatasetSettings, RLDataset, check_same_spaces, checked_relabeler, sample_window
from amago.relabeling import Relabeler
from amago.spaces import ActionSpec, action_spec, obs_spec
from amago.store import TrajectoryWriter, formats

logger = logging.getLogger(__name__)

Array = NDArray[Any]

SLACK = 1e-3
"""Actions outside of their space by less than this share of half its width count as rounding errors."""


class TrajectorySource(ABC):
    """Trajectories that are read by index, in stored form.

    Attributes:
        obs_space: flat, boxes only (`amago.spaces.obs_spec`).
        action_spec: the conversions of actions.
        lengths: (n,) int64, transitions of each trajectory.
        extra_fields: the extra fields that all trajectories have.
    """

    obs_space: gym.spaces.Dict
    action_spec: ActionSpec
    lengths: NDArray[np.int64]
    extra_fields: tuple[ExtraField, ...] = ()

    def __len__(self) -> int:
        return len(self.lengths)

    @abstractmethod
    def read(self, index: int, start: int = 0, stop: int | None = None) -> StoredTraj:
        """Transitions [start, stop) of a trajectory, as new arrays; by default all of it."""

    def __iter__(self) -> Iterator[StoredTraj]:
        return (self.read(i) for i in range(len(self)))


class InMemory(TrajectorySource):
    """Trajectories that are held in memory."""

    def __init__(
        self,
        trajs: Iterable[StoredTraj],
        obs_space: gym.spaces.Dict,
        spec: ActionSpec,
        extra_fields: tuple[ExtraField, ...] = (),
    ):
        self._trajs = list(trajs)
        self.obs_space, self.action_spec, self.extra_fields = obs_space, spec, extra_fields
        self.lengths = np.array([len(t) for t in self._trajs], dtype=np.int64)

    def read(self, index: int, start: int = 0, stop: int | None = None) -> StoredTraj:
        return self._trajs[index].slice(start, stop)


def check_trajectory(traj: StoredTraj, spec: ActionSpec) -> None:
    """Raise a ValueError for a number that is not finite, a termination before the end, or a choice outside of the action space. Continuous
    actions may exceed their bounds: recordings of other programs do, and agents clamp them."""
    fields = {f"observations[{k!r}]": a for k, a in traj.obs.items()} | {f"extras[{k!r}]": a for k, a in traj.extras.items()}
    for name, values in (fields | {"rewards": traj.rews, "actions": traj.actions}).items():
        if values.dtype.kind == "f" and not np.isfinite(values).all():
            raise ValueError(f"{name} is not finite at step {np.argwhere(~np.isfinite(values))[0, 0]}")
    if traj.dones[:-1].any():
        raise ValueError(
            f"terminates at step {np.argmax(traj.dones)} of {len(traj)} and goes on: what follows is another episode"
        )
    if spec.kind != "continuous":
        spec.check(traj.actions)


@contextlib.contextmanager
def reading(name: str) -> Iterator[None]:
    """Turn errors of the libraries that read a recording into a ValueError that names it. A TypeError, of a space that has no form here, and an
    ImportError stay."""
    try:
        yield
    except Exception as err:
        if isinstance(err, ImportError | TypeError) or (isinstance(err, ValueError) and name in str(err)):
            raise
        raise ValueError(f"{name} cannot be read: {str(err) or repr(err)}") from err


def as_rewards(values: object) -> Array:
    """Rewards in float32; ValueError where they are not real numbers."""
    array = np.asarray(values)
    if array.dtype.kind not in "biuf":
        raise ValueError(f"rewards has dtype {array.dtype}, but must hold real numbers")
    return array.astype(np.float32)


def as_flags(name: str, values: object) -> Array:
    """Ends of episodes as bool, from bool or from numbers that are 0 or 1; ValueError for others, such as texts, which are all true."""
    array = np.asarray(values)
    right = np.isin(array, (0, 1))
    if not right.all():
        at = tuple(int(i) for i in np.argwhere(~right)[0])
        raise ValueError(f"{name} is {array[at]!s} in row {at[0] if at else 0}, but must be 0 or 1")
    return array.astype(bool)


class Converter:
    """Convert recorded episodes to `StoredTraj`, and refuse episodes that are unfit for training.

    Args:
        observation_space, action_space: of the environment, as it has them.
    """

    def __init__(self, observation_space: gym.Space[Any], action_space: gym.Space[Any]):
        self._obs = obs_spec(observation_space, batched=True)
        self.spec, self.obs_space = action_spec(action_space), self._obs.space
        self.clipped = 0

    def convert(
        self, where: str, obs: object, actions: object, rewards: object, terminations: object, env_name: str
    ) -> StoredTraj:
        """One episode of T transitions.

        Args:
            where: names the episode in errors.
            obs: T + 1 observations: an array, or a dict or tuple of arrays as the observation space has it.
            actions: T of the environment's own actions, as one array or a dict or tuple of arrays.
            rewards, terminations: (T,).

        Raises:
            ValueError: lengths that do not fit, a number that is not finite, an action outside of its space, or a
                termination before the end.
        """
        try:
            rews, dones = as_rewards(rewards).reshape(-1, 1), as_flags("terminations", terminations).reshape(-1, 1)
            t = len(rews)
            stored = self._stored_actions(actions, t)
            observations = {k: np.ascontiguousarray(v) for k, v in self._obs.convert(obs).items()}
            fields = {"terminations": (dones, t), "actions": (stored, t)}
            fields |= {f"observations[{k!r}]": (v, t + 1) for k, v in observations.items()}
            for name, (values, rows) in fields.items():
                if len(values) != rows:
                    raise ValueError(f"{name} has {len(values)} rows; with {t} rewards it must have {rows}")
            traj = StoredTraj(observations, self._cut_to_space(stored), rews, dones, env_name=env_name)
            check_trajectory(traj, self.spec)
        except (ValueError, TypeError, KeyError, IndexError) as err:
            raise ValueError(f"{where}: {err}") from err
        return traj

    def _stored_actions(self, actions: Any, t: int) -> Array:
        if not self.spec.children:
            row, actions = self.spec.space.shape or (), np.asarray(actions)
            if actions.size != t * prod(row):
                raise ValueError(f"{t} actions of {self.spec.space} are needed, but they have shape {actions.shape}")
            actions = actions.reshape(t, *row)
        return self.spec.from_env(actions)

    def _cut_to_space(self, stored: Array) -> Array:
        for part in self.spec.parts:
            if part.kind == "continuous":
                numbers = stored[:, part.stored]
                self.clipped += int((np.abs(numbers) > 1 + SLACK).any(axis=-1).sum())
                stored[:, part.stored] = np.clip(numbers, -1.0, 1.0)
        return stored

    def report(self, name: str) -> None:
        """Log how many actions were clipped to their space (environments clip them in the same way)."""
        if self.clipped:
            logger.warning("%s: %d actions were outside of %s and were cut to it", name, self.clipped, self.spec.space)
            self.clipped = 0


def copy_to(
    source: TrajectorySource,
    directory: str | Path,
    writer: str,
    save_as: str = "segments",
    limit: int | None = None,
    progress: Callable[[StoredTraj], object] = lambda traj: None,
) -> int:
    """Write the trajectories of a source into a directory of a replay buffer, ``{run}/buffer/protected`` as a rule.

    Args:
        writer: begins the names of the files; unique to this source (`amago.store.TrajectoryWriter`).
        save_as: "segments", "npz" or "npz-compressed".
        limit: the first so many trajectories only.
        progress: called after each.

    Returns:
        Trajectories written. If this raises, the trajectories already written are deleted.
    """
    directory = Path(directory)
    before = formats.files_of(directory, writer)
    out = TrajectoryWriter(
        directory, writer=writer, action_space=source.action_spec.space, obs_space=source.obs_space, save_as=save_as,
        extra_fields=source.extra_fields,
    )  # fmt: skip
    count = len(source) if limit is None else min(limit, len(source))
    try:
        for traj in itertools.islice(source, count):
            out.write(traj)
            progress(traj)
        out.close()
    except BaseException:
        for name in formats.files_of(directory, writer).keys() - before:
            (directory / name).unlink(missing_ok=True)
        raise
    return count


_RETURNS_READ = 200


class OfflineDataset(RLDataset):
    """Recorded trajectories that never change: one is drawn uniformly, then a window of it.

    Subclass, and override `load`.

    Args:
        relabeler: rewrites each trajectory before the window is cut; default: none.
        skip_damaged: leave out episodes that are damaged, with a warning that names each, in place of refusing the recording.

    Attributes:
        damaged: {episode: reason} of those left out, once the recording was opened.
        title: the dataset in messages; default: the class's name.
    """

    title = ""

    def __init__(self, relabeler: Relabeler | None = None, skip_damaged: bool = False):
        self.relabeler, self.skip_damaged = checked_relabeler(relabeler), skip_damaged
        self.damaged: dict[str, str] = {}
        self._source: TrajectorySource | None = None

    @abstractmethod
    def load(self) -> TrajectorySource:
        """Open the recording; called once, by `configure` or `source`."""

    @property
    def name(self) -> str:
        """The dataset in messages."""
        return self.title or type(self).__name__

    def leave_out(self, episode: str, err: Exception) -> None:
        """Leave an episode out, with a warning.

        Raises:
            ValueError: unless `skip_damaged`.
        """
        reason = str(err) or repr(err)
        if not self.skip_damaged:
            raise ValueError(f"{reason} (skip_damaged=True leaves damaged episodes out)") from err
        logger.warning("%s is damaged and left out: %s", episode, reason)
        self.damaged[episode] = reason

    @property
    def source(self) -> TrajectorySource:
        """The trajectories, opened at first use.

        Raises:
            ValueError: the recording cannot be read, or has no trajectories.
        """
        if self._source is None:
            with reading(self.name):
                source = self.load()
            if not len(source):
                left = f" beside {len(self.damaged)} damaged ones" if self.damaged else ""
                raise ValueError(f"{self.name} has no trajectory of at least one transition{left}")
            self._source = source
        return self._source

    def __len__(self) -> int:
        """Trajectories."""
        return len(self.source)

    def configure(self, settings: DatasetSettings | None = None, **values: object) -> None:
        super().configure(settings, **values)
        _ = self.source

    def check_spaces(self, obs_space: gym.spaces.Dict, action_space: gym.Space[Any]) -> None:
        super().check_spaces(obs_space, action_space)
        check_same_spaces(self.name, self.source.obs_space, self.source.action_spec, obs_space, action_space)

    def sample_random_trajectory(self, rng: np.random.Generator | None = None) -> RLData:
        self.check_configured()
        (settings, rng), source = self.settings.drawing(rng), self.source
        index = int(rng.integers(len(source)))
        length, read = int(source.lengths[index]), functools.partial(source.read, index)
        return RLData.from_traj(sample_window(length, source.action_spec, read, self.relabeler, settings, rng))

    def describe(self) -> str:
        """Name, trajectories, steps, and the mean return of at most `_RETURNS_READ` of them, evenly spaced."""
        source = self.source
        indices = np.linspace(0, len(source) - 1, min(len(source), _RETURNS_READ)).astype(int)
        mean = float(np.mean([source.read(int(i)).rews.sum(dtype=np.float64) for i in indices]))
        size = f"{len(source):,} trajectories, {int(source.lengths.sum()):,} steps"
        size += f", {len(self.damaged):,} damaged episodes left out" if self.damaged else ""
        return f"{self.name}: {size}, mean return {mean:.4g}" + (f" (of {len(indices)})" if len(indices) < len(source) else "")

    def copy_to(self, directory: str | Path, writer: str = "import", **options: Any) -> int:
        """Write all trajectories into a directory of a replay buffer; see `amago.loading.offline.base.copy_to`."""
        return copy_to(self.source, directory, writer, **options)

    def on_end_of_collection(self, experiment: object = None) -> dict[str, float]:
        return {"trajectories": float(len(self.source)), "timesteps": float(self.source.lengths.sum())}
