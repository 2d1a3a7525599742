"""Transitions in arrays, in ``.npz`` files and in D4RL's HDF5 files (Fu et al. 2020, arXiv:2004.07219) as datasets."""

from __future__ import annotations

import os
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

import gin
import gymnasium as gym
import numpy as np
from numpy.typing import NDArray

from amago.data.trajectory import StoredTraj
from amago.loading.offline.base import SLACK, Converter, InMemory, OfflineDataset, as_flags
from amago.registry import require
from amago.relabeling import Relabeler

Array = NDArray[Any]
Rows = Array | Mapping[str, Array]


def action_rows(space: gym.Space[Any], actions: Rows) -> Any:
    """N recorded actions in the form of the space: an array, or a dict or tuple of arrays of N rows.

    Args:
        space: the environment's action space.
        actions: (N, ...); of a Tuple or Dict either {name: (N, ...)} with an array for each part, where parts of parts are
            named "arm/grip" and parts of a tuple "0", "1", .., or (N, W): the numbers of the parts side by side, in the order
            of the space.

    Raises:
        ValueError: names or widths that do not fit, or numbers that no action of the space has.
    """
    leaves: dict[str, gym.Space[Any]] = {}
    _map_leaves(space, leaves.setdefault)
    if "" in leaves:
        if isinstance(actions, Mapping):
            raise ValueError(f"actions has parts {sorted(actions)}, but {space} has none")
        return _exact("actions", np.asarray(actions), space)
    if isinstance(actions, Mapping):
        if actions.keys() != leaves.keys():
            raise ValueError(f"actions has parts {sorted(actions)}, but the space has {sorted(leaves)}")
    else:
        table, widths = np.asarray(actions), {name: prod(leaf.shape or ()) for name, leaf in leaves.items()}
        if table.ndim != 2 or table.shape[1] != sum(widths.values()):
            needs = ", ".join(f"{width} of {name}" for name, width in widths.items())
            raise ValueError(
                f"actions has shape {table.shape}, but {space} needs {sum(widths.values())} numbers in each row: {needs}"
            )
        actions = dict(zip(widths, np.split(table, np.cumsum(list(widths.values()))[:-1], axis=1), strict=True))
    parts = {}
    for name, leaf in leaves.items():
        values, row = np.asarray(actions[name]), leaf.shape or ()
        if values.ndim == 0 or values.size != len(values) * prod(row):
            raise ValueError(f"actions[{name!r}] has shape {values.shape}, but {leaf} needs (N, *{row})")
        parts[name] = _exact(f"actions[{name!r}]", values.reshape(-1, *row), leaf)
    return _map_leaves(space, lambda name, _: parts[name])


def _map_leaves(space: gym.Space[Any], f: Callable[[str, gym.Space[Any]], Any], name: str = "") -> Any:
    """``f(name, part)`` of each part of a Tuple or Dict, in dicts and tuples like the space's; of another space itself, with the name ""."""
    prefix = f"{name}/" if name else ""
    if isinstance(space, gym.spaces.Dict):
        return {key: _map_leaves(sub, f, f"{prefix}{key}") for key, sub in space.spaces.items()}
    if isinstance(space, gym.spaces.Tuple):
        return tuple(_map_leaves(sub, f, f"{prefix}{i}") for i, sub in enumerate(space.spaces))
    return f(name, space)


def _exact(label: str, values: Array, space: gym.Space[Any]) -> Array:
    """Refuse choices and bits that are not whole; integers come back."""
    if not isinstance(space, gym.spaces.Discrete | gym.spaces.MultiDiscrete | gym.spaces.MultiBinary):
        return values
    if values.dtype.kind not in "iubf":
        raise ValueError(f"{label} has dtype {values.dtype}, but {space} takes whole numbers")
    bits = isinstance(space, gym.spaces.MultiBinary)
    with np.errstate(invalid="ignore"):
        whole = values.astype(np.int64) if values.dtype.kind == "f" else values
    right = (values == 0) | (values == 1) if bits else whole == values
    if not right.all():
        at = tuple(int(i) for i in np.argwhere(~right)[0])
        words = "bits 0 or 1" if bits else "whole numbers"
        raise ValueError(f"{label} is {values[at]} in row {at[0]}, but {space} takes {words}")
    return whole


def _each(f: Callable[..., Any], rows: Any, *others: Any) -> Any:
    """``f`` of each array in nested dicts and tuples."""
    if isinstance(rows, Mapping):
        return {k: _each(f, v, *(other[k] for other in others)) for k, v in rows.items()}
    if isinstance(rows, tuple):
        return tuple(_each(f, v, *(other[i] for other in others)) for i, v in enumerate(rows))
    return f(rows, *others)


@gin.configurable(module="amago.loading")
class ArrayDataset(OfflineDataset):
    """Transitions in arrays of N rows, in the order in which they happened, one episode after the other.

    Row i holds an observation, the action taken there, and the reward and end flags that followed. An episode ends after a row
    with ``terminations`` or ``truncations``, and with the last row; no sequence crosses the end of an episode.

    With ``next_observations`` every row is a transition. Without, the observation after the last row of an episode is unknown.
    If the episode was truncated (or ends with the data), that observation would be bootstrapped from, so the last row serves as
    the final observation only. If it terminated, the value there is zero, so the last observation is repeated instead.

    Args:
        observations: (N, ...), or {key: (N, ...)}.
        actions: (N, ...), as the environment takes them; of a Tuple or Dict see `action_rows`.
        rewards, terminations: (N,).
        action_space: the environment's.
        truncations: (N,); default: none.
        next_observations: like ``observations``.
        observation_space: the environment's; default: boxes bounded by their dtypes only.
        env_name: name in the statistics by environment: one for all, or one for each row (its first row names an episode).
        relabeler: rewrites each trajectory before a training sequence is cut from it.
        skip_damaged: leave out episodes that hold numbers that are not finite, or actions outside of their space, with a
            warning that names each.

    Raises:
        ValueError: (when opened) arrays of different lengths, numbers that are not finite, actions outside of their space.
    """

    def __init__(
        self,
        observations: Rows,
        actions: Rows,
        rewards: Array,
        terminations: Array,
        action_space: gym.Space[Any],
        truncations: Array | None = None,
        next_observations: Rows | None = None,
        observation_space: gym.Space[Any] | None = None,
        env_name: str | Sequence[str] = "arrays",
        relabeler: Relabeler | None = None,
        skip_damaged: bool = False,
    ):
        super().__init__(relabeler, skip_damaged)
        self.observations, self.actions = _each(np.asarray, observations), _each(np.asarray, actions)
        self.next_observations = None if next_observations is None else _each(np.asarray, next_observations)
        self.rewards, self.terminations = np.asarray(rewards), np.asarray(terminations)
        self.truncations = np.zeros(len(self.rewards), bool) if truncations is None else np.asarray(truncations)
        self.action_space, self.observation_space = action_space, observation_space
        self.env_name: Any = env_name if isinstance(env_name, str) else np.asarray(env_name)

    def load(self) -> InMemory:
        rows = checked(self.name, {name: vars(self)[name] for name in ALIASES})
        space = infer_space(self.observations) if self.observation_space is None else self.observation_space
        converter = Converter(space, self.action_space)
        try:
            actions = action_rows(self.action_space, self.actions)
        except ValueError as err:
            raise ValueError(f"{self.name}: {err}") from err
        source = InMemory(self._episodes(converter, rows | {"actions": actions}), converter.obs_space, converter.spec)
        converter.report(self.name)
        return source

    def _episodes(self, converter: Converter, rows: dict[str, Any]) -> Iterator[StoredTraj]:
        terminations, truncations, complete = rows["terminations"], rows["truncations"], self.next_observations is not None
        last = self.next_observations if complete else self.observations
        ends = np.union1d(np.flatnonzero(terminations | truncations) + 1, len(terminations) or [])
        for start, end in zip(np.append(0, ends[:-1]).tolist(), ends.tolist()):
            stop = end if complete or terminations[end - 1] else end - 1
            if start == stop:
                continue
            steps, where = slice(start, stop), f"{self.name}, rows {start} to {end - 1}"
            obs = _each(lambda a, b, s=steps, e=end: np.concatenate((a[s], b[e - 1 : e])), self.observations, last)
            taken = _each(lambda a, s=steps: a[s], rows["actions"])
            name = self.env_name if isinstance(self.env_name, str) else str(self.env_name[start])
            try:
                yield converter.convert(where, obs, taken, self.rewards[steps], terminations[steps], name)
            except ValueError as err:
                self.leave_out(where, err)


def checked(where: str, rows: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of `ArrayDataset` by name, with the ends of episodes as bool (N,).

    Raises:
        ValueError: arrays of different lengths, next observations of another shape, or ends that are not 0 or 1.
    """
    n = np.size(rows["rewards"])
    for name, value in rows.items():
        for key, array in value.items() if isinstance(value, Mapping) else ((None, value),):
            if not (array is None or isinstance(array, str) or np.shape(array)[:1] == (n,)):
                part = name if key is None else f"{name}[{key!r}]"
                raise ValueError(f"{where}: {part} has shape {np.shape(array)}, but there are {n} rewards")
    if (after := rows.get("next_observations")) is not None:
        first, second = _each(np.shape, rows["observations"]), _each(np.shape, after)
        if first != second:
            raise ValueError(f"{where}: next_observations has shape {second}, but observations has {first}")
    flags = {name: as_flags(f"{where}: {name}", rows[name]) for name in ("terminations", "truncations") if name in rows}
    return {**rows, **{name: values.reshape(n) for name, values in flags.items()}}


def infer_space(rows: Rows) -> gym.Space[Any]:
    """Boxes with the shapes of these rows: uint8 if the rows are, else float32."""
    if isinstance(rows, Mapping):
        return gym.spaces.Dict({k: infer_space(v) for k, v in rows.items()})
    if rows.dtype == np.uint8:
        return gym.spaces.Box(0, 255, shape=rows.shape[1:], dtype=np.uint8)
    return gym.spaces.Box(-np.inf, np.inf, shape=rows.shape[1:], dtype=np.float32)


ALIASES = {
    "observations": ("observations",), "actions": ("actions",), "rewards": ("rewards",),
    "terminations": ("terminations", "terminals", "dones"), "truncations": ("truncations", "timeouts"),
    "next_observations": ("next_observations",), "env_name": ("env_name", "env_names", "tasks"),
}  # fmt: skip
"""The arguments of `ArrayDataset`, and the names of the same arrays in files."""
_NEEDED = ("observations", "actions", "rewards", "terminations")


def _find(path: str | os.PathLike[str], names: list[str], own: set[str]) -> dict[str, str]:
    """{argument of `ArrayDataset`: its name among ``own``}; ValueError where a needed one is missing among ``names``."""
    found = {x: next(n for n in given if n in own) for x, given in ALIASES.items() if own.intersection(given)}
    if missing := [name for name in _NEEDED if name not in found]:
        raise ValueError(f"{path} lacks {', '.join(missing)}; it has {names}")
    return found


def read_npz(path: str | os.PathLike[str], fields: Mapping[str, str] | None = None) -> dict[str, Any]:
    """The arrays of an ``.npz`` file by the names of `ArrayDataset`'s arguments.

    ``observations`` may be one array or several named ``observations/KEY``, and so may ``next_observations`` and ``actions``;
    ``terminals`` or ``dones`` are read as ``terminations``, ``timeouts`` as ``truncations``, ``env_names`` as ``env_name``.

    Args:
        path: the file, or a directory of such files, in the order of their names; the end of a file ends an episode.
        fields: names in the file of these arrays, such as {"observations": "obs"}, or {"observations/camera": "pixels"}. With them, no
            episode of a file without terminations terminates.

    Raises:
        ValueError: a file cannot be read or lacks an array; the message lists the arrays that it has.
    """
    if os.path.isdir(path):
        files = [read_npz(file, fields) for file in sorted(Path(path).glob("*.npz"))]
        if not files or any(part.keys() != files[0].keys() for part in files):
            raise ValueError(f"{path} holds no .npz files" if not files else f"the files in {path} have different arrays")
        for part in files:
            part["truncations"] = part.get("truncations", np.zeros_like(part["terminations"])).copy()
            part["truncations"][-1:] |= ~part["terminations"][-1:]
        try:
            return {name: _each(lambda *rows: np.concatenate(rows), *(part[name] for part in files)) for name in files[0]}
        except (KeyError, ValueError) as err:
            raise ValueError(f"the files in {path} have different arrays: {err}") from err
    try:
        with zipfile.ZipFile(path), np.load(path, allow_pickle=False) as archive:
            rows: dict[str, Any] = dict(archive)
    except Exception as err:  # also of zipfile and zlib
        raise ValueError(f"{path} cannot be read as an .npz file of plain arrays: {err}") from err
    for name, own in (fields or {}).items():
        if own not in rows or name.partition("/")[0] not in ALIASES:
            raise ValueError(f"fields: {name}={own}, but {path} has {sorted(rows)}, and the fields are {', '.join(ALIASES)}")
        rows[name] = rows.pop(own)
    if fields and "terminations" not in fields and "rewards" in rows and not {*ALIASES["terminations"]} & rows.keys():
        rows["terminations"] = np.zeros(len(rows["rewards"]), bool)
    names = sorted(rows)
    for whole in ("observations", "next_observations", "actions"):
        if parts := {name.removeprefix(f"{whole}/"): rows[name] for name in names if name.startswith(f"{whole}/")}:
            rows[whole] = parts
    return checked(os.fspath(path), {x: rows[name] for x, name in _find(path, names, set(rows)).items()})


_MAX_RATIO = 1000  # of declared to stored bytes


@gin.configurable(module="amago.loading")
class D4RLDataset(OfflineDataset):
    """A D4RL file: N rows of ``observations``, ``actions``, ``rewards``, ``terminals`` (or ``dones``), and usually
    ``timeouts``.

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
        relabeler, skip_damaged: see `ArrayDataset`.

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
        skip_damaged: bool = False,
    ):
        super().__init__(relabeler, skip_damaged)
        if max_episode_steps is not None and not max_episode_steps >= 1:
            raise ValueError(f"max_episode_steps must be at least 1, got {max_episode_steps!r}")
        self.path, self.max_episode_steps = Path(path).expanduser(), max_episode_steps
        self.action_space, self.observation_space = action_space, observation_space
        self.env_name = self.path.stem if env_name is None else env_name

    @property
    def name(self) -> str:
        return str(self.path)

    def load(self) -> InMemory:
        rows: dict[str, Any] = read_hdf5(self.path)
        space = self.action_space
        if space is None:
            if rows["actions"].ndim != 2 or not np.abs(rows["actions"]).max(initial=0.0) <= 1 + SLACK:
                raise ValueError(
                    f"{self.path}: actions of shape {rows['actions'].shape} up to {np.abs(rows['actions']).max():g} are not in a Box "
                    "from -1 to 1; pass action_space"
                )
            space = gym.spaces.Box(-1.0, 1.0, shape=rows["actions"].shape[1:], dtype=np.float32)
        rows["truncations"] = self._truncations(rows)
        arrays = ArrayDataset(
            **rows, action_space=space, observation_space=self.observation_space, env_name=self.env_name,
            skip_damaged=self.skip_damaged,
        )  # fmt: skip
        arrays.title, self.damaged = self.name, arrays.damaged
        return arrays.load()

    def _truncations(self, rows: dict[str, Array]) -> Array:
        if "truncations" in rows:
            return rows["truncations"]
        limit, after = self.max_episode_steps, rows.get("next_observations")
        if limit is None and after is None:
            raise ValueError(
                f"{self.path} has neither timeouts nor next_observations, so resets by the time limit are unknown: pass "
                "max_episode_steps, the environment's limit (or float('inf') if every episode ends by termination)"
            )
        ends = rows["terminations"]
        found = np.zeros(len(ends), dtype=bool)
        if after is not None:
            same = np.isclose(after[:-1], rows["observations"][1:], rtol=1e-5, atol=1e-6)
            found[:-1] = ~same.all(axis=tuple(range(1, same.ndim))) & ~ends[:-1]
        if limit is not None and not np.isinf(limit):
            steps = np.arange(len(ends))
            starts = np.concatenate(([True], (ends | found)[:-1]))
            first = np.maximum.accumulate(np.where(starts, steps, 0))
            found |= (steps - first) % int(limit) == int(limit) - 1
        return found


def read_hdf5(path: Path) -> dict[str, Array]:
    """The arrays of a D4RL file, by the names of `ArrayDataset`'s arguments.

    Raises:
        ValueError: there is no such file, it is not HDF5, or an array is missing.
        ImportError: h5py is not installed.
    """
    h5py = require("h5py", "offline", "reading HDF5 files")
    if not path.is_file():
        raise ValueError(f"there is no file {path}")
    try:
        with h5py.File(path, "r") as file:
            plain = {n for n in file if isinstance(file.get(n, getlink=True), h5py.HardLink)}  # others point to other files
            own = {n for n in plain if isinstance(file[n], h5py.Dataset)}
            sets = {x: file[name] for x, name in _find(path, sorted(file), own).items()}
            declared, size = sum(d.nbytes for d in sets.values()), path.stat().st_size
            if declared > _MAX_RATIO * size:  # checked before memory is allocated
                raise ValueError(f"{path} declares {declared} bytes of data, but has only {size}")
            return checked(str(path), {name: d[()] for name, d in sets.items()})
    except (OSError, RuntimeError, KeyError) as err:  # as h5py finds damage
        raise ValueError(f"{path} cannot be read as HDF5: {err}") from err
