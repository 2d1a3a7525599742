"""Records episodes onto a disk that is full again and again, and says what became of them (one line of JSON).

    full_disk.py ROOT budget|tmpfs CYCLES SEED

``tmpfs``: ROOT is a file system of a few megabytes, filled by another file. ``budget``: `os.write` has room for so much.
"""

import errno
import json
import os
import random
import sys
import time
from pathlib import Path

import counting_env
import numpy as np
from counting_env import check_traj, make_counting

from amago.envs import RecordingError, SequenceWrapper
from amago.store import TrajectoryStore, TrajectoryWriter
from amago.store import writer as writer_module

LIMIT, STEPS = 60_000, 20
root, way, cycles, rng = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), random.Random(int(sys.argv[4]))
fifo = root / "buffer" / "fifo"
fifo.mkdir(parents=True)
counting_env.length_of = lambda actor, episode: STEPS
writer_module.RETRY_SECONDS = 0.05


class Budget:
    """A disk whose size is a number: writes what fits, then fails, as a real one does."""

    def __init__(self):
        self.real, self.size = os.write, 1 << 40
        os.write = self.write

    def used(self):
        return sum(entry.stat().st_size for entry in os.scandir(fifo))

    def write(self, fd, data):
        if not os.readlink(f"/proc/self/fd/{fd}").startswith(str(fifo)):
            return self.real(fd, data)
        room = self.size - self.used()
        if room <= 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return self.real(fd, memoryview(data)[:room])

    def leave(self, free):
        self.size = self.used() + free


class Tmpfs:
    """A small file system, filled by a file of ballast."""

    def __init__(self):
        self.path = root / "ballast"

    def leave(self, free):
        self.path.unlink(missing_ok=True)
        info = os.statvfs(root)
        with open(self.path, "wb") as file:
            os.posix_fallocate(file.fileno(), 0, max(4096, info.f_bavail * info.f_frsize - free))


def record(recorder, until):
    """Episodes one after the other until ``until()``; how many the writer took, and the error that ended it, if one did."""
    taken = 0
    try:
        while not until():
            recorder.reset()
            for _ in range(STEPS):
                recorder.step(np.array([[taken % 5]]))
            taken += 1
    except RecordingError as err:
        return taken, str(err)
    return taken, None


def waiting(w, enough):
    """Until the disk has been full, and so many bytes wait."""
    refused = w.refused
    return lambda: w.refused > refused and w.pending_bytes >= enough


def written(w):
    """Until less than a segment waits, or for too long."""
    deadline = time.monotonic() + 200
    return lambda: w.pending_bytes < 10_000 or time.monotonic() > deadline


def whole(store):
    """The store, which has nothing damaged; and nothing half written lies beside its files."""
    store.refresh()
    assert store.info()["quarantined"] == 0
    assert not [entry.name for entry in os.scandir(fifo) if entry.name.startswith(".tmp-")]
    return store


def main():
    disk = {"budget": Budget, "tmpfs": Tmpfs}[way]()
    spaces = make_counting(0)()
    w = TrajectoryWriter(
        fifo, writer="w", action_space=spaces.action_space, obs_space=spaces.observation_space, segment_bytes=10_000,
        max_pending_bytes=LIMIT,
    )  # fmt: skip
    store, expected, peak, waited, stops = TrajectoryStore(root / "buffer"), set(), 0, 0, []
    for cycle in range(cycles):
        recorder = SequenceWrapper(make_counting(cycle)(), writer=w)
        disk.leave(rng.randrange(100_000))
        refused, stop_early = w.refused, cycle % 2
        enough = rng.randrange(20_000, LIMIT - 5_000)
        taken, error = record(recorder, waiting(w, enough) if stop_early else lambda: False)
        peak = max(peak, w.pending_bytes)
        assert w.refused > refused
        whole(store)
        disk.leave(8 << 20)
        if stop_early:
            assert error is None, error
            waited += w.pending
            more, error = record(recorder, written(w))
            assert error is None, error
            assert w.pending_bytes < 10_000  # it went on by itself
            taken += more
        else:
            assert error is not None
            stops.append(error)
            assert w.flush()
        expected |= {(cycle, episode) for episode in range(taken)}
    w.close()
    whole(store)
    found = []
    for i in range(len(store)):
        actor, episode, begin, n = check_traj(store.read(i), "discrete")
        assert (begin, n) == (0, STEPS)
        found.append((actor, episode))
    assert len(found) == len(set(found)) == w.committed
    said = {"expected": len(expected), "stored": len(found), "same": set(found) == expected}
    print(json.dumps(said | {"peak": peak, "limit": LIMIT, "stops": len(stops), "waited": waited, "message": stops[-1]}))


main()
