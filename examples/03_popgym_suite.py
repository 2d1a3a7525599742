"""POPGym: small games that need memory (Morad et al. 2023, arXiv 2303.01859), one of 48 games, or 27 together.

python examples/03_popgym_suite.py --env RepeatPreviousEasy --run_name popgym --buffer_dir runs

Needs `pip install 'amago[popgym]'`.
"""

from argparse import ArgumentParser, Namespace
from functools import partial

from amago import cli_utils
from amago.envs import AMAGOEnv
from amago.envs.builtin.popgym_envs import MultiDomainPOPGym, POPGymGame
from amago.experiment import Experiment


def add_cli(parser: ArgumentParser) -> None:
    parser.add_argument("--env", default="RepeatPreviousEasy", help="name of a game, such as AutoencodeMedium")
    parser.add_argument(
        "--multidomain",
        nargs="*",
        metavar="GAME",
        help="instead of --env: draw one of these games (none: of 27) for each rollout, which begins with an episode without rewards",
    )
    parser.add_argument(
        "--beside",
        nargs="+",
        default=[],
        metavar="GAME",
        help="games of the same spaces, such as easier ones, which other actors play; evaluations are of --env alone",
    )
    parser.add_argument("--no_timer", action="store_true", help="do not observe the elapsed time")
    parser.add_argument(
        "--flat_actions", action="store_true", help="a cell of a board is one choice, in place of its row and column"
    )
    parser.set_defaults(
        parallel_actors=64, timesteps_per_epoch=None, grads_per_epoch=50, epochs=100, memory_size=64, memory_layers=2,
        learning_rate=1e-3,
    )  # fmt: skip


def make_experiment(args: Namespace) -> Experiment:
    many = args.multidomain is not None

    if many and args.beside:
        raise ValueError("--multidomain draws a game for each rollout: leave out --beside")

    def make_env(game: str = args.env) -> AMAGOEnv:
        if many:
            return AMAGOEnv(MultiDomainPOPGym(args.multidomain or None))
        return AMAGOEnv(POPGymGame(game, timer=not args.no_timer, flat_actions=args.flat_actions))

    games = [args.env, *args.beside]
    make_train_env = [partial(make_env, games[i % len(games)]) for i in range(args.parallel_actors)]
    horizon = make_env().horizon
    assert horizon is not None
    max_seq_len = args.max_seq_len or min(horizon, 512)
    args.timesteps_per_epoch = args.timesteps_per_epoch or max(100, horizon)
    config: dict = {}
    width = 128 if many else 64
    tstep = cli_utils.switch_tstep_encoder(config, "ff", n_layers=1, d_hidden=width, d_output=64)
    traj = cli_utils.switch_traj_encoder(config, args.traj_encoder, memory_size=args.memory_size, layers=args.memory_layers)
    agent = cli_utils.switch_agent(config, args.agent_type, tau=0.02, gamma=0.97)
    config |= {"Actor.d_hidden": 128, "NCritics.d_hidden": 128, "TformerTrajEncoder.n_heads": 4}
    config |= {"Multigammas.discrete": [0.7, 0.9], "Multigammas.continuous": [0.9]}
    explore = cli_utils.switch_exploration(config, "bilevel", rollout_horizon=horizon)
    cli_utils.use_config(config, args.configs)
    return cli_utils.create_experiment_from_cli(
        args, make_train_env, make_env, max_seq_len=max_seq_len, val_timesteps_per_epoch=2 * horizon + 1,
        tstep_encoder_type=tstep, traj_encoder_type=traj, agent_type=agent, exploration_wrapper_type=explore,
        padded_sampling="both", group_name="popgym_multidomain" if many else f"popgym_{args.env}",
    )  # fmt: skip


if __name__ == "__main__":
    cli_utils.main(__doc__, add_cli, make_experiment)
