"""Atari: one game, or many in one agent, with unclipped rewards (multi-task RL; Grigsby et al. 2024, arXiv 2411.11188).

python examples/08_ale.py --games Pong Boxing Breakout --agent_type multitask --cnn impala --run_name ale --buffer_dir runs

Needs `pip install 'amago[atari]'`. Each actor plays one game: with 30 actors and 10 games, three play each. A step of 84 x 84 pixels
in colour takes 21 kB on disk, and `--dset_max_size` counts pieces of 256 steps.
"""

from argparse import ArgumentParser, Namespace
from collections.abc import Callable

from amago import cli_utils
from amago.envs import AMAGOEnv
from amago.envs.builtin.ale_retro import ACTION_SPACES, AtariGame
from amago.experiment import Experiment

PIECE = 256  # steps of a rollout that are saved together; a game takes up to 27,000


def add_cli(parser: ArgumentParser) -> None:
    parser.add_argument("--games", nargs="+", default=["Pong"], metavar="GAME", help="names of games, such as MsPacman")
    cli_utils.add_pixel_cli(parser)
    parser.add_argument(
        "--action_space",
        default="discrete",
        choices=ACTION_SPACES,
        help="the 18 actions, the actions of the game, five bits, or joystick and button as numbers",
    )
    parser.add_argument("--resolution", type=int, default=84, help="height and width of the images")
    parser.add_argument("--grayscale", action="store_true", help="one channel instead of three")
    parser.add_argument(
        "--sticky_actions", type=float, default=0.25, help="probability that a frame repeats the previous action"
    )
    parser.add_argument("--life_loss", action="store_true", help="training rollouts end when a life is lost")
    parser.add_argument("--time_limit", type=cli_utils.whole_number, default=27_000, help="steps of a game")
    parser.set_defaults(
        parallel_actors=24, timesteps_per_epoch=1000, grads_per_epoch=500, epochs=1000, memory_size=256, memory_layers=2,
        max_seq_len=32, batch_size=32, dset_max_size=2000, learning_rate=1e-4,
    )  # fmt: skip


def make_experiment(args: Namespace) -> Experiment:
    if args.parallel_actors < len(args.games):
        raise ValueError(
            f"parallel_actors must be at least {len(args.games)}, one for each of the games, got {args.parallel_actors}"
        )

    def maker(game: str, life_loss: bool) -> Callable[[], AMAGOEnv]:
        def make_env() -> AMAGOEnv:
            env = AtariGame(
                game, args.action_space, sticky_action_prob=args.sticky_actions, grayscale=args.grayscale,
                resolution=(args.resolution, args.resolution), terminal_on_life_loss=life_loss, time_limit=args.time_limit,
            )  # fmt: skip
            return AMAGOEnv(env)

        return make_env

    played = [args.games[i % len(args.games)] for i in range(args.parallel_actors)]
    config: dict = {}
    tstep = cli_utils.switch_tstep_encoder(config, "cnn", cnn_type=args.cnn, drqv2_aug=not args.no_augmentation)
    traj = cli_utils.switch_traj_encoder(config, args.traj_encoder, memory_size=args.memory_size, layers=args.memory_layers)
    agent = cli_utils.switch_agent(config, args.agent_type)
    anneal = max(1, args.epochs * args.timesteps_per_epoch // 4)
    explore = cli_utils.switch_exploration(config, "egreedy", steps_anneal=anneal)
    cli_utils.use_config(config, ["zoo/ale", *args.configs])
    return cli_utils.create_experiment_from_cli(
        args, [maker(game, args.life_loss) for game in played], [maker(game, False) for game in played], max_seq_len=32,
        val_timesteps_per_epoch=min(args.time_limit, 5000) + 1, tstep_encoder_type=tstep, traj_encoder_type=traj,
        agent_type=agent, exploration_wrapper_type=explore, traj_save_len=max(PIECE, args.max_seq_len), padded_sampling="both",
        group_name="atari_" + "_".join(args.games),
    )  # fmt: skip


def test(experiment: Experiment) -> None:
    cli_utils.evaluate_after_training(experiment, 2 * (experiment.val_timesteps_per_epoch - 1) + 1)


if __name__ == "__main__":
    cli_utils.main(__doc__, add_cli, make_experiment, test)
