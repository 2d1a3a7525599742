"""Mistakes in the names and types of arguments: the message names the argument, and what was probably meant."""

import importlib
import pickle
import pkgutil

import gin
import gymnasium as gym
import pytest
import tiny
from messages import naming

import amago
from amago import config
from amago.cli_utils import switch_agent, switch_traj_encoder, use_config
from amago.config import NamedArguments
from amago.envs import AMAGOEnv, EpsilonGreedy, SequenceWrapper
from amago.envs.builtin import MetaFrozenLake
from amago.hindsight import Relabeler
from amago.loading import ArrayDataset, DiskTrajDataset, DoNothingDataset, MixtureOfDatasets
from amago.nets.cnn import NatureishCNN
from amago.nets.traj_encoders import GRUTrajEncoder, TformerTrajEncoder, TrajEncoder
from amago.nets.tstep_encoders import FFTstepEncoder

WRONG = [
    (amago.Experiment, "max_seq_length", "max_seq_len"),
    (amago.Experiment, "lr", "learning_rate"),
    (amago.Agent, "discount", "gamma"),
    (amago.Agent, "num_critic", "num_critics"),
    (TformerTrajEncoder, "num_heads", "n_heads"),
    (GRUTrajEncoder, "hidden_size", "d_hidden"),
    (FFTstepEncoder, "d_hiden", "d_hidden"),
    (NatureishCNN, "channel_first", "channels_first"),
    (DiskTrajDataset, "max_size", "dset_max_size"),
    (MixtureOfDatasets, "dataset", "datasets"),
    (ArrayDataset, "terminals", "terminations"),
    (AMAGOEnv, "name", "env_name"),
    (EpsilonGreedy, "eps_strt", "eps_start"),
    (SequenceWrapper, "save_traj_to", "save_trajs_to"),
    (MetaFrozenLake, "k_episode", "k_episodes"),
]


@pytest.mark.parametrize(("cls", "wrong", "meant"), WRONG)
def test_constructors_say_what_was_meant(cls, wrong, meant):
    with pytest.raises(TypeError, match=naming(cls.__name__, wrong, f"did you mean {meant}")):
        cls(**{wrong: 3})


def _configurable_classes():
    for module in pkgutil.walk_packages(amago.__path__, "amago."):
        if not any(word in module.name for word in ("__main__", "builtin", "distributed.ray_")):  # these need Ray
            importlib.import_module(module.name)
    entries = [e.wrapped for k, e in config._registry().items() if k.startswith("amago.")]
    # relabelers are data, which knows nothing of settings
    return [c for c in entries if isinstance(c, type) and not issubclass(c, Relabeler)]


def test_every_configurable_class_checks_the_names_of_its_arguments():
    classes = _configurable_classes()
    assert len(classes) > 40
    assert [c for c in classes if not issubclass(c, NamedArguments)] == []
    for cls in classes:
        with pytest.raises(TypeError, match=naming(cls.__name__, "no_such_argument")):
            cls(no_such_argument=3)


def test_nothing_similar_lists_what_there_is():
    with pytest.raises(TypeError, match=naming("TformerTrajEncoder", "zzz", "n_heads", "pos_emb")):
        TformerTrajEncoder(zzz=3)
    with pytest.raises(TypeError, match=naming("DoNothingDataset", "x", "dset_name")):
        DoNothingDataset(x=3)


class Own(TrajEncoder):
    def __init__(self, tstep_dim, max_seq_len, width=8):
        super().__init__(tstep_dim, max_seq_len)


class PassesOn(GRUTrajEncoder):
    def __init__(self, extra=1, **kwargs):
        super().__init__(**kwargs)


class Takes(DoNothingDataset):
    def __init__(self, size, *more, name="x", **anything):
        self.size, self.more, self.name, self.anything = size, more, name, anything


def test_classes_of_users_inherit_it_and_keep_their_own_constructors():
    with pytest.raises(TypeError, match=naming("Own", "widht", "did you mean width")):
        Own(3, 4, widht=8)
    with pytest.raises(TypeError, match=naming("PassesOn", "hidden_size", "did you mean d_hidden")):
        PassesOn(tstep_dim=3, max_seq_len=4, hidden_size=8)
    assert PassesOn(extra=2, tstep_dim=3, max_seq_len=4, d_hidden=8).emb_dim
    assert Takes(3, 4, name="y").more == (4,)
    copy = pickle.loads(pickle.dumps(Takes(3, 4, name="y")))
    assert (copy.size, copy.more, copy.name) == (3, (4,), "y")


def test_a_dataclass_of_a_user_has_its_own_fields(tmp_path):
    from dataclasses import dataclass

    @dataclass
    class Mine(amago.Experiment):
        bonus: float = 0.0

    assert tiny.experiment(tmp_path, experiment_type=Mine, bonus=2.0).bonus == 2.0
    with pytest.raises(TypeError, match=naming("Mine", "bonuss", "did you mean bonus")):
        tiny.experiment(tmp_path, experiment_type=Mine, bonuss=2.0)


# ---- settings ---------------------------------------------------------------------------------------------------------


def test_switches_name_what_was_meant_and_list_only_what_can_be_set():
    with pytest.raises(ValueError, match=naming("Agent", "discount", "did you mean gamma")):
        switch_agent({}, "agent", discount=0.9)
    with pytest.raises(ValueError, match=naming("Agent", "zzz", "tau")) as err:
        switch_agent({}, "agent", zzz=0.9)
    assert "obs_space" not in str(err.value)
    with pytest.raises(ValueError, match=naming("obs_space")):
        switch_agent({}, "agent", obs_space=0.9)


def test_memory_size_for_a_model_without_a_width():
    gin.configurable(module="test_named_arguments")(Own)
    with pytest.raises(ValueError, match=naming("memory_size", "Own", "d_model", "width")):
        switch_traj_encoder({}, Own, memory_size=32)
    settings = {}
    switch_traj_encoder(settings, Own, width=32)
    assert list(settings.values()) == [32]


@pytest.mark.parametrize(
    ("name", "value", "right"),
    [
        ("Agent.gamma", "high", "float"),
        ("FFTrajEncoder.d_model", 2.5, "int"),
        ("FFTrajEncoder.d_model", "wide", "int"),
        ("Agent.popart", "yes", "bool"),
        ("Experiment.seed", 1.5, "int or None"),
        ("Experiment.padded_sampling", 3, "str"),
    ],
)
def test_a_binding_of_the_wrong_type_names_the_parameter(tmp_path, name, value, right):
    parts = (name.split(".")[1], value, right)
    with pytest.raises(ValueError, match=naming(name, *parts)):
        use_config({name: value})
    (tmp_path / "a.gin").write_text(f"{name} = {value!r}\n")
    with pytest.raises(ValueError, match=naming("a.gin", *parts)):
        use_config({}, [str(tmp_path / "a.gin")])


def test_bindings_of_right_types_are_taken():
    use_config({"Agent.gamma": 1, "FFTrajEncoder.d_model": 8, "Experiment.seed": None, "EpsilonGreedy.steps_anneal": 1e6})
    assert (
        config.bindings()["amago.agent.Agent.gamma" if "amago.agent.Agent.gamma" in config.bindings() else "Agent.gamma"] == 1
    )


@pytest.mark.parametrize(("wrong", "meant"), [("zoo/cartpol", "zoo/cartpole"), ("zoo/frozenlake", "zoo/frozen_lake")])
def test_an_unknown_entry_of_the_zoo_names_the_nearest_and_not_all(wrong, meant):
    with pytest.raises(ValueError, match=naming(wrong)) as err:
        use_config({}, [wrong])
    assert len(str(err.value)) < 300
    if meant in {f"zoo/{p}" for p in ("cartpole",)}:
        assert meant in str(err.value)


def test_environments_of_gymnasium_still_wrap(tmp_path):
    env = EpsilonGreedy(AMAGOEnv(gym.make("CartPole-v1"), env_name="C"))
    env.reset(seed=0)
    assert env.env_name == "C"
    env.close()
