"""BabyAI: k attempts at a mission given as a sentence, in many levels (Chevalier-Boisvert et al. 2018, arXiv 1810.08272).

python examples/10_babyai.py --levels GoToRedBallGrey --k_episodes 2 --run_name babyai --buffer_dir runs

Needs `pip install 'amago[minigrid]'`. All levels: `--levels all --episode_length 200 --memory_size 256 --memory_layers 3`.
"""

from argparse import ArgumentParser, Namespace

from amago import cli_utils
from amago.envs import AMAGOEnv
from amago.envs.builtin.babyai import (
    OBS_KINDS,
    TEST_LEVELS,
    TRAIN_LEVELS,
    MultitaskMetaBabyAI,
    level_names,
    longest_mission,
)
from amago.experiment import Experiment
from amago.nets.cnn import GridworldCNN, NatureishCNN
from amago.nets.goal_embedders import TokenGoalEmb
from amago.nets.tstep_encoders import ImageGoalTstepEncoder


def add_cli(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--levels", nargs="+", default=["GoToRedBallGrey"], metavar="LEVEL",
        help="training levels or families (goto-local, goto, open, pickup, putnext, unlock, synth); all: all except test levels",
    )  # fmt: skip
    parser.add_argument(
        "--test_levels", nargs="+", default=None, metavar="LEVEL", help="test levels; None: --levels with other seeds"
    )
    parser.add_argument("--k_episodes", type=int, default=2, help="attempts at a mission in a rollout")
    parser.add_argument("--episode_length", type=int, default=64, help="steps of an attempt, at most")
    parser.add_argument(
        "--obs_kind", default="partial-grid", choices=OBS_KINDS, help="visible part of the grid, as bits or pixels"
    )
    parser.add_argument("--grid_size", type=int, default=22, help="width and height in cells of full views; at most 22")
    parser.add_argument("--tile_size", type=int, default=8, help="width of a cell in pixels")
    parser.add_argument("--num_seeds", "--train_seeds", type=int, default=1_000_000, help="training seeds of each level")
    parser.set_defaults(
        parallel_actors=64, timesteps_per_epoch=None, grads_per_epoch=50, epochs=200, memory_size=64, memory_layers=2,
        learning_rate=5e-4,
    )  # fmt: skip


def make_experiment(args: Namespace) -> Experiment:
    every = args.levels == ["all"]
    levels = {"train": TRAIN_LEVELS if every else level_names(args.levels)}
    levels["test"] = level_names(args.test_levels) if args.test_levels else TEST_LEVELS if every else levels["train"]
    words = longest_mission({*levels["train"], *levels["test"]})

    def maker(split: str):
        def make_env() -> AMAGOEnv:
            levels_env = MultitaskMetaBabyAI(
                levels[split], split, args.k_episodes, args.obs_kind, args.episode_length, mission_length=words,
                grid_size=args.grid_size, tile_size=args.tile_size, num_seeds=args.num_seeds,
            )  # fmt: skip
            return AMAGOEnv(levels_env)

        return make_env

    horizon = args.k_episodes * args.episode_length
    max_seq_len = args.max_seq_len or min(args.episode_length, 256)
    args.timesteps_per_epoch = args.timesteps_per_epoch or horizon
    config: dict = {}
    sizes = {"goal_key": "mission", "goal_emb_type": TokenGoalEmb, "n_layers": 1, "d_hidden": 128, "d_output": 64}
    sizes |= {"normalize_inputs": False}  # all observations are in [0, 1]
    if args.obs_kind == "partial-grid":
        tstep = cli_utils.switch_tstep_encoder(config, "goal", **sizes)
    else:
        cnn = GridworldCNN if args.obs_kind == "full-grid" else NatureishCNN
        tstep = cli_utils.switch_tstep_encoder(config, ImageGoalTstepEncoder, cnn_type=cnn, **sizes)
    traj = cli_utils.switch_traj_encoder(config, args.traj_encoder, memory_size=args.memory_size, layers=args.memory_layers)
    agent = cli_utils.switch_agent(config, args.agent_type)
    anneal = max(1, args.epochs * args.timesteps_per_epoch // 3)
    explore = cli_utils.switch_exploration(config, "bilevel", rollout_horizon=horizon, steps_anneal=anneal)
    cli_utils.use_config(config, ["zoo/babyai", *args.configs])
    return cli_utils.create_experiment_from_cli(
        args, maker("train"), maker("test"), max_seq_len=max_seq_len, val_timesteps_per_epoch=horizon + 1,
        tstep_encoder_type=tstep, traj_encoder_type=traj, agent_type=agent, exploration_wrapper_type=explore,
        padded_sampling="both", group_name=f"babyai_k{args.k_episodes}_{args.obs_kind}",
    )  # fmt: skip


def test(experiment: Experiment) -> None:
    steps = 3 * (experiment.val_timesteps_per_epoch - 1) + 1
    cli_utils.evaluate_after_training(experiment, steps, title="after training, in new worlds")


if __name__ == "__main__":
    cli_utils.main(__doc__, add_cli, make_experiment, test)
