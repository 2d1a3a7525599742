"""Launches for tests: started in a process of their own, watched from outside."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import tiny

PROGRAM = Path(__file__).parent / "launched_program.py"


class Launch:
    """``amago launch`` of `launched_program`.

    Args:
        root: directory of the run.
        options: words before the program.
        program: a script.
        words: its further arguments.
        before: words before the command, such as ``unshare``.
        cli: the command that launches.
        fields: of the experiment.
    """

    def __init__(self, root, *options, collectors=2, program=PROGRAM, words=(), before=(), cli=("-m", "amago.cli"), **fields):
        self.root, self.run_dir = root, root / "run"
        words = ["launch", "--collectors", str(collectors), *options, str(program), str(root), json.dumps(fields), *words]
        environment = tiny.environment() | {"OMP_NUM_THREADS": "1"}
        environment["PYTHONPATH"] = os.pathsep.join([str(PROGRAM.parent), environment["PYTHONPATH"]])
        self.process = subprocess.Popen(
            [*before, sys.executable, *cli, *words], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment,
            start_new_session=True,
        )  # fmt: skip
        self.output = ""

    def wait(self, seconds=270):
        """The exit code, after the end; `output` is complete then."""
        self.output, _ = self.process.communicate(timeout=seconds)
        return self.process.returncode

    def until(self, condition, seconds=270):
        """Wait for a condition, while the launch runs."""
        deadline = time.monotonic() + seconds
        while not condition():
            assert self.process.poll() is None, f"the launch ended: {self.process.communicate()[0]}"
            assert time.monotonic() < deadline, f"{condition} did not become true; {self.log()}"
            time.sleep(0.05)

    def log(self, index=0):
        path = self.run_dir / "launch" / f"collector-{index}" / "log.txt"
        return path.read_text() if path.exists() else ""

    @property
    def children(self):
        """{"learner" or "collector-N": process id} of those that run."""
        found = {}
        for pid in children_of(self.process.pid):
            with contextlib.suppress(OSError, ValueError, StopIteration):
                words = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
                role = json.loads(next(w for w in words if w.startswith(b"AMAGO_ROLE=")).partition(b"=")[2])
                found[role["kind"] + (f"-{role['index']}" if role["kind"] == "collector" else "")] = pid
        return found

    @property
    def ranks(self):
        """{rank: process id} of the learner's processes, where there are several."""
        found = {}
        for pid in family(self.process.pid):
            with contextlib.suppress(OSError, KeyError):
                words = dict(w.partition(b"=")[::2] for w in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"))
                if json.loads(words[b"AMAGO_ROLE"])["kind"] == "learner":
                    found[int(words[b"RANK"])] = pid
        return found

    def beat(self, name):
        """What a process says of itself; empty if it has not said anything."""
        for pid in self.children.values():
            with contextlib.suppress(OSError, StopIteration, ValueError):
                words = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
                role = json.loads(next(w for w in words if w.startswith(b"AMAGO_ROLE=")).partition(b"=")[2])
                return json.loads((Path(role["control"]) / f"{name}.json").read_text())
        return {}

    @property
    def rollouts(self):
        """Rollouts that collectors have reported, those included that the learner has not read."""
        unread = [json.loads(p.read_text()) for p in (self.run_dir / "launch" / "reports").glob("*.json")]
        logged = sum(row["values"].get("Number of Rollouts", 0) for row in self.rows("rollout"))
        return int(logged) + sum(len(r["lengths"]) for r in unread if r["section"] == "rollout")

    @property
    def arrived(self):
        """Trajectories in the store, and names in the journal of what has arrived."""
        files = [p.name for p in self.store.glob("*.safetensors")]
        names = (self.run_dir / "buffer" / ".arriving" / "journal").read_text().splitlines()
        return sum(int(re.search(r"-n(\d+)\.", name)[1]) for name in files), names

    def rows(self, section):
        return tiny.rows(self.run_dir, section) if (self.run_dir / "metrics.jsonl").exists() else []

    @property
    def store(self):
        return self.run_dir / "buffer" / "fifo"

    def end(self):
        if self.process.poll() is None:
            self.process.kill()
            self.process.communicate()


def children_of(pid):
    with contextlib.suppress(OSError):
        return [int(p) for task in Path(f"/proc/{pid}/task").iterdir() for p in (task / "children").read_text().split()]
    return []


def family(pid):
    """A process's descendants."""
    return {d for child in children_of(pid) for d in (child, *family(child))}


def alive(pids):
    found = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
                found.add(pid)
    return found


def interrupt(launch):
    """Ctrl-C in the launch's terminal."""
    os.killpg(launch.process.pid, signal.SIGINT)
