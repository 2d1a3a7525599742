"""The replay buffer as a dataset: batches, relabelling, loaders, deletion."""

import gymnasium as gym
import numpy as np
import pytest
import tiny
import torch
from messages import check_refused, naming, refused
from store_helpers import FEW, add, dataset_of, numbered, put, writer

from amago import config
from amago.data.trajectory import FrozenTraj
from amago.loading import DatasetSettings, DiskTrajDataset, SequenceLoader, collate
from amago.relabeling import Relabeler


def test_zoo_original_has_the_originals_windows(tmp_path):
    assert not tiny.started(tmp_path).dataset.settings.cut_short_trajectories
    config.parse_files(["zoo/original"])
    assert tiny.started(tmp_path, name="original").dataset.settings.cut_short_trajectories


def test_a_relabeler_sees_the_whole_trajectory_and_its_changes_are_what_is_sampled(tmp_path):
    class Double(Relabeler):
        def relabel(self, traj: FrozenTraj) -> FrozenTraj:
            assert len(traj) == 20
            traj.rews = traj.rews * 2
            return traj

    add(tmp_path, [20])
    sample = dataset_of(tmp_path, relabeler=Double()).sample_random_trajectory(np.random.default_rng(0))
    np.testing.assert_array_equal(sample.rews[:, 0], 2 * sample.obs["a/b"][:-1, 1])


def files_in(buffer):
    return {part: len(list((buffer / part).glob("*"))) for part in ("fifo", "protected", "quarantine")}


def test_deleting_the_buffer_of_an_experiment_keeps_protected_data(tmp_path):
    recording = tmp_path / "run" / "buffer" / "protected"
    tiny.learned(tmp_path, name="recorder", train_batches_per_epoch=0).close()
    recording.parent.mkdir(parents=True)
    (tmp_path / "recorder" / "buffer" / "fifo").rename(recording)
    (recording / "notes-000000000000-n1.safetensors").write_text("damaged")
    e = tiny.learned(tmp_path)
    trajectories = len(e.dataset.store)
    before = files_in(recording.parent)
    assert min(before.values()) >= 1
    e.delete_buffer_from_disk()
    assert files_in(recording.parent) == before | {"fifo": 0}
    assert 0 < len(e.dataset.store) < trajectories
    e.delete_buffer_from_disk(delete_quarantine=True)
    assert files_in(recording.parent) == before | {"fifo": 0, "quarantine": 0}
    e.delete_buffer_from_disk(delete_protected=True)
    assert files_in(recording.parent) == {"fifo": 0, "protected": 0, "quarantine": 0}
    assert not e.dataset.ready_for_training
    e.epochs = 2
    e.learn()
    assert len(e.dataset.store) == 4, "it is filled again"


def test_a_loader_counts_what_was_taken_and_ranks_draw_differently(tmp_path):
    add(tmp_path, [5, 9, 50])
    first = SequenceLoader(dataset_of(tmp_path), batch_size=2, workers=2, seed=1)
    for _ in zip(range(4), first.batches(10)):
        pass
    assert first.next_batch == 4
    second = SequenceLoader(first.dataset, 2, seed=1)
    second.next_batch = 4
    assert torch.equal(next(iter(second.batches(1))).rews, SequenceLoader(first.dataset, 2, seed=1).draw(4).rews)
    ranks = [SequenceLoader(first.dataset, 4, seed=1, rank=r).draw(0).time_idxs.flatten().tolist() for r in (0, 1)]
    assert ranks[0] != ranks[1]
    first.close()


def test_bad_arguments(tmp_path):
    dataset = DiskTrajDataset(tmp_path, "d")
    with pytest.raises(RuntimeError, match=r"opened by Experiment.start\(\)"):
        _ = dataset.store
    check_refused(
        ValueError,
        (naming("padded_sampling"), lambda: dataset.configure(DatasetSettings(4, "middle"))),
        ("batch_size must be at least 1, got 0", lambda: SequenceLoader(dataset, 0)),
    )


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
        assert_equal_batches(dataset.sample_batch(a, 8), collate([dataset.sample_random_trajectory(b) for _ in range(8)]))
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
