"""The index entry of each file, the files that are not sampled, and the record of a buffer's files for the next process."""

from __future__ import annotations

import itertools
import json
import logging
import os
import re
import stat
import time
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np

from amago.data.trajectory import SEQUENCE_ROWS
from amago.store import formats, system
from amago.store import schema as sc
from amago.store.files import BadFileError, EvictedError, open_regular, replace_file, write_all

logger = logging.getLogger(__name__)

FIFO, PROTECTED = "fifo", "protected"
PARTITIONS = (PROTECTED, FIFO)
"""The directories of a buffer, in the order of their indices."""
QUARANTINE = "quarantine"
_QUARANTINED = re.compile(r"([0-9]+-)?(fifo|protected)-(?P<name>.*)", re.DOTALL)

TICK_NS = 12_000_000
"""Longer than the resolution of file time stamps, 10 ms at worst."""
RAW, PACKED, ORIGINAL = range(3)
"""Kinds of files: rows lie in the file as in memory; in compressed arrays; as the original system has written them."""


@dataclass(slots=True, eq=False)
class Entry:
    """A file that has been checked, with the position of every field: reading a slice does not need the header.

    Attributes:
        size, mtime_ns: the file's, when its data was compared with its checksums.
        places: for each part of the schema, the offset of its rows, or its `formats.Member` if PACKED; of ORIGINAL files the
            members by their names in the file.
        n: trajectories.
        ep_offsets, start_time, env_id: as in `amago.store.schema`.
        gone: the file was deleted, so that its trajectories must not be drawn any more.
    """

    partition: str
    name: str
    size: int
    mtime_ns: int
    kind: int
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
        OSError: it cannot be opened or read (FileNotFoundError: it is gone).
    """
    fd, info = open_regular(f"{root}/{partition}/{name}")
    try:
        age = time.time_ns() - info.st_mtime_ns
        if 0 <= age < TICK_NS:  # an immediate write must not get the same time stamp
            time.sleep((TICK_NS - age) / 1e9)
            info = os.fstat(fd)
        if info.st_size > sc.MAX_FILE_BYTES:
            raise BadFileError(f"{info.st_size} bytes are more than the {sc.MAX_FILE_BYTES} that a file may have")
        known = (info.st_size, info.st_mtime_ns) == checked
        where = partition, name, info.st_size, info.st_mtime_ns
        if name.endswith(".safetensors"):
            return _load(where, fd, formats.parse_segment(fd, info.st_size), known)
        if not name.endswith(".npz"):
            raise BadFileError("neither .safetensors nor .npz: not a trajectory file")
        members = formats.archive_members(fd)
        if "metadata" not in members and members.keys() >= SEQUENCE_ROWS.keys():
            return _load_original(where, fd, members, known)
        return _load(where, fd, formats.parse_archive(fd, members), known)
    finally:
        os.close(fd)


def _load(where: tuple[str, str, int, int], fd: int, contents: formats.Contents, trusted: bool) -> Entry:
    members, name = contents.members, where[1]
    schema = sc.schema_of(contents.spaces, members)
    n, total = schema.fit(members)
    match = formats.SEGMENT_NAME.fullmatch(name)
    if (name.endswith(".npz") and n != 1) or (not name.endswith(".npz") and (match is None or int(match["n"]) != n)):
        raise BadFileError(f"the name does not say that it holds {n} trajectories")
    if not trusted:
        for member in members.values():
            member.check(fd)
    ep_offsets, start_time, env_id = (members[x].read(fd) for x in sc.INDEX)
    names = sc.check_index(ep_offsets, start_time, env_id, total, contents.env_names)
    places: tuple[Any, ...] = tuple(members[name] for name in schema.names)
    kind = PACKED if any(m.packed for m in places) else RAW
    if kind == RAW:
        places = tuple(m.at + m.skip for m in places)
    index = ep_offsets, start_time, env_id
    return Entry(*where, kind, schema, places, n, *index, names, contents.writer, contents.sequence)


def _load_original(where: tuple[str, str, int, int], fd: int, members: dict[str, formats.Member], trusted: bool) -> Entry:
    total, start_time = formats.check_original(fd, members, trusted)
    env_name, writer, sequence = formats.of_original_name(where[1])
    vectors = gym.spaces.Box(-1.0, 1.0, members["actions"].shape[1:], np.float32)  # the space is unknown
    schema = sc.schema_of(sc.spaces_text(formats.widest_space(formats.observations_of(members)), vectors))
    index = np.array([0, total]), np.array([start_time]), np.zeros(1, np.int32)
    return Entry(*where, ORIGINAL, schema, members, 1, *index, (env_name,), writer, sequence)


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
    same = (now.kind, now.n, now.places, now.env_names) == (entry.kind, entry.n, entry.places, entry.env_names)
    same = same and (entry.kind == ORIGINAL or now.schema == entry.schema)  # the original's files record no spaces
    if not (same and all(map(np.array_equal, now.index, entry.index))):
        raise EvictedError(f"{entry.where} has been replaced by another file; draw another index")
    entry.size, entry.mtime_ns = now.size, now.mtime_ns


# Files that are not sampled


class RefusedFiles:
    """The files of a buffer that are not sampled: damaged ones are moved to ``{root}/quarantine`` as ``{partition}-{name}``.

    Attributes:
        bad: by partition, {name: reason} of the files that are skipped where they lie.
        unreadable: {path: reason} of the files that could not be read when they were last tried.
        count: number of files that were moved or skipped so far.
    """

    def __init__(self, root: Path, edit: bool) -> None:
        self._root, self._edit = root, edit
        self.bad: dict[str, dict[str, str]] = {p: {} for p in PARTITIONS}
        self.unreadable: dict[str, str] = {}
        self._moved: dict[str, str] = {}  # by name in quarantine
        self.count = 0

    def set_aside(self, partition: str, name: str, err: Exception) -> None:
        """Move a file that cannot be used to quarantine, or skip it from now on. Files of the original system are never
        moved."""
        source = self._root / partition / name
        reason = str(err) if isinstance(err, BadFileError) else f"unexpected {err!r:.200}"
        self.count += 1
        self.bad[partition][name] = reason
        others = formats.ORIGINAL_NAME.fullmatch(name) is not None
        if not self._edit or others or (source.is_dir() and not source.is_symlink()):
            logger.warning("%s is skipped: %s", source, reason)
            return
        directory = self._root / QUARANTINE
        names = (f"{n}{partition}-{name}"[:240] for n in itertools.chain([""], (f"{i}-" for i in itertools.count(1))))
        target = next(directory / n for n in names if not os.path.lexists(directory / n))
        try:
            directory.mkdir(exist_ok=True)
            os.rename(source, target)
        except OSError as problem:
            logger.warning("%s is skipped: %s (and it cannot be moved to quarantine: %s)", source, reason, problem)
            return
        del self.bad[partition][name]
        self._moved[target.name] = reason
        logger.warning("%s is moved to %s: %s", source, target, reason)

    def reasons(self) -> dict[str, str]:
        """{path: reason} of all of them."""
        skipped = {str(self._root / p / name): reason for p in PARTITIONS for name, reason in self.bad[p].items()}
        unknown = "an earlier process moved it to quarantine, and has logged the reason"
        return skipped | self.unreadable | {str(f): self._moved.get(f.name, unknown) for f in self._quarantined()}

    def delete_quarantine(self) -> None:
        """Delete the files in quarantine that are named as a `amago.store.TrajectoryWriter` names them; others stay."""
        for path in self._quarantined():
            match = _QUARANTINED.fullmatch(path.name)
            if match and any(pattern.fullmatch(match["name"]) for pattern in (formats.SEGMENT_NAME, formats.NPZ_NAME)):
                path.unlink(missing_ok=True)
        directory = self._root / QUARANTINE
        if directory.is_dir() and not directory.is_symlink() and not any(directory.iterdir()):
            directory.rmdir()

    def _quarantined(self) -> list[Path]:
        directory = self._root / QUARANTINE
        if not directory.is_dir() or directory.is_symlink():
            return []
        return sorted(p for p in directory.iterdir() if p.is_symlink() or p.is_file())


# The record for the next process

Key = tuple[str, str]
Stamps = dict[Key, tuple[int, int]]
"""{(partition, name): (size, mtime_ns)} of the files that were compared with their checksums before, in the order of their
addition."""
JOURNAL, CACHE = "order.journal", "index.cache"
WORTH_SAVING = 64
"""The index of fewer new files is not saved: checking that many headers takes some 10 ms."""


class Record:
    """The order in which a buffer's files were added, and their index.

    ``order.journal`` has a line for each file, with a checksum; a damaged line is skipped, so that its file is checked again and
    comes last. ``index.cache`` is an ``.npz`` archive of the entries, with which a buffer is opened again without opening each
    file: 1,000,000 trajectories in 20,000 files take 0.45 s with it and 2.6 s without.

    Args:
        root: the buffer's directory.

    Attributes:
        cache: entries of the saved index, once `load` has read it.
        looked_into: files that were opened because the saved index lacks them.
    """

    def __init__(self, root: Path) -> None:
        self._root, self._lines, self._incomplete = root, 0, False
        self.looked_into = 0
        self.cache: dict[Key, Entry] = {}

    def load(self) -> Stamps:
        """Read the saved index, and the recorded order, which is returned."""
        try:
            self.cache = {(e.partition, e.name): e for e in _load_cache(self._root / CACHE)}
        except FileNotFoundError:
            pass
        except Exception as err:  # without the cache, each file is opened
            logger.warning("%s is not used: %r", self._root / CACHE, err)
        try:
            lines = (self._root / JOURNAL).read_bytes().splitlines()
            self._lines = len(lines)
            parts = [line.partition(b" ") for line in lines]
            sound = [text for crc, _, text in parts if crc == b"%08x" % zlib.crc32(text)]
            found: Stamps = {}
            for partition, name, size, mtime_ns in json.loads(b"[" + b",".join(sound) + b"]"):  # 3 times as fast as by line
                found.pop((partition, name), None)  # the last place of a name that was used again counts
                found[partition, name] = (int(size), int(mtime_ns))
            return found
        except FileNotFoundError:
            pass
        except (ValueError, TypeError, OSError) as err:
            logger.warning("%s cannot be read, so files are ordered by their names: %s", self._root / JOURNAL, err)
        return {}

    def cached(self, partition: str, name: str, checked: tuple[int, int] | None) -> Entry | None:
        """The entry of a file; None if it is unknown or has been written to since it was compared with its checksums."""
        entry = self.cache.get((partition, name))
        if entry is None or (entry.size, entry.mtime_ns) != checked:
            return None
        info = os.lstat(f"{self._root}/{partition}/{name}")
        return entry if (info.st_size, info.st_mtime_ns) == checked and stat.S_ISREG(info.st_mode) else None

    def add(self, live: list[Entry], new: list[Entry], recorded: Stamps) -> None:
        """Record new files. A failure is logged, and the next call tries again.

        Args:
            live: all files, in their order.
            new: those among them that are new to this process.
            recorded: the journal's records of these.
        """
        fresh = [e for e in new if (e.partition, e.name) not in recorded]
        touched = any(recorded.get((e.partition, e.name), (e.size, e.mtime_ns)) != (e.size, e.mtime_ns) for e in new)
        try:
            if touched or self._incomplete or self._lines + len(fresh) > 2 * len(live) + 1024:
                self.rewrite(live)
            elif fresh:
                self._append(fresh)
            self._incomplete = False
        except OSError as err:
            self._incomplete = True
            logger.warning("the order of the files in %s could not be recorded: %s", self._root, err)

    def _append(self, entries: list[Entry]) -> None:
        fd = os.open(
            self._root / JOURNAL,
            os.O_RDWR | system.O_BINARY | os.O_CREAT | os.O_APPEND | system.O_NOFOLLOW | system.O_CLOEXEC,
            0o644,
        )
        try:
            end, data = os.lseek(fd, 0, os.SEEK_END), _lines(entries)
            if end and system.pread(fd, 1, end - 1) != b"\n":
                data = b"\n" + data  # keeps a line that a crash has cut short apart from the next
            write_all(fd, data)
            os.fsync(fd)
        finally:
            os.close(fd)
        self._lines += len(entries)

    def rewrite(self, live: list[Entry]) -> None:
        """Replace the recorded order; a crash leaves the old one or the new one."""
        data = _lines(live)
        replace_file(self._root / JOURNAL, lambda path: path.write_bytes(data))
        self._lines = len(live)

    def save_index(self, live: list[Entry]) -> None:
        """Save the index when the saved one lacks a quarter of the files, which took longer to check than saving takes."""
        if self.looked_into < WORTH_SAVING or 4 * self.looked_into < len(live):
            return
        try:
            replace_file(self._root / CACHE, lambda path: _save_cache(path, [e for e in live if e.kind == RAW]))
        except OSError as err:
            logger.warning("the index of %s could not be saved; the next process will open each file: %s", self._root, err)
        self.looked_into = 0

    def forget_deleted(self, live: list[Entry]) -> None:
        """Keep only the records of the remaining files."""
        for name in (CACHE, JOURNAL):
            (self._root / name).unlink(missing_ok=True)
        if live:
            self.rewrite(live)
            self.looked_into = len(live)
            self.save_index(live)


def _lines(entries: Iterable[Entry]) -> bytes:
    texts = (json.dumps([e.partition, e.name, e.size, e.mtime_ns], separators=(",", ":")).encode() for e in entries)
    return b"".join(b"%08x %s\n" % (zlib.crc32(text), text) for text in texts)


def _save_cache(path: Path, entries: Sequence[Entry]) -> None:
    schemas = {x: i for i, x in enumerate(dict.fromkeys(e.schema for e in entries))}
    names = {x: i for i, x in enumerate(dict.fromkeys(e.env_names for e in entries))}
    files = [
        (e.partition, e.name, e.size, e.mtime_ns, schemas[e.schema], e.places, e.n, names[e.env_names], e.writer, e.sequence)
        for e in entries
    ]
    about = {"schemas": [(s.spaces, s.names) for s in schemas], "env_names": list(names), "files": files}
    columns = zip((np.zeros(0, np.int64),) * 3, *(e.index for e in entries))
    arrays = {name: np.concatenate(column) for name, column in zip(sc.INDEX, columns)}
    with open(path, "wb") as file:
        np.savez(file, about=np.frombuffer(json.dumps(about).encode(), np.uint8), **arrays)  # type: ignore[arg-type]


def _load_cache(path: Path) -> list[Entry]:
    """The saved entries; any exception if the file is not what `_save_cache` writes (archives have checksums)."""
    with open(path, "rb") as file, np.load(file, allow_pickle=False) as saved:
        about = json.loads(saved["about"].tobytes())
        offsets, start_time, env_id = (saved[name] for name in sc.INDEX)
    schemas = [sc.schema_of(spaces, names) for spaces, names in about["schemas"]]
    env_names = [tuple(names) for names in about["env_names"]]
    entries, at = [], 0
    for i, (partition, name, size, mtime_ns, schema, places, n, names, writer, sequence) in enumerate(about["files"]):
        index = offsets[at + i : at + i + n + 1], start_time[at : at + n], env_id[at : at + n]
        where = partition, name, size, mtime_ns
        entries.append(
            Entry(*where, RAW, schemas[schema], tuple(places), n, *index, env_names[names], writer, sequence)
        )  # fmt: skip
        at += n
    if not len(start_time) == len(env_id) == at == len(offsets) - len(entries):
        raise BadFileError("its lengths do not agree")
    return entries
