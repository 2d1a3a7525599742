"""Launches for tests: started in a process of their own, watched from outside.

No test may depend on the speed of the machine. `Launch.until` waits for conditions that stay true once they are true: counters that only
grow, files, processes that stay. What must not happen too early is held by a file in the run's directory (`launched_program`).
"""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import tiny
from fault_helpers import children_of
from fault_helpers import processes as family

PROGRAM = Path(__file__).parent / "launched_program.py"
PATIENCE = 600.0
"""Seconds after which a test gives up, on the slowest machine."""
FOREVER = 1_000_000
RUN = {"epochs": FOREVER, "train_batches_per_epoch": 2, "ckpt_interval": FOREVER, "resume": "auto"}
"""Settings of a run that a signal ends."""


class Launch:
    """``amago launch`` of `launched_program`.

    Args:
        root: directory of the run.
        options: words before the program.
        program: a script.
        words: its further arguments.
        before: words before the command, such as ``unshare``.
        cli: how to call amago.
        command: of amago, "launch" or "collect".
        fields: of the experiment.
    """

    def __init__(
        self, root, *options, collectors=2, program=PROGRAM, words=(), before=(), cli=("-m", "amago.cli"), command="launch", **fields
    ):  # fmt: skip
        self.root, self.run_dir = root, root / "run"
        words = [command, "--collectors", str(collectors), *options, str(program), str(root), json.dumps(fields), *words]
        self.process = subprocess.Popen(
            [*before, sys.executable, *cli, *words], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=tiny.environment(),
            start_new_session=True,
        )  # fmt: skip
        self.output = ""

    def wait(self, seconds=PATIENCE):
        """The exit code, after the end; `output` is complete then."""
        self.output, _ = self.process.communicate(timeout=seconds)
        return self.process.returncode

    def until(self, condition, seconds=PATIENCE):
        """Wait for a condition, while the launch runs."""
        deadline = time.monotonic() + seconds
        while not condition():
            assert self.process.poll() is None, f"the launch ended: {self.process.communicate()[0]}"
            assert time.monotonic() < deadline, f"{condition} did not become true; {self.log()}"
            time.sleep(0.05)

    def log(self, index=0):
        path = self.run_dir / "launch" / f"collector-{index}" / "log.txt"
        return path.read_text() if path.exists() else ""

    def phases(self, index=0):
        """Environment steps of each of a collector's phases."""
        path = self.run_dir / "launch" / f"collector-{index}"
        steps = [row["env_steps"] for row in tiny.rows(path, "rollout")] if (path / "metrics.jsonl").exists() else []
        return [b - a for a, b in zip([0, *steps], steps)]

    def _roles(self, pids):
        """{process id: (its assignment, variables of its environment)} of those that have one."""
        found = {}
        for pid in pids:
            with contextlib.suppress(OSError):
                variables = dict(w.partition(b"=")[::2] for w in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"))
                if b"AMAGO_ROLE" in variables:
                    found[pid] = json.loads(variables[b"AMAGO_ROLE"]), variables
        return found

    @property
    def children(self):
        """{"learner" or "collector-N": process id} of those that run."""
        roles = self._roles(children_of(self.process.pid))
        return {r["kind"] + (f"-{r['index']}" if r["kind"] == "collector" else ""): pid for pid, (r, _) in roles.items()}

    @property
    def ranks(self):
        """{rank: process id} of the learner's processes, where there are several."""
        roles = self._roles(family(self.process.pid))
        return {int(v[b"RANK"]): pid for pid, (r, v) in roles.items() if r["kind"] == "learner" and b"RANK" in v}

    def beat(self, name):
        """The newest sign of life of a process, or the launcher's "orders"; empty if there is none."""
        for role, _ in self._roles(children_of(self.process.pid)).values():
            with contextlib.suppress(OSError, ValueError):
                return json.loads((Path(role["control"]) / f"{name}.json").read_text())
        return {}

    @property
    def rollouts(self):
        """Rollouts that collectors have reported, those included that the learner has not read."""
        unread = [json.loads(p.read_text()) for p in (self.run_dir / "buffer" / ".arriving").glob("*/reports/*.json")]
        logged = sum(row["values"].get("Number of Rollouts", 0) for row in self.rows("rollout"))
        return int(logged) + sum(len(r["statistics"]["episodes"]) for r in unread if r["section"] == "rollout")

    @property
    def arrived(self):
        """Trajectories in the store, and the names of its files."""
        files = [p.name for p in self.store.glob("*.safetensors")]
        return sum(int(re.search(r"-n(\d+)\.", name)[1]) for name in files), files

    def rows(self, section):
        return tiny.rows(self.run_dir, section) if (self.run_dir / "metrics.jsonl").exists() else []

    @property
    def store(self):
        return self.run_dir / "buffer" / "fifo"

    def end(self):
        if self.process.poll() is None:
            self.process.kill()
            self.process.communicate()


CHANGED = """
import json, os, sys
sys.argv[0] = {program!r}
sys.path.insert(0, {folder!r})
import launched_program
role = json.loads(os.environ["AMAGO_ROLE"])["kind"]
{change}
launched_program.run()
"""


def changed(root, change):
    """A script that runs lines of code, which know their ``role``, before it does what `launched_program` does."""
    path = root / "changed.py"
    path.write_text(CHANGED.format(program=str(PROGRAM), folder=str(PROGRAM.parent), change=change))
    return path


@pytest.fixture
def launch(tmp_path):
    """Starts launches, and ends them after the test."""
    started = []

    def start(*options, root=tmp_path, **fields):
        started.append(Launch(root, *options, **fields))
        return started[-1]

    yield start
    for each in reversed(started):
        each.end()


def updates(run):
    return max((row["grad_steps"] for row in run.rows("train")), default=0)


def stop(run, number=signal.SIGTERM):
    """Send the launch a signal, and check that it ends as that asks; SIGINT is Ctrl-C in its terminal."""
    os.killpg(run.process.pid, number) if number == signal.SIGINT else run.process.send_signal(number)
    assert run.wait() == 128 + number, run.output
