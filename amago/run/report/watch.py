"""All runs below a directory, followed while they are written: what `amago watch` shows."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from amago.run.report.content import Content, Section
from amago.run.report.figures import Choice
from amago.run.report.follow import METRICS_FILE, Follower
from amago.run.report.runs import Run, group_runs, labelled, read_settings, walk
from amago.run.report.sections import SECTIONS
from amago.run.report.status import status_of

log = logging.getLogger(__name__)
SCAN_SECONDS = 2.0
_SLICE = 0.03
_PAUSE = 0.005


class Watcher:
    """Follows the runs at and below some directories, in a thread of its own.

    Runs may appear, grow, be killed, resumed, renamed or deleted meanwhile. Nothing is written. Long logs are first sampled, then read
    as a whole, at a low priority.

    Args:
        roots: directories.
        seconds: between two looks at the disk.
    """

    def __init__(self, roots: Sequence[Path], seconds: float = SCAN_SECONDS):
        self.roots, self.seconds = roots, seconds
        self._followers: dict[tuple[int, int], Follower] = {}
        self._settings: dict[Path, tuple[Any, Any]] = {}
        self._runs: list[Run] = []
        self._unreadable: list[str] = []
        self._version = 0
        self._states: list[str] = []
        self._lock = threading.Lock()  # held to change or to draw what has been read
        self._asking = 0
        self._trouble = ""
        self._first, self._stop = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._work, name="amago-watch", daemon=True)

    def start(self) -> None:
        """Begin to read."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread."""
        self._stop.set()
        self._thread.join()

    # ---- reading -----------------------------------------------------------------------------------------------------------

    def _work(self) -> None:
        while not self._stop.is_set():
            began = time.monotonic()
            try:
                self.look()
                self._trouble = ""
            except Exception as err:  # the page goes on with what it has, and says so
                log.exception("looking for runs failed")
                self._trouble = f"; looking for runs failed: {err!r}"
            self._first.set()
            _yield_to_training()
            while time.monotonic() - began < self.seconds and not self._stop.is_set():
                if self._asking or not self._read_on():
                    self._stop.wait(0.05)
                else:
                    time.sleep(_PAUSE)

    def look(self) -> None:
        """Look for new runs, and read what was added to those that are known."""
        paths = [path for root in self.roots for path in walk(root)]
        followers: dict[tuple[int, int], Follower] = {}
        runs, problems, changed = [], [], False
        for path in dict.fromkeys(paths):
            file = path / METRICS_FILE
            try:
                info = file.stat()
                key = info.st_dev, info.st_ino
                follower = self._followers.get(key) or Follower(file)
                follower.path = file  # a run that was renamed goes on
                with self._lock:
                    changed |= follower.refresh()
                    # a second name of the same file would be the same run twice
                    if key not in followers:
                        followers[key] = follower
                        runs.append(self._with_settings(path, follower))
            except OSError as err:  # deleted or renamed in this moment, or not readable
                problems.append(f"{path}: {err.strerror or err}")
        with self._lock:
            runs = labelled(runs)
            states = [status_of(run).state for run in runs]
            same = [_shape(r) for r in runs] == [_shape(r) for r in self._runs] and problems == self._unreadable
            self._followers, self._runs, self._unreadable = followers, runs, problems
            if changed or not same or states != self._states:
                self._version += 1
            self._states = states

    def _with_settings(self, path: Path, follower: Follower) -> Run:
        """A run, with settings that are read again only when they have changed."""
        try:
            info = (path / "settings.json").stat()
            key: Any = info.st_mtime_ns, info.st_size, info.st_ino
        except OSError:
            key = None
        known = self._settings.get(path)
        if known is None or known[0] != key:
            known = self._settings[path] = key, read_settings(path)
        settings, starts, problems = known[1]
        return Run(path, follower.log, settings, starts, [*follower.problems, *problems], follower.changed)

    def _read_on(self) -> bool:
        """Read a bit more of the long logs that have only been sampled; whether there are any."""
        for follower in self._followers.values():
            if follower.sampled:
                with self._lock:
                    try:
                        more = follower.advance(_SLICE)
                    except OSError:
                        continue  # gone: the next look drops it
                    if not more:
                        self._runs = [replace(r, log=follower.log) if r.path == follower.path.parent else r for r in self._runs]
                        self._version += 1
                return True
        return False

    # ---- asking ------------------------------------------------------------------------------------------------------------

    @contextmanager
    def _asked(self) -> Any:
        self._asking += 1
        try:
            self._first.wait()
            with self._lock:
                yield
        finally:
            self._asking -= 1

    def state(self) -> dict[str, Any]:
        """{"version": rises when anything has changed, "title", "text": in words}."""
        with self._asked():
            counts = {state: self._states.count(state) for state in dict.fromkeys(self._states)}
            sizes = [(f.size, f.share) for f in self._followers.values()]
            read = sum(size * share for size, share in sizes) / max(1, sum(size for size, _ in sizes))
            words = [f"{n} {state}" for state, n in counts.items()] or ["no run yet"]
            if any(f.sampled for f in self._followers.values()):
                words.append(f"{100 * read:.0f}% of the logs read, the rest sampled")
            running = counts.get("running", 0)
            title = f"{running} of {len(self._states)} runs running"
            return {
                "version": self._version,
                "title": title,
                "text": f"{', '.join(words)}; {time.strftime('%H:%M:%S')}{self._trouble}",
            }

    def section(self, key: str, choice: Choice) -> Section:
        """A section of the page, as it is now.

        Raises:
            KeyError: there is no such section.
        """
        make = SECTIONS[key]
        with self._asked():
            section = make(Content(group_runs(self._runs), [choice], live=True))
            if key == "runs":
                section.missing += self._unreadable
            return section


def _yield_to_training() -> None:
    """Lower the priority of this thread alone: runs on the same machine have more to do with its cores."""
    with suppress(OSError, AttributeError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 15)


def _shape(run: Run) -> Any:
    return run.path, run.label, run.settings, len(run.starts), list(run.problems)
