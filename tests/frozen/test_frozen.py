"""Files written by commit 7e24746 load, act and go on."""

import tarfile
from pathlib import Path

import frozen_program
import numpy as np
import pytest
from safetensors.numpy import load_file

from amago.cli_utils import use_config


@pytest.fixture
def frozen(tmp_path):
    with tarfile.open(Path(__file__).parent / "7e24746.tar.gz") as files:
        files.extractall(tmp_path, filter="data")
    return tmp_path


@pytest.mark.parametrize("name", frozen_program.RUNS)
def test_policy_acts_as_it_did(frozen, name):
    assert np.allclose(frozen_program.answers(frozen, name), np.load(frozen / "answers.npz")[name], atol=1e-4)


@pytest.mark.parametrize("name", frozen_program.RUNS)
def test_buffer_is_read_whole(frozen, name):
    use_config(frozen_program.SMALL)
    run = frozen_program.experiment(frozen, name, resume="auto", epochs=2)
    run.start()
    batch = next(iter(run.train_dloader.batches(1)))
    run.close()
    assert (len(run.dataset.store), batch.rews.shape[1:]) == (16, (12, 1))
    assert bool(batch.mask.all())
    assert np.allclose(batch.obs["cue"][:, 1:].numpy(), 0.0)
    assert bool((batch.obs["cue"][:, 0] != 0).all())


@pytest.mark.parametrize("name", frozen_program.RUNS)
def test_training_state_goes_on(frozen, name):
    use_config(frozen_program.SMALL)
    run = frozen_program.experiment(frozen, name, resume="auto", epochs=3)
    run.start()
    stored = load_file(frozen / name / "ckpts" / "training_states" / f"{name}_epoch_1" / "model.safetensors")
    restored = {key: value.numpy().copy() for key, value in run.policy.state_dict().items()}
    updates, steps = run.grad_update_counter, run.env_steps
    run.learn()
    run.close()
    assert stored.keys() <= restored.keys()
    assert all(np.allclose(stored[key], restored[key], atol=1e-5) for key in stored)  # they are the average of the last updates
    assert (updates, steps, run.grad_update_counter, run.env_steps) == (8, 192, 12, 288)
    assert run.epoch == 3
