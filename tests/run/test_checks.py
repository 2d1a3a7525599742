"""start() refuses wrong settings, all at once, before it creates anything, and warns of faulty parts; what it takes can be loaded again."""

import dataclasses
import decimal
import enum
import fractions
import itertools
import json
import os
import warnings
from pathlib import Path

import numpy as np
import pytest
import tiny
import torch
from messages import naming, refused
from tiny import EPISODE, experiment

import amago
from amago import config
from amago.loading import DiskTrajDataset
from amago.nets.tstep_encoders import FFTstepEncoder
from amago.run.settings import SettingsError


def never():
    raise AssertionError("an environment was made")


def test_everything_wrong_is_listed_at_once_with_its_value(tmp_path):
    wrong = {
        "batch_size": True, "env_mode": "fast", "learning_rate": "1e-4", "agent_type": None, "resume": "maybe", "val_interval": -2,
        "dloader_workers": -1, "sample_actions_val": 1, "run_name": "..", "traj_save_len": 0, "ema_decay": 1.0,
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


class Colour(enum.Enum):
    RED = 8


STRANGE = {
    "object": object(), "complex": 1j, "bytes": b"x", "array": np.array([1, 2]), "tensor": torch.tensor([1, 2]), "nan": float("nan"),
    "enum": Colour.RED, "decimal": decimal.Decimal(2), "fraction": fractions.Fraction(3, 2), "set": {1}, "array of nan": np.array(np.nan),
}  # fmt: skip
FIELDS = [f.name for f in dataclasses.fields(amago.Experiment)]
NUMPY = {bool: np.bool_, int: np.int64, float: np.float32, str: np.str_}
KINDS = {
    "numpy": lambda v: NUMPY[type(v)](v) if type(v) in NUMPY else v,
    "0-d arrays": lambda v: np.array(v) if type(v) in (bool, int, float) else v,
    "0-d tensors": lambda v: torch.tensor(v) if type(v) in (bool, int, float) else v,
}


@pytest.mark.parametrize("name", FIELDS)
def test_what_a_setting_cannot_be_is_refused_by_its_name(tmp_path, name):
    for kind, value in STRANGE.items():
        config.reset_config()
        with pytest.raises(ValueError, match=rf"\b{name}\b"):
            tiny.started(tmp_path / kind, **{name: value})


USED = {
    "epochs": 1, "ckpt_interval": 1, "always_save_latest": True, "val_interval": 1, "log_interval": 1, "ema_decay": 0.5, "lr_cooldown": 0.25,
    "actor_learning_rate": 0.5, "critic_loss_weight": 2.0, "keep_training_states": 2, "traj_save_len": 50.0, "val_episodes": 2,
    "train_timesteps_per_epoch": 2 * EPISODE, "batch_size": 4, "max_seq_len": EPISODE, "seed": 3, "sample_actions": False,
}  # fmt: skip
"""Numbers of each kind that a run uses."""


@pytest.mark.parametrize("kind", KINDS)
def test_numbers_of_other_libraries_are_saved_and_loaded_again(tmp_path, kind, capsys):
    def fields(root, convert, **more):
        bindings = {
            "Agent.reward_multiplier": 0.5, "Agent.use_target_actor": True, "FFTrajEncoder.d_model": 8, "EpsilonGreedy.eps_start": 0.75,
        }  # fmt: skip
        config.bind(tiny.SMALL)
        found = {k: convert(v) for k, v in (USED | more).items()}
        e = tiny.experiment(root, **found, dset_root=convert(str(root)), dset_name="run", dataset=None)
        config.bind({k: convert(v) for k, v in bindings.items()})
        return e

    e = fields(tmp_path, KINDS[kind])
    e.start()
    e.learn()
    e.close()
    for name, value in USED.items():
        assert type(getattr(e, name)) in (type(value), str), name
    assert amago.load_policy(e.run_dir).agent.max_seq_len == EPISODE
    json.loads((e.run_dir / "settings.json").read_text(), parse_constant=pytest.fail)
    assert "np." not in (e.run_dir / "config.txt").read_text()
    config.reset_config()
    capsys.readouterr()
    e = fields(tmp_path, lambda v: v, resume="auto", epochs=2, verbose=True)
    e.start()
    differing = capsys.readouterr().out.partition("settings that differ")[2].splitlines()[1:]
    named = [line.split()[0] for line in itertools.takewhile(lambda line: line.startswith("  "), differing)]
    assert named == ["epochs"], "nothing else differs from the training state"
    assert e.epoch == 1


def test_paths_may_be_paths(tmp_path):
    e = tiny.learned(
        tmp_path, ckpt_base_dir=Path(tmp_path), dset_root=Path(tmp_path), dset_name="run", dataset=None, always_save_latest=True
    )
    assert amago.load_policy(e.run_dir).agent.max_seq_len == EPISODE


@pytest.mark.parametrize("value", [np.array([0.5, 0.75]), torch.tensor([0.5, 0.75]), (0.5, 0.75), [np.float64(0.5), 0.75]])
def test_lists_of_other_libraries_are_saved_and_loaded_again(tmp_path, value):
    e = tiny.experiment(tmp_path, tiny.pendulum, max_seq_len=5, train_timesteps_per_epoch=11, always_save_latest=True)
    config.bind({"Multigammas.continuous": value})
    e.start()
    e.learn()
    config.reset_config()
    assert amago.load_policy(e.run_dir).agent.gammas.tolist() == pytest.approx([0.5, 0.75, 0.999])


@pytest.mark.parametrize("value", [object(), {0.5}, 1j, b"x", decimal.Decimal("0.5"), lambda: None, Colour.RED])
def test_a_binding_that_cannot_be_loaded_again_is_refused_by_its_name(tmp_path, value):
    e = tiny.experiment(tmp_path)
    with pytest.raises((ValueError, TypeError), match=r"Agent\.fbc_filter_func|must be callable|not callable|Agent"):
        config.bind({"Agent.fbc_filter_func": value})
        e.start()


class Forgetful(tiny.LSTM):
    """Learns from the past of a sequence, and forgets it when it acts."""

    def forward(self, seq, time_idxs, hidden_state=None, log_dict=None):
        return self.lstm(seq)[0], hidden_state


class Noisy(FFTstepEncoder):
    def inner_forward(self, obs, rl2s, log_dict=None, mask=None):
        out = super().inner_forward(obs, rl2s, log_dict, mask)
        return out + torch.rand_like(out)


@pytest.mark.parametrize(
    ("part", "named"),
    [
        ({"traj_encoder_type": Forgetful}, ("test_checks.Forgetful", "step 1 of a rollout", "whole sequence")),
        ({"tstep_encoder_type": Noisy}, ("test_checks.Noisy", "evaluation mode")),
    ],
)
def test_parts_that_act_otherwise_than_they_learned(tmp_path, part, named):
    with pytest.warns(UserWarning, match=naming(*named)):
        tiny.started(tmp_path, **part)


def test_others_start_in_silence_and_train_as_before(tmp_path, monkeypatch):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        checked = tiny.learned(tmp_path / "a", traj_encoder_type=tiny.LSTM)
    monkeypatch.setattr(amago.experiment, "warn_of_faulty_parts", lambda agent: None)
    not_checked = tiny.learned(tmp_path / "b", traj_encoder_type=tiny.LSTM)
    assert not tiny.differing(tiny.weights(checked), tiny.weights(not_checked)), "the random numbers of the run are left alone"
