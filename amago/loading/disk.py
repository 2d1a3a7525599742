"""`DiskTrajDataset`, the replay buffer on disk; `HistoryDataset`, the learning histories in one; and single files of it."""

from __future__ import annotations

import functools
import logging
import os
from pathlib import Path
from typing import Any

import gin
import gymnasium as gym
import numpy as np
import torch
from numpy.typing import NDArray

from amago.data.batch import Batch, RLData
from amago.data.trajectory import FrozenTraj, StoredTraj
from amago.loading.dataset import DatasetSettings, RLDataset, check_same_spaces, checked_relabeler, sample_window
from amago.loading.loader import BatchBuffers
from amago.loading.offline.base import InMemory, OfflineDataset
from amago.loading.sampling import Chances, Draw, Sampling
from amago.relabeling import NoOpRelabeler, Relabeler
from amago.spaces import ActionSpec
from amago.store import EvictedError, StoreView, TrajectoryStore
from amago.store import index as store_index
from amago.store.files import BadFileError
from amago.store.schema import Schema
from amago.store.store import FIFO, PARTITIONS, PROTECTED

logger = logging.getLogger(__name__)


@gin.configurable(module="amago.loading")
class DiskTrajDataset(RLDataset):
    """The replay buffer: trajectories on disk, sampled at random.

    ``{dset_root}/{dset_name}/buffer/fifo`` is written by actors, its oldest files deleted; ``buffer/protected`` is sampled
    and never deleted. A trajectory is drawn by the rule ``sampling``, by default uniformly, then a window of it
    (`subsequence`).

    Args:
        dset_root: directory of all datasets ("~" is expanded).
        dset_name: name of this one.
        dset_max_size: trajectories kept in ``fifo``.
        dset_min_size: training waits until there are more trajectories than this.
        relabeler: rewrites each trajectory before the window is cut; default: none.
        dset_max_steps, dset_max_bytes: transitions, and bytes, kept in ``fifo``. All three limits hold at the same time. The
            oldest files are deleted, each as a whole, so up to one file more may remain.
        sampling: "uniform": every trajectory is as likely as any other. "length": every timestep is in as many training
            sequences as any other, on average over its trajectory; a trajectory of T transitions, of which `subsequence`
            chooses E on average, has the weight T / E. "priority": sequences by the TD error of their last update (R2D2,
            Kapturowski et al. 2019); a trajectory divides into sequences of ``max_seq_len``, and those that are new come first.
            Errors arrive after the update, so with ``dloader_workers`` above 0 a seeded run does not repeat exactly.
        balance: "env_name": each environment, by its name, has the same share of the sequences, and its trajectories share it
            by ``sampling``. None: trajectories are drawn without regard to their environments.
        priority_alpha, priority_beta, priority_eta: of "priority", in [0, 1]. A sequence is drawn in proportion to p^alpha, and
            its losses are weighted by P^-beta, P its probability among the sequences of its environment (``balance``) or among
            all; weights are scaled to a mean of 1, so that ``balance`` and the weights of a mixture hold for losses too. Its p
            is eta times the largest plus 1 - eta times the mean of abs(TD error) over its timesteps; without any loss, a tenth
            of its last value.

    Attributes:
        reads_batches: `sample_batch` reads its sequences directly into the batch, which is faster, instead of calling
            `sample_random_trajectory`. A subclass that does not change which sequences are drawn, or how they are read, keeps
            this by ``class Mine(DiskTrajDataset, reads_batches=True)``.
        fifo_filenames, all_filenames: absolute paths of the files in ``fifo`` (a set), and of all files (a list), since the
            last `on_end_of_collection`. Paths that a subclass's `_refresh_files` removes from ``all_filenames`` are not
            sampled.
    """

    reads_batches = lists_files = True

    def __init_subclass__(cls, reads_batches: bool = False, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        cls.reads_batches = reads_batches

    def __init__(
        self,
        dset_root: str | os.PathLike[str],
        dset_name: str,
        dset_max_size: float = float("inf"),
        dset_min_size: float = 0,
        relabeler: Relabeler | None = None,
        dset_max_steps: float = float("inf"),
        dset_max_bytes: float = float("inf"),
        sampling: str = "uniform",
        balance: str | None = None,
        priority_alpha: float = 0.9,
        priority_beta: float = 0.6,
        priority_eta: float = 0.9,
    ):
        limits = (
            ("size", dset_max_size, "trajectories"),
            ("steps", dset_max_steps, "transitions"),
            ("bytes", dset_max_bytes, "bytes"),
        )
        for what, limit, counted in limits:
            if not limit >= 1:
                raise ValueError(f"dset_max_{what} counts {counted} and must be at least 1, got {limit}")
        if not isinstance(dset_min_size, int | float | np.number) or not dset_min_size >= 0:
            raise ValueError(
                f"dset_min_size counts trajectories and must be at least 0, got {dset_min_size!r}; a relabeler is given by name, "
                "relabeler=..."
            )
        super().__init__(dset_name)
        self.dset_root, self.dset_min_size = Path(dset_root).expanduser().absolute(), dset_min_size
        self.dset_max_size, self.dset_max_steps, self.dset_max_bytes = dset_max_size, dset_max_steps, dset_max_bytes
        self.relabeler = checked_relabeler(relabeler)
        self._sampling = Sampling(sampling, balance, (priority_alpha, priority_beta, priority_eta))
        self.sampling, self.balance = sampling, balance
        self.priority_alpha, self.priority_beta, self.priority_eta = priority_alpha, priority_beta, priority_eta
        # the view that was drawn from last, its trajectories to sample, and their probabilities (None: alike)
        self._now: tuple[StoreView, NDArray[np.int64], Chances | None] | None = None
        self._store: TrajectoryStore | None = None
        self._pending_state: dict[str, Any] | None = None
        self._spaces: tuple[gym.spaces.Dict, gym.Space[Any]] | None = None  # of the policy
        self._checked: set[Schema] = set()  # that agree with them
        self.fifo_filenames: set[str] = set()
        self.all_filenames: list[str] = []
        self._chosen: set[str] | None = None  # the files to sample, if not all
        self._deleted = 0  # files

    @property
    def buffer_dir(self) -> Path:
        return self.dset_root / self.dset_name / "buffer"

    @property
    def fifo_path(self) -> str:
        """The directory that actors write."""
        return str(self.buffer_dir / FIFO)

    @property
    def protected_path(self) -> str:
        """The directory whose files are never deleted."""
        return str(self.buffer_dir / PROTECTED)

    @property
    def save_new_trajs_to(self) -> str:
        return self.fifo_path

    def get_description(self) -> str:
        return f"{self.dset_name}: trajectories in {self.buffer_dir}"

    @property
    def store(self) -> TrajectoryStore:
        """The opened store.

        Raises:
            RuntimeError: before `configure`.
        """
        if self._store is None:
            raise RuntimeError("the dataset is opened by Experiment.start(), or by configure(DatasetSettings(...))")
        return self._store

    def configure(self, settings: DatasetSettings | None = None, **values: object) -> None:
        super().configure(settings, **values)
        self._sampling.check(self.settings)
        if self._store is not None:
            self._store.close()
        limits = {"max_steps": self.dset_max_steps, "max_bytes": self.dset_max_bytes}
        self._store = TrajectoryStore(self.buffer_dir, self.dset_max_size, edit=self.has_edit_rights, **limits)
        if self._pending_state is not None:
            self._store.load_state_dict(self._pending_state)
            self._pending_state = None
        self._find_files()

    def close(self) -> None:
        if self._store is not None:
            self._store.close()

    # ---- files -----------------------------------------------------------------------------------------------------------

    def _find_files(self) -> None:
        """Find new files, delete the oldest beyond the limits, and choose those to sample."""
        self.store.refresh(evict=False)
        self._refresh_files()
        self._filter()
        known, chosen = self.store.paths(), set(self.all_filenames)
        if strangers := chosen - known:
            logger.warning(
                "all_filenames of %s has %d files that are no trajectory files in %s, such as %s: they are not sampled",
                self.dset_name, len(strangers), self.buffer_dir, min(strangers),
            )  # fmt: skip
        with self._sampling.lock:
            self._chosen, self._now = None if known <= chosen else chosen, None

    def _refresh_files(self) -> None:
        """List the files. Override, call super, and change ``all_filenames`` to sample only some of them."""
        self.fifo_filenames = set(self._list_abs_path_to_files(self.fifo_path))
        self.all_filenames = sorted(self._list_abs_path_to_files(self.protected_path)) + sorted(self.fifo_filenames)

    def _list_abs_path_to_files(self, directory: str) -> set[str]:
        """The trajectory files in a directory. Override to sample only some of them."""
        for partition, path in ((FIFO, self.fifo_path), (PROTECTED, self.protected_path)):
            if os.path.abspath(directory) == os.path.abspath(path):
                return set(self.store.paths_in(partition))
        return {os.path.join(directory, name) for name in os.listdir(directory) if not name.startswith(".")}

    def _filter(self) -> None:
        """Delete the oldest files in ``fifo`` beyond the limits. Override to delete others, or none."""
        self._deleted = self.store.evict().evicted_files
        if self._deleted:
            known = self.store.paths()
            self.fifo_filenames &= known
            self.all_filenames = [path for path in self.all_filenames if path in known]

    # ---- sampling --------------------------------------------------------------------------------------------------------

    def _drawn(self, rng: np.random.Generator) -> Draw:
        """A random trajectory among the files to sample."""
        view, indices, chances = self._sampled()
        if not len(indices):  # another process may have deleted all known files, and others may have come
            self._find_files()
            view, indices, chances = self._sampled()
        if not len(indices):
            raise RuntimeError(f"the replay buffer {self.buffer_dir} is empty: collect first, or check dset_root and dset_name")
        if chances is not None:
            return chances.draw(rng)
        return Draw(view, indices.item(rng.integers(len(indices))))

    def _sampled(self) -> tuple[StoreView, NDArray[np.int64], Chances | None]:
        """`_now` for the current view, which does not change when another thread adds or deletes files."""
        with self._sampling.lock:
            view, now = self.store.view(), self._now
            if now is None or now[0] is not view:
                indices = np.arange(len(view)) if self._chosen is None else view.indices_in(self._chosen)
                chances = None if self._sampling.plain else self._sampling.chances(view, indices, self.settings)
                self._now = now = view, indices, chances
            return now

    def sample_random_trajectory(self, rng: np.random.Generator | None = None) -> RLData:
        (settings, rng), whole = self.settings.drawing(rng), rng is None
        while True:
            view, index, piece, source = self._drawn(rng)
            read, spec = functools.partial(view.read, index, extras=self.settings.extra_fields), view.action_spec(index)
            try:
                if type(self)._traj_to_rl_data is not DiskTrajDataset._traj_to_rl_data:
                    data = self._traj_to_rl_data(read().derive(spec))
                    if not whole:
                        window = settings.max_seq_len, settings.padded_sampling, rng, settings.cut_short_trajectories
                        data = data.random_slice(*window)
                else:
                    length = int(view.lengths[index])
                    data = RLData.from_traj(sample_window(length, spec, read, self.relabeler, settings, rng, piece))
                data.source = source
                return data
            except EvictedError:  # deleted since the view was made: draw another
                pass

    def _traj_to_rl_data(self, traj: FrozenTraj) -> RLData:
        """A whole trajectory, relabelled, as tensors. An override is given all of each trajectory, which is cut afterwards."""
        return RLData.from_traj(self.relabeler(traj))

    def sample_batch(self, rng: np.random.Generator, batch_size: int) -> Batch:
        """Draw a batch: the sequences that `sample_random_trajectory` would draw with the same ``rng``.

        Where `reads_batches` is True and nothing is relabelled, they are read directly into the batch.
        """
        if not (self.reads_batches and isinstance(self.relabeler, NoOpRelabeler)):
            return super().sample_batch(rng, batch_size)
        state, settings = rng.bit_generator.state, self.settings
        buffers, row = None, 0
        while row < batch_size:
            view, index, piece, source = self._drawn(rng)
            start, stop = settings.window(int(view.lengths[index]), rng, piece)
            schema = view.schema(index)
            if buffers is None:
                buffers = BatchBuffers(schema, batch_size, settings.max_seq_len, settings.extra_fields)
            if schema is not buffers.schema:  # files with other fields
                rng.bit_generator.state = state
                return super().sample_batch(rng, batch_size)
            try:
                buffers.read(row, view, index, start, stop)
                buffers.sources.append(source)
                row += 1
            except EvictedError:  # deleted since the view was made: draw another
                pass
        assert buffers is not None
        return buffers.batch()

    def check_spaces(self, obs_space: gym.spaces.Dict, action_space: gym.Space[Any]) -> None:
        super().check_spaces(obs_space, action_space)
        self.store.set_spaces(obs_space, action_space)
        self._spaces, self._checked = (obs_space, action_space), set()
        self._check_new_kinds()

    def _check_new_kinds(self) -> None:
        """Compare the spaces of added files with the policy's; files of other processes may come at any time."""
        view, what = self.store.view(), f"the replay buffer {self.buffer_dir}"
        for _, schema in view.kinds():
            if self._spaces is not None and schema not in self._checked:
                check_same_spaces(what, schema.obs_space, schema.action_spec, *self._spaces)
                self._checked.add(schema)

    @property
    def ready_for_training(self) -> bool:
        return len(self._sampled()[1]) > self.dset_min_size

    def on_end_of_collection(self, experiment: object = None) -> dict[str, float]:
        self._find_files()
        self._check_new_kinds()
        sizes = self.store.info()
        return sizes | {
            "Trajectory Files Saved in FIFO Replay Buffer": float(len(self.fifo_filenames)),
            "Total Trajectory Files in Replay Buffer": float(len(self.all_filenames)),
            "Trajectory Files Deleted": float(self._deleted),
            "Buffer Disk Space (GB)": sizes["bytes"] / 1e9,
        }

    @property
    def collected_steps(self) -> int | None:
        return None if self._store is None else self._store.collected_steps

    def describe(self) -> str:
        return f"{self.buffer_dir}: {len(self.store):,} trajectories{self._sampling}"

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
        priorities = {"priorities": self._sampling.state_dict()} if self._sampling.by_priority else {}
        return {"store": self.store.state_dict()} | priorities

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self._sampling.by_priority and "priorities" in state:
            self._sampling.load_state_dict(state["priorities"])
        self._now = None
        if self._store is None:
            self._pending_state = state["store"]
        else:
            self._store.load_state_dict(state["store"])
            self._find_files()


@gin.configurable(module="amago.loading")
class HistoryDataset(OfflineDataset):
    """Sequences over the episodes of a learning history, for cloning: the model sees how returns rose, and goes on with it
    (Algorithm Distillation, Laskin et al. 2022, arXiv 2210.14215). A history holds the trajectories of one environment's name in the order in
    which they were stored; the first observation of an episode takes the place of the last one of the episode before.

    A sequence may begin anywhere in a history, and looks like the start of a rollout: time index 0, no reward or action before. Ends of
    episodes within it are no terminations. Meant for an environment whose rollout spans several attempts, and for cloning
    (``Agent(online_coeff=0, offline_coeff=1, fake_filter=True)``): values are not those of the recorded episodes.

    Args:
        path: directory of a run or of its buffer, which is held in memory.
        every: keep every so many episodes of a history, whose learning is then as much faster.
        label: the name of an integer extra field (rows "T"), the index of the best action of a discrete action space, which is cloned in place of
            the action taken (Decision-Pretrained Transformer, Lee et al. 2023, arXiv 2306.14892). The actions taken remain in the inputs.

    Raises:
        ValueError: (when opened) there are no trajectories, or no such label.
    """

    def __init__(self, path: str | Path, every: int = 1, label: str | None = None):
        super().__init__()
        if isinstance(every, bool) or not isinstance(every, int) or every < 1:
            raise ValueError(f"every must be a whole number of at least 1, got {every!r}")
        self.path, self.every, self.label = Path(path).expanduser(), every, label

    @property
    def name(self) -> str:
        return str(self.path)

    def load(self) -> InMemory:
        root = next((p for p in (self.path / "buffer", self.path) if any((p / x).is_dir() for x in PARTITIONS)), self.path)
        store = TrajectoryStore(root, edit=False)
        store.refresh()
        view = store.view()
        histories: dict[str, list[int]] = {}
        if not len(view):
            raise ValueError(f"{self.path} has no trajectories")
        for i in range(len(view)):
            histories.setdefault(view.env_name(i), []).append(i)
        joined = [_history([view.read(i) for i in found[:: self.every]]) for found in histories.values()]
        spec: ActionSpec = view.action_spec(0)
        if self.label is not None and (spec.kind != "discrete" or any(self.label not in t.extras for t in joined)):
            raise ValueError(
                f"{self.path} has no extra field {self.label!r} in all trajectories, or its actions are not discrete"
            )
        return InMemory(joined, view.obs_space(0), spec, view.schema(0).extras)

    def sample_random_trajectory(self, rng: np.random.Generator | None = None) -> RLData:
        data = super().sample_random_trajectory(rng)
        data.time_idxs = data.time_idxs - data.time_idxs[0]
        data.rl2s[0] = 0.0
        if self.label is not None:
            data.actions = torch.nn.functional.one_hot(
                data.extras[self.label].long().reshape(-1), data.actions.shape[-1]
            ).float()
        return data


def _history(trajs: list[StoredTraj]) -> StoredTraj:
    def joined(arrays: list[Any], keep_last: bool = False) -> Any:
        return np.concatenate([a[:-1] if keep_last and i < len(arrays) - 1 else a for i, a in enumerate(arrays)])

    actions = joined([t.actions for t in trajs])
    return StoredTraj(
        {k: joined([t.obs[k] for t in trajs], True) for k in trajs[0].obs}, actions, joined([t.rews for t in trajs]),
        np.zeros((len(actions), 1), bool), env_name=trajs[0].env_name,
        extras={k: joined([t.extras[k] for t in trajs]) for k in trajs[0].extras if all(len(t.extras[k]) == len(t) for t in trajs)},
    )  # fmt: skip


def get_path_to_trajs(dset_root: str | os.PathLike[str], dset_name: str, fifo: bool = True) -> str:
    """The directory of a replay buffer's files: of the files that actors write, deleted in turn, or of the files that are
    kept."""
    return os.path.join(dset_root, dset_name, "buffer", FIFO if fifo else PROTECTED)


def load_traj_from_disk(path: str | os.PathLike[str]) -> FrozenTraj:
    """The trajectory in a file of a replay buffer; actions of the original system's files are as they are recorded, vectors.

    Raises:
        ValueError: the file is damaged, is no trajectory file, or holds several trajectories (a segment).
        PickleRefusedError: a ``.traj`` pickle.
        FileNotFoundError: there is no such file.
    """
    path = Path(path).absolute()
    try:
        entry = store_index.load(path.parent.parent, path.parent.name, path.name)
    except BadFileError as err:
        raise ValueError(f"{path}: {err}") from err
    if entry.n != 1:
        raise ValueError(f"{path} holds {entry.n} trajectories; read them with amago.store.TrajectoryStore")
    view = StoreView(path.parent.parent, [entry])
    return view.read(0).derive(view.action_spec(0))
