"""One trajectory a file: ``.npz``, stored or compressed, with the fields of `amago.store.schema` and ``metadata``.

``numpy.load(path, allow_pickle=False)`` opens one; ``metadata`` is JSON as uint8. Reading does not go through numpy: the
zip directory and the array headers are parsed here, against the file's real size and before anything is allocated, so that
a stored array is read by the slice and a compressed one no further than its slice ends.
"""

from __future__ import annotations

import functools
import io
import itertools
import json
import os
import re
import struct
import time
import zipfile
import zlib
from dataclasses import dataclass
from typing import Any

import numpy as np

from amago.data.trajectory import StoredTraj
from amago.store import schema as sc
from amago.store.errors import BadFileError
from amago.store.segment import CHUNK, read_exactly

NAME = re.compile(r".*\.npz", re.DOTALL)
_OURS = re.compile(r".*_(?P<writer>[A-Za-z0-9_-]+)-(?P<sequence>[0-9]{12})_[0-9]+\.npz", re.DOTALL)
MAX_DIRECTORY_BYTES = 1 << 20
MAX_METADATA_BYTES = 8 << 20
_HEADER = re.compile(rb"\{'descr': '([<>|=][a-z][0-9]{1,2})', 'fortran_order': False, 'shape': \(([0-9, ]*)\),? ?\} *\n?")
_MAX_HEADER = 4096


def file_name(env_name: str, writer: str, sequence: int) -> str:
    """``{env_name}_{random_id}_{unix_time}.npz``; the id is the writer's (unique to a process) and its sequence number."""
    safe = re.sub(r"[^A-Za-z0-9.-]", "-", env_name)[:80].lstrip(".") or "env"
    return f"{safe}_{writer}-{sequence:012d}_{int(time.time())}.npz"


def encode(traj: StoredTraj, spaces: str, writer: str, sequence: int, compressed: bool) -> bytes:
    """The file of one trajectory."""
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


@dataclass(frozen=True)
class Member:
    """One array of an archive.

    Attributes:
        at, packed: where its bytes begin in the file, and how many there are.
        size: bytes once unpacked (the same where it is not compressed), array header included.
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


def members(fd: int, size: int) -> dict[str, Member]:
    """The arrays of an archive of ``size`` bytes, by name (without ``.npy``).

    Raises:
        BadFileError: no zip archive of plain arrays, or declarations that the file cannot keep.
    """
    if size > sc.MAX_FILE_BYTES:
        raise BadFileError(f"{size} bytes are more than the {sc.MAX_FILE_BYTES} that an archive may have")
    count, directory, directory_at = _central_directory(fd, size)
    found, spans, at = {}, [], 0
    for _ in range(count):
        if len(directory) - at < 46 or directory[at : at + 4] != b"PK\1\2":
            raise BadFileError("the zip directory is damaged")
        flags, method, _, _, crc, packed, unpacked, n_name, n_extra, n_comment, disk, _, _, local = struct.unpack_from(
            "<4H3L4HHLL", directory, at + 8
        )
        name = directory[at + 46 : at + 46 + n_name]
        at += 46 + n_name + n_extra + n_comment
        if flags & 1 or disk or method not in (0, 8) or len(name) != n_name:
            raise BadFileError("a zip member is encrypted, split, or packed by a method other than deflate")
        if (method == 0 and packed != unpacked) or unpacked > packed * 1032 + 64 or local + 30 + packed > directory_at:
            raise BadFileError(f"a zip member of {packed} bytes at {local}, unpacked {unpacked}, cannot be in a file of {size}")
        head = read_exactly(fd, 30 + n_name, local)
        if head[:4] != b"PK\3\4" or struct.unpack_from("<2H", head, 6) != (flags, method) or head[30:] != name:
            raise BadFileError("a zip member disagrees with the zip directory")
        begin = local + 30 + n_name + struct.unpack_from("<H", head, 28)[0]
        if begin + packed > directory_at:
            raise BadFileError("a zip member reaches into the zip directory")
        spans.append((local, begin + packed))
        member = _member(fd, name, flags, begin, packed, unpacked, method == 8, crc)
        if member.name in found:
            raise BadFileError(f"two members are named {member.name!r:.100}")
        found[member.name] = member
    spans.sort()
    if any(end > start for (_, end), (start, _) in itertools.pairwise(spans)):
        raise BadFileError("zip members overlap")
    return found


def _central_directory(fd: int, size: int) -> tuple[int, bytes, int]:
    tail = read_exactly(fd, min(size, 22 + 65535), size - min(size, 22 + 65535))
    at = tail.rfind(b"PK\5\6")
    if at < 0 or len(tail) - at < 22:
        raise BadFileError("no zip archive, or its end is missing")
    disk, first, here, count, length, offset, n_comment = struct.unpack_from("<4H2LH", tail, at + 4)
    end = size - len(tail) + at
    if disk or first or here != count or len(tail) - at != 22 + n_comment or offset + length != end:
        raise BadFileError("the end of the zip archive is damaged")
    if length > MAX_DIRECTORY_BYTES:
        raise BadFileError(f"a zip directory of {length} bytes; at most {MAX_DIRECTORY_BYTES} are allowed")
    return count, read_exactly(fd, length, offset), offset


def _member(fd: int, raw: bytes, flags: int, at: int, packed: int, size: int, compressed: bool, crc: int) -> Member:
    try:
        name = raw.decode("utf-8" if flags & 0x800 else "cp437")
    except UnicodeDecodeError as err:
        raise BadFileError("a zip member's name is not UTF-8") from err
    if not name.endswith(".npy"):
        raise BadFileError(f"{name!r:.100} is no .npy array")
    start = unpack(fd, at, packed, compressed, min(size, _MAX_HEADER))
    if len(start) < 10 or start[:8] != b"\x93NUMPY\x01\x00":
        raise BadFileError(f"{name!r:.100} is no .npy array of version 1.0")
    skip = 10 + struct.unpack_from("<H", start, 8)[0]
    if skip > len(start):
        raise BadFileError(f"{name!r:.100} has an array header of {skip} bytes")
    dtype, shape = _array_header(start[10:skip])
    nbytes = dtype.itemsize
    for x in shape:
        nbytes *= x
    if skip + nbytes != size:
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


def unpack(fd: int, at: int, packed: int, compressed: bool, stop: int, skip: int = 0) -> bytes:
    """Bytes [skip, stop) of a member once unpacked; a compressed one is unpacked from its beginning, a piece at a time.

    Raises:
        BadFileError: it ends before, or is no deflate stream.
    """
    if not compressed:
        return read_exactly(fd, stop - skip, at + skip)
    stream, out, done, end = zlib.decompressobj(-15), bytearray(), 0, at + packed
    try:
        while done < stop:
            source = stream.unconsumed_tail
            if not source and at < end:
                source = read_exactly(fd, min(1 << 16, end - at), at)
                at += len(source)
            piece = stream.decompress(source, min(CHUNK, stop - done))
            if not piece and (stream.eof or not source):
                raise BadFileError(f"a compressed array ends after {done} of {stop} bytes")
            out += piece[max(0, skip - done) :]
            done += len(piece)
    except zlib.error as err:
        raise BadFileError(f"a compressed array is damaged: {err}") from err
    return bytes(out)


def check_data(fd: int, member: Member) -> None:
    """Compare a member with its checksum, a piece at a time.

    Raises:
        BadFileError: they differ.
    """
    stream = zlib.decompressobj(-15) if member.compressed else None
    at, end, crc, size, worst = member.at, member.at + member.packed, 0, 0, 0

    def take(piece: bytes) -> None:
        nonlocal crc, size, worst
        crc = zlib.crc32(piece, crc)
        body = piece[max(0, member.skip - size) :]
        if member.dtype == np.bool_ and body:
            worst = max(worst, int(np.frombuffer(body, np.uint8).max()))
        size += len(piece)

    try:
        while at < end and size <= member.size:
            source = read_exactly(fd, min(1 << 16, end - at), at)
            at += len(source)
            if stream is None:
                take(source)
                continue
            while source and size <= member.size and not stream.eof:
                take(stream.decompress(source, CHUNK))
                source = stream.unconsumed_tail
        if stream is not None and size <= member.size:
            take(stream.flush())
    except zlib.error as err:
        raise BadFileError(f"{member.name!r:.100} is damaged: {err}") from err
    if stream is not None and (not stream.eof or stream.unused_data):
        raise BadFileError(f"{member.name!r:.100} does not end where the zip directory says")
    if size != member.size or crc != member.crc:
        raise BadFileError(f"the checksum of {member.name!r:.100} is wrong")
    if worst > 1:
        raise BadFileError(f"{member.name!r:.100} is bool but has bytes other than 0 and 1")


def load_field(fd: int, member: Member) -> sc.Array:
    """One whole array."""
    raw = unpack(fd, member.at, member.packed, member.compressed, member.size, member.skip)
    return np.frombuffer(raw, member.dtype).reshape(member.shape)


def read_metadata(fd: int, found: dict[str, Member]) -> dict[str, Any]:
    """The ``metadata`` array as a dict.

    Raises:
        BadFileError: it is missing, or not ours.
    """
    member = found.get("metadata")
    if member is None or member.dtype != np.uint8 or len(member.shape) != 1 or member.size > MAX_METADATA_BYTES + _MAX_HEADER:
        raise BadFileError("no trajectory of ours: the array 'metadata' is missing or is no JSON as uint8")
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
    """The highest sequence number that this writer's archives in a directory have; -1 if there are none."""
    found = (_OURS.fullmatch(name) for name in os.listdir(directory) if name.endswith(".npz"))
    return max((int(m["sequence"]) for m in found if m and m["writer"] == writer), default=-1)
