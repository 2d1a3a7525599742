import json
import subprocess
import sys
from pathlib import Path

import gin
import pytest
import tiny
from messages import names, naming

from amago import cli_utils, config
from amago.agent import Agent
from amago.cli_utils import (
    switch_agent,
    switch_exploration,
    switch_step_encoder,
    switch_traj_encoder,
    switch_tstep_encoder,
    use_config,
)
from amago.envs.exploration import EpsilonGreedy
from amago.nets.traj_encoders import TformerTrajEncoder


def test_bindings_change_defaults_under_every_spelling():
    for name in (
        "amago.nets.traj_encoders.FFTrajEncoder.d_model",
        "traj_encoders.FFTrajEncoder.d_model",
        "FFTrajEncoder.d_model",
    ):
        config.clear()
        use_config({name: 24})
        from amago.nets.traj_encoders import FFTrajEncoder

        assert FFTrajEncoder(tstep_dim=4, max_seq_len=3).emb_dim == 24


@pytest.mark.parametrize(
    "selector",
    [
        "amago.agent.Agent.reward_multiplier", "amago.agent.binary_filter.threshold", "amago.agent.exp_filter.beta",
        "amago.agent.Multigammas.discrete", "amago.experiment.Experiment.batch_size", "amago.envs.exploration.EpsilonGreedy.eps_end",
        "amago.envs.exploration.BilevelEpsilonGreedy.rollout_horizon", "amago.nets.tstep_encoders.CNNTstepEncoder.cnn_type",
        "amago.nets.cnn.IMPALAishCNN.cnn_block_depths", "amago.nets.traj_encoders.TformerTrajEncoder.attention_type",
        "amago.nets.actor_critic.Actor.d_hidden", "amago.nets.actor_critic.NCritics.n_layers", "amago.nets.popart.PopArtLayer.beta",
        "amago.nets.policy_dists.Discrete.clip_prob_low", "amago.loading.DiskTrajDataset.dset_max_size",
    ],
)  # fmt: skip
def test_public_selectors(selector):
    use_config({selector: 1})
    assert any(k.endswith(".".join(selector.split(".")[-2:])) for k in config.bindings())


@pytest.mark.parametrize(
    ("name", "named"),
    [
        ("Agnt.tau", ("'Agnt.tau' = 3", "'Agnt'", "Agent")),
        ("Agent.taau", ("'Agent.taau' = 3", "amago.agent.Agent", "'taau'", "tau")),
        ("TformerTrajEncoder.num_heads", ("'TformerTrajEncoder.num_heads' = 3", "n_heads")),
    ],
)
def test_unknown_names_suggest_the_nearest(name, named):
    with pytest.raises(ValueError, match=naming(*named)):
        use_config({name: 3})


def test_gin_files_win_over_the_dict_and_later_files_over_earlier(tmp_path):
    for i in (1, 2):
        (tmp_path / f"{i}.gin").write_text(f"amago.agent.Agent.tau = 0.{i}\n")
    use_config({"Agent.tau": 0.5}, gin_configs=[str(tmp_path / "1.gin"), str(tmp_path / "2.gin")])
    assert gin.query_parameter("amago.agent.Agent.tau") == 0.2


def test_switches_write_settings_and_return_classes():
    settings: dict = {}
    assert switch_traj_encoder(settings, "transformer", memory_size=32, layers=1, n_heads=2) is TformerTrajEncoder
    assert switch_agent(settings, "agent", gamma=0.9) is Agent
    assert switch_exploration(settings, strategy="egreedy", eps_end=0.01) is EpsilonGreedy
    switch_tstep_encoder(settings, "ff", d_output=16)
    assert switch_step_encoder is switch_tstep_encoder
    use_config(settings)
    bound = config.bindings()
    assert bound["amago.nets.traj_encoders.TformerTrajEncoder.d_model"] == 32
    assert bound["amago.nets.traj_encoders.TformerTrajEncoder.d_ff"] == 128
    assert bound["amago.agent.Agent.gamma"] == 0.9


def test_switches_refuse_what_does_not_exist():
    with pytest.raises(
        ValueError, match=naming("traj_encoder", "'lstm'", "ff, gru, identity, mamba, mingru, rnn, transformer")
    ):
        switch_traj_encoder({}, "lstm")
    with pytest.raises(ValueError, match=naming("TformerTrajEncoder", "'heads'")):
        switch_traj_encoder({}, "transformer", heads=3)


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
    with pytest.raises(ValueError, match=naming("Agent.fbc_filter_func")):
        config.import_bindings(exported)
    assert 0.25 in config.bindings().values()


def test_operative_config_names_classes():
    config.bind({"TformerTrajEncoder.attention_type": TformerTrajEncoder, "Agent.tau": 0.25})
    text = config.operative_config()
    assert "Agent.tau = 0.25" in text
    assert "attention_type = @amago.nets.traj_encoders.TformerTrajEncoder" in text


def test_the_zoo_and_missing_files():
    for path in sorted((Path(config.__file__).parent / "zoo").glob("*.gin")):
        config.clear()
        use_config({}, [f"zoo/{path.stem}"])
        assert config.bindings(), path
    with pytest.raises(ValueError, match=naming("'zoo/nothing'", "/zoo")):
        use_config({}, ["zoo/nothing"])
    with pytest.raises(ValueError, match=naming("'nowhere.gin'")):
        use_config({}, ["nowhere.gin"])


# ---- bindings outlive what was built with them -------------------------------------------------------------------------------


def test_use_config_says_what_it_replaces(caplog):
    cli_utils.use_config({"Agent.tau": 0.01, "Agent.gamma": 0.9})
    cli_utils.use_config({"FFTrajEncoder.d_model": 8})
    cli_utils.use_config({"Agent.gamma": 0.9})
    assert not caplog.records, "nothing is replaced"
    cli_utils.use_config({"Agent.tau": 0.02})
    (message,) = caplog.messages
    assert names(message, "amago.agent.Agent.tau", 0.01, 0.02)
    assert "gamma" not in message


def test_one_call_may_replace_its_own_values(tmp_path, caplog):
    (tmp_path / "a.gin").write_text("Agent.tau = 0.5\n")
    cli_utils.use_config({"Agent.tau": 0.01}, [str(tmp_path / "a.gin")])
    assert config.bindings() == {"amago.agent.Agent.tau": 0.5}
    assert not caplog.records


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
    second.close()


@pytest.mark.parametrize("wrong", [{"Agent.tauu": 1}, {"Nobody.tau": 1}])
def test_a_call_with_a_mistake_changes_nothing(wrong):
    cli_utils.use_config({"Agent.tau": 0.01})
    with pytest.raises(ValueError, match=naming(next(iter(wrong)))):
        cli_utils.use_config({"Agent.tau": 0.02, "Agent.gamma": 0.5} | wrong)
    with pytest.raises(ValueError, match=naming("nowhere.gin")):
        cli_utils.use_config({"Agent.tau": 0.02}, ["nowhere.gin"])
    assert config.bindings() == {"amago.agent.Agent.tau": 0.01}
