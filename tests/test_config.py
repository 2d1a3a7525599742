import json
import subprocess
import sys
from pathlib import Path

import gin
import pytest
import tiny
from messages import check_refused, names, naming, refused

from amago import cli_utils, config
from amago.cli_utils import switch_agent, switch_traj_encoder, use_config
from amago.nets.traj_encoders import FFTrajEncoder, TformerTrajEncoder, TrajEncoder


def test_bindings_change_defaults_under_every_spelling():
    for room in ("amago.nets.traj_encoders.", "traj_encoders.", ""):
        config.clear()
        use_config({f"{room}FFTrajEncoder.d_model": 24})
        assert FFTrajEncoder(tstep_dim=4, max_seq_len=3).emb_dim == 24


SELECTORS = [
    "amago.agent.Agent.reward_multiplier", "amago.agent.binary_filter.threshold", "amago.agent.exp_filter.beta",
    "amago.agent.Multigammas.discrete", "amago.experiment.Experiment.batch_size", "amago.envs.exploration.EpsilonGreedy.eps_end",
    "amago.envs.exploration.BilevelEpsilonGreedy.rollout_horizon", "amago.nets.tstep_encoders.CNNTstepEncoder.cnn_type",
    "amago.nets.cnn.IMPALAishCNN.cnn_block_depths", "amago.nets.traj_encoders.TformerTrajEncoder.attention_type",
    "amago.nets.actor_critic.Actor.d_hidden", "amago.nets.actor_critic.NCritics.n_layers", "amago.nets.popart.PopArtLayer.beta",
    "amago.nets.policy_dists.Discrete.clip_prob_low", "amago.loading.DiskTrajDataset.dset_max_size",
]  # fmt: skip


def test_public_selectors():
    for selector in SELECTORS:
        config.clear()
        use_config({selector: 1})
        assert any(k.endswith(".".join(selector.split(".")[-2:])) for k in config.bindings())


def test_a_name_of_other_libraries_suggests_ours():
    with refused(ValueError, "'TformerTrajEncoder.num_heads' = 3", "n_heads"):
        use_config({"TformerTrajEncoder.num_heads": 3})


def test_gin_files_win_over_the_dict_and_later_files_over_earlier(tmp_path):
    for i in (1, 2):
        (tmp_path / f"{i}.gin").write_text(f"amago.agent.Agent.tau = 0.{i}\n")
    use_config({"Agent.tau": 0.5}, gin_configs=[str(tmp_path / "1.gin"), str(tmp_path / "2.gin")])
    assert gin.query_parameter("amago.agent.Agent.tau") == 0.2


def test_temporary_bindings_leave_no_trace():
    config.bind({"Agent.tau": 0.5})
    with config.temporary({"Agent.gamma": 0.9}):
        assert set(config.bindings()) == {"amago.agent.Agent.gamma"} or set(config.bindings()) == {"Agent.gamma"}
    assert "gamma" not in str(config.bindings())
    assert 0.5 in config.bindings().values()


def test_exported_bindings_reach_only_what_is_imported():
    config.bind({"EpsilonGreedy.eps_end": 0.25, "TformerTrajEncoder.attention_type": TformerTrajEncoder})
    script = (
        "import sys, cloudpickle\n"
        "import amago.envs.exploration\n"
        "from amago import config\n"
        "config.import_bindings(cloudpickle.loads(sys.stdin.buffer.read()))\n"
        "print(sorted(config.bindings().items()), 'torch' in sys.modules)\n"
    )
    import cloudpickle

    done = subprocess.run(
        [sys.executable, "-c", script], input=cloudpickle.dumps(config.export_bindings()), capture_output=True, check=True
    )
    assert b"eps_end', 0.25" in done.stdout
    assert b"attention" not in done.stdout
    assert done.stdout.strip().endswith(b"False")


def test_a_binding_that_cannot_be_pickled_fails_where_it_is_needed():
    config.bind({"EpsilonGreedy.eps_end": 0.25, "Agent.fbc_filter_func": (x for x in "generators cannot be pickled").__next__})
    exported = config.export_bindings()
    config.clear()
    with refused(ValueError, "Agent.fbc_filter_func"):
        config.import_bindings(exported)
    assert 0.25 in config.bindings().values()


def test_operative_config_names_classes():
    config.bind({"TformerTrajEncoder.attention_type": TformerTrajEncoder, "Agent.tau": 0.25})
    text = config.operative_config()
    assert "Agent.tau = 0.25" in text
    assert "attention_type = @amago.nets.traj_encoders.TformerTrajEncoder" in text


def test_the_zoo():
    for path in sorted((Path(config.__file__).parent / "zoo").glob("*.gin")):
        config.clear()
        use_config({}, [f"zoo/{path.stem}"])
        assert config.bindings(), path
    with refused(ValueError, "'zoo/nothing'", "amago list zoo"):
        use_config({}, ["zoo/nothing"])


@pytest.mark.parametrize("way", ["dict", "gin file", "setting", "value"])
def test_a_name_that_the_user_and_the_library_have_is_refused_with_both_full_names(tmp_path, way):
    @gin.configurable(module="my_nets")
    class LSTMTrajEncoder:
        def __init__(self, n_layers: int = 3):
            self.n_layers = n_layers

    try:
        (tmp_path / "short.gin").write_text("LSTMTrajEncoder.n_layers = 2\n")
        short = {
            "dict": ({"LSTMTrajEncoder.n_layers": 2}, []), "gin file": ({}, [str(tmp_path / "short.gin")]),
            "setting": ({}, ["LSTMTrajEncoder.n_layers=2"]), "value": ({}, ["experiment.traj_encoder_type=@LSTMTrajEncoder"]),
        }  # fmt: skip
        with refused(ValueError, "my_nets.LSTMTrajEncoder or amago.nets.traj_encoders.LSTMTrajEncoder", "full name"):
            use_config(*short[way])
        use_config({}, ["my_nets.LSTMTrajEncoder.n_layers=2", "amago.nets.traj_encoders.LSTMTrajEncoder.n_layers=1"])
        assert LSTMTrajEncoder().n_layers == 2
    finally:
        config.clear()
        gin.config._REGISTRY.pop("my_nets.LSTMTrajEncoder")


def test_use_config_says_what_it_replaces(caplog):
    cli_utils.use_config({"Agent.tau": 0.01, "Agent.gamma": 0.9})
    cli_utils.use_config({"FFTrajEncoder.d_model": 8})
    cli_utils.use_config({"Agent.gamma": 0.9})
    assert not caplog.records, "nothing is replaced"
    cli_utils.use_config({"Agent.tau": 0.02})
    (message,) = caplog.messages
    assert names(message, "amago.agent.Agent.tau", 0.01, 0.02)
    assert "gamma" not in message


def test_what_an_earlier_experiment_left_is_said_until_it_is_reset(tmp_path, caplog):
    cli_utils.use_config({"Agent.tau": 0.01, "Agent.gamma": 0.9})
    tiny.started(tmp_path).close()
    caplog.clear()
    cli_utils.use_config({"Agent.gamma": 0.9})
    (message,) = caplog.messages
    assert names(message, "earlier experiment", "amago.agent.Agent.tau = 0.01", "reset_config()")
    assert "Agent.gamma" not in message, "this call has set it anew"
    caplog.clear()
    cli_utils.reset_config()
    assert config.bindings() == {}
    cli_utils.use_config({"Agent.gamma": 0.8})
    assert not caplog.records
    assert cli_utils.reset_config is config.reset_config
    second = tiny.started(tmp_path, name="second")
    assert second.policy.tau == 0.003
    recorded = json.loads((second.run_dir / "settings.json").read_text())["parameters"]
    assert (recorded["amago.agent.Agent.tau"], recorded["amago.agent.Agent.gamma"]) == (0.003, 0.8)


@pytest.mark.parametrize("wrong", [{"Agent.tauu": 1}, {"Nobody.tau": 1}])
def test_a_call_with_a_mistake_changes_nothing(wrong):
    cli_utils.use_config({"Agent.tau": 0.01})
    check_refused(
        ValueError,
        (naming(next(iter(wrong))), lambda: cli_utils.use_config({"Agent.tau": 0.02, "Agent.gamma": 0.5} | wrong)),
        (naming("nowhere.gin"), lambda: cli_utils.use_config({"Agent.tau": 0.02}, ["nowhere.gin"])),
    )
    assert config.bindings() == {"amago.agent.Agent.tau": 0.01}


class Own(TrajEncoder):
    def __init__(self, tstep_dim, max_seq_len, width=8):
        super().__init__(tstep_dim, max_seq_len)


def test_switches_name_what_was_meant_and_list_only_what_can_be_set():
    gin.configurable(module="test_config")(Own)
    for switch, named in (
        (lambda: switch_agent({}, "agent", discount=0.9), ("Agent", "discount", "did you mean gamma")),
        (lambda: switch_agent({}, "agent", zzz=0.9), ("Agent", "zzz", "tau")),
        (lambda: switch_agent({}, "agent", obs_space=0.9), ("obs_space",)),
        (lambda: switch_traj_encoder({}, Own, memory_size=32), ("memory_size", "Own", "d_model", "width")),
    ):
        with pytest.raises(ValueError) as err:
            switch()
        assert names(str(err.value), *named)
        assert "zzz" not in named or "obs_space" not in str(err.value)
    settings = {}
    switch_traj_encoder(settings, Own, width=32)
    assert list(settings.values()) == [32]


@pytest.mark.parametrize(
    ("name", "value", "right"),
    [
        ("Agent.gamma", "high", "float"),
        ("FFTrajEncoder.d_model", 2.5, "int"),
        ("Agent.popart", "yes", "bool"),
        ("Experiment.seed", 1.5, "int or None"),
        ("Experiment.padded_sampling", 3, "str"),
    ],
)
def test_a_binding_of_the_wrong_type_names_the_parameter(tmp_path, name, value, right):
    (tmp_path / "a.gin").write_text(f"{name} = {value!r}\n")
    for given in (({name: value},), ({}, [str(tmp_path / "a.gin")])):
        with refused(ValueError, name.split(".")[1], value, right):
            use_config(*given)


def test_bindings_of_right_types_are_taken():
    use_config({"Agent.gamma": 1, "FFTrajEncoder.d_model": 8, "Experiment.seed": None, "EpsilonGreedy.steps_anneal": 1e6})
    assert 1 in config.bindings().values()
