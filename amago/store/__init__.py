"""The trajectory store on disk: a writer for actors, an index and a reader for the learner. It never imports torch."""

from __future__ import annotations

from amago.store.files import BadFileError, DamagedError, EvictedError, PickleRefusedError, StoreError, StoreFullError
from amago.store.store import RefreshReport, StoreView, TrajectoryStore
from amago.store.writer import TrajectoryWriter

__all__ = [
    "BadFileError", "DamagedError", "EvictedError", "PickleRefusedError", "RefreshReport", "StoreError", "StoreFullError",
    "StoreView", "TrajectoryStore", "TrajectoryWriter",
]  # fmt: skip
