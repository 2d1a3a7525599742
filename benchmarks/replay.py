"""Reading, writing and indexing of the trajectory store against plain file operations on the same bytes.

Reading: a slice is 128 transitions of a random trajectory. The ceiling reads the same byte ranges, one per field, in the same
order, with one ``pread`` each into a reused buffer. All offsets are known in advance and all files are open. It leaves out
finding the slice, allocating arrays, and checking that the file has not changed. ``one_pread`` in the details reads as many
bytes in a single call.

"batches" measures `SequenceLoader.draw`, which draws 24 slices, encodes actions and stacks the slices into a batch. The ceiling
is the same.

"cold" drops the files from the page cache before each pass (``posix_fadvise``), for both contenders.

Writing: ours writes a file per segment, and syncs it and its directory. The ceiling writes the same number of bytes to one
file, and calls fsync as often.

Index: the ceiling opens each file and reads what `TrajectoryStore.refresh` needs: for known files the header and three index
fields, for others all bytes, with their crc32. It leaves out parsing.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
import zlib
from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import gymnasium as gym
import numpy as np

from amago.data.trajectory import StoredTraj, StoredTrajs
from amago.loading import DatasetSettings, DiskTrajDataset, SequenceLoader
from amago.store import TrajectoryStore, TrajectoryWriter, formats
from amago.store import schema as sc
from benchmarks.harness import Row, compare

SLICE, BATCH = 128, 24
ACTIONS: gym.spaces.Discrete = gym.spaces.Discrete(4)


@dataclass(frozen=True)
class Data:
    """The shape and number of trajectories in a buffer."""

    name: str
    shape: tuple[int, ...]
    dtype: type
    steps: int
    trajectories: int

    @property
    def space(self) -> gym.spaces.Dict:
        low, high = (0, 255) if self.dtype is np.uint8 else (-np.inf, np.inf)
        return gym.spaces.Dict({"observation": gym.spaces.Box(low, high, self.shape, self.dtype)})

    def make(self, rng: np.random.Generator) -> StoredTraj:
        t, raw = self.steps, rng.bytes((self.steps + 1) * int(np.prod(self.shape)))
        obs: np.ndarray = np.frombuffer(raw, np.uint8).reshape(t + 1, *self.shape).astype(self.dtype)
        dones = np.zeros((t, 1), bool)
        return StoredTraj({"observation": obs}, rng.integers(0, 4, (t, 1)), rng.random((t, 1), np.float32), dones)


VECTORS = Data("20 floats, 128 of 1000 steps", (20,), np.float32, 1000, 1000)
IMAGES = Data("64x64x3 images, 128 of 500 steps", (64, 64, 3), np.uint8, 500, 60)
TINY = (Data(VECTORS.name, (20,), np.float32, 300, 30), Data(IMAGES.name, (8, 8, 3), np.uint8, 200, 10))

Range = tuple[int, int, int]
"""A file descriptor, an offset, and a number of bytes."""


def write(data: Data, folder: Path, save_as: str) -> None:
    """Write a buffer of random trajectories."""
    rng = np.random.default_rng(0)
    with writer_of(data, folder, save_as) as writer:
        for _ in range(data.trajectories):
            writer.write(data.make(rng))


def writer_of(data: Data, folder: Path, save_as: str) -> TrajectoryWriter:
    return TrajectoryWriter(folder / "fifo", writer="bench", action_space=ACTIONS, obs_space=data.space, save_as=save_as)


class Slices:
    """Random slices of a store, and their byte ranges."""

    def __init__(self, store: TrajectoryStore, count: int) -> None:
        self.view, rng = store.view(), np.random.default_rng(1)
        self._open: dict[str, int] = {}
        self.asked = [self._draw(rng) for _ in range(count)]
        self.ranges = [self._ranges(*asked) for asked in self.asked]
        largest = max(sum(n for _, _, n in ranges) for ranges in self.ranges)
        self._buffer = memoryview(bytearray(largest))

    def _draw(self, rng: np.random.Generator) -> tuple[int, int]:
        index = int(rng.integers(len(self.view)))
        return index, int(rng.integers(1, self.view.lengths[index] - SLICE))

    def _ranges(self, index: int, start: int) -> list[Range]:
        entry, j = self.view._find(index)
        path, first = self.view.path(index), int(entry.ep_offsets[j]) + start
        if path not in self._open:
            self._open[path] = os.open(path, os.O_RDONLY)
        out = []
        for slot in entry.schema.slots():
            obs = slot.group == "obs"
            row = first + j if obs else first
            out.append((self._open[path], entry.places[slot.part] + row * slot.row_bytes, (SLICE + obs) * slot.row_bytes))
        return out

    def ours(self) -> float:
        """Slices per second through the store."""
        read, began = self.view.read, time.perf_counter()
        for index, start in self.asked:
            read(index, start, start + SLICE)
        return len(self.asked) / (time.perf_counter() - began)

    def ceiling(self) -> float:
        """Slices per second by reading the same byte ranges."""
        plan = [(fd, [self._buffer[:n]], at) for ranges in self.ranges for fd, at, n in ranges]
        preadv, began = os.preadv, time.perf_counter()
        for fd, where, at in plan:
            preadv(fd, where, at)
        return len(self.asked) / (time.perf_counter() - began)

    def one_pread(self) -> float:
        """Slices per second by reading as many bytes in one call per slice, at the place of the largest range."""
        plan = []
        for ranges in self.ranges:
            fd, at, _ = max(ranges, key=lambda r: r[2])
            total = sum(n for _, _, n in ranges)
            plan.append((fd, [self._buffer[:total]], max(0, min(at, os.fstat(fd).st_size - total))))
        preadv, began = os.preadv, time.perf_counter()
        for fd, where, at in plan:
            preadv(fd, where, at)
        return len(self.asked) / (time.perf_counter() - began)

    def drop_cache(self) -> bool:
        """Drop the files from the page cache; returns whether that worked."""
        for fd in self._open.values():
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        fd, at, _ = self.ranges[len(self.ranges) // 2][0]
        try:
            return os.preadv(fd, [bytearray(1)], at, os.RWF_NOWAIT) < 1
        except BlockingIOError:
            return True
        except OSError:  # the file system cannot tell
            return False

    def close(self) -> None:
        for fd in self._open.values():
            os.close(fd)


def reading(data: Data, save_as: str, folder: Path, options: Namespace) -> Iterator[Row]:
    """Rows of slices, warm and cold, and of batches, from one buffer."""
    write(data, folder, save_as)
    store = TrajectoryStore(folder)
    store.refresh()
    big = data.dtype is np.uint8
    slices = Slices(store, 8 if options.smoke else 600 if big else 5000)
    rounds, name = options.rounds or (1 if options.smoke else 7), f"{data.name}, {save_as}"
    floor = "; at least 10,000 a second asked for" if not big else ""
    slices.ours()
    if options.only in (case := f"{name}, warm"):
        turns = {"ours": slices.ours, "ceiling": slices.ceiling, "one_pread": slices.one_pread}
        yield compare(case, "slices/s", turns, rounds, 0.5, note=f"slices{floor}")
    if options.only in (case := f"{name}, batches of {BATCH}, warm"):
        yield compare(case, "slices/s", {"ours": batches(folder, len(slices.asked)), "ceiling": slices.ceiling}, rounds)
    if options.only in (case := f"{name}, cold"):
        works = []

        def cold(work: Callable[[], float]) -> Callable[[], float]:
            def run() -> float:
                works.append(slices.drop_cache())
                return work()

            return run

        note = "cold" if slices.drop_cache() else "the page cache could not be dropped here: this is warm"
        yield compare(
            case, "slices/s", {"ours": cold(slices.ours), "ceiling": cold(slices.ceiling)}, min(rounds, 3), 0.5, note=note
        )
    slices.close()
    store.close()


def batches(folder: Path, count: int) -> Callable[[], float]:
    """A contender that measures slices per second in training batches."""
    dataset = DiskTrajDataset(folder.parent.parent, folder.parent.name)
    dataset.configure(DatasetSettings(SLICE))
    loader, n = SequenceLoader(dataset, BATCH), max(1, count // BATCH)

    def run() -> float:
        began = time.perf_counter()
        for number in range(n):
            loader.draw(number)
        return n * BATCH / (time.perf_counter() - began)

    return run


def writing(data: Data, save_as: str, folder: Path, options: Namespace) -> Row:
    """The row of writing trajectories to disk."""
    rng = np.random.default_rng(0)
    trajs = [data.make(rng) for _ in range(min(data.trajectories, 300 if save_as == "segments" else 100))]
    megabytes: list[float] = []

    def ours() -> float:
        shutil.rmtree(folder, ignore_errors=True)
        began = time.perf_counter()
        with writer_of(data, folder, save_as) as writer:
            for traj in trajs:
                writer.write(traj)
        taken = time.perf_counter() - began
        megabytes[:] = [p.stat().st_size / 1e6 for p in (folder / "fifo").iterdir()]
        return sum(megabytes) / taken

    def ceiling() -> float:
        content = os.urandom(int(max(megabytes) * 1e6))
        fd = os.open(folder / "plain", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        began = time.perf_counter()
        for size in megabytes:
            view = memoryview(content)[: int(size * 1e6)]
            while view:
                view = view[os.write(fd, view) :]
            os.fsync(fd)
            os.fsync(fd)  # ours syncs the directory, too
        taken = time.perf_counter() - began
        os.close(fd)
        os.unlink(folder / "plain")
        return sum(megabytes) / taken

    ours()
    rounds = options.rounds or (1 if options.smoke else 5)
    case = f"{data.name.split(',')[0]}, {save_as}, writing"
    return compare(case, "MB/s", {"ours": ours, "ceiling": ceiling}, rounds, 0.5, note=f"{len(megabytes)} files")


# ---- the index -------------------------------------------------------------------------------------------------------------


def fill_index(folder: Path, files: int, trajectories: int) -> None:
    """Write segments of short trajectories (10 steps, 4 floats), without fsync, which would take minutes."""
    data, rng = Data("", (4,), np.float32, 10, 0), np.random.default_rng(0)
    trajs, spaces = [data.make(rng) for _ in range(trajectories)], sc.spaces_text(data.space, ACTIONS)
    (folder / "fifo").mkdir(parents=True)
    for i in range(files):
        name = formats.file_name("segments", "bench", i, trajectories, "")
        with open(folder / "fifo" / name, "wb") as f:
            f.writelines(formats.encode_segment([StoredTrajs.of(t) for t in trajs], spaces, "bench", i))
    settled = time.time() - 60.0
    for entry in os.scandir(folder / "fifo"):
        os.utime(entry.path, (settled, settled))


def index(folder: Path, options: Namespace) -> Iterator[Row]:
    """Rows of the time until a buffer of a million trajectories can be sampled."""
    files, trajectories = (20, 5) if options.smoke else (20_000, 50)
    if not any(options.only in case for case in INDEX_CASES):
        return
    fill_index(folder, files, trajectories)
    names = sorted(os.listdir(folder / "fifo"))
    header = _header_bytes(folder / "fifo" / names[0], trajectories)
    rounds = options.rounds or (1 if options.smoke else 3)
    for case, known in zip(INDEX_CASES, (False, True)):
        if options.only in case:
            turns = {
                "ours": partial(rebuild, folder, known),
                "ceiling": partial(look_at, folder / "fifo", names, header, known),
            }
            yield compare(case, "s", turns, rounds, 0.5, note=f"{files * trajectories:,} trajectories in {files:,} files")


INDEX_CASES = ("index of 1M trajectories, first seen", "index of 1M trajectories, known")


def rebuild(folder: Path, known: bool) -> float:
    """Seconds to open the store, with or without its index from before."""
    if not known:
        for name in ("order.journal", "index.cache"):
            (folder / name).unlink(missing_ok=True)
    began = time.perf_counter()
    TrajectoryStore(folder).refresh()
    return time.perf_counter() - began


def _header_bytes(path: Path, trajectories: int) -> list[tuple[int, int]]:
    """(offset, bytes) of the header and of each index field."""
    fd = os.open(path, os.O_RDONLY)
    members, _ = formats.parse_segment(fd, os.fstat(fd).st_size)
    os.close(fd)
    first = min(m.at for m in members.values())
    return [(0, first), *((members[name].at, members[name].size) for name in sc.INDEX)]


def look_at(folder: Path, names: list[str], places: list[tuple[int, int]], known: bool) -> float:
    """Seconds to open each file and read the bytes that `TrajectoryStore.refresh` needs."""
    began = time.perf_counter()
    for name in names:
        fd = os.open(f"{folder}/{name}", os.O_RDONLY)
        size = os.fstat(fd).st_size
        if known:
            for at, count in places:
                os.pread(fd, count, at)
        else:
            zlib.crc32(os.pread(fd, size, 0))
        os.close(fd)
    return time.perf_counter() - began


def rows(options: Namespace) -> Iterator[Row]:
    """Reading, writing, and the index."""
    root = Path(tempfile.mkdtemp())
    try:
        for data in TINY if options.smoke else (VECTORS, IMAGES):
            for save_as in ("segments", "npz"):
                folder = root / f"{data.dtype.__name__}-{save_as}" / "buffer"
                if options.only in f"{data.name}, {save_as}, batches of {BATCH}, warm, cold":
                    yield from reading(data, save_as, folder, options)
                    shutil.rmtree(folder)
                if options.only in f"{data.name.split(',')[0]}, {save_as}, writing":
                    yield writing(data, save_as, folder, options)
                    shutil.rmtree(folder, ignore_errors=True)
        yield from index(root / "index" / "buffer", options)
    finally:
        shutil.rmtree(root, ignore_errors=True)
