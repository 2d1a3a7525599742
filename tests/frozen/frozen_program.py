"""The run whose files lie in this directory: `python tests/frozen/frozen_program.py DIR` writes it anew.

The files were written by commit 7e24746, and every later version must read them.
"""

import sys
import warnings
from pathlib import Path

import gymnasium as gym
import numpy as np

import amago
from amago.cli_utils import use_config
from amago.envs import AMAGOEnv
from amago.loading import DiskTrajDataset
from amago.nets.traj_encoders import GRUTrajEncoder, TformerTrajEncoder
from amago.nets.tstep_encoders import FFTstepEncoder

SMALL = {
    "FFTstepEncoder.n_layers": 1, "FFTstepEncoder.d_hidden": 16, "FFTstepEncoder.d_output": 12, "GRUTrajEncoder.d_hidden": 16,
    "GRUTrajEncoder.d_output": 16, "GRUTrajEncoder.n_layers": 1, "TformerTrajEncoder.d_model": 16, "TformerTrajEncoder.n_heads": 2,
    "TformerTrajEncoder.d_ff": 32, "TformerTrajEncoder.n_layers": 1, "Actor.d_hidden": 16, "NCritics.d_hidden": 16,
    "NCriticsTwoHot.d_hidden": 16, "NCriticsTwoHot.output_bins": 8, "Multigammas.discrete": [0.9], "Multigammas.continuous": [0.9],
}  # fmt: skip


class Recall(gym.Env):
    """Twelve steps; the reward is 1 for the action that was shown in the first step."""

    def __init__(self, continuous: bool):
        self.continuous = continuous
        self.observation_space = gym.spaces.Dict(
            {"cue": gym.spaces.Box(-1.0, 1.0, (2,), np.float32), "time": gym.spaces.Discrete(12)}
        )
        self.action_space = gym.spaces.Box(-1.0, 1.0, (2,), np.float32) if continuous else gym.spaces.Discrete(3)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t, self.cue = 0, self.np_random.uniform(-1, 1, 2).astype(np.float32)
        return {"cue": self.cue, "time": 0}, {}

    def step(self, action):
        self.t += 1
        right = float(-np.square(action - self.cue).sum()) if self.continuous else float(int(action) == int(self.cue[0] > 0))
        return {"cue": np.zeros(2, np.float32), "time": min(self.t, 11)}, right, self.t == 12, False, {}


def discrete():
    return AMAGOEnv(Recall(False), env_name="Recall")


def continuous():
    return AMAGOEnv(Recall(True), env_name="Recall")


RUNS = {
    "discrete": {
        "traj_encoder_type": TformerTrajEncoder, "agent_type": amago.Agent, "env": discrete, "save_trajs_as": "segments",
    },
    "continuous": {
        "traj_encoder_type": GRUTrajEncoder,
        "agent_type": amago.agent.MultiTaskAgent,
        "env": continuous,
        "save_trajs_as": "npz",
    },
}  # fmt: skip


def experiment(directory, name, **settings):
    """The run ``name`` of `RUNS` in ``directory``."""
    run = dict(RUNS[name])
    make_env = run.pop("env")
    dataset = DiskTrajDataset(dset_root=str(directory), dset_name=f"{name}_buffer", dset_max_size=20)
    common = {
        "max_seq_len": 12, "tstep_encoder_type": FFTstepEncoder, "parallel_actors": 2, "env_mode": "sync", "epochs": 2, "batch_size": 4,
        "train_timesteps_per_epoch": 48, "train_batches_per_epoch": 4, "val_interval": 1, "val_timesteps_per_epoch": 24,
        "dloader_workers": 0, "ckpt_interval": 1, "verbose": False, "log_interval": 1, "seed": 5, "ema_decay": 0.5,
    }  # fmt: skip
    return amago.Experiment(
        run_name=name, ckpt_base_dir=str(directory), dataset=dataset, make_train_env=make_env, make_val_env=make_env,
        **common | run | settings,
    )  # fmt: skip


def answers(directory, name):
    """Greedy actions of the run's policy in three steps after each of eight cues, (8, 3, ...)."""
    rows = []
    for cue in np.random.default_rng(0).normal(0, 50, (8, 2)).astype(np.float32):
        policy = amago.load_policy(str(Path(directory, name)), sample=False)
        rows.append([np.asarray(policy.act({"cue": cue * (t == 0), "time": 4 * t}, reward=float(cue[0]))) for t in range(3)])
    return np.asarray(rows)


def main(directory):
    """Write both runs, and what their policies answer, to ``directory``."""
    warnings.simplefilter("ignore")
    use_config(SMALL)
    for name in RUNS:
        run = experiment(directory, name)
        run.start()
        run.learn()
        run.close()
    np.savez(Path(directory, "answers.npz"), **{name: answers(directory, name) for name in RUNS})


if __name__ == "__main__":
    main(sys.argv[1])
