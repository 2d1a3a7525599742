"""Reads a buffer that another process edits until standard input ends; prints how many slices it read and drew again."""

import random
import select
import sys

from store_helpers import assert_numbered, steps_of

from amago.store import EvictedError, TrajectoryStore

rng, store, read, again = random.Random(int(sys.argv[2])), TrajectoryStore(sys.argv[1], edit=False), 0, 0
while not select.select([sys.stdin], [], [], 0)[0]:
    store.refresh()
    view = store.view()
    for _ in range(50 if len(view) else 0):
        i = rng.randrange(len(view))
        start = rng.randrange(int(view.lengths[i]))
        try:
            episode = assert_numbered(view.read(i, start, start + rng.randrange(1, 40)), start)
        except EvictedError:
            again += 1
        else:
            assert int(view.lengths[i]) == steps_of(episode)
            read += 1
            if read == 1:
                print("reading", flush=True)
assert store.info()["quarantined"] == 0
print(read, again)
