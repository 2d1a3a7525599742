import logging
import pickle

import gymnasium as gym
import numpy as np
import pytest
from store_helpers import OBS, assert_numbered, numbered, opened, put

from amago.data.trajectory import FrozenTraj
from amago.spaces import action_spec
from amago.store import BadFileError, DamagedError, PickleRefusedError, TrajectoryStore
from amago.store.legacy import read_traj

SPACE = gym.spaces.Discrete(20)


def frozen(episode=3, steps=9, start_time=0) -> FrozenTraj:
    return numbered(episode, steps, start_time).derive(action_spec(SPACE))


def pickled(root, content, name="old_1_2.traj", part="protected", protocol=None):
    (root / part).mkdir(parents=True, exist_ok=True)
    (root / part / name).write_bytes(pickle.dumps(content, protocol))
    return root / part / name


class Evil:
    def __reduce__(self):
        return (open, (Evil.path, "w"))


def test_pickles_are_refused_and_the_error_says_what_to_do(tmp_path):
    path = pickled(tmp_path, frozen())
    pickled(tmp_path, frozen(), "other_1_2.traj")
    put(tmp_path, [1])
    store = TrajectoryStore(tmp_path)
    for _ in range(2):
        with pytest.raises(PickleRefusedError, match=r"old_1_2.traj \(and 1 more\) is a .traj pickle.*allow_pickle=True"):
            store.refresh()
    assert path.exists()
    with pytest.raises(PickleRefusedError):
        read_traj(path)


def test_one_that_turns_up_during_a_run_does_not_end_it(tmp_path, caplog):
    put(tmp_path, [1])
    store = opened(tmp_path)
    path = pickled(tmp_path, frozen(), part="fifo")
    with caplog.at_level(logging.ERROR, "amago.store"):
        store.refresh()
        store.refresh()
    assert caplog.text.count("is a .traj pickle") == 1
    assert (len(store), store.info()["quarantined"]) == (1, 1)
    assert path.exists()


@pytest.mark.parametrize("form", [lambda t: t, lambda t: dict(vars(t))], ids=["FrozenTraj", "dict"])
@pytest.mark.parametrize("start_time", [0, 6])
def test_with_permission_they_read_like_any_other(tmp_path, form, start_time):
    want = frozen(3, 9, start_time)
    pickled(tmp_path, form(want))
    put(tmp_path, [1])
    store = opened(tmp_path, allow_pickle=True)
    assert store.lengths.tolist() == [9, 4]
    spec = store.action_spec(0)
    for start, stop in [(0, 9), (0, 2), (4, 7)]:
        got, part = store.read(0, start, stop).derive(spec), want.slice(start, stop)
        for name in ("rl2s", "time_idxs", "rews", "dones", "actions"):
            np.testing.assert_array_equal(getattr(got, name), getattr(part, name), err_msg=name)
        assert got.obs.keys() == part.obs.keys()
        np.testing.assert_array_equal(got.obs["image"], part.obs["image"])
    assert list(store.read(0, keys=["image"]).obs) == ["image"]
    assert store.obs_space(0)["image"].shape == OBS["image"].shape
    assert assert_numbered(store.read(1)) == 1


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_every_pickle_protocol(tmp_path, protocol):
    content = dict(vars(frozen())) | {"time_idxs": list(frozen().time_idxs[:, 0])}  # numpy scalars too
    traj, spec = read_traj(pickled(tmp_path, content, protocol=protocol), allow_pickle=True)
    np.testing.assert_array_equal(traj.derive(spec).rl2s, frozen().rl2s)
    assert traj.obs["image"].flags.writeable


def test_even_with_permission_no_code_is_run(tmp_path):
    Evil.path = str(tmp_path / "executed")
    for i, content in enumerate([Evil(), {"obs": Evil()}, [frozen(), Evil()]]):
        pickled(tmp_path, content, f"evil{i}_1_2.traj")
    with pytest.raises(BadFileError, match=r"the pickle names .*open, which is not part of a trajectory"):
        read_traj(tmp_path / "protected" / "evil0_1_2.traj", allow_pickle=True)
    store = opened(tmp_path, allow_pickle=True)
    assert (len(store), store.info()["quarantined"]) == (0, 3)
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"obs": {}}, "lacks"),
        ([1, 2], "holds list, which lacks"),
        (dict(vars(frozen())) | {"rews": np.zeros((3, 1))}, "do not fit together"),
        (dict(vars(frozen())) | {"rl2s": np.zeros((10, 3), np.float32)}, "shapes of rl2s"),
        (dict(vars(frozen())) | {"obs": {"x": np.zeros((10, 1), "M8[s]")}}, r"observations \['x'\]"),
        (dict(vars(frozen())) | {"obs": [1]}, "lacks a dict of observations"),
    ],
)
def test_pickles_of_something_else(tmp_path, content, message):
    path = pickled(tmp_path, content)
    with pytest.raises(BadFileError, match=message):
        read_traj(path, allow_pickle=True)


@pytest.mark.parametrize("content", [b"", b"\x80", b"no pickle", pickle.dumps(list(range(100)))[:-20]])
def test_damaged_pickles(tmp_path, content):
    path = pickled(tmp_path, None)
    path.write_bytes(content)
    with pytest.raises(BadFileError, match="cannot be read"):
        read_traj(path, allow_pickle=True)


def test_one_that_was_written_to_since_is_not_read(tmp_path):
    """Nothing in a pickle could tell whether it still holds what it held."""
    path = pickled(tmp_path, frozen(3))
    store = opened(tmp_path, allow_pickle=True)
    assert len(store.read(0)) == 9
    path.write_bytes(pickle.dumps(frozen(4)))
    with pytest.raises(DamagedError, match="a pickle has no checksum"):
        store.read(0)
    assert (len(store), store.info()["quarantined"], path.exists()) == (0, 1, False)
