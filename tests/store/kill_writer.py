"""Writes numbered trajectories until it is killed, and says on stdout which are committed; to be killed."""

import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from store_helpers import numbered, writer

root, name, save_as, seed = Path(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4])
w = writer(root, name, save_as, segment_bytes=200_000)
episode = seed * 1_000
while episode < 1_000 * seed + 900:  # the next thousand are another writer's
    for _ in range(5):
        w.write(numbered(episode, 300))
        episode += 1
    w.flush()
    print(episode, flush=True)
time.sleep(60)
