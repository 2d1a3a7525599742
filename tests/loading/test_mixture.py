"""Mixtures of datasets, datasets that do nothing, and several learners on one buffer."""

import signal

import gymnasium as gym
import numpy as np
import pytest
import recordings as rec
import tiny
from messages import check_refused, naming, refused

import amago
from amago.loading import (
    ArrayDataset,
    DatasetSettings,
    DiskTrajDataset,
    DoNothingDataset,
    MixtureOfDatasets,
    RLDataset,
    SequenceLoader,
)

OBS = gym.spaces.Dict({"observation": rec.OBS})


def recorded(number):
    """A dataset of one rollout, whose observations say ``number``."""
    episode = rec.Episode(number, np.ones(20, np.float32), True, False)
    return ArrayDataset(**rec.rows([episode]), action_space=rec.ACT)


class Later(RLDataset):
    """Ready when it is told to be."""

    def __init__(self, number):
        self.inner, self.ready, self.calls = recorded(number), False, []

    def configure(self, settings):
        super().configure(settings)
        self.inner.configure(settings)

    def sample_random_trajectory(self, rng):
        assert self.ready
        return self.inner.sample_random_trajectory(rng)

    @property
    def ready_for_training(self):
        return self.ready

    def on_end_of_collection(self):
        self.calls.append("collected")
        return {"size": 3.0}

    def on_end_of_training(self):
        self.calls.append("trained")
        return {"loss": 1.0}


def shares(mixture, n=2000, seed=0):
    rng = np.random.default_rng(seed)
    drawn = [int(mixture.sample_random_trajectory(rng).obs["observation"][0, 0]) for _ in range(n)]
    return [drawn.count(i) / n for i in range(len(mixture.datasets))]


def epoch(mixture):
    """One epoch; the weights it trained with."""
    mixture.on_end_of_collection()
    weights = mixture.current_weights
    mixture.on_end_of_training()
    return weights


def configured(*args, **kwargs):
    mixture = MixtureOfDatasets(*args, **kwargs)
    mixture.configure(DatasetSettings(4))
    return mixture


def test_sequences_come_in_the_proportions_of_the_weights():
    mixture = configured([recorded(0), recorded(1), recorded(2), recorded(3)], [1, 0, 3, 4])
    assert mixture.current_weights == [0.125, 0.0, 0.375, 0.5]
    found = shares(mixture)
    assert found[1] == 0
    np.testing.assert_allclose(found, mixture.current_weights, atol=5 * np.sqrt(0.25 / 2000))


def test_a_mixture_waits_for_the_first_that_is_ready():
    later = Later(1)
    mixture = configured([DoNothingDataset(), later], [1.0, 1.0])
    assert not mixture.ready_for_training
    assert mixture.can_become_ready
    assert mixture.current_weights == [0.0, 0.0]
    with refused(RuntimeError, "none of the datasets in this mixture is ready"):
        mixture.sample_random_trajectory(np.random.default_rng(0))
    later.ready = True
    mixture.on_end_of_collection()
    assert mixture.ready_for_training
    assert shares(mixture, 20) == [0.0, 1.0]
    assert not configured([DoNothingDataset()], [1.0]).can_become_ready


def test_one_that_is_ready_later_starts_slowly():
    later = Later(1)
    mixture = configured([recorded(0), later], [0.5, 0.5], smooth_sudden_starts=4)
    assert epoch(mixture) == [1.0, 0.0]
    later.ready = True
    # relative weights 0, 1/8, 2/8, 3/8, 4/8 beside 1/2
    want = [w / (w + 0.5) for w in (0, 0.125, 0.25, 0.375, 0.5, 0.5)]
    np.testing.assert_allclose([epoch(mixture)[1] for _ in range(6)], want)


def test_initial_weights_move_to_the_final_ones():
    mixture = configured([recorded(0), recorded(1)], [0.2, 0.8], initial_sampling_weights=[1.0, 0.0], smooth_sudden_starts=4)
    np.testing.assert_allclose([epoch(mixture)[1] for _ in range(6)], [0.0, 0.2, 0.4, 0.6, 0.8, 0.8])


def test_metrics_carry_the_data_sets_name_and_every_one_is_told():
    later = Later(1)
    mixture = configured([recorded(0), later], [0.5, 0.5])
    metrics = mixture.on_end_of_collection()
    assert (metrics["ArrayDataset trajectories"], metrics["Later size"]) == (1.0, 3.0)
    assert (metrics["ArrayDataset Current Sample Weight"], metrics["Later Current Sample Weight"]) == (1.0, 0.0)
    assert mixture.on_end_of_training() == {"Later loss": 1.0}
    assert later.calls == ["collected", "trained"]


def test_new_trajectories_go_to_the_only_one_that_takes_them(tmp_path):
    disk = DiskTrajDataset(tmp_path, "new")
    assert MixtureOfDatasets([recorded(0), disk], [1, 1]).save_new_trajs_to == str(tmp_path / "new" / "buffer" / "fifo")
    assert MixtureOfDatasets([recorded(0), DoNothingDataset()], [1, 1]).save_new_trajs_to is None


def test_of_two_buffers_only_the_one_that_collects_is_edited_and_deleted(tmp_path):
    old, new = DiskTrajDataset(tmp_path, "old", 1), DiskTrajDataset(tmp_path, "new")
    with pytest.raises(ValueError, match=r"datasets \[0, 1\] would all take new trajectories; say which with collect_into"):
        _ = MixtureOfDatasets([old, new], [1, 1]).save_new_trajs_to
    for name in ("old", "new"):
        recorded(0).copy_to(tmp_path / name / "buffer" / "fifo", "a", save_as="npz")
        recorded(0).copy_to(tmp_path / name / "buffer" / "fifo", "b", save_as="npz")
    mixture = configured([old, new], [1, 1], collect_into=1)
    assert mixture.save_new_trajs_to == new.save_new_trajs_to
    mixture.on_end_of_collection()
    assert (len(old.store), len(new.store)) == (2, 2)  # its limit of one does not delete what it may not edit
    mixture.delete()
    mixture.on_end_of_collection()
    assert (len(old.store), len(new.store)) == (2, 0)
    recorded(0).copy_to(tmp_path / "new" / "buffer" / "protected", "c")
    mixture.on_end_of_collection()
    mixture.delete()
    assert len(new.store) == 1
    mixture.delete(delete_protected=True)
    assert (len(old.store), len(new.store)) == (2, 0)


def recorded_tmaze(root):
    """The buffer of an experiment that only collected."""
    tiny.learned(
        root, name="recorder", start_learning_at_epoch=float("inf"), train_timesteps_per_epoch=4 * tiny.EPISODE
    ).close()
    return DiskTrajDataset(root, "recorder")


def test_from_offline_to_online_in_one_run(tmp_path):
    parts = [recorded_tmaze(tmp_path), DiskTrajDataset(tmp_path, "run")]
    mixture = MixtureOfDatasets(parts, [0.5, 0.5], smooth_sudden_starts=2, collect_into=1)
    e = tiny.learned(tmp_path, dataset=mixture, start_collecting_at_epoch=2, epochs=6)
    rows = [r["values"] for r in tiny.rows(e.run_dir, "buffer") if "run Current Sample Weight" in r["values"]]
    np.testing.assert_allclose([r["run Current Sample Weight"] for r in rows], [0, 0, 0, 1 / 3, 0.5, 0.5])
    assert [r["run trajectories"] for r in rows] == [0, 0, 4, 8, 12, 16]
    assert len(tiny.rows(e.run_dir, "train")) >= 6
    assert len(tiny.rows(e.run_dir, "rollout")) == 4


def test_a_run_that_is_stopped_in_the_middle_of_an_epoch_goes_on_with_the_same_proportions(tmp_path):
    recorded_tmaze(tmp_path)

    class Stop(amago.Callback):
        def before_update(self, experiment):  # its batch is drawn already, and must not be lost
            if experiment.grad_update_counter == 3:
                signal.raise_signal(signal.SIGINT)

    def make(name, **fields):
        parts = [DiskTrajDataset(tmp_path, "recorder") for _ in range(2)]
        mixture = MixtureOfDatasets(parts, [0.2, 0.8], [1.0, 0.0], 4, collect_into=0)
        return tiny.started(
            tmp_path, dataset=mixture, train_timesteps_per_epoch=0, epochs=3, ckpt_interval=1, train_batches_per_epoch=3,
            name=name, share_buffer=True, **fields,
        )  # fmt: skip

    whole = make("whole")
    whole.learn()
    with pytest.raises(SystemExit):
        make("parts", callbacks=[Stop()]).learn()
    parts = make("parts", resume="auto")
    parts.learn()
    np.testing.assert_allclose(parts.dataset.current_weights, whole.dataset.current_weights)
    assert tiny.differing(tiny.weights(whole), tiny.weights(parts)) == []


def test_wrong_arguments_are_refused():
    def mixture(**changes):
        return MixtureOfDatasets(**({"datasets": [recorded(0), recorded(1)], "sampling_weights": [1, 1]} | changes))

    wide = rec.rows([rec.Episode(1, np.ones(9, np.float32), True, False)]) | {"actions": np.zeros((9, 2), np.float32)}
    two = ArrayDataset(**wide, action_space=gym.spaces.Box(-1, 1, (2,)))
    spaces = OBS, gym.spaces.Discrete(2)
    check_refused(
        ValueError,
        ("at least one dataset", lambda: mixture(datasets=[])),
        (naming("datasets[0]", "amago.loading.RLDataset"), lambda: mixture(datasets=[recorded])),
        (naming("sampling_weights", 1, 2), lambda: mixture(sampling_weights=[1])),
        (naming("sampling_weights", "not all 0", [1.0, -1.0]), lambda: mixture(sampling_weights=[1, -1])),
        (naming("initial_sampling_weights", "smooth_sudden_starts"), lambda: mixture(initial_sampling_weights=[1, 0])),
        (naming("smooth_sudden_starts", 0), lambda: mixture(smooth_sudden_starts=0)),
        (naming("collect_into", "0 to 1", 2), lambda: mixture(collect_into=2)),
        ("has actions Box", lambda: configured([DoNothingDataset(), recorded(0)], [1, 1]).check_spaces(*spaces)),
        (naming("actions", "shapes"), lambda: SequenceLoader(configured([recorded(0), two], [1, 1]), 32).draw(0)),
    )
