"""Writes numbered trajectories for ever, and says on stdout which are committed; to be killed."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from store_helpers import numbered, writer

root, name, save_as, seed = Path(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4])
w = writer(root, name, save_as, segment_bytes=200_000)
episode = seed * 1_000
while True:
    for _ in range(5):
        w.write(numbered(episode, 300))
        episode += 1
    w.flush()
    print(episode, flush=True)
