"""Environment steps of a process that never collects: what others have delivered to its store."""

import numpy as np
import pytest
import tiny

from amago.cli_utils import switch_async_mode
from amago.loading import DiskTrajDataset, MixtureOfDatasets
from amago.run.checkpoint import CheckpointError


def collect(root, epochs=1, **fields):
    e = switch_async_mode(tiny.experiment(root, epochs=epochs, seed=None, **fields), "collect")
    e.epochs = epochs
    e.start()
    e.learn()
    e.close()
    return e.env_steps


def learner(root, **fields):
    e = switch_async_mode(tiny.experiment(root, **fields), "learn")
    e.start()
    return e


def test_a_learner_counts_what_collectors_deliver(tmp_path):
    steps = collect(tmp_path)
    e = learner(tmp_path)
    e.learn()
    assert e.env_steps == steps == 24
    assert [row["env_steps"] for row in tiny.rows(tmp_path / "run", "train")] == [24]


def test_steps_that_were_deleted_still_count(tmp_path):
    collect(tmp_path)
    e = learner(tmp_path, dataset=DiskTrajDataset(tmp_path, "run", dset_max_size=1), epochs=3)
    e.learn()
    collect(tmp_path)
    e.data.on_end_of_collection()
    assert e.env_steps == 48
    assert e.data.store.info()["evicted"] > 0


def test_a_resumed_learner_goes_on_counting(tmp_path):
    collect(tmp_path)
    e = learner(tmp_path, ckpt_interval=1, dataset=DiskTrajDataset(tmp_path, "run", dset_max_size=1))
    e.learn()
    e.close()
    collect(tmp_path)
    e = learner(tmp_path, ckpt_interval=1, resume="auto", epochs=2, dataset=DiskTrajDataset(tmp_path, "run", dset_max_size=1))
    assert e.env_steps == 48, "those before the training state, and those that came while nobody learned"


def test_files_that_are_never_deleted_were_not_collected(tmp_path):
    collect(tmp_path)
    fifo, protected = tmp_path / "run" / "buffer" / "fifo", tmp_path / "run" / "buffer" / "protected"
    for path in fifo.glob("*.safetensors"):
        path.rename(protected / path.name)
    assert learner(tmp_path).env_steps == 0


def test_a_mixture_counts_what_its_collecting_data_set_receives(tmp_path):
    collect(tmp_path)
    mixture = MixtureOfDatasets(
        [DiskTrajDataset(tmp_path, "run"), DiskTrajDataset(tmp_path, "other")], [0.5, 0.5], collect_into=0
    )
    assert learner(tmp_path, dataset=mixture).env_steps == 24


def test_a_collector_has_no_optimizer_and_says_so(tmp_path):
    first = learner(tmp_path, name="other")
    first.save_checkpoint()
    e = switch_async_mode(tiny.experiment(tmp_path), "collect")
    e.start()
    assert e.optimizer is None
    with pytest.raises(CheckpointError, match="only collects"):
        e.load_checkpoint_from_path(str(first.checkpoints.of_epoch(0)))


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_environments_may_be_deleted_and_are_started_again_when_they_are_needed(tmp_path, mode):
    e = tiny.learned(tmp_path, env_mode=mode, env_workers=1)
    before = e.train_envs
    del e.train_envs, e.val_envs
    with pytest.raises(ValueError, match="the pool is closed"):
        before.step(np.zeros((2, 1), np.int64))
    e.collect_new_training_data()
    e.evaluate_val()
    assert e.train_envs is not before
