"""Whatever a setting or a binding accepts is saved and loaded again; anything else is refused at the start, with its name."""

import dataclasses
import decimal
import enum
import fractions
import itertools
import json
from pathlib import Path

import numpy as np
import pytest
import tiny
import torch
from tiny import EPISODE

import amago
from amago import config


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


def used_by(**fields):
    """A run that uses numbers of each kind."""
    return {
        "epochs": 1, "ckpt_interval": 1, "always_save_latest": True, "val_interval": 1, "log_interval": 1, "ema_decay": 0.5, "lr_cooldown": 0.25,
        "actor_learning_rate": 0.5, "critic_loss_weight": 2.0, "keep_training_states": 2, "traj_save_len": 50.0, "val_episodes": 2,
        "train_timesteps_per_epoch": 2 * EPISODE, "batch_size": 4, "max_seq_len": EPISODE, "seed": 3, "sample_actions": False,
    } | fields  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_numbers_of_other_libraries_are_saved_and_loaded_again(tmp_path, kind, capsys):
    def fields(root, convert, **more):
        bindings = {
            "Agent.reward_multiplier": 0.5, "Agent.use_target_actor": True, "FFTrajEncoder.d_model": 8, "EpsilonGreedy.eps_start": 0.75,
        }  # fmt: skip
        config.bind(tiny.SMALL)
        found = {k: convert(v) for k, v in used_by(**more).items()}
        e = tiny.experiment(root, **found, dset_root=convert(str(root)), dset_name="run", dataset=None)
        config.bind({k: convert(v) for k, v in bindings.items()})
        return e

    e = fields(tmp_path, KINDS[kind])
    e.start()
    e.learn()
    e.close()
    for name, value in used_by().items():
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
    e.close()
    assert amago.load_policy(e.run_dir).agent.max_seq_len == EPISODE


@pytest.mark.parametrize("value", [np.array([0.5, 0.75]), torch.tensor([0.5, 0.75]), (0.5, 0.75), [np.float64(0.5), 0.75]])
def test_lists_of_other_libraries_are_saved_and_loaded_again(tmp_path, value):
    e = tiny.experiment(tmp_path, tiny.pendulum, max_seq_len=5, train_timesteps_per_epoch=11, always_save_latest=True)
    config.bind({"Multigammas.continuous": value})
    e.start()
    e.learn()
    e.close()
    config.reset_config()
    assert amago.load_policy(e.run_dir).agent.gammas.tolist() == pytest.approx([0.5, 0.75, 0.999])


@pytest.mark.parametrize("value", [object(), {0.5}, 1j, b"x", decimal.Decimal("0.5"), lambda: None, Colour.RED])
def test_a_binding_that_cannot_be_loaded_again_is_refused_by_its_name(tmp_path, value):
    e = tiny.experiment(tmp_path)
    with pytest.raises((ValueError, TypeError), match=r"Agent\.fbc_filter_func|must be callable|not callable|Agent"):
        config.bind({"Agent.fbc_filter_func": value})
        e.start()
