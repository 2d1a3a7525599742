"""kill -9 of a writer at any moment: what it acknowledged is there, what is visible is whole, what it left is removed."""

import random
import subprocess
import sys
import time
from pathlib import Path

import pytest
from store_helpers import assert_numbered, opened

SCRIPT = Path(__file__).with_name("kill_writer.py")


@pytest.mark.parametrize("save_as", ["segments", "npz"])
def test_killed_writers_lose_nothing_that_they_acknowledged(tmp_path, save_as):
    rng = random.Random(save_as)
    acknowledged = 0
    for batch in range(3):
        started = []
        for i in range(2):
            seed = 2 * batch + i + 1
            command = [sys.executable, str(SCRIPT), str(tmp_path), f"w{seed}", save_as, str(seed)]
            started.append((seed, subprocess.Popen(command, stdout=subprocess.PIPE, text=True)))
        done = []
        for seed, process in started:
            assert process.stdout is not None
            first = process.stdout.readline()  # it is writing now
            time.sleep(rng.uniform(0, 0.15))
            process.kill()
            done.append((seed, [first, *process.stdout.readlines()]))
            process.wait()
            process.stdout.close()
        store = opened(tmp_path)
        assert store.info()["quarantined"] == 0
        assert not [p for p in (tmp_path / "fifo").iterdir() if p.name.startswith(".tmp-")]
        found = [assert_numbered(store.read(i)) for i in range(len(store))]
        assert len(set(found)) == len(found)
        for seed, lines in done:
            last = int(next(line for line in reversed(lines) if line.endswith("\n")))
            mine = sorted(e for e in found if e // 1000 == seed)
            assert set(range(1000 * seed, last)) <= set(mine)
            assert mine == list(range(1000 * seed, 1000 * seed + len(mine)))  # in order, none missing
            acknowledged += last - 1000 * seed
    assert acknowledged >= 30
    assert store.info()["trajectories"] >= acknowledged
