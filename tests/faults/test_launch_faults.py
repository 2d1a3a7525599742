"""Launches whose processes are killed: nothing is lost, nothing arrives twice, nobody is left behind."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import pytest
from fault_helpers import count, environment, report, rng, say

from amago.run.roles.protocol import spool_of
from amago.store import TrajectoryStore

sys.path.insert(0, str(Path(__file__).parent.parent / "distributed"))
from launching import Launch, alive, family

SCRIPT = Path(__file__).parent / "launch_fault_scripts" / "deliverer.py"
FOREVER = 1_000_000


class Reader(threading.Thread):
    """Deletes each file on arrival, and counts how often each name arrived."""

    def __init__(self, directory, content=None):
        super().__init__(daemon=True)
        self.directory, self.content, self.seen, self.wrong, self.ends = directory, content, Counter(), [], threading.Event()

    def run(self):
        while True:
            last = self.ends.is_set()
            for name in os.listdir(self.directory) if self.directory.exists() else []:
                path = self.directory / name
                if self.content is not None and path.read_bytes() != self.content(name):
                    self.wrong.append(name)
                path.unlink()
                self.seen[name] += 1
            if last:
                return
            time.sleep(0.001)

    def end(self):
        self.ends.set()
        self.join()


def content_of(name):
    return name.encode() * 50


@pytest.mark.parametrize("kind", ["moves-files", "sends-content"])
def test_ingest_killed_while_files_arrive_and_are_deleted(tmp_path, kind):
    wanted, random = count(4, 100), rng(f"ingest {kind}")
    store, directories = tmp_path / "buffer" / "fifo", [tmp_path / "a" / kind, tmp_path / "b" / kind]
    written, stop = [], threading.Event()
    for d in directories:
        spool_of(d).mkdir(parents=True)

    def write():
        n = 0
        while not stop.is_set():
            for i, d in enumerate(directories):
                name = f"w{i}-{n:012d}-n1.safetensors"
                tmp = spool_of(d) / f".tmp-x-{name}"
                tmp.write_bytes(content_of(name))
                tmp.rename(spool_of(d) / name)
                written.append(name)
            n += 1
            time.sleep(0.002)

    def start():
        words = [sys.executable, str(SCRIPT), str(store), *map(str, directories)]
        started = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=environment())
        assert started.stdout.readline() == "ready\n"
        return started

    reader, writer = Reader(store, content_of), threading.Thread(target=write, daemon=True)
    reader.start()
    writer.start()
    killed = 0
    for _ in range(wanted):
        deliverer = start()
        time.sleep(float(random.uniform(0.0, 0.3)))
        deliverer.kill()
        deliverer.communicate()
        killed += 1
    stop.set()
    writer.join()
    deliverer = start()
    deadline = time.monotonic() + 30
    while len(reader.seen) < len(written) and time.monotonic() < deadline:
        time.sleep(0.05)
    deliverer.kill()
    deliverer.communicate()
    reader.end()
    assert not reader.wrong
    assert set(written) - set(reader.seen) == set(), "lost"
    assert [name for name, n in reader.seen.items() if n > 1] == [], "twice"
    say(f"{len(written)} files, each arrived once")
    report(f"ingest killed ({kind}): no file lost, none twice", killed, wanted)


@pytest.mark.timeout(600)
def test_collectors_killed_at_random_moments(tmp_path):
    """What a collector has finished writing arrives; a collector that is killed is replaced."""
    wanted, random = count(3, 100), rng("collectors")
    run = Launch(tmp_path, collectors=2, epochs=FOREVER, train_batches_per_epoch=2)
    try:
        run.until(lambda: len(run.children) == 3 and run.rows("rollout"))
        killed = 0
        for _ in range(wanted):
            name = f"collector-{random.integers(2)}"
            run.until(lambda: name in run.children)  # noqa: B023
            pid = run.children[name]
            run.until(lambda: (run.run_dir / "launch" / name / "log.txt").exists())  # noqa: B023
            time.sleep(float(random.uniform(0, 2)))
            os.kill(pid, signal.SIGKILL)
            run.until(lambda: run.children.get(name) not in (None, pid), seconds=200)  # noqa: B023
            killed += 1
        before = len(list(run.store.glob("*.safetensors")))
        run.until(lambda: len(list(run.store.glob("*.safetensors"))) > before + 2)
        run.process.send_signal(signal.SIGTERM)
        assert run.wait() == 143, run.output
    finally:
        run.end()
    left = [p for i in (0, 1) for p in spool_of(run.run_dir / "launch" / f"collector-{i}").glob("*.safetensors")]
    assert left == []
    store = TrajectoryStore(run.run_dir / "buffer", edit=False)
    store.refresh()
    assert store.refused() == {}
    assert len(store) > 0
    report("collectors killed and replaced; all files readable, none left behind", killed, wanted)


@pytest.mark.timeout(900)
def test_launcher_killed_and_started_again(tmp_path):
    """All its processes end within ten seconds, environment workers included, and the same command goes on."""
    wanted, random, slowest, updates = count(2, 20), rng("launcher"), 0.0, []
    ended = 0
    for _ in range(wanted):
        run = Launch(
            tmp_path, collectors=2, epochs=FOREVER, train_batches_per_epoch=2, ckpt_interval=1, keep_training_states=3, resume="auto",
            env_mode="async",
        )  # fmt: skip
        try:
            before = updates[-1] if updates else 0
            run.until(lambda: run.rows("train") and run.rows("train")[-1]["grad_steps"] > before + 2)  # noqa: B023
            run.until(lambda: len(family(run.process.pid)) >= 5)  # noqa: B023
            time.sleep(float(random.uniform(0, 1)))
            everyone = family(run.process.pid)
            run.process.kill()
            run.process.communicate()
            began = time.monotonic()
            while alive(everyone) and time.monotonic() < began + count(30, 10):  # CI may run on a crowded machine
                time.sleep(0.05)
            slowest = max(slowest, time.monotonic() - began)
            assert not alive(everyone)
            updates.append(run.rows("train")[-1]["grad_steps"])
            ended += 1
        finally:
            run.end()
    say(f"all ended after {slowest:.2f} s at most; updates {updates}")
    report("launchers killed: nobody left behind, and the same command goes on", ended, wanted)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("order", ["hang", "hold"])
def test_hung_collectors_are_replaced_and_the_others_go_on(tmp_path, order):
    wanted = count(1, 5)
    run = Launch(tmp_path, "--hang-timeout", "6", collectors=2, epochs=FOREVER, train_batches_per_epoch=2)
    try:
        run.until(lambda: len(run.children) == 3 and len(run.rows("rollout")) > 1)
        replaced = 0
        for _ in range(wanted):
            before = run.children
            (tmp_path / order).touch()
            run.until(lambda: not (tmp_path / order).exists())
            run.until(lambda: len(run.children) == 3 and run.children != before)  # noqa: B023
            assert len(set(before.values()) & set(run.children.values())) == 2
            replaced += 1
        run.process.send_signal(signal.SIGTERM)
        assert run.wait() == 143, run.output
    finally:
        run.end()
    report(f"collectors that {order}: replaced, the others go on", replaced, wanted)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("role", ["learner", "collector-0"])
def test_signals_to_one_role(tmp_path, role):
    """A learner that is told to stop saves, and the launch ends with it; a collector is replaced."""
    wanted, random, done = count(1, 20), rng(f"signals {role}"), 0
    for _ in range(wanted):
        run = Launch(tmp_path, collectors=1, epochs=FOREVER, train_batches_per_epoch=2, ckpt_interval=FOREVER, resume="auto")
        try:
            run.until(lambda: len(run.children) == 2 and run.rows("rollout"))  # noqa: B023
            time.sleep(float(random.uniform(0, 1)))
            pid = run.children[role]
            os.kill(pid, signal.SIGTERM)
            if role == "learner":
                assert run.wait(60) == 143, run.output
                assert list((run.run_dir / "ckpts" / "training_states").iterdir())
            else:
                run.until(lambda: run.children.get(role) not in (None, pid))  # noqa: B023
                run.process.send_signal(signal.SIGTERM)
                assert run.wait(60) == 143, run.output
            done += 1
        finally:
            run.end()
    report(f"signals to a {role.partition('-')[0]}", done, wanted)
