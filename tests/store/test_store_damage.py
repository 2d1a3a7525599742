"""Files that are damaged, hostile, or not ours: moved aside, counted, never returned, and never a crash."""

import errno
import io
import json
import logging
import os
import pickle
import resource
import struct
import tracemalloc
import zipfile
import zlib

import numpy as np
import pytest
from store_helpers import KINDS, assert_numbered, episodes, opened, put

from amago.store import DamagedError, EvictedError, TrajectoryStore
from amago.store import index as ix
from amago.store import segment as sg
from amago.store import view as view_module


def quarantined(root):
    return sorted(p.name for p in (root / "quarantine").iterdir()) if (root / "quarantine").exists() else []


def one_file(root, save_as="segments"):
    [path] = put(root, [7] if save_as != "segments" else [7, 8], save_as=save_as, steps=6).iterdir()
    return path


def assert_refused(root, name, reason, caplog=None):
    """A fresh store moves the file aside, says why, and has nothing."""
    store = TrajectoryStore(root)
    report = store.refresh()
    assert (report.quarantined_files, report.added, len(store)) == (1, 0, 0)
    assert store.info()["quarantined"] == 1
    assert quarantined(root) == [f"fifo-{name}"]
    assert not (root / "fifo" / name).is_symlink()
    assert not (root / "fifo" / name).exists()
    if caplog is not None:
        assert reason in caplog.text
    assert store.refresh().quarantined_files == 0


def test_a_bad_file_does_not_stop_the_good_ones(tmp_path, caplog):
    put(tmp_path, [1, 2], "a")
    put(tmp_path, [3], "b")
    bad = tmp_path / "fifo" / "a-000000000000-n2.safetensors"
    content = bytearray(bad.read_bytes())
    content[-1] ^= 1
    bad.write_bytes(content)
    with caplog.at_level(logging.WARNING, "amago.store"):
        store = opened(tmp_path)
    assert episodes(store) == [3]
    assert "the checksum of" in caplog.text
    assert str(bad) in caplog.text


def test_without_edit_rights_bad_files_stay_and_are_counted_once(tmp_path):
    path = one_file(tmp_path)
    path.write_bytes(b"nonsense")
    store = opened(tmp_path, edit=False)
    assert store.refresh().quarantined_files == 0
    assert store.info()["quarantined"] == 1
    assert path.exists()
    path.unlink()
    store.refresh()
    put(tmp_path, [4])  # the name is used again, for a good file
    store.refresh()
    assert episodes(store) == [4]


@pytest.mark.parametrize("name", ["notes.txt", "x.pt", "w-000000000000-n1.safetensors", "x.npz", "x.npy", "x.zip"])
@pytest.mark.parametrize("content", [b"", b"\0", b"hello", b"PK\5\6" + bytes(18), os.urandom(300), b"\x93NUMPY\x01\x00"])
def test_foreign_and_empty_files(tmp_path, name, content):
    (tmp_path / "fifo").mkdir()
    (tmp_path / "fifo" / name).write_bytes(content)
    assert_refused(tmp_path, name, "")


def test_hidden_files_are_left_alone(tmp_path):
    put(tmp_path, [1])
    (tmp_path / "fifo" / ".nfs0001").write_bytes(b"x")
    store = opened(tmp_path)
    assert (store.info()["quarantined"], store.info()["files"]) == (0, 1)
    assert (tmp_path / "fifo" / ".nfs0001").exists()


def test_directories_are_skipped_not_moved(tmp_path, caplog):
    (tmp_path / "protected" / "expert.npz").mkdir(parents=True)
    with caplog.at_level(logging.WARNING, "amago.store"):
        store = opened(tmp_path)
    assert store.info()["quarantined"] == 1
    assert (tmp_path / "protected" / "expert.npz").is_dir()
    assert "not a regular file" in caplog.text


@pytest.mark.parametrize("dangling", [True, False])
def test_links_are_not_followed(tmp_path, caplog, dangling):
    outside = one_file(tmp_path / "other")
    root = tmp_path / "buffer"
    (root / "fifo").mkdir(parents=True)
    link = root / "fifo" / outside.name
    link.symlink_to(tmp_path / "nothing" if dangling else outside)
    with caplog.at_level(logging.WARNING, "amago.store"):
        assert_refused(root, outside.name, "symbolic link", caplog)
    assert outside.is_file()


@pytest.mark.timeout(20)
def test_pipes_do_not_block(tmp_path, caplog):
    (tmp_path / "fifo").mkdir()
    os.mkfifo(tmp_path / "fifo" / "w-000000000000-n1.safetensors")
    with caplog.at_level(logging.WARNING, "amago.store"):
        assert_refused(tmp_path, "w-000000000000-n1.safetensors", "not a regular file", caplog)


def test_every_letter_of_a_header_is_covered(tmp_path, caplog):
    """What is not needed to find the data (here a name) is protected by the header's own checksum."""
    path = one_file(tmp_path)
    raw = path.read_bytes()
    assert raw.count(b"counting") == 1
    path.write_bytes(raw.replace(b"counting", b"bounding"))
    with caplog.at_level(logging.WARNING, "amago.store"):
        assert_refused(tmp_path, path.name, "header's checksum is wrong", caplog)


# Headers that lie, with checksums that are right


def forge(path, change):
    """Rewrite a segment's header; its checksum is made to agree."""
    raw = path.read_bytes()
    (length,) = struct.unpack_from("<Q", raw)
    header = json.loads(raw[8 : 8 + length])
    data = change(header) or raw[8 + length :]
    text = json.dumps(header, separators=(",", ":")).encode()
    prefix = struct.pack("<Q", len(text))
    at = sg._CRC_AT
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


def rename_key(header):
    header["obs/../../x"] = header.pop("obs/image")


def overlap(header):
    begin, _ = header["ep_offsets"]["data_offsets"]
    header["start_time"]["data_offsets"] = [begin, begin + 16]


LIES = {
    "terabytes": (entry("obs/image", shape=[2**40, 3]), "cannot be bytes"),
    "more than 64 bits": (entry("obs/image", shape=[2**40, 2**40], data_offsets=[0, 2**80]), "cannot be bytes"),
    "negative": (entry("rews", data_offsets=[-4, 44]), "not non-negative integers"),
    "negative shape": (entry("rews", shape=[-3, -4]), "not non-negative integers"),
    "reversed": (entry("rews", data_offsets=[48, 0]), "cannot be bytes"),
    "overlapping": (overlap, "begins at byte"),
    "fraction": (entry("rews", shape=[12.0, 1]), "not non-negative integers"),
    "true": (entry("rews", shape=[12, True]), "not non-negative integers"),
    "dtype": (entry("rews", dtype="BF16"), "cannot be read"),
    "no dict": (lambda h: h.update(rews=[1, 2]), "cannot be read"),
    "path": (rename_key, "looks like a path"),
    "missing": (lambda h: h.pop("dones") and None, ""),
    "version": (meta(version="2"), "version '2'"),
    "format": (meta(format="pt"), "format 'pt'"),
    "crc": (meta(crc32="{}"), "checksum"),
    "crc list": (meta(crc32="[]"), "checksums"),
    "env names": (meta(env_names="[]"), "env_id points outside"),
    "env names no list": (meta(env_names='"abc"'), "environment names"),
    "sequence": (meta(sequence="x"), "header cannot be read"),
    "spaces": (meta(spaces="{"), "spaces cannot be read"),
    "nested spaces": (meta(spaces="[" * 100_000), "spaces cannot be read"),
    "huge space": (spaces(lambda s: s.update(action={"kind": "Box", "shape": [2**45], "dtype": "float32", "low": 0, "high": 1})), ""),
    "huge bits": (spaces(lambda s: s.update(action={"kind": "MultiBinary", "shape": [2**45]})), "actions have rows"),
    "other action": (spaces(lambda s: s.update(action={"kind": "MultiBinary", "shape": [1]})), "actions are int64"),
    "other obs": (spaces(lambda s: s["obs"]["spaces"].pop("image")), "do not have the recorded shapes"),
    "other dtype": (spaces(lambda s: s["obs"]["spaces"]["image"].update(dtype="int8")), "do not have the recorded"),
    "wrong bounds": (spaces(lambda s: s["obs"]["spaces"]["image"].update(low=[1, 2])), "spaces cannot be read"),
}  # fmt: skip


@pytest.mark.parametrize("lie", LIES)
def test_headers_that_lie(tmp_path, caplog, lie):
    change, reason = LIES[lie]
    path = one_file(tmp_path)
    forge(path, change)
    tracemalloc.start()
    with caplog.at_level(logging.WARNING, "amago.store"):
        assert_refused(tmp_path, path.name, reason, caplog)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 50 << 20


def rewrite_field(name, values):
    def apply(header):
        path = apply.path
        raw = path.read_bytes()
        (length,) = struct.unpack_from("<Q", raw)
        data = bytearray(raw[8 + length :])
        begin, end = header[name]["data_offsets"]
        new = np.asarray(values, sg.sc.CODES[header[name]["dtype"]]).tobytes()
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
    change = rewrite_field(name, values)
    change.path = path
    forge(path, change)
    with caplog.at_level(logging.WARNING, "amago.store"):
        assert_refused(tmp_path, path.name, reason, caplog)


def test_a_forged_header_that_tells_the_truth_is_read(tmp_path):
    """The forger above works: what it makes is refused for its lie alone."""
    path = one_file(tmp_path)
    forge(path, lambda header: None)
    assert episodes(opened(tmp_path)) == [7, 8]


def test_a_file_name_that_lies(tmp_path, caplog):
    path = one_file(tmp_path)
    path.rename(path.with_name("w-000000000000-n3.safetensors"))
    with caplog.at_level(logging.WARNING, "amago.store"):
        assert_refused(tmp_path, "w-000000000000-n3.safetensors", "does not say that it holds 2", caplog)


def test_sparse_giants_are_not_read(tmp_path, caplog):
    (tmp_path / "fifo").mkdir()
    for name in ("w-000000000000-n1.safetensors", "x.npz"):
        with open(tmp_path / "fifo" / name, "wb") as file:
            file.write(struct.pack("<Q", 2**40))
            file.truncate(2**41)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with caplog.at_level(logging.WARNING, "amago.store"):
        assert opened(tmp_path).info()["quarantined"] == 2
    assert caplog.text.count("bytes are more than the") == 2
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50_000  # KB


# Archives


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
    "objects": (lambda c: c.update({"rews.npy": npy(np.array([None], object), allow_pickle=True)}), "array of objects"),
    "pickle": (lambda c: c.update({"rews.npy": pickle.dumps([1])}), "not a .npy array"),
    "records": (lambda c: c.update({"rews.npy": npy(np.zeros(6, [("x", "f4")]))}), "array of objects or records"),
    "fortran": (lambda c: c.update({"obs/image.npy": npy(np.asfortranarray(np.zeros((7, 2, 2, 3), "u1")))}), "Fortran"),
    "big endian": (lambda c: c.update({"rews.npy": npy(np.zeros((6, 1), ">f4"))}), "dtype >f4 is not supported"),
    "complex": (lambda c: c.update({"rews.npy": npy(np.zeros((6, 1), "c8"))}), "dtype complex64 is not supported"),
    "terabytes": (lambda c: c.update({"rews.npy": npy_header("{'descr': '<f4', 'fortran_order': False, 'shape': (1099511627776, 1), }")}), "declares float32"),
    "expression": (lambda c: c.update({"rews.npy": npy_header("{'descr': '<f4', 'fortran_order': False, 'shape': (2**40, 1), }")}), "array of objects"),
    "not an array": (lambda c: c.update({"readme.txt": b"hello"}), "is not a .npy array"),
    "unknown": (lambda c: c.update({"extra.npy": npy(np.zeros(3))}), "unknown field 'extra'"),
    "path": (lambda c: c.update({"obs/../../x.npy": npy(np.zeros((7, 1), "f4"))}), "looks like a path"),
    "missing": (lambda c: c.pop("dones.npy"), "field 'dones' is missing"),
    "no metadata": (lambda c: c.pop("metadata.npy"), "'metadata' is missing"),
    "metadata": (lambda c: c.update({"metadata.npy": npy(np.frombuffer(b"{]", np.uint8))}), "metadata cannot be read"),
    "deep metadata": (lambda c: c.update({"metadata.npy": npy(np.frombuffer(b"[" * 100_000, np.uint8))}), "metadata cannot be read"),
    "two trajectories": (lambda c: c.update({"ep_offsets.npy": npy(np.array([0, 2, 6]))}), ""),
    "bool": (lambda c: c.update({"dones.npy": npy(np.zeros((6, 1), bool))[:-1] + b"\2"}), "bytes other than 0 and 1"),
}  # fmt: skip


@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
@pytest.mark.parametrize("case", ARCHIVES)
def test_archives_that_lie(tmp_path, caplog, case, method):
    path = one_file(tmp_path, "npz")
    change, reason = ARCHIVES[case]
    repack(path, change, method)
    with caplog.at_level(logging.WARNING, "amago.store"):
        assert_refused(tmp_path, path.name, reason, caplog)


def test_repacking_alone_does_no_harm(tmp_path):
    path = one_file(tmp_path, "npz")
    repack(path, lambda content: None, zipfile.ZIP_DEFLATED)
    assert episodes(opened(tmp_path)) == [7]


def test_other_compression_methods_are_refused(tmp_path, caplog):
    path = one_file(tmp_path, "npz")
    repack(path, lambda content: None, zipfile.ZIP_BZIP2)
    with caplog.at_level(logging.WARNING, "amago.store"):
        assert_refused(tmp_path, path.name, "other than deflate", caplog)


@pytest.mark.parametrize("name", ["evil.npz", "evil.npy", "evil.pkl", "w-000000000000-n1.safetensors"])
def test_a_pickle_under_any_name_is_never_run(tmp_path, name):
    Evil.path = str(tmp_path / "executed")
    (tmp_path / "fifo").mkdir()
    (tmp_path / "fifo" / name).write_bytes(pickle.dumps(Evil()))
    assert_refused(tmp_path, name, "")
    assert not (tmp_path / "executed").exists()


def test_a_pickle_inside_an_archive_is_never_run(tmp_path):
    Evil.path = str(tmp_path / "executed")
    path = one_file(tmp_path, "npz")
    repack(path, lambda c: c.update({"rews.npy": npy(np.array([Evil()], object), allow_pickle=True)}))
    assert_refused(tmp_path, path.name, "")
    assert not (tmp_path / "executed").exists()


def test_a_member_that_unpacks_to_more_than_it_says(tmp_path, caplog):
    path = one_file(tmp_path, "npz-compressed")
    raw = bytearray(path.read_bytes())
    at = raw.index(b"PK\1\2")
    while raw[at : at + 4] == b"PK\1\2":  # every member declares a megabyte more than it has
        size = struct.unpack_from("<L", raw, at + 24)[0]
        struct.pack_into("<L", raw, at + 24, size + 2**20)
        at += 46 + sum(struct.unpack_from("<3H", raw, at + 28))
    path.write_bytes(raw)
    with caplog.at_level(logging.WARNING, "amago.store"):
        assert_refused(tmp_path, path.name, "cannot be in a file", caplog)


def central(raw, name):
    """Where the zip directory's entry of a member begins."""
    return raw.rindex(name.encode()) - 46


def test_members_that_are_not_what_the_directory_calls_them(tmp_path, caplog):
    path = one_file(tmp_path, "npz")
    raw = bytearray(path.read_bytes())
    at = central(raw, "prev_reward.npy") + 46
    raw[at : at + 11] = b"prev_action"
    path.write_bytes(raw)
    with caplog.at_level(logging.WARNING, "amago.store"):
        assert_refused(tmp_path, path.name, "disagrees with the zip directory", caplog)


def test_members_inside_each_other(tmp_path, caplog):
    [path] = put(tmp_path, [7], save_as="npz", steps=40).iterdir()
    raw = path.read_bytes()
    begin = struct.unpack_from("<L", raw, central(raw, "dones.npy") + 42)[0]
    record = raw[begin : begin + 30 + 9 + 128 + 40]  # local header, name, array header, 40 bytes
    image = np.zeros((41, 2, 2, 3), np.uint8)
    image.reshape(-1)[: len(record)] = np.frombuffer(record, np.uint8)
    repack(path, lambda c: c.update({"obs/image.npy": npy(image)}))
    raw = bytearray(path.read_bytes())
    struct.pack_into("<L", raw, central(raw, "dones.npy") + 42, raw.index(record))
    path.write_bytes(raw)
    with caplog.at_level(logging.WARNING, "amago.store"):
        assert_refused(tmp_path, path.name, "zip members overlap", caplog)


def test_more_after_the_end_of_a_compressed_member(tmp_path, caplog):
    path = one_file(tmp_path, "npz")
    whole = {}
    stream = zlib.compressobj(wbits=-15)

    def compress(content):
        whole["data"] = content["rews.npy"]
        content["rews.npy"] = stream.compress(whole["data"]) + stream.flush() + b"junk"

    repack(path, compress)  # stored so far; then declared to be compressed
    raw = bytearray(path.read_bytes())
    at = central(raw, "rews.npy")
    local = struct.unpack_from("<L", raw, at + 42)[0]
    for method, crc in ((at + 10, at + 16), (local + 8, local + 14)):
        struct.pack_into("<H", raw, method, 8)
        struct.pack_into("<L", raw, crc, zlib.crc32(whole["data"]))
        struct.pack_into("<L", raw, crc + 8, len(whole["data"]))
    path.write_bytes(raw)
    with caplog.at_level(logging.WARNING, "amago.store"):
        assert_refused(tmp_path, path.name, "does not end where the zip directory says", caplog)


def test_checking_a_bomb_takes_little_memory(tmp_path, caplog):
    """56 MB of zeros in 60 kB, declared and summed correctly: unpacked a piece at a time, then found not to fit the space."""
    path = one_file(tmp_path, "npz")
    repack(path, lambda c: c.update({"obs/image.npy": npy(np.zeros((7, 8 << 20), np.uint8))}), zipfile.ZIP_DEFLATED)
    assert path.stat().st_size < 100_000
    tracemalloc.start()
    with caplog.at_level(logging.WARNING, "amago.store"):
        assert_refused(tmp_path, path.name, "do not have the recorded shapes", caplog)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 10 << 20


def test_a_huge_zip_directory_is_not_read(tmp_path, caplog):
    path = tmp_path / "fifo" / "x.npz"
    path.parent.mkdir()
    with open(path, "wb") as file:
        file.truncate(1 << 30)
        file.seek(0, os.SEEK_END)
        file.write(struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, 1, 1, 1 << 30, 0, 0))
    tracemalloc.start()
    with caplog.at_level(logging.WARNING, "amago.store"):
        assert_refused(tmp_path, path.name, f"a zip directory of {1 << 30} bytes", caplog)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 10 << 20


# After a file was taken in


@pytest.mark.parametrize("save_as", KINDS)
def test_a_file_cut_short_later_goes_to_quarantine(tmp_path, save_as, caplog):
    path = one_file(tmp_path, save_as)
    put(tmp_path, [1], "z")
    store = opened(tmp_path)
    view = store.view()
    assert_numbered(view.read(0))
    os.truncate(path, 100)  # the descriptor is still open
    with (
        caplog.at_level(logging.WARNING, "amago.store"),
        pytest.raises(DamagedError, match=f"{path} has been damaged: .*; draw"),
    ):
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


def test_a_file_that_was_touched_is_checked_once_more_and_kept(tmp_path, monkeypatch):
    path = one_file(tmp_path)
    store, checked, real = opened(tmp_path), [], sg.check_data
    monkeypatch.setattr(sg, "check_data", lambda *args: checked.append(1) or real(*args))
    os.utime(path)
    for _ in range(3):
        assert assert_numbered(store.read(1)) == 8
    assert checked == [1]
    assert store.refresh().added == 0


def test_a_file_replaced_by_another_good_one_is_taken_in_anew(tmp_path, caplog):
    path = one_file(tmp_path)
    store = opened(tmp_path)
    [other] = put(tmp_path / "other", [3, 4], steps=9).iterdir()
    os.replace(other, path)
    store.close()  # what is open is the old file, and still good
    with pytest.raises(EvictedError, match="has been replaced by another file"):
        store.read(0)
    assert store.refresh().added == 2
    assert episodes(store) == [3, 4]
    assert store.info()["quarantined"] == 0


def test_a_file_written_to_all_the_time_is_given_up_for_now(tmp_path, monkeypatch):
    path = one_file(tmp_path)
    store, real = opened(tmp_path), ix.recheck

    def recheck(*args):
        real(*args)
        os.utime(path, ns=(0, os.stat(path).st_mtime_ns - 10**9))

    monkeypatch.setattr(ix, "recheck", recheck)
    os.utime(path, ns=(0, 0))
    with pytest.raises(EvictedError, match="is being written to"):
        store.read(0)
    assert len(store) == 0
    store.refresh()
    assert episodes(opened(tmp_path)) == [7, 8]


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE])
def test_a_file_that_cannot_be_read_now_is_tried_again_at_the_next_refresh(tmp_path, monkeypatch, number):
    one_file(tmp_path)
    put(tmp_path, [1], "z")
    store = opened(tmp_path)

    def broken(*args):
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(view_module, "_preadv", broken)
        with pytest.raises(EvictedError, match=r"n1\.safetensors cannot be read now: .*Errno"):
            store.read(2)
    assert episodes(store) == [7, 8]
    assert store.refresh().added == 1
    assert episodes(store) == [7, 8, 1]
    with monkeypatch.context() as patch:  # a fault of this process, not of the file
        patch.setattr(view_module, "_preadv", lambda *args: (_ for _ in ()).throw(OSError(errno.EMFILE, "too many")))
        with pytest.raises(OSError, match="too many"):
            store.read(0)
    assert episodes(store) == [7, 8, 1]


def test_damage_seen_without_edit_rights_or_in_another_process(tmp_path):
    path = one_file(tmp_path)
    reader, owner = opened(tmp_path, edit=False), opened(tmp_path)
    copy = pickle.loads(pickle.dumps(owner.view()))
    flip(path)
    for view in (reader.view(), copy):
        with pytest.raises(DamagedError):
            view.read(0)
        assert path.exists()
    assert (len(reader), reader.info()["quarantined"]) == (0, 1)
    assert len(owner) == 2
    again = pickle.loads(pickle.dumps(owner))  # a copy of a store sees to it that its own index forgets the file
    with pytest.raises(DamagedError):
        again.read(0)
    assert (len(again), path.exists()) == (0, False)


def test_many_damaged_files_do_not_each_renew_a_long_index(tmp_path, monkeypatch):
    for i in range(60):
        put(tmp_path, [i], f"w{i:02}", steps=2)
    store, views = opened(tmp_path), []
    real = TrajectoryStore._publish
    monkeypatch.setattr(TrajectoryStore, "_publish", lambda self: (views.append(1), real(self)))
    view = store.view()
    for i, path in enumerate(sorted((tmp_path / "fifo").iterdir())[:9]):
        flip(path)
        with pytest.raises(DamagedError):
            view.read(i)
        with pytest.raises(EvictedError):
            store.read(i) if len(store) == 60 else view.read(i)
    assert len(views) == 3
    store.refresh()
    assert episodes(store) == list(range(9, 60))


def test_a_file_deleted_by_someone_else(tmp_path):
    path = one_file(tmp_path)
    store = opened(tmp_path)
    path.unlink()
    view = store.view()
    with pytest.raises(EvictedError, match="has been deleted"):
        store.read(0)
    assert len(store) == 0  # who draws until it succeeds must not draw this for ever
    with pytest.raises(EvictedError, match="has been deleted"):
        view.read(0)
    assert store.refresh().vanished_files == 1
    assert store.refresh().vanished_files == 0


def test_a_file_that_another_thread_has_found_right_again_is_read_again(tmp_path, monkeypatch):
    """Damaged while it was read, mended, and checked by someone else before this reader looks at the time stamp."""
    path = one_file(tmp_path)
    store, real, calls = opened(tmp_path), os.fstat, []
    store.read(0)

    def fstat(fd):
        calls.append(fd)
        if len(calls) == 1:
            flip(path)
            flip(path)
            ix.recheck(str(tmp_path), store.view()._entries[0])
        return real(fd)

    monkeypatch.setattr(view_module, "_fstat", fstat)
    assert assert_numbered(store.read(0)) == 7
    assert len(calls) == 2
