"""Where a run takes place: machine, versions of packages, command line, and the git commit of the user's script."""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import os
import platform
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import torch

GIT_SECONDS = 3.0  # a repository on a disk that hangs does not keep a run from starting


def surroundings() -> dict[str, Any]:
    """{"versions", "git", "machine", "command", "directory"} of this process, as JSON types; what cannot be found is None."""
    return {
        "versions": versions(),
        "git": git_commit(script_directory()),
        "machine": machine(),
        "command": [sys.executable, *sys.orig_argv[1:]],
        "directory": _or_none(os.getcwd),
    }


@functools.cache
def versions() -> dict[str, str]:
    """Python's version, and those of all installed packages, by name."""
    found = {"python": platform.python_version()}
    for package in importlib.metadata.distributions():
        with contextlib.suppress(Exception):  # the remains of a broken installation
            found.setdefault(package.name.lower().replace("_", "-"), package.version)
    return dict(sorted(found.items()))


def machine() -> dict[str, Any]:
    """Host, system, CPU, cores, memory and GPUs."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if torch.cuda.is_available() else []
    return {
        "host": platform.node(), "system": platform.platform(), "cpu": _cpu(), "cores": cores, "memory_gb": _memory(), "gpus": gpus,
    }  # fmt: skip


def _cpu() -> str | None:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or None


def _memory() -> float | None:
    with contextlib.suppress(ValueError, OSError, AttributeError):
        return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)
    return None


def _or_none(read: Any) -> Any:
    with contextlib.suppress(OSError):
        return read()
    return None


def script_directory() -> Path | None:
    """The directory of the user's script; for the ``amago`` command, a notebook or ``python -c``, the current directory."""
    file = getattr(sys.modules.get("__main__"), "__file__", None)
    if file is not None:
        directory = Path(file).absolute().parent
        ours = Path(__file__).absolute().parents[1]
        installed = directory == Path(sys.executable).absolute().parent or directory.is_relative_to(ours)
        if not installed:
            return directory
    current: Path | None = _or_none(Path.cwd)
    return current


def git_commit(directory: Path | None) -> dict[str, Any] | None:
    """{"commit": its hash, "changed": whether tracked files differ from it} of the repository that holds a directory.

    None if there is none, or git is missing, fails, or takes longer than 3 seconds.
    """
    if directory is None:
        return None
    answers: list[str] = []

    def ask() -> None:
        with contextlib.suppress(Exception):
            answers.append(_git(directory, "rev-parse", "HEAD"))
            answers.append(_git(directory, "status", "--porcelain", "--untracked-files=no"))

    # in a thread: not even killing git returns in time where a disk hangs
    thread = threading.Thread(target=ask, daemon=True, name="amago-git")
    thread.start()
    thread.join(GIT_SECONDS)
    found = list(answers)
    if not found:
        return None
    return {"commit": found[0].strip(), "changed": bool(found[1].strip()) if len(found) > 1 else None}


def _git(directory: Path, *arguments: str) -> str:
    env = {**os.environ, "GIT_TERMINAL_PROMPT": "0", "GIT_OPTIONAL_LOCKS": "0"}
    # neither hooks nor file system monitors that the repository's own configuration would start
    command = ["git", "-c", "core.fsmonitor=false", "-c", "core.hooksPath=/dev/null", "-C", str(directory), *arguments]
    done = subprocess.run(
        command, capture_output=True, text=True, stdin=subprocess.DEVNULL, env=env, timeout=GIT_SECONDS, check=True
    )
    return done.stdout
