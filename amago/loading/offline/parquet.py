"""Parquet files: trajectories written as the ``datasets`` library and the viewer of the Hugging Face Hub read them, and read back; and
datasets of LeRobot.

A row is a timestep. The last row of an episode has its final observation, and no action, reward or end.
"""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import gin
import gymnasium as gym
import numpy as np
from numpy.typing import NDArray

from amago.data.extras import ExtraField
from amago.data.trajectory import StoredTraj
from amago.loading.offline.arrays import ArrayDataset
from amago.loading.offline.base import InMemory, OfflineDataset, check_trajectory, reading
from amago.registry import require
from amago.relabeling import Relabeler
from amago.spaces import ActionSpec, action_spec
from amago.spaces.descriptions import describe, from_description

Array = NDArray[Any]
log = logging.getLogger(__name__)
CARD, _DATA, _ABOUT, _OBSERVATION, _EXTRA = "README.md", "data", "amago", "observation.", "extra."
FILE_BYTES, _ROWS = 128 << 20, 10_000  # bytes of a file before compression, and rows of a group


def parquet_files(path: Path) -> list[Path]:
    """The Parquet files of a dataset: the file, or those in the directory or in its directory ``data``, in order."""
    if path.is_file():
        return [path] if path.suffix == ".parquet" else []
    return sorted((path / _DATA).rglob("*.parquet")) or sorted(path.glob("*.parquet"))


def is_image(shape: tuple[int, ...], dtype: Any) -> bool:
    """True for values that are written as PNG: uint8, height x width x 1, 3 or 4 channels."""
    return np.dtype(dtype) == np.uint8 and len(shape) == 3 and shape[-1] in (1, 3, 4)


def _column(values: Array, rows: int) -> Any:
    """A column of so many rows: ``values``, and nulls after them."""
    pa, row, absent = require("pyarrow", "parquet"), values.shape[1:], [None] * (rows - len(values))
    if is_image(row, values.dtype):
        pngs = [{"bytes": _png(frame), "path": None} for frame in values]
        return pa.array([*pngs, *absent], pa.struct({"bytes": pa.binary(), "path": pa.string()}))
    kind = pa.from_numpy_dtype(values.dtype)
    if row:
        size = int(np.prod(row))
        kind, values = pa.list_(kind, size), values.reshape(len(values), size)
    return pa.array([*values, *absent], kind)


def _png(frame: Array) -> bytes:
    image = require("PIL.Image", "parquet").fromarray(frame[..., 0] if frame.shape[-1] == 1 else frame)
    image.save(out := io.BytesIO(), "PNG")
    return out.getvalue()


def _array(column: Any, row: tuple[int, ...], dtype: Any) -> Array:
    """The values of a column that are not null."""
    values = column.combine_chunks().drop_null()
    if is_image(row, dtype):
        opened = require("PIL.Image", "parquet").open
        frames = [np.asarray(opened(io.BytesIO(value["bytes"]))) for value in values.to_pylist()]
        return np.stack(frames).reshape(-1, *row) if frames else np.zeros((0, *row), np.uint8)
    while values.type.num_fields:  # lists
        values = values.flatten()
    return np.ascontiguousarray(values.to_numpy(zero_copy_only=False), dtype).reshape(-1, *row)


def _columns(traj: StoredTraj, episode: int) -> dict[str, Array]:
    """The fields of a trajectory by their columns; a field without a value in all rows ends early."""
    rows, actions, before = len(traj) + 1, traj.actions, np.zeros((0, traj.actions.shape[1]), traj.actions.dtype)
    if traj.start_time and traj.prev_action is not None:
        before = np.asarray(traj.prev_action, actions.dtype).reshape(1, -1)
    return {
        "episode": np.full(rows, episode), "step": traj.start_time + np.arange(rows),
        **{_OBSERVATION + k if k != "observation" else k: a for k, a in traj.obs.items()},
        "action": _scalars(actions), "reward": traj.rews[:, 0], "terminated": traj.dones[:, 0],
        **{_EXTRA + k: a for k, a in traj.extras.items()},
        "previous_reward": np.array([traj.prev_reward] * bool(traj.start_time), np.float32), "previous_action": _scalars(before),
    }  # fmt: skip


def _scalars(actions: Array) -> Array:
    return actions[:, 0] if actions.shape[1] == 1 else actions


def export_parquet(
    trajs: Iterable[StoredTraj],
    obs_space: gym.spaces.Dict,
    spec: ActionSpec,
    directory: Path,
    extra_fields: Iterable[ExtraField] = (),
    progress: Callable[[StoredTraj], object] = lambda traj: None,
) -> int:
    """Write trajectories to ``data/*.parquet`` of a new directory, with a card (``README.md``); returns their number.

    Observations are written as stored (discrete ones one-hot), images as PNG, actions as stored: continuous ones scaled to [-1, 1].

    Raises:
        ValueError: the directory is not empty, or the trajectories have different fields.
        ImportError: pyarrow, or Pillow where there are images, is not installed.
    """
    parquet, pa = require("pyarrow.parquet", "parquet"), require("pyarrow", "parquet")
    if directory.exists() and any(directory.iterdir()):
        raise ValueError(f"{directory} exists and is not empty: name another directory")
    (directory / _DATA).mkdir(parents=True, exist_ok=True)
    schema, count, waiting = None, 0, 0
    returns: dict[str, list[tuple[int, float]]] = {}
    tables: list[Any] = []

    def write() -> None:
        number = len(list((directory / _DATA).iterdir()))
        parquet.write_table(pa.concat_tables(tables), directory / _DATA / f"train-{number:05d}.parquet", row_group_size=_ROWS)
        tables.clear()

    for traj in trajs:
        columns = _columns(traj, count)
        table = pa.table({name: _column(values, len(traj) + 1) for name, values in columns.items()})
        table = table.append_column("environment", pa.array([traj.env_name] * (len(traj) + 1)))
        if schema is None:
            shapes = {name: (values.shape[1:], values.dtype.name) for name, values in columns.items()}
            extras = {x.name: x.rows for x in extra_fields}
            about = {"observations": describe(obs_space), "actions": describe(spec.space), "columns": shapes, "extras": extras}
            images = {name: {"_type": "Image"} for name, (row, dtype) in shapes.items() if is_image(row, dtype)}
            metadata = {_ABOUT: json.dumps(about), "huggingface": json.dumps({"info": {"features": images}})}
            schema = table.schema.with_metadata(metadata)
        elif table.schema != schema:
            raise ValueError(f"trajectory {count} has the fields {table.schema.names}, but the first has {schema.names}")
        tables.append(table.replace_schema_metadata(schema.metadata))
        returns.setdefault(traj.env_name, []).append((len(traj), float(traj.rews.sum())))
        waiting, count = waiting + table.nbytes, count + 1
        if waiting > FILE_BYTES:
            write()
            waiting = 0
        progress(traj)
    if tables:
        write()
    lines = [
        f"| {k or '(no name)'} | {len(v):,} | {sum(n for n, _ in v):,} | {np.mean([r for _, r in v]):.4g} |"
        for k, v in returns.items()
    ]
    names = [] if schema is None else schema.names
    (directory / CARD).write_text(
        _CARD.format(table="\n".join(lines), columns=", ".join(f"`{name}`" for name in names)), "utf-8"
    )
    return count


_CARD = """---
tags: [reinforcement-learning, amago]
configs:
- config_name: default
  data_files: data/*.parquet
---

# Trajectories of reinforcement learning

| environment | trajectories | transitions | mean return |
| --- | --- | --- | --- |
{table}

A row is a timestep: {columns}. `step` is its index in the episode; `action`, `reward` and `terminated` belong to the transition that begins
there, and are null in the last row, which has the final observation. Discrete observations are one-hot; continuous actions are scaled to
[-1, 1], discrete ones count from 0.

```python
datasets.load_dataset("USER/NAME", split="train")  # Hugging Face datasets
amago.loading.ParquetDataset("DIRECTORY")  # to train an agent
```
"""


@gin.configurable(module="amago.loading")
class ParquetDataset(OfflineDataset):
    """The trajectories that ``amago buffer export --to parquet`` wrote, equal to the last bit. All are held in memory.

    Args:
        path: the directory, or one of its files.
        env_name: name in the statistics by environment; default: the recorded names.
        relabeler: rewrites each trajectory before a training sequence is cut from it.

    Raises:
        ValueError: (when opened) there are no such files, or others have written them.
        ImportError: pyarrow, or Pillow where there are images, is not installed.
    """

    def __init__(self, path: str | Path, env_name: str | None = None, relabeler: Relabeler | None = None):
        super().__init__(relabeler)
        self.path, self.env_name = Path(path).expanduser(), env_name

    @property
    def name(self) -> str:
        return str(self.path)

    def load(self) -> InMemory:
        files = parquet_files(self.path)
        try:
            about = json.loads((require("pyarrow.parquet", "parquet").read_schema(files[0]).metadata or {})[_ABOUT.encode()])
        except (IndexError, KeyError, ValueError, OSError) as err:
            raise ValueError(f"{self.name} is no dataset that 'amago buffer export --to parquet' wrote ({err!r:.100})") from err
        fields = {k: (tuple(row), dtype) for k, (row, dtype) in about["columns"].items()}
        extras = tuple(ExtraField(k, rows, *fields[_EXTRA + k]) for k, rows in about["extras"].items())
        spec = action_spec(from_description(about["actions"]))
        space = from_description(about["observations"])
        assert isinstance(space, gym.spaces.Dict)
        trajs = InMemory(self._read(files, fields), space, spec, extras)
        for i, traj in enumerate(trajs):
            with reading(f"{self.name}, trajectory {i}"):
                check_trajectory(traj, spec)
        return trajs

    def _read(self, files: list[Path], fields: Mapping[str, tuple[tuple[int, ...], str]]) -> Iterator[StoredTraj]:
        for file in files:
            table = require("pyarrow.parquet", "parquet").read_table(file)
            ends = np.flatnonzero(np.diff(table["episode"].to_numpy(), append=-1)) + 1
            for start, end in zip([0, *ends[:-1].tolist()], ends.tolist()):
                rows = table.slice(start, end - start)
                found = {name: _array(rows[name], *field) for name, field in fields.items()}
                before = found["previous_action"]
                yield StoredTraj(
                    {k.removeprefix(_OBSERVATION): found[k] for k in fields if k.startswith("observation")},
                    found["action"].reshape(end - start - 1, -1), found["reward"][:, None], found["terminated"][:, None],
                    int(found["step"][0]), float(found["previous_reward"].sum()), before.reshape(-1) if len(before) else None,
                    rows["environment"][0].as_py() if self.env_name is None else self.env_name,
                    {k.removeprefix(_EXTRA): found[k] for k in fields if k.startswith(_EXTRA)},
                )  # fmt: skip


def open_lerobot(path: Path, action_space: gym.Space[Any] | None = None, env_name: str | None = None) -> ArrayDataset:
    """The episodes of a LeRobot dataset (v3): observations without their prefix "observation.", images but no videos.

    A dataset without ``next.reward`` has rewards of 0, one without ``next.done`` no terminations. The last frame of an episode that does not
    terminate serves as its final observation only. An episode has the name of its task.

    Args:
        action_space: default: a Box that holds the actions.
        env_name: in place of the tasks.

    Raises:
        ValueError: it is another version, or lacks what is needed.
        ImportError: pyarrow, or Pillow where there are images, is not installed.
    """
    parquet = require("pyarrow.parquet", "parquet")
    with reading(str(path)):
        info = json.loads((path / "meta/info.json").read_text("utf-8"))
        if not str(info.get("codebase_version", "")).startswith("v3"):
            raise ValueError(
                f"{path} is in LeRobot's format {info.get('codebase_version')}, but v3 is read: convert it with LeRobot"
            )
        features = {k: f for k, f in info["features"].items() if k.startswith("observation")}
        if videos := [k for k, f in features.items() if f["dtype"] == "video"]:
            log.warning("%s: videos are not read, and left out: %s", path, ", ".join(videos))
        tables = [parquet.read_table(file) for file in parquet_files(path)]
        if not tables:
            raise ValueError(f"{path} has no files in data/")
        table = require("pyarrow", "parquet").concat_tables(tables).sort_by("index")

        def column(name: str, default: Array | None = None) -> Array:
            if name not in table.column_names:
                if default is None:
                    raise ValueError(f"{path} has no column {name}; it has {table.column_names}")
                return default
            feature = info["features"].get(name, {"shape": [1], "dtype": "int64"})
            image, row = feature["dtype"] == "image", tuple(feature["shape"])
            values = _array(table[name], row, np.uint8 if image else feature["dtype"])
            return values[:, 0] if row == (1,) and not name.startswith(("obs", "act")) else values

        observations = {k.removeprefix("observation.").replace(".", "_"): column(k) for k in features if k not in videos}
        actions, none = column("action"), np.zeros(len(table), bool)
        if action_space is None:
            low, high = actions.min(0), actions.max(0)
            action_space = gym.spaces.Box(np.where(low < high, low, low - 1), high, dtype=np.float32)
        names: Any = env_name
        if env_name is None:
            tasks = parquet.read_table(path / "meta/tasks.parquet").to_pydict()
            by_index = dict(zip(tasks["task_index"], tasks["__index_level_0__" if "__index_level_0__" in tasks else "task"]))
            names = [by_index[i] for i in column("task_index").tolist()]
    dataset = ArrayDataset(
        observations, actions, column("next.reward", none.astype(np.float32)), column("next.done", none), action_space,
        truncations=np.diff(column("episode_index"), append=-1) != 0, env_name=names,
    )  # fmt: skip
    dataset.title = str(path)
    return dataset
