"""What the parts of a launch cost: the constants of `benchmarks.cluster_model`, each beside its ceiling.

``python -m benchmarks cluster --constants`` measures them in about a minute and writes them to benchmarks/cluster_measured.json
(or DIR/cluster_measured.json with ``--out DIR``; see `Constants`).

Ceilings: of the ingest, the same bytes written to one file with one fsync, or the same files renamed; of a look, listing the directory;
of weights, the same bytes written with an fsync, or read; of batches, the byte ranges read one after another (`benchmarks.replay`); of the
small run (`benchmarks.cluster_sleeping`), the sleeping alone; of a process's start and memory, one that imports PyTorch and Gymnasium.

Looks, loading, batches and starts, which wait for nothing, are measured as processor time, so that other work on the machine does not
count. The rest is wall time.
"""

from __future__ import annotations

import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from amago.launch.bundles import Ingest, Spool
from amago.launch.bus import Bus, own_directory
from amago.loading import DatasetSettings, DiskTrajDataset, SequenceLoader
from amago.run.launched.protocol import SPOOL
from amago.run.rundir import RunCheckpoints
from benchmarks import cluster_sleeping as program
from benchmarks import replay
from benchmarks.cluster_model import MEASURED, Constants
from benchmarks.harness import Row, in_turns, machine, share

MEGABYTE = 1e6


@dataclass
class Found:
    """What was measured so far: `Constants` by name, and what describes the small run."""

    constants: dict[str, float] = field(default_factory=dict)
    run: dict[str, float] = field(default_factory=dict)


def rows(options: Namespace) -> Iterator[Row]:
    """The rows of all parts; saves the constants at the end, unless only some were measured."""
    found, root = Found(), Path(tempfile.mkdtemp())
    parts = (ingest, looks, weights, batches, small_run, process)
    try:
        for i, part in enumerate(parts):
            folder = root / str(i)
            folder.mkdir()
            yield from part(folder, options, found)
            shutil.rmtree(folder)
    finally:
        shutil.rmtree(root, ignore_errors=True)
    target = Path(options.out) / MEASURED.name if options.out else MEASURED
    if options.out or not options.smoke:
        target.parent.mkdir(parents=True, exist_ok=True)
        about: dict[str, Any] = {"machine": machine(), "load": os.getloadavg()[0], "small run": found.run}
        Constants(**found.constants).save(target, **about)


def _row(case: str, unit: str, figures: dict[str, list[float]], note: str = "") -> Row:
    ours, ceiling = (statistics.median(figures[name]) for name in ("ours", "ceiling"))
    ratio = statistics.median(share(a, b, unit) for a, b in zip(figures["ours"], figures["ceiling"]))
    return Row(case, ours, unit, ceiling, ratio, note=note)


def _seconds(work: Callable[[], Any], clock: Callable[[], float] = time.perf_counter) -> float:
    began = clock()
    work()
    return clock() - began


def _cpu_seconds(work: Callable[[], Any]) -> float:
    """Processor time of this process, for work that waits for nothing: other work on the machine does not count."""
    return _seconds(work, time.process_time)


def _rounds(options: Namespace, usual: int) -> int:
    return options.rounds or (1 if options.smoke else usual)


# ---- files ---------------------------------------------------------------------------------------------------------------------


class Arriving:
    """Files that go from a spool over a bus into a directory, and the same without it."""

    def __init__(self, folder: Path):
        self.folder, self.count = folder, 0
        home = own_directory(folder / "home")
        self.spooled = home / "collector-0" / SPOOL
        self.spooled.mkdir(parents=True)
        bus = Bus(str(folder / "bus"))
        self.spool = Spool(bus, [home], "writer")
        self.ingest = Ingest(bus, folder / "buffer" / "fifo", folder / "buffer" / ".arriving")

    def copied(self, files: int, size: int) -> float:
        """Seconds to take files that are on the bus."""
        self._made(files, size)
        self.spool.pump(flush=True)
        return _seconds(self.ingest.pull)

    def moved(self, files: int, size: int) -> float:
        """Seconds to bundle and take files that lie on the same disk."""
        self._made(files, size)

        def deliver() -> None:
            self.spool.pump(flush=True)
            self.ingest.pull()

        return _seconds(deliver)

    def _made(self, files: int, size: int) -> list[tuple[str, Path]]:
        first, self.count = self.count, self.count + files
        names = [f"{first + i:09d}-n1.safetensors" for i in range(files)]
        for name in names:
            (self.spooled / name).write_bytes(os.urandom(size // files))
        os.sync()  # what a collector has written is durable when it is delivered
        return [(name, self.spooled / name) for name in names]

    def renamed(self, files: int, size: int) -> float:
        """Seconds to rename them."""
        given, target = self._made(files, size), self.folder / "buffer"

        def rename() -> None:
            for name, path in given:
                os.rename(path, target / name)

        return _seconds(rename)

    def written(self, size: int) -> float:
        """Seconds to write so many bytes to one file, with one fsync."""
        content = os.urandom(size)

        def write() -> None:
            with open(self.folder / "plain", "wb") as f:
                f.write(content)
                f.flush()
                os.fsync(f.fileno())

        return _seconds(write)


def ingest(folder: Path, options: Namespace, found: Found) -> Iterator[Row]:
    """Files that arrive: 8 MB in one and in 80, from a bus, and bundled first."""
    files, size, rounds = (4, 40_000, 1) if options.smoke else (80, 8_000_000, _rounds(options, 9))
    arriving = Arriving(folder)
    turns: dict[str, Callable[[], float]] = {
        "one": lambda: arriving.copied(1, size),
        "many": lambda: arriving.copied(files, size),
        "tiny": lambda: arriving.copied(1, 1000),
        "moved": lambda: arriving.moved(files, size),
        "one moved": lambda: arriving.moved(1, 1000),
        "renamed": lambda: arriving.renamed(files, size),
        "written": lambda: arriving.written(size),
    }
    taken = in_turns(turns, rounds)
    for case, name in (("one file", "one"), (f"{files} files", "many")):
        rates = {"ours": [size / MEGABYTE / s for s in taken[name]], "ceiling": [size / MEGABYTE / s for s in taken["written"]]}
        yield _row(f"ingest from a bus, {size / MEGABYTE:g} MB in {case}", "MB/s", rates)
    rates = {"ours": [files / s for s in taken["moved"]], "ceiling": [files / s for s in taken["renamed"]]}
    yield _row(f"bundling and ingest, {files} files", "files/s", rates)
    one, many, tiny, moved, one_moved = (statistics.median(taken[n]) for n in ("one", "many", "tiny", "moved", "one moved"))
    move_file = max(0.0, (moved - one_moved) / (files - 1))
    copy_file = max(0.0, (many - one) / (files - 1))
    rate = (size - 1000) / max(one - tiny, 1e-9)
    call = max(0.0, one_moved - move_file)
    found.constants |= {"call": call, "move_file": move_file, "copy_file": copy_file, "copy_rate": rate}


def looks(folder: Path, options: Namespace, found: Found) -> Iterator[Row]:
    """Looks of the learner at its store."""
    small, large, new = (20, 60, 5) if options.smoke else (1_000, 10_000, 200)
    taken: dict[int, float] = {}
    for files in (small, large):
        root = folder / str(files)
        replay.fill_index(root / "run" / "buffer", files, 1)
        dataset = DiskTrajDataset(root, "run")
        dataset.configure(DatasetSettings(8))
        fifo = dataset.fifo_path
        turns = {
            "ours": partial(_cpu_seconds, dataset.on_end_of_collection),
            "ceiling": partial(_cpu_seconds, partial(os.listdir, fifo)),
        }
        figures = in_turns(turns, _rounds(options, 9))
        milliseconds = {name: [1000 * s for s in values] for name, values in figures.items()}
        yield _row(f"a look at a store of {files:,} files", "ms", milliseconds)
        taken[files] = statistics.median(figures["ours"])
    later = folder / "later" / "buffer"
    replay.fill_index(later, new, 1)
    for entry in os.scandir(later / "fifo"):
        os.rename(entry.path, os.path.join(fifo, "later-" + entry.name))
    arrived = _cpu_seconds(dataset.on_end_of_collection)
    dataset.close()
    look_file = max(0.0, (taken[large] - taken[small]) / (large - small))
    found.constants |= {
        "look": max(0.0, taken[small] - look_file * small), "look_file": look_file,
        "new_file": max(0.0, (arrived - taken[large]) / new),
    }  # fmt: skip


def weights(folder: Path, options: Namespace, found: Found) -> Iterator[Row]:
    """Publication and reading of weights by their size."""
    sizes = (40_000, 400_000) if options.smoke else (4_000_000, 64_000_000)
    taken: dict[str, list[float]] = {"publish": [], "load": []}
    for size in sizes:
        checkpoints = RunCheckpoints(folder / str(size), "run")
        checkpoints.prepare()
        policy = {f"layer{i}": torch.randn(size // 4 // 8) for i in range(8)}
        plain, content = Arriving(folder / str(size)), checkpoints.latest
        checkpoints.publish(policy)
        turns: dict[str, Callable[[], float]] = {
            "publish": lambda: _seconds(lambda: checkpoints.publish(policy)),  # noqa: B023
            "load": lambda: _cpu_seconds(checkpoints.read_latest),  # noqa: B023
            "write": lambda: plain.written(size),  # noqa: B023
            "read": lambda: _cpu_seconds(content.read_bytes),  # noqa: B023
        }
        figures = {n: [1000 * s for s in values] for n, values in in_turns(turns, _rounds(options, 7)).items()}
        for name, ceiling in (("publish", "write"), ("load", "read")):
            text = f"weights of {size / MEGABYTE:g} MB, {'publication' if name == 'publish' else 'loading'}"
            yield _row(text, "ms", {"ours": figures[name], "ceiling": figures[ceiling]})
            taken[name].append(statistics.median(figures[name]) / 1000)
    for name, (small, large) in taken.items():
        each = max(large - small, 1e-9) / (sizes[1] - sizes[0])
        found.constants |= {name: max(0.0, small - each * sizes[0]), f"{name}_rate": 1.0 / each}


def batches(folder: Path, options: Namespace, found: Found) -> Iterator[Row]:
    """Batches of 24 sequences of 128 steps, read ahead by six threads, as an `Experiment` does."""
    data = replay.TINY[0] if options.smoke else replay.Data("", (20,), replay.np.float32, 1000, 200)
    replay.write(data, folder / "run" / "buffer", "segments")
    dataset = DiskTrajDataset(folder, "run")
    dataset.configure(DatasetSettings(replay.SLICE))
    slices = replay.Slices(dataset.store, 100 if options.smoke else 3000)
    loader, count = SequenceLoader(dataset, replay.BATCH, workers=6), len(slices.asked) // replay.BATCH
    turns = {
        "ours": lambda: count * replay.BATCH / _cpu_seconds(lambda: list(loader.batches(count))),
        "ceiling": slices.ceiling,
    }
    figures = in_turns(turns, _rounds(options, 5))
    loader.close()
    slices.close()
    dataset.close()
    yield _row(f"sequences of {replay.SLICE} steps in batches of {replay.BATCH}", "sequences/s", figures)
    found.constants["read_rate"] = statistics.median(figures["ours"])


# ---- the small run -------------------------------------------------------------------------------------------------------------


def small_run(folder: Path, options: Namespace, found: Found) -> Iterator[Row]:
    """A collector and a learner of `benchmarks.cluster_sleeping`, each alone."""
    rounds, long = (1, program.HORIZON + 1) if options.smoke else (_rounds(options, 5), program.PHASE)
    collected = [_collecting(folder / f"c{i}", long) for i in range(rounds)]
    step = statistics.median((many - one) / (long - 1) for one, many in collected)
    phase = max(0.0, statistics.median(one for one, _ in collected) - step)
    alone = program.ACTORS * program.STEP_SECONDS
    steps = [program.ACTORS * (long - 1) / (many - one) for one, many in collected]
    yield _row("small run, a collector", "steps/s", {"ours": steps, "ceiling": [program.ACTORS / alone] * rounds})
    yield Row(
        "small run, the rest of a phase", 1000 * phase, "ms", 1000 * step, step / max(phase, 1e-9), note="the ceiling is a step"
    )

    updates = 3 if options.smoke else 12
    files = list((folder / "c0" / "run" / "buffer" / "fifo").iterdir())
    learned = [_learning(folder / f"l{i}", files, updates) for i in range(rounds)]
    update = statistics.median((many - one) / (updates - 1) for one, many in learned)
    epoch = max(0.0, statistics.median(one for one, _ in learned) - update)
    rates = [(updates - 1) / (many - one) for one, many in learned]
    yield _row("small run, a learner", "updates/s", {"ours": rates, "ceiling": [1 / program.UPDATE_SECONDS] * rounds})
    size = sum(path.stat().st_size for path in files) / len(files)
    published = (folder / "l0" / "run" / "ckpts" / "latest" / "policy.pt").stat().st_size
    known = found.constants
    cost = known.get("publish", 0.0) + published / known.get("publish_rate", 1e12) + known.get("look", 0.0)
    load = known.get("load", 0.0) + published / known.get("load_rate", 1e12)
    found.constants |= {"phase": phase, "epoch": max(0.0, epoch - cost)}
    found.run |= {"step": step, "update": update, "weights": published, "file": size, "load": load}


def _collecting(folder: Path, long: int) -> tuple[float, float]:
    """Seconds of a phase with one step, and of one with many, of a collector."""
    taken = []
    for steps in (1, long):
        epochs = 20 if steps == 1 else 2
        experiment = program.build(str(folder), mode="collect", epochs=epochs, train_timesteps_per_epoch=steps)
        experiment.start()
        taken.append(_seconds(experiment.learn) / epochs)
        experiment.close()
    return taken[0], taken[1]


def _learning(folder: Path, files: list[Path], updates: int) -> tuple[float, float]:
    """Seconds of an epoch with one update, and of one with many, of a learner."""
    buffer = folder / "run" / "buffer" / "fifo"
    buffer.mkdir(parents=True)
    for path in files:
        shutil.copy(path, buffer)
    taken = []
    experiment = program.build(str(folder), mode="learn", epochs=1, train_batches_per_epoch=3)
    experiment.start()
    experiment.learn()  # the first updates take longer
    for count, epochs in ((1, 10), (updates, 1)):
        experiment.epochs, experiment.train_batches_per_epoch = experiment.epoch + epochs, count
        taken.append(_seconds(experiment.learn) / epochs)
    experiment.close()
    return taken[0], taken[1]


_TORCH = (
    "import torch, gymnasium, pathlib; lines = pathlib.Path('/proc/self/smaps_rollup').read_text().splitlines(); "
    "print(1024 * sum(float(x.split()[1]) for x in lines if x.startswith('Private_')))"
)


def _children() -> float:
    """Processor time of the processes that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def process(folder: Path, options: Namespace, found: Found) -> Iterator[Row]:
    """Start and memory of a collector."""
    rounds = _rounds(options, 3)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    memory: dict[str, list[float]] = {"ours": [], "ceiling": []}

    def start(name: str, words: list[str]) -> float:
        began = _children()
        done = subprocess.run(
            [sys.executable, *words], env=environment, capture_output=True, text=True, check=True, timeout=120
        )
        memory[name].append(float(done.stdout.split()[-1]) / 2**20)
        return _children() - began

    made = iter(range(10**6))
    turns = {
        "ours": lambda: start(
            "ours", ["-m", "benchmarks.cluster_sleeping", str(folder / str(next(made))), '{"mode": "first step"}']
        ),
        "ceiling": lambda: start("ceiling", ["-c", _TORCH]),
    }
    figures = in_turns(turns, rounds)
    yield _row("a collector, from its start to the end of its first step", "s", figures)
    yield _row("a collector, memory that it shares with no other process", "MiB", memory)
    found.constants |= {"start": statistics.median(figures["ours"]), "memory": statistics.median(memory["ours"]) * 2**20}
