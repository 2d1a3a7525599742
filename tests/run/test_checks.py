"""start() refuses wrong settings, all at once, before it creates anything."""

import os
from pathlib import Path

import pytest
import tiny
from messages import refused
from tiny import experiment

from amago import config
from amago.loading import DiskTrajDataset
from amago.run.settings import SettingsError


def never():
    raise AssertionError("an environment was made")


def test_everything_wrong_is_listed_at_once_with_its_value(tmp_path):
    wrong = {
        "batch_size": True, "env_mode": "fast", "learning_rate": "1e-4", "agent_type": None, "resume": "maybe", "val_interval": -2,
        "dloader_workers": -1, "sample_actions_val": 1, "run_name": "..", "traj_save_len": 0,
    }  # fmt: skip
    with pytest.raises(SettingsError) as err:
        experiment(tmp_path, never, **wrong).start()
    lines = {line.split()[1]: line for line in str(err.value).splitlines()[1:]}
    assert lines.keys() == wrong.keys()
    assert all(lines[name].endswith(f"got {value!r}") for name, value in wrong.items())
    assert list(tmp_path.iterdir()) == []


def test_limits_belong_to_the_dataset_that_is_given(tmp_path):
    with refused(SettingsError, "dset_max_steps=500 does not change the dataset that is given"):
        experiment(tmp_path, never, dset_max_steps=500).start()


def test_parts_may_be_named_as_on_the_command_line(tmp_path):
    names = {
        "tstep_encoder_type": "ff", "traj_encoder_type": "gru", "agent_type": "multitask", "exploration_wrapper_type": "bilevel",
    }  # fmt: skip
    config.bind(tiny.TWO_HOT | {"BilevelEpsilonGreedy.rollout_horizon": 6})
    e = tiny.learned(tmp_path, **names)
    assert e.learner.grad_steps == 2
    assert type(e.policy).__name__ == "MultiTaskAgent"
    assert type(e.policy.traj_encoder).__name__ == "GRUTrajEncoder"


def test_an_unknown_part_names_the_nearest(tmp_path):
    e = experiment(tmp_path, never, traj_encoder_type="gruu", agent_type="ppo")
    with refused(SettingsError, "traj_encoder_type", "'gruu'", "did you mean 'gru'", "agent_type", "'ppo'"):
        e.start()


def test_directories_that_cannot_be_written_to_say_what_they_are_for(tmp_path, monkeypatch):
    e = tiny.started(tmp_path, name="a")
    for name in ("runs", "data", "saved"):
        (tmp_path / name).mkdir()
    access = os.access
    monkeypatch.setattr(
        os, "access", lambda path, mode: Path(path).name not in ("runs", "data", "saved") and access(path, mode)
    )
    wrong = experiment(tmp_path / "runs", never, dataset=DiskTrajDataset(tmp_path / "data", "d"))
    with refused(SettingsError, "ckpt_base_dir", "checkpoints and logs", "dset_root", "the replay buffer") as err:
        wrong.start()
    assert len(str(err.value).splitlines()) == 3
    with refused(SettingsError, "save_trajs_to", str(tmp_path / "saved"), "trajectories"):
        e.evaluate_test(tiny.tmaze, 10, save_trajs_to=str(tmp_path / "saved"))


def test_it_can_be_put_right_and_started(tmp_path):
    e = experiment(tmp_path, batch_size=0)
    with pytest.raises(SettingsError):
        e.start()
    e.batch_size = 2
    e.start()
    e.learn()
    assert e.learner.grad_steps == 2


@pytest.mark.parametrize("mode", ["sync", "already_vectorized"])
def test_what_is_no_amago_environment(tmp_path, mode):
    e = experiment(tmp_path, lambda: tiny.TMazePassive(3), env_mode=mode)
    with refused(TypeError, "TMazePassive", "AMAGOEnv"):
        e.start()


def test_rows_of_a_vectorised_environment_are_the_actors(tmp_path):
    e = experiment(tmp_path, tiny.cartpoles, env_mode="already_vectorized", parallel_actors=3)
    with refused(ValueError, "batched_envs=2", 3, "parallel_actors"):
        e.start()
