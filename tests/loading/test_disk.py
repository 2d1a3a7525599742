import gymnasium as gym
import numpy as np
import pytest
import tiny
from messages import check_refused, naming, refused

from amago import config
from amago.data.trajectory import FrozenTraj
from amago.hindsight import TrajectoryBuilder
from amago.loading import DatasetSettings, DiskTrajDataset, SequenceLoader
from amago.relabeling import Relabeler
from amago.spaces import action_spec
from amago.store import TrajectoryWriter

SPACE = gym.spaces.Discrete(5)
OBS = gym.spaces.Dict({"observation": gym.spaces.Box(-np.inf, np.inf, (2,), np.float32)})


def count_up(episode, steps):
    """obs = [episode, t], action t % 5, reward 1000 episode + t + 1."""
    traj = TrajectoryBuilder(action_spec(SPACE)).start({"observation": np.array([episode, 0], np.float32)})
    for t in range(steps):
        obs = {"observation": np.array([episode, t + 1], np.float32)}
        traj.add(t % 5, 1000.0 * episode + t + 1, t == steps - 1, obs)
    return traj.to_stored()


def fill(root, lengths, save_as="segments", part="fifo", writer="w"):
    directory = root / "d" / "buffer" / part
    directory.mkdir(parents=True, exist_ok=True)
    w = TrajectoryWriter(directory, writer=writer, action_space=SPACE, obs_space=OBS, save_as=save_as)
    for episode, steps in enumerate(lengths):
        w.write(count_up(episode, steps))
    w.close()


def opened(root, max_seq_len=8, relabeler=None, padded="none", **kwargs):
    dataset = DiskTrajDataset(root, "d", relabeler=relabeler, **kwargs)
    dataset.configure(DatasetSettings(max_seq_len, padded))
    return dataset


def check_counts(sample):
    episode = sample.obs["observation"][0, 0].item()
    t = sample.obs["observation"][:, 1].numpy()
    assert (sample.obs["observation"][:, 0] == episode).all()
    np.testing.assert_array_equal(np.diff(t), 1)
    np.testing.assert_array_equal(sample.time_idxs[:, 0], t)
    np.testing.assert_array_equal(sample.rews[:, 0], 1000 * episode + t[1:])
    np.testing.assert_array_equal(sample.actions.argmax(-1), t[:-1] % 5)
    want_prev = np.where(t > 0, 1000 * episode + t, 0)
    np.testing.assert_array_equal(sample.rl2s[:, 0], want_prev)
    for i, now in enumerate(t):
        assert sample.rl2s[i, 1:].sum() == float(now > 0)
        if now > 0:
            assert sample.rl2s[i, 1:].argmax() == (now - 1) % 5


@pytest.mark.parametrize("save_as", ["segments", "npz", "npz-compressed"])
@pytest.mark.parametrize("padded", ["none", "both", "left", "right"])
def test_every_number_is_where_it_belongs(tmp_path, save_as, padded):
    lengths = [1, 3, 8, 9, 20]
    fill(tmp_path, lengths, save_as)
    dataset = opened(tmp_path, padded=padded)
    rng = np.random.default_rng(0)
    seen = set()
    for _ in range(150):
        sample = dataset.sample_random_trajectory(rng)
        check_counts(sample)
        episode, last = int(sample.obs["observation"][0, 0]), int(sample.obs["observation"][-1, 1])
        assert bool(sample.dones[-1]) == (last == lengths[episode])
        assert not sample.dones[:-1].any()
        seen.add(episode)
    assert seen == set(range(5))


PADDED = ["none", "both", "left", "right"]


@pytest.mark.parametrize("padded", PADDED)
def test_a_trajectory_that_fits_into_a_sequence_is_never_cut(tmp_path, padded):
    lengths = [1, 3, 7, 8]
    fill(tmp_path, lengths)
    dataset, rng = opened(tmp_path, padded=padded), np.random.default_rng(0)
    for sample in [dataset.sample_random_trajectory(rng) for _ in range(100)]:
        assert len(sample) == lengths[int(sample.obs["observation"][0, 0])]
    batch = dataset.sample_batch(rng, 50)
    episodes = batch.obs["observation"][:, 0, 0].long()
    assert batch.transition_mask.sum(dim=(1, 2)).tolist() == [lengths[i] for i in episodes.tolist()]


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

    fill(tmp_path, [20])
    sample = opened(tmp_path, relabeler=Double()).sample_random_trajectory(np.random.default_rng(0))
    t = sample.obs["observation"][1:, 1]
    np.testing.assert_array_equal(sample.rews[:, 0], 2 * t)
    with pytest.raises(ValueError, match=r"an instance, got the class Double; write Double\(\)"):
        DiskTrajDataset(tmp_path, "d", relabeler=Double)


def test_the_buffer_forgets_the_oldest_and_metrics_say_so(tmp_path):
    dataset = opened(tmp_path, dset_max_size=3)
    assert not dataset.ready_for_training
    with refused(RuntimeError, "is empty"):
        dataset.sample_random_trajectory(np.random.default_rng(0))
    fill(tmp_path, [4] * 6, "npz")
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
    fill(tmp_path, [5, 9, 13])
    dataset = opened(tmp_path)

    def rewards(workers, counts):
        loader = SequenceLoader(dataset, batch_size=3, workers=workers, seed=7)
        out = [b.rews.flatten().tolist() for n in counts for b in loader.batches(n)]
        loader.close()
        return out

    whole = rewards(0, [12])
    assert rewards(2, [12]) == whole
    assert rewards(1, [5, 7]) == whole
    other = SequenceLoader(dataset, batch_size=3, seed=8)
    assert [b.rews.flatten().tolist() for b in other.batches(12)] != whole


def test_a_loader_that_is_set_forward_draws_what_it_would_have_drawn(tmp_path):
    fill(tmp_path, [5, 9, 13])
    dataset = opened(tmp_path)
    first = SequenceLoader(dataset, batch_size=2, workers=2, seed=1)
    taken = []
    for i, batch in enumerate(first.batches(10)):
        taken.append(batch.rews.flatten().tolist())
        if i == 3:
            break
    assert first.next_batch == 4
    second = SequenceLoader(dataset, batch_size=2, seed=1)
    second.next_batch = 4
    assert (
        next(iter(second.batches(1))).rews.flatten().tolist()
        == SequenceLoader(dataset, 2, seed=1).draw(4).rews.flatten().tolist()
    )
    first.close()
    first.close()


def test_ranks_draw_differently(tmp_path):
    fill(tmp_path, [50])
    dataset = opened(tmp_path)
    draws = [SequenceLoader(dataset, 4, seed=1, rank=r).draw(0).time_idxs.flatten().tolist() for r in (0, 1)]
    assert draws[0] != draws[1]


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
