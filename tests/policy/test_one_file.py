"""A policy is one file: copied anywhere, it loads and acts as before, as do descriptions that earlier versions have written."""

import json
import os
import shutil

import gymnasium as gym
import numpy as np
import pytest
import tiny
import torch
from messages import naming
from safetensors import safe_open
from safetensors.torch import load_file

import amago
from amago import cli_utils, config
from amago.envs import AMAGOEnv
from amago.nets.attention import VanillaAttention
from amago.nets.traj_encoders import TformerTrajEncoder
from amago.nets.tstep_encoders import FFTstepEncoder
from amago.policy import build_agent, describe_agent, find_run
from amago.run.checkpoint import CheckpointError
from amago.spaces import describe


def lake():
    return AMAGOEnv(gym.make("FrozenLake-v1"), env_name="Lake")


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    config.clear()
    config.bind({"Agent.rollout_gamma_idx": 0})
    e = tiny.learned(
        tmp_path_factory.mktemp("runs"), lake, "gru", train_timesteps_per_epoch=150, always_save_latest=True, ckpt_interval=1
    )
    e.close()
    config.clear()
    return e.run_dir


def actions(policy, steps=30):
    policy.sample = False
    policy.reset()
    rng = np.random.default_rng(0)
    return [int(policy.act(int(rng.integers(16)), float(rng.random()))) for _ in range(steps)]


def check_same(path, run_dir):
    mine, original = amago.load_policy(path), amago.load_policy(run_dir)
    assert not tiny.differing(dict(mine.agent.state_dict()), dict(original.agent.state_dict()))
    assert (mine.gamma, mine.raw_observation_space) == (original.gamma, gym.spaces.Discrete(16))
    assert actions(mine) == actions(original)
    return mine


@pytest.mark.parametrize("source", ["policy.pt", "ckpts/latest/policy.pt", "ckpts/policy_weights/policy_epoch_0.pt"])
def test_a_file_of_weights_alone_somewhere_else(run_dir, tmp_path, source):
    shutil.copy(run_dir / source, tmp_path / "any_name.pt")
    check_same(tmp_path / "any_name.pt", run_dir)
    assert find_run(tmp_path / "any_name.pt") == (tmp_path, tmp_path / "any_name.pt")


@pytest.mark.parametrize("name", ["policy.pt", "policy.safetensors"])
def test_saving_a_policy(run_dir, tmp_path, name):
    assert amago.load_policy(run_dir).save(tmp_path / name) == tmp_path / name
    mine = check_same(tmp_path / name, run_dir)
    assert mine.version == amago.load_policy(run_dir).version == 1
    again = tmp_path / "again" / name
    mine.save(again)
    check_same(again, run_dir)
    assert [p.name for p in again.parent.iterdir()] == [name]


@pytest.mark.parametrize("name", ["a.pt", "a.safetensors"])
def test_the_discount_that_acts_is_saved(run_dir, tmp_path, name):
    amago.load_policy(run_dir, gamma=0.999).save(tmp_path / name)
    assert amago.load_policy(run_dir).gamma == 0.9
    assert amago.load_policy(tmp_path / name).gamma == 0.999
    assert amago.load_policy(tmp_path / name, gamma=0.9).gamma == 0.9


@pytest.mark.parametrize("source", ["policy.pt", "ckpts/policy_weights/policy_epoch_0.pt"])
def test_the_file_is_a_plain_state_dict_to_others(run_dir, source):
    state = torch.load(run_dir / source, weights_only=True)
    agent = amago.load_policy(run_dir).agent
    assert list(state) == list(agent.state_dict()), "no entry more"
    assert all(isinstance(v, torch.Tensor) for v in state.values())
    agent.load_state_dict(state, strict=True)
    state = {f"module.{k}": v for k, v in state.items()}  # what clients do with it
    assert len(state) == len(agent.state_dict())


def test_the_header_of_safetensors(run_dir, tmp_path):
    policy = amago.load_policy(run_dir)
    policy.save(tmp_path / "policy.safetensors")
    assert not tiny.differing(load_file(tmp_path / "policy.safetensors"), dict(policy.agent.state_dict()))
    with safe_open(tmp_path / "policy.safetensors", framework="np") as f:
        header = json.loads(f.metadata()["amago"])
    assert json.loads(header["description"])["max_seq_len"] == policy.agent.max_seq_len


@pytest.mark.parametrize("name", ["policy.pt", "policy.safetensors", "best.pt", "best.safetensors"])
def test_a_directory_that_holds_one(run_dir, tmp_path, name):
    amago.load_policy(run_dir).save(tmp_path / name)
    (tmp_path / "README.md").write_text("a robot's legs")
    check_same(tmp_path, run_dir)


def test_directories_of_a_run(run_dir, tmp_path):
    check_same(run_dir / "ckpts" / "latest", run_dir)
    check_same(run_dir / "ckpts" / "policy_weights", run_dir)
    shutil.copytree(run_dir / "ckpts", tmp_path / "moved" / "ckpts")
    check_same(tmp_path / "moved", run_dir)
    (tmp_path / "small").mkdir()
    for name in ("policy.json", "policy.pt"):
        shutil.copy(run_dir / name, tmp_path / "small" / name)
    check_same(tmp_path / "small", run_dir)


def test_a_directory_that_holds_several(run_dir, tmp_path):
    for name in ("a.pt", "b.safetensors"):
        amago.load_policy(run_dir).save(tmp_path / name)
    with pytest.raises(CheckpointError, match=naming(str(tmp_path), "a.pt", "b.safetensors")):
        amago.load_policy(tmp_path)


def test_a_directory_of_runs_names_them(run_dir):
    with pytest.raises(CheckpointError, match=naming(str(run_dir.parent), "run", "policy.json")):
        amago.load_policy(run_dir.parent)


def test_a_description_in_the_file_comes_before_that_of_a_directory(run_dir, tmp_path):
    """Another run's file in the directory of a run loads as what it is, unless the directory is asked for."""
    e = tiny.learned(tmp_path, lake, "ff", train_timesteps_per_epoch=150)
    e.close()
    config.clear()
    shutil.copy(run_dir / "policy.pt", e.run_dir / "theirs.pt")
    check_same(e.run_dir / "theirs.pt", run_dir)
    with pytest.raises(CheckpointError, match=naming("theirs.pt")):
        amago.load_policy(e.run_dir, weights=e.run_dir / "theirs.pt")


def test_weights_without_a_description(run_dir, tmp_path):
    torch.save(torch.load(run_dir / "policy.pt", weights_only=True).copy(), tmp_path / "x.pt")
    plain = dict(torch.load(tmp_path / "x.pt", weights_only=True))
    torch.save(plain, tmp_path / "x.pt")
    with pytest.raises(CheckpointError, match=naming(str(tmp_path / "x.pt"), "policy.json", "weights=FILE")):
        amago.load_policy(tmp_path / "x.pt")
    assert not tiny.differing(dict(amago.load_policy(run_dir, weights=tmp_path / "x.pt").agent.state_dict()), plain)


@pytest.mark.parametrize("name", ["policy.pt", "policy.safetensors"])
def test_a_damaged_file(run_dir, tmp_path, name):
    path = amago.load_policy(run_dir).save(tmp_path / name)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match=naming(str(path))):
        amago.load_policy(path)
    path.write_bytes(data[: len(data) // 2])
    with pytest.raises(CheckpointError, match=naming(str(path))):
        amago.load_policy(path)


@pytest.mark.parametrize("name", ["policy.onnx", "policy", "policy.pth"])
def test_another_suffix(run_dir, tmp_path, name):
    with pytest.raises(ValueError, match=naming(f"path={str(tmp_path / name)!r}", ".pt", ".safetensors")):
        amago.load_policy(run_dir).save(tmp_path / name)
    assert not os.listdir(tmp_path)


def test_an_agent_of_ones_own_program_is_saved_too(tmp_path):
    agent = tiny.agent(lake(), "gru")
    policy = amago.policy.Policy(agent, None, True, "cpu", description=describe_agent(agent, gym.spaces.Discrete(16)))
    path = policy.save(tmp_path / "mine.pt")
    config.clear()
    assert actions(amago.load_policy(path)) == actions(policy)


SPEC = {  # as a run wrote it before the modules of the library were moved
    "schema": 1,
    "agent": "amago.agent.agent:MultiTaskAgent",
    "tstep_encoder": "amago.nets.tstep_encoders:FFTstepEncoder",
    "traj_encoder": "amago.nets.traj_encoders:TformerTrajEncoder",
    "max_seq_len": 7,
    "observation_space": describe(gym.spaces.Dict({"observation": gym.spaces.Box(-1.0, 1.0, (3,), np.float32)})),
    "action_space": describe(gym.spaces.Discrete(4)),
    "bindings": {
        "amago.nets.transformer.TformerTrajEncoder.unknown": 1,
        "amago.nets.traj_encoders.TformerTrajEncoder.d_model": 16,
        "amago.nets.traj_encoders.TformerTrajEncoder.n_heads": 2,
        "amago.nets.traj_encoders.TformerTrajEncoder.attention_type": {"@name": "amago.nets.attention:VanillaAttention"},
        "amago.agent.MultiTaskAgent.fbc_filter_func": {"@name": "amago.agent.options:exp_filter"},
        "amago.agent.MultiTaskAgent.actor_type": {"@name": "amago.nets.actor_critic:ResidualActor"},
        "amago.nets.actor_critic.Actor.continuous_dist_type": {"@name": "amago.nets.policy_dists:Beta"},
        "amago.loading.DiskTrajDataset.relabeler": {"@unknown": "<amago.relabeling.NoOpRelabeler object at 0x7f>"},
        "amago.relabeling.GoalSequenceRelabeler.strategy": {"@name": "amago.relabeling:gone"},
        "amago.experiment.Experiment.epochs": 3,
        "amago.envs.exploration.EpsilonGreedy.eps_start": 0.5,
    },
}


def written(root, **changes):
    (root / "policy.json").write_text(json.dumps(SPEC | changes))
    return root


def test_a_description_from_before_builds_the_same_agent(tmp_path):
    agent = build_agent(written(tmp_path))
    assert type(agent) is amago.agent.MultiTaskAgent
    assert type(agent.tstep_encoder) is FFTstepEncoder
    assert type(agent.traj_encoder) is TformerTrajEncoder
    assert (agent.max_seq_len, agent.traj_encoder.emb_dim, agent.traj_encoder.tformer.n_heads) == (7, 16, 2)
    assert type(agent.traj_encoder.tformer.layers[0].attention_layer.self_attention) is VanillaAttention
    assert type(agent.actor) is amago.nets.actor_critic.ResidualActor
    assert agent.fbc_filter_func is amago.agent.exp_filter
    assert config.bindings() == {}


@pytest.mark.parametrize("name", ["agent", "bindings", "max_seq_len"])
def test_a_description_without_one_of_its_fields(tmp_path, name):
    (tmp_path / "policy.json").write_text(json.dumps({k: v for k, v in SPEC.items() if k != name}))
    with pytest.raises(CheckpointError, match=naming(str(tmp_path / "policy.json"), name)):
        build_agent(tmp_path)


def test_every_class_that_has_a_name_on_the_command_line_can_be_described():
    """Their modules and names are in files of users, so they cannot change."""
    assert {f"{cls.__module__}:{cls.__qualname__}" for cls in cli_utils.TRAJ_ENCODERS.values()} == {
        f"amago.nets.traj_encoders:{name}TrajEncoder"
        for name in ("FF", "GRU", "Identity", "LSTM", "Mamba", "MinGRU", "Tformer")
    }


def test_packed_layers_of_an_earlier_version(tmp_path):
    layer = {"amago.nets.traj_encoders.FFTrajEncoder.layer_type": {"@name": "amago.nets.cpu.packed:Linear"}}
    agent = build_agent(written(tmp_path, traj_encoder="amago.nets.traj_encoders:FFTrajEncoder", bindings=layer))
    assert isinstance(agent.traj_encoder.traj_blocks[0].ff1, torch.nn.Linear)
