import json
import tempfile
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from messages import check_refused, naming, refused
from safetensors.numpy import load_file
from store_helpers import FEW, KINDS, assert_numbered, assert_same, dataset_of, numbered, opened, put, writer

from amago.data.trajectory import StoredTraj
from amago.loading import SequenceLoader
from amago.spaces import action_spec
from amago.store import TrajectoryWriter
from amago.store.schema import CODES

ACTION_SPACES = [gym.spaces.Discrete(7, start=3), gym.spaces.Box(-2.0, 3.0, (2, 2), np.float32), gym.spaces.MultiBinary(5)]


def box(shape, dtype):
    low, high = (-np.inf, np.inf) if dtype.kind == "f" else (0, 1)
    return gym.spaces.Box(low, high, shape, dtype.type)


@st.composite
def worlds(draw):
    """Spaces, and trajectories of arbitrary values in them."""
    keys = draw(st.lists(st.text("abz/_é 0", min_size=1, max_size=6).filter(lambda k: k[0] != "/"), unique=True, max_size=4))
    dtypes = {k: CODES[draw(st.sampled_from(sorted(CODES)))] for k in keys}
    shapes = {k: draw(hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=3)) for k in keys}
    space = draw(st.sampled_from(ACTION_SPACES))
    spec = action_spec(space)
    trajs = []
    for _ in range(draw(st.integers(1, 4))):
        t = draw(st.integers(1, 5))
        some = {k: draw(hnp.arrays(dtypes[k], (t + 1, *shapes[k]))) for k in keys}
        actions = draw(hnp.arrays(spec.stored_dtype, (t + 1, spec.stored_dim)))
        start = draw(st.sampled_from([0, 1, 2**40]))
        rews = draw(hnp.arrays(np.float32, (t, 1)))
        dones = draw(hnp.arrays(np.bool_, (t, 1)))
        reward = draw(st.floats(width=32, allow_nan=False))
        trajs.append(StoredTraj(some, actions[:t], rews, dones, start, reward, actions[t], draw(st.text(max_size=8))))
    return space, gym.spaces.Dict({k: box(shapes[k], dtypes[k]) for k in keys}), trajs


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(worlds(), st.sampled_from(KINDS))
def test_what_is_read_is_what_was_written(world, save_as):
    space, obs_space, trajs = world
    with tempfile.TemporaryDirectory() as root:
        with TrajectoryWriter(Path(root) / "fifo", writer="w-1", action_space=space, obs_space=obs_space, save_as=save_as) as w:
            for traj in trajs:
                w.write(traj)
        store = opened(root)
        assert store.info()["quarantined"] == 0
        assert store.lengths.tolist() == [len(t) for t in trajs]
        for i, traj in enumerate(trajs):
            assert_same(store.read(i), traj)
            assert (store.env_name(i), store.action_spec(i).space) == (traj.env_name, space)
            assert store.obs_space(i) == obs_space
        store.close()


@pytest.mark.parametrize("save_as", KINDS)
def test_every_slice_equals_that_part_of_the_whole(tmp_path, save_as):
    with writer(tmp_path, save_as=save_as) as w:
        for episode, steps in enumerate([1, 2, 7, 12]):
            w.write(numbered(episode, steps, start_time=10 * episode))
    store = opened(tmp_path)
    for i in range(4):
        whole = store.read(i)
        steps = len(whole)
        assert_numbered(whole)
        for start in range(steps):
            for stop in [*range(start + 1, steps + 1), None, steps + 100]:
                part = store.read(i, start, stop)
                assert len(part) == min(steps if stop is None else stop, steps) - start
                assert assert_numbered(part, start) == i
                np.testing.assert_array_equal(part.dones, whole.dones[start : start + len(part)])


@pytest.mark.parametrize("save_as", KINDS)
def test_arrays_are_new_and_may_be_changed(tmp_path, save_as):
    put(tmp_path, [1], save_as=save_as)
    store = opened(tmp_path)
    first = store.read(0, 1, 3)
    for a in [*first.obs.values(), first.actions, first.rews, first.dones, first.prev_action]:
        a[...] = 0
    assert_numbered(store.read(0, 1, 3), 1)


def test_a_segment_is_plain_safetensors(tmp_path):
    directory = put(tmp_path, [0, 1, 2], steps=5)
    [path] = directory.iterdir()
    assert path.name == "w-000000000000-n3.safetensors"
    tensors = load_file(path)
    np.testing.assert_array_equal(tensors["ep_offsets"], [0, 5, 10, 15])
    assert (tensors["obs/image"].shape, tensors["dones"].dtype) == ((18, 2, 2, 3), np.bool_)
    np.testing.assert_array_equal(tensors["actions"][:, 0], np.tile(np.arange(5), 3))


@pytest.mark.parametrize("save_as", ["npz", "npz-compressed"])
def test_an_archive_is_plain_numpy(tmp_path, save_as):
    directory = put(tmp_path, [7], save_as=save_as)
    [path] = directory.iterdir()
    env_name, random_id, unix_time = path.stem.rsplit("_", 2)
    assert (env_name, random_id) == ("counting", "w-000000000000")
    assert unix_time.isdigit()
    with np.load(path, allow_pickle=False) as content:
        np.testing.assert_array_equal(content["actions"][:, 0], np.arange(4))
        metadata = json.loads(content["metadata"].tobytes())
    assert metadata["env_names"] == ["counting"]
    assert metadata["spaces"]


def test_archives_that_numpy_saved_again_are_read(tmp_path):
    """A dataset may be converted with nothing but numpy: zip64 fields in the local headers, other order of members."""
    directory = put(tmp_path, [7], save_as="npz")
    [path] = directory.iterdir()
    with np.load(path) as content:
        arrays = dict(reversed(list(content.items())))
    path.unlink()
    np.savez(directory / "mine_1_2.npz", **arrays)
    np.savez_compressed(directory / "mine_2_2.npz", **arrays)
    store = opened(tmp_path)
    assert (len(store), [assert_numbered(store.read(i, 1, 3), 1) for i in range(2)]) == (2, [7, 7])


def test_environment_names_are_kept_and_made_safe_for_file_names(tmp_path):
    names = ["../../etc/passwd", "ALE/Pong-v5", "", ".hidden", "ü" * 300, "a\0b"]
    for save_as in KINDS:
        with writer(tmp_path, f"w-{save_as}", save_as) as w:
            for i, name in enumerate(names):
                w.write(numbered(i, 2, env_name=name))
    store = opened(tmp_path)
    assert sorted(store.env_name(i) for i in range(len(store))) == sorted(names * 3)
    assert {p.name for p in tmp_path.iterdir()} == {"fifo", "protected", "order.journal"}
    assert not [p for p in (tmp_path / "fifo").iterdir() if p.name.startswith(".")]


def test_what_is_not_there(tmp_path):
    put(tmp_path, [1])
    store = opened(tmp_path)
    assert (list(store.read(0, keys=["image"]).obs), store.read(0, keys=[]).obs) == (["image"], {})
    check_refused(KeyError, (naming("'depth'", ["a/b", "image"]), lambda: store.read(0, keys=["depth"])))
    slices = [(-1, None), (4, None), (2, 2), (3, 1)]
    check_refused(ValueError, *(("trajectory of 4", lambda part=part: store.read(0, *part)) for part in slices))
    check_refused(IndexError, *((naming("index", i, 1), lambda i=i: store.read(i)) for i in (-1, 1)))


@pytest.mark.parametrize("workers", [0, 2])
def test_an_empty_buffer_is_an_error_that_names_it_and_is_left_behind(tmp_path, workers):
    dataset = dataset_of(tmp_path)
    assert not dataset.ready_for_training
    loader = SequenceLoader(dataset, 2, workers=workers)
    message = rf"the replay buffer {tmp_path}/d/buffer is empty: collect first, or check dset_root and dset_name"
    with pytest.raises(RuntimeError, match=message):
        next(iter(loader.batches(3)))
    with writer(tmp_path / "d" / "buffer", action_space=FEW) as w:
        w.write(numbered(3, 5))
        assert dataset.on_end_of_collection()["trajectories"] == 0  # written, and not committed
        assert not dataset.ready_for_training
    assert dataset.on_end_of_collection()["trajectories"] == 1
    assert dataset.ready_for_training
    assert [batch.rews.shape[0] for batch in loader.batches(3)] == [2, 2, 2]
    loader.close()


@pytest.mark.parametrize("sampling", ["uniform", "length"])
def test_a_buffer_whose_last_file_is_damaged_or_deleted_is_empty(tmp_path, sampling):
    """Sampling draws again where a file is lost, but not for ever."""
    for harm in ("cut", "deleted"):
        put(tmp_path / "d" / "buffer", [1, 2], harm, action_space=FEW)
        dataset = dataset_of(tmp_path, sampling=sampling)
        [path] = (tmp_path / "d" / "buffer" / "fifo").iterdir()
        path.unlink() if harm == "deleted" else path.write_bytes(path.read_bytes()[:-1])
        with refused(RuntimeError, "is empty"):
            dataset.sample_random_trajectory(np.random.default_rng(0))
        assert not dataset.ready_for_training
