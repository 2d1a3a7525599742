"""`amago.check_tstep_encoder` and `amago.check_traj_encoder` pass what trains and acts, and name each fault of what would not."""

from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest
import tiny
import torch
from messages import refused
from tiny import LSTM
from torch import nn

import amago
from amago import config
from amago.data.findings import CheckError
from amago.nets.traj_encoders import FFTrajEncoder, GRUTrajEncoder, LSTMTrajEncoder, MambaTrajEncoder, TformerTrajEncoder
from amago.nets.tstep_encoders import CNNTstepEncoder, FFTstepEncoder, GoalTstepEncoder

G = gym.spaces
IMAGE = G.Box(0, 255, (36, 36, 3), np.uint8), G.Discrete(3)
MIXED = G.Dict(a=G.Box(-1.0, 1.0, (3,)), card=G.Discrete(4), pixels=G.Box(0, 255, (4, 4), np.uint8)), G.Discrete(2)


@pytest.fixture(autouse=True)
def _small():
    config.bind(tiny.SMALL | tiny.MAMBA)


class Own(amago.TstepEncoder):
    """A timestep encoder as a user writes it; every fault below is one change of it."""

    def __init__(self, obs_space, rl2_space, width=6):
        super().__init__(obs_space, rl2_space)
        inputs = sum(int(np.prod(s.shape)) for s in obs_space.spaces.values()) + rl2_space.shape[-1]
        self.layer = nn.Linear(inputs, width)
        self.register_buffer("mean", torch.zeros(inputs))

    @property
    def emb_dim(self):
        return self.layer.out_features

    def flat(self, obs, rl2s):
        return torch.cat([*(v.flatten(2).float() for v in obs.values()), rl2s], -1)

    def inner_forward(self, obs, rl2s, log_dict=None):
        return self.layer(self.flat(obs, rl2s))


TSTEP_PASS = {
    "own": (Own, MIXED), "vectors": (FFTstepEncoder, MIXED), "hidden": (lambda **k: FFTstepEncoder(hide_rl2s=True, **k), MIXED),
    "images": (CNNTstepEncoder, IMAGE), "augmented": (lambda **k: CNNTstepEncoder(drqv2_aug=True, **k), IMAGE),
    "goals": (GoalTstepEncoder, (G.Dict(goals=G.Box(-1, 1, (2, 3)), x=G.Box(-1, 1, (4,))), G.Box(-1, 1, (2,)))),
    "environment": (Own, gym.make("CartPole-v1")), "AMAGOEnv": (Own, tiny.cartpole), "vectorised": (Own, tiny.cartpoles),
    "a maker": (Own, lambda: gym.make("FrozenLake-v1")),
}  # fmt: skip


@pytest.mark.parametrize("name", TSTEP_PASS)
def test_timestep_encoders_that_train(name):
    amago.check_tstep_encoder(*TSTEP_PASS[name])


def changed(**methods):
    return type("Bad", (Own,), methods)


def forward(change):
    """An encoder whose output is ``change(self, obs, rl2s, the right output)``."""
    return changed(
        inner_forward=lambda self, obs, rl2s, log_dict=None: change(self, obs, rl2s, Own.inner_forward(self, obs, rl2s))
    )


def in_place(self, obs, rl2s, out):
    obs["a"] /= 255
    return out


class Unused(Own):
    def __init__(self, obs_space, rl2_space):
        super().__init__(obs_space, rl2_space)
        self.spare = nn.Linear(2, 2)


class Statistics(Own):
    """Running statistics of all that it gets, padding included."""

    def inner_forward(self, obs, rl2s, log_dict=None, mask=None):
        flat = self.flat(obs, rl2s)
        if self.training:
            self.mean.lerp_(flat.mean((0, 1)).detach(), 0.5)
        return self.layer(flat)


class Centered(Own):
    def inner_forward(self, obs, rl2s, log_dict=None, mask=None):
        flat = self.flat(obs, rl2s)
        return self.layer(flat - flat.mean((0, 1)) if self.training else flat)


TSTEP_FAULTS = {
    "a shape": (forward(lambda self, obs, rl2s, out: out[:, 0]), ("returned shape", (2, 6), (2, 3, 6))),
    "emb_dim is another": (changed(emb_dim=7), ("returned shape", (2, 3, 6), (2, 3, 7))),
    "emb_dim is none": (changed(emb_dim=None), ("emb_dim", None)),
    "emb_dim fails": (changed(emb_dim=property(lambda self: 1 / 0)), ("emb_dim", "ZeroDivisionError")),
    "no tensor": (forward(lambda self, obs, rl2s, out: (out, None)), ("a tuple", "a tensor")),
    "integers": (forward(lambda self, obs, rl2s, out: out.long()), ("torch.int64", "real numbers")),
    "NaN": (forward(lambda self, obs, rl2s, out: out * np.nan), ("nan", "finite input")),
    "zeros": (
        forward(lambda self, obs, rl2s, out: out / obs["pixels"].float().norm(dim=(2, 3)).unsqueeze(-1)), ("all 0", "finite input"),
    ),
    "an exception": (
        forward(lambda self, obs, rl2s, out: obs["camera"]), ("forward of obs a (2, 3, 3)", "KeyError", "camera", "test_check_encoders.py"),
    ),
    "a fixed length": (forward(lambda self, obs, rl2s, out: out.view(2, 3, 6)), ("forward of obs a (1, 1, 3)", "RuntimeError")),
    "in place": (forward(in_place), ("obs['a']", "in place")),
    "random": (forward(lambda self, obs, rl2s, out: out + torch.randn_like(out)), ("evaluation mode", "two different outputs")),
    "statistics of the batch": (forward(lambda self, obs, rl2s, out: out - out.mean(0, keepdim=True)), ("sequence of a batch", "alone")),
    "other timesteps": (forward(lambda self, obs, rl2s, out: out.cumsum(1)), ("timestep of a sequence", "alone")),
    "detached": (forward(lambda self, obs, rl2s, out: out.detach() + self.layer.bias), ("no gradient reaches layer.weight",)),
    "unused": (Unused, ("no gradient reaches spare.weight, spare.bias", "requires_grad_(False)")),
    "an infinite gradient": (forward(lambda self, obs, rl2s, out: (out - out).abs().sqrt()), ("gradient of", "not finite")),
    "padding in statistics": (Statistics, ("padding", "running statistics")),
    "padding in outputs": (Centered, ("padding", "output of real timesteps")),
    "arguments": (changed(__init__=lambda self, obs_space: None), ("obs_space, rl2_space", "TypeError")),
    "another class": (lambda obs_space, rl2_space: nn.Linear(2, 2), ("Linear", "amago.TstepEncoder")),
}  # fmt: skip


@pytest.mark.parametrize("fault", TSTEP_FAULTS)
def test_each_fault_of_a_timestep_encoder_is_named(fault):
    encoder, named = TSTEP_FAULTS[fault]
    with refused(CheckError, *named):
        amago.check_tstep_encoder(encoder, MIXED)


@pytest.mark.parametrize("spaces", [3, (G.Discrete(2),), object()])
def test_no_spaces(spaces):
    with refused(TypeError, "environment", "(observation space, action space)"):
        amago.check_tstep_encoder(Own, spaces)


TRAJ_PASS = {
    "own": LSTM, "ff": FFTrajEncoder, "gru": GRUTrajEncoder, "lstm": LSTMTrajEncoder, "mamba": MambaTrajEncoder, "transformer": TformerTrajEncoder,
    "rope": lambda **k: TformerTrajEncoder(pos_emb="rope", **k), "one that is made": GRUTrajEncoder(5, 30),
}  # fmt: skip


@pytest.mark.parametrize("name", TRAJ_PASS)
def test_sequence_models_that_train(name):
    amago.check_traj_encoder(TRAJ_PASS[name], export=name in ("own", "gru", "lstm"))


def test_it_changes_nothing():
    model = LSTM(5, 100)
    weights = {k: v.clone() for k, v in model.state_dict().items()}
    state = torch.get_rng_state()
    model.train()
    amago.check_traj_encoder(model, export=False)
    assert torch.get_rng_state().equal(state)
    assert model.training
    assert not tiny.differing(weights, dict(model.state_dict()))
    assert all(p.grad is None for p in model.parameters())


def bad(**methods):
    return type("Bad", (LSTM,), methods)


def result(change):
    """A model whose result is ``change(self, seq, hidden_state, the right result)``."""

    def forward(self, seq, time_idxs, hidden_state=None, log_dict=None):
        return change(self, seq, hidden_state, LSTM.forward(self, seq, time_idxs, hidden_state))

    return bad(forward=forward)


def reset(change):
    """A model that resets a hidden state by ``change(self, hidden state, dones, the right way)``."""
    return bad(
        reset_hidden_state=lambda self, hidden, dones: change(
            self, hidden, dones, lambda *given: LSTM.reset_hidden_state(self, *given)
        )
    )


class Short(LSTM):
    """Has room for max_seq_len steps only."""

    def forward(self, seq, time_idxs, hidden_state=None, log_dict=None):
        if hidden_state is not None and time_idxs.max() >= self.max_seq_len:
            raise IndexError("no place left")
        return super().forward(seq, time_idxs, hidden_state)


class Clears(LSTM):
    """Writes into the memory that it was given to import."""

    def import_hidden_state(self, tensors, dones):
        for tensor in tensors.values():
            tensor[:, dones] = 0.0
            tensor *= 1.5
        return tensors["hidden.0"] / 1.5, tensors["hidden.1"] / 1.5


class Boxed(LSTM):
    """A hidden state of its own kind, without a way to export it."""

    def init_hidden_state(self, batch_size, device):
        return SimpleNamespace(state=super().init_hidden_state(batch_size, device))

    def reset_hidden_state(self, hidden_state, dones):
        return SimpleNamespace(state=super().reset_hidden_state(hidden_state.state, dones))

    def forward(self, seq, time_idxs, hidden_state=None, log_dict=None):
        out, state = super().forward(seq, time_idxs, hidden_state and hidden_state.state)
        return out, SimpleNamespace(state=state)


NO_EXPORT = "export=False"
TRAJ_FAULTS = {
    "a shape": (result(lambda self, seq, hidden, out: (out[0][:, -1], out[1])), ("whole sequence", "returned shape", (3, 9, 7))),
    "emb_dim": (bad(emb_dim=12), ("returned shape", (3, 9, 7), (3, 9, 12))),
    "the output alone": (result(lambda self, seq, hidden, out: out[0]), ("Tensor", "the output and the next hidden state")),
    "NaN": (result(lambda self, seq, hidden, out: (out[0] * np.nan, out[1])), ("nan", "finite input")),
    "an exception": (result(lambda self, seq, hidden, out: self.nothing), ("whole sequence", "nothing", "test_check_encoders.py")),
    "the future": (
        result(lambda self, seq, hidden, out: (out[0] + seq.mean((1, 2), keepdim=True), out[1])), ("not causal", "later input"),
    ),
    "the batch": (result(lambda self, seq, hidden, out: (out[0] - out[0].mean(0), out[1])), ("sequence", "alone", "batch")),
    "random": (result(lambda self, seq, hidden, out: (out[0] + torch.rand(()), out[1])), ("evaluation mode", "two different outputs")),
    "no memory when acting": (
        result(lambda self, seq, hidden, out: (self.lstm(seq)[0] if hidden else out[0], out[1])), ("step 1 of a rollout", "whole sequence"),
    ),
    "an old memory": (result(lambda self, seq, hidden, out: (out[0], hidden)), ("step 1 of a rollout", "whole sequence")),
    "init_hidden_state": (bad(init_hidden_state=lambda self, n, device: 1 / 0), ("init_hidden_state(3, 'cpu')", "ZeroDivisionError")),
    "no reset": (reset(lambda self, hidden, dones, right: hidden), ("reset_hidden_state", "an array", "was reset")),
    "all are reset": (reset(lambda self, hidden, dones, right: right(hidden, dones | True)), ("not reset yet", "others must stay")),
    "half a reset": (reset(lambda self, hidden, dones, right: (right(hidden, dones)[0], hidden[1])), ("was reset", "init_hidden_state")),
    "arrays only": (reset(lambda self, hidden, dones, right: right(hidden, torch.from_numpy(dones))), ("Tensor (3,)", "TypeError")),
    "tensors only": (reset(lambda self, hidden, dones, right: right(hidden, dones.clone())), ("ndarray (3,)", "AttributeError")),
    "long rollouts": (Short, ("step 8", "max_seq_len=8", "IndexError", "no place left")),
    "slices that are copies": (
        bad(slice_hidden_state=lambda self, hidden, start, stop: tuple(part[:, start:stop].clone() for part in hidden)), ("slice_hidden_state", "storage"),
    ),
    "another slice": (
        bad(slice_hidden_state=lambda self, hidden, start, stop: tuple(part[:, : stop - start] for part in hidden)), ("slice_hidden_state",),
    ),
    "no gradient": (result(lambda self, seq, hidden, out: (out[0].detach(), out[1])), ("training", "RuntimeError")),
    "memory of its own kind": (Boxed, ("export_hidden_state", "SimpleNamespace", NO_EXPORT)),
    "memory without actors": (
        bad(export_hidden_state=lambda self, hidden: LSTM.export_hidden_state(self, hidden) | {"tally": torch.zeros(3)}),
        ("export_hidden_state", "'tally'", (3,), NO_EXPORT),
    ),
    "import without reset": (
        bad(import_hidden_state=lambda self, tensors, dones: tuple(tensors[f"hidden.{i}"].clone() for i in (0, 1))),
        ("import_hidden_state", "all rows were done"),
    ),
    "import in place": (Clears, ("hidden.0", "changed in place", "import_hidden_state")),
    "not traceable": (  # a Python branch on data
        result(lambda self, seq, hidden, out: out if hidden is None or hidden[0].sum() > -1e9 else (seq, hidden)), ("torch.export", NO_EXPORT),
    ),
    "another class": (lambda tstep_dim, max_seq_len: nn.Linear(2, 2), ("Linear", "amago.TrajEncoder")),
}  # fmt: skip


@pytest.mark.parametrize("fault", TRAJ_FAULTS)
def test_each_fault_of_a_sequence_model_is_named(fault):
    encoder, named = TRAJ_FAULTS[fault]
    with refused(CheckError, *named):
        amago.check_traj_encoder(encoder)
    if NO_EXPORT in named:
        amago.check_traj_encoder(encoder, export=False)
