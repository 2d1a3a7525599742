"""`Experiment(init_from=...)`: a new run that begins with the weights of another."""

import numpy as np
import pytest
import tiny
from messages import refused
from tiny import learned, started

from amago import config
from amago.loading import DiskTrajDataset, MixtureOfDatasets
from amago.run.checkpoint import CheckpointError
from amago.run.settings import SettingsError


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    """A run of two epochs, and its last weights."""
    config.clear()
    e = learned(tmp_path_factory.mktemp("teacher"), name="teacher", ckpt_interval=1, epochs=2, always_save_latest=True)
    weights = tiny.weights(e)
    e.close()
    config.clear()
    return e, weights


@pytest.mark.parametrize(
    "path", ["", "ckpts/training_states/teacher_epoch_1", "ckpts/policy_weights/policy_epoch_1.pt", "policy.pt"]
)
def test_a_run_a_training_state_or_a_file(tmp_path, teacher, path):
    source, weights = teacher
    e = started(tmp_path, seed=9, init_from=source.run_dir / path)
    assert not tiny.differing(weights, tiny.weights(e))
    assert (e.epoch, e.learner.grad_steps, e.env_steps) == (0, 0, 0)
    e.learn()
    assert tiny.differing(weights, tiny.weights(e))
    assert tiny.rows(e.run_dir, "train")[-1]["values"]["Learning Rate"] == pytest.approx(0.000625), "a warm-up of its own"


def test_a_run_that_resumes_keeps_its_own_weights(tmp_path, teacher):
    source, weights = teacher
    fields = {"init_from": source.run_dir, "resume": "auto", "ckpt_interval": 1}
    e = learned(tmp_path, **fields)  # the same command, again and again
    own = tiny.weights(e)
    e.close()
    assert tiny.differing(own, weights)
    e = started(tmp_path, epochs=2, **fields)
    assert e.epoch == 1
    assert not tiny.differing(own, tiny.weights(e))


def test_weights_that_do_not_fit_are_refused_by_name(tmp_path, teacher):
    source, _ = teacher
    with refused(CheckpointError, "policy.pt", "traj_encoder.rnn.weight_ih_l0"):
        started(tmp_path, traj="gru", init_from=source.run_dir)
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
    learned(tmp_path).close()  # the name is free


@pytest.mark.parametrize("value", ["nowhere", 3, ""])
def test_what_does_not_exist_is_refused_before_anything_starts(tmp_path, value):
    made = []
    with refused(SettingsError, "init_from", value):
        started(tmp_path, lambda: made.append(1) or tiny.tmaze(), init_from=value)
    assert not made


def test_a_directory_without_weights(tmp_path):
    (tmp_path / "empty").mkdir()
    with refused(CheckpointError, str(tmp_path / "empty")):
        started(tmp_path, init_from=tmp_path / "empty")


def test_the_weights_may_not_be_what_is_overwritten(tmp_path):
    e = learned(tmp_path, ckpt_interval=1)
    e.close()
    with refused(SettingsError, "init_from", "overwrite=True"):
        started(tmp_path, init_from=e.run_dir, overwrite=True)
    again = started(tmp_path, init_from=e.ckpt_dir / "policy_weights" / "policy_epoch_0.pt")  # go on in the same directory
    assert not tiny.differing(tiny.weights(e), tiny.weights(again))


def test_offline_to_online(tmp_path):
    """Learn from a recording, then begin a new run with these weights that also collects."""
    learned(tmp_path, name="recorded", train_batches_per_epoch=0, exploration_wrapper_type=None).close()
    recorded = tmp_path / "recorded" / "buffer"
    (recorded / "protected").rmdir() if (recorded / "protected").is_dir() else None
    (recorded / "fifo").rename(recorded / "protected")
    source = lambda: DiskTrajDataset(tmp_path, "recorded")  # noqa: E731
    offline = learned(tmp_path, name="offline", dataset=source(), start_collecting_at_epoch=float("inf"), ckpt_interval=1)
    assert offline.env_steps == 0
    offline.close()
    both = MixtureOfDatasets([source(), DiskTrajDataset(tmp_path, "online")], [0.5, 0.5], collect_into=1)
    online = started(tmp_path, name="online", dataset=both, init_from=offline.run_dir)
    assert not tiny.differing(tiny.weights(offline), tiny.weights(online))
    online.learn()
    assert online.env_steps == 24
    assert np.isfinite(tiny.rows(online.run_dir, "train")[-1]["values"]["Critic Loss"])
