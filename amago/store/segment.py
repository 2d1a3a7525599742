"""Segments: one safetensors file of many trajectories (fields in `amago.store.schema`).

Any safetensors reader opens one. Beside the tensors its ``__metadata__`` holds, as strings: ``header_crc32`` (of the whole
header with these eight digits zero), ``format``, ``version``, ``spaces``, ``env_names``, ``crc32`` (JSON, one number a
field), ``writer`` and ``sequence``. A file is named ``{writer}-{sequence:012d}-n{trajectories}.safetensors``.

`safetensors.safe_open` reads slices of 128 steps as fast (34,000 a second, ours 33,000) and opens small files faster (53 us,
ours 122 us; Xeon, 5 trajectories a file, ``perf_counter``), but it maps files into memory: when a mapped file is cut short, a
read ends the process with SIGBUS.
"""

from __future__ import annotations

import json
import os
import re
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from amago.data.trajectory import StoredTraj
from amago.store import schema as sc
from amago.store.errors import BadFileError

MAX_HEADER_BYTES = 8 << 20
CHUNK = 1 << 20
NAME = re.compile(r"(?P<writer>[A-Za-z0-9_-]+)-(?P<sequence>[0-9]{12})-n(?P<n>[0-9]{1,7})\.safetensors")

_CRC_FIRST = re.compile(rb'\{"__metadata__":\{"header_crc32":"([0-9a-f]{8})"')
_CRC_AT = len(b'{"__metadata__":{"header_crc32":"')


def file_name(writer: str, sequence: int, n: int) -> str:
    return f"{writer}-{sequence:012d}-n{n}.safetensors"


def encode(trajs: Sequence[StoredTraj], spaces: str, writer: str, sequence: int) -> list[Any]:
    """The file of these trajectories as a list of buffers to be written one after the other.

    Raises:
        ValueError: the header would be too big (bounds that differ from element to element, in huge spaces).
    """
    fields, names = sc.pack(trajs)
    order = sorted(fields, key=lambda k: (-fields[k].itemsize, k))  # keeps every tensor aligned, as safetensors does
    entries, crcs, at = {}, {}, 0
    for name in order:
        a = fields[name]
        entries[name] = {"dtype": sc.CODE_OF[a.dtype], "shape": list(a.shape), "data_offsets": [at, at + a.nbytes]}
        crcs[name] = zlib.crc32(memoryview(a.reshape(-1).view(np.uint8))) if a.nbytes else 0  # type: ignore[arg-type]
        at += a.nbytes
    metadata = {
        "header_crc32": "00000000",
        "format": sc.FORMAT,
        "version": str(sc.VERSION),
        "spaces": spaces,
        "env_names": json.dumps(names),
        "crc32": json.dumps(crcs),
        "writer": writer,
        "sequence": str(sequence),
    }
    text = json.dumps({"__metadata__": metadata} | entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > MAX_HEADER_BYTES:
        raise ValueError(f"the header of a segment would take {len(text)} bytes; at most {MAX_HEADER_BYTES} are allowed")
    length = struct.pack("<Q", len(text))
    crc = b"%08x" % zlib.crc32(length + text)
    text = text[:_CRC_AT] + crc + text[_CRC_AT + 8 :]
    return [length + text, *(fields[name].reshape(-1).view(np.uint8) for name in order if fields[name].nbytes)]


@dataclass
class Parsed:
    """A trajectory file's declared content, checked for consistency (its data is not read yet).

    Attributes:
        offsets: where each of ``parts`` begins in the file.
        n, total: trajectories and transitions.
    """

    parts: tuple[sc.Part, ...]
    offsets: tuple[int, ...]
    n: int
    total: int
    spaces: Any
    env_names: Any
    crcs: dict[str, Any]
    writer: str
    sequence: int


def read_exactly(fd: int, count: int, offset: int) -> bytes:
    """``count`` bytes at ``offset``.

    Raises:
        BadFileError: the file ends before.
    """
    data = os.pread(fd, count, offset)
    while len(data) < count:
        more = os.pread(fd, count - len(data), offset + len(data))
        if not more:
            raise BadFileError(f"the file ends at byte {offset + len(data)}, {count - len(data)} bytes early")
        data += more
    return data


def parse(fd: int, size: int) -> Parsed:
    """Read and check the header of a segment of ``size`` bytes.

    Memory is bounded by `MAX_HEADER_BYTES` times a small factor, whatever the file declares.

    Raises:
        BadFileError: anything that is not exactly what `encode` writes.
    """
    if size < 8:
        raise BadFileError(f"{size} bytes are too few for a safetensors file")
    if size > sc.MAX_FILE_BYTES:
        raise BadFileError(f"{size} bytes are more than the {sc.MAX_FILE_BYTES} that a segment may have")
    prefix = read_exactly(fd, 8, 0)
    (length,) = struct.unpack("<Q", prefix)
    if length > min(MAX_HEADER_BYTES, size - 8):
        raise BadFileError(f"a header of {length} bytes is declared in a file of {size}")
    text = read_exactly(fd, length, 8)
    match = _CRC_FIRST.match(text)
    if match is None:
        raise BadFileError("no segment of ours: the header does not begin with its checksum")
    zeroed = text[:_CRC_AT] + b"00000000" + text[_CRC_AT + 8 :]
    if zlib.crc32(prefix + zeroed) != int(match[1], 16):
        raise BadFileError("the header's checksum is wrong")
    try:
        header = json.loads(text)
        metadata = header.pop("__metadata__")
        crcs, env_names = json.loads(metadata["crc32"]), json.loads(metadata["env_names"])
        spaces, writer, sequence = metadata["spaces"], str(metadata["writer"]), int(metadata["sequence"])
        kind, version = metadata["format"], metadata["version"]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as err:
        raise BadFileError(f"the header cannot be read: {err!r:.200}") from err
    if kind != sc.FORMAT or version != str(sc.VERSION):
        raise BadFileError(f"format {kind!r:.50} version {version!r:.50}, not {sc.FORMAT!r} version '{sc.VERSION}'")
    if not isinstance(crcs, dict):
        raise BadFileError("the checksums are no dict")
    shapes, offsets = _fields(header, 8 + length, size)
    parts, n, total = sc.fit(shapes, spaces)
    return Parsed(parts, tuple(offsets[p.name] for p in parts), n, total, spaces, env_names, crcs, writer, sequence)


def _fields(
    header: dict[str, Any], begin: int, size: int
) -> tuple[dict[str, tuple[sc.DType, tuple[int, ...]]], dict[str, int]]:
    shapes, spans = {}, []
    for name, entry in header.items():
        try:
            dtype, shape = sc.CODES[entry["dtype"]], tuple(entry["shape"])
            first, last = entry["data_offsets"]
        except (KeyError, TypeError, ValueError) as err:
            raise BadFileError(f"the entry of {name!r:.100} cannot be read") from err
        if not all(type(x) is int and x >= 0 for x in (*shape, first, last)) or len(shape) > 32:
            raise BadFileError(f"the shape or offsets of {name!r:.100} are not non-negative integers")
        nbytes = dtype.itemsize
        for x in shape:
            nbytes *= x
        if last - first != nbytes or begin + last > size:
            raise BadFileError(f"{name!r:.100} of shape {shape!r:.100} cannot be bytes {first} to {last} of {size - begin}")
        shapes[name] = (dtype, shape)
        spans.append((first, last, name))
    at = 0
    for first, last, name in sorted(spans):
        if first != at:
            raise BadFileError(f"{name!r:.100} begins at byte {first}, but the field before ends at {at}")
        at = last
    if begin + at != size:
        raise BadFileError(f"the fields end at byte {begin + at}, but the file has {size}")
    return shapes, {name: begin + first for first, _, name in spans}


def load_field(fd: int, parsed: Parsed, name: str) -> sc.Array:
    """One whole field."""
    i = next(i for i, p in enumerate(parsed.parts) if p.name == name)
    part = parsed.parts[i]
    rows = part.total_rows(parsed.n, parsed.total)
    raw = read_exactly(fd, rows * part.row_bytes, parsed.offsets[i])
    return np.frombuffer(raw, part.dtype).reshape(rows, *part.row)


def check_data(fd: int, parsed: Parsed) -> None:
    """Compare every field with its checksum, a megabyte at a time.

    Raises:
        BadFileError: naming the first field that differs.
    """
    for part, offset in zip(parsed.parts, parsed.offsets):
        left, crc, worst = part.total_rows(parsed.n, parsed.total) * part.row_bytes, 0, 0
        while left:
            chunk = read_exactly(fd, min(left, CHUNK), offset)
            crc = zlib.crc32(chunk, crc)
            if part.dtype == np.bool_:
                worst = max(worst, int(np.frombuffer(chunk, np.uint8).max()))
            offset, left = offset + len(chunk), left - len(chunk)
        if crc != parsed.crcs.get(part.name):
            raise BadFileError(f"the checksum of {part.name!r} is wrong")
        if worst > 1:
            raise BadFileError(f"{part.name!r} is bool but has bytes other than 0 and 1")
