"""Buffers of the original system as a dataset, to copy them into a buffer of amago's own format."""

from __future__ import annotations

import io
import os
import pickle
from pathlib import Path
from typing import Any

import gin
import gymnasium as gym
import numpy as np

from amago.data.trajectory import FrozenTraj, StoredTraj
from amago.loading.offline.base import OfflineDataset, TrajectorySource
from amago.relabeling import Relabeler
from amago.spaces import action_spec, obs_spec
from amago.store import BadFileError, PickleRefusedError, formats
from amago.store.files import open_regular, read_exactly
from amago.store.store import PARTITIONS

MAX_PICKLE_BYTES = 1 << 30


def files_of_original(path: str | Path) -> list[Path]:
    """The files that are named as the original system names trajectories, the oldest first.

    Args:
        path: one of them, their directory, or the directory of a buffer or a run.
    """
    path = Path(path).expanduser()
    if path.is_file():
        return [path] if formats.ORIGINAL_NAME.fullmatch(path.name) else []
    folders = [path, *(path / p for p in PARTITIONS), *(path / "buffer" / p for p in PARTITIONS)]
    found = [f for folder in folders if folder.is_dir() for f in folder.iterdir() if formats.ORIGINAL_NAME.fullmatch(f.name)]
    return sorted(found, key=lambda f: (formats.of_original_name(f.name)[2], f.name))


def action_width(path: str | Path, allow_pickle: bool = False) -> int:
    """Numbers of an action vector in the first of these files that can be read; 1 if there is none."""
    for file in files_of_original(path):
        if allow_pickle or file.suffix != formats.PICKLE:
            try:
                return read_file(file).actions.shape[1]
            except (BadFileError, OSError):
                continue
    return 1


@gin.configurable(module="amago.loading")
class OriginalDataset(OfflineDataset):
    """The trajectory files of a buffer of the original system. They are only read, one by one.

    A `DiskTrajDataset` reads such ``.npz`` files as well, where they lie. This class is for buffers elsewhere, and for
    ``.traj`` pickles.

    Args:
        path: a file, its directory, or the directory of a buffer or a run.
        action_space: of the environment, which the files do not record.
        observation_space: of the environment; default: boxes bounded by their dtypes only.
        env_name: name in the statistics by environment; default: the name in the files' names.
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
        pickles = [f for f in files if f.suffix == formats.PICKLE]
        if pickles and not self.allow_pickle:
            raise PickleRefusedError.of(pickles[0], len(pickles))
        space = None if self.observation_space is None else obs_spec(self.observation_space).space
        source = _Files(space, self.action_space, self.env_name)
        for file in files:
            try:
                source.add(file)
            except (BadFileError, OSError) as err:
                self.skipped[str(file)] = str(err)
        if not len(source):
            reasons = "; ".join(f"{path}: {reason}" for path, reason in list(self.skipped.items())[:3])
            raise ValueError(f"none of the {len(files)} files of the original system in {self.path} can be read: {reasons}")
        return source


class _Files(TrajectorySource):
    """Files of the original, opened one by one when they are read; without an observation space, the widest of the first."""

    def __init__(self, obs_space: gym.spaces.Dict | None, action_space: gym.Space[Any], env_name: str | None):
        self._env_name, self._obs_space, self.action_spec = env_name, obs_space, action_spec(action_space)
        self._paths: list[Path] = []
        self.lengths = np.zeros(0, np.int64)

    def add(self, path: Path) -> None:
        """Check a file.

        Raises:
            BadFileError: it cannot be read, or has other spaces.
        """
        self.lengths = np.append(self.lengths, len(self._read(path)))
        self._paths.append(path)

    def read(self, index: int, start: int = 0, stop: int | None = None) -> StoredTraj:
        return self._read(self._paths[index]).slice(start, stop)

    def _read(self, path: Path) -> StoredTraj:
        traj = read_file(path)
        found = {key: (a.dtype, a.shape[1:]) for key, a in traj.obs.items()}
        if not self._paths:
            self.obs_space = formats.widest_space(found) if self._obs_space is None else self._obs_space
        formats.check_observations(self.obs_space, found)
        formats.check_vectors(self.action_spec, traj.actions)
        boxes = self.obs_space.spaces
        traj.obs = {k: a.reshape(len(a), *(boxes[k].shape or ())).astype(boxes[k].dtype) for k, a in traj.obs.items()}
        name = formats.of_original_name(path.name)[0] if self._env_name is None else self._env_name
        return traj.to_stored(self.action_spec, name)


def read_file(path: Path) -> FrozenTraj:
    """The trajectory in a file of the original system, ``.npz`` or ``.traj``.

    Raises:
        BadFileError: the file holds no trajectory; nothing in a pickle has been run.
        FileNotFoundError: there is no such file.
    """
    try:
        if path.suffix == formats.PICKLE:
            traj = _unpickle(path)
        else:
            with np.load(path, allow_pickle=False) as archive:
                traj = FrozenTraj.from_dict(archive)
        formats.check_original(traj)
        traj.rews, traj.dones = traj.rews.astype(np.float32), traj.dones.astype(bool)
        return traj
    except (BadFileError, FileNotFoundError):
        raise
    except Exception as err:  # a damaged pickle or archive raises almost anything
        raise BadFileError(f"it holds no trajectory that can be read: {err!r:.200}") from err


# Pickles

_NUMPY = {  # the functions that numpy's pickles call, whose modules differ between versions of numpy
    "_reconstruct": np.zeros(1).__reduce__()[0],
    "_frombuffer": np.zeros(1).__reduce_ex__(5)[0],
    "scalar": np.float32(0).__reduce__()[0],
    "ndarray": np.ndarray,
    "dtype": np.dtype,
}
_NUMPY_MODULES = ("numpy", "numpy.core.multiarray", "numpy._core.multiarray", "numpy.core.numeric", "numpy._core.numeric")


class _Trajectory:
    """Placeholder for the original's ``amago.hindsight.Trajectory``: an attribute ``timesteps``, a list of ``Timestep``, which
    have obs, prev_action, reward, time_idx and terminal, each with a leading axis of one."""


class _Unpickler(pickle.Unpickler):
    """Create only numpy arrays in plain containers and trajectories; any other name is refused before it is imported."""

    def find_class(self, module: str, name: str) -> Any:
        if module == "amago.hindsight" and name in ("Trajectory", "Timestep"):
            return _Trajectory
        if module == "amago.hindsight" and name == "FrozenTraj":
            return FrozenTraj
        if module in _NUMPY_MODULES and name in _NUMPY:
            return _NUMPY[name]
        if (module, name) == ("collections", "OrderedDict"):
            return dict
        if (module, name) == ("_codecs", "encode"):
            return _latin1
        raise BadFileError(f"the pickle names {module}.{name}, which is not part of a trajectory")


def _latin1(text: str, encoding: str = "latin1") -> bytes:
    return text.encode("latin1")


def _unpickle(path: Path) -> FrozenTraj:
    """The content of a pickled ``Trajectory`` or ``FrozenTraj``."""
    fd, info = open_regular(path)
    try:
        if info.st_size > MAX_PICKLE_BYTES:
            raise BadFileError(f"{info.st_size} bytes are more than the {MAX_PICKLE_BYTES} that a .traj file may have")
        content = _Unpickler(io.BytesIO(read_exactly(fd, info.st_size, 0))).load()
    finally:
        os.close(fd)
    if not isinstance(content, _Trajectory):
        return FrozenTraj(**vars(content))
    steps = vars(content)["timesteps"]
    rewards, actions, times, dones = (
        np.stack([np.asarray(vars(s)[name]).reshape(-1) for s in steps])
        for name in ("reward", "prev_action", "time_idx", "terminal")
    )
    obs = {k: np.stack([np.asarray(s.obs[k])[0] for s in steps]) for k in steps[0].obs}
    return FrozenTraj(obs, np.concatenate((rewards, actions), axis=1), times, rewards[1:], dones[1:], actions[1:])
