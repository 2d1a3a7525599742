"""The files of a buffer: segments and archives (fields in `amago.store.schema`), and archives of the original system.

A segment is a safetensors file of many trajectories, ``{writer}-{sequence:012d}-n{trajectories}.safetensors``. Beside the tensors
its ``__metadata__`` holds, as strings: ``header_crc32`` (of the whole header with these eight digits zero), ``format``,
``version``, ``spaces``, ``env_names``, ``crc32`` (JSON, one number a field), ``writer`` and ``sequence``. It is read with ``pread``:
`safetensors.safe_open` is as fast for slices of 128 steps, but maps files into memory, and when a mapped file is cut short, a
read ends the process with SIGBUS.

An archive is an ``.npz`` file of one trajectory, stored or compressed, with an array ``metadata``, JSON as uint8. Its slices are
read with ``pread``, too.

The original system's archives of one trajectory of T transitions are read where they lie:

    rl2s       (T + 1, 1 + A)  reward, then previous action
    time_idxs  (T + 1, 1)      from 0, or from later where a rollout was saved in pieces
    rews       (T, 1)
    dones      (T, 1)          terminated
    actions    (T, A)          one-hot, [-1, 1] or bits
    _OBS_KEY_<key> (T + 1, ...)

They do not record the spaces. Until these are given (`OriginalSpaces`), actions are read as vectors, and observations have no
bounds.
"""

from __future__ import annotations

import functools
import io
import json
import math
import os
import re
import struct
import time
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np

from amago import system
from amago.data.trajectory import OBS_KEY, FrozenTraj, StoredTrajs, columns, under
from amago.spaces import ActionSpec, key_problem
from amago.store import schema as sc
from amago.store.files import BadFileError, read_exactly

SEGMENT_NAME = re.compile(r"(?P<writer>[A-Za-z0-9_-]+)-(?P<sequence>[0-9]{12})-n(?P<n>[0-9]+)\.safetensors")
NPZ_NAME = re.compile(r".*_(?P<writer>[A-Za-z0-9_-]+)-(?P<sequence>[0-9]{12})_[0-9]+\.npz", re.DOTALL)
ORIGINAL_NAME = re.compile(r"(?P<env>.*)_(?P<id>[0-9a-f]{8})_(?P<time>[0-9]+(\.[0-9]+)?)\.(npz|traj)", re.DOTALL)
"""``{env_name}_{8 hexadecimal digits}_{time.time()}.npz``."""
PICKLE = ".traj"
Row = tuple[sc.DType, tuple[int, ...]]
"""Dtype and shape of one row."""

MAX_HEADER_BYTES = 64 << 20
CHUNK = 1 << 20
_CRC_FIRST = re.compile(rb'\{"__metadata__":\{"header_crc32":"([0-9a-f]{8})"')
_CRC_AT = len(b'{"__metadata__":{"header_crc32":"')
_HEAD_BYTES = 4096
"""Bytes in which the header of an archive's member and the header of its array lie."""


class Member(NamedTuple):
    """One array in a file.

    Attributes:
        at: offset of its rows in the file, or of its compressed stream.
        skip: bytes of the array header, which is in front of the rows.
        packed: bytes of the compressed stream; 0 if it is not compressed.
        crc: of array header and data.
    """

    name: str
    dtype: sc.DType
    shape: tuple[int, ...]
    at: int
    skip: int
    packed: int
    crc: object

    @property
    def size(self) -> int:
        """Bytes when unpacked, including the array header."""
        return self.skip + self.dtype.itemsize * math.prod(self.shape)

    def read(self, fd: int, start: int = 0, stop: int | None = None) -> sc.Array:
        """Rows [start, stop); a compressed member is unpacked from its beginning.

        Raises:
            BadFileError: the file or the deflate stream ends early, or is damaged.
        """
        stop = self.shape[0] if stop is None else stop
        row_bytes = self.dtype.itemsize * math.prod(self.shape[1:])
        raw = self._bytes(fd, start * row_bytes, stop * row_bytes)
        return np.frombuffer(raw, self.dtype).reshape(stop - start, *self.shape[1:])

    def check(self, fd: int) -> None:
        """Raise BadFileError unless the member has its checksum; a megabyte is in memory at a time."""
        crc, size, begin, packed = 0, 0, self.at - (0 if self.packed else self.skip), self.packed or self.size
        stream = zlib.decompressobj(-zlib.MAX_WBITS) if self.packed else None
        try:
            for at in range(0, packed, CHUNK):
                raw = read_exactly(fd, min(CHUNK, packed - at), begin + at)
                while raw:
                    piece, raw = (raw, b"") if stream is None else (stream.decompress(raw, CHUNK), stream.unconsumed_tail)
                    crc, size = zlib.crc32(piece, crc), size + len(piece)
        except zlib.error as err:
            raise BadFileError(f"{self.name!r:.100} is damaged: {err}") from err
        if (size, crc) != (self.size, self.crc):
            raise BadFileError(f"the checksum of {self.name!r:.100} is wrong")

    def _bytes(self, fd: int, first: int, last: int) -> bytes:
        if not self.packed:
            return read_exactly(fd, last - first, self.at + first)
        try:
            stream = read_exactly(fd, self.packed, self.at)
            raw = zlib.decompressobj(-zlib.MAX_WBITS).decompress(stream, self.skip + last)[self.skip + first :]
        except zlib.error as err:
            raise BadFileError(f"{self.name!r:.100} is damaged: {err}") from err
        if len(raw) != last - first:
            raise BadFileError(f"{self.name!r:.100} ends early")
        return raw


class About(NamedTuple):
    """The metadata of a file."""

    spaces: object
    env_names: object
    writer: str
    sequence: int

    @classmethod
    def of(cls, about: Mapping[str, Any]) -> About:
        """BadFileError for another format or version."""
        kind, version = about["format"], about["version"]
        if kind != sc.FORMAT or str(version) != str(sc.VERSION):
            raise BadFileError(f"format {kind!r:.50} version {version!r:.50}, not {sc.FORMAT!r} version '{sc.VERSION}'")
        return cls(about["spaces"], about["env_names"], str(about["writer"]), int(about["sequence"]))


def file_name(save_as: str, writer: str, sequence: int, n: int, env_name: str) -> str:
    """The name of a file of n trajectories; writer and sequence number are unique."""
    if save_as == "segments":
        return f"{writer}-{sequence:012d}-n{n}.safetensors"
    safe = re.sub(r"[^A-Za-z0-9.-]", "-", env_name)[:80].lstrip(".") or "env"
    return f"{safe}_{writer}-{sequence:012d}_{int(time.time())}.npz"


def files_of(directory: str | os.PathLike[str], writer: str) -> dict[str, int]:
    """The names of a writer's files in a directory, with their sequence numbers."""
    names = os.listdir(directory) if os.path.isdir(directory) else []
    found = {name: SEGMENT_NAME.fullmatch(name) or NPZ_NAME.fullmatch(name) for name in names}
    return {name: int(m["sequence"]) for name, m in found.items() if m and m["writer"] == writer}


def _packed(trajs: Sequence[StoredTrajs]) -> tuple[dict[str, sc.Array], list[str]]:
    """The fields of n >= 1 trajectories of one schema, and the list of environment names that ``env_id`` refers to."""
    each = [name for t in trajs for name in t.env_names]
    names = list(dict.fromkeys(each))
    number = {name: i for i, name in enumerate(names)}
    lengths = np.concatenate([np.zeros(1, np.int64), *(t.lengths for t in trajs)])
    fields: dict[str, sc.Array] = {name: np.concatenate([t.arrays[name] for t in trajs]) for name in trajs[0].arrays}
    fields |= {
        "start_time": np.concatenate([t.start_times for t in trajs]),
        "prev_reward": np.concatenate([t.prev_rewards for t in trajs]),
        "prev_action": np.concatenate([t.prev_actions for t in trajs]),
        "ep_offsets": np.cumsum(lengths, dtype=np.int64),
        "env_id": np.array([number[name] for name in each], np.int32),
    }
    return {k: np.ascontiguousarray(fields[k]) for k in sorted(fields)}, names


# Segments


def encode_segment(trajs: Sequence[StoredTrajs], spaces: str, writer: str, sequence: int) -> list[Any]:
    """The file of these trajectories as a list of buffers to be written one after the other."""
    fields, names = _packed(trajs)
    order = sorted(fields, key=lambda k: (-fields[k].itemsize, k))  # keeps every tensor aligned, as safetensors does
    data = {name: fields[name].reshape(-1).view(np.uint8) for name in order}
    entries, at = {}, 0
    for name in order:
        a = fields[name]
        entries[name] = {"dtype": sc.CODE_OF[a.dtype], "shape": list(a.shape), "data_offsets": [at, at + a.nbytes]}
        at += a.nbytes
    metadata = {
        "header_crc32": "00000000",
        "format": sc.FORMAT,
        "version": str(sc.VERSION),
        "spaces": spaces,
        "env_names": json.dumps(names),
        "crc32": json.dumps({name: zlib.crc32(a.data) for name, a in data.items()}),
        "writer": writer,
        "sequence": str(sequence),
    }
    text = json.dumps({"__metadata__": metadata} | entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    length = struct.pack("<Q", len(text))
    crc = b"%08x" % zlib.crc32(length + text)
    text = text[:_CRC_AT] + crc + text[_CRC_AT + 8 :]
    return [length + text, *(a for a in data.values() if a.nbytes)]


def parse_segment(fd: int, size: int) -> tuple[dict[str, Member], About]:
    """Read and check the header of a segment of ``size`` bytes.

    Raises:
        BadFileError: anything that is not what `encode_segment` writes.
    """
    prefix = read_exactly(fd, 8, 0)
    (length,) = struct.unpack("<Q", prefix)
    if length > min(MAX_HEADER_BYTES, size - 8):
        raise BadFileError(f"a header of {length} bytes is declared in a file of {size}")
    text = read_exactly(fd, length, 8)
    match = _CRC_FIRST.match(text)
    if match is None:
        raise BadFileError("no segment of ours: the header does not begin with its checksum")
    if zlib.crc32(prefix + text[:_CRC_AT] + b"00000000" + text[_CRC_AT + 8 :]) != int(match[1], 16):
        raise BadFileError("the header's checksum is wrong")
    begin, members = 8 + length, {}
    end = begin
    try:
        header = json.loads(text)
        about = header.pop("__metadata__")
        crcs, about["env_names"] = json.loads(about["crc32"]), json.loads(about["env_names"])
        for name, entry in header.items():
            first, last = entry["data_offsets"]
            member = Member(name, sc.CODES[entry["dtype"]], tuple(entry["shape"]), begin + first, 0, 0, crcs.get(name))
            if first < 0 or member.size != last - first or begin + last > size:
                raise BadFileError(
                    f"{name!r:.100} of shape {member.shape!r:.100} cannot be bytes {first} to {last} of {size - begin}"
                )
            members[name], end = member, max(end, begin + last)
        if end != size:
            raise BadFileError(f"the fields end at byte {end}, but the file has {size}")
        return members, About.of(about)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as err:
        raise err if isinstance(err, BadFileError) else BadFileError(f"the header cannot be read: {err!r:.200}") from err


# Archives


def encode_npz(traj: StoredTrajs, spaces: str, writer: str, sequence: int, compressed: bool) -> bytes:
    """The file of one trajectory, of which ``traj`` has no others."""
    fields, names = _packed([traj])
    metadata = {"format": sc.FORMAT, "version": sc.VERSION, "spaces": spaces, "env_names": names}
    text = json.dumps(metadata | {"writer": writer, "sequence": sequence}, separators=(",", ":")).encode()
    out = io.BytesIO()
    (np.savez_compressed if compressed else np.savez)(out, metadata=np.frombuffer(text, np.uint8), **fields)  # type: ignore[arg-type]
    return out.getvalue()


def archive_members(fd: int) -> dict[str, Member]:
    """The arrays of an archive, by name (without ``.npy``).

    Raises:
        BadFileError: not a zip archive of plain arrays, or an array that cannot lie in a file of this size.
    """
    found = {}
    try:
        with open(fd, "rb", closefd=False) as file, zipfile.ZipFile(file) as archive:
            infos = archive.infolist()
        for info in infos:
            name, packed = info.filename.removesuffix(".npy"), info.compress_type == zipfile.ZIP_DEFLATED
            if not packed and info.compress_type != zipfile.ZIP_STORED:
                raise BadFileError(f"{name!r:.100} is packed by a method other than deflate")
            head = system.pread(fd, _HEAD_BYTES, info.header_offset)  # `ZipFile.open` takes several times as long
            begin = 30 + sum(struct.unpack_from("<2H", head, 26))
            head = zlib.decompressobj(-zlib.MAX_WBITS).decompress(head[begin:], _HEAD_BYTES) if packed else head[begin:]
            head = head[: 10 + struct.unpack_from("<H", head, 8)[0]]
            dtype, shape = _array_header(head)
            at = info.header_offset + begin + (0 if packed else len(head))
            m = Member(name, dtype, shape, at, len(head), info.compress_size if packed else 0, info.CRC)
            if m.size != info.file_size:
                raise BadFileError(f"{name!r:.100} declares {dtype} {shape!r:.100}, but has {info.file_size} bytes")
            found[name] = m
    except BadFileError:
        raise
    except Exception as err:  # `zipfile` and `numpy` raise many types on nonsense
        raise BadFileError(f"not an archive of plain arrays: {err!r:.200}") from err
    return found


@functools.lru_cache(maxsize=4096)
def _array_header(head: bytes) -> tuple[sc.DType, tuple[int, ...]]:
    file = io.BytesIO(head)
    if np.lib.format.read_magic(file) != (1, 0):  # type: ignore[no-untyped-call]
        raise BadFileError("an array header of another version than 1.0")
    shape, fortran_order, dtype = np.lib.format.read_array_header_1_0(file)  # type: ignore[no-untyped-call]
    if fortran_order or dtype not in sc.CODE_OF:
        raise BadFileError(f"arrays of dtype {dtype}{' in Fortran order' if fortran_order else ''} are not supported")
    return dtype, shape


def parse_archive(fd: int, members: dict[str, Member]) -> tuple[dict[str, Member], About]:
    """The content of an archive of ours.

    Raises:
        BadFileError: the metadata is missing, or not what `encode_npz` writes.
    """
    member = members.get("metadata")
    if member is None or member.dtype != np.uint8 or len(member.shape) != 1 or member.size > MAX_HEADER_BYTES:
        raise BadFileError("not a trajectory file of amago: the array 'metadata' is missing or is not JSON as uint8")
    member.check(fd)
    try:
        others = {name: m for name, m in members.items() if name != "metadata"}
        return others, About.of(json.loads(member.read(fd).tobytes()))
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as err:
        raise err if isinstance(err, BadFileError) else BadFileError(f"the metadata cannot be read: {err!r:.200}") from err


# Archives of the original system


def of_original_name(name: str) -> tuple[str, str, int]:
    """The environment, an id, and the time in microseconds in a file's name; "", "" and 0 if it has none."""
    match = ORIGINAL_NAME.fullmatch(name)
    return (match["env"], match["id"], int(float(match["time"]) * 1e6)) if match else ("", "", 0)


def observations_of(members: Mapping[str, Member]) -> dict[str, Row]:
    """The observations in a file of the original system."""
    return {key: (m.dtype, m.shape[1:]) for key, m in sorted(under(OBS_KEY, members).items())}


def check_original(traj: FrozenTraj) -> None:
    """Raise BadFileError unless the arrays of a file of the original system fit together."""
    t, width = len(traj), traj.actions.shape[-1]
    found = {name: a.shape for name, a in columns(traj).items()}
    right = {"rl2s": (t + 1, 1 + width), "time_idxs": (t + 1, 1), "rews": (t, 1), "dones": (t, 1), "actions": (t, width)}
    if t < 1 or not traj.obs or traj.extras or found != right:
        raise BadFileError(f"arrays {found} and observations {list(traj.obs)}; {t} rewards, actions {width} wide need {right}")
    for key, a in traj.obs.items():
        if problem := key_problem(key):
            raise BadFileError(f"observation key {key!r:.100} {problem}")
        if len(a) != t + 1 or a.dtype not in sc.CODE_OF:
            raise BadFileError(f"observation {key!r:.100} has shape {a.shape} and dtype {a.dtype}, with {t} rewards")
    steps = traj.time_idxs[:, 0]
    if steps.dtype.kind not in "iu" or steps[0] < 0 or (steps != steps[0] + np.arange(t + 1)).any():
        raise BadFileError(f"time_idxs do not count steps, from 0 or later: {steps[:3]}... of dtype {steps.dtype}")


def widest_space(found: Mapping[str, Row]) -> gym.spaces.Dict:
    """The widest observation space of arrays with these dtypes and rows."""
    boxes: dict[str, gym.Space[Any]] = {}
    for key, (dtype, shape) in found.items():
        low, high = (0.0, 1.0) if dtype.kind == "b" else (-np.inf, np.inf)
        if dtype.kind in "iu":  # descriptions of spaces have their bounds as float64
            low, high = max(np.iinfo(dtype).min, -(2**53)), min(np.iinfo(dtype).max, 2**53)
        boxes[key] = gym.spaces.Box(low, high, shape=shape, dtype=dtype.type)
    return gym.spaces.Dict(boxes)


def check_observations(space: gym.spaces.Dict, found: Mapping[str, Row]) -> None:
    """Raise BadFileError if observations have other keys or shapes than a space, or dtypes that would lose something."""
    if found.keys() != space.spaces.keys():
        raise BadFileError(f"observations {sorted(found)}, not {sorted(space.spaces)}")
    for key, (dtype, shape) in found.items():
        wanted, right = np.dtype(space[key].dtype), space[key].shape or ()
        same = shape == right or {shape, right} == {(), (1,)}
        exact = "f" in (dtype.kind, wanted.kind) or np.can_cast(dtype, wanted)
        if not (same and exact and np.can_cast(dtype, wanted, "same_kind")):
            raise BadFileError(f"observation {key!r:.100} is {dtype} {shape}, not {wanted} {right}")


def check_vectors(spec: ActionSpec, vectors: sc.Array) -> None:
    """Raise BadFileError if vectors (T, A) are no actions of a space, such as rows that are not one-hot."""
    if vectors.shape[1] != spec.dim:
        raise BadFileError(f"actions are {vectors.shape[1]} wide, but those of {spec.space} are {spec.dim} wide")
    known = spec.kind == "continuous" or np.array_equal(spec.to_vector(spec.from_vector(vectors)), vectors.astype(np.float32))
    if not known:
        raise BadFileError(f"actions are not those of {spec.space}: rows such as {vectors[0].tolist()!r:.100}")


def read_original(
    fd: int, members: Mapping[str, Member], schema: sc.Schema, start: int, slots: Sequence[sc.Slot], arrays: Sequence[sc.Array]
) -> None:
    """Fill one array for each slot with the transitions from ``start`` on; the row in front is what came with the first
    observation."""
    before = members["rl2s"].read(fd, start, start + 1)
    for slot, out in zip(slots, arrays):
        if slot.part < 0:
            out[...] = slot.field.default
            continue
        rows = members[OBS_KEY + slot.key if slot.group == "obs" else slot.key].read(
            fd, start, start + len(out) - (slot.before >= 0)
        )
        if slot.key == "actions" and not slot.group:
            out[...] = schema.action_spec.from_vector(np.concatenate((before[:, 1:], rows)).astype(np.float32))
        elif slot.before >= 0:
            out[0], out[1:] = before[0, :1], rows
        else:
            out[...] = rows.reshape(out.shape)
