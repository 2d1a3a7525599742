"""The bus between a learner and its collectors: small immutable files below one fsspec URL, put at once or not at all."""

from __future__ import annotations

import contextlib
import json
import os
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from fsspec import AbstractFileSystem
from fsspec.core import url_to_fs

from amago.registry import require
from amago.store.files import TEMPORARY, sync, sync_directory

OUT, POLICY, BEATS = "out", "policy.pt", "beat"
"""Names on a bus: bundles of collectors, the newest policy, signs of life of nodes."""
_OBJECT_STORES = {"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "oci", "oss", "memory"}  # where a put is atomic
# hosts must be in known_hosts; a connection that is dead is noticed within a minute
_SSH = {"known_hosts": (), "connect_timeout": 60, "keepalive_interval": 15, "keepalive_count_max": 3}


def own_directory(path: Path) -> Path:
    """Make a directory that this user alone may write, or raise a `ValueError` where it is a link, another user's, or open to others."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileExistsError):
        path.mkdir(mode=0o700)
    info = os.lstat(path)
    if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.geteuid() or info.st_mode & 0o022:
        raise ValueError(
            f"{path} must be a directory of your own that nobody else may write (chmod 700), not a link or a directory of another user: "
            "whoever can write there decides what is trained on"
        )
    return path


class Bus:
    """The files of a bus, by names such as "out/WRITER/000000042-n15". Where a file cannot be reached, methods raise the exception of
    the storage client.

    Args:
        url: a directory, made with mode 0700, or a URL of fsspec ("s3://bucket/run", "sftp://host/path"); a `ValueError` where it cannot be
            reached, or an ImportError that names the extra.
    """

    def __init__(self, url: str):
        self.url, protocol = url, url.partition("://")[0] if "://" in url else "file"
        self.local = protocol == "file"
        self._puts_at_once = protocol in _OBJECT_STORES
        self._options = _SSH if protocol in ("sftp", "ssh") else {}
        if self.local:
            own_directory(Path(url.removeprefix("file://")).absolute())
        if self._options:
            require("sshfs", "sftp", f"bus {url!r}")
        self._found: tuple[AbstractFileSystem, str] | None = None
        try:
            self.names("")
        except Exception as err:  # each storage client has its own
            raise ValueError(f"the bus {url} cannot be reached: {type(err).__name__}: {err}") from err

    @contextlib.contextmanager
    def _reach(self, name: str) -> Iterator[tuple[AbstractFileSystem, str]]:
        """The file system, which several threads may use, and the full name in it. After an exception it connects again."""
        fs, root = self._found = self._found or url_to_fs(self.url, skip_instance_cache=True, **self._options)
        try:
            yield fs, f"{root}/{name}"
        except FileNotFoundError:
            raise
        except Exception:
            self._found = None
            raise

    def put(self, name: str, content: bytes | Mapping[str, Any]) -> None:
        """Write a file (a mapping as JSON) completely or not at all; it replaces one of the same name. After an exception it may be there:
        put it again."""
        content = content if isinstance(content, bytes) else json.dumps(content).encode()
        with self._reach(name) as (fs, full):
            folder, _, base = full.rpartition("/")
            if self._puts_at_once:
                fs.pipe_file(full, content)
                return
            fs.makedirs(folder, exist_ok=True)
            part = f"{folder}/{TEMPORARY}{base}"  # the same in each attempt: it replaces what one that was killed has left
            fs.pipe_file(part, content)
            if self.local:
                sync(Path(part))
                os.replace(part, full)
                sync_directory(Path(folder))
            else:
                fs.mv(part, full)

    def get(self, name: str) -> bytes:
        """The content of a file; `FileNotFoundError` if there is none."""
        with self._reach(name) as (fs, full):
            return bytes(fs.cat_file(full))

    def names(self, folder: str) -> list[str]:
        """The names of a folder's files and folders, sorted; none if there is no folder."""
        with contextlib.suppress(FileNotFoundError), self._reach(folder) as (fs, full):
            found = [str(f).rstrip("/").rpartition("/")[2] for f in fs.ls(full, detail=False, refresh=True)]
            return sorted(name for name in found if name and not name.startswith("."))
        return []

    def delete(self, name: str) -> None:
        """Delete a file, if it is there."""
        with contextlib.suppress(FileNotFoundError), self._reach(name) as (fs, full):
            fs.rm_file(full)

    def get_json(self, name: str) -> dict[str, Any] | None:
        """The JSON object in a file; None if there is none."""
        with contextlib.suppress(FileNotFoundError, ValueError):
            return dict(json.loads(self.get(name)))
        return None
