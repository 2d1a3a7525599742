"""The saved index: a shortcut that never changes what a store holds, and never hides a file that was written to."""

import numpy as np
import pytest
from store_helpers import assert_numbered, assert_same, episodes, numbered, opened, put, writer

from amago.store import index as ix


@pytest.fixture(autouse=True)
def _save_small_ones(monkeypatch):
    monkeypatch.setattr(ix, "WORTH_SAVING", 1)


@pytest.fixture
def looked_into(monkeypatch):
    """The files whose headers were read."""
    names, real = [], ix.load
    monkeypatch.setattr(ix, "load", lambda root, part, name, *rest: names.append(name) or real(root, part, name, *rest))
    return names


def fill(root):
    """Three kinds of files, in both partitions."""
    put(root, [1, 2, 3], "a", steps=5)
    put(root, [4], "b", steps=7)
    put(root, [5, 6], "c", save_as="npz", part="protected")
    put(root, [7], "d", save_as="npz-compressed")
    with writer(root, "e") as w:
        w.write(numbered(8, 3, start_time=6, env_name="other"))
        w.write(numbered(9, 2))


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
    assert (looked_into, (episodes(store), store.info()["quarantined"])) == ([path.name], ([2], 1))


@pytest.mark.parametrize(
    "damage", [lambda b: b[:-1], lambda b: b[:500] + bytes([b[500] ^ 1]) + b[501:], lambda b: b"", lambda b: b"nonsense"]
)
def test_a_damaged_cache_is_not_used(tmp_path, looked_into, caplog, damage):
    fill(tmp_path)
    opened(tmp_path)
    cache = tmp_path / ix.CACHE
    cache.write_bytes(damage(cache.read_bytes()))
    looked_into.clear()
    assert (len(opened(tmp_path)), len(looked_into)) == (9, 6)
    assert "index.cache is not used" in caplog.text
