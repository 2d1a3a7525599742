"""Archives: ``.npz`` files of one trajectory each, stored or compressed (fields in `amago.store.schema`, and ``metadata``).

``numpy.load(path, allow_pickle=False)`` opens one; ``metadata`` is JSON as uint8.

Why not `zipfile` and `numpy.lib.format` for reading: a slice of a stored array takes `zipfile` 17 us and ``pread`` 0.4 us, an
array header takes `numpy.lib.format` 30 us and the regular expression below 1 us (a small file has 11 arrays; Xeon, Python 3.11,
``timeit``), and `zipfile` accepts bytes after the end of an archive and reads a zip directory of any size. Here, sizes are
compared with the file's own before memory is allocated, and a compressed array is unpacked only up to the end of the slice.
"""

from __future__ import annotations

import functools
import io
import itertools
import json
import math
import os
import re
import struct
import time
import zipfile
import zlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from amago.data.trajectory import StoredTraj
from amago.store import schema as sc
from amago.store.errors import BadFileError
from amago.store.segment import CHUNK, read_exactly

_OURS = re.compile(r".*_(?P<writer>[A-Za-z0-9_-]+)-(?P<sequence>[0-9]{12})_[0-9]+\.npz", re.DOTALL)
MAX_DIRECTORY_BYTES = 1 << 20
MAX_METADATA_BYTES = 8 << 20
_HEADER = re.compile(rb"\{'descr': '([<>|=][a-z][0-9]{1,2})', 'fortran_order': False, 'shape': \(([0-9, ]*)\),? ?\} *\n?")
_MAX_HEADER = 4096
_MAX_RATIO = 1032
"""Bytes that one byte of a deflate stream unpacks to, at most (https://zlib.net/zlib_tech.html)."""
_MAX_COMMENT = 65535

# headers of the zip format (PKWARE's APPNOTE.TXT, sections 4.3.7, 4.3.12 and 4.3.16); unused fields are skipped
_LOCAL = struct.Struct("<4s2x2H16x2H")
_ENTRY = struct.Struct("<4s4x2H4x3L4H6xL")
_END = struct.Struct("<4s4H2LH")
_ENCRYPTED, _UTF8 = 0x1, 0x800


def file_name(env_name: str, writer: str, sequence: int) -> str:
    """``{env_name}_{id}_{unix_time}.npz``; the id is the writer's, which is unique to a process, and its sequence number."""
    safe = re.sub(r"[^A-Za-z0-9.-]", "-", env_name)[:80].lstrip(".") or "env"
    return f"{safe}_{writer}-{sequence:012d}_{int(time.time())}.npz"


def encode(traj: StoredTraj, spaces: str, writer: str, sequence: int, compressed: bool) -> bytes:
    """The content of the file of one trajectory.

    Raises:
        ValueError: the metadata is too long (bounds that differ from element to element, in huge spaces).
    """
    fields, names = sc.pack([traj])
    metadata = {"format": sc.FORMAT, "version": sc.VERSION, "spaces": spaces, "env_names": names}
    text = json.dumps(metadata | {"writer": writer, "sequence": sequence}, separators=(",", ":")).encode()
    if len(text) > MAX_METADATA_BYTES:
        raise ValueError(f"the metadata would take {len(text)} bytes; at most {MAX_METADATA_BYTES} are allowed")
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", allowZip64=False) as archive:
        for name, a in ({"metadata": np.frombuffer(text, np.uint8)} | fields).items():
            info = zipfile.ZipInfo(name + ".npy")
            info.compress_type = zipfile.ZIP_DEFLATED if compressed else zipfile.ZIP_STORED
            member = io.BytesIO()
            np.lib.format.write_array(member, a, version=(1, 0), allow_pickle=False)
            archive.writestr(info, member.getbuffer())
    return out.getvalue()


class Member(NamedTuple):
    """One array of an archive.

    Attributes:
        at, packed: offset of its bytes in the file, and their number.
        size: bytes when unpacked, including the array header; equal to ``packed`` if it is not compressed.
        skip: bytes of the array header.
    """

    name: str
    at: int
    packed: int
    size: int
    compressed: bool
    crc: int
    dtype: sc.DType
    shape: tuple[int, ...]
    skip: int


class _Entry(NamedTuple):
    """A member as the zip directory describes it; ``begin`` is where its local header begins in the file."""

    name: bytes
    flags: int
    method: int
    crc: int
    packed: int
    size: int
    begin: int


def members(fd: int, size: int) -> dict[str, Member]:
    """The arrays of an archive of ``size`` bytes, by name (without ``.npy``).

    Raises:
        BadFileError: not a zip archive of plain arrays, or an array that cannot lie in a file of this size.
    """
    if size > sc.MAX_FILE_BYTES:
        raise BadFileError(f"{size} bytes are more than the {sc.MAX_FILE_BYTES} that an archive may have")
    entries, end = _directory(fd, size)
    found, spans = {}, []
    for entry in entries:
        member = _member(fd, entry, end)
        if member.name in found:
            raise BadFileError(f"two members are named {member.name!r:.100}")
        found[member.name] = member
        spans.append((entry.begin, member.at + member.packed))
    spans.sort()
    if any(stop > start for (_, stop), (start, _) in itertools.pairwise(spans)):
        raise BadFileError("zip members overlap")
    return found


def _directory(fd: int, size: int) -> tuple[list[_Entry], int]:
    """The entries of the zip directory, and where in the file it begins."""
    tail_at = max(0, size - _END.size - _MAX_COMMENT)
    tail = read_exactly(fd, size - tail_at, tail_at)
    at = tail.rfind(b"PK\5\6")
    if at < 0 or len(tail) - at < _END.size:
        raise BadFileError("not a zip archive, or its end is missing")
    _, *disks, here, count, length, begin, n_comment = _END.unpack_from(tail, at)
    if any(disks) or here != count or len(tail) - at != _END.size + n_comment or begin + length != tail_at + at:
        raise BadFileError("the end of the zip archive is damaged")
    if length > MAX_DIRECTORY_BYTES:
        raise BadFileError(f"a zip directory of {length} bytes; at most {MAX_DIRECTORY_BYTES} are allowed")
    directory, at, entries = read_exactly(fd, length, begin), 0, []
    for _ in range(count):
        if len(directory) - at < _ENTRY.size:
            raise BadFileError("the zip directory is damaged")
        magic, flags, method, crc, packed, unpacked, n_name, n_extra, n_comment, disk, local = _ENTRY.unpack_from(directory, at)
        name = directory[at + _ENTRY.size : at + _ENTRY.size + n_name]
        if magic != b"PK\1\2" or len(name) != n_name:
            raise BadFileError("the zip directory is damaged")
        if flags & _ENCRYPTED or disk or method not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise BadFileError("a zip member is encrypted, split, or packed by a method other than deflate")
        entries.append(_Entry(name, flags, method, crc, packed, unpacked, local))
        at += _ENTRY.size + n_name + n_extra + n_comment
    return entries, begin


def _member(fd: int, entry: _Entry, end: int) -> Member:
    """Compare an entry of the zip directory, which begins at ``end``, with the member's own headers."""
    raw, flags, method, crc, packed, size, begin = entry
    compressed = method == zipfile.ZIP_DEFLATED
    too_big = size > packed * _MAX_RATIO + 64 if compressed else size != packed
    if too_big or begin + _LOCAL.size + packed > end:
        raise BadFileError(f"a zip member of {packed} bytes at {begin}, unpacked {size}, cannot be in a file of this size")
    head = read_exactly(fd, min(_LOCAL.size + len(raw) + _MAX_HEADER, end - begin), begin)  # a stored array's header, too
    *local, n_name, n_extra = _LOCAL.unpack_from(head)
    if local != [b"PK\3\4", flags, method] or n_name != len(raw) or not head.startswith(raw, _LOCAL.size):
        raise BadFileError("a zip member disagrees with the zip directory")
    at = begin + _LOCAL.size + n_name + n_extra
    if at + packed > end:
        raise BadFileError("a zip member reaches into the zip directory")
    try:
        name = raw.decode("utf-8" if flags & _UTF8 else "cp437")
    except UnicodeDecodeError as err:
        raise BadFileError("a zip member's name is not UTF-8") from err
    if not name.endswith(".npy"):
        raise BadFileError(f"{name!r:.100} is not a .npy array")
    start = unpack(fd, at, packed, True, min(size, _MAX_HEADER)) if compressed else head[at - begin :][:size]
    if len(start) < 10 or start[:8] != b"\x93NUMPY\x01\x00":
        raise BadFileError(f"{name!r:.100} is not a .npy array of version 1.0")
    skip = 10 + struct.unpack_from("<H", start, 8)[0]
    if skip > len(start):
        raise BadFileError(f"{name!r:.100} has an array header of {skip} bytes")
    dtype, shape = _array_header(start[10:skip])
    if skip + math.prod(shape) * dtype.itemsize != size:
        raise BadFileError(f"{name!r:.100} declares {dtype} {shape!r:.100}, but holds {size - skip} bytes")
    return Member(name[:-4], at, packed, size, compressed, crc, dtype, shape, skip)


@functools.lru_cache(maxsize=4096)
def _array_header(text: bytes) -> tuple[sc.DType, tuple[int, ...]]:
    match = _HEADER.fullmatch(text)
    if match is None:
        raise BadFileError(f"an array of objects or records, or in Fortran order: {text[:100]!r}")
    try:
        dtype = np.dtype(match[1].decode())
        shape = tuple(int(x) for x in match[2].split(b",") if x.strip())
    except (TypeError, ValueError) as err:
        raise BadFileError(f"an array header that cannot be read: {text[:100]!r}") from err
    if dtype not in sc.CODE_OF:
        raise BadFileError(f"dtype {dtype} is not supported")
    return dtype, shape


def _pieces(fd: int, at: int, packed: int, compressed: bool, stop: int) -> Iterator[bytes]:
    """The first ``stop`` bytes of a member once unpacked, in pieces of at most `CHUNK` bytes; fewer if the member is shorter.

    Raises:
        BadFileError: the file or the deflate stream ends early, the stream is damaged, or it ends before its ``packed`` bytes do.
    """
    end, done = at + packed, 0
    if not compressed:
        for begin in range(at, min(end, at + stop), CHUNK):
            yield read_exactly(fd, min(CHUNK, end - begin, at + stop - begin), begin)
        return
    stream, source = zlib.decompressobj(-zlib.MAX_WBITS), b""
    while done < stop and not stream.eof:
        if not source and at < end:
            source = read_exactly(fd, min(1 << 16, end - at), at)
            at += len(source)
        try:
            piece = stream.decompress(source, min(CHUNK, stop - done))
        except zlib.error as err:
            raise BadFileError(f"a compressed array is damaged: {err}") from err
        if not piece and not source and not stream.eof:
            raise BadFileError(f"a compressed array ends after {done} bytes")
        source, done = stream.unconsumed_tail, done + len(piece)
        yield piece
    if stream.eof and (at < end or stream.unused_data):
        raise BadFileError("a compressed array does not end where the zip directory says")


def unpack(fd: int, at: int, packed: int, compressed: bool, stop: int, skip: int = 0) -> bytes:
    """Bytes [skip, stop) of a member once unpacked; a compressed one is unpacked from its beginning.

    Args:
        at, packed: as in `Member`.

    Raises:
        BadFileError: it is shorter, or is no deflate stream.
    """
    if not compressed:
        return read_exactly(fd, stop - skip, at + skip)
    out, done = bytearray(), 0
    for piece in _pieces(fd, at, packed, compressed, stop):
        out += piece[max(0, skip - done) :]
        done += len(piece)
    if done < stop:
        raise BadFileError(f"a compressed array ends after {done} of {stop} bytes")
    return bytes(out)


def check_data(fd: int, member: Member) -> None:
    """Compare a member with its checksum, a piece at a time.

    Raises:
        BadFileError: they differ.
    """
    crc, size, largest = 0, 0, 0
    try:
        for piece in _pieces(fd, member.at, member.packed, member.compressed, member.size + 1):
            crc = zlib.crc32(piece, crc)
            values = piece[max(0, member.skip - size) :]
            if member.dtype == np.bool_ and values:
                largest = max(largest, int(np.frombuffer(values, np.uint8).max()))
            size += len(piece)
    except BadFileError as err:
        raise BadFileError(f"{member.name!r:.100}: {err}") from err
    if size != member.size or crc != member.crc:
        raise BadFileError(f"the checksum of {member.name!r:.100} is wrong")
    if largest > 1:
        raise BadFileError(f"{member.name!r:.100} is bool but has bytes other than 0 and 1")


def load_field(fd: int, member: Member) -> sc.Array:
    """One whole array."""
    raw = unpack(fd, member.at, member.packed, member.compressed, member.size, member.skip)
    return np.frombuffer(raw, member.dtype).reshape(member.shape)


def read_metadata(fd: int, found: dict[str, Member]) -> dict[str, Any]:
    """The ``metadata`` array as a dict.

    Raises:
        BadFileError: it is missing, or not what `encode` writes.
    """
    member = found.get("metadata")
    if member is None or member.dtype != np.uint8 or len(member.shape) != 1 or member.size > MAX_METADATA_BYTES + _MAX_HEADER:
        raise BadFileError("not a trajectory file of amago: the array 'metadata' is missing or is not JSON as uint8")
    check_data(fd, member)
    try:
        metadata = json.loads(load_field(fd, member).tobytes())
        ours = metadata["format"] == sc.FORMAT and metadata["version"] == sc.VERSION
        metadata["writer"], metadata["sequence"] = str(metadata["writer"]), int(metadata["sequence"])
        _ = metadata["spaces"], metadata["env_names"]
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as err:
        raise BadFileError(f"the metadata cannot be read: {err!r:.200}") from err
    if not ours:
        raise BadFileError(f"format {metadata['format']!r:.50} version {metadata['version']!r:.50} is not known")
    return dict(metadata)


def last_sequence(directory: str | os.PathLike[str], writer: str) -> int:
    """The highest sequence number among a writer's archives in a directory; -1 if there are none."""
    found = (_OURS.fullmatch(name) for name in os.listdir(directory) if name.endswith(".npz"))
    return max((int(m["sequence"]) for m in found if m and m["writer"] == writer), default=-1)
