"""Console games: levels of one game, or games of several consoles, in emulators (stable-retro).

python examples/17_retro_arcade.py --levels Airstriker-Genesis:Level1 --run_name retro --buffer_dir runs

Needs `pip install 'amago[retro]'`. It includes Airstriker; `python -m stable_retro.import DIRECTORY` adds ROMs that you own. The image
shows which game and level it is (the colour of the border depends on the game), so short sequences are enough.
"""

from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Sequence

from amago import cli_utils
from amago.envs import AMAGOEnv
from amago.envs.builtin.ale_retro import RetroArcade, buttons_of, retro_levels
from amago.experiment import Experiment

PIECE = 256  # steps of a rollout that are saved together


def add_cli(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--levels",
        nargs="+",
        default=["Airstriker-Genesis-v0"],
        metavar="LEVEL",
        help="training levels: GAME for its first level, GAME:LEVEL, or GAME:* for all",
    )
    parser.add_argument("--test_levels", nargs="+", default=None, metavar="LEVEL", help="test levels; None: --levels")
    parser.add_argument("--directory", default=None, help="directory of your own games, in the layout of stable-retro")
    cli_utils.add_pixel_cli(parser)
    parser.add_argument("--resolution", type=int, default=84, help="height and width of the images, border included")
    parser.add_argument("--frame_skip", type=int, default=4, help="frames for which an action is repeated")
    parser.add_argument("--sticky_actions", type=float, default=0.25, help="probability that the buttons change one frame late")
    parser.add_argument("--time_limit", type=cli_utils.whole_number, default=4500, help="steps of a rollout")
    parser.set_defaults(
        parallel_actors=8, timesteps_per_epoch=1000, grads_per_epoch=300, epochs=1000, memory_size=256, memory_layers=2,
        max_seq_len=32, batch_size=32, dset_max_size=2000, learning_rate=1e-4,
    )  # fmt: skip


def make_experiment(args: Namespace) -> Experiment:
    tested = args.test_levels or args.levels
    known = retro_levels(args.levels, args.directory) + retro_levels(tested, args.directory)

    def maker(levels: Sequence[str]) -> Callable[[], AMAGOEnv]:
        def make_env() -> AMAGOEnv:
            arcade = RetroArcade(
                levels, buttons_of(known), (args.resolution, args.resolution), frame_skip=args.frame_skip,
                sticky_actions=args.sticky_actions, time_limit=args.time_limit, directory=args.directory,
            )  # fmt: skip
            return AMAGOEnv(arcade)

        return make_env

    config: dict = {}
    tstep = cli_utils.switch_tstep_encoder(config, "cnn", cnn_type=args.cnn, drqv2_aug=not args.no_augmentation)
    traj = cli_utils.switch_traj_encoder(config, args.traj_encoder, memory_size=args.memory_size, layers=args.memory_layers)
    agent = cli_utils.switch_agent(config, args.agent_type)
    anneal = max(1, args.epochs * args.timesteps_per_epoch // 4)
    explore = cli_utils.switch_exploration(config, "egreedy", steps_anneal=anneal)
    cli_utils.use_config(config, ["zoo/retro", *args.configs])
    return cli_utils.create_experiment_from_cli(
        args, maker(args.levels), maker(tested), max_seq_len=32, val_timesteps_per_epoch=min(args.time_limit, 2000) + 1,
        tstep_encoder_type=tstep, traj_encoder_type=traj, agent_type=agent, exploration_wrapper_type=explore,
        traj_save_len=max(PIECE, args.max_seq_len), padded_sampling="both", group_name="retro",
    )  # fmt: skip


def test(experiment: Experiment) -> None:
    cli_utils.evaluate_after_training(experiment, 2 * (experiment.val_timesteps_per_epoch - 1) + 1)


if __name__ == "__main__":
    cli_utils.main(__doc__, add_cli, make_experiment, test)
