"""Launches for tests: started in a process of their own, watched from outside."""

import contextlib
import json
import os
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
        fields: of the experiment.
    """

    def __init__(self, root, *options, collectors=2, program=PROGRAM, **fields):
        self.root, self.run_dir = root, root / "run"
        words = ["launch", "--collectors", str(collectors), *options, str(program), str(root), json.dumps(fields)]
        environment = tiny.environment() | {"OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "amago.cli", *words], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment,
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
