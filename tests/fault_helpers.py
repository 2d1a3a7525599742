"""Helpers of the fault tests: how many faults, the seed, reports, injection, and checks that nothing is left behind.

Faults come from outside (signals, limits, damaged files) at times drawn from one seed, which is printed. Environment variables:

    AMAGO_FAULTS=long       the full counts (`make test-faults`); otherwise a short version, of seconds
    AMAGO_FAULTS_SEED=N     a seed, to repeat a failure; otherwise a new one each time
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

LONG = os.environ.get("AMAGO_FAULTS", "") == "long"
_TESTS = Path(__file__).resolve().parent
_programs: list[subprocess.Popen[str]] = []
_OWN = ("forkserver", "resource_tracker")  # processes that multiprocessing keeps for as long as this one lives


def count(short: int, long: int) -> int:
    """How many: ``long`` with AMAGO_FAULTS=long, else ``short``."""
    return long if LONG else short


@cache
def seed() -> int:
    """The seed of this run: AMAGO_FAULTS_SEED, or one that is drawn and printed at the head of each test."""
    given = os.environ.get("AMAGO_FAULTS_SEED")
    return int(given) if given else int.from_bytes(os.urandom(4), "little")


def rng(name: str) -> np.random.Generator:
    """The random generator of the test of that name; it depends on `seed` alone, not on which other tests run."""
    return np.random.default_rng([seed(), zlib.crc32(name.encode())])


def seeds(name: str, n: int) -> list[int]:
    """``n`` integer seeds for the test of that name, for another process or an `Experiment`."""
    return [int(s) for s in rng(name).integers(2**31, size=n)]


def report(name: str, done: int, wanted: int | None = None) -> None:
    """Print "50 NAME"; or, with ``wanted``, "50 of 50 NAME", and fail unless the two are equal."""
    found = f"{done} {name}" if wanted is None else f"{done} of {wanted} {name}"
    print(f"\n{found} (seed {seed()})", flush=True)
    assert wanted in (None, done), f"{found}; AMAGO_FAULTS_SEED={seed()} repeats it"


def say(text: str) -> None:
    """Print a line that belongs to a count, such as the longest time measured."""
    print(f"    {text}", flush=True)


def _parents(zombies: bool = False) -> dict[int, int]:
    """{process id: that of its parent} of all processes. The lists of children that Linux has may miss some while others end."""
    found: dict[int, int] = {}
    for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
        with contextlib.suppress(OSError):
            state, parent = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:2]
            if state != "Z" or zombies:
                found[pid] = int(parent)
    return found


def children_of(pid: int) -> list[int]:
    return [child for child, parent in _parents().items() if parent == pid]


def _is_a_helper(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return any(own in Path(f"/proc/{pid}/cmdline").read_text() for own in _OWN)
    return False


def processes(root: int | None = None, zombies: bool = False) -> set[int]:
    """Living descendants of a process (default: this one) without multiprocessing's helpers; with ``zombies``, zombies too."""
    top, parents = os.getpid() if root is None else root, _parents(zombies)
    found: set[int] = set()
    edge = {top}
    while edge:
        edge = {pid for pid, parent in parents.items() if parent in edge and pid not in found}
        found |= edge
    return {pid for pid in found if not (parents[pid] == top and _is_a_helper(pid))}


def forkserver() -> int | None:
    """Process id of multiprocessing's forkserver, if it runs."""
    from multiprocessing import forkserver as module

    return module._forkserver._forkserver_pid  # type: ignore[attr-defined]


def descriptors(pid: int | None = None) -> dict[int, str]:
    """{open file descriptor: what it is} of a process (default: this one)."""
    folder = f"/proc/{os.getpid() if pid is None else pid}/fd"
    found: dict[int, str] = {}
    for fd in os.listdir(folder):
        with contextlib.suppress(OSError):
            found[int(fd)] = os.readlink(f"{folder}/{fd}")
    return found


def shared_maps(pid: int | None = None) -> list[str]:
    """Shared memory that a process (default: this one) has mapped."""
    lines = Path(f"/proc/{os.getpid() if pid is None else pid}/maps").read_text().splitlines()
    return [line for line in lines if "/memfd:" in line or "/dev/shm/" in line]


def segments() -> set[str]:
    """Names in /dev/shm, without those that contain the id of a living process that is not a descendant of this one."""
    family = {os.getpid(), *processes(zombies=True)}

    def foreign(name: str) -> bool:
        numbers = [int(part) for part in name.replace("-", "_").split("_") if part.isdigit()]
        return any(os.path.exists(f"/proc/{n}") and n not in family for n in numbers)

    return {name for name in os.listdir("/dev/shm") if not foreign(name)} if os.path.isdir("/dev/shm") else set()


@dataclass(frozen=True)
class Held:
    """Resources of the machine that this process holds."""

    processes: set[int]
    segments: set[str]
    maps: int
    descriptors: dict[int, str]
    forkserver: int  # descriptors that the forkserver has open
    threads: int

    @classmethod
    def now(cls) -> Held:
        gc.collect()
        server = forkserver()
        return cls(
            processes(zombies=True), segments(), len(shared_maps()), descriptors(),
            len(descriptors(server)) if server is not None else 0, threading.active_count(),
        )  # fmt: skip

    def more_than(self, before: Held) -> list[str]:
        """What is held now and was not before, in words."""
        more = [f"process {pid}" for pid in sorted(self.processes - before.processes)]
        more += [f"/dev/shm/{name}" for name in sorted(self.segments - before.segments)]
        if self.maps > before.maps:
            more.append(f"{self.maps - before.maps} maps of shared memory: {shared_maps()}")
        if len(self.descriptors) > len(before.descriptors):
            more.append(f"descriptors {[d for d in self.descriptors.items() if d not in before.descriptors.items()]}")
        if self.forkserver > before.forkserver > 0:
            more.append(f"{self.forkserver - before.forkserver} descriptors of the forkserver")
        if self.threads > before.threads:
            more.append(f"threads {threading.enumerate()}")
        return more


def assert_nothing_left(before: Held, within: float = 200.0) -> None:
    """Fail unless this process soon holds no more than ``before``: no child, shared memory, descriptor or thread."""
    deadline = time.monotonic() + within
    while more := Held.now().more_than(before):
        assert time.monotonic() < deadline, f"left behind: {'; '.join(more)}; AMAGO_FAULTS_SEED={seed()} repeats it"
        time.sleep(0.1)


@contextlib.contextmanager
def leaves_nothing(within: float = 200.0) -> Iterator[None]:
    """Fail if the block leaves something behind (`assert_nothing_left`). Start what stays, such as the forkserver, before it."""
    before = Held.now()
    yield
    assert_nothing_left(before, within)


def alive(pid: int) -> bool:
    """True if a process runs, and is no zombie."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def wait_until(condition: Callable[[], object], seconds: float = 250.0) -> None:
    """Wait for a condition, and fail if it takes too long."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"{condition} did not become true"
        time.sleep(0.01)


def assert_gone(pids: Iterable[int], seconds: float = 250.0) -> None:
    """Wait until no process of these is left."""
    wait_until(lambda: not any(map(alive, pids)), seconds)


def kill_group(pid: int, signum: int = signal.SIGKILL) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signum)


def damage(path: Path, how: str, random: np.random.Generator) -> str:
    """Flip one bit of a file, cut, empty or delete it, or write other bytes, where it lies."""
    size = path.stat().st_size
    if how == "delete":
        path.unlink()
    elif how == "flip":
        at, fd = int(random.integers(size)), os.open(path, os.O_RDWR)
        os.pwrite(fd, bytes([os.pread(fd, 1, at)[0] ^ 1 << int(random.integers(8))]), at)
        os.close(fd)
    elif how == "cut":
        os.truncate(path, int(random.integers(size)))
    else:
        path.write_bytes(b"" if how == "empty" else random.bytes(size))
    return f"{how} {path.name}"


def small_disk(directory: Path, size: str = "32m") -> list[str] | None:
    """The beginning of a command for which a directory is a small file system; None if this machine does not permit that."""
    for flags in ("-m", "-Urm"):
        command = [
            "unshare",
            flags,
            "sh",
            "-c",
            f'mount -t tmpfs -o size={size},mode=700 tmpfs "$0" && exec "$@"',
            str(directory),
        ]
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            if subprocess.run([*command, "true"], capture_output=True, timeout=20, check=False).returncode == 0:
                return command
    return None


class Threads:
    """Threads that call ``work(random generator)`` until the block ends, and count the calls that return True; errors are raised at
    its end."""

    def __init__(self, work: Callable[[np.random.Generator], bool], n: int):
        self.work, self.stop, self.errors, self.done = work, threading.Event(), [], [0] * n  # type: ignore[var-annotated]
        self.threads = [threading.Thread(target=self._run, args=(k,)) for k in range(n)]

    def _run(self, k: int) -> None:
        random = np.random.default_rng([seed(), k])
        try:
            while not self.stop.is_set():
                self.done[k] += self.work(random)
        except BaseException as err:
            self.errors.append(err)
            raise

    def __enter__(self) -> Threads:
        for thread in self.threads:
            thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop.set()
        for thread in self.threads:
            thread.join()
        assert not self.errors


@contextlib.contextmanager
def later(seconds: float, action: Callable[[], Any]) -> Iterator[None]:
    """Call ``action`` from another thread after so many seconds, unless the block has ended before."""
    timer = threading.Timer(seconds, action)
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()


def environment() -> dict[str, str]:
    """Variables for another process that imports amago and the tests' helpers."""
    paths = [str(_TESTS / "faults"), str(_TESTS), str(_TESTS.parent), *filter(None, sys.path)]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1", "AMAGO_FAULTS_SEED": str(seed())}


def start(command: list[str], **options: Any) -> subprocess.Popen[str]:
    """Start a command in its own process group, with its output in a pipe.

    The caller waits for it (`communicate`); the rest of its group is killed at the end of the test.
    """
    options = {"stdout": subprocess.PIPE, "text": True, "env": environment(), "start_new_session": True, **options}
    _programs.append(subprocess.Popen(command, **options))
    return _programs[-1]


def program(folder: Path, text: str, *arguments: object) -> subprocess.Popen[str]:
    """`start` a script of this text, with output and errors in one pipe."""
    path = folder / "program.py"
    path.write_text(textwrap.dedent(text))
    return start([sys.executable, str(path), *map(str, arguments)], stderr=subprocess.STDOUT, cwd=folder)


def end_programs() -> None:
    """Kill the programs of `program` that a failed test has left."""
    while _programs:
        started = _programs.pop()
        kill_group(started.pid)
        started.wait()
        for pipe in (started.stdin, started.stdout):
            if pipe is not None:
                pipe.close()
