"""The base class of data sets recorded by other programs."""

from __future__ import annotations

from abc import abstractmethod
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np

from amago.data.batch import RLData
from amago.data.relabel import Relabeler
from amago.data.trajectory import FrozenTraj, StoredTraj
from amago.loading.dataset import (
    DatasetSettings,
    RLDataset,
    check_same_box,
    check_same_spaces,
    checked_relabeler,
    sample_window,
)
from amago.loading.sources import TrajectorySource, copy_to

_RETURNS_READ = 200


class OfflineDataset(RLDataset):
    """Recorded trajectories that never change, sampled as from a `DiskTrajDataset`: a trajectory uniformly, then a window of it.

    Subclass, and override `load`.

    Args:
        relabeler: rewrites each trajectory before the window is cut; default: none.
    """

    def __init__(self, relabeler: Relabeler | None = None):
        self.relabeler = checked_relabeler(relabeler)
        self._source: TrajectorySource | None = None

    @abstractmethod
    def load(self) -> TrajectorySource:
        """Open the recording; called once, by `configure` or `source`."""

    @property
    def name(self) -> str:
        """The data set in messages."""
        return type(self).__name__

    @property
    def source(self) -> TrajectorySource:
        """The trajectories, opened at first use.

        Raises:
            ValueError: the recording cannot be read, or has no trajectories.
        """
        if self._source is None:
            source = self.load()
            if not len(source):
                raise ValueError(f"{self.name} has no trajectory of at least one transition")
            self._source = source
        return self._source

    def __len__(self) -> int:
        """Trajectories."""
        return len(self.source)

    def configure(self, settings: DatasetSettings | None = None, **values: Any) -> None:
        super().configure(settings, **values)
        _ = self.source

    def check_spaces(self, obs_space: gym.spaces.Dict, action_space: gym.Space[Any]) -> None:
        super().check_spaces(obs_space, action_space)
        spec = self.source.action_spec
        check_same_spaces(self.name, self.source.obs_space, spec, obs_space, action_space)
        check_same_box(self.name, spec.space, action_space)

    def sample_random_trajectory(self, rng: np.random.Generator | None = None) -> RLData:
        self.check_configured()
        (settings, rng), source = self.settings.drawing(rng), self.source
        index = int(rng.integers(len(source)))
        return RLData.from_traj(self._window(source, index, settings, rng))

    def _window(self, source: TrajectorySource, index: int, settings: DatasetSettings, rng: np.random.Generator) -> FrozenTraj:
        def read(start: int = 0, stop: int | None = None) -> StoredTraj:
            return source.read(index, start, stop)

        return sample_window(int(source.lengths[index]), source.action_spec, read, self.relabeler, settings, rng)

    def describe(self) -> str:
        """Name, trajectories, steps, and the mean return of at most `_RETURNS_READ` of them, evenly spaced."""
        source = self.source
        indices = np.linspace(0, len(source) - 1, min(len(source), _RETURNS_READ)).astype(int)
        mean = float(np.mean([source.read(int(i)).rews.sum(dtype=np.float64) for i in indices]))
        size = f"{len(source):,} trajectories, {int(source.lengths.sum()):,} steps"
        return f"{self.name}: {size}, mean return {mean:.4g}" + (f" (of {len(indices)})" if len(indices) < len(source) else "")

    def copy_to(self, directory: str | Path, writer: str = "import", **options: Any) -> int:
        """Write all trajectories into a directory of a replay buffer; see `amago.loading.sources.copy_to`."""
        return copy_to(self.source, directory, writer, **options)

    def on_end_of_collection(self, experiment: Any = None) -> dict[str, float]:
        return {"trajectories": float(len(self.source)), "timesteps": float(self.source.lengths.sum())}
