"""Launches whose processes are killed: nothing is lost, nothing arrives twice, nobody is left behind."""

import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
from fault_helpers import Threads, assert_gone, count, environment, report, rng, say, wait_until
from launching import PATIENCE, RUN, changed, family, stop

from amago.run.checkpoint import load_weight_file
from amago.run.launched.protocol import NO_SPACE, PAUSED, SPOOL
from amago.store import TrajectoryStore

SCRIPTS = Path(__file__).parent / "launch_fault_scripts"
SCRIPT, PARTITIONED = SCRIPTS / "deliverer.py", SCRIPTS / "partitioned.py"
pytestmark = pytest.mark.timeout(1800)
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


def content_of(name):
    return name.encode() * 50


def test_delivery_killed_while_files_arrive_and_are_deleted(tmp_path):
    wanted, random = count(4, 100), rng("delivery")
    home = tmp_path / "home"
    home.mkdir(mode=0o700)
    store, directories = tmp_path / "buffer" / "fifo", [tmp_path / "a" / "collector-0", tmp_path / "b" / "collector-0"]
    written, seen = [], Counter()
    for d in directories:
        (d / SPOOL).mkdir(parents=True)

    def write(_):
        time.sleep(0.002)
        if len(os.listdir(directories[1] / SPOOL)) > 200:  # the last to be delivered
            return False
        for i, d in enumerate(directories):
            name = f"w{i}-{len(written):012d}-n1.safetensors"
            tmp = d / SPOOL / f".tmp-x-{name}"
            tmp.write_bytes(content_of(name))
            tmp.rename(d / SPOOL / name)
            written.append(name)
        return True

    def read(_):
        """Delete each file on arrival, and count how often each name arrived."""
        time.sleep(0.001)
        for name in os.listdir(store) if store.exists() else []:
            assert (store / name).read_bytes() == content_of(name)
            (store / name).unlink()
            seen[name] += 1
        return True

    def start():
        words = [sys.executable, str(SCRIPT), str(store), str(home), *(str(d.parent) for d in directories)]
        started = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=environment())
        assert started.stdout.readline() == "ready\n"
        return started

    with Threads(read, 1):
        with Threads(write, 1):
            for _ in range(wanted):
                deliverer = start()
                time.sleep(float(random.uniform(0.0, 0.3)))
                deliverer.kill()
                deliverer.communicate()
        deliverer = start()
        wait_until(lambda: len(seen) >= len(written), PATIENCE)
        deliverer.kill()
        deliverer.communicate()
    read(None)
    assert set(written) - set(seen) == set(), "lost"
    assert [name for name, n in seen.items() if n > 1] == [], "twice"
    say(f"{len(written)} files, each arrived once")
    report("delivery killed: no file lost, none twice", wanted)


def test_collectors_killed_at_random_moments(launch, tmp_path):
    """While they collect, and now and then while they start. What was finished arrives; a collector that is killed is replaced."""
    wanted, random = count(2, 100), rng("collectors")
    run = launch(collectors=2, **RUN)
    killed_early = [False, False]
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
    before = run.arrived[0]
    run.until(lambda: run.arrived[0] > before + 10)
    stop(run)
    all_arrived_once(run, whole=False)
    say(f"{run.arrived[0]} trajectories in {len(run.arrived[1])} files")
    report("collectors killed and replaced; all files readable, none twice, none left behind", wanted)


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


FULL_DISK = """
write, root = os.write, sys.argv[1]
def write_to_a_full_disk(fd, data):
    if os.readlink(f"/proc/self/fd/{fd}").startswith(f"{root}/run/launch/collector-") and os.path.exists(f"{root}/full"):
        raise OSError(28, os.strerror(28))
    return write(fd, data)
os.write = write_to_a_full_disk
"""


def test_a_collector_whose_disk_is_full_waits_and_loses_nothing(launch, tmp_path):
    wanted, full = count(1, 5), tmp_path / "full"
    # without limits: a pause that is the last order before the disk was full would stay
    run = launch("--updates-per-step", ":", program=changed(tmp_path, FULL_DISK), collectors=1, **RUN)
    run.until(lambda: run.rows("rollout"))
    pid = run.children["collector-0"]
    for _ in range(wanted):
        steps = 0

        def waits():
            """It has waited since the last call."""
            nonlocal steps
            time.sleep(0.5)
            before, beat = steps, run.beat("collector-0")
            steps = beat.get("steps", 0)
            return beat.get("paused") == NO_SPACE and before == steps > 0

        full.touch()
        run.until(waits)
        full.unlink()
        run.until(lambda: run.beat("collector-0").get("steps", 0) > steps + 100)  # noqa: B023
    assert run.children["collector-0"] == pid, "it was not replaced"
    stop(run)
    all_arrived_once(run)
    say(f"{run.arrived[0]} trajectories")
    report("full disks of a collector, which waited; every rollout arrived once", wanted)


@pytest.mark.parametrize("bounded", [True, False][: count(1, 2)])
def test_nothing_is_lost_while_nothing_can_be_delivered(launch, tmp_path, bounded):
    """Collection goes on; with little space for what waits, until that is used up."""
    seconds, limit = count(6, 60), 300_000
    options = ["--max-undelivered", f"{limit / 1e9:.9f}"] if bounded else []
    options += ["--updates-per-step", ":"]  # the learner asks for no pause
    run = launch(*options, cli=(str(PARTITIONED),), collectors=2, **RUN)
    beats = lambda: [run.beat(f"collector-{i}") for i in (0, 1)]  # noqa: E731
    steps = lambda: [beat.get("steps", 0) for beat in beats()]  # noqa: E731
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
    all_arrived_once(run)
    assert "failed, and is tried again: OSError: [Errno 113]" in run.output
    assert re.search("delivery to .* succeeds again", run.output)
    assert ("collectors pause until they are" in run.output) == bounded
    say(f"{seconds} s without delivery; {run.arrived[0]} trajectories")
    report(f"partitions ({'with' if bounded else 'without'} a bound that is reached): every rollout arrived once", 1)


def test_launcher_killed_and_started_again(launch, tmp_path):
    """All its processes end, environment workers included, and the same command goes on."""
    wanted, random, slowest, updates, versions = count(2, 20), rng("launcher"), 0.0, [], [0]
    for number in range(wanted):
        fields = {"ckpt_interval": 1, "keep_training_states": 3, "env_mode": "async"}
        run = launch("--learners", str(1 + number % 2), collectors=2, **RUN | fields)
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
    say(f"all ended after {slowest:.2f} s at most; updates {updates}; versions {versions}")
    report("launchers killed: nobody left behind, the same command goes on, versions never fall", wanted)


@pytest.mark.parametrize("order", ["hold", "hang"][: count(1, 2)])
def test_hung_collectors_are_replaced_and_the_others_go_on(launch, tmp_path, order):
    wanted = count(1, 5)
    run = launch("--hang-timeout", "20", collectors=2, **RUN)
    run.until(lambda: len(run.children) == 3 and len(run.rows("rollout")) > 1)
    for _ in range(wanted):
        before = run.children
        (tmp_path / order).touch()
        run.until(lambda: not (tmp_path / order).exists())
        run.until(lambda: len(run.children) == 3 and run.children != before)  # noqa: B023
        assert len(set(before.values()) & set(run.children.values())) == 2
    stop(run)
    report(f"collectors that {order}: replaced, the others go on", wanted)


@pytest.mark.parametrize("role", ["learner", "collector-0"][: count(1, 2)])
def test_signals_to_one_role(launch, tmp_path, role):
    """A learner that is told to stop saves, and the launch ends with it, as with a signal to the launcher; a collector is replaced."""
    wanted, random, rows = count(1, 20), rng(f"signals {role}"), 0
    for i in range(wanted):
        run = launch(collectors=1, **RUN)
        run.until(lambda: len(run.children) == 2 and len(run.rows("train")) > rows)  # noqa: B023
        time.sleep(float(random.uniform(0, 1)))
        number, pid, everyone = SIGNALS[i % len(SIGNALS)], run.children[role], family(run.process.pid)
        os.kill(pid, number)
        if role == "collector-0":
            run.until(lambda: run.children.get(role) not in (None, pid))  # noqa: B023
            stop(run)
        else:
            assert run.wait() == 128 + number, run.output
            assert_gone(everyone)
            assert list((run.run_dir / "ckpts" / "training_states").iterdir())
        rows = len(run.rows("train"))
    report(f"signals to a {role.partition('-')[0]}", wanted)
