"""The bus between a learner and its collectors: small immutable files below one fsspec URL, put at once or not at all."""

from __future__ import annotations

import contextlib
import json
import os
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from amago.store.files import TEMPORARY, replace_file

OUT, POLICY, ORDERS, BEATS, EXPLORATION = "out", "policy", "orders.json", "beat", "exploration.json"
"""Names on a bus: bundles of collectors, published policies, the launcher's orders, signs of life of nodes, exploration schedules."""
_OBJECT_STORES = {"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "oci", "oss", "memory"}  # where a put is atomic


def own_directory(path: Path, mend: bool = False) -> Path:
    """Make a directory that this user alone may write, or check that it is one.

    Args:
        mend: take the right to write from others, where the directory is this user's and within one of this user's.

    Raises:
        ValueError: it is a link, another user's, or others may write it: they could run code as this user.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileExistsError):
        path.mkdir(mode=0o700)
    info = os.lstat(path)
    if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.geteuid() or (info.st_mode & 0o022 and not mend):
        raise ValueError(
            f"{path} must be a directory of your own that nobody else may write (chmod 700), not a link or a directory of another user: "
            "whoever can write there decides what is trained on"
        )
    if mend:
        path.chmod(0o700)
    return path


class Bus:
    """The files of a bus, by names such as "out/WRITER/000000042-n15". Where a file cannot be reached, its methods raise `OSError`.

    Args:
        url: a directory, or a URL of fsspec ("s3://bucket/run", "sftp://host/path"). A directory is made with mode 0700.

    Raises:
        ValueError: the directory is not this user's, or there is no file system of this name.
    """

    def __init__(self, url: str):
        self.url = url
        self.local = "://" not in url or url.startswith("file://")
        if self.local:
            self.root = str(own_directory(Path(url.removeprefix("file://")).absolute()))
            return
        from fsspec.core import url_to_fs

        try:
            self._fs, self.root = url_to_fs(url, use_listings_cache=False)
        except (ImportError, ValueError) as err:
            raise ValueError(f"bus {url!r}: {err}") from err
        protocol = self._fs.protocol if isinstance(self._fs.protocol, str) else self._fs.protocol[0]
        self._puts_at_once = protocol in _OBJECT_STORES

    @contextlib.contextmanager
    def _reaching(self, name: str) -> Iterator[str]:
        """The full name; any exception of the storage client becomes an OSError."""
        try:
            yield f"{self.root}/{name}"
        except OSError:
            raise
        except Exception as err:  # each storage client has its own exceptions
            raise OSError(f"{self.url}: {type(err).__name__}: {err}") from err

    def put(self, name: str, content: bytes) -> None:
        """Write a file completely or not at all; it replaces one of the same name. After an `OSError` it may be there: put it again."""
        with self._reaching(name) as full:
            if self.local:
                Path(full).parent.mkdir(parents=True, exist_ok=True)
                replace_file(Path(full), lambda tmp: tmp.write_bytes(content))
            elif self._puts_at_once:
                self._fs.pipe_file(full, content)
            else:
                folder, _, base = full.rpartition("/")
                self._fs.makedirs(folder, exist_ok=True)
                part = f"{folder}/{TEMPORARY}{os.getpid()}-{base}"
                self._fs.pipe_file(part, content)
                self._fs.mv(part, full)

    def move_in(self, path: Path, name: str) -> None:
        """Put a file of this machine, which is gone afterwards."""
        if self.local:
            target = Path(self.root, name)
            target.parent.mkdir(parents=True, exist_ok=True)
            with contextlib.suppress(OSError):  # another disk
                os.replace(path, target)
                return
        self.put(name, path.read_bytes())
        path.unlink()

    def get(self, name: str) -> bytes:
        """The content of a file; `FileNotFoundError` if there is none."""
        with self._reaching(name) as full:
            return Path(full).read_bytes() if self.local else bytes(self._fs.cat_file(full))

    def names(self, folder: str) -> list[str]:
        """The names of a folder's files and folders, sorted; none if there is no folder."""
        with self._reaching(folder) as full:
            try:
                found = os.listdir(full) if self.local else self._fs.ls(full, detail=False, refresh=True)
            except FileNotFoundError:
                return []
            return sorted(n for n in (str(f).rstrip("/").rpartition("/")[2] for f in found) if n and not n.startswith("."))

    def delete(self, name: str) -> None:
        """Delete a file, if it is there."""
        with self._reaching(name) as full, contextlib.suppress(FileNotFoundError):
            os.unlink(full) if self.local else self._fs.rm_file(full)

    def put_json(self, name: str, value: Mapping[str, Any]) -> None:
        """`put` of a JSON object."""
        self.put(name, json.dumps(value).encode())

    def get_json(self, name: str) -> dict[str, Any] | None:
        """The JSON object in a file; None if there is none."""
        try:
            found = json.loads(self.get(name))
        except (FileNotFoundError, ValueError):
            return None
        return found if isinstance(found, dict) else None
