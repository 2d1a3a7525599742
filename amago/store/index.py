"""The index entry of each file, and the journal of the order in which files were added."""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np

from amago.store import legacy, npz, original, segment
from amago.store import schema as sc
from amago.store.errors import BadFileError, EvictedError
from amago.store.files import open_regular, replace_file, write_all

logger = logging.getLogger(__name__)

TICK_NS = 12_000_000
"""Longer than the resolution of file time stamps, 10 ms at worst."""

SEGMENT, NPZ, PACKED, TRAJ, ORIGINAL = range(5)
"""Kinds of files; those after `PACKED` are of other systems, and are read by `read_foreign`."""
_INDEX = ("ep_offsets", "start_time", "env_id")


class Entry:
    """A file that has been checked, with the position of every field: reading a slice does not need the header.

    Attributes:
        size, mtime_ns: the file's, when its data was compared with its checksums.
        places: for each part of the schema, the offset of its rows; for PACKED (at, packed, skip) as in `npz.Member`.
        ep_offsets, start_time, env_id: as in `amago.store.schema`.
        gone: the file was deleted, so that its trajectories must not be drawn any more.
    """

    __slots__ = (
        "env_id", "env_names", "ep_offsets", "gone", "kind", "mtime_ns", "n", "name",
        "partition", "places", "schema", "sequence", "size", "start_time", "writer",
    )  # fmt: skip

    kind: int
    schema: sc.Schema
    places: tuple[Any, ...]
    n: int
    ep_offsets: sc.Array
    start_time: sc.Array
    env_id: sc.Array
    env_names: tuple[str, ...]
    writer: str
    sequence: int

    def __init__(self, partition: str, name: str, info: os.stat_result) -> None:
        self.partition, self.name, self.size, self.mtime_ns, self.gone = partition, name, info.st_size, info.st_mtime_ns, False

    @property
    def total(self) -> int:
        """Transitions in the file."""
        return int(self.ep_offsets[-1])


class Schemas:
    """One shared object for equal schemas, and one for equal lists of environment names."""

    def __init__(self) -> None:
        self._known: dict[sc.Schema, sc.Schema] = {}
        self._names: dict[tuple[str, ...], tuple[str, ...]] = {}

    def get(self, parts: tuple[sc.Part, ...], spaces: Any) -> sc.Schema:
        """The schema of these fields and recorded spaces; a new one is checked.

        Raises:
            BadFileError: the fields do not fit the spaces.
        """
        if not isinstance(spaces, str):
            raise BadFileError("the recorded spaces are no text")
        schema = sc.Schema(parts, spaces)
        if schema not in self._known:
            sc.check_spaces(spaces, parts)
            self._known[schema] = schema
        return self._known[schema]

    def share(self, names: tuple[str, ...]) -> tuple[str, ...]:
        """The shared tuple that equals ``names``."""
        return self._names.setdefault(names, names)


def load(
    directory: str, partition: str, name: str, schemas: Schemas, trusted: Callable[[int, int], bool], allow_pickle: bool
) -> Entry:
    """Check a file and create its `Entry`.

    Args:
        trusted: (size, mtime_ns) -> whether the data was compared with its checksums before, so that the header is enough.

    Raises:
        BadFileError: the file must not be used; the message says why.
        OSError: it cannot be opened or read (FileNotFoundError: it is gone).
    """
    path = os.path.join(directory, name)
    fd, info = open_regular(path)
    try:
        age = time.time_ns() - info.st_mtime_ns
        if 0 <= age < TICK_NS:  # an immediate write must not get the same time stamp
            time.sleep((TICK_NS - age) / 1e9)
            info = os.fstat(fd)
        entry = Entry(partition, name, info)
        if name.endswith(".safetensors"):
            _load_segment(entry, fd, schemas, trusted(info.st_size, info.st_mtime_ns))
        elif name.endswith(".npz"):
            _load_npz(entry, fd, schemas, trusted(info.st_size, info.st_mtime_ns))
        elif name.endswith(legacy.SUFFIX):
            _load_traj(entry, path, schemas, allow_pickle)
        else:
            raise BadFileError("neither .safetensors nor .npz: not a trajectory file")
    finally:
        os.close(fd)
    return entry


_SAME = ("kind", "n", "total", "places", "env_names")


def recheck(root: str, entry: Entry) -> None:
    """Check again a file that was written to since; if it holds the same trajectories, update its time stamp in ``entry``.

    Raises:
        BadFileError: it is damaged.
        EvictedError: it is gone, cannot be read now, or holds other trajectories.
    """
    where = f"{entry.partition}/{entry.name}"
    if entry.kind == TRAJ:
        raise BadFileError("it was written to, and a pickle has no checksums to compare its content with")
    try:
        directory = os.path.join(root, entry.partition)
        now = load(directory, entry.partition, entry.name, Schemas(), lambda *stamp: False, False)
    except FileNotFoundError as err:
        raise EvictedError(f"{where} has been deleted from the buffer; draw another index") from err
    except OSError as err:
        raise EvictedError(f"{where} cannot be read now: {err}") from err
    same = all(getattr(now, name) == getattr(entry, name) for name in _SAME)
    same = same and (
        entry.kind == ORIGINAL or now.schema == entry.schema
    )  # that of the original's files is given, not recorded
    if not (same and all(np.array_equal(getattr(now, name), getattr(entry, name)) for name in _INDEX)):
        raise EvictedError(f"{where} has been replaced by another file; draw another index")
    entry.size, entry.mtime_ns = now.size, now.mtime_ns


def _load_segment(entry: Entry, fd: int, schemas: Schemas, trusted: bool) -> None:
    parsed = segment.parse(fd, entry.size)
    match = segment.NAME.fullmatch(entry.name)
    if match is None or int(match["n"]) != parsed.n:
        raise BadFileError(f"the name does not say that it holds {parsed.n} trajectories")
    if not trusted:
        segment.check_data(fd, parsed)
    ep, start, env_id = (segment.load_field(fd, parsed, name) for name in _INDEX)
    _fill(entry, SEGMENT, parsed.n, parsed.total, (ep, start, env_id), parsed.env_names, schemas)
    entry.schema = schemas.get(parsed.parts, parsed.spaces)
    entry.places, entry.writer, entry.sequence = parsed.offsets, parsed.writer, parsed.sequence


def _load_npz(entry: Entry, fd: int, schemas: Schemas, trusted: bool) -> None:
    found = npz.members(fd, entry.size)
    if original.is_original(found):
        _load_original(entry, fd, found, schemas, trusted)
        return
    metadata = npz.read_metadata(fd, found)
    del found["metadata"]
    parts, n, total = sc.fit({name: (m.dtype, m.shape) for name, m in found.items()}, metadata["spaces"])
    if n != 1:
        raise BadFileError(f"an archive of {n} trajectories; there is one in each")
    if not trusted:
        for member in found.values():
            npz.check_data(fd, member)
    ep, start, env_id = (npz.load_field(fd, found[name]) for name in _INDEX)
    packed = any(m.compressed for m in found.values())
    if packed and not all(m.compressed for m in found.values()):
        raise BadFileError("some arrays are compressed and some are not")
    _fill(entry, PACKED if packed else NPZ, n, total, (ep, start, env_id), metadata["env_names"], schemas)
    entry.schema = schemas.get(parts, metadata["spaces"])
    ordered = [found[p.name] for p in parts]
    entry.places = tuple((m.at, m.packed, m.skip) if packed else m.at + m.skip for m in ordered)
    entry.writer, entry.sequence = metadata["writer"], metadata["sequence"]


def _load_original(entry: Entry, fd: int, found: dict[str, npz.Member], schemas: Schemas, trusted: bool) -> None:
    total, start_time = original.check(fd, found, trusted)
    env_name, entry.writer, entry.sequence = original.of_name(entry.name)
    index = np.array([0, total]), np.array([start_time]), np.zeros(1, np.int32)
    _fill(entry, ORIGINAL, 1, total, index, [env_name], schemas)
    entry.places = (found,)
    original.Spaces.unknown(found, schemas).give(entry)


def _load_traj(entry: Entry, path: str, schemas: Schemas, allow_pickle: bool) -> None:
    traj, spec = legacy.read_traj(path, allow_pickle=allow_pickle)
    fields, names = sc.pack([traj])
    parts, n, total = sc.fit({k: (a.dtype, a.shape) for k, a in fields.items()})
    _fill(entry, TRAJ, n, total, (fields["ep_offsets"], fields["start_time"], fields["env_id"]), names, schemas)
    spaces = gym.spaces.Dict({k: original.widest_box(a.dtype, a.shape[1:]) for k, a in traj.obs.items()})
    entry.schema = schemas.get(parts, sc.spaces_text(spaces, spec.space))
    entry.places, entry.writer, entry.sequence = (), "", 0


def _fill(
    entry: Entry, kind: int, n: int, total: int, index: tuple[sc.Array, sc.Array, sc.Array], env_names: Any, schemas: Schemas
) -> None:
    entry.ep_offsets, entry.start_time, entry.env_id = index
    entry.kind, entry.n = kind, n
    entry.env_names = schemas.share(sc.check_index(index[0], index[1], index[2], total, env_names))


def read_foreign(fd: int, entry: Entry, start: int, buffers: Any) -> None:
    """Fill `amago.store.view.SliceBuffers` from a file of another system."""
    if entry.kind == ORIGINAL:
        original.read(fd, entry, start, buffers)
    else:
        _read_traj(fd, entry, start, buffers)


def _read_traj(fd: int, entry: Entry, start: int, buffers: Any) -> None:
    """From a ``.traj`` file; the whole file is unpickled each time."""
    whole, _ = legacy.read_open_traj(fd)
    if len(whole) != entry.total:
        raise BadFileError(f"{entry.name} has changed: {len(whole)} transitions instead of {entry.total}")
    piece = whole.slice(start, start + buffers.steps)
    for slot, out in zip(buffers.slots, buffers.arrays):
        if slot.part < 0:
            out[...] = slot.default
        elif slot.before >= 0:
            first = getattr(piece, entry.schema.parts[slot.before].name)
            out[0], out[1:] = 0 if first is None else first, getattr(piece, slot.key)
        else:
            out[...] = getattr(piece, slot.group)[slot.key] if slot.group else getattr(piece, slot.key)


class Journal:
    """A record of files in the order in which they were added: a line for each, with a checksum.

    A damaged line is skipped. Its file is then checked again and comes last.

    Args:
        root: the buffer's directory.
    """

    NAME = "order.journal"
    _MAX_LINE = 4096

    def __init__(self, root: Path) -> None:
        self._root, self._path = root, root / self.NAME
        self.lines = 0

    def load(self) -> dict[tuple[str, str], tuple[int, int]]:
        """(partition, name) -> (size, mtime_ns), in order."""
        found: dict[tuple[str, str], tuple[int, int]] = {}
        self.lines = 0
        try:
            fd, _ = open_regular(self._path)
        except FileNotFoundError:
            return found
        except (BadFileError, OSError) as err:
            logger.warning("%s cannot be read, so files are ordered by their names: %s", self._path, err)
            return found
        with open(fd, "rb") as file:
            texts = list(self._sound_lines(file))
        try:
            lines = json.loads(
                b"[" + b",".join(texts) + b"]"
            )  # in one call, which takes a third of the time of a call for each line
        except (ValueError, RecursionError):  # a line is not JSON although its checksum is right
            lines = []
            for text in texts:
                with contextlib.suppress(ValueError, RecursionError):
                    lines.append(json.loads(text))
        for line in lines:
            with contextlib.suppress(ValueError, TypeError):
                partition, name, size, mtime_ns = line
                found.pop((partition, name), None)  # the last place of a name that was used again counts
                found[partition, name] = (int(size), int(mtime_ns))
        return found

    def _sound_lines(self, file: Any) -> Iterator[bytes]:
        """The text of each line whose checksum is right."""
        while line := file.readline(self._MAX_LINE):
            self.lines += 1
            crc, _, text = line.rstrip(b"\n").partition(b" ")
            try:
                if int(crc, 16) == zlib.crc32(text):
                    yield text
            except ValueError:
                continue

    def append(self, entries: Iterable[Entry]) -> None:
        """Add files at the end."""
        data = _lines(entries)
        with self._locked():
            fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
            try:
                end = os.lseek(fd, 0, os.SEEK_END)
                if end and os.pread(fd, 1, end - 1) != b"\n":
                    data = b"\n" + data  # keeps a line that a crash has cut short apart from the next
                write_all(fd, data)
                os.fsync(fd)
            finally:
                os.close(fd)
        self.lines += data.count(b"\n")

    def rewrite(self, entries: Iterable[Entry]) -> None:
        """Replace the record; a crash leaves the old one or the new one."""
        data = _lines(entries)
        with self._locked():
            replace_file(self._path, lambda path: path.write_bytes(data))
        self.lines = data.count(b"\n")

    def delete(self) -> None:
        """Delete the record."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._path)
        self.lines = 0

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Excludes other processes that edit the buffer."""
        fd = os.open(self._root / ".lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
        try:
            with contextlib.suppress(OSError):  # a file system without locks
                fcntl.flock(fd, fcntl.LOCK_EX)
            yield
        finally:
            os.close(fd)


def _lines(entries: Iterable[Entry]) -> bytes:
    texts = (json.dumps([e.partition, e.name, e.size, e.mtime_ns], separators=(",", ":")).encode() for e in entries)
    return b"".join(b"%08x %s\n" % (zlib.crc32(text), text) for text in texts)
