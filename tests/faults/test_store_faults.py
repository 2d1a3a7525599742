"""What may happen to a buffer on disk: writers killed, files damaged, files deleted while read, a full disk, very many files."""

import json
import os
import re
import resource
import signal
import subprocess
import sys
import time
from collections import Counter, deque
from pathlib import Path

import fault_helpers as faults
import numpy as np
import pytest
from fault_helpers import Threads, count, damage, report, say, small_disk
from store_helpers import (
    FEW,
    KINDS,
    assert_numbered,
    assert_same,
    dataset_of,
    numbered,
    one_file,
    opened,
    put,
    steps_of,
    writer,
)

from amago.store import EvictedError, TrajectoryStore

SCRIPTS = Path(__file__).with_name("store_fault_scripts")
HOW = ("flip", "flip", "cut", "empty", "foreign")


@pytest.fixture
def fast_sync(monkeypatch):
    """Thousands of fsyncs wait for whatever else the disk does."""
    monkeypatch.setattr(os, "fsync", lambda fd: None)


def script(name, *arguments):
    command = [sys.executable, str(SCRIPTS / name), *map(str, arguments)]
    return faults.start(command, stdin=subprocess.PIPE)


class Nursery:
    """Writers in processes of their own, by name (see its script)."""

    def __init__(self):
        self.process, self.pids = script("nursery.py"), {}

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        for name in list(self.pids):
            self.kill(name)
        self.process.communicate(timeout=200)

    def _ask(self, *words):
        self.process.stdin.write(" ".join(map(str, words)) + "\n")
        self.process.stdin.flush()
        return int(self.process.stdout.readline())

    def start(self, root, name, kind, first, skew=0.0):
        self.pids[name] = self._ask(name, kind, first, skew, root)

    def kill(self, name):
        """SIGKILL; whether it still lived."""
        pid = self.pids.pop(name)
        os.kill(pid, signal.SIGKILL)
        return self._ask(pid) == signal.SIGKILL


def acknowledged(root, name):
    """How many trajectories a writer has said to be committed."""
    path = root / f"{name}.ack"
    return int(path.read_text().split()[-1]) if path.exists() and path.stat().st_size else 0


def temporary_files(root):
    return [p for p in (root / "fifo").iterdir() if p.name.startswith(".tmp-")]


def test_killed_writers_lose_nothing_that_they_acknowledged(tmp_path):
    rng, wanted, killed, totals = faults.rng("kill"), count(15, 200), 0, Counter()
    with Nursery() as nursery:
        while killed < wanted:
            root, first = tmp_path / str(killed // 20), killed % 20  # at the same time 1 to 4 writers, in turn 20 to a buffer
            writers = {f"w{k}": 700 * k for k in range(first, min(first + int(rng.integers(1, 5)), 20))}
            writers = dict(list(writers.items())[: wanted - killed])
            (root / "fifo").mkdir(parents=True, exist_ok=True)
            for name, episode in writers.items():
                nursery.start(root, name, KINDS[int(rng.integers(3))], episode)
            for name in writers:
                patience = time.monotonic() + (0 if rng.random() < 0.1 else 200)  # now and then before the first word
                while time.monotonic() < patience and not acknowledged(root, name):
                    time.sleep(0.001)
                time.sleep(rng.uniform(0, 0.03))
                assert nursery.kill(name), f"{name} had ended by itself"
                killed += 1
            totals["left"] += len(temporary_files(root))
            found = survivors(root)
            assert not temporary_files(root)
            for name, episode in writers.items():
                mine = sorted(e for e in found if episode <= e < episode + 700)
                assert mine == list(range(episode, episode + len(mine)))  # in order, none missing
                assert len(mine) >= acknowledged(root, name)
                totals["acknowledged"] += acknowledged(root, name)
                totals["found"] += len(mine)
    report("writers killed, and nothing lost", killed, wanted)
    say("{acknowledged} trajectories acknowledged, {found} found, {left} temporary files left and removed".format_map(totals))
    assert totals["acknowledged"] > wanted


def survivors(root):
    """The episodes in a buffer, each read and compared whole; nothing that is visible is damaged."""
    store = opened(root)
    found = [assert_numbered(store.read(i)) for i in range(len(store))]
    assert store.lengths.tolist() == [steps_of(episode) for episode in found]
    assert len(set(found)) == len(found)
    assert store.info()["quarantined"] == 0
    store.close()
    return found


def flipped(good, offset, rng):
    bad = bytearray(good)
    bad[offset] ^= 1 << int(rng.integers(8))
    return bytes(bad)


@pytest.mark.parametrize("save_as", KINDS)
def test_damage_is_found_before_anything_is_sampled(tmp_path, save_as, fast_sync):
    """Dates and attributes in a zip directory are of no consequence: there, what is read must be what was written."""
    rng, n = faults.rng(f"damage {save_as}"), count(40, 200)
    path = one_file(tmp_path, save_as)
    good = path.read_bytes()
    offsets = [*range(8), *rng.integers(len(good), size=n - 8)]  # the first eight: a segment's length of header
    cuts = [0, 1, len(good) - 1, *rng.integers(len(good), size=n - 3)]
    cases = [flipped(good, int(o), rng) for o in offsets] + [good[: int(c)] for c in cuts]
    cases += [b"", b"hello", os.urandom(300), good + b"\0"]
    refused = harmless = 0
    for i, bad in enumerate(cases):
        path.write_bytes(bad)
        store = opened(tmp_path)
        if len(store):
            assert i < n or bad == good + b"\0"  # nor are bytes after the end of an archive
            assert save_as != "segments"
            assert_same(store.read(0), numbered(7, 6))
            harmless += 1
        else:
            refused += 1
            assert store.info()["quarantined"] == 1
            assert not path.exists()
    assert len(list((tmp_path / "quarantine").iterdir())) == refused
    path.write_bytes(good)
    assert len(opened(tmp_path)) == (2 if save_as == "segments" else 1)
    report(f"{save_as} files flipped, cut, empty or foreign, none sampled", refused + harmless, len(cases))
    say(f"{refused} quarantined, {harmless} that read as they were written")


def assert_right(sample):
    """A training sequence of a `numbered` trajectory."""
    obs, t = np.asarray(sample.obs["a/b"]), np.asarray(sample.time_idxs)[:, 0]
    episode = int(obs[0, 0])
    assert t.tolist() == list(range(int(t[0]), int(t[0]) + len(t)))
    np.testing.assert_array_equal(obs, np.stack([np.full(len(t), episode), t, np.zeros(len(t))], axis=1))
    np.testing.assert_array_equal(np.asarray(sample.obs["image"]).reshape(len(t), 12), np.tile((t % 251)[:, None], 12))
    np.testing.assert_array_equal(np.asarray(sample.rews)[:, 0], 1000 * episode + t[:-1])
    np.testing.assert_array_equal(np.asarray(sample.actions).argmax(-1), t[:-1] % 50)
    return True


def noticed(store, path):
    """Whether a file that was damaged is sampled no more, or was found to be harmless."""
    entry = store._files["fifo"].get(path.name)
    try:
        return entry is None or entry.gone or entry.mtime_ns == path.stat().st_mtime_ns
    except FileNotFoundError:
        return True


@pytest.mark.parametrize("save_as", KINDS)
def test_damage_after_the_check_is_found_before_it_is_sampled(tmp_path, save_as, fast_sync):
    rng, n, harm, fresh = faults.rng(f"damage later {save_as}"), count(40, 200), Counter(), 60
    damaged, root, few = set(), tmp_path / "d" / "buffer", FEW
    for k in range(0, fresh, 2):
        put(root, [k, k + 1], f"w{k}", save_as, steps=20, action_space=few)
    dataset = dataset_of(tmp_path, padded="both")
    with Threads(lambda random: assert_right(dataset.sample_random_trajectory(random)), 4) as samplers:
        for _ in range(n):
            paths = [path for path in sorted((root / "fifo").iterdir()) if path not in damaged]
            path, how = paths[int(rng.integers(len(paths)))], HOW[int(rng.integers(len(HOW)))]
            damage(path, how, rng)
            damaged.add(path)
            harm[how] += 1
            patience = time.monotonic() + 200
            while not noticed(dataset.store, path):
                assert not samplers.errors
                assert time.monotonic() < patience, f"{path} is damaged ({how}) and nobody noticed"
                time.sleep(0.001)
            put(root, [fresh, fresh + 1], f"x{fresh}", save_as, steps=20, action_space=few)
            fresh += 2
            if rng.random() < 0.5:  # else a file may be damaged before it is checked
                dataset.on_end_of_collection()
    dataset.on_end_of_collection()
    quarantined = int(dataset.store.info()["quarantined"])
    assert len(list((root / "quarantine").iterdir())) == quarantined
    if save_as == "segments":
        assert quarantined == n
    assert quarantined > n // 2
    report(f"{save_as} files damaged after they were checked, no wrong sample", sum(harm.values()), n)
    say(f"{dict(harm)}: {quarantined} in quarantine, the others harmless; {sum(samplers.done)} right samples meanwhile")


def read_a_slice(store, sizes):
    """Read and compare a slice of a random trajectory; True if it was there. ``sizes``: of the store, as they were seen."""

    def read(random):
        view = store.view()
        sizes.append(len(view))
        if not len(view):
            return False
        i = int(random.integers(len(view)))
        start = int(random.integers(view.lengths[i]))
        try:
            episode = assert_numbered(view.read(i, start, start + int(random.integers(1, 40))), start)
            assert int(view.lengths[i]) == steps_of(episode)
            assert_numbered(store.read(i))  # an index that may be too high by now
        except EvictedError:
            return False
        return True

    return read


def test_readers_go_on_while_the_oldest_are_deleted(tmp_path):
    """Two threads and two processes read; writers whose clocks are hours apart write; files go in the order they came."""
    limit, seconds, rng = 60, count(3, 60), faults.rng("evict")
    for part in ("fifo", "protected"):
        (tmp_path / part).mkdir()
    put(tmp_path, [0], "expert", part="protected", steps=steps_of(0))
    store, order, evicted, generation, largest = TrajectoryStore(tmp_path, limit), [], 0, 1, 1
    processes = [script("reader.py", tmp_path, seed) for seed in faults.seeds("readers", 2)]
    end = time.monotonic() + seconds
    sizes = deque([0], maxlen=10**6)
    with Nursery() as nursery, Threads(read_a_slice(store, sizes), 2) as readers:
        names = []
        while time.monotonic() < end or evicted <= 10 or not all(readers.done):
            assert not readers.errors
            if len(names) < 3:
                name, skew = f"w{generation}", (-7, 0, 5)[generation % 3] * 3600
                nursery.start(tmp_path, name, KINDS[int(rng.integers(3))], 700 * (generation % 20 + 1), skew)
                names.append(name)
                generation += 1
            elif rng.random() < 0.02:
                nursery.kill(names.pop(0))
            time.sleep(rng.uniform(0, 0.02))
            gone = store.refresh().evicted_files
            files = store._files["fifo"]
            kept, fresh = order[gone:], list(files.values())[len(order[gone:]) :]
            assert list(files)[: len(kept)] == kept  # the oldest went, the others stay in place, the new come last,
            assert fresh == sorted(fresh, key=lambda e: (e.sequence, e.writer))  # by their numbers, whatever their times are
            order, evicted = list(files), evicted + gone
            assert sum(e.n for e in files.values()) < limit + max([1, *(e.n for e in files.values())])
            largest = max([largest, *(e.n for e in files.values())])
    for process in processes:
        assert process.stdout.readline() == "reading\n", "it has read a slice"
        out, _ = process.communicate(timeout=200)
        assert process.returncode == 0
        readers.done += [int(out.split()[0])]
    again = TrajectoryStore(tmp_path, limit, edit=False)
    again.refresh()
    assert (list(again._files["fifo"])[: len(order)], store.info()["quarantined"]) == (order, 0)
    assert max(sizes) < limit + 1 + largest  # one is protected
    assert evicted > 10
    report("readers that went on while files were deleted", sum(n > 0 for n in readers.done), 4)
    say(f"{sum(readers.done)} slices read, {evicted} files deleted within {seconds} s, never more than {max(sizes)} of {limit}")


@pytest.mark.parametrize("way", ["budget", "tmpfs"])
def test_a_full_disk_is_waited_for_or_stops_the_run(tmp_path, way):
    prefix = small_disk(tmp_path) if way == "tmpfs" else []
    if prefix is None:
        pytest.skip("this machine does not let a test mount a small file system")
    cycles = count(6, 50)
    command = [sys.executable, SCRIPTS / "full_disk.py", tmp_path, way, cycles, faults.seeds(f"full {way}", 1)[0]]
    done = subprocess.run([*prefix, *map(str, command)], capture_output=True, text=True, env=faults.environment(), check=False)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert said["same"]
    assert said["stored"] == said["expected"]
    assert 0.9 * said["limit"] < said["peak"] <= said["limit"]
    message = rf"no space is left in {tmp_path}/buffer/fifo: \d+ bytes are needed for \d+ trajectories that wait in memory"
    assert re.search(message, said["message"])
    assert "no space for" in done.stderr  # the warning
    report(f"times that the disk ({way}) was full, nothing lost", said["stops"] + cycles // 2, cycles)
    say(
        f"{said['stops']} stops with the path and the bytes, {cycles // 2} times it went on; {said['waited']} trajectories waited"
    )
    say(f"{said['stored']} of {said['expected']} trajectories on disk, none twice; at most {said['peak']} bytes in memory")


def test_many_short_trajectories_take_few_files(tmp_path, fast_sync):
    """Phases of 50 and more short episodes; the long version has a million."""
    total, phase = count(20_000, 1_000_000), 50
    trajs, begun = [numbered(i, 1 + i % 5) for i in range(phase)], time.monotonic()
    with writer(tmp_path, segment_bytes=8 << 20) as w:
        for _ in range(total // phase):
            for traj in trajs:
                w.write(traj)
            w.flush()
    written, times = time.monotonic() - begun, []
    for _ in range(2):
        begun = time.monotonic()
        store = opened(tmp_path)
        times.append(time.monotonic() - begun)
        assert len(store) == total
        store.close()
    files = len(os.listdir(tmp_path / "fifo"))
    assert files <= 20_000
    rng = faults.rng("short")
    for i in rng.integers(total, size=1000).tolist():
        assert assert_numbered(store.read(i)) == i % phase
    report("short trajectories found", len(store), total)
    say(
        f"{files} files written in {written:.1f} s, index built in {times[0]:.1f} s with checksums, rebuilt in {times[1]:.1f} s"
    )


def test_more_files_than_a_process_may_open(tmp_path, fast_sync):
    n, trajs = count(1_000, 100_000), [numbered(i, 4) for i in range(16)]
    with writer(tmp_path, save_as="npz") as w:
        for i in range(n):
            w.write(trajs[i % 16])
    limits, before = resource.getrlimit(resource.RLIMIT_NOFILE), len(os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, limits[1]))
    try:
        store, most = opened(tmp_path), deque([0], maxlen=10**6)

        def read(random):
            i = int(random.integers(n))
            assert assert_numbered(store.read(i, 1, 3), 1) == i % 16
            most.append(len(os.listdir("/proc/self/fd")) - before)
            return True

        begun = time.monotonic()
        with Threads(read, 4) as readers:
            while sum(readers.done) < count(1_000, 20_000):
                assert not readers.errors
                time.sleep(0.01)
        took = time.monotonic() - begun
        store.max_trajectories = n // 2
        store.refresh()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert len(os.listdir(tmp_path / "fifo")) == n // 2
    assert 60 <= max(most) <= 100
    report("archives read where 256 files may be open", len(store), n // 2)
    say(f"{sum(readers.done)} slices read in {took:.1f} s, at most {max(most)} files open")
