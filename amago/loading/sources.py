"""Recorded trajectories of other systems, converted to stored form (numpy only)."""

from __future__ import annotations

import itertools
import logging
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
from numpy.typing import NDArray

from amago.data.extras import ExtraField
from amago.data.trajectory import StoredTraj
from amago.spaces import ActionSpec, ObsSpec, action_spec, obs_spec
from amago.store import TrajectoryWriter

logger = logging.getLogger(__name__)

Array = NDArray[Any]

SLACK = 1e-3
"""Actions outside of their space by less than this share of half its width count as rounding errors."""


class TrajectorySource(ABC):
    """Trajectories that are read by index, in stored form.

    Attributes:
        obs_space: flat, boxes only (`amago.spaces.obs_spec`).
        action_spec: how actions are stored and shown.
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

    def __init__(self, trajs: Iterable[StoredTraj], obs_space: gym.spaces.Dict, spec: ActionSpec):
        self._trajs = list(trajs)
        self.obs_space, self.action_spec = obs_space, spec
        self.lengths = np.array([len(t) for t in self._trajs], dtype=np.int64)

    def read(self, index: int, start: int = 0, stop: int | None = None) -> StoredTraj:
        whole = self._trajs[index]
        return whole.slice(start, len(whole) if stop is None else stop)


class Converter:
    """Converts recorded episodes to `StoredTraj`, and refuses episodes that are unfit for training.

    Args:
        observation_space, action_space: of the environment, as it has them.
    """

    def __init__(self, observation_space: gym.Space[Any], action_space: gym.Space[Any]):
        self._obs: ObsSpec = obs_spec(observation_space, batched=True)
        self.spec, self.obs_space = action_spec(action_space), self._obs.space
        self.clipped = 0

    def convert(self, where: str, obs: Any, actions: Any, rewards: Any, terminations: Any, env_name: str) -> StoredTraj:
        """One episode of T transitions.

        Args:
            where: names the episode in errors.
            obs: T + 1 observations: an array, or a dict or tuple of arrays as the observation space has it.
            actions: T of the environment's own actions.
            rewards, terminations: (T,).

        Raises:
            ValueError: lengths that do not fit, a number that is not finite, an action outside of its space, or a
                termination before the end.
        """
        rews = np.asarray(rewards, dtype=np.float32).reshape(-1, 1)
        dones = np.asarray(terminations).astype(bool).reshape(-1, 1)
        try:
            converted = {k: np.ascontiguousarray(v) for k, v in self._obs.convert(obs).items()}
        except (ValueError, TypeError, KeyError, IndexError) as err:
            raise ValueError(f"{where}: {err}") from err
        t = len(rews)
        lengths = {f"observations[{k!r}]": (len(v), t + 1) for k, v in converted.items()}
        lengths["terminations"] = (len(dones), t)
        for name, (have, want) in lengths.items():
            if have != want:
                raise ValueError(f"{where}: {name} has {have} rows; with {t} rewards it must have {want}")
        for name, values in (("rewards", rews), *((f"observations[{k!r}]", v) for k, v in converted.items())):
            if values.dtype.kind == "f" and not np.isfinite(values).all():
                step = int(np.argwhere(~np.isfinite(values))[0, 0])
                raise ValueError(f"{where}: {name} is not finite at step {step}")
        if dones[:-1].any():
            raise ValueError(
                f"{where}: terminates at step {int(np.argmax(dones))} of {t} and goes on: what follows is another episode"
            )
        return StoredTraj(converted, self._actions(where, actions, t), rews, dones, env_name=env_name)

    def _actions(self, where: str, actions: Any, t: int) -> Array:
        spec = self.spec
        try:
            if spec.kind in ("discrete", "continuous", "multibinary"):
                stored = spec.from_env(np.asarray(actions).reshape(t, *(spec.space.shape or ())))
            else:
                stored = np.stack([spec.from_env(_nth(actions, i)) for i in range(t)])
        except (ValueError, TypeError, KeyError, IndexError) as err:
            raise ValueError(f"{where}: {t} actions of {spec.space} are needed, but: {err}") from err
        if spec.kind not in ("discrete", "continuous", "multibinary"):
            return self._in_bounds(where, stored)
        if spec.kind == "discrete":
            outside = (stored < 0) | (stored >= spec.dim)
        elif stored.dtype.kind == "f":
            if not np.isfinite(stored).all():
                raise ValueError(f"{where}: actions are not finite at step {int(np.argwhere(~np.isfinite(stored))[0, 0])}")
            outside = np.abs(stored) > 1 + SLACK
            self.clipped += int(outside.any(axis=-1).sum())
            return np.clip(stored, -1.0, 1.0).astype(spec.stored_dtype)
        else:
            outside = (stored < 0) | (stored > 1)
        if outside.any():
            raise ValueError(f"{where}: the action at step {int(np.argwhere(outside)[0, 0])} is outside of {spec.space}")
        return stored.astype(spec.stored_dtype)

    def _in_bounds(self, where: str, stored: Array) -> Array:
        """Actions of several parts, with continuous numbers cut to [-1, 1]."""
        for part in self.spec.parts:
            if part.kind == "continuous":
                numbers = stored[:, part.stored]
                self.clipped += int((np.abs(numbers) > 1 + SLACK).any(axis=-1).sum())
                stored[:, part.stored] = np.clip(numbers, -1.0, 1.0)
        try:
            self.spec.check(stored)
        except ValueError as err:
            raise ValueError(f"{where}: {err}") from err
        return stored

    def report(self, name: str) -> None:
        """Log how many actions were clipped to their space (environments clip them in the same way)."""
        if self.clipped:
            logger.warning("%s: %d actions were outside of %s and were cut to it", name, self.clipped, self.spec.space)
            self.clipped = 0


def _nth(actions: Any, i: int) -> Any:
    """Step i of actions that may be dicts or tuples of arrays."""
    if isinstance(actions, dict):
        return {k: _nth(v, i) for k, v in actions.items()}
    if isinstance(actions, tuple):
        return tuple(_nth(v, i) for v in actions)
    return actions[i]


def copy_to(
    source: TrajectorySource,
    directory: str | Path,
    writer: str,
    save_as: str = "segments",
    limit: int | None = None,
    progress: Callable[[StoredTraj], object] | None = None,
) -> int:
    """Write the trajectories of a source into a directory of a replay buffer, ``{run}/buffer/protected`` as a rule.

    Args:
        writer: begins the names of the files; unique to this source (`amago.store.TrajectoryWriter`).
        save_as: "segments", "npz" or "npz-compressed".
        limit: the first so many trajectories only.
        progress: called after each.

    Returns:
        Trajectories written. If this raises, those of it that were already written are deleted.
    """
    directory = Path(directory)
    before = set(directory.iterdir()) if directory.is_dir() else set()
    out = TrajectoryWriter(
        directory, writer=writer, action_space=source.action_spec.space, obs_space=source.obs_space, save_as=save_as,
        extra_fields=source.extra_fields,
    )  # fmt: skip
    count = len(source) if limit is None else min(limit, len(source))
    try:
        for traj in itertools.islice(source, count):
            out.write(traj)
            if progress is not None:
                progress(traj)
        out.close()
    except BaseException:
        for path in files_of(directory, writer):
            if path not in before:
                path.unlink(missing_ok=True)
        raise
    return count


def files_of(directory: str | Path, writer: str) -> list[Path]:
    """The trajectory files in a directory that a writer of this name has made."""
    name = re.compile(rf"(.*_)?{re.escape(writer)}-[0-9]{{12}}[-_].*", re.DOTALL)
    return sorted(p for p in Path(directory).glob("*") if name.fullmatch(p.name))
