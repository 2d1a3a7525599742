"""start() refuses wrong settings, all at once, before it creates anything."""

import os
from pathlib import Path

import numpy as np
import pytest
import tiny
from messages import naming
from tiny import experiment

import amago
from amago import config
from amago.loading import DiskTrajDataset
from amago.nets.traj_encoders import TformerTrajEncoder
from amago.nets.tstep_encoders import FFTstepEncoder
from amago.run.checks import SettingsError, check_settings

WHOLE = "a whole number of at least 1"
FROM_0 = "a whole number of 0 or more"
NAN = float("nan")


def never():
    raise AssertionError("an environment was made")


@pytest.mark.parametrize(
    ("field", "value", "right"),
    [
        ("max_seq_len", 0, WHOLE),
        ("max_seq_len", 10.5, WHOLE),
        ("batch_size", 0, WHOLE),
        ("batch_size", 2.5, WHOLE),
        ("batch_size", "24", WHOLE),
        ("batch_size", True, WHOLE),
        ("batches_per_update", 0, WHOLE),
        ("parallel_actors", -1, WHOLE),
        ("parallel_actors", None, WHOLE),
        ("epochs", -1, "a whole number of 0 or more"),
        ("log_interval", -1, "a whole number of 0 or more"),
        ("dloader_workers", -1, FROM_0),
        ("train_batches_per_epoch", 3.5, FROM_0),
        ("val_timesteps_per_epoch", -5, FROM_0),
        ("lr_warmup_steps", -1, FROM_0),
        ("max_env_restarts", -1, FROM_0),
        ("train_timesteps_per_epoch", -1, f"None or {FROM_0}"),
        ("train_timesteps_per_epoch", 2.5, f"None or {FROM_0}"),
        ("seed", -3, f"None or {FROM_0}"),
        ("seed", "lucky", f"None or {FROM_0}"),
        ("start_learning_at_epoch", -1, "0 or more"),
        ("start_collecting_at_epoch", NAN, "0 or more"),
        ("l2_coeff", -1e-3, "0 or more"),
        ("critic_loss_weight", -1, "0 or more"),
        ("learning_rate", 0.0, "above 0"),
        ("learning_rate", NAN, "above 0"),
        ("learning_rate", "1e-4", "above 0"),
        ("grad_clip", 0, "above 0"),
        ("env_step_timeout", 0, "above 0"),
        ("traj_save_len", 0, "at least 1"),
        ("val_interval", -1, "None or a whole number of 0 or more"),
        ("ckpt_interval", 1.5, "None or a whole number of 0 or more"),
        ("force_reset_train_envs_every", "often", "None or a whole number of 0 or more"),
        ("sample_actions_val", 1, "True or False"),
        ("keep_training_states", 0, "None or a whole number of at least 1"),
        ("env_workers", 0, "None or a whole number of at least 1"),
        ("env_mode", "vectorized", "one of 'async', 'sync', 'already_vectorized', 'auto'"),
        ("save_trajs_as", "hdf5", "one of 'segments', 'npz', 'npz-compressed'"),
        ("save_trajs_as", "traj", "pickled .traj files are never written"),
        ("padded_sampling", "middle", "one of 'none', 'both', 'left', 'right'"),
        ("mixed_precision", "fp8", "one of 'no', 'fp16', 'bf16'"),
        ("async_env_mp_context", "thread", "one of None, 'fork', 'spawn', 'forkserver'"),
        ("resume", "yes", "'never', 'auto' or the number of an epoch"),
        ("resume", -1, "'never', 'auto' or the number of an epoch"),
        ("resume", True, "'never', 'auto' or the number of an epoch"),
        ("run_name", "a/b", "a name without '/'"),
        ("run_name", "..", "a name without '/'"),
        ("run_name", "", "a name without '/'"),
        ("dataset", "runs/demo", "an amago.loading.RLDataset"),
        ("tstep_encoder_type", TformerTrajEncoder, "a subclass of TstepEncoder"),
        ("traj_encoder_type", FFTstepEncoder, "a subclass of TrajEncoder"),
        ("agent_type", "agnet", "a subclass of BaseAgent"),
        ("exploration_wrapper_type", amago.Agent, "a subclass of ExplorationWrapper"),
        ("make_train_env", "CartPole-v1", "a function that returns an AMAGOEnv, or a list"),
        ("make_val_env", 3, "a function that returns an AMAGOEnv, or a list"),
    ],
)
def test_a_wrong_field_is_named_with_its_value_and_what_is_right(tmp_path, field, value, right):
    e = experiment(tmp_path, never, **{field: value})
    with pytest.raises(SettingsError) as err:
        e.start()
    (line,) = str(err.value).splitlines()[1:]
    assert line.startswith(f"  - {field} must")
    assert right in line
    assert f"got {value!r}" in line
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("fields", "wanted"),
    [
        ({"traj_save_len": 5, "max_seq_len": 10}, "traj_save_len=5 is less than max_seq_len=10"),
        ({"make_train_env": [never]}, "make_train_env lists 1 functions, but parallel_actors=2"),
        ({"make_val_env": (never, never, never)}, "make_val_env lists 3 functions, but parallel_actors=2"),
        ({"make_val_env": iter([never, "x"])}, "make_val_env must list functions that return an AMAGOEnv, but holds 'x'"),
        ({"dataset": None}, "dataset must be given, or dset_root and dset_name"),
        ({"dset_max_steps": 500}, "dset_max_steps=500 does not change the dataset that is given"),
        ({"dataset": None, "dset_root": "x"}, "dataset must be given, or dset_root and dset_name"),
    ],
)
def test_contradictions(tmp_path, fields, wanted):
    e = experiment(tmp_path, never, **fields)
    with pytest.raises(SettingsError) as err:
        e.start()
    (line,) = str(err.value).splitlines()[1:]
    assert wanted in line
    assert list(tmp_path.iterdir()) == []


def test_everything_wrong_is_listed_at_once(tmp_path):
    wrong = {
        "batch_size": 0,
        "env_mode": "fast",
        "learning_rate": -1,
        "agent_type": None,
        "resume": "maybe",
        "val_interval": -2,
    }
    with pytest.raises(SettingsError) as err:
        experiment(tmp_path, never, **wrong).start()
    lines = str(err.value).splitlines()[1:]
    assert sorted(line.split()[1] for line in lines) == sorted(wrong)
    assert isinstance(err.value, ValueError)


def test_parts_may_be_named_as_on_the_command_line(tmp_path):
    names = {
        "tstep_encoder_type": "ff", "traj_encoder_type": "gru", "agent_type": "multitask", "exploration_wrapper_type": "bilevel",
    }  # fmt: skip
    config.bind(tiny.TWO_HOT | {"BilevelEpsilonGreedy.rollout_horizon": 6})
    e = tiny.learned(tmp_path, **names)
    assert e.updater.grad_steps == 2
    assert type(e.policy).__name__ == "MultiTaskAgent"
    assert type(e.policy.traj_encoder).__name__ == "GRUTrajEncoder"


def test_an_unknown_part_names_the_nearest(tmp_path):
    e = experiment(tmp_path, never, traj_encoder_type="gruu", agent_type="ppo")
    with pytest.raises(SettingsError, match=naming("traj_encoder_type", "'gruu'", "did you mean 'gru'", "agent_type", "'ppo'")):
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
    with pytest.raises(
        SettingsError, match=naming("ckpt_base_dir", "checkpoints and logs", "dset_root", "the replay buffer")
    ) as err:
        wrong.start()
    assert len(str(err.value).splitlines()) == 3
    with pytest.raises(SettingsError, match=naming("save_trajs_to", str(tmp_path / "saved"), "trajectories")):
        e.evaluate_test(tiny.tmaze, 10, save_trajs_to=str(tmp_path / "saved"))


def test_checks_change_nothing(tmp_path):
    e = experiment(tmp_path, never, make_val_env=iter([never, never]))
    e.resolve()
    before = dict(vars(e))
    check_settings(e)
    assert vars(e) == before


def test_shorthands_are_resolved_once(tmp_path):
    e = experiment(tmp_path, make_train_env=iter([never, never]), dataset=None, dset_root=str(tmp_path), dset_name="d")
    e.resolve()
    made, makers = e.dataset, e.make_train_env
    e.resolve()
    assert makers == [never, never]
    assert e.make_train_env == makers
    assert e.dataset is made


def test_it_can_be_put_right_and_started(tmp_path):
    e = experiment(tmp_path, batch_size=0)
    with pytest.raises(SettingsError):
        e.start()
    e.batch_size = 2
    e.start()
    e.learn()
    assert e.updater.grad_steps == 2


def test_numbers_of_numpy_are_numbers(tmp_path):
    e = tiny.learned(tmp_path, batch_size=np.int64(3), learning_rate=np.float32(1e-3), seed=np.uint32(4), ckpt_interval=1)
    assert e.updater.grad_steps == 2


def test_infinity_switches_phases_off(tmp_path):
    e = tiny.learned(tmp_path, start_learning_at_epoch=float("inf"))
    assert e.updater.grad_steps == 0


def test_size_of_the_data_set_that_is_built(tmp_path):
    e = experiment(tmp_path, never, dataset=None, dset_root=str(tmp_path), dset_name="d", dset_max_size=0)
    with pytest.raises(ValueError, match=naming("dset_max_size", 0)):
        e.start()


@pytest.mark.parametrize("mode", ["sync", "already_vectorized"])
def test_what_is_no_amago_environment(tmp_path, mode):
    e = experiment(tmp_path, lambda: tiny.TMazePassive(3), env_mode=mode)
    with pytest.raises(TypeError, match=naming("TMazePassive", "AMAGOEnv")):
        e.start()


def test_what_is_no_amago_environment_for_a_process_that_only_learns(tmp_path):
    e = experiment(tmp_path, lambda: tiny.TMazePassive(3), start_collecting_at_epoch=float("inf"))
    with pytest.raises(TypeError, match=naming("make_val_env", "AMAGOEnv", "TMazePassive")):
        e.start()


def test_rows_of_a_vectorised_environment_are_the_actors(tmp_path):
    e = experiment(tmp_path, tiny.cartpoles, env_mode="already_vectorized", parallel_actors=3)
    with pytest.raises(ValueError, match=naming("batched_envs=2", 3, "parallel_actors")):
        e.start()


def test_a_data_set_of_ones_own_must_know_how_to_sample(tmp_path):
    class Empty(DiskTrajDataset):
        def __init__(self):
            super().__init__(tmp_path, "own")

    e = tiny.learned(tmp_path, dataset=Empty())
    assert e.updater.grad_steps == 2
