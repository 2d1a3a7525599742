"""Meta-Frozen-Lake: k attempts at a lake whose holes are invisible. An agent with memory can avoid a hole after falling in once.

python examples/00_meta_frozen_lake.py --run_name lake --buffer_dir runs
"""

from argparse import SUPPRESS, ArgumentParser, Namespace

from amago import cli_utils
from amago.envs import AMAGOEnv
from amago.envs.builtin.toy_gym import MetaFrozenLake
from amago.experiment import Experiment


def add_cli(parser: ArgumentParser) -> None:
    parser.add_argument("--k_episodes", type=int, default=10, help="attempts at each lake")
    parser.add_argument("--lake_size", type=int, default=5, help="width and height of the lake")
    parser.add_argument("--hard_mode", action="store_true", help="shuffled actions, noisy positions, cracking ice")
    parser.add_argument(
        "--recover_mode",
        action="store_true",
        help="a hole costs 0.1 and moves the agent back one step, instead of ending the attempt",
    )
    parser.add_argument("--slip_chance", type=float, default=0.0, help="probability that a move has no effect")
    parser.add_argument(
        "--max_episode_steps", type=int, default=None, help="steps of an attempt; None: by the size of the lake"
    )
    parser.add_argument("--hide_k_progress", action="store_true", help="do not observe the number of the attempt")
    parser.add_argument(
        "--seq_model", dest="traj_encoder", default=SUPPRESS, choices=sorted(cli_utils.TRAJ_ENCODERS), help="--traj_encoder"
    )
    parser.set_defaults(
        parallel_actors=24, timesteps_per_epoch=500, grads_per_epoch=300, epochs=60, memory_size=64, memory_layers=2
    )


def make_experiment(args: Namespace) -> Experiment:
    def make_env() -> AMAGOEnv:
        lake = MetaFrozenLake(
            size=args.lake_size, k_episodes=args.k_episodes, hard_mode=args.hard_mode, recover_mode=args.recover_mode,
            slip_chance=args.slip_chance, max_episode_steps=args.max_episode_steps, show_k_progress=not args.hide_k_progress,
        )  # fmt: skip
        return AMAGOEnv(lake, env_name=f"meta_frozen_lake_k{args.k_episodes}_{args.lake_size}x{args.lake_size}")

    horizon = make_env().env.unwrapped.horizon
    config: dict = {}
    tstep = cli_utils.switch_tstep_encoder(config, "ff", n_layers=1, d_hidden=128, d_output=64)
    traj = cli_utils.switch_traj_encoder(config, args.traj_encoder, memory_size=args.memory_size, layers=args.memory_layers)
    agent = cli_utils.switch_agent(config, args.agent_type, tau=0.005)
    config |= {"Actor.d_hidden": 128, "NCritics.d_hidden": 128}
    explore = cli_utils.switch_exploration(config, "bilevel", rollout_horizon=horizon)
    cli_utils.use_config(config, args.configs)
    return cli_utils.create_experiment_from_cli(
        args, make_env, make_env, max_seq_len=horizon, val_timesteps_per_epoch=2 * horizon + 1, tstep_encoder_type=tstep,
        traj_encoder_type=traj, agent_type=agent, exploration_wrapper_type=explore,
        group_name=f"meta_frozen_lake_{args.lake_size}x{args.lake_size}",
    )  # fmt: skip


if __name__ == "__main__":
    cli_utils.main(__doc__, add_cli, make_experiment)
