"""Weights of the original system under other names: what is found, and what is not guessed."""

import gymnasium as gym
import pytest
import torch
from golden_agents import golden_agent
from messages import naming

import amago
from amago import config
from amago.nets.ff import Normalization
from amago.nets.traj_encoders import FFTrajEncoder, TformerTrajEncoder
from amago.nets.tstep_encoders import FFTstepEncoder
from amago.policy.load import adapt_weights
from amago.run import checkpoint
from amago.run.checkpoint import load_into, load_weight_file
from amago.spaces import action_spec, rl2_space


def test_our_own_weights_come_back_as_they_are():
    agent, _, _ = golden_agent("agent_discrete")
    own = agent.state_dict()
    adapted = adapt_weights(own, agent)
    assert adapted.keys() == own.keys()
    assert all(adapted[k] is own[k] for k in own)
    del own["actor.base.in_layer.bias"]
    assert adapt_weights(own, agent).keys() == own.keys()  # what is wrong with them, load_into says


def test_names_that_collide_once_unwrapped_are_refused():
    agent, _, _ = golden_agent("agent_discrete")
    weights = agent.state_dict()
    weights["module.popart.mu"] = torch.ones(3, 1)
    with pytest.raises(checkpoint.CheckpointError, match=naming("twice", "module.")):
        adapt_weights(weights, agent)


def small(traj=FFTrajEncoder, **bindings):
    config.clear()
    config.bind(bindings)
    torch.manual_seed(0)
    space = gym.spaces.Discrete(3)
    obs = gym.spaces.Dict({"observation": gym.spaces.Box(-1, 1, (4,))})
    return amago.Agent(obs, rl2_space(action_spec(space)), space, 8, FFTstepEncoder, traj)


def changed(agent):
    """Weights that no untrained agent has."""
    return {k: v + 0.01 * torch.randn_like(v) if v.is_floating_point() else v for k, v in agent.state_dict().items()}


@pytest.mark.parametrize(
    ("bindings", "rename"),
    [
        ({"FFTstepEncoder.out_norm": "rmsnorm"}, ("out_norm.norm.weight", "out_norm.norm.scale")),
        ({"FFTstepEncoder.norm": "rmsnorm"}, (".norm.weight", ".norm.g")),
        ({"FFTrajEncoder.norm": "layer", "FFTrajEncoder.n_layers": 2}, (".norm.norm.", ".norm1.norm.")),
    ],
)
def test_norms_under_other_names_are_found(tmp_path, bindings, rename):
    agent = small(**bindings)
    saved = changed(agent)
    path = tmp_path / "policy.pt"
    torch.save({k.replace(*rename): v for k, v in saved.items()}, path)
    assert any(k.replace(*rename) != k for k in saved)
    load_into(agent, adapt_weights(load_weight_file(path).weights, agent), path)
    for k, v in agent.state_dict().items():
        assert v.equal(saved[k if not k.startswith("maximized") else k.replace("maximized_critics", "critics")]), k


def test_norms_that_are_one_too_many_are_not_guessed():
    agent = small(**{"FFTrajEncoder.norm": "layer"})
    weights = {k.replace(".norm.norm.", ".norm1.norm."): v for k, v in agent.state_dict().items()}
    weights |= {k.replace(".norm1.", ".norm2."): v for k, v in weights.items() if ".norm1." in k}
    with pytest.raises(checkpoint.CheckpointError, match=naming("norm2.norm.weight")):
        load_into(agent, adapt_weights(weights, agent), "theirs")


def test_a_table_of_times_may_end_a_row_earlier():
    table = "traj_encoder.tformer.pos_emb.embedding.weight"
    agent = small(TformerTrajEncoder, **{"TformerTrajEncoder.pos_emb": "learnable", "LearnablePosEmb.max_time_idx": 8})
    saved = changed(agent)
    for name in (table, table.replace("pos_emb", "position_embedding")):
        weights = {name if k == table else k: v[:-1] if k == table else v for k, v in saved.items()}
        load_into(agent, adapt_weights(weights, agent), "theirs")
        found = agent.state_dict()[table]
        assert torch.equal(found[:-1], saved[table][:-1])
        assert torch.equal(found[-1], saved[table][-2])


def test_statistics_that_are_not_used_are_stored_and_may_be_missing():
    """As the original stores them; files of an earlier version lack them."""
    agent = small(**{"FFTstepEncoder.normalize_inputs": False})
    saved = changed(agent)
    names = [k for k in saved if ".in_norm." in k]
    assert sorted(k.rpartition(".")[2] for k in names) == ["_t", "mu", "nu"]
    agent.load_state_dict(saved, strict=True)
    load_into(agent, {k: v for k, v in saved.items() if k not in names}, "ours")
    x = torch.randn(2, 3, 8)
    assert agent.tstep_encoder.in_norm.train()(x) is x


@pytest.mark.parametrize(("method", "radius"), [("unitball", 1.0), ("unitball-detach", 1.0), ("hypersphere", 4.0)])
def test_vectors_are_put_on_spheres(method, radius):
    x = torch.randn(50, 16) * torch.logspace(-3, 3, 50)[:, None]
    out = Normalization(method, 16)(x)
    torch.testing.assert_close(out, radius * x / x.norm(dim=-1, keepdim=True))
    assert torch.equal(Normalization(method, 16)(torch.zeros(2, 16)), torch.zeros(2, 16))
