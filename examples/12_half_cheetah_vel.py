"""HalfCheetahVel: run at a hidden target velocity, inferred from rewards (meta-RL), and tested on other velocities.

python examples/12_half_cheetah_vel.py --run_name cheetah --buffer_dir runs

Needs `pip install 'amago[mujoco]'`.
"""

from argparse import SUPPRESS, ArgumentParser, Namespace
from functools import partial

from amago import cli_utils
from amago.envs import AMAGOEnv
from amago.envs.builtin.half_cheetah_v4_vel import HalfCheetahVel
from amago.experiment import Experiment


class MakeCheetah:
    """A picklable function that makes an environment with target velocities in a range."""

    def __init__(self, args: Namespace, name: str) -> None:
        low, high = getattr(args, f"{name}_range")
        if name == "train":
            low = low if args.task_min_velocity is None else args.task_min_velocity
            high = high if args.task_max_velocity is None else args.task_max_velocity
        self.target_range, self.name = (low, high), name
        self.k_episodes, self.episode_length = args.k_episodes, args.episode_length

    def __call__(self) -> AMAGOEnv:
        cheetah = HalfCheetahVel(self.target_range, self.k_episodes, self.episode_length)
        return AMAGOEnv(cheetah, env_name=f"half_cheetah_vel_{self.name}")


def add_cli(parser: ArgumentParser) -> None:
    two = {"type": float, "nargs": 2, "metavar": ("LOW", "HIGH")}
    parser.add_argument("--train_range", default=(0.0, 2.5), help="target velocities in training, in m/s", **two)
    parser.add_argument("--test_range", default=(2.5, 3.0), help="target velocities of the test after training", **two)
    parser.add_argument("--task_min_velocity", type=float, default=None, help="LOW of --train_range")
    parser.add_argument("--task_max_velocity", type=float, default=None, help="HIGH of --train_range")
    parser.add_argument("--policy_seq_len", dest="max_seq_len", type=int, default=SUPPRESS, help="the same as --max_seq_len")
    parser.add_argument("--k_episodes", type=int, default=1, help="attempts at each target")
    parser.add_argument("--episode_length", type=int, default=200, help="steps of an attempt")
    parser.set_defaults(
        parallel_actors=32, timesteps_per_epoch=None, grads_per_epoch=100, epochs=200, batch_size=32, memory_size=128,
        memory_layers=2, learning_rate=3e-4,
    )  # fmt: skip


def make_experiment(args: Namespace) -> Experiment:
    make_env = MakeCheetah(args, "train")
    for make in (make_env, MakeCheetah(args, "test")):
        make().close()  # raises an error for wrong ranges before training
    horizon = args.k_episodes * args.episode_length
    max_seq_len = args.max_seq_len or min(horizon, 64)
    args.timesteps_per_epoch = args.timesteps_per_epoch or horizon
    config: dict = {}
    tstep = cli_utils.switch_tstep_encoder(config, "ff", n_layers=2, d_hidden=128, d_output=128)
    traj = cli_utils.switch_traj_encoder(config, args.traj_encoder, memory_size=args.memory_size, layers=args.memory_layers)
    agent = cli_utils.switch_agent(config, args.agent_type)
    explore = cli_utils.switch_exploration(config, "egreedy")
    cli_utils.use_config(config, ["zoo/half_cheetah_vel", *args.configs])
    return cli_utils.create_experiment_from_cli(
        args, make_env, make_env, max_seq_len=max_seq_len, val_timesteps_per_epoch=horizon + 1, tstep_encoder_type=tstep,
        traj_encoder_type=traj, agent_type=agent, exploration_wrapper_type=explore, group_name="half_cheetah_vel",
        padded_sampling="both",
    )  # fmt: skip


def test(experiment: Experiment, make_test_env: MakeCheetah) -> None:
    steps = 2 * experiment.val_timesteps_per_epoch + 1
    for title, make_env in (("speeds of training", experiment.make_val_env), ("other speeds", make_test_env)):
        cli_utils.evaluate_after_training(experiment, steps, make_env, f"after training: {title}")


if __name__ == "__main__":
    args = cli_utils.parse_args(__doc__, add_cli)
    cli_utils.run_trials(args, make_experiment, partial(test, make_test_env=MakeCheetah(args, "test")))
