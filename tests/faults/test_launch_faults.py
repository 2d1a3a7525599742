"""Launches whose processes are killed: nothing is lost, nothing arrives twice, nobody is left behind."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import pytest
from fault_helpers import count, environment, report, rng, say, small_disk

from amago.run.checkpoint import load_weight_file
from amago.run.launched.protocol import NO_SPACE, PAUSED, SPOOL
from amago.store import TrajectoryStore

sys.path.insert(0, str(Path(__file__).parent.parent / "launch"))
from launching import PATIENCE, Launch, assert_gone, family, stop

SCRIPTS = Path(__file__).parent / "launch_fault_scripts"
SCRIPT, FULL_SPOOL, PARTITIONED = SCRIPTS / "deliverer.py", SCRIPTS / "full_spool.py", SCRIPTS / "partitioned.py"
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
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


def test_delivery_killed_while_files_arrive_and_are_deleted(tmp_path):
    wanted, random = count(4, 100), rng("delivery")
    home = tmp_path / "home"
    home.mkdir(mode=0o700)
    store, directories = tmp_path / "buffer" / "fifo", [tmp_path / "a" / "collector-0", tmp_path / "b" / "collector-0"]
    written, stop = [], threading.Event()
    for d in directories:
        (d / SPOOL).mkdir(parents=True)

    def write():
        n = 0
        while not stop.is_set():
            for i, d in enumerate(directories):
                name = f"w{i}-{n:012d}-n1.safetensors"
                tmp = d / SPOOL / f".tmp-x-{name}"
                tmp.write_bytes(content_of(name))
                tmp.rename(d / SPOOL / name)
                written.append(name)
            n += 1
            time.sleep(0.002)
            while len(os.listdir(directories[1] / SPOOL)) > 200 and not stop.is_set():  # the last to be delivered
                time.sleep(0.01)

    def start():
        words = [sys.executable, str(SCRIPT), str(store), str(home), *(str(d.parent) for d in directories)]
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
    deadline = time.monotonic() + PATIENCE
    while len(reader.seen) < len(written) and time.monotonic() < deadline:
        time.sleep(0.05)
    deliverer.kill()
    deliverer.communicate()
    reader.end()
    assert not reader.wrong
    assert set(written) - set(reader.seen) == set(), "lost"
    assert [name for name, n in reader.seen.items() if n > 1] == [], "twice"
    say(f"{len(written)} files, each arrived once")
    report("delivery killed: no file lost, none twice", killed, wanted)


@pytest.mark.timeout(1800)
def test_collectors_killed_at_random_moments(tmp_path):
    """While they collect, and now and then while they start. What was finished arrives; a collector that is killed is replaced."""
    wanted, random = count(3, 100), rng("collectors")
    run = Launch(tmp_path, collectors=2, epochs=FOREVER, train_batches_per_epoch=2)
    killed, killed_early = 0, [False, False]
    try:
        run.until(lambda: len(run.children) == 3 and run.rows("rollout"))
        for _ in range(wanted):
            i = int(random.integers(2))
            name = f"collector-{i}"
            run.until(lambda: name in run.children)  # noqa: B023
            pid = run.children[name]
            killed_early[i] = not killed_early[i] and random.uniform() < 0.3
            if not killed_early[i]:
                before = len(run.phases(i))
                run.until(lambda: run.beat(name).get("steps") and len(run.phases(i)) > before)  # noqa: B023
            time.sleep(float(random.uniform(0, 2)))
            os.kill(pid, signal.SIGKILL)
            run.until(lambda: run.children.get(name) not in (None, pid))  # noqa: B023
            killed += 1
        before = run.arrived[0]
        run.until(lambda: run.arrived[0] > before + 10)
        stop(run)
    finally:
        run.end()
    all_arrived_once(run, whole=False)
    say(f"{run.arrived[0]} trajectories in {len(run.arrived[1])} files")
    report("collectors killed and replaced; all files readable, none twice, none left behind", killed, wanted)


def all_arrived_once(run, whole=True):
    """The store is sound, nothing is left in the spools, no file came twice; with ``whole``, every rollout that ended is there."""
    left = [p for d in (run.run_dir / "launch").glob("collector-*") for p in (d / SPOOL).glob("*.safetensors")]
    assert left == []
    store = TrajectoryStore(run.run_dir / "buffer", edit=False)
    store.refresh()
    assert store.refused() == {}
    trajectories, names = run.arrived
    assert len(names) == len(set(names)) == len(list(run.store.glob("*.safetensors")))
    assert len(store) == trajectories > 0
    if whole:
        assert run.rollouts == trajectories


class SmallDisk:
    """The directory of a collector, full and not."""

    def __init__(self, run):
        self.ballast = Path(f"/proc/{run.process.pid}/root{run.run_dir}/launch/collector-0/ballast")

    def fill(self):
        with open(self.ballast, "ab", buffering=0) as f, contextlib.suppress(OSError):
            while True:
                f.write(bytes(4096))

    def empty(self):
        self.ballast.unlink(missing_ok=True)


class Pretended:
    """The same where no file system can be mounted."""

    def __init__(self, run):
        self.order = run.root / "full"

    def fill(self):
        self.order.touch()

    def empty(self):
        self.order.unlink(missing_ok=True)


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("way", ["injected", "tmpfs"][: count(1, 2)])
def test_a_collector_whose_disk_is_full_waits_and_loses_nothing(tmp_path, way):
    wanted, directory, options = count(1, 5), tmp_path / "run" / "launch", {"program": FULL_SPOOL}
    if way == "tmpfs":
        directory.mkdir(parents=True)
        options = {"before": small_disk(directory, "8m"), "env_mode": "async"}
        if not options["before"]:
            pytest.skip("this machine does not let a test mount a small file system")
    unlimited = "--updates-per-step", ":"  # a pause that is the last order before the disk was full would stay
    run, done = Launch(tmp_path, *unlimited, collectors=1, epochs=FOREVER, train_batches_per_epoch=2, **options), 0
    try:
        run.until(lambda: run.rows("rollout"))
        disk, pid = (SmallDisk if way == "tmpfs" else Pretended)(run), run.children["collector-0"]
        for _ in range(wanted):
            steps = 0

            def waits():
                """It has waited since the last call; what is delivered meanwhile makes space."""
                nonlocal steps
                disk.fill()
                time.sleep(0.5)
                before, beat = steps, run.beat("collector-0")
                steps = beat.get("steps", 0)
                return beat.get("paused") == NO_SPACE and before == steps > 0

            run.until(waits)
            disk.empty()
            run.until(lambda: run.beat("collector-0").get("steps", 0) > steps + 100)  # noqa: B023
            done += 1
        assert run.children["collector-0"] == pid, "it was not replaced"
        stop(run)
    finally:
        run.end()
    all_arrived_once(run)
    say(f"{run.arrived[0]} trajectories")
    report(f"full disks of a collector ({way}), which waited; every rollout arrived once", done, wanted)


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("bounded", [True, False][: count(1, 2)])
def test_nothing_is_lost_while_nothing_can_be_delivered(tmp_path, bounded):
    """Collection goes on; with little space for what waits, until that is used up."""
    seconds, limit = count(6, 60), 300_000
    options = ["--max-undelivered", f"{limit / 1e9:.9f}"] if bounded else []
    options += ["--updates-per-step", ":"]  # the learner asks for no pause
    run = Launch(tmp_path, *options, cli=(str(PARTITIONED),), collectors=2, epochs=FOREVER, train_batches_per_epoch=2)
    beats = lambda: [run.beat(f"collector-{i}") for i in (0, 1)]  # noqa: E731
    steps = lambda: [beat.get("steps", 0) for beat in beats()]  # noqa: E731
    try:
        run.until(lambda: min(steps()) > 0 and run.rows("rollout"))
        (tmp_path / "partition").touch()
        ends, before = time.monotonic() + seconds, steps()
        run.until(lambda: sum(steps()) > sum(before) + 100)
        if bounded:
            run.until(lambda: [beat.get("paused") for beat in beats()] == [PAUSED] * 2)
            before = steps()
            waits = sum(p.stat().st_size for p in (run.run_dir / "launch" / "bundles").glob("*/*/*"))
            assert waits > 0.5 * limit, "the rest is not in bundles yet"
        time.sleep(max(1.0, ends - time.monotonic()))
        if bounded:
            assert steps() == before
        else:
            run.until(lambda: min(b - a for a, b in zip(before, steps(), strict=True)) > 100)
        (tmp_path / "partition").unlink()
        before = steps()
        run.until(lambda: min(b - a for a, b in zip(before, steps(), strict=True)) > 100)
        stop(run)
    finally:
        run.end()
    all_arrived_once(run)
    assert "failed, and is tried again: OSError: [Errno 113]" in run.output
    assert re.search("delivery to .* succeeds again", run.output)
    assert ("collectors pause until they are" in run.output) == bounded
    say(f"{seconds} s without delivery; {run.arrived[0]} trajectories")
    report(f"partitions ({'with' if bounded else 'without'} a bound that is reached): every rollout arrived once", 1, 1)


@pytest.mark.timeout(1800)
def test_launcher_killed_and_started_again(tmp_path):
    """All its processes end, environment workers included, and the same command goes on."""
    wanted, random, slowest, updates, versions = count(2, 20), rng("launcher"), 0.0, [], [0]
    ended = 0
    for _ in range(wanted):
        run = Launch(
            tmp_path, "--learners", str(1 + ended % 2), collectors=2, epochs=FOREVER, train_batches_per_epoch=2, ckpt_interval=1,
            keep_training_states=3, resume="auto", env_mode="async",
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
            assert_gone(everyone)
            slowest = max(slowest, time.monotonic() - began)
            updates.append(run.rows("train")[-1]["grad_steps"])
            versions.append(load_weight_file(run.run_dir / "ckpts" / "latest" / "policy.pt").version)
            assert versions[-1] > versions[-2], "each life publishes newer policies"
            ended += 1
        finally:
            run.end()
    say(f"all ended after {slowest:.2f} s at most; updates {updates}; versions {versions}")
    report("launchers killed: nobody left behind, the same command goes on, versions never fall", ended, wanted)


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("order", ["hold", "hang"][: count(1, 2)])
def test_hung_collectors_are_replaced_and_the_others_go_on(tmp_path, order):
    wanted = count(1, 5)
    run = Launch(tmp_path, "--hang-timeout", "20", collectors=2, epochs=FOREVER, train_batches_per_epoch=2)
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
        stop(run)
    finally:
        run.end()
    report(f"collectors that {order}: replaced, the others go on", replaced, wanted)


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("role", ["learner", "collector-0"][: count(1, 2)])
def test_signals_to_one_role(tmp_path, role):
    """A learner that is told to stop saves, and the launch ends with it, as with a signal to the launcher; a collector is replaced."""
    wanted, random, done, rows = count(1, 20), rng(f"signals {role}"), 0, 0
    for _ in range(wanted):
        run = Launch(tmp_path, collectors=1, epochs=FOREVER, train_batches_per_epoch=2, ckpt_interval=FOREVER, resume="auto")
        try:
            run.until(lambda: len(run.children) == 2 and len(run.rows("train")) > rows)  # noqa: B023
            time.sleep(float(random.uniform(0, 1)))
            number, pid, everyone = SIGNALS[done % len(SIGNALS)], run.children[role], family(run.process.pid)
            os.kill(pid, number)
            if role == "collector-0":
                run.until(lambda: run.children.get(role) not in (None, pid))  # noqa: B023
                stop(run)
            else:
                assert run.wait() == 128 + number, run.output
                assert_gone(everyone)
                assert list((run.run_dir / "ckpts" / "training_states").iterdir())
            rows, done = len(run.rows("train")), done + 1
        finally:
            run.end()
    report(f"signals to a {role.partition('-')[0]}", done, wanted)
