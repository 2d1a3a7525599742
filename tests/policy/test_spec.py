"""``policy.json``: descriptions written by earlier versions keep their meaning."""

import json

import gymnasium as gym
import numpy as np
import pytest
import tiny
import torch
from messages import naming

import amago
from amago import cli_utils, config
from amago.nets.attention import VanillaAttention
from amago.nets.traj_encoders import GRUTrajEncoder, TformerTrajEncoder
from amago.nets.tstep_encoders import FFTstepEncoder
from amago.policy import build_agent
from amago.run.checkpoint import CheckpointError
from amago.spaces import describe

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


def test_every_class_that_has_a_name_on_the_command_line_can_be_described(tmp_path):
    """Their modules and names are in files of users, so they cannot change."""
    assert {f"{cls.__module__}:{cls.__qualname__}" for cls in cli_utils.TRAJ_ENCODERS.values()} == {
        f"amago.nets.traj_encoders:{name}TrajEncoder"
        for name in ("FF", "GRU", "Identity", "LSTM", "Mamba", "MinGRU", "Tformer")
    }
    run = tiny.learned(
        tmp_path, tiny.cartpole, traj_encoder_type=GRUTrajEncoder, max_seq_len=4, train_batches_per_epoch=0
    ).run_dir
    config.clear()
    assert type(build_agent(run).traj_encoder) is GRUTrajEncoder


def test_packed_layers_of_an_earlier_version(tmp_path):
    layer = {"amago.nets.traj_encoders.FFTrajEncoder.layer_type": {"@name": "amago.nets.cpu.packed:Linear"}}
    agent = build_agent(written(tmp_path, traj_encoder="amago.nets.traj_encoders:FFTrajEncoder", bindings=layer))
    assert isinstance(agent.traj_encoder.traj_blocks[0].ff1, torch.nn.Linear)
