"""A cache of the index: a buffer that is opened again is indexed without opening each of its files.

The file is eight hexadecimal digits, the crc32 of all that follows, a line break, and a safetensors file. An entry is used only
if the journal has recorded the file's size and time stamp as checked and the file still has them. A cache that is damaged or
inconsistent is not used at all.
"""

from __future__ import annotations

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
from amago.store.files import open_regular, replace_file
from amago.store.index import NPZ, SEGMENT, Entry, Schemas

logger = logging.getLogger(__name__)

NAME = "index.cache"
VERSION = 1
_MAX_BYTES = 1 << 32
_COLUMNS = ("kind", "size", "mtime_ns", "sequence", "n", "writer", "schema", "names")
"""One int64 a file; the last three are indices into lists of values that files share."""

Key = tuple[str, str]


class IndexCache:
    """The saved entries of a buffer.

    Args:
        root: the buffer's directory.
        schemas: the schemas and lists of names that all entries of the store share.
    """

    def __init__(self, root: Path, schemas: Schemas):
        self._root = root
        self._row: dict[Key, int] = {}
        try:
            self._load(schemas)
        except FileNotFoundError:
            return
        except Exception as err:  # without the cache, each file is opened
            logger.warning("%s is not used: %r", root / NAME, err)
            self._row = {}

    def __len__(self) -> int:
        return len(self._row)

    def _load(self, schemas: Schemas) -> None:
        fd, info = open_regular(self._root / NAME)
        with open(fd, "rb") as file:
            if info.st_size > _MAX_BYTES:
                raise BadFileError(f"{info.st_size} bytes are more than the {_MAX_BYTES} that it may have")
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
        """Refuse a cache with a row of any trajectory outside of its file.

        Raises:
            BadFileError: naming what is wrong.
        """
        kind, size, _, _, n, writer, schema, names = columns
        ep, files, trajectories = self._ep_offsets, len(n), first[-1]
        _require(len(about["files"]) == files == len(places), "the numbers of files differ")
        _require((n >= 1).all(), "a file has no trajectories")
        _require(len(ep) == trajectories + files, "ep_offsets has the wrong length")
        _require(len(self._start_time) == len(self._env_id) == trajectories, "start_time or env_id has the wrong length")
        _require(np.isin(kind, (SEGMENT, NPZ)).all(), "a file is of an unknown kind")
        for label, indices, values in (
            ("writer", writer, self._writers), ("schema", schema, self._schemas), ("list of names", names, self._names),
        ):  # fmt: skip
            _require(_within(indices, len(values)), f"a {label} does not exist")
        begin = first[:-1] + np.arange(files)  # where the offsets of each file begin in ``ep``
        steps = np.delete(np.diff(ep), begin[1:] - 1)  # without the differences between one file and the next
        _require((ep[begin] == 0).all() and (steps >= 1).all(), "ep_offsets do not rise from 0")
        _require((self._start_time >= 0).all(), "start_time is negative")
        environments = np.repeat(np.array([len(x) for x in self._names])[names], n)
        _require(_within(self._env_id, environments), "env_id points outside of the list of names")
        total = ep[begin + n]
        for s, known in enumerate(self._schemas):
            mine = schema == s
            for i, part in enumerate(known.parts):
                at, nbytes = places[mine, i], part.total_rows(n[mine], total[mine]) * part.row_bytes
                inside = (at >= 0) & (nbytes >= 0) & (at + nbytes <= size[mine])
                _require(inside.all(), f"{part.name!r:.100} would lie outside of its file")

    def entry(self, partition: str, name: str, checked: tuple[int, int] | None) -> Entry | None:
        """The entry of a file; None if it is unknown or has been written to since.

        Args:
            checked: the file's (size, mtime_ns) when its data was compared with its checksums.
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
    """Replace the cache. Only segments and uncompressed npz files are saved."""
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
    content = b"%08x\n" % zlib.crc32(data) + data
    replace_file(root / NAME, lambda path: path.write_bytes(content))


def _require(right: Any, problem: str) -> None:
    if not right:
        raise BadFileError(problem)


def _within(indices: sc.Array, stop: Any) -> bool:
    return bool(((indices >= 0) & (indices < stop)).all())


def _describe(schema: sc.Schema) -> dict[str, Any]:
    return {"spaces": schema.spaces, "parts": [(p.name, sc.CODE_OF[p.dtype], p.row) for p in schema.parts]}


def _schema(described: dict[str, Any], schemas: Schemas) -> sc.Schema:
    """The schema of a description, checked as that of a file."""
    parts = sc.parts_of(
        ((name, sc.CODES[code], tuple(map(int, row))) for name, code, row in described["parts"]), described["spaces"]
    )
    return schemas.get(parts, described["spaces"])
