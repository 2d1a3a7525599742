"""Delivery, and a launch, over ssh between three hosts, which are network namespaces: their links are cut, slow and lossy, their processes killed."""

import contextlib
import os
import shutil
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
import stores
import tiny
from fault_helpers import LONG, say
from launching import RUN, stop

from amago.launch.bundles import Ingest
from amago.launch.bus import Bus

NODES, PATIENCE = 2, 1500.0
FILES, BYTES = (600, 20_000) if LONG else (60, 20_000)
FAULTS = ["cut 12", "delay .1 loss .05", "tbf rate 2mbit burst 32kbit latency 400ms", "kill", "gone", "late"]
FAULTS += ["cut 60", "cut 600"] if LONG else []


def command(words):
    return subprocess.run(words.split(), capture_output=True, text=True, check=True)


@pytest.fixture
def hosts():
    """The names of a learner's host and its nodes' hosts, each of which has a link to it with the addresses 10.77.N.1 and 10.77.N.2."""
    stores.need("sshfs")
    names = [f"amago-{os.getpid()}-{i}" for i in range(NODES + 1)]
    try:
        if not shutil.which("tc"):
            pytest.skip("no tc: apt-get install iproute2")
        try:
            for name in names:
                command(f"ip netns add {name}")
        except (OSError, subprocess.CalledProcessError) as err:
            pytest.skip(f"network namespaces are not to be had here: {err}")
        for i, name in enumerate(names[1:], 1):
            command(f"ip link add to{i} netns {names[0]} type veth peer name uplink netns {name}")
            for host, link, last in ((names[0], f"to{i}", 1), (name, "uplink", 2)):
                command(f"ip -n {host} addr add 10.77.{i}.{last}/24 dev {link}")
                command(f"ip -n {host} link set {link} up")
        yield names
    finally:
        for name in names:
            with contextlib.suppress(OSError, subprocess.CalledProcessError):
                command(f"ip netns delete {name}")


@pytest.fixture
def server(hosts, tmp_path):
    """An ssh server on the learner's host, which listens at its end of each link."""
    (tmp_path / "ssh").mkdir()
    addresses = [f"10.77.{i}.1" for i in range(1, NODES + 1)]
    found = stores.SecureShell(tmp_path / "ssh", addresses, before=["ip", "netns", "exec", hosts[0]])
    yield found
    found.end()


def replace_link(hosts, delay, loss):
    """Put a slow and lossy link (`slow_link`) in place of that to the first node; returns its process."""
    if not os.access("/dev/net/tun", os.W_OK):
        pytest.skip("a slow link needs /dev/net/tun")
    command(f"ip -n {hosts[0]} link delete to1")
    ends = hosts[0], "to1", "10.77.1.1/24", hosts[1], "uplink", "10.77.1.2/24"
    program = [sys.executable, Path(__file__).with_name("slow_link.py"), *ends, delay, loss]
    link = subprocess.Popen(program, stdout=subprocess.PIPE, text=True)
    assert link.stdout.readline() == "up\n"
    return link


@pytest.mark.timeout(3000)
@pytest.mark.parametrize("fault", FAULTS)
def test_every_file_that_a_node_has_made_arrives_once(hosts, server, tmp_path, fault):
    """A link of the first node is cut for seconds, or slow and lossy from the begin; it is killed and started again, is gone for good, or
    starts late."""
    store, seen = tmp_path / "buffer" / "fifo", Counter()
    ingest = Ingest(Bus(str(server.root / "bus")), store, tmp_path / "buffer" / ".arriving")
    environment = tiny.environment() | {"HOME": str(server.home)}
    program = Path(__file__).with_name("delivers.py")

    def start(i):
        words = [sys.executable, program, server.url(server.addresses[i - 1]), tmp_path / f"node{i}", str(FILES), str(BYTES)]
        return subprocess.Popen(["ip", "netns", "exec", hosts[i], *words], env=environment, stderr=subprocess.DEVNULL)

    def made(i):
        path = tmp_path / f"node{i}" / "made"
        return set(path.read_text().split()) if path.exists() else set()

    def until(condition):
        ends = time.monotonic() + PATIENCE
        while not condition():
            assert time.monotonic() < ends, (fault, len(seen))
            ingest.pull()
            for path in store.iterdir():
                seen[path.name] += 1
                path.unlink()
            time.sleep(0.05)

    def of(i):
        return sum(name.startswith(f"node{i}-") for name in seen)

    nodes, healed, link = {}, 0.0, None
    try:
        if fault.startswith("delay"):
            link = replace_link(hosts, *fault.split()[1::2])
        elif fault.startswith("tbf"):
            try:
                for host, device in ((hosts[0], "to1"), (hosts[1], "uplink")):
                    command(f"tc -n {host} qdisc add dev {device} root {fault}")
            except subprocess.CalledProcessError as err:
                pytest.skip(f"this kernel has no such link: {err.stderr.strip()}")
        nodes = {i: start(i) for i in range(1, NODES + 1) if (fault, i) != ("late", 1)}
        until(lambda: of(2) and (of(1) or fault == "late"))
        if fault.startswith("cut"):
            command(f"ip -n {hosts[1]} link set uplink down")
            ends = time.monotonic() + float(fault.split()[1])
            until(lambda: time.monotonic() > ends)
            command(f"ip -n {hosts[1]} link set uplink up")
        elif fault in ("kill", "gone"):
            nodes[1].kill()
            nodes[1].wait()
        if fault in ("kill", "late"):
            nodes[1] = start(1)
        healed = time.monotonic()
        expected = [2] if fault == "gone" else [1, 2]
        until(lambda: all(len(made(i)) == FILES and made(i) <= seen.keys() for i in expected))
        assert set(seen.values()) == {1}, "twice"
        everything = {name for i in range(1, NODES + 1) for name in made(i)}
        left = everything - seen.keys()
        assert not left or fault == "gone"
        assert seen.keys() <= everything
        if fault == "gone":  # the disk that waits for its machine has the rest
            nodes[1] = start(1)
            until(lambda: made(1) <= seen.keys() and len(made(1)) == FILES)
            assert set(seen.values()) == {1}
        say(
            f"{fault}: {len(everything)} made, {len(everything - left)} delivered, {len(left)} on a disk that is away, 0 twice; all "
            f"there {time.monotonic() - healed:.0f} s after the fault"
        )
    finally:
        for process in (*nodes.values(), *([link] if link else [])):
            process.kill()
            process.communicate()


@pytest.mark.timeout(3000)
@pytest.mark.skipif(not LONG, reason="long")
def test_a_launch_outlives_a_cut_link_and_a_machine_and_takes_one_that_comes_late(hosts, server, launch, tmp_path, monkeypatch):
    """The learner on the first host; one collector behind a link that is cut for a minute, one whose machine is gone, and one that is late."""
    monkeypatch.setenv("HOME", str(server.home))
    bus = server.root / "bus"

    def start(name, host, *options, **more):
        (tmp_path / name).mkdir()
        return launch(*options, root=tmp_path / name, before=["ip", "netns", "exec", hosts[host]], **RUN | more)

    def collect(name, host):
        directory = "--node-dir", str(tmp_path / name / "node")
        return start(name, host, "--bus", server.url(server.addresses[host - 1]), *directory, command="collect", collectors=1)

    def made(name):
        """Rollouts of its finished phases."""
        found = [tiny.rows(p.parent, "rollout") for p in (tmp_path / name).glob("node/*/*/collector-0/metrics.jsonl")]
        return int(sum(row["values"].get("Number of Rollouts", 0) for rows in found for row in rows))

    def waiting(name, since=float("inf")):
        """Files that are not delivered, and were written before a time."""
        places = ("spool/buffer/fifo/*.safetensors", "outbox/*.json")
        found = [p for place in places for p in (tmp_path / name).glob(f"node/*/*/collector-0/{place}")]
        found += (tmp_path / name).glob("node/*/*/bundles/*/*/*")
        with contextlib.suppress(FileNotFoundError):
            return [p for p in found if p.stat().st_mtime < since]
        return [tmp_path]

    run = start("run", 0, "--bus", str(bus), "--updates-per-step", ":", collectors=0)
    cut, gone = collect("cut", 1), collect("gone", 2)
    run.until(lambda: made("cut") and made("gone") and run.arrived[0] > 10 and len(run.rows("train")) > 2)
    command(f"ip -n {hosts[1]} link set uplink down")
    for pid in (gone.process.pid, *gone.children.values()):
        os.kill(pid, 9)
    gone.process.communicate()
    before, ends = made("cut"), time.monotonic() + 60
    run.until(lambda: time.monotonic() > ends and made("cut") > before)
    waited = len(waiting("cut"))
    command(f"ip -n {hosts[1]} link set uplink up")
    healed, since = time.monotonic(), time.time()
    late = collect("late", 2)
    run.until(lambda: not waiting("cut", since))
    recovery, late_since = time.monotonic() - healed, time.time()
    run.until(lambda: made("late") and not waiting("late", late_since))
    stop(run)
    assert [cut.wait(), late.wait()] == [0, 0], "they end with the launch"
    rollouts, files = run.arrived
    left = [p for p in waiting("gone") if p.suffix == ".safetensors"]
    names = [*files, *(p.name for p in left)]
    assert waiting("cut") == waiting("late") == list(bus.glob("out/*/*")) == []
    assert len(names) == len(set(names)), "twice"
    counts = {name: made(name) for name in ("cut", "gone", "late")}
    on_disk = sum(int(p.name.rpartition("-n")[2].partition(".")[0]) for p in left)
    assert rollouts + on_disk >= sum(counts.values()), "each finished phase is there"
    say(
        f"made in finished phases {counts}; {rollouts} delivered, {on_disk} on the disk that is away, 0 twice; {waited} files waited "
        f"behind the cut link, and were there {recovery:.0f} s after it; {len(run.rows('train'))} epochs"
    )
