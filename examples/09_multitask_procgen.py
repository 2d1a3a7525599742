"""Procgen: many games, two attempts at each level, tested on new levels (Cobbe et al. 2019, arXiv 1912.01588).

python examples/09_multitask_procgen.py --games maze heist coinrun --agent_type multitask --run_name procgen --buffer_dir runs

Needs `pip install 'amago[procgen]'` and Qt 5 (Debian: libqt5core5a, libqt5gui5). The second attempt can use observations of the
first if the context is long enough: on a GPU, set --max_seq_len to the length of a rollout. A step takes 12 kB on disk.
"""

from argparse import ArgumentParser, Namespace
from collections.abc import Callable

from amago import cli_utils
from amago.envs import AMAGOEnv
from amago.envs.builtin.procgen_envs import MODES, TwoAttemptMTProcgen
from amago.experiment import Experiment


def add_cli(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--games", nargs="+", default=None, metavar="GAME", help="names of games, such as coinrun; None: all 16"
    )
    parser.add_argument("--distribution", default="easy", choices=MODES, help="size of the levels, and of the visible part")
    parser.add_argument(
        "--num_levels", "--train_seeds", type=cli_utils.whole_number, default=10_000, help="training levels of each game"
    )
    parser.add_argument("--k_episodes", type=int, default=2, help="attempts at a level")
    parser.add_argument("--time_limit", type=int, default=500, help="steps of an attempt")
    cli_utils.add_pixel_cli(parser)
    parser.set_defaults(
        parallel_actors=24, timesteps_per_epoch=None, grads_per_epoch=500, epochs=1000, memory_size=256, memory_layers=3,
        batch_size=24, dset_max_size=2000, learning_rate=1e-4,
    )  # fmt: skip


def make_experiment(args: Namespace) -> Experiment:
    def maker(split: str) -> Callable[[], AMAGOEnv]:
        def make_env() -> AMAGOEnv:
            return AMAGOEnv(
                TwoAttemptMTProcgen(args.games, args.distribution, split, args.num_levels, args.k_episodes, args.time_limit)
            )

        return make_env

    horizon = args.k_episodes * args.time_limit
    max_seq_len = args.max_seq_len or min(horizon, 256)
    args.timesteps_per_epoch = args.timesteps_per_epoch or horizon
    config: dict = {}
    tstep = cli_utils.switch_tstep_encoder(config, "cnn", cnn_type=args.cnn, drqv2_aug=not args.no_augmentation)
    traj = cli_utils.switch_traj_encoder(config, args.traj_encoder, memory_size=args.memory_size, layers=args.memory_layers)
    agent = cli_utils.switch_agent(config, args.agent_type)
    explore = cli_utils.switch_exploration(config, "bilevel", rollout_horizon=horizon)
    cli_utils.use_config(config, ["zoo/procgen", *args.configs])
    return cli_utils.create_experiment_from_cli(
        args, maker("train"), maker("test"), max_seq_len=max_seq_len, val_timesteps_per_epoch=horizon + 1,
        tstep_encoder_type=tstep, traj_encoder_type=traj, agent_type=agent, exploration_wrapper_type=explore,
        padded_sampling="both", group_name=f"procgen_{args.distribution}",
    )  # fmt: skip


def test(experiment: Experiment) -> None:
    steps = 3 * (experiment.val_timesteps_per_epoch - 1) + 1
    cli_utils.evaluate_after_training(experiment, steps, title="after training, on new levels")


if __name__ == "__main__":
    cli_utils.main(__doc__, add_cli, make_experiment, test)
