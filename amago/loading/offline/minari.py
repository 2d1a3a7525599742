"""Minari data sets: reading them as a data set, and exporting trajectories to a new one."""

from __future__ import annotations

import contextlib
import json
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import gin
import gymnasium as gym
import numpy as np

from amago.data.extras import ExtraField
from amago.data.relabel import Relabeler
from amago.data.trajectory import StoredTraj, rows_of_extra
from amago.loading.offline.base import OfflineDataset
from amago.loading.sources import Converter, InMemory, TrajectorySource
from amago.spaces import ActionSpec

EXTRA = "pip install 'amago[offline]'"
_CHUNK_BYTES = 64 << 20
_EXTRAS = "extras"  # entry of an episode's infos that holds the extra fields


@gin.configurable(module="amago.loading")
class MinariDataset(OfflineDataset):
    """A local Minari data set; nothing is ever downloaded.

    Episodes that do not end with ``terminations`` count as truncated: their last observation is bootstrapped from. ``infos``
    are not read.

    Args:
        dataset: id, such as "D4RL/pointmaze/umaze-v2" (looked up in ``$MINARI_DATASETS_PATH`` or ``~/.minari/datasets``), or
            the directory of a data set.
        relabeler: rewrites each trajectory before a training sequence is cut from it.
        in_memory: read the whole data set when training starts. If False, an episode is read each time that a sequence is
            drawn from it, which is slower.
        obs_keys: of a Dict observation space, the keys to keep (text cannot be kept); default: all.
        env_name: name in the statistics by environment; default: the recorded environment's id.

    Raises:
        ValueError: (when opened) there is no such data set here, its spaces are not supported, or an episode does not fit.
        ImportError: minari is not installed.
    """

    def __init__(
        self,
        dataset: str | os.PathLike[str],
        relabeler: Relabeler | None = None,
        in_memory: bool = True,
        obs_keys: Iterable[str] | None = None,
        env_name: str | None = None,
    ):
        super().__init__(relabeler)
        if isinstance(obs_keys, str):
            raise ValueError(f"obs_keys must be a list of keys, got {obs_keys!r}; write [{obs_keys!r}]")
        self.dataset, self.in_memory, self.env_name = os.fspath(dataset), in_memory, env_name
        self.obs_keys = None if obs_keys is None else list(obs_keys)

    @property
    def name(self) -> str:
        return f"the Minari data set {self.dataset}"

    def load(self) -> TrajectorySource:
        source = _MinariSource(self.name, find(self.dataset), self.obs_keys, self.env_name)
        return InMemory(source, source.obs_space, source.action_spec) if self.in_memory else source


def find(dataset: str) -> Path:
    """The ``data`` directory of a data set with this id or path.

    Raises:
        ValueError: there is none; the message has the places that were searched.
    """
    base = os.environ.get("MINARI_DATASETS_PATH") or os.path.join(os.path.expanduser("~"), ".minari", "datasets")
    places = [Path(dataset).expanduser(), Path(base) / dataset]
    for place in places:
        for directory in (place / "data", place):
            if (directory / "metadata.json").is_file():
                return directory
    raise ValueError(
        f"there is no Minari data set {dataset!r}: neither {places[0]} nor {places[1]} has data/metadata.json "
        f"('minari download {dataset}' fetches one from its server)"
    )


class _MinariSource(TrajectorySource):
    """Reads an episode from disk each time that a part of it is requested."""

    def __init__(self, name: str, directory: Path, obs_keys: list[str] | None, env_name: str | None):
        try:
            import minari
        except ImportError as err:
            raise ImportError(f"Minari data sets need minari: {EXTRA}") from err
        metadata = _metadata(name, directory)
        self._name, self._env_name = name, env_name or _env_id(metadata)
        try:
            self._data = minari.MinariDataset(directory)
        except (ImportError, ValueError, KeyError, AssertionError) as err:
            raise ValueError(f"{name} cannot be opened: {err}") from err
        space = self._data.observation_space
        self._keys = obs_keys
        if obs_keys is not None:
            known = list(space.spaces) if isinstance(space, gym.spaces.Dict) else []
            if unknown := [k for k in obs_keys if k not in known]:
                raise ValueError(f"obs_keys {unknown} are not among the observations of {name}, {known}")
            space = gym.spaces.Dict({k: space[k] for k in obs_keys})
        self._converter = Converter(space, self._data.action_space)
        self.obs_space, self.action_spec = self._converter.obs_space, self._converter.spec
        ids = self._data.episode_indices
        found = self._data.storage.get_episode_metadata(ids)
        lengths = np.array([int(m["total_steps"]) for m in found], dtype=np.int64)
        self._ids, self.lengths = [int(i) for i in ids[lengths > 0]], lengths[lengths > 0]
        self.extra_fields = self._find_extras()

    def _find_extras(self) -> tuple[ExtraField, ...]:
        """The extra fields that `export` has written, as the longest episode has them."""
        if not self._ids:
            return ()
        longest = int(self.lengths.argmax())
        (episode,) = self._data.storage.get_episodes([self._ids[longest]])
        steps, found = int(self.lengths[longest]), _extras_of(episode)
        return tuple(ExtraField(k, rows_of_extra(k, len(a), steps), a.shape[1:], a.dtype.name) for k, a in found.items())

    def read(self, index: int, start: int = 0, stop: int | None = None) -> StoredTraj:
        whole = next(self._read_all([self._ids[index]]))
        return whole if start == 0 and stop is None else whole.slice(start, len(whole) if stop is None else stop)

    def __iter__(self) -> Iterator[StoredTraj]:
        yield from self._read_all(self._ids)
        self._converter.report(self._name)

    def _read_all(self, ids: list[int]) -> Iterator[StoredTraj]:
        for episode in self._data.storage.get_episodes(ids):
            obs = episode["observations"]
            if self._keys is not None:
                obs = {k: obs[k] for k in self._keys}
            where = f"{self._name}, episode {episode['id']}"
            traj = self._converter.convert(
                where, obs, episode["actions"], episode["rewards"], episode["terminations"], self._env_name
            )
            traj.extras = _extras_of(episode)
            yield traj


def _extras_of(episode: Mapping[str, Any]) -> dict[str, Any]:
    found = (episode.get("infos") or {}).get(_EXTRAS)
    return {k: np.ascontiguousarray(found[k]) for k in sorted(found)} if isinstance(found, Mapping) else {}


def _metadata(name: str, directory: Path) -> dict[str, Any]:
    try:
        metadata = json.loads((directory / "metadata.json").read_text(encoding="utf-8"))
        lacking = [k for k in ("observation_space", "action_space", "dataset_id") if not isinstance(metadata.get(k), str)]
    except (OSError, ValueError, AttributeError) as err:
        raise ValueError(f"{name}: {directory / 'metadata.json'} cannot be read: {err}") from err
    if lacking:  # minari would make the environment that the file names, and so run what it names
        raise ValueError(f"{name}: {directory / 'metadata.json'} lacks {', '.join(lacking)}")
    return metadata  # type: ignore[no-any-return]


def _env_id(metadata: dict[str, Any]) -> str:
    try:
        return str(json.loads(metadata["env_spec"])["id"])
    except (KeyError, TypeError, ValueError):
        return str(metadata["dataset_id"])


def export(
    trajs: Iterable[StoredTraj],
    obs_space: gym.spaces.Dict,
    spec: ActionSpec,
    dataset_id: str,
    description: str = "recorded by amago",
    progress: Callable[[StoredTraj], object] | None = None,
) -> int:
    """Write trajectories as a new Minari data set, in ``$MINARI_DATASETS_PATH`` or ``~/.minari/datasets``.

    Observations are written as stored (discrete ones one-hot); those of a space that was not a Dict as plain arrays. Actions
    are in the environment's form, extra fields in ``infos["extras"]``. The last step of a trajectory that does not terminate is marked as truncated.

    Args:
        dataset_id: "name-v0", or "namespace/name-v0".
        progress: called after each trajectory.

    Returns:
        Episodes written.

    Raises:
        ValueError: the id is malformed or taken, or there are no trajectories.
        ImportError: minari is not installed.
    """
    try:
        import minari
        from minari.data_collector import EpisodeBuffer
    except ImportError as err:
        raise ImportError(f"Minari data sets need minari: {EXTRA}") from err
    plain = list(obs_space.spaces) == ["observation"]
    space = obs_space["observation"] if plain else _as_space(_nested(obs_space.spaces))

    def episode(traj: StoredTraj) -> Any:
        ends = np.zeros(len(traj), dtype=bool)
        ends[-1] = not traj.dones[-1, 0]
        return EpisodeBuffer(
            observations=traj.obs["observation"] if plain else _nested(traj.obs),
            actions=_batched(spec, traj.actions),
            rewards=traj.rews[:, 0].astype(np.float64),
            terminations=traj.dones[:, 0],
            truncations=ends,
            infos={_EXTRAS: traj.extras} if traj.extras else {},
        )

    written, out = 0, None
    for chunk in _chunks(trajs):
        episodes = [episode(traj) for traj in chunk]
        if out is None:
            with _absolute_root(), warnings.catch_warnings():  # that author and so on are not given
                warnings.filterwarnings("ignore", category=UserWarning, module="minari")
                out = minari.create_dataset_from_buffers(
                    dataset_id, episodes, observation_space=space, action_space=spec.space, description=description,
                    data_format="hdf5", jpeg_encoding=False,
                )  # fmt: skip
        else:
            out.update_dataset_from_buffer(episodes)
        written += len(chunk)
        if progress is not None:
            for traj in chunk:
                progress(traj)
    if out is None:
        raise ValueError("there are no trajectories to export")
    return written


@contextlib.contextmanager
def _absolute_root() -> Iterator[None]:
    """Makes ``MINARI_DATASETS_PATH`` absolute: Minari would join a relative path to itself when it creates a data set."""
    name = "MINARI_DATASETS_PATH"
    given = os.environ.get(name)
    if given is None:
        yield
        return
    os.environ[name] = os.path.abspath(os.path.expanduser(given))
    try:
        yield
    finally:
        os.environ[name] = given


def _nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    """{"a/b": x} -> {"a": {"b": x}}, because HDF5 reads "/" in a name as a group."""
    out: dict[str, Any] = {}
    for key, value in flat.items():
        *groups, name = key.split("/")
        inner = out
        for group in groups:
            inner = inner.setdefault(group, {})
            if not isinstance(inner, dict):
                raise ValueError(f"observation {key!r} cannot be exported beside {group!r}: one is inside of the other")
        inner[name] = value
    return out


def _as_space(tree: Any) -> gym.Space[Any]:
    return gym.spaces.Dict({k: _as_space(v) for k, v in tree.items()}) if isinstance(tree, dict) else tree


def _batched(spec: ActionSpec, stored: Any) -> Any:
    """T actions in the environment's form: an array, or a dict or tuple of arrays."""
    if spec.kind in ("discrete", "continuous", "multibinary"):
        return spec.to_env(stored)
    return _stack([spec.to_env(a) for a in stored])


def _stack(actions: list[Any]) -> Any:
    if isinstance(actions[0], dict):
        return {k: _stack([a[k] for a in actions]) for k in actions[0]}
    if isinstance(actions[0], tuple):
        return tuple(_stack([a[i] for a in actions]) for i in range(len(actions[0])))
    return np.stack([np.asarray(a) for a in actions])


def _chunks(trajs: Iterable[StoredTraj]) -> Iterator[list[StoredTraj]]:
    chunk: list[StoredTraj] = []
    size = 0
    for traj in trajs:
        chunk.append(traj)
        size += sum(v.nbytes for v in traj.obs.values()) + traj.actions.nbytes + traj.rews.nbytes
        if size >= _CHUNK_BYTES:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk
