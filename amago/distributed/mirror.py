"""A node's side of the link: what its collectors have written goes to the learner, what the learner wants comes back."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

from amago.distributed.link import Answer, Beats, Link, Parcel
from amago.run.roles.protocol import OUTBOX, outbox_of, spool_of
from amago.store.files import TEMPORARY, is_stale

log = logging.getLogger(__name__)
BUNDLE_BYTES, BUNDLE_FILES = 8 << 20, 256
"""Most bytes in one call of `Link.put`, unless one file alone has more; and most files, each of which takes milliseconds to be made durable."""
MOST_WAITING_BYTES = 10e9
_COUNT_SECONDS = 1.0


class Mirror:
    """Delivers the files of some collectors.

    Args:
        link: to the learner's node.
        directories: of the collectors (`amago.run.roles.protocol.collector_dir`).
        share_disk: the learner's node can move the files; otherwise their content is sent.
        most_waiting: bytes that may wait while they cannot be delivered. Collectors pause beyond it. What they have in memory then comes on
            top: a phase of each.

    Attributes:
        answer: the last.
        delivered: files with trajectories, so far.
        waiting: bytes that could not be delivered when that was last tried.
    """

    def __init__(
        self, link: Link, directories: Sequence[Path], share_disk: bool = True, most_waiting: float = MOST_WAITING_BYTES
    ):
        self.link, self.directories, self.share_disk = link, list(directories), share_disk
        self.most_waiting = most_waiting
        self.answer = Answer()
        self.delivered = self.waiting = 0
        self._failing = self._full = False
        self._count_at = 0.0

    def pump(self, beats: Beats) -> Answer:
        """Deliver what is there. Files that cannot be delivered now stay where they are until the next call.

        Returns:
            the learner's answer; while nothing can be delivered, its last one, in which collectors pause if too much waits.
        """
        try:
            sent = False
            for bundle in self._bundles():
                self.answer = self.link.put([parcel for parcel, _ in bundle], beats)
                sent = True
                for parcel, path in bundle:
                    if parcel.data is not None:
                        path.unlink(missing_ok=True)
                    self.delivered += parcel.kind == "trajectories"
            if not sent:
                self.answer = self.link.put([], beats)
            if self._failing:
                log.warning("what has waited is delivered")
            self._failing = self._full = False
            self.waiting = 0
        except OSError as err:
            if not self._failing:
                log.warning("what collectors have written cannot be delivered now, and waits on the disk: %s", err)
                self._count_at = 0.0
            self._failing = True
            self._count()
            self.answer = dataclasses.replace(self.answer, pause=self.waiting >= self.most_waiting)
        return self.answer

    def _count(self) -> None:
        """Find out how much waits, now and then."""
        if (now := time.monotonic()) < self._count_at:
            return
        self.waiting = sum(size for _, size in self._files())
        self._count_at = time.monotonic() + max(_COUNT_SECONDS, 10 * (time.monotonic() - now))
        if self.waiting >= self.most_waiting and not self._full:
            self._full = True
            log.warning(
                "%.3g GB wait to be delivered, and %.3g may: collectors pause until they are",
                self.waiting / 1e9,
                self.most_waiting / 1e9,
            )

    def _bundles(self) -> Iterator[list[tuple[Parcel, Path]]]:
        bundle: list[tuple[Parcel, Path]] = []
        size = 0
        for parcel, path, n in self._waiting():
            if bundle and (size + n > BUNDLE_BYTES or len(bundle) == BUNDLE_FILES):
                yield bundle
                bundle, size = [], 0
            bundle.append((parcel, path))
            size += n
        if bundle:
            yield bundle

    def _waiting(self) -> Iterator[tuple[Parcel, Path, int]]:
        for path, size in self._files():
            kind: Literal["trajectories", "report"] = "report" if path.parent.name == OUTBOX else "trajectories"
            with contextlib.suppress(FileNotFoundError):
                data = None if self.share_disk else path.read_bytes()
                yield Parcel(kind, path.name, path if data is None else None, data), path, size

    def _files(self) -> Iterator[tuple[Path, int]]:
        """Complete files, and their sizes; what killed processes have left incomplete is deleted."""
        for directory in self.directories:
            for folder in (spool_of(directory), outbox_of(directory)):
                for name in sorted(_names(folder)):
                    path = folder / name
                    if name.startswith("."):
                        if name.startswith(TEMPORARY) and is_stale(folder, name):
                            path.unlink(missing_ok=True)
                        continue
                    with contextlib.suppress(FileNotFoundError):
                        yield path, path.stat().st_size


def _names(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)
    except FileNotFoundError:
        return []
