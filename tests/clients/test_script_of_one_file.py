"""A client that is one script: its classes are those of ``__main__``, configured by gin, and act in processes of their own."""

import subprocess
import sys

import tiny

SCRIPT = '''
from argparse import ArgumentParser

import gin
import gymnasium as gym
import numpy as np

import amago
import tiny
from amago import cli_utils
from amago.envs import AMAGOEnv
from amago.envs.exploration import ExplorationWrapper
from amago.nets.actor_critic import Actor


@gin.configurable
class Uniform(ExplorationWrapper):
    """Now and then any action."""

    def __init__(self, amago_env, rate=0.0):
        super().__init__(amago_env)
        assert rate == 0.25, rate
        self.rate = rate

    def reset(self, *args, **kwargs):
        out = super().reset(*args, **kwargs)
        self.rng = np.random.default_rng()
        return out

    def add_exploration_noise(self, action, local_step):
        other = self.rng.integers(0, self.action_space.n, size=action.shape)
        return np.where(self.rng.random(action.shape) < self.rate, other, action).astype(np.uint8)


@gin.configurable
class Short(AMAGOEnv):
    def __init__(self, length=3):
        super().__init__(gym.make("CartPole-v1", max_episode_steps=length), env_name=f"short_{length}")


@gin.configurable
class Head(Actor):
    """Stays in this process; the workers are told of its binding all the same."""


@gin.configurable
def make_short(suffix="none"):
    assert suffix == "given"
    return Short()


if __name__ == "__main__":
    parser = ArgumentParser()
    cli_utils.add_common_cli(parser)
    parser.add_argument("--max_seq_len", type=int, default=8)
    args = parser.parse_args()
    config = {"Uniform.rate": 0.25, "Short.length": 7, "make_short.suffix": "given", "MultiTaskAgent.num_critics": 2}
    config |= {"MultiTaskAgent.actor_type": Head} | tiny.SMALL
    traj_encoder_type = cli_utils.switch_traj_encoder(config, arch=args.traj_encoder, memory_size=args.memory_size, layers=1)
    agent_type = cli_utils.switch_agent(config, args.agent_type, reward_multiplier=1.0)
    tstep_encoder_type = cli_utils.switch_tstep_encoder(config, arch="ff", n_layers=1, d_hidden=16, d_output=16)
    cli_utils.use_config(config, args.configs)
    experiment = cli_utils.create_experiment_from_cli(
        args, make_train_env=make_short, make_val_env=lambda: Short(), max_seq_len=args.max_seq_len, group_name="script",
        run_name=args.run_name, tstep_encoder_type=tstep_encoder_type, traj_encoder_type=traj_encoder_type, agent_type=agent_type,
        exploration_wrapper_type=Uniform, val_timesteps_per_epoch=10,
    )
    experiment = cli_utils.switch_async_mode(experiment, args.mode)
    experiment.start()
    experiment.learn()
    print(sorted(experiment.evaluate_test(Short, timesteps=20)))
    experiment.delete_buffer_from_disk()
    experiment.close()
'''


def test_its_classes_reach_the_workers_with_their_settings(tmp_path):
    (tmp_path / "client.py").write_text(SCRIPT)
    words = (
        f"--run_name run --buffer_dir {tmp_path} --no_log --parallel_actors 2 --env_mode async --epochs 1 --timesteps_per_epoch 12 "
        "--batches_per_epoch 2 --batch_size 2 --memory_size 16 --traj_encoder transformer --agent_type multitask --dloader_workers 0"
    )
    done = subprocess.run(
        [sys.executable, "client.py", *words.split()], cwd=tmp_path, capture_output=True, text=True, env=tiny.environment(),
        timeout=200,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert "'Average Total Return in short_7'" in done.stdout
