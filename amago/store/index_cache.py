"""What is known of many files, in one file: a buffer that is opened again is indexed without opening each.

The file is eight hexadecimal digits, the crc32 of all that follows, a line break, and a safetensors file. It is only ever a shortcut: an entry counts
where the journal has recorded the file's size and time stamp as checked and the file still has them; a cache that is damaged, or says what
cannot be, is not used at all.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import stat
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy

from amago.store import schema as sc
from amago.store.errors import BadFileError
from amago.store.files import open_regular, temporary
from amago.store.index import NPZ, SEGMENT, Entry, Schemas

logger = logging.getLogger(__name__)

NAME = "index.cache"
VERSION = 1
_MAX_BYTES = 1 << 32
_COLUMNS = ("kind", "size", "mtime_ns", "sequence", "n", "writer", "schema", "names")
"""One int64 a file; the last three are indices into lists of what files share."""

Key = tuple[str, str]


class IndexCache:
    """The entries of a buffer as they were when they were saved.

    Args:
        root: the buffer's directory.
        schemas: where schemas and lists of names are shared with the rest of the store.
    """

    def __init__(self, root: Path, schemas: Schemas):
        self._root = root
        self._row: dict[Key, int] = {}
        try:
            self._load(schemas)
        except FileNotFoundError:
            return
        except Exception as err:  # whatever is wrong with a shortcut, there is the long way
            logger.warning("%s is not used: %r", root / NAME, err)
            self._row = {}

    def __len__(self) -> int:
        return len(self._row)

    def _load(self, schemas: Schemas) -> None:
        fd, info = open_regular(self._root / NAME)
        with open(fd, "rb") as file:
            if info.st_size > _MAX_BYTES:
                raise BadFileError(f"{info.st_size} bytes are too many")
            crc, data = file.readline(16), file.read()
        if int(crc, 16) != zlib.crc32(data):
            raise BadFileError("its checksum is wrong")
        arrays = safetensors.numpy.load(data)
        about = json.loads(arrays["about"].tobytes())
        if about["version"] != VERSION:
            raise BadFileError(f"version {about['version']!r:.50} is not known")
        columns = arrays["columns"]
        self._rows = list(zip(*columns.tolist(), strict=True))
        self._schemas = [_schema(described, schemas) for described in about["schemas"]]
        self._names = [schemas.share(tuple(names)) for names in about["env_names"]]
        self._writers = about["writers"]
        self._ep_offsets, self._start_time, self._env_id = arrays["ep_offsets"], arrays["start_time"], arrays["env_id"]
        first = np.concatenate(([0], np.cumsum(columns[_COLUMNS.index("n")])))
        self._check(columns, arrays["places"], first, about)
        self._first, self._places = first.tolist(), list(map(tuple, arrays["places"].tolist()))
        self._row = {(partition, name): i for i, (partition, name) in enumerate(about["files"])}

    def _check(self, columns: sc.Array, places: sc.Array, first: sc.Array, about: dict[str, Any]) -> None:
        """Raise BadFileError unless every row of every trajectory lies within its file."""
        kind, size, _, _, n, writer, schema, names = columns
        ep, at = self._ep_offsets, first[:-1] + np.arange(len(n))  # where the offsets of each file begin
        right = len(about["files"]) == len(n) and len(places) == len(n) and (n >= 1).all()
        right = right and len(ep) == first[-1] + len(n) and len(self._start_time) == len(self._env_id) == first[-1]
        right = right and np.isin(kind, (SEGMENT, NPZ)).all() and all(
            ((x >= 0) & (x < len(of))).all()
            for x, of in ((writer, self._writers), (schema, self._schemas), (names, self._names))
        )  # fmt: skip
        right = (
            right and (ep[at] == 0).all() and (np.delete(np.diff(ep), at[1:] - 1) >= 1).all() and (self._start_time >= 0).all()
        )
        envs = np.repeat(np.array([len(x) for x in self._names])[names], n) if right else None
        if not right or not ((self._env_id >= 0) & (self._env_id < envs)).all():
            raise BadFileError("its numbers contradict each other")
        total = ep[at + n]
        for s, known in enumerate(self._schemas):
            mine = schema == s
            for i, part in enumerate(known.parts):
                rows = part.total_rows(n[mine], total[mine])
                begin = places[mine, i]
                if (begin < 0).any() or (begin + rows * part.row_bytes > size[mine]).any() or (rows * part.row_bytes < 0).any():
                    raise BadFileError(f"{part.name!r:.100} would lie outside of its file")

    def entry(self, partition: str, name: str, checked: tuple[int, int] | None) -> Entry | None:
        """The entry of a file, if it is known here and has not been written to since.

        Args:
            checked: its (size, mtime_ns) when its data was compared with its checksums.
        """
        row = self._row.get((partition, name))
        if row is None or checked is None:
            return None
        kind, size, mtime_ns, sequence, n, writer, schema, names = self._rows[row]
        info = os.lstat(f"{self._root}/{partition}/{name}")
        if not (info.st_size, info.st_mtime_ns) == (size, mtime_ns) == checked or not stat.S_ISREG(info.st_mode):
            return None
        entry, begin = Entry(partition, name, info), self._first[row]
        entry.kind, entry.n, entry.sequence, entry.writer = kind, n, sequence, self._writers[writer]
        entry.schema, entry.env_names = self._schemas[schema], self._names[names]
        entry.places = self._places[row][: len(entry.schema.parts)]
        entry.ep_offsets = self._ep_offsets[begin + row : begin + row + n + 1]
        entry.start_time, entry.env_id = self._start_time[begin : begin + n], self._env_id[begin : begin + n]
        return entry


def save(root: Path, entries: Sequence[Entry]) -> None:
    """Replace the cache, at once or not at all; files of other kinds than segments and plain npz are left out."""
    entries = [e for e in entries if e.kind in (SEGMENT, NPZ)]
    schemas = {x: i for i, x in enumerate(dict.fromkeys(e.schema for e in entries))}
    names = {x: i for i, x in enumerate(dict.fromkeys(e.env_names for e in entries))}
    writers = {x: i for i, x in enumerate(dict.fromkeys(e.writer for e in entries))}
    about = {
        "version": VERSION,
        "files": [(e.partition, e.name) for e in entries],
        "schemas": [_describe(s) for s in schemas],
        "env_names": list(names),
        "writers": list(writers),
    }
    table = [
        (e.kind, e.size, e.mtime_ns, e.sequence, e.n, writers[e.writer], schemas[e.schema], names[e.env_names]) for e in entries
    ]
    places = np.zeros((len(entries), max((len(s.parts) for s in schemas), default=0)), np.int64)
    for row, e in zip(places, entries):
        row[: len(e.places)] = e.places
    data = safetensors.numpy.save({
        "about": np.frombuffer(json.dumps(about).encode(), np.uint8),
        "columns": np.array(table, np.int64).reshape(-1, len(_COLUMNS)).T.copy(),
        "places": places,
        "ep_offsets": np.concatenate([np.zeros(0, np.int64), *(e.ep_offsets for e in entries)]),
        "start_time": np.concatenate([np.zeros(0, np.int64), *(e.start_time for e in entries)]),
        "env_id": np.concatenate([np.zeros(0, np.int32), *(e.env_id for e in entries)]),
    })  # fmt: skip
    source = temporary(root)
    try:
        with open(os.open(source, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644), "wb") as file:
            file.write(b"%08x\n" % zlib.crc32(data))
            file.write(data)
        os.replace(source, root / NAME)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(source)
        raise


def _describe(schema: sc.Schema) -> dict[str, Any]:
    return {"spaces": schema.spaces, "parts": [(p.name, sc.CODE_OF[p.dtype], p.row) for p in schema.parts]}


def _schema(described: dict[str, Any], schemas: Schemas) -> sc.Schema:
    parts = sc.parts_of(
        ((name, sc.CODES[code], tuple(map(int, row))) for name, code, row in described["parts"]), described["spaces"]
    )
    return schemas.get(parts, described["spaces"])
