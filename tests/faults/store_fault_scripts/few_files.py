"""A buffer of many archives, in a process that may open 256 files; prints how long each part took (one line of JSON)."""

import json
import os
import random
import resource
import sys
import threading
import time
from pathlib import Path

from store_helpers import assert_numbered, numbered, writer

from amago.store import TrajectoryStore

root, n, reads = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
os.fsync = lambda fd: None
most, errors, said = [0], [], {}


def took(name, begun):
    said[name] = round(time.monotonic() - begun, 2)


def sample(store, seed):
    rng = random.Random(seed)
    try:
        for _ in range(reads // 4):
            i = rng.randrange(n)
            assert assert_numbered(store.read(i, 1, 3), 1) == i % 16
            most[0] = max(most[0], len(os.listdir("/proc/self/fd")))
    except BaseException as err:
        errors.append(repr(err))


begun, trajs = time.monotonic(), [numbered(i, 4) for i in range(16)]
with writer(root, save_as="npz") as w:
    for i in range(n):
        w.write(trajs[i % 16])
took("write", begun)
for name in ("first", "again"):
    begun = time.monotonic()
    store = TrajectoryStore(root)
    store.refresh()
    took(name, begun)
    assert len(store) == n
begun = time.monotonic()
threads = [threading.Thread(target=sample, args=(store, seed)) for seed in range(4)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
took("read", begun)
begun = time.monotonic()
store.max_trajectories = n // 2
store.refresh()
took("evict", begun)
assert len(os.listdir(root / "fifo")) == n // 2
print(json.dumps(said | {"open": most[0], "errors": errors}))
