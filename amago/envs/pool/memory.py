"""The arrays that actors and policy exchange, in this process's memory or shared between processes.

Shared memory is an anonymous file, whose descriptor is sent to the workers over their sockets. It has no name, so none can be
left behind: the system frees it when the last process that holds it ends, ``kill -9`` included. It is not in /dev/shm, whose
size containers limit.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Iterable
from typing import Any

import gymnasium as gym
import numpy as np
from numpy.typing import DTypeLike, NDArray

from amago.data.extras import ExtraField
from amago.spaces import ActionSpec

Array = NDArray[Any]
Layout = list[tuple[str, tuple[int, ...], str]]
"""(name, shape, dtype) of each array of a pool."""
_ALIGN = 64  # bytes: a cache line, so that no two arrays share one
_OBS, _EXTRAS = "obs/", "extras/"


def layout_of(
    num_actors: int,
    observation_space: gym.spaces.Dict,
    spec: ActionSpec,
    workers: int,
    extra_fields: Iterable[ExtraField] = (),
) -> Layout:
    """The arrays of the `Buffers` of one pool."""
    n = num_actors
    arrays: list[tuple[str, tuple[int, ...], DTypeLike]] = [
        (_OBS + key, (n, *(space.shape or ())), np.dtype(space.dtype)) for key, space in observation_space.spaces.items()
    ]
    arrays += [
        ("rl2s", (n, 1 + spec.dim), np.float32), ("time_idxs", (n, 1), np.int64), ("resets", (n,), np.bool_),
        ("actions", (n, spec.stored_dim), spec.stored_dtype), ("unsaved", (workers,), np.int64),
        ("no_space", (workers,), np.bool_), ("any_ended", (workers,), np.bool_), ("idle", (n,), np.bool_),
    ]  # fmt: skip
    arrays += [(_EXTRAS + x.name, (n, *x.shape), x.dtype) for x in extra_fields if x.source != "info"]
    return [(name, shape, np.dtype(dtype).str) for name, shape, dtype in arrays]


def _places(layout: Layout) -> tuple[list[int], int]:
    """The offset of each array in a block of memory, and the size of the block, in bytes."""
    sizes = [int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize for _, shape, dtype in layout]
    ends = np.cumsum([-(-size // _ALIGN) * _ALIGN for size in sizes]).tolist()
    return [0, *ends[:-1]], max(ends[-1], _ALIGN)


class Buffers:
    """The arrays of one pool of N actors and W workers.

    Args:
        layout: from `layout_of`.
        fd: from `shared_memory_for`, perhaps of another process; may be closed afterwards. None: this process's memory.

    Attributes:
        obs: {key: (N, ...)}.
        rl2s: (N, 1 + A) float32.
        time_idxs: (N, 1) int64.
        resets: (N,) bool.
        actions: (N, S), in stored form.
        extras: {name: (N, ...)}, extra fields that the policy computes with the actions (`amago.agent.BaseAgent.act_with_extras`).
        unsaved: (W,) int64, finished trajectories of each worker that are in no file yet.
        no_space: (W,) bool, whether the disk was full when each worker last tried to write.
        idle: (N,) bool, the actors that skip their steps.
        any_ended: (W,) bool, whether an actor of each worker has finished a rollout, or failed in one that lasted
            `PROVEN_STEPS`.

    Raises:
        MemoryError: there is too little memory, or this process may not map that much.
    """

    def __init__(self, layout: Layout, fd: int | None = None):
        offsets, size = _places(layout)
        try:
            block = bytearray(size) if fd is None else mmap.mmap(fd, size)
        except (MemoryError, OSError, OverflowError) as err:
            raise _too_little(size, "memory" if fd is None else "shared memory", err) from err
        arrays: dict[str, Array] = {}
        for (name, shape, dtype), offset in zip(layout, offsets):
            count = int(np.prod(shape, dtype=np.int64))
            arrays[name] = np.frombuffer(block, np.dtype(dtype), count, offset).reshape(shape)
        self.obs = {name.removeprefix(_OBS): a for name, a in arrays.items() if name.startswith(_OBS)}
        self.extras = {name.removeprefix(_EXTRAS): a for name, a in arrays.items() if name.startswith(_EXTRAS)}
        self.rl2s, self.time_idxs, self.resets = arrays["rl2s"], arrays["time_idxs"], arrays["resets"]
        self.actions, self.unsaved, self.no_space = arrays["actions"], arrays["unsaved"], arrays["no_space"]
        self.any_ended, self.idle = arrays["any_ended"], arrays["idle"]


def shared_memory_for(layout: Layout) -> int:
    """Allocate zeroed shared memory for these arrays and return its file descriptor; MemoryError if there is too little.

    Available memory is checked before: where the system overcommits, an allocation that is too large succeeds, and the process
    is killed when it writes there, in the middle of a run.
    """
    import psutil  # which actors that share no memory do without

    size = _places(layout)[1]
    available = psutil.virtual_memory().available + psutil.swap_memory().free
    if size > available:
        raise _too_little(size, "shared memory", f"only {available / 2**20:.1f} MiB are left on this machine")
    if "memfd_create" in vars(os):
        fd = os.memfd_create("amago-actors", os.MFD_CLOEXEC)
    else:
        with tempfile.TemporaryFile() as file:
            fd = os.dup(file.fileno())
    try:
        os.ftruncate(fd, size)
        if "posix_fallocate" in vars(os):
            os.posix_fallocate(fd, 0, size)
    except (OSError, OverflowError) as err:
        os.close(fd)
        raise _too_little(size, "shared memory", err) from err
    return fd


def _too_little(size: int, kind: str, reason: object) -> MemoryError:
    return MemoryError(
        f"{size / 2**20:.1f} MiB of {kind} are needed for the actors' observations and actions, but are not available: {reason}. "
        "Use fewer parallel_actors"
        + (", smaller observations, or env_mode='sync'." if kind != "memory" else " or smaller observations.")
    )
