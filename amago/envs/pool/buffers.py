"""What actors and policy exchange: plain arrays, or the same arrays in memory shared between processes.

The memory has no name anywhere, so none can be left behind: it is an anonymous file whose descriptor travels to the
workers over their sockets, and it goes when the last process that holds it does, ``kill -9`` included. Nor does the
size of /dev/shm limit it, which containers keep small; memory does, and that there is enough is seen to before it is taken.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
from numpy.typing import NDArray

from amago.data.extras import ExtraField
from amago.spaces import ActionSpec

Array = NDArray[Any]
_ALIGN = 64


@dataclass(frozen=True)
class Layout:
    """Where each array lies in one block: (name, shape, dtype, offset), and the size of the block in bytes."""

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
        wanted += [(f"extras/{x.name}", (n, *x.shape), np.dtype(x.dtype)) for x in extra_fields if x.source == "policy"]
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
        extras: {name: (N, ...)}, the extra fields of the policy, for the actions beside them.
        unsaved: (W,) int64, for each worker the finished trajectories that are in no file yet.
    """

    def __init__(self, layout: Layout, block: Any):
        arrays: dict[str, Array] = {}
        for name, shape, dtype, offset in layout.fields:
            count = int(np.prod(shape, dtype=np.int64))
            arrays[name] = np.frombuffer(block, dtype=np.dtype(dtype), count=count, offset=offset).reshape(shape)
        self.obs = {name[4:]: a for name, a in arrays.items() if name.startswith("obs/")}
        self.extras = {name[7:]: a for name, a in arrays.items() if name.startswith("extras/")}
        self.rl2s, self.time_idxs, self.resets = arrays["rl2s"], arrays["time_idxs"], arrays["resets"]
        self.actions, self.unsaved = arrays["actions"], arrays["unsaved"]

    @classmethod
    def local(cls, layout: Layout) -> Buffers:
        """In this process alone.

        Raises:
            MemoryError: there is not as much.
        """
        try:
            return cls(layout, bytearray(layout.size))
        except (MemoryError, OverflowError) as err:
            raise _too_little(layout.size, "memory", err) from err

    @classmethod
    def attach(cls, layout: Layout, fd: int) -> Buffers:
        """In a block that `shared_block` made, perhaps in another process; the descriptor may be closed afterwards.

        Raises:
            MemoryError: this process may not map as much.
        """
        try:
            return cls(layout, mmap.mmap(fd, layout.size))
        except (OSError, OverflowError) as err:
            raise _too_little(layout.size, "shared memory", err) from err


def shared_block(size: int) -> int:
    """The file descriptor of ``size`` bytes of shared memory, reserved and zero.

    Raises:
        MemoryError: there is not as much; said here, rather than by a SIGBUS or the kernel's killing in the middle of a run.
    """
    left = memory_left()
    if left is not None and size > left:  # reserving them would succeed until some process is killed for it
        raise _too_little(size, "shared memory", f"only {left / 2**20:.1f} MiB are left on this machine or to this container")
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


def _too_little(size: int, kind: str, why: object) -> MemoryError:
    return MemoryError(
        f"{size / 2**20:.1f} MiB of {kind} are needed for the actors' observations and actions, but there is not as much: {why}. "
        "Use fewer parallel_actors"
        + (", smaller observations, or env_mode='sync'." if kind != "memory" else " or smaller observations.")
    )


def memory_left(root: str | Path = "/") -> int | None:
    """Bytes that this process may still use, of the machine's and of its control groups'; None where that is not told.

    Args:
        root: where ``proc`` and ``sys`` lie.
    """
    root = Path(root)
    left = []
    for line in _lines(root / "proc/meminfo"):
        if line.startswith(("MemAvailable:", "SwapFree:")):
            left.append(int(line.split()[1]) * 1024)
    machine = [sum(left)] if left else []
    groups = root / "sys/fs/cgroup"
    found = []
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        if not controllers:
            found.append(_group_left(groups, path, "memory.max", "memory.current", "inactive_file"))
        elif "memory" in controllers.split(","):
            names = "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
            found.append(_group_left(groups / "memory", path, *names))
    limits = machine + [n for n in found if n is not None]
    return min(limits) if limits else None


def _group_left(top: Path, path: str, limit: str, used: str, reclaimable: str) -> int | None:
    """What the tightest of a control group and those that it lies in leaves."""
    left = None
    folder = top / path.strip("/")
    for group in (folder, *folder.parents):
        bound, taken = _lines(group / limit), _lines(group / used)
        if bound and taken and bound[0].isdigit():
            cache = [int(line.split()[1]) for line in _lines(group / "memory.stat") if line.startswith(f"{reclaimable} ")]
            here = max(0, int(bound[0]) - int(taken[0]) + sum(cache))
            left = here if left is None else min(left, here)
        if group == top:
            break
    return left


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except (OSError, UnicodeDecodeError):
        return []
