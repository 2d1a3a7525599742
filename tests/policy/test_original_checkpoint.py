"""A checkpoint of the original system loads everywhere that weights load, and acts as its golden vectors say.

The evidence for acting: a loaded policy, step by step with its memory, acts as the agent that has the golden losses does in whole sequences.
"""

import gymnasium as gym
import numpy as np
import pytest
import tiny
import torch
from golden import load
from golden_agents import CASES, TINY, golden_agent, golden_batch
from messages import naming
from safetensors.torch import save_file

import amago
from amago import config
from amago.envs import AMAGOEnv
from amago.envs.builtin import TMazePassive
from amago.nets.ff import Normalization
from amago.nets.traj_encoders import FFTrajEncoder, TformerTrajEncoder
from amago.nets.tstep_encoders import FFTstepEncoder
from amago.policy import write_policy_spec
from amago.policy.load import adapt_weights
from amago.run import checkpoint
from amago.run.checkpoint import CheckpointError, load_into, load_weight_file
from amago.spaces import action_spec, rl2_space

GAMMAS = (0.5, 0.9, 0.999)
SIZES = TINY | {"Agent.num_critics": 1, "MultiTaskAgent.num_critics": 1}
NAMES = ["agent_discrete", "multitask_discrete"]
OBS, ACTION = gym.spaces.Dict({"observation": gym.spaces.Box(-np.inf, np.inf, (5,), np.float32)}), gym.spaces.Discrete(4)


def theirs(name):
    """A state dict of the original system, its further copy of the critics included."""
    weights = {k: torch.as_tensor(v) for k, v in load(name)[1].items()}
    assert any(k.startswith("maximized_critics.") for k in weights)
    return weights


def describe_run(root, name):
    """A run directory that says what the agent of the golden vectors is made of, without weights."""
    agent_type, _, bindings = CASES[name]
    config.bind(SIZES | bindings)
    write_policy_spec(root, agent_type(OBS, rl2_space(action_spec(ACTION)), ACTION, 9, FFTstepEncoder, TformerTrajEncoder))
    config.clear()
    return root


def act(policy, observations, rewards):
    """Step by step: the actions (B, L), and the probabilities (B, L, A) that they come from."""
    actions, probs = [], []
    hook = policy.agent.actor.register_forward_hook(lambda *args: probs.append(args[-1].probs[:, 0, 0].numpy()))
    for t in range(observations.shape[1]):
        actions.append(policy.act({"observation": observations[:, t]}, rewards[:, t]))
    hook.remove()
    return np.stack(actions, 1), np.stack(probs, 1)


def acts_as_the_original(policy, name, gamma=0.999):
    """Compare, over the observations of the golden batch and rewards of the same kind, with whole sequences of the agent that has the golden
    losses; returns the actions."""
    agent, batch, arrays = golden_agent(name)
    agent.eval()
    begun = torch.arange(9) > 0
    rewards = arrays["batch/rl2s"][:, :, 0] * begun
    actions, probs = act(policy, batch.obs["observation"].numpy(), rewards.numpy())
    before = torch.eye(4)[np.roll(actions, 1, axis=1)] * begun[:, None]
    with torch.no_grad():
        steps = agent.tstep_encoder(batch.obs, torch.cat((rewards[..., None], before), -1))
        states, _ = agent.traj_encoder(steps, torch.arange(9).expand(3, 9)[..., None])
        expected = agent.actor(states).probs[:, :, GAMMAS.index(gamma)].numpy()
    np.testing.assert_allclose(probs, expected, rtol=1e-3, atol=1e-5)
    assert (actions == expected.argmax(-1)).all()
    return actions


@pytest.mark.parametrize("gamma", GAMMAS)
@pytest.mark.parametrize("name", NAMES)
def test_a_loaded_policy_acts_as_the_original(tmp_path, name, gamma):
    run = describe_run(tmp_path / "run", name)
    torch.save(theirs(name), tmp_path / "theirs.pt")
    policy = amago.load_policy(run, num_envs=3, sample=False, gamma=gamma, weights=tmp_path / "theirs.pt")
    assert (policy.gamma, policy.gammas) == (gamma, GAMMAS)
    acts_as_the_original(policy, name, gamma)


@pytest.mark.parametrize(
    ("name", "write", "prefix"),
    [
        ("a.pt", torch.save, ""),
        ("b.safetensors", save_file, ""),
        ("c.pt", torch.save, "module."),
        ("d.pt", torch.save, "module._orig_mod."),
    ],
)
def test_a_file_inside_the_run_in_every_form(tmp_path, name, write, prefix):
    run = describe_run(tmp_path, "agent_discrete")
    write({prefix + k: v for k, v in theirs("agent_discrete").items()}, run / name)
    acts_as_the_original(amago.load_policy(run / name, num_envs=3, sample=False), "agent_discrete")


def make_env():
    """Five numbers to see, four actions, rollouts of eight steps."""
    maze = gym.wrappers.TransformObservation(TMazePassive(7), lambda obs: np.pad(obs, (0, 3)), OBS["observation"])
    return AMAGOEnv(maze, env_name="Maze")


def experiment(root, name):
    agent_type, _, bindings = CASES[name]
    e = tiny.experiment(root, make_env, "transformer", max_seq_len=9, agent_type=agent_type, train_timesteps_per_epoch=17)
    config.bind(SIZES | bindings)
    e.start()
    return e


@pytest.mark.parametrize("name", NAMES)
def test_an_experiment_loads_acts_and_goes_on_training(tmp_path, name):
    arrays, _, _ = load(name)
    e = experiment(tmp_path, name)
    torch.save(theirs(name), tmp_path / "theirs.pt")
    e.load_checkpoint_from_path(str(tmp_path / "theirs.pt"), is_accelerate_state=False)
    e.write_latest_policy()
    acts_as_the_original(amago.load_policy(e.run_dir, num_envs=3, sample=False), name)
    a = {k: torch.as_tensor(v) for k, v in arrays.items()}
    e.policy.train()
    losses = e.compute_loss(golden_batch(a), log_step=False)
    for key, want in (("Actor Loss", "actor_loss"), ("Critic Loss", "critic_loss")):
        torch.testing.assert_close(losses[key].detach(), a[want], rtol=1e-4, atol=1e-5)
    before = tiny.weights(e)
    e.learn()
    assert "actor.base.in_layer.weight" in tiny.differing(before, tiny.weights(e))
    assert np.isfinite(tiny.rows(e.run_dir, "train")[-1]["values"]["Actor Loss"])


def broken(weights):
    weights = dict(weights)
    weights["world_model.weight"] = torch.zeros(2, 3)
    weights["actor.base.in_layer.bias"] = torch.zeros(99)
    for name in ("popart.mu", "critics.net.inp_layer.bias"):
        del weights[name]
    return weights


@pytest.mark.parametrize("copies", [True, False], ids=["with", "without"])
def test_what_cannot_be_mapped_is_named(tmp_path, copies):
    e = experiment(tmp_path, "agent_discrete")
    weights = {k: v for k, v in broken(theirs("agent_discrete")).items() if copies or not k.startswith("maximized_critics.")}
    torch.save(weights, tmp_path / "broken.pt")
    before = tiny.weights(e)
    for attempt in (
        lambda: e.load_checkpoint_from_path(str(tmp_path / "broken.pt"), is_accelerate_state=False),
        lambda: amago.load_policy(e.run_dir, weights=tmp_path / "broken.pt"),
    ):
        with pytest.raises(CheckpointError) as err:
            attempt()
        text = str(err.value)
        lines = ("world_model.weight (2, 3)", "popart.mu (3, 1)", "critics.net.inp_layer.bias", "(99,)", "(16,)")
        for word in (str(tmp_path / "broken.pt"), *lines):
            assert word in text
        assert "maximized" not in text
    assert not tiny.differing(before, tiny.weights(e)), "all of them or none"


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
