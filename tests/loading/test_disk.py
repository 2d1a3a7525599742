import numpy as np
import pytest
import tiny
import torch
from messages import check_refused, naming, refused
from store_helpers import add, dataset_of

from amago import config
from amago.data.trajectory import FrozenTraj
from amago.loading import DatasetSettings, DiskTrajDataset, SequenceLoader
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
    with pytest.raises(ValueError, match=r"an instance, got the class Double; write Double\(\)"):
        DiskTrajDataset(tmp_path, "d", relabeler=Double)


def test_the_buffer_forgets_the_oldest_and_metrics_say_so(tmp_path):
    dataset = dataset_of(tmp_path, dset_max_size=3)
    add(tmp_path, [4] * 6)
    metrics = dataset.on_end_of_collection()
    assert dataset.ready_for_training
    assert len(dataset.store) == 3
    assert all(isinstance(v, int | float) for v in metrics.values())
    dataset.delete()
    assert not dataset.ready_for_training


def files_in(buffer):
    return {part: len(list((buffer / part).glob("*"))) for part in ("fifo", "protected", "quarantine")}


def test_deleting_the_buffer_of_an_experiment_keeps_protected_data(tmp_path):
    recording = tmp_path / "run" / "buffer" / "protected"
    tiny.learned(tmp_path, name="recorder", train_batches_per_epoch=0).close()
    recording.mkdir(parents=True)
    for path in (tmp_path / "recorder" / "buffer" / "fifo").glob("*"):
        path.rename(recording / path.name)
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


def test_batches_do_not_depend_on_the_number_of_threads(tmp_path):
    add(tmp_path, [5, 9, 13])
    dataset = dataset_of(tmp_path)

    def rewards(workers, counts):
        loader = SequenceLoader(dataset, batch_size=3, workers=workers, seed=7)
        out = [b.rews.flatten().tolist() for n in counts for b in loader.batches(n)]
        loader.close()
        return out

    whole = rewards(0, [12])
    assert (rewards(2, [12]), rewards(1, [5, 7])) == (whole, whole)
    other = SequenceLoader(dataset, batch_size=3, seed=8)
    assert [b.rews.flatten().tolist() for b in other.batches(12)] != whole


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
    first.close()


def test_bad_arguments(tmp_path):
    with refused(ValueError, "dset_max_size counts trajectories and must be at least 1, got 0"):
        DiskTrajDataset(tmp_path, "d", dset_max_size=0)
    dataset = DiskTrajDataset(tmp_path, "d")
    with pytest.raises(RuntimeError, match=r"opened by Experiment.start\(\)"):
        _ = dataset.store
    check_refused(
        ValueError,
        (naming("padded_sampling"), lambda: dataset.configure(DatasetSettings(4, "middle"))),
        ("batch_size must be at least 1, got 0", lambda: SequenceLoader(dataset, 0)),
    )
