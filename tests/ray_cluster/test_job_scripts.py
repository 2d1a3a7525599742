"""The job scripts of examples/cluster, with an ssh and an srun that stay on this machine."""

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import launching
import pytest
import tiny
from clusters import HERE

SCRIPTS = HERE.parent.parent / "examples" / "cluster"
SETTINGS = '{"epochs": %d, "train_batches_per_epoch": 5, "ckpt_interval": 100000, "resume": "auto"}'
FAKES = {
    "ssh": 'host=$1; shift; export AMAGO_TEST_NODE=$host; exec bash -c "$*"',
    "srun": 'while [[ $1 == --* ]]; do shift; done; export AMAGO_TEST_NODE=other; exec "$@"',
    "amago": f'exec {sys.executable} -m amago.cli "$@"',
    "ray": f'exec {Path(sys.executable).parent}/ray "$@"',
}


@pytest.fixture
def job(tmp_path):
    """Starts a job script; ends it after the test."""
    program, programs = tmp_path / "program", tmp_path / "bin"
    shutil.copytree(HERE / "ray_program", program)
    shutil.copy(tiny.__file__, program)
    programs.mkdir()
    for name, text in FAKES.items():
        (programs / name).write_text(f"#!/bin/bash\n{text}\n")
        (programs / name).chmod(0o755)
    started = []

    def start(script, epochs, **variables):
        with socket.create_server(("", 0)) as server:
            port = server.getsockname()[1]
        environment = tiny.environment() | {
            "PATH": f"{programs}:{os.environ['PATH']}", "PORT": str(port), "COLLECTORS": "2", "AMAGO_TEST_NODE": "first",
            "NODE_DIR": f"{tmp_path}/nodes/$AMAGO_TEST_NODE", **variables,
        }  # fmt: skip
        words = ["bash", str(SCRIPTS / script), str(program / "train.py"), str(tmp_path), SETTINGS % epochs]
        started.append(
            subprocess.Popen(
                words,
                env=environment,
                cwd=tmp_path,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
            )
        )
        return started[-1]

    yield start
    for each in started:
        family = launching.family(each.pid)
        if each.poll() is None:
            each.kill()
        each.communicate()
        for pid in family:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def processes_with(text):
    """Those whose command line has this text."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            found += [path.parent.name] if text.encode() in path.read_bytes() else []
    return found


@pytest.mark.parametrize(
    ("script", "variables"),
    [
        ("ssh.sh", {"HOSTS": "second", "SSH": "ssh"}),
        ("slurm.sh", {"SLURM_JOB_NUM_NODES": "2", "SLURM_CPUS_PER_TASK": "2", "SLURM_JOB_ID": "7"}),
    ],
)
def test_a_job_runs_to_its_end_and_a_signal_ends_it_with_a_saved_state(job, tmp_path, script, variables):
    first = job(script, 3, **variables)
    output, _ = first.communicate(timeout=240)
    assert first.returncode == 0, output
    assert re.search(r"^learned 15 ", output, re.M)

    again = job(script, 100_000, **variables)
    assert len(list((tmp_path / "nodes").iterdir())) == 2
    deadline = time.monotonic() + 240
    while max(row["grad_steps"] for row in tiny.rows(tmp_path / "run", "train")) <= 15:
        assert again.poll() is None, again.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.5)
    again.send_signal(signal.SIGTERM)
    output, _ = again.communicate(timeout=120)
    assert again.returncode == 143, output
    assert list((tmp_path / "run" / "ckpts" / "training_states").iterdir())
    deadline = time.monotonic() + 60
    while processes_with(str(tmp_path)) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert not processes_with(str(tmp_path)), "nothing is left"
