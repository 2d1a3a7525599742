"""Which trajectories there are, in which order, and which are deleted."""

import json
import logging
import os
import pickle
import random
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from store_helpers import KINDS, assert_numbered, episodes, numbered, opened, put, writer

from amago.store import EvictedError, TrajectoryStore, files
from amago.store import store as store_module
from amago.store.file_cache import FileCache


def names(root, part="fifo"):
    return {p.name for p in (root / part).iterdir()}


# Order and eviction


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


def test_what_was_taken_in_first_stays_first(tmp_path):
    put(tmp_path, [1], "z")
    store = opened(tmp_path)
    put(tmp_path, [2], "a")  # lower in (sequence, writer), but later
    store.refresh()
    put(tmp_path, [3], "b")
    store.refresh()
    assert episodes(store) == [1, 2, 3]


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


@pytest.mark.parametrize("save_as", KINDS)
@pytest.mark.parametrize("limit", [0, 1, 3, 6, 7, 100])
def test_the_limit_is_never_passed_by_more_than_one_file(tmp_path, save_as, limit):
    store = TrajectoryStore(tmp_path, limit)
    for i in range(4):
        put(tmp_path, [0, 1] if i % 2 else [0], f"w{i}", save_as)
        store.refresh()
    largest = 2 if save_as == "segments" else 1
    assert min(limit, 6) <= len(store) < limit + largest or len(store) == limit
    assert len(names(tmp_path)) == store.info()["files"]


def test_protected_data_neither_counts_nor_goes(tmp_path):
    put(tmp_path, range(10), "p", part="protected")
    store = TrajectoryStore(tmp_path, 2)
    for i in range(4):
        put(tmp_path, [100 + i])
        store.refresh()
    assert episodes(store) == [*range(10), 102, 103]
    assert names(tmp_path, "protected") == {"p-000000000000-n10.safetensors"}


def test_without_edit_rights_nothing_on_disk_changes(tmp_path):
    for i in range(4):
        put(tmp_path, [i])
    before = names(tmp_path)
    store = opened(tmp_path, 1, edit=False)
    assert len(store) == 4
    assert names(tmp_path) == before
    assert not (tmp_path / "order.journal").exists()
    with pytest.raises(PermissionError, match="edit=False"):
        store.delete()


def test_a_collector_writes_what_a_learner_takes_in(tmp_path):
    learner, watcher = TrajectoryStore(tmp_path, 3), TrajectoryStore(tmp_path, 3, edit=False)
    with writer(tmp_path, "actor") as w:
        for i in range(6):
            w.write(numbered(i, 4))
            w.flush()
            learner.refresh()
            watcher.refresh()
            assert episodes(watcher) == episodes(learner) == list(range(max(0, i - 2), i + 1))


@pytest.mark.parametrize("limit", [-1, float("nan")])
def test_limits(tmp_path, limit):
    with pytest.raises(ValueError, match=f"max_trajectories is {limit}, but must be at least 0"):
        TrajectoryStore(tmp_path, limit)


# Restart


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


def test_a_restart_does_not_read_the_data_again(tmp_path, monkeypatch):
    put(tmp_path, [0, 1], "a")
    put(tmp_path, [2], "b", "npz")
    opened(tmp_path)
    checked = []
    monkeypatch.setattr(store_module.ix.segment, "check_data", lambda *args: checked.append(args))
    assert len(opened(tmp_path)) == 3
    assert not checked
    path = tmp_path / "fifo" / "a-000000000000-n2.safetensors"
    os.utime(path)  # touched: no longer the file that was checked
    assert len(opened(tmp_path)) == 3
    assert len(checked) == 1
    assert len(opened(tmp_path)) == 3
    assert len(checked) == 1


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


def test_without_a_journal_the_names_decide(tmp_path):
    store = TrajectoryStore(tmp_path)
    for i, name in enumerate("dcba"):
        put(tmp_path, [i], name)
        store.refresh()
    (tmp_path / "order.journal").unlink()
    assert episodes(opened(tmp_path)) == [3, 2, 1, 0]


def test_the_journal_does_not_grow_for_ever(tmp_path, monkeypatch):
    store = TrajectoryStore(tmp_path, 2)
    w = writer(tmp_path, save_as="npz")
    for _ in range(23):
        for i in range(50):
            w.write(numbered(i, 1))
        store.refresh()
    assert len((tmp_path / "order.journal").read_bytes().splitlines()) <= 1024 + 2 * 52
    assert episodes(opened(tmp_path)) == episodes(store) == [48, 49]


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
    assert {k: again.info()[k] for k in ("ingested", "evicted")} == {"ingested": 5, "evicted": 1}
    assert episodes(opened(tmp_path, 4)) == [9, 1, 2, 3, 4]


@pytest.mark.parametrize("state", [{}, {"version": 2}, {"version": 1, "order": {}}, {"version": 1, "order": 3}])
def test_states_of_something_else(tmp_path, state):
    with pytest.raises(ValueError, match="state"):
        TrajectoryStore(tmp_path).load_state_dict(state)


# Deleting


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


FOREIGN = {"notes.txt", "fifo/folder/notes.txt", "quarantine/fifo-mine.npz", ".lock"}


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


def test_what_was_protected_keeps_its_order(tmp_path):
    put(tmp_path, [1], "z", part="protected")
    opened(tmp_path)
    put(tmp_path, [2], "a", part="protected")
    store = opened(tmp_path)
    put(tmp_path, [3])
    store.delete()
    assert episodes(opened(tmp_path)) == [1, 2]


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


def test_an_empty_quarantine_goes_with_its_files(tmp_path):
    put(tmp_path, [1], part="protected")
    (tmp_path / "protected" / BAD).write_bytes(b"bad")
    store = opened(tmp_path)
    assert names(tmp_path, "quarantine") == {f"protected-{BAD}"}
    store.delete(delete_quarantine=True)
    assert not (tmp_path / "quarantine").exists()


# Refused files


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
    for store in (opened(tmp_path), opened(tmp_path)):  # the second finds what the first has moved to quarantine
        refused = {os.path.relpath(path, tmp_path): reason for path, reason in store.refused().items()}
        assert refused.keys() == expected.keys()
        for path, part in expected.items():
            assert part in refused[path]
    assert opened(tmp_path, edit=False).refused().keys() == store.refused().keys()


def test_a_file_that_cannot_be_opened_counts_as_refused_until_it_can(tmp_path, monkeypatch):
    put(tmp_path, [1])
    store = TrajectoryStore(tmp_path)

    def denied(path):
        raise PermissionError(13, "Permission denied", path)

    with monkeypatch.context() as m:
        m.setattr("amago.store.index.open_regular", denied)
        store.refresh()
    [(path, reason)] = store.refused().items()
    assert path.endswith("fifo/w-000000000000-n1.safetensors")
    assert "it cannot be read now" in reason
    assert "Permission denied" in reason
    store.refresh()
    assert store.refused() == {}
    assert episodes(store) == [1]


# Left-overs of killed writers


def test_temporary_files_of_the_dead_are_removed_and_those_of_the_living_are_not(tmp_path):
    put(tmp_path, [1])
    put(tmp_path, [2], part="protected")
    child = os.posix_spawn("/bin/true", ["true"], {})
    os.waitpid(child, 0)
    dead = tmp_path / "fifo" / f".tmp-{files._host()}-{child}-aa"
    alive = tmp_path / "fifo" / f".tmp-{files._host()}-{os.getpid()}-aa"
    elsewhere, old = tmp_path / "fifo" / ".tmp-00000000-1-aa", tmp_path / "protected" / ".tmp-what"
    journal = tmp_path / f".tmp-{files._host()}-{child}-bb"  # of a learner that was killed while it rewrote the order
    for path in (dead, alive, elsewhere, old, journal):
        path.write_bytes(b"half a fi")
    os.utime(old, (0, time.time() - 3600))
    assert opened(tmp_path, edit=False).info()["files"] == 2
    assert dead.exists()
    store = TrajectoryStore(tmp_path)
    assert store.refresh().temporary_files == 3
    assert [p.exists() for p in (dead, alive, elsewhere, old, journal)] == [False, True, True, False, False]


# Many files, many readers


def test_few_files_are_kept_open(tmp_path, monkeypatch):
    w = writer(tmp_path, save_as="npz")
    for i in range(100):
        w.write(numbered(i, 2))
    store = opened(tmp_path)
    store._cache.limit = 8
    before = len(os.listdir("/proc/self/fd"))
    for i in np.random.default_rng(0).integers(0, 100, 500):
        assert_numbered(store.read(int(i)))
        assert len(os.listdir("/proc/self/fd")) <= before + 8
    store.close()
    assert len(os.listdir("/proc/self/fd")) == before


def test_the_limit_of_open_files_follows_the_process(monkeypatch):
    import resource

    monkeypatch.setattr(resource, "getrlimit", lambda which: (256, 4096))
    assert FileCache().limit == 64
    monkeypatch.setattr(resource, "getrlimit", lambda which: (10, 4096))
    assert FileCache().limit == 8


def test_an_index_of_before_the_eviction(tmp_path):
    for i in range(3):
        put(tmp_path, [i])
    store = opened(tmp_path)
    view = store.view()
    store.max_trajectories = 1
    store.refresh()
    assert episodes(store) == [2]
    with pytest.raises(EvictedError, match="index 2 was drawn before files were deleted"):
        store.read(2)
    with pytest.raises(EvictedError, match="draw another index"):
        view.read(0)
    assert assert_numbered(view.read(2)) == 2
    with pytest.raises(IndexError):
        store.read(3)


def test_a_name_that_is_used_again_is_another_file(tmp_path):
    put(tmp_path, [1])
    store = opened(tmp_path)
    old = store.view()
    store.max_trajectories = 0
    store.refresh()
    store.max_trajectories = 5
    put(tmp_path, [2])  # the writer sees an empty directory and begins at 0 again
    store.refresh()
    assert episodes(store) == [2]
    with pytest.raises(EvictedError):
        old.read(0)


def test_a_file_leaves_the_index_before_it_leaves_the_disk(tmp_path, monkeypatch):
    store = TrajectoryStore(tmp_path, 1)
    for i in range(3):
        put(tmp_path, [i])
    drawn, real = [], os.unlink

    def unlink(path, *args, **kwargs):
        drawn.append(episodes(store))
        real(path, *args, **kwargs)

    store.refresh()
    for i in range(3, 6):
        put(tmp_path, [i])
    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", unlink)
        store.refresh()
    assert drawn == [[5]] * 3


def test_a_file_being_read_when_it_is_evicted_is_read_to_the_end(tmp_path):
    [path] = put(tmp_path, [5]).iterdir()
    store = opened(tmp_path)
    entry = store.view()._entries[0]
    file = store._cache.acquire(entry, lambda _: os.open(path, os.O_RDONLY))
    store.max_trajectories = 0
    assert store.refresh().evicted == 1
    assert len(os.pread(file.fd, 100, 0)) == 100
    store._cache.release(file)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(file.fd)


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


def test_a_forked_process_reads_while_the_parent_does(tmp_path):
    put(tmp_path, range(5))
    store = opened(tmp_path)
    store.read(0)
    script = Path(__file__).with_name("fork_reader.py")
    done = subprocess.run([sys.executable, script, tmp_path], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, "child [0, 1, 2, 3, 4]\nparent [0, 1, 2, 3, 4]\n"), done.stderr


def test_an_unreadable_file_is_tried_again(tmp_path, monkeypatch, caplog):
    put(tmp_path, [1])
    store = TrajectoryStore(tmp_path)
    with monkeypatch.context() as patch:

        def busy(*args):
            raise OSError(5, "Input/output error")

        patch.setattr(store_module.ix.segment, "parse", busy)
        with caplog.at_level(logging.WARNING, "amago.store"):
            store.refresh()
    assert "cannot be read now" in caplog.text
    assert len(store) == 0
    store.refresh()
    assert episodes(store) == [1]


def test_a_bug_of_ours_costs_a_file_not_the_run(tmp_path, monkeypatch, caplog):
    put(tmp_path, [1])
    monkeypatch.setattr(store_module.ix, "_load_segment", lambda *args: 1 / 0)
    with caplog.at_level(logging.WARNING, "amago.store"):
        assert len(opened(tmp_path)) == 0
    assert "unexpected ZeroDivisionError" in caplog.text
    assert (tmp_path / "quarantine" / "fifo-w-000000000000-n1.safetensors").exists()


def test_quarantine_keeps_files_of_one_name_apart(tmp_path):
    store = TrajectoryStore(tmp_path)
    for content in (b"one", b"two"):
        (tmp_path / "fifo" / "x.npz").write_bytes(content)
        store.refresh()
    assert {p.read_bytes() for p in (tmp_path / "quarantine").iterdir()} == {b"one", b"two"}
    assert store.info()["quarantined"] == 2


def test_an_order_that_could_not_be_recorded_is_recorded_later(tmp_path, caplog):
    store = TrajectoryStore(tmp_path)
    put(tmp_path, [0], "z")
    (tmp_path / "order.journal").mkdir()  # nothing can be written under this name
    with caplog.at_level(logging.WARNING, "amago.store"):
        store.refresh()
    assert "could not be recorded" in caplog.text
    assert episodes(store) == [0]
    (tmp_path / "order.journal").rmdir()
    put(tmp_path, [1], "a")
    store.refresh()
    assert episodes(opened(tmp_path)) == [0, 1]


def test_a_journal_that_cannot_be_read_is_done_without(tmp_path, caplog):
    put(tmp_path, [0])
    (tmp_path / "order.journal").symlink_to(tmp_path / "fifo")
    with caplog.at_level(logging.WARNING, "amago.store"):
        store = opened(tmp_path)
        assert episodes(store) == [0]
    assert "files are ordered by their names" in caplog.text


def test_many_files_are_taken_in_within_linear_time(tmp_path):
    def seconds(n):
        """Of this process, to open a buffer of n files twice."""
        [path] = put(tmp_path / str(n), [1], save_as="npz", steps=1).iterdir()
        for i in range(n - 1):
            os.link(path, path.with_name(f"{i}.npz"))
        begun = time.process_time()
        for _ in range(2):
            assert len(opened(tmp_path / str(n))) == n
        return time.process_time() - begun

    seconds(2)
    assert seconds(3200) < 6 * 16 * seconds(200), "quadratic time would be 16 times 16"


def test_a_write_right_after_the_check_gets_another_time_stamp(tmp_path):
    """Time stamps may be as coarse as 10 ms: a file counts as checked once its own is older than that."""
    [path] = put(tmp_path, [1]).iterdir()
    store = TrajectoryStore(tmp_path)
    written = time.time_ns()
    os.utime(path, ns=(written, written))
    store.refresh()
    assert time.time_ns() - written >= 10_000_000
    assert episodes(store) == [1]


@pytest.mark.timeout(60)
def test_files_of_a_server_whose_clock_is_ahead_are_not_waited_for(tmp_path):
    [path] = put(tmp_path, [1]).iterdir()
    hour = 3600 * 10**9
    os.utime(path, ns=(0, time.time_ns() + hour))
    assert episodes(opened(tmp_path)) == [1]
