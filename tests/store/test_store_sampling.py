"""What a dataset draws from a store: windows of trajectories about as long as a training sequence, and of an empty buffer."""

import numpy as np
import pytest
from messages import refused
from store_helpers import FEW, KINDS, dataset_of, numbered, put, writer

from amago.loading import SequenceLoader

L = 8


def windows(length, padded, cut_short):
    """All [start, stop) that may be drawn, written out by hand: the whole, or a window of L that is moved along, and cut."""
    if length <= L and not cut_short:
        return {(0, length)}
    moved = {"none": range(max(length - L, 0) + 1), "left": range(1 - L, length - L + 1)}
    moved |= {"right": range(max(length - 2, 0) + 1), "both": range(1 - L, max(length - 2, 1 - L) + 1)}
    return {(max(k, 0), min(k + L, length)) for k in moved[padded]}


@pytest.mark.parametrize("cut_short", [False, True])
@pytest.mark.parametrize("padded", ["none", "left", "right", "both"])
@pytest.mark.parametrize("length", [1, L - 1, L, L + 1])
@pytest.mark.parametrize("save_as", KINDS)
def test_lengths_about_that_of_a_training_sequence(tmp_path, save_as, length, padded, cut_short):
    put(tmp_path / "d" / "buffer", [3], save_as=save_as, steps=length, action_space=FEW)
    dataset, rng = dataset_of(tmp_path, L, padded, cut_short), np.random.default_rng(0)
    want, seen = numbered(3, length), set()
    for _ in range(150):
        sample = dataset.sample_random_trajectory(rng)
        start = int(sample.time_idxs[0, 0])
        stop = start + len(sample.rews)
        for key, whole in want.obs.items():
            got = np.asarray(sample.obs[key])
            assert got.dtype == whole.dtype
            np.testing.assert_array_equal(got, whole[start : stop + 1])
        np.testing.assert_array_equal(np.asarray(sample.rews), want.rews[start:stop])
        np.testing.assert_array_equal(np.asarray(sample.dones), want.dones[start:stop])
        np.testing.assert_array_equal(np.asarray(sample.actions).argmax(-1), want.actions[start:stop, 0])
        np.testing.assert_array_equal(sample.rl2s[1:, :1], sample.rews)
        np.testing.assert_array_equal(sample.rl2s[1:, 1:], sample.actions)
        assert sample.rl2s[0, 0] == (want.rews[start - 1, 0] if start else 0)
        assert sample.rl2s[0, 1:].sum() == (start > 0)
        np.testing.assert_array_equal(sample.time_idxs[:, 0], np.arange(start, stop + 1))
        seen.add((start, stop))
    assert seen == windows(length, padded, cut_short)


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
