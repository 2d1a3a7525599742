"""What a buffer keeps about its files for the next process: the order in which they were added, and their index."""

from __future__ import annotations

import contextlib
import logging
import os
from pathlib import Path

from amago.store import index as ix
from amago.store import index_cache
from amago.store.index import Entry

logger = logging.getLogger(__name__)

Stamps = dict[tuple[str, str], tuple[int, int]]
"""{(partition, name): (size, mtime_ns)} of the files that were compared with their checksums before, in the order of their addition."""

WORTH_SAVING = 64
"""The index of fewer new files is not saved: checking that many headers takes some 10 ms."""


class Record:
    """The journal of the order (`amago.store.index.Journal`), and the saved index (`amago.store.index_cache`) of a buffer.

    Args:
        root: the buffer's directory.

    Attributes:
        looked_into: files that were opened because the saved index lacks them.
    """

    def __init__(self, root: Path) -> None:
        self._root, self._journal = root, ix.Journal(root)
        self._incomplete = False  # the journal, since writing it failed
        self.looked_into = 0

    def load(self) -> Stamps:
        """The recorded order."""
        return self._journal.load()

    def add(self, live: list[Entry], new: list[Entry], recorded: Stamps) -> None:
        """Record new files. A failure is logged, and the next call tries again.

        Args:
            live: all files, in their order.
            new: those among them that are new to this process.
            recorded: what the journal held of these.
        """
        fresh = [e for e in new if (e.partition, e.name) not in recorded]
        touched = any(recorded.get((e.partition, e.name), (e.size, e.mtime_ns)) != (e.size, e.mtime_ns) for e in new)
        try:
            if touched or self._incomplete or self._journal.lines + len(fresh) > 2 * len(live) + 1024:
                self._journal.rewrite(live)
            elif fresh:
                self._journal.append(fresh)
            self._incomplete = False
        except OSError as err:
            self._incomplete = True
            logger.warning("the order of the files in %s could not be recorded: %s", self._root, err)

    def replace(self, live: list[Entry]) -> None:
        """Record another order of the files."""
        self._journal.rewrite(live)

    def save_index(self, live: list[Entry]) -> None:
        """Save the index when the saved one lacks a quarter of the files, which took longer to check than saving takes."""
        if self.looked_into < WORTH_SAVING or 4 * self.looked_into < len(live):
            return
        try:
            index_cache.save(self._root, live)
        except OSError as err:
            logger.warning("the index of %s could not be saved; the next process will open each file: %s", self._root, err)
        self.looked_into = 0

    def forget_deleted(self, live: list[Entry]) -> None:
        """Keep only what concerns the remaining files."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._root / index_cache.NAME)
        if not live:
            self._journal.delete()
            return
        self._journal.rewrite(live)
        self.looked_into = len(live)
        self.save_index(live)
