"""Clusters of several nodes on this machine, each with a directory of its own, and launches on them."""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import launching
import tiny

from amago.run.roles.protocol import outbox_of, spool_of

HERE = Path(__file__).parent


class Cluster:
    """A cluster in a process of its own.

    Args:
        root: for the directories of the nodes, ``root/nodes/NAME``, and of the run.
        port: of its head.
    """

    def __init__(self, root, *port):
        self.root = root
        self.started = []
        environment = {**tiny.environment(), "RAY_USAGE_STATS_ENABLED": "0"}
        environment.pop("PYTHONPATH")  # nodes have nothing but what reaches them
        self.process = subprocess.Popen(
            [sys.executable, str(HERE / "cluster_process.py"), *port], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            text=True, env=environment, cwd=root,
        )  # fmt: skip
        self.address = self.process.stdout.readline().strip()
        assert self.address, "the cluster has not started"

    def _order(self, order):
        self.process.stdin.write(order + "\n")
        self.process.stdin.flush()
        assert self.process.stdout.readline() == "done\n"

    def add(self, name):
        self._order(f"add {name}")

    def remove(self, name):
        """As if the machine lost its power."""
        self._order(f"remove {name}")

    def launch(self, *options, **fields):
        self.started.append(RayLaunch(self, *options, **fields))
        return self.started[-1]

    def directories(self, name):
        """Of the collectors of a node, by index."""
        found = (self.root / "nodes" / name).glob("*/*/run/launch/collector-*")
        return {int(path.name.partition("-")[2]): path for path in found}

    def pids(self, title):
        """Processes of the cluster with an actor of this class, or collectors ("collector-N") of its nodes."""
        return [pid for pid in launching.family(self.process.pid) | _orphans(self.address) if _is(pid, title)]

    def end(self):
        for each in self.started:
            each.end()
        self.end_nodes()

    def end_nodes(self):
        with contextlib.suppress(OSError):
            self.process.stdin.close()
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.process.stdout.close()


class RayLaunch(launching.Launch):
    """A launch of ``ray_program`` on a `Cluster`, with the modules of the program in a directory where nothing else is."""

    def __init__(self, cluster, *options, **fields):
        program = cluster.root / "program"
        shutil.copytree(HERE / "ray_program", program, dirs_exist_ok=True)
        shutil.copy(tiny.__file__, program)
        node_dir = f"{cluster.root}/nodes/$AMAGO_TEST_NODE"
        options = ["--ray", cluster.address, "--node-dir", node_dir, *options]
        self.cluster = cluster
        super().__init__(cluster.root, *options, program=program / "train.py", **fields)

    @property
    def arrived(self):
        """Names of the files that have arrived in the learner's store."""
        path = self.run_dir / "buffer" / ".arriving" / "journal"
        return path.read_text().splitlines() if path.exists() else []

    def collecting(self):
        """{index of a collector: its steps}, of those that run on the nodes."""
        return {i: beat["steps"] for i, beat in self.collector_beats().items() if beat.get("state") == "collecting"}

    def collector_beats(self):
        found = {}
        for pid in self.cluster.pids("collector"):
            with contextlib.suppress(OSError, ValueError, StopIteration):
                role = _role(pid)
                found[role["index"]] = json.loads((Path(role["control"]) / f"collector-{role['index']}.json").read_text())
        return found

    def collector_pids(self):
        found = {}
        for pid in self.cluster.pids("collector"):
            with contextlib.suppress(OSError, ValueError, StopIteration):
                found[_role(pid)["index"]] = pid
        return found

    def check_nothing_is_lost_or_twice(self, except_nodes=()):
        """Every file of every writer has arrived once, and nothing waits on a node any more."""
        names = self.arrived
        assert len(names) == len(set(names)), "twice"
        assert {p.name for p in self.store.glob("*.safetensors")} == set(names)
        numbers = defaultdict(list)
        for name in names:
            writer, number = re.fullmatch(r"(\w+)-(\d+)-n\d+\.safetensors", name).groups()
            numbers[writer].append(int(number))
        for writer, found in numbers.items():
            assert sorted(found) == list(range(len(found))), f"lost: writer {writer} has {sorted(found)}"
        for node in (self.root / "nodes").iterdir():
            if node.name not in except_nodes:
                for directory in self.cluster.directories(node.name).values():
                    assert not list(spool_of(directory).glob("[!.]*")), directory
                    assert not list(outbox_of(directory).glob("[!.]*")), directory


def _role(pid):
    words = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return json.loads(next(w for w in words if w.startswith(b"AMAGO_ROLE=")).partition(b"=")[2])


def _orphans(address):
    """Processes of the cluster whose parent is not the process of the test: Ray's own have several generations."""
    found = set()
    for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
        with contextlib.suppress(OSError):
            if f"--gcs-address={address}".encode() in Path(f"/proc/{pid}/cmdline").read_bytes():
                found |= {pid, *launching.family(pid)}
    return found


def _is(pid, title):
    try:
        if title == "collector":
            return _role(pid)["kind"] == "collector" and b"multiprocessing" not in Path(f"/proc/{pid}/cmdline").read_bytes()
        line = Path(f"/proc/{pid}/cmdline").read_bytes()
        return line.startswith(f"ray::{title}".encode()) or line.partition(b"\0")[0].endswith(f"/{title}".encode())
    except (OSError, StopIteration):
        return False


def kill(pid):
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
