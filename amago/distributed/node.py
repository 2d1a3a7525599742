"""The collectors of one node of a cluster: their processes, the way of their files to the learner, and that of its weights to them."""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import signal
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from amago.distributed.children import Child, CollectorError, Collectors
from amago.distributed.link import Answer, Link, Parcel
from amago.distributed.mirror import Mirror
from amago.distributed.place import Task
from amago.run.locks import HeldError, RunLock
from amago.run.roles.protocol import (
    HELLO,
    ORDERS,
    STATE_FILE,
    collector_dir,
    launch_dir,
    outbox_of,
    read_soon,
    spool_of,
    write_soon,
)
from amago.store.files import temporary_file

_NUMBER, _LAUNCH, _LOCK, _CONTROL = "node.json", "launch.json", ".lock", "control"


@dataclass(frozen=True)
class Orders:
    """What the launcher wants of a node.

    Attributes:
        collectors: indices of those that shall run there.
        states: exploration schedules with which collectors go on that the node does not have yet: {index: content of the file}.
        end: all shall end.
        seen: pieces of news that have reached the launcher.
    """

    collectors: frozenset[int] = frozenset()
    states: Mapping[int, bytes] = field(default_factory=dict)
    end: bool = False
    seen: int = 0


@dataclass(frozen=True)
class Status:
    """What a node says of itself.

    Attributes:
        beats: of its collectors, by name.
        collectors: indices of those that it has.
        run: how many run, those that end included.
        left: files that are not delivered yet.
        replaced: processes so far.
        version: of the weights on its disk.
        waiting: bytes that could not be delivered when that was last tried.
        news: sentences for the user, from number ``first`` on.
        failure: why it can run no collectors; empty if it can.
    """

    beats: Mapping[str, Mapping[str, Any]]
    collectors: frozenset[int]
    run: int
    left: bool
    replaced: int
    version: int
    waiting: int
    first: int
    news: Sequence[str]
    failure: str


class Node:
    """Runs collectors on a machine that does not share the learner's disk.

    One thread calls `watch` again and again, and lives as long as the collectors, since they die with the thread that started them.
    Another calls `pump`, which may wait for the link. `obey` and `status` may be called from anywhere.

    Args:
        link: to the learner's node.
        task: of each collector.
        home: directory of this node, where its collectors write until that is delivered.
        run_name: of the run.
        run_id: which distinguishes the run from others of this name.
        launch: which distinguishes this launch from others of the run.

    Attributes:
        run_dir: the run's directory on this node.
        version: of the newest policy that has arrived here; it never falls.
    """

    def __init__(self, link: Link, task: Task, home: Path, run_name: str, run_id: str, launch: str):
        self.link, self.task, self.launch = link, task, launch
        bases, self._locks = _claim(home / run_id)
        self.run_dir = bases[0] / run_name
        self.run_dir.mkdir(parents=True, exist_ok=True)
        self.number = _number(bases[0])
        self.control = bases[0] / _CONTROL
        shutil.rmtree(self.control, ignore_errors=True)  # of an agent that was killed
        self.control.mkdir()
        found = {path for base in bases for path in launch_dir(base / run_name).glob("collector-*") if path.is_dir()}
        self.mirror = Mirror(link, sorted(found), False, task.max_undelivered)
        self.version, self.failure = 0, ""
        self._groups: dict[int, Collectors] = {}  # of one collector each
        self._leaving: list[tuple[Child, float]] = []
        self._orders = Orders()
        self._news: list[str] = []
        self._first = self._replaced = 0
        self._had: set[int] = set()  # collectors that this object has started
        self._sent: dict[str, int] = {}  # times of the exploration schedules that the learner's node has
        self._given = Answer()
        self._lock = threading.Lock()
        if (read_soon(self.run_dir / _LAUNCH) or {}).get("launch") == launch and self._policy.is_file():
            self._say_hello()  # an earlier process of this launch has brought weights, which are good enough for now

    @property
    def _policy(self) -> Path:
        return self.run_dir / "ckpts" / "latest" / "policy.pt"

    # ---- orders and answers ----------------------------------------------------------------------------------------------

    def obey(self, orders: Orders) -> None:
        """Take orders, which replace earlier ones."""
        with self._lock:
            self._orders = orders
            done = min(max(0, orders.seen - self._first), len(self._news))
            del self._news[:done]
            self._first += done

    def say(self, text: str) -> None:
        """Tell the user something."""
        with self._lock:
            self._news.append(text)

    def status(self) -> Status:
        """What is here now."""
        with self._lock:
            groups = dict(self._groups)
            leaving = [child for child, _ in self._leaving]
            first, news = self._first, list(self._news)
        run = sum(group.run for group in groups.values()) + sum(child.runs for child in leaving)
        return Status(
            {name: beat for group in groups.values() for name, beat in group.beats.items()},
            frozenset(groups), run, self._left(), self._replaced + sum(group.replaced for group in groups.values()),
            self.version, self.mirror.waiting, first, news, self.failure,
        )  # fmt: skip

    def _left(self) -> bool:
        for folder in (f(d) for d in list(self.mirror.directories) for f in (spool_of, outbox_of)):
            with contextlib.suppress(FileNotFoundError):
                if any(not name.startswith(".") for name in os.listdir(folder)):
                    return True
        return False

    # ---- processes -------------------------------------------------------------------------------------------------------

    def watch(self) -> None:
        """Start and end collectors as ordered, and replace those that die or hang."""
        orders = self._orders
        wanted = frozenset() if orders.end or self.failure else orders.collectors
        with self._lock:
            for index in wanted - self._groups.keys():
                self._groups[index] = self._new(index, len(wanted), orders.states.get(index))
            for index in self._groups.keys() - wanted:
                group = self._groups.pop(index)
                self._replaced += group.replaced
                group.tell(signal.SIGTERM)
                self._leaving += [(child, time.monotonic() + self.task.patience.stop) for child in group.children]
        for group in self._groups.values():
            try:
                group.watch()
            except CollectorError as err:
                self.failure = str(err)
                return
            with self._lock:
                self._news += group.news
                group.news.clear()
        for child, until in self._leaving:
            if not child.runs or time.monotonic() > until:
                child.kill()
        with self._lock:
            self._leaving = [(child, until) for child, until in self._leaving if child.runs]

    def _new(self, index: int, neighbours: int, state: bytes | None) -> Collectors:
        directory = collector_dir(self.run_dir, index)
        self._had = self._had | {index}
        outbox_of(directory).mkdir(parents=True, exist_ok=True)
        if state is not None:
            with temporary_file(directory) as tmp:
                tmp.write_bytes(state)
                os.replace(tmp, directory / STATE_FILE)
        if directory not in self.mirror.directories:
            self.mirror.directories.append(directory)
        return Collectors([self.task.collector(index, neighbours, self.control)], self.task.patience)

    # ---- the link --------------------------------------------------------------------------------------------------------

    def pump(self) -> Answer:
        """Deliver what collectors have written, fetch newer weights, and pass on whether to pause.

        What cannot be delivered or fetched now waits; collectors go on with the weights that they have.
        """
        answer = self.mirror.pump({})
        with contextlib.suppress(OSError):  # the mirror has told of a link that fails
            self._send_states()
            if answer.version > self.version:
                self._fetch(answer.version)
        answer = replace(answer, version=max(answer.version, self._given.version))  # the learner may have been started again
        if answer != self._given:
            with contextlib.suppress(OSError):  # the disk is full: the next orders
                write_soon(self.control / ORDERS, {"pause": answer.pause, "version": answer.version})
                self._given = answer
        return answer

    def _fetch(self, version: int) -> None:
        content = self.link.weights()
        if content is None:
            return
        self._policy.parent.mkdir(parents=True, exist_ok=True)
        with temporary_file(self._policy.parent) as tmp:
            tmp.write_bytes(content)
            os.replace(tmp, self._policy)
        first, self.version = self.version == 0, version
        if first:
            write_soon(self.run_dir / _LAUNCH, {"launch": self.launch})
            self._say_hello()

    def _say_hello(self) -> None:
        """Let collectors begin."""
        write_soon(self.control / HELLO, {"run_dir": str(self.run_dir.absolute()), "node": self.number})

    def _send_states(self) -> None:
        """Send exploration schedules, with which another node could go on."""
        parcels, times = [], {}
        for index in sorted(self._had):
            path = collector_dir(self.run_dir, index) / STATE_FILE
            with contextlib.suppress(FileNotFoundError):
                if (changed := path.stat().st_mtime_ns) != self._sent.get(path.parent.name):
                    parcels.append(Parcel("state", path.parent.name, data=path.read_bytes()))
                    times[path.parent.name] = changed
        if parcels:
            self.link.put(parcels, {})
            self._sent |= times

    def close(self) -> None:
        """End collectors at once, and release the directory."""
        for child in (*(c for group in self._groups.values() for c in group.children), *(c for c, _ in self._leaving)):
            child.kill()
        for lock in self._locks:
            lock.release()
        shutil.rmtree(self.control, ignore_errors=True)


def _claim(parent: Path) -> tuple[list[Path], list[RunLock]]:
    """A directory of its own for a node: the first below ``parent`` that no living node has; then others that dead nodes have left."""
    bases: list[Path] = []
    locks: list[RunLock] = []
    left = sum(1 for _ in parent.glob("*/")) if parent.is_dir() else 0
    for slot in itertools.count():
        if bases and slot >= left:
            return bases, locks
        lock = RunLock(parent / str(slot) / _LOCK)
        with contextlib.suppress(HeldError):
            lock.acquire()
            bases.append(parent / str(slot))
            locks.append(lock)
    raise AssertionError("a count has no end")


def _number(base: Path) -> int:
    """A number for the directory of a node, drawn once."""
    path = base / _NUMBER
    found = read_soon(path)
    if found is None:
        found = {"number": int.from_bytes(os.urandom(4), "big")}
        write_soon(path, found)
    return int(found["number"])
