"""Batches read straight into place equal those of single sequences, and memory is used again only when nobody has it."""

import gymnasium as gym
import numpy as np
import pytest
import torch
from messages import refused
from store_helpers import FEW, dataset_of, numbered, put, writer

from amago.loading import DatasetSettings, DiskTrajDataset, RLDataset, collate


def one_by_one(dataset, rng, n):
    return collate([dataset.sample_random_trajectory(rng) for _ in range(n)])


def assert_equal_batches(a, b):
    assert list(a.obs) == list(b.obs)
    pairs = [(a.obs[k], b.obs[k]) for k in a.obs]
    pairs += [(getattr(a, f), getattr(b, f)) for f in ("rl2s", "rews", "dones", "actions", "time_idxs", "mask")]
    for x, y in pairs:
        assert (x.dtype, x.shape, x.is_contiguous()) == (y.dtype, y.shape, True)
        assert torch.equal(x, y)


@pytest.mark.parametrize("save_as", ["segments", "npz", "npz-compressed"])
@pytest.mark.parametrize("padded", ["none", "both", "left", "right"])
@pytest.mark.parametrize("lengths", [(20, 30, 40), (1, 3, 6, 9)], ids=["long", "short"])
def test_equal_to_single_sequences(tmp_path, monkeypatch, save_as, padded, lengths):
    with writer(tmp_path / "d" / "buffer", save_as=save_as, action_space=FEW) as w:
        for i, steps in enumerate(lengths):
            w.write(numbered(i, steps, start_time=3 * (i % 2)))
    dataset = dataset_of(tmp_path, 6, padded)
    monkeypatch.setattr(dataset, "sample_random_trajectory", None)  # not by this detour
    a, b = np.random.default_rng(0), np.random.default_rng(0)
    for _ in range(10):
        batch = dataset.sample_batch(a, 5)
        assert_equal_batches(batch, collate([DiskTrajDataset.sample_random_trajectory(dataset, b) for _ in range(5)]))
    assert a.bit_generator.state == b.bit_generator.state


@pytest.mark.parametrize(
    "other", [{"action_space": gym.spaces.Discrete(7)}, {"action_space": gym.spaces.Discrete(50, start=1)}]
)
def test_different_spaces_go_the_long_way(tmp_path, other):
    buffer = tmp_path / "d" / "buffer"
    put(buffer, [0, 1], "a", steps=4, action_space=FEW)
    put(buffer, [2, 3], "b", steps=4, **other)
    dataset, a, b = dataset_of(tmp_path, 6), np.random.default_rng(1), np.random.default_rng(1)
    if other["action_space"].n == 50:
        assert_equal_batches(dataset.sample_batch(a, 8), one_by_one(dataset, b, 8))
    else:
        with refused(ValueError, "actions of different shapes"):
            dataset.sample_batch(a, 8)


def test_a_subclass_that_draws_otherwise_is_asked(tmp_path):
    put(tmp_path / "d" / "buffer", [0], steps=4, action_space=FEW)

    class Own(DiskTrajDataset):
        def sample_random_trajectory(self, rng):
            sample = super().sample_random_trajectory(rng)
            sample.rews += 1000.0
            return sample

    dataset = Own(tmp_path, "d")
    dataset.configure(DatasetSettings(6))
    assert (dataset.sample_batch(np.random.default_rng(0), 3).rews >= 1000.0).all()
    assert RLDataset.sample_batch is not DiskTrajDataset.sample_batch


def test_a_file_that_goes_meanwhile_is_drawn_again(tmp_path):
    buffer = tmp_path / "d" / "buffer"
    [path] = put(buffer, [0], "a", steps=4, action_space=FEW).iterdir()
    put(buffer, [1], "b", steps=4, action_space=FEW)
    dataset = dataset_of(tmp_path, 6)
    path.unlink()
    batch = dataset.sample_batch(np.random.default_rng(0), 16)
    assert (batch.obs["a/b"][..., 0] == 1).all()
