"""Where the buffer of a run is, for `amago.cli.buffer`."""

from __future__ import annotations

from pathlib import Path

from amago.store import StoreView, TrajectoryStore
from amago.store.store import PARTITIONS


def is_buffer(path: Path) -> bool:
    """Whether a directory is a buffer."""
    return any((path / p).is_dir() for p in PARTITIONS)


def existing(run: Path) -> Path:
    """The buffer directory of a run."""
    for path in (run / "buffer", run):
        if is_buffer(path):
            return path
    raise ValueError(f"RUN: {run} has no replay buffer: neither {run / 'buffer'} nor {run} contains {' or '.join(PARTITIONS)}/")


def view_of(root: Path) -> StoreView:
    """The trajectories of a buffer, for reading alone."""
    store = TrajectoryStore(root, edit=False)
    store.refresh()
    return store.view()
