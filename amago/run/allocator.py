"""The C allocator of a run that learns on a CPU."""

from __future__ import annotations

import ctypes
import sys

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # parameters of mallopt(3)
_DEFAULT = {_MMAP_THRESHOLD: 128 * 1024, _TRIM_THRESHOLD: 128 * 1024}
_KEEP = {_MMAP_THRESHOLD: 2**25, _TRIM_THRESHOLD: 2**31 - 1}


class FreedMemory:
    """Lets the process reuse the memory of freed tensors, until `restore` (glibc; elsewhere nothing changes).

    By default glibc returns freed blocks to the system, which clears each page again at its next use: 7.5 to 11% of an update
    of `Agent` with discrete actions (24 sequences of 128 timesteps, one core of an Intel Xeon with avx512, `benchmarks/learner.py`). Blocks
    of 32 MB and more are still returned, because keeping them fragments the heap.

    Attributes:
        kept: whether the setting is in force.
    """

    def __init__(self) -> None:
        self.kept = False

    def keep(self) -> bool:
        """Apply the setting. Returns whether this was possible."""
        self.kept = _set(_KEEP)
        return self.kept

    def restore(self) -> None:
        """Apply glibc's defaults again, without the automatic growth of the threshold that a new process has."""
        if self.kept:
            _set(_DEFAULT)
            self.kept = False


def _set(options: dict[int, int]) -> bool:
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # musl has none
    return mallopt is not None and all(mallopt(name, value) for name, value in options.items())
