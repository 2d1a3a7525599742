"""The saved index: a shortcut that never changes what a store holds, and never hides a file that was written to."""

import os
import zlib

import numpy as np
import pytest
import safetensors.numpy
from store_helpers import assert_numbered, assert_same, episodes, numbered, opened, put, writer

from amago.store import TrajectoryStore, index_cache
from amago.store import index as ix
from amago.store import record as record_module


@pytest.fixture(autouse=True)
def _save_small_ones(monkeypatch):
    monkeypatch.setattr(record_module, "WORTH_SAVING", 1)


@pytest.fixture
def looked_into(monkeypatch):
    """The files whose headers were read."""
    names, real = [], ix.load
    monkeypatch.setattr(
        ix, "load", lambda directory, partition, name, *rest: names.append(name) or real(directory, partition, name, *rest)
    )
    return names


def fill(root):
    """Three kinds of files, in both partitions; returns the names of those that the cache can hold."""
    put(root, [1, 2, 3], "a", steps=5)
    put(root, [4], "b", steps=7)
    put(root, [5, 6], "c", save_as="npz", part="protected")
    put(root, [7], "d", save_as="npz-compressed")
    with writer(root, "e") as w:
        w.write(numbered(8, 3, start_time=6, env_name="other"))
        w.write(numbered(9, 2))


def rewrite(root, change):
    """Change the arrays of a cache; its checksum is right again afterwards."""
    path = root / index_cache.NAME
    arrays = {k: v.copy() for k, v in safetensors.numpy.load(path.read_bytes()[9:]).items()}
    change(arrays)
    data = safetensors.numpy.save(arrays)
    path.write_bytes(b"%08x\n" % zlib.crc32(data) + data)


def test_the_same_store_without_looking_into_files(tmp_path, looked_into):
    fill(tmp_path)
    before = opened(tmp_path)
    assert len(looked_into) == 6
    looked_into.clear()
    after = opened(tmp_path)
    [name] = looked_into  # compressed files are not in it
    assert name.startswith("counting_d-")
    assert episodes(after) == episodes(before)
    assert sorted(episodes(after)) == list(range(1, 10))
    np.testing.assert_array_equal(after.lengths, before.lengths)
    for i in range(len(before)):
        assert_numbered(after.read(i))
        assert_same(after.read(i), before.read(i))
        assert_same(after.read(i, 1, 2), before.read(i, 1, 2))
        assert (after.env_name(i), after.view().path(i)) == (before.env_name(i), before.view().path(i))
        assert after.action_spec(i).space == before.action_spec(i).space
    assert after.info() == before.info()


def test_a_file_that_was_written_to_is_checked_again(tmp_path, looked_into):
    [path] = put(tmp_path, [1], "a").iterdir()
    put(tmp_path, [2], "b")
    opened(tmp_path)
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)
    looked_into.clear()
    store = opened(tmp_path)
    assert looked_into == [path.name]
    assert (episodes(store), store.info()["quarantined"]) == ([2], 1)


def test_without_the_journal_everything_is_checked(tmp_path, looked_into):
    fill(tmp_path)
    opened(tmp_path)
    (tmp_path / "order.journal").unlink()
    looked_into.clear()
    assert len(opened(tmp_path)) == 9
    assert len(looked_into) == 6


def test_links_are_never_followed(tmp_path):
    [path] = put(tmp_path, [1], "a").iterdir()
    opened(tmp_path)
    info = path.stat()
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    os.utime(path, ns=(info.st_mtime_ns, info.st_mtime_ns), follow_symlinks=False)
    assert len(opened(tmp_path)) == 0


@pytest.mark.parametrize("damage", [lambda b: b[:-1], lambda b: b[:20] + b"\0" + b[21:], lambda b: b"", lambda b: b"nonsense"])
def test_a_damaged_cache_is_not_used(tmp_path, looked_into, caplog, damage):
    fill(tmp_path)
    opened(tmp_path)
    cache = tmp_path / index_cache.NAME
    cache.write_bytes(damage(cache.read_bytes()))
    looked_into.clear()
    assert len(opened(tmp_path)) == 9
    assert len(looked_into) == 6
    assert "index.cache is not used" in caplog.text


def _set(name, at, value):
    def change(arrays):
        arrays[name][at] = value

    return change


@pytest.mark.parametrize(
    "change",
    [
        _set("ep_offsets", 1, 1 << 40),
        _set("ep_offsets", 0, 1),
        _set("ep_offsets", 2, -5),
        _set("places", (0, 0), -8),
        _set("places", (0, 3), 1 << 62),
        _set("env_id", 0, 7),
        _set("start_time", 0, -1),
        _set("columns", (4, 0), 2),
        _set("columns", (4, 0), 1 << 61),
        _set("columns", (6, 0), 5),
        _set("columns", (7, 0), -1),
        _set("columns", (0, 0), ix.TRAJ),
        lambda arrays: arrays.pop("places"),
        lambda arrays: arrays.update(about=np.frombuffer(b"[]", np.uint8)),
        lambda arrays: arrays.update(env_id=arrays["env_id"][:-1].copy()),
    ],
    ids=range(15),
)
def test_what_cannot_be_is_not_used(tmp_path, looked_into, caplog, change):
    fill(tmp_path)
    expected = episodes(opened(tmp_path))
    rewrite(tmp_path, change)
    looked_into.clear()
    assert episodes(opened(tmp_path)) == expected
    assert len(looked_into) == 6
    assert "index.cache is not used" in caplog.text


def test_it_is_renewed_when_it_lacks_a_quarter_and_goes_with_the_buffer(tmp_path, monkeypatch, looked_into):
    for i in range(8):
        put(tmp_path, [i], f"w{i}")
    store = opened(tmp_path)
    first = (tmp_path / index_cache.NAME).read_bytes()
    put(tmp_path, [8], "x")
    store.refresh()
    assert (tmp_path / index_cache.NAME).read_bytes() == first
    put(tmp_path, [9, 10], "y")
    put(tmp_path, [11], "z")
    store.refresh()
    assert (tmp_path / index_cache.NAME).read_bytes() != first
    looked_into.clear()
    assert len(opened(tmp_path)) == 12
    assert looked_into == []
    store.delete()
    assert not (tmp_path / index_cache.NAME).exists()


def test_who_may_not_edit_reads_it_but_does_not_write_it(tmp_path, looked_into):
    fill(tmp_path)
    opened(tmp_path, edit=False)
    assert not (tmp_path / index_cache.NAME).exists()
    opened(tmp_path)
    looked_into.clear()
    assert len(opened(tmp_path, edit=False)) == 9
    assert len(looked_into) == 1


def test_a_cache_that_cannot_be_written_does_no_harm(tmp_path, caplog):
    fill(tmp_path)
    (tmp_path / index_cache.NAME).mkdir()
    store = TrajectoryStore(tmp_path)
    store.refresh()
    assert len(store) == 9
    assert "could not be saved" in caplog.text
    assert not [path.name for path in tmp_path.iterdir() if path.name.startswith(".tmp-")]
