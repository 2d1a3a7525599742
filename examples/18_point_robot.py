"""PointRobot: find a hidden goal from rewards in the first attempt, go straight to it in the next (meta-RL, continuous actions).

python examples/18_point_robot.py --traj_encoder gru --run_name point --buffer_dir runs

With --on_device the robots are tensors on the agent's device, and --parallel_actors may be thousands.
"""

from argparse import ArgumentParser, Namespace

import torch
from support.device_point_robot import DevicePointRobot
from support.point_robot import GOAL_REGIONS, REWARDS, PointRobot

from amago import cli_utils
from amago.envs import AMAGOEnv
from amago.experiment import Experiment


def add_cli(parser: ArgumentParser) -> None:
    parser.add_argument("--k_episodes", type=int, default=3, help="attempts at each goal")
    parser.add_argument("--episode_length", type=int, default=8, help="steps of an attempt")
    parser.add_argument("--goal_region", default="semicircle", choices=GOAL_REGIONS, help="distribution of goals")
    parser.add_argument("--step_size", type=float, default=0.25, help="longest move along each axis")
    parser.add_argument(
        "--rewards", default="final", choices=REWARDS, help="rewards in every step, or only in the last step of an attempt"
    )
    parser.add_argument("--on_device", action="store_true", help="all robots in one batch of tensors, on a GPU if there is one")
    parser.set_defaults(
        parallel_actors=64, timesteps_per_epoch=None, grads_per_epoch=50, epochs=120, batch_size=32, memory_size=64,
        memory_layers=2, learning_rate=5e-4,
    )  # fmt: skip


def make_experiment(args: Namespace) -> Experiment:
    name = f"point_robot_k{args.k_episodes}_{args.goal_region}"

    options = args.k_episodes, args.episode_length, args.goal_region, args.step_size, args.rewards

    def on_device() -> AMAGOEnv:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        robots = DevicePointRobot(args.parallel_actors, *options, device=device)
        return AMAGOEnv(robots, env_name=name, batched_envs=args.parallel_actors)

    def on_host() -> AMAGOEnv:  # apart, so that workers import no torch
        return AMAGOEnv(PointRobot(*options), env_name=name)

    make_env = on_device if args.on_device else on_host
    horizon = PointRobot(*options).horizon
    max_seq_len = args.max_seq_len or horizon
    args.timesteps_per_epoch = args.timesteps_per_epoch or horizon
    config: dict = {}
    tstep = cli_utils.switch_tstep_encoder(config, "ff", n_layers=1, d_hidden=128, d_output=64)
    traj = cli_utils.switch_traj_encoder(config, args.traj_encoder, memory_size=args.memory_size, layers=args.memory_layers)
    agent = cli_utils.switch_agent(config, args.agent_type)
    explore = cli_utils.switch_exploration(config, "bilevel", rollout_horizon=horizon)
    cli_utils.use_config(config, ["zoo/point_robot", *args.configs])
    return cli_utils.create_experiment_from_cli(
        args, make_env, make_env, max_seq_len=max_seq_len, val_timesteps_per_epoch=2 * horizon + 1, tstep_encoder_type=tstep,
        traj_encoder_type=traj, agent_type=agent, exploration_wrapper_type=explore, group_name=name,
        padded_sampling="both", **({"env_mode": "already_vectorized"} if args.on_device else {}),
    )  # fmt: skip


if __name__ == "__main__":
    cli_utils.main(__doc__, add_cli, make_experiment)
