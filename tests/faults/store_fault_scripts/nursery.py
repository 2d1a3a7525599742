"""Forks writers on request, so that hundreds can be killed without starting Python hundreds of times.

A line ``NAME KIND FIRST SKEW ROOT`` on standard input starts a writer, whose process id is the answer; ``PID`` waits for one
that was killed. A writer writes episodes FIRST, FIRST + 1, ... and keeps in ROOT/NAME.ack how many are committed. Its clock is
SKEW seconds wrong, and so are the times of its files.
"""

import os
import random
import sys
import time
from pathlib import Path

from store_helpers import numbered, steps_of, writer

MOST = 700


def write_for_ever(name: str, kind: str, first: int, skew: float, root: Path) -> None:
    clock, fsync = time.time, os.fsync

    def wrong_fsync(fd: int) -> None:
        os.utime(fd, (clock() + skew,) * 2)
        fsync(fd)

    if skew:
        time.time, os.fsync = lambda: clock() + skew, wrong_fsync
    rng = random.Random(first)
    log = os.open(root / f"{name}.ack", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    w, told = writer(root, name, kind, segment_bytes=60_000), 0
    for episode in range(first, first + MOST):
        w.write(numbered(episode, steps_of(episode)))
        if rng.random() < 0.3:
            w.flush()
        if w.committed > told:
            told = w.committed
            os.write(log, b"%d\n" % told)
        if skew:
            time.sleep(0.003)
    w.flush()
    time.sleep(3600)


for line in sys.stdin:
    words = line.split()
    if len(words) == 1:
        answer = os.waitpid(int(words[0]), 0)[1]
    else:
        answer = os.fork()
        if not answer:
            write_for_ever(words[0], words[1], int(words[2]), float(words[3]), Path(words[4]))
    print(answer, flush=True)
