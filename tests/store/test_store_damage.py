"""Files that are damaged, hostile, or not ours: moved aside, counted, never returned, and never a crash."""

import errno
import io
import json
import os
import pickle
import resource
import struct
import tracemalloc
import zipfile
import zlib

import numpy as np
import pytest
from messages import refused
from store_helpers import KINDS, assert_numbered, episodes, one_file, opened, put

from amago.store import DamagedError, EvictedError, TrajectoryStore
from amago.store.schema import CODES


def quarantined(root):
    return sorted(p.name for p in (root / "quarantine").iterdir()) if (root / "quarantine").exists() else []


def assert_refused(root, name, reason, caplog=None):
    """A fresh store moves the file aside, says why, and has nothing."""
    store = TrajectoryStore(root)
    report = store.refresh()
    assert (report.quarantined_files, report.added, len(store)) == (1, 0, 0)
    assert (store.info()["quarantined"], quarantined(root)) == (1, [f"fifo-{name}"])
    assert not (root / "fifo" / name).exists()
    if caplog is not None:
        assert reason in caplog.text
    assert store.refresh().quarantined_files == 0


@pytest.mark.parametrize("relative", [False, True])
def test_without_edit_rights_bad_files_stay_and_are_counted_once(tmp_path, monkeypatch, relative):
    path = one_file(tmp_path)
    path.write_bytes(b"nonsense")
    monkeypatch.chdir(tmp_path)
    store = opened("." if relative else tmp_path, edit=False)
    assert (store.refresh().quarantined_files, store.info()["quarantined"]) == (0, 1)
    assert path.exists()
    path.unlink()
    store.refresh()
    put(tmp_path, [4])  # the name is used again, for a good file
    store.refresh()
    assert episodes(store) == [4]


@pytest.mark.parametrize("name", ["notes.txt", "w-000000000000-n1.safetensors", "x.npz"])
@pytest.mark.parametrize("content", [b"", b"hello", b"PK\5\6" + bytes(18), b"\x93NUMPY\x01\x00"])
def test_foreign_and_empty_files(tmp_path, name, content):
    (tmp_path / "fifo").mkdir()
    (tmp_path / "fifo" / name).write_bytes(content)
    assert_refused(tmp_path, name, "")


@pytest.mark.timeout(20)
def test_pipes_do_not_block(tmp_path, caplog):
    (tmp_path / "fifo").mkdir()
    os.mkfifo(tmp_path / "fifo" / "w-000000000000-n1.safetensors")
    assert_refused(tmp_path, "w-000000000000-n1.safetensors", "not a regular file", caplog)


def forge(path, change):
    """Rewrite a segment's header; its checksum is made to agree."""
    raw = path.read_bytes()
    (length,) = struct.unpack_from("<Q", raw)
    header = json.loads(raw[8 : 8 + length])
    data = change(header) or raw[8 + length :]
    text = json.dumps(header, separators=(",", ":")).encode()
    prefix = struct.pack("<Q", len(text))
    at = text.index(b"header_crc32") + 15
    zeroed = text[:at] + b"00000000" + text[at + 8 :]
    path.write_bytes(prefix + text[:at] + b"%08x" % zlib.crc32(prefix + zeroed) + text[at + 8 :] + data)


def entry(name, **kwargs):
    return lambda h: h[name].update(kwargs) or None


def meta(**kwargs):
    return lambda h: h["__metadata__"].update(kwargs) or None


def spaces(change):
    def apply(header):
        value = json.loads(header["__metadata__"]["spaces"])
        change(value)
        header["__metadata__"]["spaces"] = json.dumps(value)

    return apply


LIES = {
    "terabytes": (entry("obs/image", shape=[2**40, 3]), "cannot be bytes"),
    "more than 64 bits": (entry("obs/image", shape=[2**40, 2**40], data_offsets=[0, 2**80]), "cannot be bytes"),
    "negative": (entry("rews", data_offsets=[-4, 44]), "cannot be bytes"),
    "negative shape": (entry("rews", shape=[-3, -4]), "recorded spaces ask for"),
    "dtype": (entry("rews", dtype="BF16"), "cannot be read"),
    "no dict": (lambda h: h.update(rews=[1, 2]), "cannot be read"),
    "missing": (lambda h: h.pop("dones") and None, "field 'dones' is missing"),
    "version": (meta(version="2"), "version '2'"),
    "format": (meta(format="pt"), "format 'pt'"),
    "crc": (meta(crc32="{}"), "checksum"),
    "crc list": (meta(crc32="[]"), "cannot be read"),
    "env names": (meta(env_names="[]"), "env_id points outside"),
    "env names no list": (meta(env_names='"abc"'), "environment names"),
    "spaces": (meta(spaces="{"), "spaces cannot be read"),
    "nested spaces": (meta(spaces="[" * 100_000), "spaces cannot be read"),
    "huge space": (spaces(lambda s: s.update(action={"kind": "Box", "shape": [2**45], "dtype": "float32", "low": 0, "high": 1})), "spaces cannot be read"),
    "other action": (spaces(lambda s: s.update(action={"kind": "MultiBinary", "shape": [1]})), "'actions' is int64"),
    "other obs": (spaces(lambda s: s["obs"]["spaces"].pop("image")), "unknown field 'obs/image'"),
    "other dtype": (spaces(lambda s: s["obs"]["spaces"]["image"].update(dtype="int8")), ""),
    "wrong bounds": (spaces(lambda s: s["obs"]["spaces"]["image"].update(low=[1, 2])), "spaces cannot be read"),
}  # fmt: skip


@pytest.mark.parametrize("lie", LIES)
def test_headers_that_lie(tmp_path, caplog, lie):
    change, reason = LIES[lie]
    path = one_file(tmp_path)
    forge(path, change)
    tracemalloc.start()
    assert_refused(tmp_path, path.name, reason, caplog)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 50 << 20


def rewrite_field(path, name, values):
    def apply(header):
        raw = path.read_bytes()
        (length,) = struct.unpack_from("<Q", raw)
        data = bytearray(raw[8 + length :])
        begin, end = header[name]["data_offsets"]
        new = np.asarray(values, CODES[header[name]["dtype"]]).tobytes()
        assert len(new) == end - begin
        data[begin:end] = new
        crcs = json.loads(header["__metadata__"]["crc32"])
        header["__metadata__"]["crc32"] = json.dumps(crcs | {name: zlib.crc32(new)})
        return bytes(data)

    return apply


@pytest.mark.parametrize(
    ("name", "values", "reason"),
    [
        ("ep_offsets", [0, 13, 12], "do not rise"),
        ("ep_offsets", [0, 0, 12], "do not rise"),
        ("ep_offsets", [1, 6, 12], "do not rise"),
        ("ep_offsets", [0, 6, 2**62], "do not rise"),
        ("ep_offsets", [0, -(2**63), 12], "do not rise"),
        ("start_time", [0, -1], "start_time is negative"),
        ("env_id", [0, 1], "env_id points outside"),
        ("env_id", [-1, 0], "env_id points outside"),
    ],
)
def test_indices_that_lie(tmp_path, caplog, name, values, reason):
    path = one_file(tmp_path)
    forge(path, rewrite_field(path, name, values))
    assert_refused(tmp_path, path.name, reason, caplog)


def repack(path, change, method=zipfile.ZIP_STORED):
    """Rewrite an archive's members, a dict of name -> bytes."""
    with zipfile.ZipFile(path) as archive:
        content = {name: archive.read(name) for name in archive.namelist()}
    change(content)
    with zipfile.ZipFile(path, "w", method) as archive:
        for name, data in content.items():
            archive.writestr(name, data)


def npy(a, **kwargs):
    out = io.BytesIO()
    np.lib.format.write_array(out, np.asarray(a), **kwargs)
    return out.getvalue()


def npy_header(text):
    text = text.encode() + b"\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text


class Evil:
    def __reduce__(self):
        return (open, (Evil.path, "w"))


ARCHIVES = {
    "objects": (lambda c: c.update({"rews.npy": npy(np.array([Evil()], object), allow_pickle=True)}), "dtype object"),
    "pickle": (lambda c: c.update({"rews.npy": pickle.dumps([1])}), "not an archive of plain arrays"),
    "fortran": (lambda c: c.update({"obs/image.npy": npy(np.asfortranarray(np.zeros((7, 2, 2, 3), "u1")))}), "Fortran"),
    "big endian": (lambda c: c.update({"rews.npy": npy(np.zeros((6, 1), ">f4"))}), "dtype >f4"),
    "terabytes": (lambda c: c.update({"rews.npy": npy_header("{'descr': '<f4', 'fortran_order': False, 'shape': (1099511627776, 1), }")}), "declares float32"),
    "expression": (lambda c: c.update({"rews.npy": npy_header("{'descr': '<f4', 'fortran_order': False, 'shape': (2**40, 1), }")}), "plain arrays"),
    "not an array": (lambda c: c.update({"readme.txt": b"hello"}), "plain arrays"),
    "unknown": (lambda c: c.update({"extra.npy": npy(np.zeros(3))}), "unknown field 'extra'"),
    "missing": (lambda c: c.pop("dones.npy"), "field 'dones' is missing"),
    "no metadata": (lambda c: c.pop("metadata.npy"), "'metadata' is missing"),
    "metadata": (lambda c: c.update({"metadata.npy": npy(np.frombuffer(b"{]", np.uint8))}), "metadata cannot be read"),
    "two trajectories": (lambda c: c.update({"ep_offsets.npy": npy(np.array([0, 2, 6]))}), ""),
}  # fmt: skip


@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
@pytest.mark.parametrize("case", ARCHIVES)
def test_archives_that_lie(tmp_path, caplog, case, method):
    Evil.path = str(tmp_path / "executed")
    path = one_file(tmp_path, "npz")
    change, reason = ARCHIVES[case]
    repack(path, change, method)
    assert_refused(tmp_path, path.name, reason, caplog)
    assert not (tmp_path / "executed").exists()


def test_checking_a_bomb_takes_little_memory(tmp_path, caplog):
    """56 MB of zeros in 60 kB, declared and summed correctly: unpacked a piece at a time, then found not to fit the space."""
    path = one_file(tmp_path, "npz")
    repack(path, lambda c: c.update({"obs/image.npy": npy(np.zeros((7, 8 << 20), np.uint8))}), zipfile.ZIP_DEFLATED)
    assert path.stat().st_size < 100_000
    tracemalloc.start()
    assert_refused(tmp_path, path.name, "but the recorded spaces ask for", caplog)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 10 << 20


@pytest.mark.parametrize("save_as", KINDS)
def test_a_file_cut_short_later_goes_to_quarantine(tmp_path, save_as, caplog):
    path = one_file(tmp_path, save_as)
    put(tmp_path, [1], "z")
    store = opened(tmp_path)
    view = store.view()
    assert_numbered(view.read(0))
    os.truncate(path, 100)  # the descriptor is still open
    with pytest.raises(DamagedError, match=f"{path} has been damaged: .*; draw"):
        view.read(0)
    assert "is moved to" in caplog.text
    assert quarantined(tmp_path) == [f"fifo-{path.name}"]
    assert (store.info()["quarantined"], store.info()["files"]) == (1, 1)
    assert episodes(store) == [1]  # at once, not at the next refresh
    with pytest.raises(EvictedError):  # who still has the old view draws again
        view.read(0)
    assert store.refresh().vanished_files == 0


def flip(path, offset=-1):
    """In place, without a change of size."""
    with open(path, "r+b") as file:
        file.seek(offset, os.SEEK_END if offset < 0 else os.SEEK_SET)
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 1]))


@pytest.mark.parametrize("open_already", [True, False])
def test_a_byte_flipped_later_is_never_handed_out(tmp_path, open_already):
    path = one_file(tmp_path)
    store = opened(tmp_path)
    view = store.view()
    if open_already:
        assert_numbered(view.read(0))
    flip(path)
    for i in (0, 1):  # also the trajectory that the byte is not in
        with pytest.raises(EvictedError):
            view.read(i, 0, 1)
    assert (len(store), store.info()["quarantined"]) == (0, 1)


def test_a_file_replaced_by_another_good_one_is_taken_in_anew(tmp_path, caplog):
    path = one_file(tmp_path)
    store = opened(tmp_path)
    [other] = put(tmp_path / "other", [3, 4], steps=9).iterdir()
    os.replace(other, path)
    store.close()  # what is open is the old file, and still good
    with refused(EvictedError, "has been replaced by another file"):
        store.read(0)
    assert (store.refresh().added, episodes(store), store.info()["quarantined"]) == (2, [3, 4], 0)


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE])
def test_a_file_that_cannot_be_read_now_is_tried_again_at_the_next_refresh(tmp_path, monkeypatch, number):
    one_file(tmp_path)
    put(tmp_path, [1], "z")
    store = opened(tmp_path)

    def broken(*args):
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr("amago.store.view._preadv", broken)
        with pytest.raises(EvictedError, match=r"n1\.safetensors cannot be read now: .*Errno"):
            store.read(2)
    assert (episodes(store), store.refresh().added, episodes(store)) == ([7, 8], 1, [7, 8, 1])
    with monkeypatch.context() as patch:  # a fault of this process, not of the file
        patch.setattr("amago.store.view._preadv", lambda *args: (_ for _ in ()).throw(OSError(errno.EMFILE, "too many")))
        with refused(OSError, "too many"):
            store.read(0)
    assert episodes(store) == [7, 8, 1]


def test_sparse_giants_are_not_read(tmp_path, caplog):
    (tmp_path / "fifo").mkdir()
    for name in ("w-000000000000-n1.safetensors", "x.npz"):
        with open(tmp_path / "fifo" / name, "wb") as file:
            file.write(struct.pack("<Q", 2**40))
            file.truncate(2**41)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert opened(tmp_path).info()["quarantined"] == 2
    assert "is declared in a file of" in caplog.text
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50_000  # KB
