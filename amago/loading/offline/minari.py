"""Minari datasets: reading them as a dataset, and exporting trajectories to a new one."""

from __future__ import annotations

import itertools
import json
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest.mock import patch

import gin
import gymnasium as gym
import numpy as np

from amago.data.extras import ExtraField
from amago.data.trajectory import StoredTraj, rows_of_extra
from amago.loading.offline.base import Converter, InMemory, OfflineDataset, TrajectorySource, reading
from amago.registry import require
from amago.relabeling import Relabeler
from amago.spaces import ActionSpec

_CHUNK = 32  # episodes that are exported at a time
_NAME = "env_name"  # entry of an episode's options
_EXTRAS = "extras"  # entry of an episode's infos that holds the extra fields


def _root() -> Path:
    return Path(os.environ.get("MINARI_DATASETS_PATH") or "~/.minari/datasets").expanduser().absolute()


@gin.configurable(module="amago.loading")
class MinariDataset(OfflineDataset):
    """A local Minari dataset; nothing is ever downloaded.

    Episodes that do not end with ``terminations`` count as truncated: their last observation is bootstrapped from. ``infos``
    are not read.

    Args:
        dataset: id, such as "D4RL/pointmaze/umaze-v2" (looked up in ``$MINARI_DATASETS_PATH`` or ``~/.minari/datasets``), or
            the directory of a dataset.
        relabeler: rewrites each trajectory before a training sequence is cut from it.
        in_memory: read the whole dataset when training starts. If False, an episode is read each time that a sequence is
            drawn from it, which is slower.
        obs_keys: of a Dict observation space, the keys to keep (text cannot be kept); default: all.
        env_name: name in the statistics by environment; default: the name of each episode where `export` has written it, else the recorded
            environment's id.
        skip_damaged: leave out episodes that cannot be read, with a warning that names each; all are read when the dataset is
            opened.

    Raises:
        ValueError: (when opened) there is no such dataset here, its spaces are not supported, or an episode does not fit.
        ImportError: minari is not installed.
    """

    def __init__(
        self,
        dataset: str | os.PathLike[str],
        relabeler: Relabeler | None = None,
        in_memory: bool = True,
        obs_keys: Iterable[str] | None = None,
        env_name: str | None = None,
        skip_damaged: bool = False,
    ):
        super().__init__(relabeler, skip_damaged)
        if isinstance(obs_keys, str):
            raise ValueError(f"obs_keys must be a list of keys, got {obs_keys!r}; write [{obs_keys!r}]")
        self.dataset, self.in_memory, self.env_name = os.fspath(dataset), in_memory, env_name
        self.obs_keys = None if obs_keys is None else list(obs_keys)

    @property
    def name(self) -> str:
        return f"the Minari dataset {self.dataset}"

    def load(self) -> TrajectorySource:
        source = _MinariSource(self.name, find(self.dataset), self.obs_keys, self.env_name)
        if self.in_memory or self.skip_damaged:
            trajs = [traj for traj in source.sound(self.leave_out) if self.in_memory]
            if self.in_memory:
                return InMemory(trajs, source.obs_space, source.action_spec, source.find_extras())
        source.extra_fields = source.find_extras()
        return source


def find(dataset: str) -> Path:
    """The ``data`` directory of a dataset with this id or path.

    Raises:
        ValueError: there is none; the message has the places that were searched.
    """
    places = [Path(dataset).expanduser(), _root() / dataset]
    for place in places:
        for directory in (place / "data", place):
            if (directory / "metadata.json").is_file():
                return directory
    raise ValueError(
        f"there is no Minari dataset {dataset!r}: neither {places[0]} nor {places[1]} has data/metadata.json "
        f"('minari download {dataset}' fetches one from its server)"
    )


class _MinariSource(TrajectorySource):
    """Episodes that are read from disk each time that a part of one is requested."""

    def __init__(self, name: str, directory: Path, obs_keys: list[str] | None, env_name: str | None):
        minari, metadata = require("minari", "offline"), _metadata(name, directory)
        self._name, self._keys = name, obs_keys
        try:
            data = minari.MinariDataset(directory)
        except Exception as err:  # of the libraries below it, too
            raise ValueError(f"{name} cannot be opened: {err}") from err
        space, self._storage = data.observation_space, data.storage
        if obs_keys is not None:
            known = list(space.spaces) if isinstance(space, gym.spaces.Dict) else []
            if unknown := [k for k in obs_keys if k not in known]:
                raise ValueError(f"obs_keys {unknown} are not among the observations of {name}, {known}")
            space = gym.spaces.Dict({k: space[k] for k in obs_keys})
        self._converter = Converter(space, data.action_space)
        self.obs_space, self.action_spec = self._converter.obs_space, self._converter.spec
        ids = [int(i) for i in data.episode_indices]
        about = list(self._storage.get_episode_metadata(ids))
        own, steps = _env_id(metadata), [int(m["total_steps"]) for m in about]
        self._env_names = {
            i: env_name or str((m.get("options") or {}).get(_NAME, own)) for i, m in zip(ids, about, strict=True)
        }
        self._keep([(i, n) for i, n in zip(ids, steps, strict=True) if n > 0])

    def _keep(self, episodes: list[tuple[int, int]]) -> None:
        self._ids = [i for i, _ in episodes]
        self.lengths = np.array([n for _, n in episodes], dtype=np.int64)

    def sound(self, leave_out: Callable[[str, Exception], None]) -> Iterator[StoredTraj]:
        """The episodes that can be read; the source is reduced to these once all were read.

        Args:
            leave_out: called with each other episode and the reason.
        """
        kept: list[tuple[int, int]] = []
        for i in self._ids:
            try:
                traj = self._read(i)
            except (ValueError, TypeError) as err:
                leave_out(f"{self._name}, episode {i}", err)
                continue
            kept.append((i, len(traj)))
            yield traj
        self._keep(kept)
        self._converter.report(self._name)

    def find_extras(self) -> tuple[ExtraField, ...]:
        """The extra fields that `export` has written, as the longest episode has them."""
        if not self._ids:
            return ()
        longest = int(self.lengths.argmax())
        try:
            found = _extras_of(self._episode(self._ids[longest]))
        except ValueError as err:
            raise ValueError(f"{err} (skip_damaged=True leaves damaged episodes out)") from err
        steps = int(self.lengths[longest])
        return tuple(ExtraField(k, rows_of_extra(k, len(a), steps), a.shape[1:], a.dtype.name) for k, a in found.items())

    def read(self, index: int, start: int = 0, stop: int | None = None) -> StoredTraj:
        return self._read(self._ids[index]).slice(start, stop)

    def __iter__(self) -> Iterator[StoredTraj]:
        yield from super().__iter__()
        self._converter.report(self._name)

    def _episode(self, number: int) -> Mapping[str, Any]:
        with reading(f"{self._name}, episode {number}"):
            (episode,) = self._storage.get_episodes([number])
        return episode

    def _read(self, number: int) -> StoredTraj:
        where = f"{self._name}, episode {number}"
        with reading(where):
            episode = self._episode(number)
            obs = episode["observations"]
            if self._keys is not None:
                obs = {k: obs[k] for k in self._keys}
            columns = episode["actions"], episode["rewards"], episode["terminations"]
            traj = self._converter.convert(where, obs, *columns, self._env_names[number])
            traj.extras = _extras_of(episode)
        return traj


def _extras_of(episode: Mapping[str, Any]) -> dict[str, Any]:
    found = (episode.get("infos") or {}).get(_EXTRAS)
    return {k: np.ascontiguousarray(found[k]) for k in sorted(found)} if isinstance(found, Mapping) else {}


def _metadata(name: str, directory: Path) -> dict[str, Any]:
    try:
        metadata: dict[str, Any] = json.loads((directory / "metadata.json").read_text(encoding="utf-8"))
        lacking = [k for k in ("observation_space", "action_space", "dataset_id") if not isinstance(metadata.get(k), str)]
    except (OSError, ValueError, AttributeError) as err:
        raise ValueError(f"{name}: {directory / 'metadata.json'} cannot be read: {err}") from err
    if lacking:  # minari would make the environment that the file names, and so run code that the file chooses
        raise ValueError(f"{name}: {directory / 'metadata.json'} lacks {', '.join(lacking)}")
    return metadata


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
    progress: Callable[[StoredTraj], object] = lambda traj: None,
) -> int:
    """Write trajectories as a new Minari dataset, in ``$MINARI_DATASETS_PATH`` or ``~/.minari/datasets``.

    Observations are written as stored (discrete ones one-hot), as plain arrays if the space was not a Dict. Actions
    are in the environment's form, extra fields in ``infos["extras"]``, the environment's name in the episode's options. The last step
    of a trajectory that does not terminate is marked as truncated.

    Args:
        dataset_id: "name-v0", or "namespace/name-v0".
        progress: called after each trajectory.

    Returns:
        Episodes written.

    Raises:
        ValueError: the id is malformed or taken, or there are no trajectories.
        ImportError: minari is not installed.
    """
    minari = require("minari", "offline")
    from minari.data_collector import EpisodeBuffer

    plain = list(obs_space.spaces) == ["observation"]
    space = obs_space["observation"] if plain else _as_space(_nested(obs_space.spaces))

    def episode(traj: StoredTraj) -> EpisodeBuffer:
        ends = np.zeros(len(traj), dtype=bool)
        ends[-1] = not traj.dones[-1, 0]
        return EpisodeBuffer(
            observations=traj.obs["observation"] if plain else _nested(traj.obs),
            actions=spec.to_env(traj.actions),
            rewards=traj.rews[:, 0].astype(np.float64),
            terminations=traj.dones[:, 0],
            truncations=ends,
            infos={_EXTRAS: traj.extras} if traj.extras else {},
            options={_NAME: traj.env_name},
        )

    written, out = 0, None
    rest = iter(trajs)
    while chunk := list(itertools.islice(rest, _CHUNK)):
        episodes = [episode(traj) for traj in chunk]
        if out is None:
            # without warnings that author and other metadata are missing; Minari would join a relative path to itself
            with warnings.catch_warnings(), patch.dict(os.environ, MINARI_DATASETS_PATH=str(_root())):
                warnings.filterwarnings("ignore", category=UserWarning, module="minari")
                out = minari.create_dataset_from_buffers(
                    dataset_id, buffer=episodes, observation_space=space, action_space=spec.space,
                    description=description, data_format="hdf5", jpeg_encoding=False,
                )  # fmt: skip
        else:
            out.update_dataset_from_buffer(episodes)
        written += len(chunk)
        for traj in chunk:
            progress(traj)
    if out is None:
        raise ValueError("there are no trajectories to export")
    return written


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
