"""The actors of a launch on a Ray cluster. Only `amago.distributed.ray_cluster` imports this module, and Ray's workers do."""

from __future__ import annotations

import logging
import os
import string
import tempfile
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray

from amago import __version__
from amago.distributed.ingest import Ingest
from amago.distributed.link import Answer, Beats, LocalLink, Parcel
from amago.distributed.mirror import Mirror
from amago.distributed.node import Node, Orders, Status
from amago.distributed.place import Task
from amago.distributed.shipping import keep
from amago.run.locks import HeldError, RunLock
from amago.run.roles.protocol import REPORTS, STATE_FILE, launch_dir, read_soon
from amago.store.files import temporary_file

CALL_SECONDS = 20.0
"""Longest wait for one call of the ingest actor; it is repeated."""
INGEST = "ingest"
"""Name of the ingest actor. A handle in the arguments of an actor's constructor would be in the object store, and could be lost."""
_WATCH_SECONDS, _PUMP_SECONDS, _LEFT_SECONDS = 0.1, 0.2, 10.0


class IngestActor:
    """Takes files into the learner's store, on its node. After a kill Ray starts it again, and all that it needs is on the disk.

    Args:
        hello: of the learner: {"run_dir", "save_to"}.
        beat_file: what the learner says of itself.
    """

    def __init__(self, hello: Mapping[str, str], beat_file: str):
        self._run_dir, self._beat_file = Path(hello["run_dir"]), Path(beat_file)
        self._lock = _lock(launch_dir(self._run_dir) / "ingest.lock")
        self._link = LocalLink(Ingest(hello["save_to"], launch_dir(self._run_dir) / REPORTS), self._answer)
        # what collectors of an earlier launch, on this machine alone, have left
        self._left = Mirror(self._link, sorted(path for path in launch_dir(self._run_dir).glob("collector-*") if path.is_dir()))
        self._left_at = 0.0
        self._version, self._pause = 0, False
        self._content: tuple[tuple[int, int], Any] | None = None

    def put(self, parcels: Sequence[Parcel], beats: Beats) -> Answer:
        """See `Link.put`."""
        for state in (parcel for parcel in parcels if parcel.kind == "state"):
            directory = launch_dir(self._run_dir) / state.name
            directory.mkdir(parents=True, exist_ok=True)
            with temporary_file(directory) as tmp:
                tmp.write_bytes(state.data or b"")
                os.replace(tmp, directory / STATE_FILE)
        if time.monotonic() >= self._left_at:
            self._left.pump({})
            self._left_at = time.monotonic() + _LEFT_SECONDS
        return self._link.put([parcel for parcel in parcels if parcel.kind != "state"], beats)

    def _answer(self, beats: Beats) -> Answer:
        beat = read_soon(self._beat_file)
        if beat is not None:
            self._version, self._pause = max(self._version, int(beat["version"])), bool(beat["pause"])
        return Answer(self._version, self._pause)

    def weights(self) -> list[Any]:
        """A reference to the content of the published policy: nodes fetch it from each other. Empty if there is none."""
        path = self._run_dir / "ckpts" / "latest" / "policy.pt"
        try:
            with open(path, "rb") as f:
                stat = os.fstat(f.fileno())
                key = (stat.st_ino, stat.st_mtime_ns)
                if self._content is None or self._content[0] != key:
                    self._content = (key, ray.put(f.read()))
        except FileNotFoundError:
            return []
        return [self._content[1]]

    def pid(self) -> int:
        """Of its process."""
        return os.getpid()


def _lock(path: Path, seconds: float = 30.0) -> RunLock:
    """A lock, as soon as an earlier actor of this launch has ended."""
    lock, until = RunLock(path), time.monotonic() + seconds
    while True:
        try:
            lock.acquire()
            return lock
        except HeldError:
            if time.monotonic() > until:
                raise
            time.sleep(0.2)


class RayLink:
    """The `Link` from a node to the learner's. It finds the `IngestActor` by its name, again after each failure."""

    _ingest: Any = None

    def put(self, parcels: Sequence[Parcel], beats: Beats) -> Answer:
        return self._result(self._actor().put.remote(list(parcels), dict(beats)))

    def weights(self) -> bytes | None:
        found = self._result(self._actor().weights.remote())
        return self._result(found[0]) if found else None

    def _actor(self) -> Any:
        if self._ingest is None:
            try:
                self._ingest = ray.get_actor(INGEST)
            except (ValueError, ray.exceptions.RayError) as err:
                raise OSError("the learner's node takes no files at the moment") from err
        return self._ingest

    def _result(self, ref: Any) -> Any:
        """The result of a call.

        Raises:
            OSError: there is none: the call may be repeated.
        """
        try:
            return ray.get(ref, timeout=CALL_SECONDS)
        except ray.exceptions.RayTaskError as err:
            raise OSError(f"the learner's node could not take it: {err.cause}") from err
        except ray.exceptions.RayError as err:
            self._ingest = None
            raise OSError(f"the learner's node does not answer ({type(err).__name__})") from err


@dataclass(frozen=True)
class Setup:
    """What an agent needs to know.

    Attributes:
        task: of each collector.
        node_dir: template of the node's directory (`node_home`).
        run_name, run_id, launch: as of `Node`.
        version: of this library, in the launcher.
    """

    task: Task
    node_dir: str
    run_name: str
    run_id: str
    launch: str
    version: str


DEFAULT_NODE_DIR = os.path.join("{tmp}", "amago-{user}")


def node_home(template: str) -> Path:
    """The directory that a template means on this machine. It may hold variables of the environment, as "$SCRATCH/amago", "~", and
    {host}, {user}, {tmp}.

    Raises:
        ValueError: a variable is not set here, or a name in braces is another.
    """
    known = {"host": os.uname().nodename, "user": str(os.getuid()), "tmp": tempfile.gettempdir()}
    names = [name for _, name, _, _ in string.Formatter().parse(template) if name is not None]
    if not set(names) <= known.keys():
        raise ValueError(f"node_dir is {template!r}, but in braces there may be host, user and tmp only")
    path = os.path.expandvars(os.path.expanduser(template.format(**known)))
    if "$" in path:
        raise ValueError(f"node_dir is {template!r}, and on {known['host']} this is {path!r}: a variable is not set there")
    return Path(os.path.abspath(path))


class NodeAgent:
    """Runs the collectors of one node. After a kill Ray starts it again there, and it goes on with what is on the disk.

    Args:
        setup: of the launch.
    """

    def __init__(self, setup: Setup):
        if setup.version != __version__:
            raise RuntimeError(
                f"amago is {__version__} there, and {setup.version} where the launcher runs: install the same on all nodes"
            )
        home = node_home(setup.node_dir)
        self._node = Node(RayLink(), setup.task, home, setup.run_name, setup.run_id, setup.launch)
        keep(self._node.run_dir.parent / "program")
        logging.getLogger("amago").addHandler(_ToNews(self._node))
        for step, pause in ((self._node.watch, _WATCH_SECONDS), (self._node.pump, _PUMP_SECONDS)):
            threading.Thread(target=self._repeat, args=(step, pause), daemon=True).start()

    def _repeat(self, step: Any, pause: float) -> None:
        """The body of a thread. Collectors die with the one that watches them, which ends with the process."""
        told = ""
        while True:
            try:
                step()
                told = ""
            except OSError as err:  # the disk, above all
                if str(err) != told:
                    self._node.say(f"trouble on {os.uname().nodename}: {err}")
                told = str(err)
                time.sleep(1.0)
            except Exception:
                self._node.failure = traceback.format_exc()
                return
            time.sleep(pause)

    def exchange(self, orders: Orders) -> Status:
        """Take the launcher's orders, and say how things are here."""
        self._node.obey(orders)
        return self._node.status()

    def pid(self) -> int:
        """Of its process."""
        return os.getpid()


class _ToNews(logging.Handler):
    """Warnings of the library reach the launcher's terminal."""

    def __init__(self, node: Node):
        super().__init__(logging.WARNING)
        self._node = node

    def emit(self, record: logging.LogRecord) -> None:
        self._node.say(f"{os.uname().nodename}: {record.getMessage()}")
