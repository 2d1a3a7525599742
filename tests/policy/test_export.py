"""The exported step does what the policy does, in PyTorch and in onnxruntime, for every model, action space and distribution.

The tests of ONNX need onnx, onnxscript and onnxruntime, and skip without them.
"""

import importlib.util
import json
import sys
from pathlib import Path
from typing import NamedTuple

import gymnasium as gym
import numpy as np
import pytest
import tiny
import torch
from messages import naming
from run_inside import run_script
from tiny import LSTM
from torch import nn

import amago
from amago import config
from amago.agent import MultiTaskAgent
from amago.nets.actor_critic import Actor, ResidualActor
from amago.nets.policy_dists import GMM, ActionDistribution, Beta, TanhGaussian
from amago.nets.traj_encoders import GRUTrajEncoder, TformerTrajEncoder
from amago.nets.transformer import SlidingWindowFlexAttention, SlidingWindowSinkFlexAttention, VanillaAttention
from amago.nets.tstep_encoders import CNNTstepEncoder, FFTstepEncoder
from amago.policy import write_policy_spec
from amago.policy.export import METADATA, StepModel, export_policy
from amago.run.checkpoint import save_weights
from amago.spaces import action_spec, rl2_space

needs_onnx = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("onnx", "onnxscript", "onnxruntime")),
    reason="onnx, onnxscript and onnxruntime are not all installed",
)
ACTORS, CONTEXT, STEPS = 3, 7, 150
VECTOR = gym.spaces.Dict(
    {"b": gym.spaces.Box(-np.inf, np.inf, (4,), np.float32), "a": gym.spaces.Box(-1, 1, (2, 2), np.float32)}
)
IMAGE = gym.spaces.Dict({"observation": gym.spaces.Box(0, 255, (36, 36, 3), np.uint8)})
ACTIONS = {
    "discrete": gym.spaces.Discrete(4, start=2),
    "continuous": gym.spaces.Box(np.array([[-2.0], [0.0]], np.float32), np.array([[3.0], [0.5]], np.float32)),
    "multibinary": gym.spaces.MultiBinary(3),
    "several": gym.spaces.MultiDiscrete([[3, 2]], start=[[0, 5]]),
    "nested": gym.spaces.Dict(
        {
            "turn": gym.spaces.Discrete(3, start=1),
            "arm": gym.spaces.Tuple((gym.spaces.Box(-2.0, 1.0, (2,), np.float32), gym.spaces.MultiBinary(2))),
        }
    ),
}
SMALL = {
    "Agent.num_critics": 1, "TformerTrajEncoder.n_layers": 2, "GRUTrajEncoder.n_layers": 2, "Multigammas.discrete": [0.5, 0.9],
    "Multigammas.continuous": [0.5, 0.9],
}  # fmt: skip


def make_run(root, traj=TformerTrajEncoder, action="discrete", obs=VECTOR, tstep=FFTstepEncoder, agent=amago.Agent, **bindings):
    """A run directory of an agent whose actions depend on what it saw, as if it had been trained."""
    config.bind(tiny.SMALL | tiny.MAMBA | SMALL | bindings)
    space = ACTIONS[action]
    torch.manual_seed(1)
    made = agent(obs, rl2_space(action_spec(space)), space, CONTEXT, tstep, traj)
    with torch.no_grad():
        for name, p in [*made.named_parameters(), *made.named_buffers()]:
            if name.startswith("actor.") and p.ndim == 2:
                p.normal_(std=2.5 / p.shape[1] ** 0.5)
            if name.endswith("in_norm.mu"):
                p.normal_(std=0.2)
            if name.endswith("gamma") and p.requires_grad:
                p.uniform_(0.5, 1.5)  # the stretch of sigma-reparametrised layers
            if name.startswith(("traj_encoder.rnn.weight", "traj_encoder.out.weight")):
                p.mul_(4.0)  # a GRU's output hardly moves at first
    write_policy_spec(root, made)
    save_weights(made.state_dict(), root / "ckpts" / "latest" / "policy.pt")
    config.clear()
    return root


def stream(space, steps, actors, seed=0):
    """(observations, reward, done) of actors whose episodes end at different times, some long after the context is full."""
    rng = np.random.default_rng(seed)
    for t in range(steps):
        obs = {}
        for key, box in space.spaces.items():
            shape = (actors, *box.shape)
            obs[key] = (rng.integers(0, 256, shape) if box.dtype == np.uint8 else rng.normal(size=shape)).astype(box.dtype)
        done = np.ones(actors, bool) if t == 0 else rng.random(actors) < 0.04
        reward = np.where(done, 0.0, rng.normal(size=actors)).astype(np.float32)
        yield obs, reward, done


class Exported:
    """Runs a ``.pt2`` or ``.onnx`` file as a program without amago would; or a `StepModel`, which is what both are made of."""

    def __init__(self, path, actors):
        self.onnx = not isinstance(path, StepModel) and path.suffix == ".onnx"
        if isinstance(path, StepModel):
            self.call, self.description = path, path.description(path(*path.example(1))[1])
        elif self.onnx:
            import onnxruntime

            self.session = onnxruntime.InferenceSession(path)
            self.description = json.loads(self.session.get_modelmeta().custom_metadata_map[METADATA])
            self.outputs = [o.name for o in self.session.get_outputs()]
        else:
            files = {METADATA: ""}
            self.call = torch.export.load(path, extra_files=files).module()
            self.description = json.loads(files[METADATA])
        self.memory = {}
        for name, entry in self.description["memory"].items():
            shape = list(entry["shape"])
            shape[self.description["batch_axes"][name]] = actors
            self.memory[name] = np.zeros(shape, entry["dtype"])

    def act(self, obs, reward, done):
        if self.onnx:
            feed = {f"obs.{k}": v for k, v in obs.items()} | {"reward": reward, "done": done}
            feed |= {f"memory.{k}": v for k, v in self.memory.items()}
            out = dict(zip(self.outputs, self.session.run(None, feed), strict=True))
            self.memory = {k: out.pop(f"next_memory.{k}") for k in self.memory}
            nested = {k.removeprefix("action."): out.pop(k) for k in self.outputs if k.startswith("action.")}
            return nested or out.pop("action"), out
        tensors = [{k: torch.from_numpy(v) for k, v in sorted(part.items())} for part in (obs, self.memory)]
        with torch.no_grad():
            action, parameters, memory = self.call(tensors[0], torch.from_numpy(reward), torch.from_numpy(done), tensors[1])
        self.memory = {k: v.numpy() for k, v in memory.items()}
        action = {k: v.numpy() for k, v in action.items()} if isinstance(action, dict) else action.numpy()
        return action, {k: v.numpy() for k, v in parameters.items()}


def leaves(action):
    """An action with nothing nested, by the names of an exported one."""
    if isinstance(action, dict):
        return {"arm/0": action["arm"][0], "arm/1": action["arm"][1], "turn": action["turn"]}
    return {"": action}


def same_actions(run, path, steps, actors=ACTORS, obs=VECTOR, **options):
    """Let policy and file act side by side, and compare; returns the actions."""
    policy, exported, actions = amago.load_policy(run, num_envs=actors, sample=False, **options), Exported(path, actors), []
    for t, (seen, reward, done) in enumerate(stream(obs, steps, actors)):
        expected, (action, _) = leaves(policy.act(seen, reward, done)), exported.act(seen, reward, done)
        given = action if isinstance(action, dict) else {"": action}
        assert list(given) == list(expected)
        for key, value in given.items():
            assert value.shape == expected[key].shape, f"step {t} {key}"
            assert value.dtype == expected[key].dtype, f"step {t} {key}"
            np.testing.assert_allclose(value, expected[key], rtol=1e-4, atol=1e-4, err_msg=f"step {t} {key}")
        actions.append(np.concatenate([value.reshape(actors, -1) for value in given.values()], 1))
    assert len(np.unique(actions)) > 1, "what is seen makes no difference"
    return np.stack(actions)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Run directories by model, made when first asked for."""
    made = {}

    def get(traj):
        if traj not in made:
            config.clear()
            made[traj] = make_run(tmp_path_factory.mktemp(traj), tiny.TRAJ[traj])
        return made[traj]

    return get


@pytest.mark.parametrize(
    ("traj", "suffix"),
    [
        *((traj, ".pt2") for traj in ("ff", "gru", "lstm", "transformer", "mamba", "mingru")),
        *(pytest.param(traj, ".onnx", marks=needs_onnx) for traj in ("gru", "lstm", "transformer")),
    ],
)
def test_many_steps_of_every_model(runs, traj, suffix, tmp_path):
    run = runs(traj)
    path = amago.load_policy(run).export(tmp_path / f"step{suffix}")
    assert [*tmp_path.iterdir()] == [path], "weights lie in the file itself"
    together = same_actions(run, path, STEPS)
    assert (together[1:] != together[:-1]).mean() > 0.05
    same_actions(run, path, 50, actors=1)  # any number of environments


OTHERS = {
    "continuous": {"action": "continuous", "traj": GRUTrajEncoder},
    "multibinary": {"action": "multibinary", "traj": GRUTrajEncoder},
    "rope": {"TformerTrajEncoder.pos_emb": "rope"},
    "normalised": {"TformerTrajEncoder.qk_norm": (4.0, 8.0), "TformerTrajEncoder.pos_emb": "rope"},
    "learned": {"TformerTrajEncoder.pos_emb": "learned", "LearnedPosEmb.max_time_idx": 12},
    "plain": {
        "TformerTrajEncoder.sigma_reparam": False, "TformerTrajEncoder.normformer_norms": False, "TformerTrajEncoder.norm": "rmsnorm",
        "TformerTrajEncoder.attention_type": VanillaAttention,
    },
    "window": {"TformerTrajEncoder.attention_type": SlidingWindowFlexAttention, "SlidingWindowFlexAttention.window_size": 3},
    "sinks": {
        "TformerTrajEncoder.attention_type": SlidingWindowSinkFlexAttention, "SlidingWindowSinkFlexAttention.window_size": 3,
        "SlidingWindowSinkFlexAttention.sink_size": 2,
    },
    "several": {"action": "several", "traj": GRUTrajEncoder},
    "nested": {"action": "nested", "traj": GRUTrajEncoder},
    "images": {"obs": IMAGE, "tstep": CNNTstepEncoder, "CNNTstepEncoder.d_output": 12, "CNNTstepEncoder.drqv2_aug": True},
    "multitask": {"agent": MultiTaskAgent, "MultiTaskAgent.actor_type": ResidualActor, "ResidualActor.residual_blocks": 1},
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "suffix"),
    [  # ONNX is made from what is traced for a .pt2, and takes about ten seconds
        *((name, None) for name in OTHERS),
        *(pytest.param(name, ".onnx", marks=needs_onnx) for name in ("nested", "sinks", "images", "normalised")),
    ],
)
def test_other_settings(name, suffix, tmp_path):
    run = make_run(tmp_path, **OTHERS[name])
    policy = amago.load_policy(run)
    step = policy.export(tmp_path / f"step{suffix}") if suffix else StepModel(policy.agent)
    same_actions(run, step, 60, obs=OTHERS[name].get("obs", VECTOR))


DISTRIBUTIONS = {
    "discrete": ("discrete", None, {"probs": (4,)}),
    "tanh": ("continuous", TanhGaussian, {"loc": (2,), "scale": (2,)}),
    "beta": ("continuous", Beta, {"alpha": (2,), "beta": (2,)}),
    "gmm": ("continuous", GMM, {"loc": (5, 2), "scale": (5, 2), "log_weights": (5,)}),
    "multibinary": ("multibinary", None, {"probs": (3,)}),
    "several": ("several", None, {"probs.0": (3,), "probs.1": (2,)}),
}


@pytest.mark.parametrize(
    ("name", "suffix"),
    [*((name, None) for name in DISTRIBUTIONS), ("beta", ".pt2")],
)
def test_what_describes_the_policy(name, suffix, tmp_path):
    action, kind, shapes = DISTRIBUTIONS[name]
    bindings = {} if kind is None else {"Actor.continuous_dist_type": kind, "Agent.online_coeff": 0.0}
    run = make_run(tmp_path, GRUTrajEncoder, action, **bindings)
    policy = amago.load_policy(run, num_envs=ACTORS, sample=False)
    exported = Exported(policy.export(tmp_path / f"step{suffix}") if suffix else StepModel(policy.agent), ACTORS)
    seen = []
    policy.agent.actor.register_forward_hook(lambda *args: seen.append(args[-1]))
    for obs, reward, done in stream(VECTOR, 12, ACTORS):
        policy.act(obs, reward, done)
        _, parameters = exported.act(obs, reward, done)
        assert {k: v.shape for k, v in parameters.items()} == {k: (ACTORS, *shape) for k, shape in shapes.items()}
        for key, value in parameters.items():
            of = seen[-1].factors[int(key[-1])] if "." in key else seen[-1]
            expected = getattr(of, key.partition(".")[0])[:, 0, -1].numpy()
            np.testing.assert_allclose(value, expected, rtol=1e-3, atol=1e-4, err_msg=key)
    assert exported.description["parameters"] == sorted(shapes)


class Scaled(TanhGaussian):
    """A distribution of one's own, whose output is of a class of its own."""

    class Output(ActionDistribution):
        def __init__(self, vec):
            super().__init__(vec.shape[:-1])
            self.vec = vec

        def sample_action(self, sample):
            return self.vec[..., :2].tanh()

    def make(self, vec):
        return self.Output(vec)


def test_a_distribution_of_ones_own_is_described_by_the_networks_output(tmp_path):
    run = make_run(tmp_path, GRUTrajEncoder, "continuous", **{"Actor.continuous_dist_type": Scaled, "Agent.online_coeff": 0.0})
    policy = amago.load_policy(run, num_envs=1, sample=False)
    exported = Exported(StepModel(policy.agent), 1)
    obs, reward, done = next(stream(VECTOR, 1, 1))
    action, parameters = exported.act(obs, reward, done)
    assert parameters["network_output"].shape == (1, 4)
    unit = np.tanh(parameters["network_output"][0, :2])
    np.testing.assert_allclose(action[0, :, 0], [-2.0, 0.0] + (unit + 1) / 2 * [5.0, 0.5], rtol=1e-5)


def test_what_is_illegal_is_never_taken(tmp_path):
    obs = gym.spaces.Dict({"legal": gym.spaces.Box(-1, 1, (4,), np.int8), "x": gym.spaces.Box(-1, 1, (3,), np.float32)})
    run = make_run(tmp_path, obs=obs, **{"ActionMask.key": "legal"})
    policy = amago.load_policy(run)
    exported, chosen = Exported(StepModel(policy.agent), ACTORS), []
    beside = amago.load_policy(run, num_envs=ACTORS, sample=False)
    for seen, reward, done in stream(VECTOR, 60, ACTORS):
        own = {"legal": (seen["b"] > 0).astype(np.int8), "x": seen["b"][:, :3]}
        action, parameters = exported.act(own, reward, done)
        assert (action == beside.act(own, reward, done)).all()
        some = own["legal"].any(1)
        assert (parameters["probs"][some][own["legal"][some] == 0] == 0).all()
        assert own["legal"][some, action[some] - 2].all()
        chosen.extend(action)
    assert len(set(chosen)) == 4


class MaskedActor(Actor):
    """Never takes an action whose entry of the observation "b" is negative."""

    def actor_network_forward(self, state, log_dict=None, straight_from_obs=None):
        logits = super().actor_network_forward(state)
        return logits.masked_fill((straight_from_obs["b"] < 0).unsqueeze(-2), -1e9)


def test_observations_that_go_straight_to_the_actor(tmp_path):
    run = make_run(tmp_path, GRUTrajEncoder, **{"Agent.actor_type": MaskedActor, "Agent.pass_obs_keys_to_actor": ["b"]})
    policy = amago.load_policy(run, num_envs=ACTORS, sample=False)
    actions = same_actions(run, policy.export(tmp_path / "step.pt2"), 60)[..., 0]
    legal = np.array([obs["b"] >= 0 for obs, _, _ in stream(VECTOR, 60, ACTORS)])
    possible = legal.any(-1)
    assert np.take_along_axis(legal, actions[..., None] - 2, -1)[..., 0][possible].all()


@needs_onnx
def test_the_program_of_the_tutorial(tmp_path):
    page = (Path(__file__).parents[2] / "docs" / "tutorial.md").read_text(encoding="utf-8")
    text = page.partition("# act_with_onnx.py\n")[2].partition("```")[0]
    e = tiny.learned(
        tmp_path, tiny.cartpole, "transformer", max_seq_len=10, train_timesteps_per_epoch=35, always_save_latest=True
    )
    policy = amago.load_policy(e.run_dir, sample=False)
    e.close()
    exported = Exported(policy.export(tmp_path / "policy.onnx"), 1)
    memory = ["keys", "lengths", "prev_action", "time_idx", "values"]
    inputs = ["obs.observation", "reward", "done", *(f"memory.{m}" for m in memory)]
    assert [i.name for i in exported.session.get_inputs()] == inputs
    assert exported.outputs == ["action", "probs", *(f"next_memory.{m}" for m in memory)]
    (tmp_path / "program.py").write_text(text)
    done = run_script(tmp_path / "program.py", cwd=tmp_path)
    env = gym.make("CartPole-v1")
    obs, _ = env.reset(seed=0)
    total, reward, over = 0.0, None, False
    while not over:
        obs, reward, terminated, truncated, _ = env.step(policy.act(obs, reward))
        total, over = total + reward, terminated or truncated
    assert done.text == f"return: {total}\n"
    assert total > 5


def test_without_the_packages_of_onnx(runs, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "onnx", None)
    with pytest.raises(ImportError, match=naming("onnx", "pip install 'amago[export]'")):
        amago.load_policy(runs("ff")).export(tmp_path / "step.onnx")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("traj", ["gru", "transformer"])
def test_the_step_leaves_its_arguments_alone(runs, traj):
    step = StepModel(amago.load_policy(runs(traj)).agent)
    obs, reward, done, memory = step.example(2)
    for value in memory.values():
        value.copy_(torch.rand(value.shape) * 3)
    before = {k: v.clone() for k, v in memory.items()}
    for d in (done, ~done):
        first, again = (step(obs, reward, d, memory) for _ in range(2))
        assert all(memory[k].equal(before[k]) for k in memory)
        assert all(first[2][k].equal(again[2][k]) for k in memory)


def test_the_description(runs):
    d = Exported(StepModel(amago.load_policy(runs("gru")).agent), 1).description
    assert d["memory"] == {
        "hidden": {"shape": [2, 1, 16], "dtype": "float32"}, "prev_action": {"shape": [1, 4], "dtype": "float32"},
        "time_idx": {"shape": [1], "dtype": "int64"},
    }  # fmt: skip
    assert d["batch_axes"] == {"hidden": 1, "prev_action": 0, "time_idx": 0}
    assert (d["gamma"], d["max_seq_len"], d["action_space"]["start"]) == (0.999, CONTEXT, 2)
    assert sorted(d["observation_space"]["spaces"]) == ["a", "b"]


def test_the_discount_that_acts_is_the_one_exported(runs, tmp_path):
    run = runs("transformer")
    actions = {}
    for gamma in (0.5, 0.999):
        policy = amago.load_policy(run, gamma=gamma)
        step = policy.export(tmp_path / "step.pt2") if gamma == 0.5 else StepModel(policy.agent)
        assert Exported(step, 1).description["gamma"] == policy.gamma == gamma
        actions[gamma] = same_actions(run, step, 40, gamma=gamma)
    assert (actions[0.5] != actions[0.999]).any()


def test_exporting_changes_nothing(runs, tmp_path):
    policy, other = (amago.load_policy(runs("transformer"), num_envs=1, sample=False) for _ in range(2))
    weights = {k: v.clone() for k, v in policy.agent.state_dict().items()}
    for t, step in enumerate(stream(VECTOR, 12, 1)):
        if t == 6:
            (tmp_path / "step.pt2").write_bytes(b"an older one")
            random = torch.get_rng_state()
            policy.agent.train()
            policy.export(tmp_path / "step.pt2")
            assert torch.get_rng_state().equal(random)
            assert policy.agent.training
            policy.agent.eval()
        assert policy.act(*step) == other.act(*step)
    assert not tiny.differing(weights, dict(policy.agent.state_dict()))
    assert Exported(tmp_path / "step.pt2", 1).description["schema"] == 1
    assert [p.name for p in tmp_path.iterdir()] == ["step.pt2"]


@pytest.mark.parametrize("name", ["policy", "policy.pt", "policy.ONNX"])
def test_a_suffix_that_names_no_format(runs, tmp_path, name):
    with pytest.raises(ValueError, match=naming(f"path={str(tmp_path / name)!r}", ".onnx", ".pt2")):
        amago.load_policy(runs("ff")).export(tmp_path / name)


class Contrary(amago.Agent):
    """Acts in a way of its own."""

    def act(self, state, obs, sample, gamma_idx=None):
        return 3 - super().act(state, obs, sample, gamma_idx)


def test_an_agent_that_acts_in_a_way_of_its_own(tmp_path):
    run = make_run(tmp_path, GRUTrajEncoder, agent=Contrary)
    with pytest.raises(ValueError, match=naming("Contrary", "exported")):
        amago.load_policy(run).export(tmp_path / "step.pt2")
    assert not (tmp_path / "step.pt2").exists()


class Pairs(GRUTrajEncoder):
    """Remembers what no one else knows."""

    def init_hidden_state(self, batch_size, device):
        return super().init_hidden_state(batch_size, device), object()


def test_a_memory_that_is_not_known(tmp_path):
    run = make_run(tmp_path, Pairs)
    with pytest.raises(ValueError, match=naming("Pairs", "object", "hidden_state.1", "export_hidden_state")):
        amago.load_policy(run).export(tmp_path / "step.pt2")


class State(NamedTuple):
    h: torch.Tensor
    more: dict


class Nested(LSTM):
    """The same memory, named and nested, with a part that is empty; it is cleared by assignment to rows."""

    def init_hidden_state(self, batch_size, device):
        h, c = super().init_hidden_state(batch_size, device)
        return State(h, {"c": [c, None]})

    def reset_hidden_state(self, hidden_state, dones):
        for part in (hidden_state.h, hidden_state.more["c"][0]):
            part[:, torch.as_tensor(dones)] = 0.0
        return hidden_state

    def forward(self, seq, time_idxs, hidden_state=None, log_dict=None):
        if hidden_state is None:
            return self.lstm(seq)
        out, (h, c) = self.lstm(seq, (hidden_state.h, hidden_state.more["c"][0]))
        return out, State(h, {"c": [c, None]})


NAMES = {LSTM: ["hidden.0", "hidden.1"], Nested: ["hidden.h", "hidden.more.c.0"]}


@pytest.mark.parametrize("model", NAMES)
def test_memory_of_several_tensors(model, tmp_path):
    run = make_run(tmp_path, model)
    path = amago.load_policy(run).export(tmp_path / "step.pt2")
    same_actions(run, path, 60)
    assert list(Exported(path, 1).description["memory"]) == [*NAMES[model], "prev_action", "time_idx"]
    assert Exported(path, 1).description["batch_axes"][NAMES[model][0]] == 1


class Twofold(GRUTrajEncoder):
    """A hidden state of two tensors, which the class itself exports."""

    def init_hidden_state(self, batch_size, device):
        return super().init_hidden_state(batch_size, device), torch.zeros(batch_size, 1, device=device)

    def reset_hidden_state(self, hidden_state, dones):
        hidden, steps = hidden_state
        return super().reset_hidden_state(hidden, dones), steps.masked_fill(torch.as_tensor(dones)[:, None], 0.0)

    def export_hidden_state(self, hidden_state):
        return dict(zip(("gru", "steps"), hidden_state))

    def import_hidden_state(self, tensors, dones):
        return self.reset_hidden_state((tensors["gru"].clone(), tensors["steps"]), dones)

    def forward(self, seq, time_idxs, hidden_state=None, log_dict=None):
        if hidden_state is None:
            return super().forward(seq, time_idxs)
        out, hidden = super().forward(seq, time_idxs, hidden_state[0])
        steps = hidden_state[1] + 1
        return out * torch.cos(steps)[:, None], (hidden, steps)


def test_a_sequence_model_that_exports_its_own_hidden_state(tmp_path):
    run = make_run(tmp_path, Twofold)
    same_actions(run, amago.load_policy(run).export(tmp_path / "step.pt2"), 30)
    assert Exported(tmp_path / "step.pt2", 1).description["batch_axes"] == {
        "gru": 1,
        "prev_action": 0,
        "steps": 0,
        "time_idx": 0,
    }


class Clash(Twofold):
    def export_hidden_state(self, hidden_state):
        return dict(zip(("gru", "time_idx"), hidden_state))


def test_names_of_hidden_states_that_the_step_uses(tmp_path):
    run = make_run(tmp_path, Clash)
    with pytest.raises(ValueError, match=naming("Clash.export_hidden_state", "time_idx")):
        amago.load_policy(run).export(tmp_path / "step.pt2")


def test_an_actor_that_is_no_head(runs, tmp_path):
    agent = amago.load_policy(runs("ff")).agent
    agent.actor = nn.Identity()
    with pytest.raises(ValueError, match=naming("ActorCriticAgent", "BaseActorHead")):
        export_policy(agent, tmp_path / "step.pt2")
