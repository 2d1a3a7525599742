"""T-Maze: remember one bit for the length of a corridor (Ni et al. 2023, arXiv 2307.03864).

python examples/04_tmaze.py --horizon 100 --no_async --run_name tmaze --buffer_dir runs

With --on_device the mazes are tensors on the agent's device, and --parallel_actors may be thousands. With --shortest 10 actors learn corridors
of 10 to --horizon steps side by side, which takes a fraction of the time if they are long.
"""

from argparse import ArgumentParser, Namespace
from functools import partial

import numpy as np
import torch
from support.device_tmaze import DeviceTMaze

from amago import cli_utils
from amago.envs import AMAGOEnv
from amago.envs.builtin.tmaze import TMazeActive, TMazeExploration, TMazePassive
from amago.experiment import Experiment


def add_cli(parser: ArgumentParser) -> None:
    parser.add_argument("--horizon", type=int, default=100, help="steps of an episode; the last requires memory of the first")
    parser.add_argument(
        "--shortest",
        type=int,
        help="the shortest corridor of an actor, in steps; the others' are longer by a constant factor, up to --horizon, as in evaluations",
    )
    parser.add_argument("--active", action="store_true", help="the sign is visible only one step behind the start")
    parser.add_argument(
        "--long_memory",
        action="store_true",
        help="a GRU forgets over up to --horizon steps from the start (GRUTrajEncoder.longest)",
    )
    parser.add_argument("--on_device", action="store_true", help="all mazes in one batch of tensors, on a GPU if there is one")
    parser.set_defaults(
        parallel_actors=16, grads_per_epoch=100, epochs=40, memory_size=64, memory_layers=2, timesteps_per_epoch=None, batch_size=16,
        dset_max_size=5_000, learning_rate=3e-4,
    )  # fmt: skip


class Explorer(TMazeExploration):
    """Explores by the length of an actor's own corridor."""

    def __init__(self, env: AMAGOEnv) -> None:
        super().__init__(env, env.horizon)


def make_experiment(args: Namespace) -> Experiment:
    if args.active and args.on_device:
        raise ValueError("--on_device has passive mazes alone: leave out --active")
    if args.shortest is not None and (args.on_device or not 4 <= args.shortest <= args.horizon):
        raise ValueError(
            f"--shortest must be 4 to {args.horizon}, the --horizon, and needs mazes that are no tensors, got {args.shortest}"
        )
    kind = "active" if args.active else "passive"

    def on_device() -> AMAGOEnv:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        mazes = DeviceTMaze(args.parallel_actors, args.horizon - 1, device)
        return AMAGOEnv(mazes, env_name=f"tmaze_device_{args.horizon}", batched_envs=args.parallel_actors)

    def on_host(horizon: int = args.horizon) -> AMAGOEnv:  # apart, so that workers import no torch
        return AMAGOEnv(
            TMazeActive(horizon - 3) if args.active else TMazePassive(horizon - 1), env_name=f"tmaze_{kind}_{horizon}"
        )

    make_train_env = make_env = on_device if args.on_device else on_host
    if args.shortest is not None:
        lengths = np.geomspace(args.shortest, args.horizon, args.parallel_actors).round().astype(int)
        make_train_env = [partial(on_host, h) for h in lengths.tolist()]

    args.timesteps_per_epoch = args.timesteps_per_epoch or 2 * args.horizon
    config: dict = {}
    tstep = cli_utils.switch_tstep_encoder(config, "ff", n_layers=1, d_hidden=64, d_output=64, normalize_inputs=False)
    traj = cli_utils.switch_traj_encoder(config, args.traj_encoder, memory_size=args.memory_size, layers=args.memory_layers)
    agent = cli_utils.switch_agent(config, args.agent_type, reward_multiplier=100.0, tau=0.02)
    config |= {"Actor.d_hidden": 64, "NCritics.d_hidden": 64}
    if args.long_memory:
        config["GRUTrajEncoder.longest"] = float(args.horizon)
    # A single wrong step misses the goal: where probabilities are clipped leaves about one in a corridor, however long it is.
    wrong = min(0.01, 1 / args.horizon)
    config |= {"Discrete.clip_prob_high": 1 - wrong, "Discrete.clip_prob_low": wrong / 10}
    cli_utils.use_config(config, args.configs)
    return cli_utils.create_experiment_from_cli(
        args, make_train_env, make_env, max_seq_len=args.horizon, val_timesteps_per_epoch=2 * args.horizon + 1, tstep_encoder_type=tstep,
        traj_encoder_type=traj, agent_type=agent, exploration_wrapper_type=Explorer, group_name=f"tmaze_{args.horizon}",
        sample_actions=False, **({"env_mode": "already_vectorized"} if args.on_device else {}),
    )  # fmt: skip


if __name__ == "__main__":
    cli_utils.main(__doc__, add_cli, make_experiment)
