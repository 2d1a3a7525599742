"""The quarantine of a buffer: damaged files and files that are no trajectory files. Nothing in it is sampled."""

from __future__ import annotations

import re
from pathlib import Path

from amago.store import index as ix
from amago.store import npz, segment
from amago.store.errors import BadFileError
from amago.store.files import move_aside

_NAME = re.compile(r"([0-9]+-)?(fifo|protected)-(?P<name>.*)", re.DOTALL)
_EXPLAINED = 20
"""Files of earlier processes that are checked again for the reason."""


def reason_of(err: Exception) -> str:
    """Why a file is refused, in words."""
    return str(err) if isinstance(err, BadFileError) else f"unexpected {err!r:.200}"


class Quarantine:
    """``{root}/quarantine``, whose files are named ``{partition}-{name}``, preceded by a number where that name is taken.

    Args:
        root: the buffer's directory.
    """

    NAME = "quarantine"

    def __init__(self, root: Path) -> None:
        self._root, self._directory = root, root / self.NAME
        self._reasons: dict[str, str] = {}

    def add(self, partition: str, name: str, reason: str) -> Path:
        """Move a file here; returns its new path.

        Raises:
            OSError: it cannot be moved.
        """
        path = move_aside(self._root / partition / name, self._directory, f"{partition}-")
        self._reasons[path.name] = reason
        return path

    def reasons(self) -> dict[str, str]:
        """{path: why it is here} of all files. Those that another process has moved here are checked again, the first 20 of them."""
        names = sorted(p.name for p in self._files())
        for name in [n for n in names if n not in self._reasons][:_EXPLAINED]:
            self._reasons[name] = self._check(name)
        return {str(self._directory / n): self._reasons.get(n, "an earlier process moved it to quarantine") for n in names}

    def _check(self, name: str) -> str:
        try:
            ix.load(str(self._directory), self.NAME, name, ix.Schemas(), lambda size, mtime_ns: False, False)
        except Exception as err:
            return reason_of(err)
        return "an earlier process could not read it, but it can be read now: move it back, without the prefix of its name"

    def clear(self) -> None:
        """Delete the files that are named as a `amago.store.TrajectoryWriter` names them; others stay."""
        for path in self._files():
            match = _NAME.fullmatch(path.name)
            if match and any(pattern.fullmatch(match["name"]) for pattern in (segment.NAME, npz.NAME)):
                path.unlink(missing_ok=True)
        if self._exists() and not any(self._directory.iterdir()):
            self._directory.rmdir()

    def _files(self) -> list[Path]:
        return [p for p in self._directory.iterdir() if p.is_symlink() or p.is_file()] if self._exists() else []

    def _exists(self) -> bool:
        return self._directory.is_dir() and not self._directory.is_symlink()
