"""Single trajectory files: where they lie, and reading one."""

from __future__ import annotations

import os
from pathlib import Path

from amago.data.trajectory import FrozenTraj
from amago.store import index as store_index
from amago.store.errors import BadFileError
from amago.store.file_cache import FileCache
from amago.store.store import FIFO, PROTECTED
from amago.store.view import StoreView


def get_path_to_trajs(dset_root: str | os.PathLike[str], dset_name: str, fifo: bool = True) -> str:
    """The directory of a replay buffer's files: those that actors write and that are deleted in turn, or those that are kept."""
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
        entry = store_index.load(
            str(path.parent), path.parent.name, path.name, store_index.Schemas(), lambda size, mtime_ns: False, False
        )
    except BadFileError as err:
        raise ValueError(f"{path}: {err}") from err
    if entry.n != 1:
        raise ValueError(f"{path} holds {entry.n} trajectories; read them with amago.store.TrajectoryStore")
    view = StoreView(str(path.parent.parent), [entry], FileCache(1))
    return view.read(0).derive(view.action_spec(0))
