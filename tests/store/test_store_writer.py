import errno
import os
import re
from dataclasses import replace

import gymnasium as gym
import numpy as np
import pytest
from messages import check_refused, naming, refused
from store_helpers import KINDS, assert_numbered, episodes, numbered, opened, put, writer

from amago.store import StoreFullError


def visible(root, part="fifo"):
    return sorted(p.name for p in (root / part).iterdir())


def test_nothing_is_visible_before_a_flush_and_everything_after(tmp_path):
    w = writer(tmp_path)
    for i in range(3):
        w.write(numbered(i, 5))
    assert ((w.pending, w.committed, visible(tmp_path)), w.flush(), w.flush()) == ((3, 0, []), 3, 0)
    assert (w.pending, w.committed) == (0, 3)
    assert visible(tmp_path) == ["w-000000000000-n3.safetensors"]
    w.write(numbered(3, 1))
    w.close()
    w.close()
    assert visible(tmp_path)[1:] == ["w-000000000001-n1.safetensors"]
    with refused(ValueError, "the writer 'w' is closed"):
        w.write(numbered(4, 1))
    assert episodes(opened(tmp_path)) == [0, 1, 2, 3]


def test_a_segment_closes_at_its_size(tmp_path):
    w = writer(tmp_path, segment_bytes=1000)
    for i in range(10):
        w.write(numbered(i, 10))  # 419 bytes of arrays each
    assert w.committed == 9
    assert visible(tmp_path) == [f"w-00000000000{i}-n3.safetensors" for i in range(3)]
    w.close()
    assert episodes(opened(tmp_path)) == list(range(10))


def test_arrays_may_be_used_again_after_write(tmp_path):
    w = writer(tmp_path)
    traj = numbered(5, 4)
    w.write(traj)
    for a in [*traj.obs.values(), traj.actions, traj.rews, traj.dones, traj.prev_action]:
        a[...] = 0
    w.close()
    assert assert_numbered(opened(tmp_path).read(0)) == 5


@pytest.mark.parametrize("save_as", KINDS)
def test_sequence_numbers_go_on_where_they_stopped(tmp_path, save_as):
    put(tmp_path, [0, 1], "w", save_as)
    put(tmp_path, [5], "w-x", save_as)  # another writer, whose name begins alike
    put(tmp_path, [2], "w", save_as)
    names = [n for n in visible(tmp_path) if "w-x" not in n]
    sequences = sorted(int(n.split("w-")[1][:12]) for n in names)
    assert sequences == list(range(2 if save_as == "segments" else 3))
    assert len(opened(tmp_path)) == 4


@pytest.mark.parametrize("links", [True, False])
def test_an_existing_file_is_never_overwritten(tmp_path, monkeypatch, links):
    w = writer(tmp_path)  # both see an empty directory
    put(tmp_path, [0])
    before = (tmp_path / "fifo" / "w-000000000000-n1.safetensors").read_bytes()
    if not links:

        def refuse(*args, **kwargs):
            raise OSError(errno.EPERM, "no hard links here")

        monkeypatch.setattr(os, "link", refuse)
    w.write(numbered(1, 4))
    w.close()
    assert visible(tmp_path) == ["w-000000000000-n1.safetensors", "w-000000000001-n1.safetensors"]
    assert (tmp_path / "fifo" / "w-000000000000-n1.safetensors").read_bytes() == before
    assert episodes(opened(tmp_path)) == [0, 1]


class Full:
    """An os function that fails for lack of space on chosen calls."""

    def __init__(self, monkeypatch, name, calls):
        self.real, self.left, self.count = getattr(os, name), set(calls), 0
        monkeypatch.setattr(os, name, self)

    def __call__(self, *args, **kwargs):
        self.count += 1
        if self.count in self.left:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return self.real(*args, **kwargs)


@pytest.mark.parametrize(
    ("save_as", "function", "call"),
    [(k, f, 1) for k in KINDS for f in ("open", "write", "fsync", "link")] + [("segments", "write", 3)],
)
def test_a_full_disk_loses_nothing_and_the_next_flush_tries_again(tmp_path, monkeypatch, caplog, save_as, function, call):
    w = writer(tmp_path, save_as=save_as)
    Full(monkeypatch, function, [call])
    w.write(numbered(0, 5))
    assert w.flush() == (0 if save_as == "segments" else 1)  # write() met the full disk, flush() the space freed since
    assert "no space for" in caplog.text
    assert not [n for n in visible(tmp_path) if n.startswith(".tmp-")]
    w.write(numbered(1, 5))
    w.close()
    assert (w.pending, w.committed) == (0, 2)
    store = opened(tmp_path)
    assert sorted(episodes(store)) == [0, 1]


def test_the_queue_of_a_full_disk_is_bounded(tmp_path, monkeypatch):
    w = writer(tmp_path, segment_bytes=1000, max_pending_bytes=5000)
    full = Full(monkeypatch, "write", range(1, 10**6))
    accepted = 0
    with pytest.raises(StoreFullError, match=rf"no space is left in {tmp_path}/fifo: \d+ bytes are needed for \d+ traj") as err:
        for accepted in range(1000):
            w.write(numbered(accepted, 10))
    assert isinstance(err.value, OSError)
    assert 5 < accepted < 15
    assert w.pending == accepted
    with pytest.raises(StoreFullError):
        w.close()
    full.left = set()
    w.write(numbered(accepted, 10))
    w.close()
    assert episodes(opened(tmp_path)) == list(range(accepted + 1))


WRONG = {
    "obs has keys ['image']": lambda t: replace(t, obs={"image": t.obs["image"]}),
    "obs['image'] has shape (3, 2, 2, 3)": lambda t: replace(t, obs=t.obs | {"image": t.obs["image"][:-1]}),
    "obs['a/b'] has shape (4, 3) and dtype float64": lambda t: replace(t, obs=t.obs | {"a/b": t.obs["a/b"].astype("f8")}),
    "actions has shape (3, 1) and dtype int32": lambda t: replace(t, actions=t.actions.astype("i4")),
    "dones has shape (3,)": lambda t: replace(t, dones=t.dones[:, 0]),
    "rews has 0 rows": lambda t: replace(t, rews=t.rews[:0]),
    "prev_action has shape (1, 2)": lambda t: replace(t, prev_action=np.zeros(2, np.int64)),
    "start_time is -1": lambda t: replace(t, start_time=-1),
}


def test_wrong_arguments_and_trajectories_are_named(tmp_path):
    w = writer(tmp_path)
    a_box = gym.spaces.Dict({"a/../b": gym.spaces.Box(0, 1)})
    check_refused(
        ValueError,
        *((re.escape(words), lambda change=change: w.write(change(numbered(0, 3)))) for words, change in WRONG.items()),
        (naming("save_as='traj'", "'segments'", "'npz'"), lambda: writer(tmp_path, save_as="traj")),
        (naming("save_as='hdf5'", "'npz-compressed'"), lambda: writer(tmp_path, save_as="hdf5")),
        *(
            (naming(name, 0), lambda name=name: writer(tmp_path, **{name: 0}))
            for name in ("segment_bytes", "max_pending_bytes")
        ),
        *(("1 to 80 letters", lambda name=name: writer(tmp_path, name)) for name in ("", "a b", "../x", "x" * 81, "a\n")),
        (
            naming("obs_space['x']", "obs_spec"),
            lambda: writer(tmp_path, obs_space=gym.spaces.Dict({"x": gym.spaces.Discrete(3)})),
        ),
        ("looks like a path", lambda: writer(tmp_path, obs_space=a_box)),
    )
    assert w.pending == 0
    w.write(replace(numbered(0, 3), prev_action=None))
    w.close()
    assert opened(tmp_path).read(0).prev_action.tolist() == [0]


def test_other_errors_are_raised_and_lose_nothing(tmp_path, monkeypatch):
    w = writer(tmp_path)
    w.write(numbered(0, 5))
    with monkeypatch.context() as patch:

        def broken(fd):
            raise OSError(errno.EIO, "the disk is broken")

        patch.setattr(os, "fsync", broken)
        with refused(OSError, "the disk is broken"):
            w.flush()
    assert (w.pending, visible(tmp_path)) == (1, [])
    w.close()
    assert episodes(opened(tmp_path)) == [0]
