"""An `Experiment` that trains within a second, and the environments that it trains on."""

import os
import subprocess
import sys
from pathlib import Path

import gymnasium as gym
import numpy as np
import torch

import amago
from amago import config
from amago.envs import AMAGOEnv
from amago.envs.builtin import TMazePassive
from amago.loading import DiskTrajDataset
from amago.nets.traj_encoders import (
    FFTrajEncoder,
    GRUTrajEncoder,
    LSTMTrajEncoder,
    MambaTrajEncoder,
    MinGRUTrajEncoder,
    TformerTrajEncoder,
)
from amago.nets.tstep_encoders import FFTstepEncoder

NETWORKS = {
    "FFTstepEncoder.n_layers": 1, "FFTstepEncoder.d_hidden": 16, "FFTstepEncoder.d_output": 12, "FFTrajEncoder.d_model": 16,
    "GRUTrajEncoder.d_hidden": 16, "GRUTrajEncoder.d_output": 16, "GRUTrajEncoder.n_layers": 1,
    "LSTMTrajEncoder.d_hidden": 16, "LSTMTrajEncoder.d_output": 16, "LSTMTrajEncoder.n_layers": 1, "TformerTrajEncoder.d_model": 16,
    "TformerTrajEncoder.n_heads": 2, "TformerTrajEncoder.d_ff": 32, "TformerTrajEncoder.n_layers": 1, "Actor.d_hidden": 16,
    "MinGRUTrajEncoder.d_model": 16, "MinGRUTrajEncoder.n_layers": 1, "NCritics.d_hidden": 16,
}  # fmt: skip
SMALL = NETWORKS | {"Multigammas.discrete": [0.9], "Multigammas.continuous": [0.9]}
MAMBA = {"MambaTrajEncoder.d_model": 16, "MambaTrajEncoder.d_state": 4, "MambaTrajEncoder.n_layers": 2}
TWO_HOT = {"NCriticsTwoHot.d_hidden": 16, "NCriticsTwoHot.output_bins": 8}
TRAJ = {
    "ff": FFTrajEncoder, "gru": GRUTrajEncoder, "lstm": LSTMTrajEncoder, "mamba": MambaTrajEncoder, "mingru": MinGRUTrajEncoder,
    "transformer": TformerTrajEncoder,
}  # fmt: skip
CORRIDOR = 5
EPISODE = CORRIDOR + 1
"""Steps of every episode of `tmaze`."""
opened = []


class Bits(gym.Env):
    """Ten steps; the reward is the share of three bits that equal the observed ones."""

    observation_space = gym.spaces.MultiBinary(3)
    action_space = gym.spaces.MultiBinary(3)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self._t = 0
        self._shown = self.np_random.integers(0, 2, 3).astype(np.int8)
        return self._shown, {}

    def step(self, action):
        reward = float(np.mean(np.asarray(action) == self._shown))
        self._t += 1
        self._shown = self.np_random.integers(0, 2, 3).astype(np.int8)
        return self._shown, reward, self._t == 10, False, {}


class LSTM(amago.TrajEncoder):
    """A sequence model as a user writes it, with the memory that PyTorch has: the tuple (h, c)."""

    def __init__(self, tstep_dim, max_seq_len, width=7):
        super().__init__(tstep_dim, max_seq_len)
        self.lstm = torch.nn.LSTM(tstep_dim, width, num_layers=2, batch_first=True)

    @property
    def emb_dim(self):
        return self.lstm.hidden_size

    def init_hidden_state(self, batch_size, device):
        return tuple(torch.zeros(2, batch_size, self.lstm.hidden_size, device=device) for _ in range(2))

    def reset_hidden_state(self, hidden_state, dones):
        return tuple(part.masked_fill(torch.as_tensor(dones)[None, :, None], 0.0) for part in hidden_state)

    def forward(self, seq, time_idxs, hidden_state=None, log_dict=None):
        return self.lstm(seq, hidden_state)


class StopAfter(amago.Callback):
    """Ends a run after an epoch; None: never."""

    def __init__(self, epoch):
        self.last = epoch

    def on_epoch_end(self, experiment, metrics):
        experiment.should_stop |= experiment.epoch == self.last


def tmaze():
    return AMAGOEnv(TMazePassive(CORRIDOR), env_name="TMaze")


def cartpole():
    return AMAGOEnv(gym.make("CartPole-v1", max_episode_steps=30), env_name="CartPole")


def pendulum():
    return AMAGOEnv(gym.make("Pendulum-v1", max_episode_steps=10), env_name="Pendulum")


def bits():
    return AMAGOEnv(Bits(), env_name="Bits")


def cartpoles(num=2):
    """A batch of CartPoles that resets itself."""
    return AMAGOEnv(gym.make_vec("CartPole-v1", num_envs=num, max_episode_steps=30), env_name="CartPole", batched_envs=num)


def agent(env, traj="ff", agent_type=amago.Agent, max_seq_len=EPISODE, bindings=None, **options):
    """An untrained agent for the spaces of ``env``: an `AMAGOEnv` or whatever else has them. ``traj``: a class, or a key of `TRAJ`."""
    config.bind(SMALL | MAMBA | TWO_HOT | (bindings or {}))
    torch.manual_seed(0)
    return agent_type(
        env.observation_space, env.rl2_space, env.action_space, max_seq_len, FFTstepEncoder, TRAJ.get(traj, traj), **options
    )


def experiment(root, make_env=tmaze, traj="ff", experiment_type=amago.Experiment, name="run", **fields):
    """Two actors, two episodes and two updates an epoch, one epoch; in this process, silent and seeded."""
    config.bind(SMALL | MAMBA)
    settings = {
        "run_name": name, "ckpt_base_dir": str(root), "max_seq_len": EPISODE, "dataset": DiskTrajDataset(root, name),
        "tstep_encoder_type": FFTstepEncoder, "traj_encoder_type": TRAJ[traj], "agent_type": amago.Agent,
        "make_train_env": make_env, "make_val_env": make_env, "parallel_actors": 2, "env_mode": "sync", "verbose": False,
        "dloader_workers": 0, "epochs": 1, "train_timesteps_per_epoch": 2 * EPISODE, "train_batches_per_epoch": 2,
        "val_timesteps_per_epoch": EPISODE + 1, "val_interval": None, "ckpt_interval": None, "always_save_latest": False,
        "batch_size": 4, "lr_warmup_steps": 4, "learning_rate": 1e-3, "save_trajs_as": "segments", "seed": 0,
    }  # fmt: skip
    settings |= fields
    if settings["dataset"] is None:
        del settings["dataset"]
    made = experiment_type(**settings)
    opened.append(made)
    return made


def close_all():
    """Close what the last test has left open, a failed one above all."""
    while opened:
        opened.pop().close()


def started(root, *args, **fields):
    e = experiment(root, *args, **fields)
    e.start()
    return e


def learned(root, *args, **fields):
    e = started(root, *args, **fields)
    e.learn()
    return e


def weights(e):
    """A copy of every parameter and buffer of the policy."""
    return {k: v.clone() for k, v in e.policy.state_dict().items()}


def differing(a, b):
    """The names whose tensors are not equal bit by bit."""
    assert a.keys() == b.keys()
    return [k for k in a if not a[k].equal(b[k])]


def environment():
    """Variables for a process of its own that imports this module."""
    here = str(Path(__file__).parent)
    return {**os.environ, "PYTHONPATH": os.pathsep.join([here, *filter(None, sys.path)]), "OMP_NUM_THREADS": "1"}


def run_program(code, *words, cwd=None, **variables):
    """What a program of its own prints, which must end well: ``python -c code words``."""
    command = [sys.executable, "-c", code, *map(str, words)]
    done = subprocess.run(command, env=environment() | variables, cwd=cwd, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    return done.stdout


def rows(run_dir, section=None):
    from amago.run.plots import read_metrics

    return [r for r in read_metrics(run_dir) if section in (None, r["section"])]
