"""Registered Gymnasium environments, with or without memory.

python examples/01_basic_gym.py --env CartPole-v1 --traj_encoder ff --max_seq_len 32 --run_name cartpole --buffer_dir runs

Others: LunarLander-v3 (`pip install 'amago[classic]'`, `--configs zoo/lunarlander`), HalfCheetah-v5 (`'amago[mujoco]'`, `--configs
zoo/halfcheetah`), and all of DeepMind Control, such as dm_control/cartpole-balance-v0 (`'amago[dmc]'`).
"""

from argparse import ArgumentParser, Namespace

from support.dmc import PREFIX, DeepMindControl

from amago import cli_utils
from amago.cli.gym_env import GymEnv
from amago.envs import AMAGOEnv
from amago.experiment import Experiment


class DMCEnv(GymEnv):
    """A picklable function that makes an environment of DeepMind Control."""

    def __call__(self, render_mode: str | None = None) -> AMAGOEnv:
        return AMAGOEnv(DeepMindControl(self.env_id, self.max_steps, render_mode))


def add_cli(parser: ArgumentParser) -> None:
    parser.add_argument("--env", default="CartPole-v1", help="id of a registered environment, or dm_control/DOMAIN-TASK-v0")
    parser.add_argument("--horizon", type=cli_utils.whole_number, default=None, help="truncate rollouts after this many steps")
    parser.set_defaults(
        parallel_actors=8, timesteps_per_epoch=500, grads_per_epoch=250, epochs=30, memory_size=64, memory_layers=2,
        max_seq_len=32, learning_rate=5e-4,
    )  # fmt: skip


def make_experiment(args: Namespace) -> Experiment:
    make_env = (DMCEnv if args.env.startswith(PREFIX) else GymEnv)(args.env, args.horizon)
    env = make_env()
    horizon = env.horizon or 1000
    observations = env.observation_space
    env.close()

    config: dict = {}
    tstep = cli_utils.default_tstep_encoder(config, observations, n_layers=2, d_hidden=128, d_output=64)
    traj = cli_utils.switch_traj_encoder(config, args.traj_encoder, memory_size=args.memory_size, layers=args.memory_layers)
    agent = cli_utils.switch_agent(config, args.agent_type)
    explore = cli_utils.switch_exploration(config, "egreedy")
    cli_utils.use_config(config, args.configs)
    return cli_utils.create_experiment_from_cli(
        args, make_env, make_env, max_seq_len=128, val_timesteps_per_epoch=2 * horizon + 1, tstep_encoder_type=tstep,
        traj_encoder_type=traj, agent_type=agent, exploration_wrapper_type=explore, group_name=args.env,
        padded_sampling="both",  # sequences are shorter than rollouts: without padding the first and last steps are rarely sampled
    )  # fmt: skip


if __name__ == "__main__":
    cli_utils.main(__doc__, add_cli, make_experiment)
