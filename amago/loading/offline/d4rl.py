"""D4RL's HDF5 files (Fu et al. 2020, arXiv:2004.07219), read without the d4rl package."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import gin
import gymnasium as gym
import numpy as np
from numpy.typing import NDArray

from amago.data.relabel import Relabeler
from amago.loading.offline.arrays import ArrayDataset
from amago.loading.offline.base import OfflineDataset
from amago.loading.sources import SLACK, InMemory

Array = NDArray[Any]

_MAX_RATIO = 1000  # of declared to stored bytes
_FIELDS = ("observations", "actions", "rewards", "terminals", "timeouts", "next_observations")


@gin.configurable(module="amago.loading")
class D4RLDataset(OfflineDataset):
    """A D4RL file: N rows of ``observations``, ``actions``, ``rewards``, ``terminals``, and usually ``timeouts``.

    Episodes end at ``terminals`` (termination) and at ``timeouts`` (truncation, bootstrapped). If a file has no
    ``next_observations``, as most, the last row of a truncated episode serves as its final observation only; see
    `ArrayDataset`.

    A file without ``timeouts`` does not record resets by the time limit. Its episodes are cut after ``max_episode_steps``
    rows, and wherever ``next_observations`` differs from the observation of the next row.

    Args:
        path: the ``.hdf5`` file.
        max_episode_steps: the environment's time limit; needed if the file has neither ``timeouts`` nor
            ``next_observations`` (``float("inf")``: every episode ends by termination).
        action_space: default: a Box from -1 to 1, as in D4RL's environments.
        observation_space: default: an unlimited Box.
        env_name: name in the statistics by environment; default: the file's name.
        relabeler: rewrites each trajectory before a training sequence is cut from it.

    Raises:
        ValueError: (when opened) the file cannot be read, or the ends of its episodes or its action space are unknown.
        ImportError: h5py is not installed.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        max_episode_steps: float | None = None,
        action_space: gym.Space[Any] | None = None,
        observation_space: gym.Space[Any] | None = None,
        env_name: str | None = None,
        relabeler: Relabeler | None = None,
    ):
        super().__init__(relabeler)
        if max_episode_steps is not None and not max_episode_steps >= 1:
            raise ValueError(f"max_episode_steps must be at least 1, got {max_episode_steps!r}")
        self.path, self.max_episode_steps = Path(path).expanduser(), max_episode_steps
        self.action_space, self.observation_space = action_space, observation_space
        self.env_name = self.path.stem if env_name is None else env_name

    @property
    def name(self) -> str:
        return str(self.path)

    def load(self) -> InMemory:
        rows = read_hdf5(self.path)
        space = self.action_space
        if space is None:
            if rows["actions"].ndim != 2 or not np.abs(rows["actions"]).max(initial=0.0) <= 1 + SLACK:
                raise ValueError(
                    f"{self.path}: actions of shape {rows['actions'].shape} up to {np.abs(rows['actions']).max():g} are not in a Box "
                    "from -1 to 1; pass action_space"
                )
            space = gym.spaces.Box(-1.0, 1.0, shape=rows["actions"].shape[1:], dtype=np.float32)
        arrays = ArrayDataset(
            rows["observations"], rows["actions"], rows["rewards"], rows["terminals"], space,
            truncations=self._truncations(rows), next_observations=rows.get("next_observations"),
            observation_space=self.observation_space, env_name=self.env_name,
        )  # fmt: skip
        try:
            return arrays.load()
        except ValueError as err:
            raise ValueError(f"{self.path}: {err}") from err

    def _truncations(self, rows: dict[str, Array]) -> Array:
        if "timeouts" in rows:
            return rows["timeouts"].astype(bool).reshape(-1)
        limit, after = self.max_episode_steps, rows.get("next_observations")
        if limit is None and after is None:
            raise ValueError(
                f"{self.path} has neither timeouts nor next_observations, so resets by the time limit are unknown: pass "
                "max_episode_steps, the environment's limit (or float('inf') if every episode ends by termination)"
            )
        ends = rows["terminals"].astype(bool).reshape(-1)
        found = np.zeros(len(ends), dtype=bool)
        if after is not None:
            now = rows["observations"]
            same = np.isclose(after[:-1], now[1:], rtol=1e-5, atol=1e-6)
            follows = same.all(axis=tuple(range(1, same.ndim)))
            found[:-1] = ~follows & ~ends[:-1]
        return found if limit is None or np.isinf(limit) else _cut_after(ends | found, int(limit)) | found


def _cut_after(ends: Array, limit: int) -> Array:
    """True in each row that is the ``limit``-th of its episode, or the ``limit``-th after such a row."""
    n = len(ends)
    starts = np.concatenate(([0], np.flatnonzero(ends[:-1]) + 1)) if n else np.zeros(0, dtype=np.int64)
    first = np.repeat(starts, np.diff(np.append(starts, n)))
    return (np.arange(n) - first) % limit == limit - 1


def read_hdf5(path: Path) -> dict[str, Array]:
    """The arrays of a D4RL file, by their names in it.

    Raises:
        ValueError: there is no such file, it is not HDF5, or an array is missing or of another length.
        ImportError: h5py is not installed.
    """
    try:
        import h5py
    except ImportError as err:
        raise ImportError("reading HDF5 files needs h5py: pip install 'amago[offline]'") from err
    if not path.is_file():
        raise ValueError(f"there is no file {path}")
    try:
        with h5py.File(path, "r") as file:
            found = sorted(file)
            own = [n for n in _FIELDS if isinstance(file.get(n, getlink=True), h5py.HardLink)]  # links may point to other files
            sets = {name: file[name] for name in own if isinstance(file[name], h5py.Dataset)}
            declared, size = sum(d.nbytes for d in sets.values()), path.stat().st_size
            if declared > _MAX_RATIO * size:  # checked before memory is allocated
                raise ValueError(f"{path} declares {declared} bytes of data, but has only {size}")
            rows = {name: d[()] for name, d in sets.items()}
    except OSError as err:
        raise ValueError(f"{path} cannot be read as HDF5: {err}") from err
    missing = [name for name in _FIELDS[:4] if name not in rows]
    if missing:
        raise ValueError(f"{path} lacks {', '.join(missing)}, which a D4RL file has; it has {found}")
    n = rows["rewards"].size
    if n == 0:
        raise ValueError(f"{path} has no rows")
    for name, a in rows.items():
        if a.ndim == 0 or len(a) != n:
            raise ValueError(f"{path}: {name} has shape {a.shape}, but there are {n} rewards")
    return rows
