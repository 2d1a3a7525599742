"""A node's side of the link: what its collectors have written goes to the learner, what the learner wants comes back."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from amago.distributed.link import Answer, Beats, Link, Parcel
from amago.run.roles.protocol import outbox_of, spool_of
from amago.store.files import TEMPORARY, is_stale

log = logging.getLogger(__name__)
BUNDLE_BYTES = 8 << 20
"""Most bytes in one call of `Link.put`, unless one file alone has more."""


class Mirror:
    """Delivers the files of some collectors.

    Args:
        link: to the learner's node.
        directories: of the collectors (`amago.run.roles.protocol.collector_dir`).
        share_disk: the learner's node can move the files; otherwise their content is sent.
    """

    def __init__(self, link: Link, directories: Sequence[Path], share_disk: bool = True):
        self.link, self.directories, self.share_disk = link, list(directories), share_disk
        self.answer = Answer()
        self.delivered = 0  # files with trajectories
        self._failing = False

    def pump(self, beats: Beats) -> Answer:
        """Deliver what is there. Files that cannot be delivered now stay where they are until the next call."""
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
            self._failing = False
        except OSError as err:
            if not self._failing:
                log.warning("what collectors have written cannot be delivered now, and waits on the disk: %s", err)
            self._failing = True
        return self.answer

    def _bundles(self) -> Iterator[list[tuple[Parcel, Path]]]:
        bundle: list[tuple[Parcel, Path]] = []
        size = 0
        for parcel, path, n in self._waiting():
            if bundle and size + n > BUNDLE_BYTES:
                yield bundle
                bundle, size = [], 0
            bundle.append((parcel, path))
            size += n
        if bundle:
            yield bundle

    def _waiting(self) -> Iterator[tuple[Parcel, Path, int]]:
        for directory in self.directories:
            for kind, folder in (("trajectories", spool_of(directory)), ("report", outbox_of(directory))):
                for name in sorted(_names(folder)):
                    path = folder / name
                    if name.startswith("."):
                        if name.startswith(TEMPORARY) and is_stale(folder, name):
                            path.unlink(missing_ok=True)
                        continue
                    with contextlib.suppress(FileNotFoundError):
                        size = path.stat().st_size
                        data = None if self.share_disk else path.read_bytes()
                        yield Parcel(kind, name, path if data is None else None, data), path, size  # type: ignore[arg-type]


def _names(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)
    except FileNotFoundError:
        return []
