"""Which trajectories there are, in which order, and which are deleted."""

import gc
import json
import os
import pickle
import random
import time

import numpy as np
import pytest
from messages import check_refused, refused
from store_helpers import assert_numbered, episodes, opened, put

from amago.store import EvictedError, PickleRefusedError, TrajectoryStore, files


def names(root, part="fifo"):
    return {p.name for p in (root / part).iterdir()}


def test_files_found_at_once_are_ordered_by_sequence_then_writer_never_by_time(tmp_path):
    put(tmp_path, [2], "b")
    put(tmp_path, [4], "b")
    put(tmp_path, [1], "a")
    put(tmp_path, [5], "c", "npz")  # a single archive, sequence 0
    put(tmp_path, [3], "a")
    rng = random.Random(0)
    for path in (tmp_path / "fifo").iterdir():
        os.utime(path, (0, rng.randrange(10**9)))
    assert episodes(opened(tmp_path)) == [1, 2, 5, 3, 4]


def test_the_oldest_are_evicted_by_whole_files(tmp_path):
    store = TrajectoryStore(tmp_path, max_trajectories=5)
    total = 0
    for i in range(8):
        put(tmp_path, [10 * i, 10 * i + 1], "ab"[i % 2])
        total += 2
        for path in (tmp_path / "fifo").iterdir():
            os.utime(path, (0, 10**9 - i))
        report = store.refresh()
        assert (report.added, report.added_files) == (2, 1)
        assert len(store) <= 5 + 2 - 1
        assert len(store) >= min(total, 5)
        assert episodes(store) == [10 * k + j for k in range(max(0, i - 2), i + 1) for j in range(2)]
    assert len(names(tmp_path)) == 3
    assert store.info() | {"bytes": 0} == {
        "trajectories": 6, "trajectories_fifo": 6, "trajectories_protected": 0, "timesteps": 24, "files": 3,
        "bytes": 0, "ingested": 16, "evicted": 10, "quarantined": 0,
    }  # fmt: skip


def test_without_edit_rights_nothing_on_disk_changes(tmp_path):
    for i in range(4):
        put(tmp_path, [i])
    before = names(tmp_path)
    store = opened(tmp_path, 1, edit=False)
    assert (len(store), names(tmp_path)) == (4, before)
    assert not (tmp_path / "order.journal").exists()
    with refused(PermissionError, "edit=False"):
        store.delete()


def test_a_restart_keeps_the_order_and_evicts_the_same(tmp_path):
    store = TrajectoryStore(tmp_path, 4)
    for i, name in enumerate("dbca"):
        put(tmp_path, [i], name)
        store.refresh()
    for path in (tmp_path / "fifo").iterdir():  # copied back from somewhere, say
        os.utime(path)
    again = opened(tmp_path, 4)
    assert episodes(again) == [0, 1, 2, 3]
    put(tmp_path, [4], "a")
    again.refresh()
    assert episodes(opened(tmp_path, 4)) == [1, 2, 3, 4]


@pytest.mark.parametrize(
    "harm",
    [
        lambda p: p.write_bytes(p.read_bytes()[:-20]),
        lambda p: p.write_bytes(b"\n\nnonsense\n" + p.read_bytes()),
        lambda p: p.write_bytes(b"x" * 10**5 + b"\n" + p.read_bytes()),
        lambda p: p.write_bytes(p.read_bytes() + b"00000000 [1]\n" + b"f" * 10),
    ],
    ids=["cut short", "nonsense", "long line", "foreign lines"],
)
def test_a_damaged_journal_costs_a_place_at_most(tmp_path, harm):
    store = TrajectoryStore(tmp_path)
    for i, name in enumerate("dcba"):
        put(tmp_path, [i], name)
        store.refresh()
    harm(tmp_path / "order.journal")
    again = opened(tmp_path)
    assert episodes(again) == [0, 1, 2, 3]
    put(tmp_path, [4], "0")
    again.refresh()
    assert episodes(opened(tmp_path)) == [0, 1, 2, 3, 4]


def test_state_is_json_and_restores_order_and_counters(tmp_path):
    store = TrajectoryStore(tmp_path, 3)
    for i, name in enumerate("edcb"):
        put(tmp_path, [i], name)
        store.refresh()
    put(tmp_path, [9], "p", part="protected")
    store.refresh()
    state = json.loads(json.dumps(store.state_dict()))
    (tmp_path / "order.journal").unlink()
    put(tmp_path, [4], "a")  # unknown to the state: last
    again = TrajectoryStore(tmp_path, 4)
    again.load_state_dict(state)
    assert episodes(again) == [9, 1, 2, 3, 4]
    check_refused(ValueError, *(("state", lambda bad=bad: again.load_state_dict(bad)) for bad in ({}, {"version": 2})))
    assert [again.info()[k] for k in ("ingested", "evicted", "trajectories_protected")] == [5, 1, 1]
    assert episodes(opened(tmp_path, 4)) == [9, 1, 2, 3, 4]


def everything(root):
    return {str(p.relative_to(root)) for p in root.rglob("*") if p.is_file()}


P1, P2 = "protected/p-000000000000-n1.safetensors", "protected/q-000000000000-n1.safetensors"
BAD = "bad-000000000000-n1.safetensors"


def partly_foreign(root):
    """A buffer with all kinds of files, and its store: two fifo files, two protected, a damaged one, notes, a foreign archive."""
    put(root, [1, 2], "a")
    put(root, [3], "p", part="protected")
    put(root, [4], "q", part="protected")
    (root / "fifo" / BAD).write_bytes(b"bad")
    np.savez(root / "fifo" / "mine.npz", x=np.arange(3))
    store = opened(root)
    put(root, [5], "late")  # not in the index
    (root / "notes.txt").write_text("mine")
    (root / "fifo" / "folder").mkdir()
    (root / "fifo" / "folder" / "notes.txt").write_text("mine")
    return store


FOREIGN = {"notes.txt", "fifo/folder/notes.txt", "quarantine/fifo-mine.npz"}


def test_delete_clears_the_fifo_alone(tmp_path):
    store = partly_foreign(tmp_path)
    view = store.view()
    store.delete()
    assert everything(tmp_path) == FOREIGN | {P1, P2, f"quarantine/fifo-{BAD}", "order.journal"}
    assert episodes(store) == [3, 4]
    with pytest.raises(EvictedError):
        view.read(2)
    assert view.read(0).obs["a/b"][0, 0] == 3  # an index drawn before is still valid
    put(tmp_path, [6], "a")
    store.refresh()
    assert episodes(store) == episodes(opened(tmp_path)) == [3, 4, 6]


@pytest.mark.parametrize(
    ("options", "left"),
    [
        ({"delete_protected": True}, {f"quarantine/fifo-{BAD}"}),
        ({"delete_quarantine": True}, {P1, P2, "order.journal"}),
        ({"delete_protected": True, "delete_quarantine": True}, set()),
    ],
    ids=["protected", "quarantine", "both"],
)
def test_more_is_deleted_on_request_but_never_what_is_not_ours(tmp_path, options, left):
    store = partly_foreign(tmp_path)
    store.delete(**options)
    assert everything(tmp_path) == FOREIGN | left
    assert episodes(store) == ([] if "delete_protected" in options else [3, 4])


def test_every_refused_file_is_listed_with_the_reason(tmp_path):
    put(tmp_path, [1])
    put(tmp_path, [2], part="protected")
    (tmp_path / "protected" / "README.md").write_text("mine")
    np.savez(tmp_path / "fifo" / "mine.npz", x=np.arange(3))
    (tmp_path / "fifo" / "folder").mkdir()
    expected = {
        "fifo/folder": "not a regular file",
        "quarantine/fifo-mine.npz": "the array 'metadata' is missing",
        "quarantine/protected-README.md": "neither .safetensors nor .npz",
    }
    first, second = opened(tmp_path), opened(tmp_path)
    refused = {os.path.relpath(path, tmp_path): reason for path, reason in first.refused().items()}
    assert refused.keys() == expected.keys()
    for path, part in expected.items():
        assert part in refused[path]
    assert "an earlier process" in second.refused()[str(tmp_path / "quarantine" / "fifo-mine.npz")]
    assert opened(tmp_path, edit=False).refused().keys() == first.refused().keys()


def test_temporary_files_of_the_dead_are_removed_and_those_of_the_living_are_not(tmp_path):
    put(tmp_path, [1])
    put(tmp_path, [2], part="protected")
    child = os.posix_spawn("/bin/true", ["true"], {})
    os.waitpid(child, 0)
    alive = files.temporary(tmp_path / "fifo")
    dead = alive.with_name(alive.name.replace(f"-{os.getpid()}-", f"-{child}-"))
    elsewhere, old = tmp_path / "fifo" / ".tmp-00000000-1-aa", tmp_path / "protected" / ".tmp-what"
    journal = tmp_path / dead.name  # of a learner that was killed while it rewrote the order
    for path in (dead, alive, elsewhere, old, journal):
        path.write_bytes(b"half a fi")
    os.utime(old, (0, time.time() - 3600))
    assert opened(tmp_path, edit=False).info()["files"] == 2
    assert dead.exists()
    store = TrajectoryStore(tmp_path)
    assert store.refresh().temporary_files == 3
    assert [p.exists() for p in (dead, alive, elsewhere, old, journal)] == [False, True, True, False, False]


def test_an_index_of_before_the_eviction(tmp_path):
    for i in range(3):
        put(tmp_path, [i])
    store = opened(tmp_path)
    view = store.view()
    store.max_trajectories = 1
    store.refresh()
    assert episodes(store) == [2]
    with refused(EvictedError, "index 2 was drawn before files were deleted"):
        store.read(2)
    with refused(EvictedError, "draw another index"):
        view.read(0)
    assert assert_numbered(view.read(2)) == 2
    with pytest.raises(IndexError):
        store.read(3)


def test_stores_and_views_go_to_other_processes(tmp_path):
    put(tmp_path, [5, 6])
    store = opened(tmp_path)
    store.read(0)
    for copy in (pickle.loads(pickle.dumps(store)), pickle.loads(pickle.dumps(store.view()))):
        assert assert_numbered(copy.read(1, 1, 3), 1) == 6
        assert copy.action_spec(0).space == store.action_spec(0).space
    again = pickle.loads(pickle.dumps(store))
    put(tmp_path, [7])
    again.refresh()
    assert episodes(again) == [5, 6, 7]


def test_files_are_closed_when_the_store_is_dropped(tmp_path):
    put(tmp_path, [1])
    store = opened(tmp_path)
    gc.collect()
    gc.disable()  # not only when the collector next runs
    try:
        before = len(os.listdir("/proc/self/fd"))
        store.read(0)
        assert len(os.listdir("/proc/self/fd")) == before + 1
        del store
        assert len(os.listdir("/proc/self/fd")) == before
    finally:
        gc.enable()


def test_quarantine_keeps_files_of_one_name_apart(tmp_path):
    store = TrajectoryStore(tmp_path)
    for content in (b"one", b"two"):
        (tmp_path / "fifo" / "x.npz").write_bytes(content)
        store.refresh()
    assert {p.read_bytes() for p in (tmp_path / "quarantine").iterdir()} == {b"one", b"two"}
    assert store.info()["quarantined"] == 2


@pytest.mark.parametrize(
    ("limits", "left"),
    [
        ({}, [0, 1, 2, 3, 4, 5, 6]),
        ({"max_trajectories": 5}, [2, 3, 4, 5, 6]),
        ({"max_steps": 90}, [2, 3, 4, 5, 6]),
        ({"max_steps": 40}, [3, 4, 5, 6]),
        ({"max_trajectories": 5, "max_steps": 40}, [3, 4, 5, 6]),
        ({"max_steps": 0}, []),
        ({"max_bytes": 1}, [6]),
    ],
)
def test_the_oldest_files_go_until_every_limit_holds_to_within_one_file(tmp_path, limits, left):
    for name, (found, steps) in enumerate((((0, 1), 10), ((2,), 50), ((3, 4, 5), 10), ((6,), 10))):
        put(tmp_path, found, f"w{name}", steps=steps)
    assert episodes(opened(tmp_path, **limits)) == left
    for name in ("max_trajectories", "max_steps", "max_bytes"):
        with pytest.raises(ValueError, match=name):
            TrajectoryStore(tmp_path, **{name: -1})


def test_pickles_are_refused_at_first_and_skipped_later(tmp_path, caplog):
    put(tmp_path, [1])
    store = opened(tmp_path)
    for name in ("old_1_2.traj", "other_1_2.traj"):
        (tmp_path / "protected" / name).write_bytes(pickle.dumps(1))
    with pytest.raises(PickleRefusedError, match=r"old_1_2.traj \(and 1 more\) is a .traj pickle.*amago buffer import"):
        opened(tmp_path)
    assert (store.refresh().quarantined_files, episodes(store)) == (2, [1])


def test_an_order_that_could_not_be_recorded_is_recorded_later(tmp_path, caplog):
    store = TrajectoryStore(tmp_path)
    put(tmp_path, [0], "z")
    (tmp_path / "order.journal").mkdir()  # nothing can be written under this name
    store.refresh()
    assert "could not be recorded" in caplog.text
    assert episodes(store) == [0]
    (tmp_path / "order.journal").rmdir()
    put(tmp_path, [1], "a")
    store.refresh()
    assert episodes(opened(tmp_path)) == [0, 1]
