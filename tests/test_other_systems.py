"""Training, resume and unit tests in a process that lacks what macOS or Windows lack, with "spawn" as the start method."""

import subprocess
import sys
from pathlib import Path

import pytest
import tiny

LACKING = """
import importlib.machinery, multiprocessing, os, select, signal, sys
import multiprocessing.connection, multiprocessing.resource_tracker, multiprocessing.util

def lose():
    for module, names in (
        (os, "sched_getaffinity fork forkpty register_at_fork memfd_create MFD_CLOEXEC pidfd_open posix_fallocate preadv pwrite pread "
             "O_CLOEXEC O_NOFOLLOW O_NONBLOCK"),
        (signal, "SIGHUP SIGUSR1 SIGUSR2 pidfd_send_signal"),
        (select, "epoll" if SYSTEM == "darwin" else "epoll poll"),
    ):
        for name in names.split():
            vars(module).pop(name, None)
    sys.modules.update(dict.fromkeys(("fcntl", "resource", "pwd", "grp")))
    multiprocessing.set_start_method("spawn", force=True)

class Hook:
    def find_spec(self, name, path=None, target=None):
        if name == "amago":
            import psutil
            if multiprocessing.parent_process() is None:
                import accelerate, torch
                import torch.distributed.elastic
            sys.meta_path.remove(self)
            lose()

SYSTEM = os.environ["LACKS_AS"]
sys.meta_path.insert(0, Hook())
"""
TRAINING = """
import os, sys, warnings
import tiny
from pathlib import Path

if __name__ == "__main__":
    assert not hasattr(os, "fork") and sys.modules["fcntl"] is None
    root = Path(sys.argv[1])
    for epochs in (1, 2):
        run = tiny.learned(root, epochs=epochs, ckpt_interval=1, resume="auto", env_mode=sys.argv[2], async_env_mp_context="spawn")
        run.close()
    assert {r["section"] for r in tiny.rows(root / "run")} >= {"train", "rollout"} and run.epoch == 2
"""


def lacking(tmp_path, system, *command):
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(LACKING, "utf-8")
    env = tiny.environment()
    env |= {"PYTHONPATH": f"{tmp_path / 'site'}:{env['PYTHONPATH']}", "LACKS_AS": system}
    done = subprocess.run(
        [sys.executable, *map(str, command)], env=env, capture_output=True, text=True, encoding="utf-8", timeout=280
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done


@pytest.mark.parametrize("system", ["darwin", "win32"])
def test_a_run_trains_and_resumes(tmp_path, system):
    (tmp_path / "train.py").write_text(TRAINING, "utf-8")
    done = lacking(tmp_path, system, tmp_path / "train.py", tmp_path / "runs", "async")
    assert ("env_mode='async' is not available" in done.stderr) == (system == "win32")


def test_unit_tests(tmp_path):
    tests = Path(__file__).parent
    chosen = tests / "data" / "test_trajectory.py", tests / "loading" / "offline" / "test_history.py"
    lacking(
        tmp_path, "darwin", "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-c", tests.parent / "pyproject.toml", *chosen
    )
