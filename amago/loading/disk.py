"""`DiskTrajDataset`, the replay buffer on disk."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import gin
import gymnasium as gym
import numpy as np

from amago.data.batch import Batch, RLData
from amago.data.relabel import NoOpRelabeler, Relabeler
from amago.data.trajectory import FrozenTraj, StoredTraj
from amago.loading.batching import BatchBuffers
from amago.loading.dataset import (
    DatasetSettings,
    RLDataset,
    check_same_box,
    check_same_spaces,
    checked_relabeler,
    sample_window,
)
from amago.spaces import action_spec
from amago.store import EvictedError, StoreView, TrajectoryStore
from amago.store.schema import Schema


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
        self._spaces: tuple[gym.spaces.Dict, gym.Space[Any]] | None = None  # of the policy
        self._checked: set[Schema] = set()  # that agree with them

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
            start, stop = self.settings.window(int(view.lengths[index]), rng)
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
        self._spaces, self._checked = (obs_space, action_space), set()
        self._check_new_kinds()

    def _check_new_kinds(self) -> None:
        """Compare the spaces of files that were added with those of the policy; files of other processes may come at any time."""
        view, what = self.store.view(), f"the replay buffer {self.buffer_dir}"
        for index, schema in view.kinds():
            if self._spaces is None or schema in self._checked:
                continue
            spec, (obs_space, action_space) = schema.action_spec, self._spaces
            if view.path(index).endswith(".traj") and spec.dim == action_spec(action_space).dim:
                action_space = spec.space  # this format records the width of actions only
            check_same_spaces(what, schema.obs_space, spec, obs_space, action_space)
            check_same_box(what, spec.space, action_space)
            self._checked.add(schema)

    @property
    def ready_for_training(self) -> bool:
        return len(self.store) > 0

    def on_end_of_collection(self) -> dict[str, float]:
        self.store.refresh()
        self._check_new_kinds()
        return self.store.info()

    def describe(self) -> str:
        return f"{self.buffer_dir}: {len(self.store):,} trajectories"

    def delete(self, *, delete_protected: bool = False, delete_quarantine: bool = False) -> None:
        """Delete the trajectories in ``fifo``; ``protected`` and ``quarantine`` only on request. Other files stay.

        Raises:
            RuntimeError: before `configure`.
            PermissionError: this process may not edit the buffer.
        """
        self.store.delete(delete_protected=delete_protected, delete_quarantine=delete_quarantine)

    def refused_files(self) -> dict[str, str]:
        return self.store.refused()

    def state_dict(self) -> dict[str, Any]:
        return {"store": self.store.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self._store is None:
            self._pending_state = state["store"]
        else:
            self._store.load_state_dict(state["store"])
            self._store.refresh()
