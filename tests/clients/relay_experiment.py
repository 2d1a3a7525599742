"""An experiment of its own: a subclass with fields, its own pool of environments, its own loaders, its own loop.

    python relay_experiment.py DIRECTORY EPOCHS [--ckpt EPOCH]

Written in the way of programs for the original system. Prints what it has seen as one line of JSON.
"""

import argparse
import json
import os
from dataclasses import dataclass

import gin
import gymnasium as gym
import numpy as np
import torch
from torch.utils.data import DataLoader

import amago
from amago import cli_utils
from amago.envs import AMAGOEnv, EnvCreator
from amago.envs.exploration import EpsilonGreedy
from amago.loading import DiskTrajDataset, RLData_pad_collate
from amago.utils import call_async_env


class Relay(gym.Env):
    """Carry the baton for six steps: repeat the sign that was shown in the first one."""

    observation_space = gym.spaces.Box(-1.0, 1.0, (2,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t, self.sign = 0, int(self.np_random.integers(2))
        return np.array([2 * self.sign - 1, 0], np.float32), {}

    def step(self, action):
        self.t += 1
        return np.array([0, self.t / 6], np.float32), float(action == self.sign), self.t == 6, False, {}


def make_env():
    return AMAGOEnv(Relay(), env_name="relay")


class RoundRobin:
    """A pool in this process, stepped in turn; not one of the library's."""

    def __init__(self, makers):
        self.runners = [make() for make in makers]
        self.single_action_space = self.runners[0].action_space
        self.answers = None

    def reset(self):
        return [runner.reset() for runner in self.runners]

    def step(self, actions):
        out = []
        for runner, action in zip(self.runners, actions):
            obs, reward, terminated, truncated, info = runner.step(action)
            if np.any(terminated | truncated):
                obs, info = runner.reset()
            out.append((obs, reward, terminated, truncated, info))
        return tuple(zip(*out))

    def call_async(self, name, *args):
        found = [getattr(runner, name) for runner in self.runners]
        self.answers = [f(*args) if callable(f) else f for f in found]

    def call_wait(self):
        return self.answers

    def close(self):
        for runner in self.runners:
            runner.close()


@gin.configurable
@dataclass
class RelayExperiment(amago.Experiment):
    teams: int = 2
    swap_every: int = gin.REQUIRED

    def init_envs(self):
        def creators(root):
            return [
                EnvCreator(
                    make_env=make_env, exploration_wrapper_type=EpsilonGreedy if root else None, save_trajs_to=root,
                    save_every_low=100, save_every_high=200, save_trajs_as="npz",
                )
                for _ in range(self.parallel_actors)
            ]  # fmt: skip

        self.train_envs = RoundRobin(creators(self.dataset.save_new_trajs_to))
        self.val_envs = RoundRobin(creators(None))
        for envs in (self.train_envs, self.val_envs):
            envs.reset()
        self.rl2_space = self.train_envs.runners[0].rl2_space
        return f"{self.teams} teams of {self.parallel_actors}"

    def init_dloaders(self):
        loader = DataLoader(self.dataset, batch_size=self.batch_size, collate_fn=RLData_pad_collate, num_workers=0)
        self.train_dloader = self.accelerator.prepare(loader)
        return self.train_dloader

    def init_model(self):
        super().init_model()
        self.swaps = 0

    def train_step(self, batch, log_step):
        metrics = super().train_step(batch, log_step)
        return {**metrics, "Swaps": float(self.swaps)}

    def learn(self):
        for epoch in range(self.epoch, self.epochs):
            if epoch % self.val_interval == 0:
                self.evaluate_val()
            if epoch and epoch % self.swap_every == 0:
                self.swaps += 1
                self.hidden_state = None
                self.train_envs.reset()
            self.hidden_state, (returns, specials) = self.interact(
                self.train_envs, self.train_timesteps_per_epoch, hidden_state=self.hidden_state
            )
            self.log(self.policy_metrics(returns, specials), key="collect")
            call_async_env(self.train_envs, "save_finished_trajs")
            self.log(self.dataset.on_end_of_collection(experiment=self), key="dataset")
            self.init_dloaders()
            if not self.dataset.ready_for_training:
                continue
            self.policy_aclr.train()
            for step, batch in enumerate(self.train_dloader):
                self.log(self.train_step(batch, log_step=step == 0), key="train-update")
            self.epoch = epoch
            self.save_checkpoint()
            self.write_latest_policy()

    def save_checkpoint(self):
        directory = os.path.join(self.ckpt_dir, "training_states", f"{self.run_name}_epoch_{self.epoch}")
        self.accelerator.save_state(directory, safe_serialization=False)
        if self.accelerator.is_main_process:
            torch.save(self.policy.state_dict(), os.path.join(self.ckpt_dir, "policy_weights", f"policy_epoch_{self.epoch}.pt"))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("directory")
    parser.add_argument("epochs", type=int)
    parser.add_argument("--ckpt", type=int)
    args = parser.parse_args()
    bindings = {
        "RelayExperiment.swap_every": 2, "RelayExperiment.log_interval": 1, "amago.agent.Multigammas.discrete": [0.9],
        "EpsilonGreedy.steps_anneal": 100,
    }  # fmt: skip
    traj_encoder = cli_utils.switch_traj_encoder(bindings, arch="rnn", memory_size=16, layers=1)
    tstep_encoder = cli_utils.switch_tstep_encoder(bindings, arch="ff", d_hidden=16, d_output=8, n_layers=1)
    agent = cli_utils.switch_agent(bindings, agent="multitask", num_critics=2)
    cli_utils.use_config(bindings, [])
    e = RelayExperiment(
        run_name="relay", ckpt_base_dir=args.directory, max_seq_len=6, dataset=DiskTrajDataset(args.directory, "relay", 500),
        tstep_encoder_type=tstep_encoder, traj_encoder_type=traj_encoder, agent_type=agent, make_train_env=make_env, make_val_env=make_env,
        parallel_actors=3, env_mode="sync", verbose=False, val_timesteps_per_epoch=12, train_timesteps_per_epoch=12,
        train_batches_per_epoch=4, batch_size=4, epochs=args.epochs, val_interval=1, ckpt_interval=1, teams=4,
    )  # fmt: skip
    e.start()
    if args.ckpt is not None:
        e.load_checkpoint(args.ckpt)
    began = e.epoch, e.grad_update_counter
    weights = sum(float(p.detach().double().abs().sum()) for p in e.policy.parameters())
    e.learn()
    told = {
        "began": began, "weights at start": weights, "weights": sum(float(p.detach().double().abs().sum()) for p in e.policy.parameters()),
        "ended": (e.epoch, e.grad_update_counter), "teams": e.teams, "swaps": e.swaps, "DEVICE": str(e.DEVICE),
        "memory": list(e.hidden_state.shape), "files": len(e.dataset.all_filenames),
        "moments": float(sum(s["exp_avg"].double().abs().sum() for s in e.optimizer.state_dict()["state"].values())),
        "test": e.evaluate_test([make_env] * 3, timesteps=6)["Number of Rollouts"],
    }  # fmt: skip
    e.close()
    print(json.dumps(told))


if __name__ == "__main__":
    main()
