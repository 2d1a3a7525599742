"""Buffers of the original system as a data set, to copy them into a buffer of amago's own format."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gin
import gymnasium as gym
import numpy as np

from amago.data.relabel import Relabeler
from amago.data.trajectory import StoredTraj
from amago.loading.offline.base import OfflineDataset
from amago.loading.sources import TrajectorySource
from amago.spaces import ActionSpec, obs_spec
from amago.store import BadFileError, StoreView, legacy, original
from amago.store import index as store_index
from amago.store.file_cache import FileCache
from amago.store.store import PARTITIONS


def files_of_original(path: str | Path) -> list[Path]:
    """The files that are named as the original system names trajectories, the oldest first.

    Args:
        path: one of them, their directory, or the directory of a buffer or a run.
    """
    path = Path(path).expanduser()
    if path.is_file():
        return [path] if original.NAME.fullmatch(path.name) else []
    folders = [path, *(path / p for p in PARTITIONS), *(path / "buffer" / p for p in PARTITIONS)]
    found = [f for folder in folders if folder.is_dir() for f in folder.iterdir() if original.NAME.fullmatch(f.name)]
    return sorted(found, key=lambda f: (original.of_name(f.name)[2], f.name))


def action_width(path: str | Path, allow_pickle: bool = False) -> int:
    """Numbers of an action vector in the first of these files that can be read; 1 if there is none."""
    for file in files_of_original(path):
        if allow_pickle or file.suffix != legacy.SUFFIX:
            try:
                return _entry(file, store_index.Schemas()).schema.action_spec.dim
            except (BadFileError, OSError):
                continue
    return 1


def _entry(path: Path, schemas: store_index.Schemas) -> store_index.Entry:
    """A checked file; pickles are allowed."""
    return store_index.load(str(path.parent), path.parent.name, path.name, schemas, lambda *stamp: False, True)


@gin.configurable(module="amago.loading")
class OriginalDataset(OfflineDataset):
    """The trajectory files of a buffer of the original system. They are only read.

    A `DiskTrajDataset` reads such ``.npz`` files as well, where they lie. This class is for buffers elsewhere, and for ``.traj`` pickles.

    Args:
        path: a file, its directory, or the directory of a buffer or a run.
        action_space: of the environment, which the files do not say.
        observation_space: of the environment; default: boxes bounded by their dtypes only.
        env_name: name in the statistics by environment; default: that in the files' names.
        allow_pickle: also read ``.traj`` files. A pickle could run any code that its author put into it. Only arrays and the
            original's trajectories are made from it: a file that names anything else is refused before that is imported.
        relabeler: rewrites each trajectory before a training sequence is cut from it.

    Attributes:
        skipped: {path: reason} of the files that cannot be read, once opened.

    Raises:
        ValueError: (when opened) there are no such files, none of them can be read, or they differ from each other.
        PickleRefusedError: (when opened) there are ``.traj`` files, and ``allow_pickle`` is False.
    """

    def __init__(
        self,
        path: str | Path,
        action_space: gym.Space[Any],
        observation_space: gym.Space[Any] | None = None,
        env_name: str | None = None,
        allow_pickle: bool = False,
        relabeler: Relabeler | None = None,
    ):
        super().__init__(relabeler)
        self.path, self.action_space, self.observation_space = Path(path).expanduser(), action_space, observation_space
        self.env_name, self.allow_pickle = env_name, allow_pickle
        self.skipped: dict[str, str] = {}

    @property
    def name(self) -> str:
        return str(self.path)

    def load(self) -> TrajectorySource:
        files = files_of_original(self.path)
        if not files:
            raise ValueError(
                f"{self.path} holds no file of the original system, {{env_name}}_{{8 hex digits}}_{{time}}.npz or .traj"
            )
        pickles = [f for f in files if f.suffix == legacy.SUFFIX]
        if pickles and not self.allow_pickle:
            raise legacy.refuse(pickles[0], len(pickles))
        space = None if self.observation_space is None else obs_spec(self.observation_space).space
        source = _Files(space, self.action_space, self.env_name)
        for file in files:
            try:
                source.add(file)
            except (BadFileError, OSError) as err:
                self.skipped[str(file)] = str(err)
        if not len(source):
            shown = "; ".join(f"{path}: {reason}" for path, reason in list(self.skipped.items())[:3])
            raise ValueError(f"none of the {len(files)} files of the original system in {self.path} can be read: {shown}")
        return source


class _Files(TrajectorySource):
    """Files of the original, opened one by one when they are read."""

    def __init__(self, obs_space: gym.spaces.Dict | None, action_space: gym.Space[Any], env_name: str | None):
        self._given, self._env_name = action_space, env_name
        self._spaces: original.Spaces | None = None
        self._obs_space, self._schemas = obs_space, store_index.Schemas()
        self._files: list[tuple[Path, store_index.Entry]] = []
        self.lengths = np.zeros(0, np.int64)

    def add(self, path: Path) -> None:
        """Check a file.

        Raises:
            BadFileError: it cannot be read, or has other spaces.
        """
        entry = _entry(path, self._schemas)
        if self._spaces is None:
            self.obs_space = entry.schema.obs_space if self._obs_space is None else self._obs_space
            self._spaces = original.Spaces(self.obs_space, self._given, self._schemas)
            self.action_spec: ActionSpec = self._spaces.spec
        if entry.kind == store_index.ORIGINAL:
            self._spaces.give(entry, path.parent.parent)
        else:
            self._convert(StoreView(str(path.parent.parent), [entry], FileCache(1)).read(0), path)
        self._files.append((path, entry))
        self.lengths = np.append(self.lengths, entry.total)

    def read(self, index: int, start: int = 0, stop: int | None = None) -> StoredTraj:
        path, entry = self._files[index]
        traj = StoreView(str(path.parent.parent), [entry], FileCache(1)).read(0, start, stop)
        if entry.kind != store_index.ORIGINAL:
            traj = self._convert(traj, path)
        if self._env_name is not None or not traj.env_name:
            traj.env_name = original.of_name(path.name)[0] if self._env_name is None else self._env_name
        return traj

    def _convert(self, traj: StoredTraj, path: Path) -> StoredTraj:
        """A trajectory out of a pickle, whose actions are vectors, in stored form.

        Raises:
            BadFileError: it has other spaces.
        """
        assert self._spaces is not None
        self._spaces.check_observations({key: (a.dtype, a.shape[1:]) for key, a in traj.obs.items()})
        self._spaces.check_actions(traj.actions)
        boxes, spec = self.obs_space.spaces, self.action_spec
        traj.obs = {k: a.reshape(len(a), *(boxes[k].shape or ())).astype(boxes[k].dtype) for k, a in traj.obs.items()}
        traj.actions = spec.from_vector(traj.actions)
        traj.prev_action = None if traj.prev_action is None else spec.from_vector(traj.prev_action)
        return traj
