"""Replay from stores of 10^6 to 10^8 transitions and more: opening, batches, and finding new files.

A store has trajectories of 100 transitions (4 floats and a discrete action), 10 to a file, written without fsync. Beyond `WRITTEN` transitions (or a third of the free disk), files are further names (hard links) of those before: the index
does not know, and neither do the batches, but the page cache holds each only once.

The "ceiling" of a row is the figure of the smallest store, times the growth of the work: in proportion to the number of files for
opening and for a look, the same for a batch. A ratio of 1 is growth in proportion; a batch of a ratio of 1 costs the same at any size.

``--transitions 3.46e8`` sets the largest store, and ``--only '346,000,000 transitions'`` measures that alone.
"""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from statistics import median

import numpy as np

from amago.data.trajectory import StoredTrajs
from amago.loading import DatasetSettings, DiskTrajDataset, SequenceLoader
from amago.store import TrajectoryStore, formats
from amago.store import schema as sc
from benchmarks.harness import Row
from benchmarks.replay import ACTIONS, Data

STEPS, TRAJECTORIES, LENGTH, BATCH = 100, 10, 64, 24
"""Of a trajectory; of a file; of a training sequence; sequences of a batch."""
WRITTEN = 10**8
SMALLEST, LARGEST = 10**6, 10**8
SAMPLINGS = ("uniform", "length", "priority")
OPENINGS = {"first seen": True, "known": False}
WHAT = (
    "opening, first seen", "opening, known", "memory of the opened store", "a look for new files", "a batch, uniform, cold",
    *(f"{which} batch, {sampling}" for sampling in SAMPLINGS for which in ("first", "a")),
)  # fmt: skip


def rows(options: Namespace) -> Iterator[Row]:
    """Rows of all sizes, a factor of ten apart, and of the largest."""
    largest = int(options.transitions or LARGEST)
    smallest = SMALLEST
    if options.smoke:
        smallest, largest = 10_000, 20_000
    if largest < smallest:
        raise ValueError(f"--transitions must be at least {smallest:,}, got {largest:,}")
    sizes = [n for n in (10**i for i in range(20)) if smallest <= n < largest] + [largest]
    first: dict[str, float] = {}
    for size in sizes:
        if not any(options.only in f"{size:,} transitions, {what}" for what in WHAT):
            continue  # nothing to measure
        root = Path(tempfile.mkdtemp())
        try:
            files = fill(root / "run" / "buffer", size)
            for what, unit, figure, grows, note in figures(root, files, options):
                case = f"{size:,} transitions, {what}"
                if options.only not in case:
                    continue
                expected = first.setdefault(what, figure) * (size / sizes[0] if grows else 1.0)
                yield Row(case, figure, unit, expected, expected / figure, note=note, details={"files": float(files)})
        finally:
            shutil.rmtree(root, ignore_errors=True)


def fill(buffer: Path, transitions: int) -> int:
    """Write a store of so many transitions; returns the number of its files."""
    data, rng = Data("", (4,), np.float32, STEPS, 0), np.random.default_rng(0)
    trajs, spaces = [data.make(rng) for _ in range(TRAJECTORIES)], sc.spaces_text(data.space, ACTIONS)
    folder = buffer / "fifo"
    folder.mkdir(parents=True)
    files = max(1, transitions // (STEPS * TRAJECTORIES))
    size = sum(len(part) for part in formats.encode_segment([StoredTrajs.of(t) for t in trajs], spaces, "bench", 0))
    written = min(files, WRITTEN // (STEPS * TRAJECTORIES), max(1, shutil.disk_usage(buffer).free // 3 // size))
    for i in range(files):
        path = folder / formats.file_name("segments", "bench", i, TRAJECTORIES, "")
        if i < written:
            with open(path, "wb") as f:
                f.writelines(formats.encode_segment([StoredTrajs.of(t) for t in trajs], spaces, "bench", i))
        else:
            os.link(folder / formats.file_name("segments", "bench", i % written, TRAJECTORIES, ""), path)
    settled = time.time() - 60.0
    for entry in os.scandir(folder):
        os.utime(entry.path, (settled, settled))
    return files


def figures(root: Path, files: int, options: Namespace) -> Iterator[tuple[str, str, float, bool, str]]:
    """(what, unit, figure, whether the work grows with the size, note) of one store."""
    rounds = options.rounds or (1 if options.smoke else 3)
    note = f"{files:,} files of {TRAJECTORIES} trajectories of {STEPS}"
    for what in OPENINGS:
        measured = [_in_a_process(root, what) for _ in range(rounds if what == "known" else 1)]
        yield f"opening, {what}", "s", median(seconds for seconds, _ in measured), True, note
    yield "memory of the opened store", "MiB", measured[-1][1] / 2**20, True, "more than before it was opened"
    for sampling in SAMPLINGS:
        dataset = DiskTrajDataset(root, "run", sampling=sampling)
        dataset.configure(DatasetSettings(LENGTH))
        loader, count = SequenceLoader(dataset, BATCH), 5 if options.smoke else 100
        began = time.perf_counter()
        loader.draw(0)
        yield f"first batch, {sampling}", "ms", 1000 * (time.perf_counter() - began), True, ""
        if sampling == "uniform":
            dropped = drop_cache(root / "run" / "buffer" / "fifo")
            yield (
                "a batch, uniform, cold",
                "ms",
                _batch(loader, 1, count),
                False,
                "" if dropped else "the page cache was not dropped: warm",
            )
            looked = [_look(dataset) for _ in range(rounds)]
            yield "a look for new files", "s", median(looked), True, ""
        yield f"a batch, {sampling}", "ms", median(_batch(loader, 1 + i * count, count) for i in range(1, 4)), False, ""
        dataset.close()


def _batch(loader: SequenceLoader, first: int, count: int) -> float:
    """Milliseconds of a batch, the mean of ``count``."""
    began = time.perf_counter()
    for number in range(first, first + count):
        loader.draw(number)
    return 1000 * (time.perf_counter() - began) / count


def _look(dataset: DiskTrajDataset) -> float:
    began = time.perf_counter()
    dataset.on_end_of_collection()
    return time.perf_counter() - began


def _in_a_process(root: Path, what: str) -> tuple[float, float]:
    """Seconds to open the store in a process of its own, and the bytes of memory that this takes there."""
    buffer = root / "run" / "buffer"
    if OPENINGS[what]:
        for name in ("order.journal", "index.cache"):
            (buffer / name).unlink(missing_ok=True)
    words = [sys.executable, "-m", "benchmarks.replay_size", str(buffer)]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    seconds, memory = map(float, done.stdout.split()[-2:])
    return seconds, memory


def drop_cache(folder: Path) -> bool:
    """Drop the files of a directory from the page cache; returns whether that worked for the last of them."""
    for entry in os.scandir(folder):
        fd = os.open(entry.path, os.O_RDONLY)
        os.fdatasync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        try:
            cold = os.preadv(fd, [bytearray(1)], 0, os.RWF_NOWAIT) < 1
        except BlockingIOError:
            cold = True
        except OSError:
            cold = False
        os.close(fd)
    return cold


def main() -> None:
    """Open the store that the argument names; print seconds and bytes."""
    before, began = _memory(), time.perf_counter()
    store = TrajectoryStore(sys.argv[1])
    store.refresh()
    print(time.perf_counter() - began, max(_memory() - before, resource.getpagesize()))


def _memory() -> int:
    """Bytes of main memory that this process uses."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


if __name__ == "__main__":
    main()
