"""The index entry of each file, the files that are not sampled, and the order and the index of a buffer's files for the next process."""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import os
import re
import stat
import time
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np

from amago.data.trajectory import SEQUENCE_ROWS, FrozenTraj
from amago.store import formats
from amago.store import schema as sc
from amago.store.files import BadFileError, EvictedError, PickleRefusedError, StoreError, open_regular, replace_file

logger = logging.getLogger(__name__)

FIFO, PROTECTED = "fifo", "protected"
PARTITIONS = (PROTECTED, FIFO)
"""The directories of a buffer, in the order of their indices."""
QUARANTINE = "quarantine"
_QUARANTINED = re.compile(r"([0-9]+-)?(fifo|protected)-(?P<name>.*)", re.DOTALL)

TICK_NS = 12_000_000
"""Longer than the resolution of file time stamps, 10 ms at worst."""


@dataclass(slots=True, eq=False)
class Entry:
    """A file that has been checked, with the position of every field: reading a slice does not need the header.

    Attributes:
        size, mtime_ns: the file's, when its data was compared with its checksums.
        original: the original system has written the file.
        places: for each part of the schema the offset of its rows, or the array if it is packed; of an original file the arrays
            by their names.
        n: trajectories.
        ep_offsets, start_time, env_id: as in `amago.store.schema`.
        gone: the file was deleted, so that its trajectories must not be drawn any more.
    """

    partition: str
    name: str
    size: int
    mtime_ns: int
    original: bool
    schema: sc.Schema
    places: Any
    n: int
    ep_offsets: sc.Array
    start_time: sc.Array
    env_id: sc.Array
    env_names: tuple[str, ...]
    writer: str
    sequence: int
    gone: bool = False

    @property
    def where(self) -> str:
        """Its path in the buffer."""
        return f"{self.partition}/{self.name}"

    @property
    def index(self) -> tuple[sc.Array, sc.Array, sc.Array]:
        """The fields `amago.store.schema.INDEX`."""
        return self.ep_offsets, self.start_time, self.env_id

    @property
    def total(self) -> int:
        """Transitions in the file."""
        return int(self.ep_offsets[-1])


def load(root: str | Path, partition: str, name: str, checked: tuple[int, int] | None = None) -> Entry:
    """Check the file ``{root}/{partition}/{name}`` and create its `Entry`.

    Args:
        checked: size and mtime_ns of the file when its data was compared with its checksums; if it still has them, its header
            is enough.

    Raises:
        BadFileError: the file must not be used; the message has the reason.
        PickleRefusedError: a ``.traj`` file.
        OSError: it cannot be opened or read (FileNotFoundError: it is gone).
    """
    if name.endswith(formats.PICKLE):
        raise PickleRefusedError.of(f"{root}/{partition}/{name}")
    fd, info = open_regular(f"{root}/{partition}/{name}")
    try:
        age = time.time_ns() - info.st_mtime_ns
        if 0 <= age < TICK_NS:  # an immediate write must not get the same time stamp
            time.sleep((TICK_NS - age) / 1e9)
            info = os.fstat(fd)
        known = (info.st_size, info.st_mtime_ns) == checked
        where = partition, name, info.st_size, info.st_mtime_ns
        if name.endswith(".safetensors"):
            return _load(where, fd, *formats.parse_segment(fd, info.st_size), known)
        if not name.endswith(".npz"):
            raise BadFileError("neither .safetensors nor .npz: not a trajectory file")
        members = formats.archive_members(fd)
        if members.keys() >= SEQUENCE_ROWS.keys():
            return _load_original(where, fd, members, known)
        return _load(where, fd, *formats.parse_archive(fd, members), known)
    finally:
        os.close(fd)


def _load(
    where: tuple[str, str, int, int], fd: int, members: dict[str, formats.Member], about: formats.About, trusted: bool
) -> Entry:
    schema, name = sc.schema_of(about.spaces, members), where[1]
    n, total = schema.fit(members)
    match = formats.SEGMENT_NAME.fullmatch(name)
    if (name.endswith(".npz") and n != 1) or (not name.endswith(".npz") and (match is None or int(match["n"]) != n)):
        raise BadFileError(f"the name does not say that it holds {n} trajectories")
    if not trusted:
        for member in members.values():
            member.check(fd)
    ep_offsets, start_time, env_id = (members[x].read(fd) for x in sc.INDEX)
    names = sc.check_index(ep_offsets, start_time, env_id, total, about.env_names)
    places = tuple(m if m.packed else m.at for m in (members[name] for name in schema.names))
    return Entry(*where, False, schema, places, n, ep_offsets, start_time, env_id, names, about.writer, about.sequence)


def _load_original(where: tuple[str, str, int, int], fd: int, members: dict[str, formats.Member], trusted: bool) -> Entry:
    if not trusted:
        os.lseek(fd, 0, os.SEEK_SET)
        with open(fd, "rb", closefd=False) as file, np.load(file, allow_pickle=False) as archive:
            formats.check_original(FrozenTraj.from_dict(archive))
    total, start_time = members["rews"].shape[0], members["time_idxs"].read(fd, 0, 1).item()
    env_name, writer, sequence = formats.of_original_name(where[1])
    vectors = gym.spaces.Box(-1.0, 1.0, members["actions"].shape[1:], np.float32)  # the space is unknown
    schema = sc.schema_of(sc.spaces_text(formats.widest_space(formats.observations_of(members)), vectors))
    index = np.array([0, total]), np.array([start_time]), np.zeros(1, np.int32)
    return Entry(*where, True, schema, members, 1, *index, (env_name,), writer, sequence)


def stamp(path: str) -> tuple[int, int] | None:
    """Size and mtime_ns of a file; None of a link or a directory."""
    info = os.lstat(path)
    return (info.st_size, info.st_mtime_ns) if stat.S_ISREG(info.st_mode) else None


def give_spaces(schema: sc.Schema, entry: Entry, root: str | Path) -> None:
    """Read a file of the original system, which records no spaces, with the spaces of a schema from now on.

    Raises:
        BadFileError: the file has other observations or actions.
    """
    formats.check_observations(schema.obs_space, formats.observations_of(entry.places))
    fd, _ = open_regular(os.path.join(root, entry.where))
    try:
        formats.check_vectors(schema.action_spec, entry.places["actions"].read(fd))
    finally:
        os.close(fd)
    entry.schema = schema


def recheck(root: str, entry: Entry) -> None:
    """Check again a file that was written to since; if it holds the same trajectories, update its time stamp in ``entry``.

    Raises:
        BadFileError: it is damaged.
        EvictedError: it is gone, cannot be read now, or holds other trajectories.
    """
    try:
        now = load(root, entry.partition, entry.name)
    except FileNotFoundError as err:
        raise EvictedError(f"{entry.where} has been deleted from the buffer; draw another index") from err
    except OSError as err:
        raise EvictedError(f"{entry.where} cannot be read now: {err}") from err
    same = (now.places, now.env_names) == (entry.places, entry.env_names) and all(map(np.array_equal, now.index, entry.index))
    if not (same and (entry.original or now.schema == entry.schema)):  # the original's files record no spaces
        raise EvictedError(f"{entry.where} has been replaced by another file; draw another index")
    entry.size, entry.mtime_ns = now.size, now.mtime_ns


# Files that are not sampled


class RefusedFiles:
    """The files of a buffer that are not sampled: damaged ones are moved to ``{root}/quarantine`` as ``{partition}-{name}``.

    Attributes:
        skipped: {path: reason} of the files that are skipped where they lie.
        unreadable: {path: reason} of the files that could not be read when they were last tried.
        count: number of files that were moved or skipped so far.
    """

    def __init__(self, root: Path, edit: bool) -> None:
        self._root, self._edit = root, edit
        self.skipped: dict[str, str] = {}
        self.unreadable: dict[str, str] = {}
        self._moved: dict[Path, str] = {}
        self.count = 0

    def set_aside(self, partition: str, name: str, err: Exception) -> None:
        """Move a file that cannot be used to quarantine, or skip it from now on. Files of the original system are never
        moved."""
        source, directory = self._root / partition / name, self._root / QUARANTINE
        reason = str(err) if isinstance(err, StoreError | ValueError) else f"unexpected {err!r:.200}"
        self.count += 1
        if not self._edit or formats.ORIGINAL_NAME.fullmatch(name) or (source.is_dir() and not source.is_symlink()):
            self.skip(source, reason)
            return
        names = (f"{f'{i}-' if i else ''}{partition}-{name}"[:240] for i in itertools.count())
        target = next(directory / n for n in names if not os.path.lexists(directory / n))
        try:
            directory.mkdir(exist_ok=True)
            os.rename(source, target)
        except OSError as problem:
            self.skip(source, f"{reason} (and it cannot be moved to quarantine: {problem})")
        else:
            self._moved[target] = reason
            logger.warning("%s is moved to %s: %s", source, target, reason)

    def skip(self, path: Path, reason: str) -> None:
        """Leave a file where it is, and out of the index from now on."""
        self.skipped[str(path)] = reason
        logger.warning("%s is skipped: %s", path, reason)

    def reasons(self) -> dict[str, str]:
        """{path: reason} of all of them."""
        unknown = "an earlier process moved it to quarantine, and has logged the reason"
        return self.skipped | self.unreadable | {str(f): self._moved.get(f, unknown) for f in self._quarantined()}

    def delete_quarantine(self) -> None:
        """Delete the files in quarantine that are named as a `amago.store.TrajectoryWriter` names them; others stay."""
        for path in self._quarantined():
            match = _QUARANTINED.fullmatch(path.name)
            if match and any(pattern.fullmatch(match["name"]) for pattern in (formats.SEGMENT_NAME, formats.NPZ_NAME)):
                path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # it is not empty, or not there
            (self._root / QUARANTINE).rmdir()

    def _quarantined(self) -> list[Path]:
        directory = self._root / QUARANTINE
        if directory.is_symlink():
            return []
        return sorted(p for p in directory.glob("*") if p.is_symlink() or p.is_file())


# The order and the index for the next process

JOURNAL, CACHE = "order.journal", "index.cache"
WORTH_SAVING = 64
"""The index of fewer new files is not saved: checking that many headers takes some 10 ms."""
Stamps = dict[tuple[str, str], tuple[int, int]]
"""{(partition, name): (size, mtime_ns)} of the files that were compared with their checksums before, in the order of their
addition."""


def read_order(root: Path) -> Stamps:
    """The recorded order of a buffer's files. It has a line for each, with a checksum; a damaged line is left out, so that its file
    is checked again and comes last."""
    try:
        parts = [line.partition(b" ") for line in (root / JOURNAL).read_bytes().splitlines()]
        sound = [text for crc, _, text in parts if crc == b"%08x" % zlib.crc32(text)]
        records = json.loads(b"[" + b",".join(sound) + b"]")  # 3 times as fast as by line
        return {(partition, name): (int(size), int(mtime_ns)) for partition, name, size, mtime_ns in records}
    except FileNotFoundError:
        pass
    except (ValueError, TypeError, OSError) as err:
        logger.warning("%s cannot be read, so files are ordered by their names: %s", root / JOURNAL, err)
    return {}


def write_order(root: Path, entries: Iterable[Entry]) -> None:
    """Record the order of a buffer's files; a crash leaves the old one or the new one. A failure is logged."""
    texts = (json.dumps([e.partition, e.name, e.size, e.mtime_ns], separators=(",", ":")).encode() for e in entries)
    data = b"".join(b"%08x %s\n" % (zlib.crc32(text), text) for text in texts)
    try:
        replace_file(root / JOURNAL, lambda path: path.write_bytes(data))
    except OSError as err:
        logger.warning("the order of the files in %s could not be recorded: %s", root, err)


def read_index(root: Path) -> dict[tuple[str, str], Entry]:
    """The saved index, with which a buffer is opened again without opening each file: {(partition, name): entry}."""
    try:
        with open(root / CACHE, "rb") as file, np.load(file, allow_pickle=False) as saved:
            about = json.loads(saved["about"].tobytes())
            offsets, start_time, env_id = (saved[name] for name in sc.INDEX)
        schemas = [sc.schema_of(spaces, names) for spaces, names in about["schemas"]]
        env_names = [tuple(names) for names in about["env_names"]]
        found, at = {}, 0
        for i, (partition, name, size, mtime_ns, schema, places, n, names, writer, sequence) in enumerate(about["files"]):
            index = offsets[at + i : at + i + n + 1], start_time[at : at + n], env_id[at : at + n]
            where = partition, name, size, mtime_ns
            entry = Entry(*where, False, schemas[schema], tuple(places), n, *index, env_names[names], writer, sequence)
            found[partition, name] = entry
            at += n
        if not len(start_time) == len(env_id) == at == len(offsets) - len(found):
            raise BadFileError("its lengths do not agree")
        return found
    except FileNotFoundError:
        pass
    except Exception as err:  # without it, each file is opened
        logger.warning("%s is not used: %r", root / CACHE, err)
    return {}


def write_index(root: Path, entries: Iterable[Entry]) -> None:
    """Save the entries of files in which rows lie as in memory. A failure is logged."""
    entries = [e for e in entries if not e.original and all(isinstance(place, int) for place in e.places)]
    schemas = {x: i for i, x in enumerate(dict.fromkeys(e.schema for e in entries))}
    names = {x: i for i, x in enumerate(dict.fromkeys(e.env_names for e in entries))}
    files = [
        (e.partition, e.name, e.size, e.mtime_ns, schemas[e.schema], e.places, e.n, names[e.env_names], e.writer, e.sequence)
        for e in entries
    ]
    about = {"schemas": [(s.spaces, s.names) for s in schemas], "env_names": list(names), "files": files}
    columns = zip((np.zeros(0, np.int64),) * 3, *(e.index for e in entries))
    arrays: dict[str, Any] = {name: np.concatenate(column) for name, column in zip(sc.INDEX, columns)}
    arrays["about"] = np.frombuffer(json.dumps(about).encode(), np.uint8)

    def write(path: Path) -> None:
        with open(path, "wb") as file:  # a path would get the suffix .npz
            np.savez(file, **arrays)

    try:
        replace_file(root / CACHE, write)
    except OSError as err:
        logger.warning("the index of %s could not be saved; the next process will open each file: %s", root, err)
