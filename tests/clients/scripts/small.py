"""What the scripts beside this file share: a game that needs memory, and an experiment that trains for two short epochs."""

import sys

import gymnasium as gym
import numpy as np

import amago


class Recall(gym.Env):
    """Say in each of eight turns the digit that was shown two turns ago."""

    observation_space = gym.spaces.Dict(
        {"digit": gym.spaces.Box(0, 2, (1,), np.int32), "turn": gym.spaces.Box(0.0, 1.0, (1,), np.float32)}
    )
    action_space = gym.spaces.Discrete(3)

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        self.digits, self.turn = self.np_random.integers(0, 3, 10), 0
        return self.see(), {}

    def see(self):
        return {"digit": np.array([self.digits[self.turn]], np.int32), "turn": np.array([self.turn / 8], np.float32)}

    def step(self, action):
        assert isinstance(action, int)
        reward = float(self.turn >= 2 and action == self.digits[self.turn - 2])
        self.turn += 1
        info = {f"{amago.envs.AMAGO_ENV_LOG_PREFIX} Right": reward}
        return self.see(), reward, self.turn == 8, False, info


def make_env():
    return amago.envs.AMAGOEnv(Recall(), env_name="recall/3")


def experiment(cls=None, **fields):
    """In the directory that the command line names."""
    root = sys.argv[1]
    settings = {
        "run_name": "run", "ckpt_base_dir": root, "max_seq_len": 8, "make_train_env": make_env, "make_val_env": make_env, "parallel_actors": 2,
        "dataset": fields.get("dataset") or amago.loading.DiskTrajDataset(dset_root=root, dset_name=fields.get("run_name", "run"), dset_max_size=100),
        "tstep_encoder_type": amago.nets.tstep_encoders.FFTstepEncoder, "traj_encoder_type": amago.nets.traj_encoders.TformerTrajEncoder,
        "agent_type": amago.agent.MultiTaskAgent, "env_mode": "sync", "epochs": 2, "train_timesteps_per_epoch": 24, "train_batches_per_epoch": 2,
        "batch_size": 4, "val_timesteps_per_epoch": 20, "val_interval": 1, "ckpt_interval": 1, "log_interval": 1, "dloader_workers": 0,
        "verbose": False,
    }  # fmt: skip
    return (cls or amago.Experiment)(**settings | fields)


SIZES = {
    "amago.nets.tstep_encoders.FFTstepEncoder.d_hidden": 16, "amago.nets.tstep_encoders.FFTstepEncoder.d_output": 16,
    "amago.nets.traj_encoders.TformerTrajEncoder.d_model": 16, "amago.nets.traj_encoders.TformerTrajEncoder.n_heads": 2,
    "amago.nets.traj_encoders.TformerTrajEncoder.d_ff": 32, "amago.nets.traj_encoders.TformerTrajEncoder.n_layers": 2,
    "amago.nets.actor_critic.Actor.d_hidden": 16, "amago.nets.actor_critic.NCriticsTwoHot.d_hidden": 16,
    "amago.nets.actor_critic.NCriticsTwoHot.output_bins": 16, "amago.nets.actor_critic.NCritics.d_hidden": 16,
}  # fmt: skip


def run(exp):
    exp.start()
    exp.learn()
    print(sorted(exp.evaluate_test(make_env, timesteps=20)))
    return exp
