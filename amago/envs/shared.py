"""What actors and policy exchange: plain arrays, or the same arrays in memory shared between processes.

The memory has no name anywhere, so none can be left behind: it is an anonymous file whose descriptor travels to the
workers over their sockets, and it goes when the last process that holds it does, ``kill -9`` included.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from dataclasses import dataclass
from typing import Any

import gymnasium as gym
import numpy as np
from numpy.typing import NDArray

from amago.spaces import ActionSpec

Array = NDArray[Any]
_ALIGN = 64


@dataclass(frozen=True)
class Layout:
    """Where each array lies in one block: (name, shape, dtype, offset), and the size of the block in bytes."""

    fields: tuple[tuple[str, tuple[int, ...], str, int], ...]
    size: int

    @classmethod
    def of(cls, num_actors: int, observation_space: gym.spaces.Dict, spec: ActionSpec, workers: int) -> Layout:
        n = num_actors
        wanted: list[tuple[str, tuple[int, ...], np.dtype[Any]]] = [
            (f"obs/{key}", (n, *space.shape), np.dtype(space.dtype))  # type: ignore[misc]
            for key, space in observation_space.spaces.items()
        ]
        wanted += [
            ("rl2s", (n, 1 + spec.dim), np.dtype(np.float32)),
            ("time_idxs", (n, 1), np.dtype(np.int64)),
            ("resets", (n,), np.dtype(np.bool_)),
            ("actions", (n, spec.stored_dim), spec.stored_dtype),
            ("unsaved", (workers,), np.dtype(np.int64)),
        ]
        fields, offset = [], 0
        for name, shape, dtype in wanted:
            fields.append((name, shape, dtype.str, offset))
            nbytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
            offset += -(-nbytes // _ALIGN) * _ALIGN
        return cls(tuple(fields), max(offset, _ALIGN))


class Buffers:
    """The arrays of one pool of N actors.

    Attributes:
        obs: {key: (N, ...)}.
        rl2s: (N, 1 + A) float32.
        time_idxs: (N, 1) int64.
        resets: (N,) bool.
        actions: (N, S), stored form.
        unsaved: (W,) int64, for each worker the finished trajectories that are in no file yet.
    """

    def __init__(self, layout: Layout, block: Any):
        arrays: dict[str, Array] = {}
        for name, shape, dtype, offset in layout.fields:
            count = int(np.prod(shape, dtype=np.int64))
            arrays[name] = np.frombuffer(block, dtype=np.dtype(dtype), count=count, offset=offset).reshape(shape)
        self.obs = {name[4:]: a for name, a in arrays.items() if name.startswith("obs/")}
        self.rl2s, self.time_idxs, self.resets = arrays["rl2s"], arrays["time_idxs"], arrays["resets"]
        self.actions, self.unsaved = arrays["actions"], arrays["unsaved"]

    @classmethod
    def local(cls, layout: Layout) -> Buffers:
        """In this process alone."""
        return cls(layout, bytearray(layout.size))

    @classmethod
    def attach(cls, layout: Layout, fd: int) -> Buffers:
        """In a block that `shared_block` made, perhaps in another process; the descriptor may be closed afterwards."""
        return cls(layout, mmap.mmap(fd, layout.size))


def shared_block(size: int) -> int:
    """The file descriptor of ``size`` bytes of shared memory, reserved and zero.

    Raises:
        MemoryError: there is not as much; said here, rather than by a SIGBUS in the middle of a run.
    """
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create("amago-actors", os.MFD_CLOEXEC)
    else:
        with tempfile.TemporaryFile() as file:
            fd = os.dup(file.fileno())
    try:
        os.ftruncate(fd, size)
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(fd, 0, size)
    except OSError as err:
        os.close(fd)
        raise MemoryError(
            f"{size / 2**20:.1f} MiB of shared memory are needed for the actors' observations, but there is not as much: {err}. "
            "Use fewer parallel_actors, smaller observations, or env_mode='sync'."
        ) from err
    return fd
