"""`settings.json`: what a run was built with; the same in the tables of TensorBoard and Weights & Biases."""

import json
import os
import subprocess
import sys
from datetime import datetime
from functools import partial

import gin
import numpy as np
import pytest
import tiny
import torch
from messages import refused
from tiny import experiment, learned, started

import amago
from amago import config
from amago.cli_utils import switch_async_mode, use_config
from amago.run.checkpoint import CheckpointError
from amago.run.metrics import Logger
from amago.run.record import git_commit, masked


def record(e):
    return json.loads((e.run_dir / "settings.json").read_text())


@gin.configurable
class Halved(amago.Agent):
    """An agent of a user's own, with a parameter."""

    def __init__(self, *args, share=0.5, **kwargs):
        super().__init__(*args, **kwargs)


def test_all_fields_and_parameters_are_recorded(tmp_path):
    use_config({"Agent.tau": 0.01, "Halved.share": 0.25, "GRUTrajEncoder.norm": "rms"})
    e = learned(tmp_path, agent_type=Halved, learning_rate=0.5, make_val_env=partial(tiny.tmaze))
    found = record(e)
    wanted = {
        "learning_rate": 0.5, "run_name": "run", "epochs": 1, "dset_max_size": "inf", "make_train_env": "tiny.tmaze",
        "make_val_env": {"type": "tiny.tmaze"}, "traj_encoder_type": "amago.nets.traj_encoders.FFTrajEncoder",
    }  # fmt: skip
    fields, parameters = found["fields"], found["parameters"]
    assert {name: fields[name] for name in wanted} == wanted
    assert fields["agent_type"].endswith("test_record.Halved")
    assert (fields["dataset"]["type"], fields["dataset"]["dset_name"]) == ("amago.loading.disk.DiskTrajDataset", "run")
    wanted = {
        next(k for k in parameters if k.endswith("Halved.share")): 0.25, "amago.agent.Agent.tau": 0.01,
        "amago.agent.Agent.reward_multiplier": 10.0, "amago.nets.policy_dists.Discrete.clip_prob_high": 0.99,  # defaults
        "amago.nets.actor_critic.NCritics.d_hidden": 16, "amago.envs.exploration.EpsilonGreedy.steps_anneal": 1_000_000,
    }  # fmt: skip
    assert {name: parameters[name] for name in wanted} == wanted
    assert "amago.nets.actor_critic.NCritics.num_critics" not in parameters, "the agent sets it"
    assert "amago.agent.Agent.tau" in found["bound"]
    assert "amago.nets.traj_encoders.GRUTrajEncoder.norm" in found["unused"]


def test_each_start_is_recorded_with_its_surroundings(tmp_path):
    began = datetime.now().astimezone()
    learned(tmp_path, ckpt_interval=1).close()
    config.bind({"Agent.tau": 0.5})
    e = learned(tmp_path, resume="auto", epochs=2, learning_rate=0.25, ckpt_interval=1)
    found = record(e)
    first, second = found["starts"]
    assert (first["role"], first["epoch"], first["resumed"], first["changed"]) == ("collect and learn", 0, None, {})
    assert (second["epoch"], second["resumed"]) == (1, "run_epoch_0")
    assert second["changed"]["learning_rate"] == [0.001, 0.25]
    assert second["changed"]["amago.agent.Agent.tau"] == [0.003, 0.5]
    assert found["fields"]["learning_rate"] == 0.25, "the settings are those of now"
    assert found["parameters"]["amago.agent.Agent.tau"] == 0.5
    for start in (first, second):
        assert abs((datetime.fromisoformat(start["time"]) - began).total_seconds()) < 600
        assert start["versions"]["torch"].partition("+")[0] == torch.__version__.partition("+")[0]
        assert start["versions"]["numpy"] == np.__version__
        assert start["versions"]["python"].startswith(f"{sys.version_info.major}.{sys.version_info.minor}.")
        assert start["machine"].keys() == {"host", "system", "cpu", "cores", "memory_gb", "gpus"}
        assert start["machine"]["cores"] >= 1
        assert start["command"]  # that of the tests, which may be a worker's
        assert start["directory"] == os.getcwd()


def test_processes_that_join_do_not_change_the_settings_of_the_learner(tmp_path):
    learned(tmp_path, always_save_latest=True).close()
    collector = switch_async_mode(experiment(tmp_path, seed=5, parallel_actors=3), "collect")
    collector.start()
    collector.close()
    found = record(collector)
    assert found["fields"]["parallel_actors"] == 2
    assert [s["role"] for s in found["starts"]] == ["collect and learn", "collect"]
    assert found["starts"][1]["changed"]["parallel_actors"] == [2, 3]


def test_a_damaged_record_names_the_file(tmp_path):
    e = learned(tmp_path, ckpt_interval=1)
    e.close()
    (e.run_dir / "settings.json").write_text("{")
    with refused(CheckpointError, str(e.run_dir / "settings.json"), "remove"):
        started(tmp_path, resume="auto")


def git(directory, *arguments):
    identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
    return subprocess.run(
        ["git", "-C", str(directory), *identity, *arguments], check=True, capture_output=True, text=True
    ).stdout


def test_the_commit_of_a_repository(tmp_path):
    assert git_commit(tmp_path) is None
    git(tmp_path, "init", "-q")
    assert git_commit(tmp_path) is None, "no commit yet"
    (tmp_path / "script.py").write_text("1")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-qm", "first")
    commit = git(tmp_path, "rev-parse", "HEAD").strip()
    assert git_commit(tmp_path) == {"commit": commit, "changed": False}
    (tmp_path / "script.py").write_text("2")
    assert git_commit(tmp_path) == {"commit": commit, "changed": True}
    assert git_commit(None) is None
    assert git_commit(tmp_path / "nowhere") is None


@pytest.mark.parametrize("script", ["sleep 60", None])
def test_git_that_hangs_or_is_missing_does_not_stop_a_run(tmp_path, monkeypatch, script):
    tools = tmp_path / "tools"
    tools.mkdir()
    if script is not None:
        (tools / "git").write_text(f"#!/bin/sh\n{script}\n")
        (tools / "git").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tools}:/bin" if script else str(tools))
    monkeypatch.setattr("amago.run.record.GIT_SECONDS", 0.3)
    assert record(started(tmp_path))["starts"][0]["git"] is None


def test_tensorboard_has_the_settings_as_hyperparameters(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.plugins.hparams import plugin_data_pb2

    e = learned(tmp_path, log_to_tensorboard=True, learning_rate=0.125)
    e.close()
    events = EventAccumulator(str(e.run_dir / "tensorboard"))
    events.Reload()
    content = events.SummaryMetadata("_hparams_/session_start_info").plugin_data.content
    found = plugin_data_pb2.HParamsPluginData.FromString(content).session_start_info.hparams
    assert found["learning_rate"].number_value == 0.125
    assert found["traj_encoder_type"].string_value == "amago.nets.traj_encoders.FFTrajEncoder"
    assert found["amago.agent.Agent.tau"].number_value == pytest.approx(0.003)
    assert "Actor Loss" in str(events.Tags()["scalars"])


def make(api_key, corridor_keys=3):
    return tiny.tmaze()


def test_keys_and_tokens_of_a_run_are_masked(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "orig_argv", ["python", "train.py", "--hub-token", "abc-1", "--api_key=abc-2", "--lr", "1"])
    tables = []
    monkeypatch.setattr("amago.run.metrics.LOGGERS", {"wandb": lambda settings, table: tables.append(table) or Logger()})
    e = experiment(tmp_path, partial(make, api_key="abc-3"), log_to=["wandb"])
    e.start()
    text = (e.run_dir / "settings.json").read_text()
    assert "abc-" not in text + str(tables)
    assert tables[0]["learning_rate"] == 0.001
    assert json.loads(text)["starts"][-1]["command"][-2:] == ["--lr", "1"]


@pytest.mark.parametrize(
    "value", [{"qk_norm": "key"}, {"monkey": "x"}, {"n_keys": 3}, ["--lr", "1"], "keys of a dict", {"a": None}]
)
def test_other_settings_stay(value):
    assert masked(value) == value
