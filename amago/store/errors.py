"""The errors of the store."""

from __future__ import annotations


class StoreError(Exception):
    """Base class of the store's errors."""


class BadFileError(StoreError, ValueError):
    """A file is damaged or is not a trajectory file of amago; the message says what is wrong."""


class PickleRefusedError(StoreError, ValueError):
    """A ``.traj`` pickle was found, and the caller did not pass ``allow_pickle=True``."""


class EvictedError(StoreError, LookupError):
    """The file of a trajectory was deleted after its index was drawn; draw another index."""


class DamagedError(BadFileError, EvictedError):
    """The file of a trajectory was damaged after it was checked, and is not sampled any more; draw another index."""


class StoreFullError(StoreError, OSError):
    """The disk is full and no more trajectories can be kept in memory until it is not."""
