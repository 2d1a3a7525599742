"""The arrays that actors and policy exchange, in this process's memory or in memory shared between processes.

Shared memory is an anonymous file, whose descriptor is sent to the workers over their sockets. It has no name, so none can be left
behind: the system frees it when the last process that holds it ends, ``kill -9`` included. It is not in /dev/shm, whose size
containers limit.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import gymnasium as gym
import numpy as np
from numpy.typing import NDArray

from amago.data.extras import ExtraField
from amago.envs.pool.memory import available_memory
from amago.spaces import ActionSpec

Array = NDArray[Any]
_ALIGN = 64  # bytes: a cache line, so that no two arrays share one
_OBS, _EXTRAS = "obs/", "extras/"


@dataclass(frozen=True)
class Layout:
    """Where each array lies in one block of memory.

    Attributes:
        fields: (name, shape, dtype, offset in bytes) of each array.
        size: of the block in bytes.
    """

    fields: tuple[tuple[str, tuple[int, ...], str, int], ...]
    size: int

    @classmethod
    def of(
        cls,
        num_actors: int,
        observation_space: gym.spaces.Dict,
        spec: ActionSpec,
        workers: int,
        extra_fields: Iterable[ExtraField] = (),
    ) -> Layout:
        """The layout of the `Buffers` of one pool."""
        n = num_actors
        arrays: list[tuple[str, tuple[int, ...], np.dtype[Any]]] = [
            (_OBS + key, (n, *space.shape), np.dtype(space.dtype))  # type: ignore[misc]
            for key, space in observation_space.spaces.items()
        ]
        arrays += [
            ("rl2s", (n, 1 + spec.dim), np.dtype(np.float32)),
            ("time_idxs", (n, 1), np.dtype(np.int64)),
            ("resets", (n,), np.dtype(np.bool_)),
            ("actions", (n, spec.stored_dim), spec.stored_dtype),
            ("unsaved", (workers,), np.dtype(np.int64)),
            ("no_space", (workers,), np.dtype(np.bool_)),
            ("any_ended", (workers,), np.dtype(np.bool_)),
            ("idle", (n,), np.dtype(np.bool_)),
        ]
        for x in extra_fields:
            if x.source != "info":
                # exploration needs the probability of every action
                shape = (n, 1 + spec.dim) if x.source == "behaviour" else (n, *x.shape)
                arrays.append((_EXTRAS + x.name, shape, np.dtype(x.dtype)))
        fields, offset = [], 0
        for name, shape, dtype in arrays:
            fields.append((name, shape, dtype.str, offset))
            nbytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
            offset += -(-nbytes // _ALIGN) * _ALIGN
        return cls(tuple(fields), max(offset, _ALIGN))


class Buffers:
    """The arrays of one pool of N actors and W workers.

    Attributes:
        obs: {key: (N, ...)}.
        rl2s: (N, 1 + A) float32.
        time_idxs: (N, 1) int64.
        resets: (N,) bool.
        actions: (N, S), in stored form.
        extras: {name: (N, ...)}, extra fields that the policy computes with the actions. `BEHAVIOUR_LOG_PROB` is (N, 1 + A): the policy's
            log-probability of its action, then the probability of each choice and bit (`amago.agent.BaseAgent.act_with_extras`).
        unsaved: (W,) int64, finished trajectories of each worker that are in no file yet.
        no_space: (W,) bool, whether the disk was full when each worker last tried to write.
        idle: (N,) bool, the actors that skip their steps.
        any_ended: (W,) bool, whether an actor of each worker has finished a rollout, or failed in one that lasted `PROVEN_STEPS`.
    """

    def __init__(self, layout: Layout, block: Any):
        arrays: dict[str, Array] = {}
        for name, shape, dtype, offset in layout.fields:
            count = int(np.prod(shape, dtype=np.int64))
            arrays[name] = np.frombuffer(block, dtype=np.dtype(dtype), count=count, offset=offset).reshape(shape)
        self.obs = {name.removeprefix(_OBS): a for name, a in arrays.items() if name.startswith(_OBS)}
        self.extras = {name.removeprefix(_EXTRAS): a for name, a in arrays.items() if name.startswith(_EXTRAS)}
        self.rl2s, self.time_idxs, self.resets = arrays["rl2s"], arrays["time_idxs"], arrays["resets"]
        self.actions, self.unsaved, self.no_space = arrays["actions"], arrays["unsaved"], arrays["no_space"]
        self.any_ended, self.idle = arrays["any_ended"], arrays["idle"]

    @classmethod
    def local(cls, layout: Layout) -> Buffers:
        """Arrays in this process's memory.

        Raises:
            MemoryError: there is too little memory.
        """
        try:
            return cls(layout, bytearray(layout.size))
        except (MemoryError, OverflowError) as err:
            raise _too_little(layout.size, "memory", err) from err

    @classmethod
    def attach(cls, layout: Layout, fd: int) -> Buffers:
        """Arrays in a block from `shared_block`, perhaps of another process; ``fd`` may be closed afterwards.

        Raises:
            MemoryError: this process may not map that much.
        """
        try:
            return cls(layout, mmap.mmap(fd, layout.size))
        except (OSError, OverflowError) as err:
            raise _too_little(layout.size, "shared memory", err) from err


def shared_block(size: int) -> int:
    """Allocate ``size`` bytes of zeroed shared memory and return its file descriptor.

    Available memory is checked before allocation: where the system overcommits, an allocation that is too large succeeds, and the
    process is killed when it writes there, in the middle of a run.

    Raises:
        MemoryError: there is too little memory.
    """
    available = available_memory()
    if available is not None and size > available:
        reason = f"only {available / 2**20:.1f} MiB are left on this machine or to this container"
        raise _too_little(size, "shared memory", reason)
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create("amago-actors", os.MFD_CLOEXEC)
    else:
        with tempfile.TemporaryFile() as file:
            fd = os.dup(file.fileno())
    try:
        os.ftruncate(fd, size)
        if hasattr(os, "posix_fallocate"):
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
