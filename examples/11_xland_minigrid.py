"""XLand-MiniGrid: k attempts at a task with a hidden goal and hidden rules (Nikulin et al. 2023, arXiv 2312.12044).

python examples/11_xland_minigrid.py --rulesets trivial --k_shots 3 --run_name xland --buffer_dir runs

Needs `pip install 'amago[xland]'`. If jax and PyTorch share a GPU, jax allocates memory as needed (see below), not three quarters
at once; with `--env_device cpu` jax does not use the GPU.
"""

import os
import re
from argparse import ArgumentParser, Namespace

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # read when jax is imported

from amago import cli_utils
from amago.envs import AMAGOEnv
from amago.envs.builtin.xland_minigrid import XLandMiniGrid
from amago.experiment import Experiment


def add_cli(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--rulesets",
        "--benchmark",
        default="trivial",
        help="trivial, small, medium or high (or trivial-1m, ...), or an .npz file with tasks",
    )
    parser.add_argument("--num_rulesets", type=int, default=1000, help="training tasks; there are a fifth as many test tasks")
    parser.add_argument("--grid", default="XLand-MiniGrid-R1-9x9", help="name of the world: R1 to R9 rooms, 9x9 to 25x25")
    parser.add_argument(
        "--rooms", type=int, default=None, help="rooms of the world, instead of those of --grid: 1, 2, 4, 6 or 9"
    )
    parser.add_argument(
        "--grid_size", type=int, default=None, help="width of the world in cells, instead of that of --grid: 9 to 25"
    )
    parser.add_argument("--k_shots", type=int, default=3, help="attempts at a task in a rollout")
    parser.add_argument("--shot_length", type=int, default=60, help="steps of an attempt")
    parser.add_argument("--env_device", default=None, choices=("cpu", "gpu", "tpu"), help="device of jax; None: its default")
    parser.set_defaults(
        parallel_actors=64, timesteps_per_epoch=None, grads_per_epoch=50, epochs=200, memory_size=128, memory_layers=2,
        batch_size=24, learning_rate=5e-4,
    )  # fmt: skip


def grid_name(args: Namespace) -> str:
    rooms, size = re.findall(r"\d+", args.grid)[:2] if None in (args.rooms, args.grid_size) else ("", "")
    rooms, size = args.rooms or rooms, args.grid_size or size
    return args.grid if args.rooms is args.grid_size is None else f"XLand-MiniGrid-R{rooms}-{size}x{size}"


def make_experiment(args: Namespace) -> Experiment:
    rulesets, grid = re.sub("-[0-9]+m$", "", args.rulesets), grid_name(args)

    def maker(split: str, tasks: int):
        def make_env() -> AMAGOEnv:
            worlds = XLandMiniGrid(
                args.parallel_actors, rulesets=rulesets, split=split, k_shots=args.k_shots, grid=grid,
                shot_length=args.shot_length, num_rulesets=tasks, device=args.env_device,
            )  # fmt: skip
            return AMAGOEnv(worlds, batched_envs=args.parallel_actors)

        return make_env

    horizon = args.k_shots * args.shot_length
    max_seq_len = args.max_seq_len or min(horizon, 512)
    args.timesteps_per_epoch = args.timesteps_per_epoch or horizon
    config: dict = {}
    tstep = cli_utils.switch_tstep_encoder(config, "ff", n_layers=2, d_hidden=128, d_output=64)
    traj = cli_utils.switch_traj_encoder(config, args.traj_encoder, memory_size=args.memory_size, layers=args.memory_layers)
    agent = cli_utils.switch_agent(config, args.agent_type, tau=0.01, gamma=0.98)
    config |= {"Actor.d_hidden": 128, "NCritics.d_hidden": 128, "TformerTrajEncoder.n_heads": 4}
    config |= {"Multigammas.discrete": [0.7, 0.9, 0.95]}
    explore = cli_utils.switch_exploration(config, "bilevel", rollout_horizon=horizon)
    cli_utils.use_config(config, args.configs)
    return cli_utils.create_experiment_from_cli(
        args, maker("train", args.num_rulesets), maker("test", max(1, args.num_rulesets // 5)), max_seq_len=max_seq_len,
        val_timesteps_per_epoch=horizon + 1, tstep_encoder_type=tstep, traj_encoder_type=traj, agent_type=agent,
        exploration_wrapper_type=explore, env_mode="already_vectorized", padded_sampling="both",
        group_name=f"xland_{rulesets}",
    )  # fmt: skip


def test(experiment: Experiment) -> None:
    steps = 3 * (experiment.val_timesteps_per_epoch - 1) + 1
    cli_utils.evaluate_after_training(experiment, steps, title="after training, on new tasks")


if __name__ == "__main__":
    cli_utils.main(__doc__, add_cli, make_experiment, test)
