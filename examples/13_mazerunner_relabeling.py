"""MazeRunner: reach goals in unknown mazes, with hindsight relabeling of goals that were missed (arXiv:2310.09971).

python examples/13_mazerunner_relabeling.py --relabel some --run_name maze --buffer_dir runs
"""

from argparse import ArgumentParser, Namespace

from amago import cli_utils
from amago.envs import AMAGOEnv
from amago.envs.builtin.mazerunner import MazeRunner
from amago.experiment import Experiment
from amago.loading import DiskTrajDataset
from amago.relabeling import STRATEGIES, GoalSequenceRelabeler


def add_cli(parser: ArgumentParser) -> None:
    parser.add_argument("--maze_size", type=int, default=7, help="width and height of the maze, walls included; odd")
    parser.add_argument("--min_goals", type=int, default=2, help="goals of a rollout, at least")
    parser.add_argument("--max_goals", type=int, default=2, help="goals of a rollout, at most")
    parser.add_argument("--goals", type=int, default=None, help="goals of a rollout, instead of --min_goals and --max_goals")
    parser.add_argument("--time_limit", type=int, default=None, help="steps of a rollout; None: twice the cells of the maze")
    parser.add_argument(
        "--randomize_actions", "--randomized_actions", action="store_true", help="permute the actions in each rollout"
    )
    parser.add_argument("--loop_chance", type=float, default=0.0, help="probability of each door that closes a loop")
    parser.add_argument(
        "--relabel", default="some", choices=STRATEGIES, help="how many missed goals to replace by positions that were visited"
    )
    parser.set_defaults(
        parallel_actors=64, timesteps_per_epoch=None, grads_per_epoch=50, epochs=200, memory_size=64, memory_layers=2,
        learning_rate=5e-4,
    )  # fmt: skip


def make_experiment(args: Namespace) -> Experiment:
    name = f"maze_runner_{args.maze_size}x{args.maze_size}"

    def make_env() -> AMAGOEnv:
        maze = MazeRunner(
            args.maze_size, args.goals or args.min_goals, args.goals or args.max_goals, args.time_limit, randomize_actions=args.randomize_actions,
            loop_chance=args.loop_chance,
        )  # fmt: skip
        return AMAGOEnv(maze, env_name=name)

    horizon = make_env().env.horizon
    max_seq_len = args.max_seq_len or horizon
    args.timesteps_per_epoch = args.timesteps_per_epoch or horizon
    config: dict = {}
    tstep = cli_utils.switch_tstep_encoder(config, "goal", n_layers=1, d_hidden=128, d_output=64)
    traj = cli_utils.switch_traj_encoder(config, args.traj_encoder, memory_size=args.memory_size, layers=args.memory_layers)
    agent = cli_utils.switch_agent(config, args.agent_type)
    explore = cli_utils.switch_exploration(config, "bilevel", rollout_horizon=horizon)
    cli_utils.use_config(config, ["zoo/mazerunner", *args.configs])
    relabeler = GoalSequenceRelabeler(args.relabel, goal_key="goals", achieved_key="achieved")
    return cli_utils.create_experiment_from_cli(
        args, make_env, make_env, max_seq_len=max_seq_len, val_timesteps_per_epoch=2 * horizon + 1, tstep_encoder_type=tstep,
        traj_encoder_type=traj, agent_type=agent, exploration_wrapper_type=explore, group_name=f"{name}_relabel_{args.relabel}",
        dataset=DiskTrajDataset(args.buffer_dir, args.run_name, args.dset_max_size, relabeler=relabeler),
        padded_sampling="both",
    )  # fmt: skip


if __name__ == "__main__":
    cli_utils.main(__doc__, add_cli, make_experiment)
