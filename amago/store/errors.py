"""What can go wrong with the store, each its own type."""

from __future__ import annotations


class StoreError(Exception):
    """Base class of the store's errors."""


class BadFileError(StoreError, ValueError):
    """A file is damaged, or is no trajectory file of ours; the message is the reason."""


class PickleRefusedError(StoreError, ValueError):
    """A ``.traj`` pickle was found and the caller did not say ``allow_pickle=True``."""


class EvictedError(StoreError, LookupError):
    """The trajectory's file was deleted after its index was drawn: draw another index."""


class DamagedError(BadFileError, EvictedError):
    """The trajectory's file was damaged after it was checked, and is no longer sampled: draw another index."""


class StoreFullError(StoreError, OSError):
    """The disk is full and no more trajectories can be kept in memory until it is not."""
