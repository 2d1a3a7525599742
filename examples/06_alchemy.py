"""Symbolic Alchemy: find out an unknown chemistry by experiment and use it, in ten trials (arXiv:2102.02926).

python examples/06_alchemy.py --run_name alchemy --buffer_dir runs
"""

from argparse import ArgumentParser, Namespace
from functools import partial

import gymnasium as gym
from support.alchemy import AlchemyByColour, AlchemyShaping

from amago import cli_utils
from amago.config import bindings, selector_of
from amago.envs import AMAGOEnv
from amago.envs.builtin.alchemy import SymbolicAlchemy
from amago.experiment import Experiment


def add_cli(parser: ArgumentParser) -> None:
    parser.add_argument("--num_trials", type=int, default=10, help="trials of a rollout, which share a chemistry")
    parser.add_argument("--steps_per_trial", type=int, default=20, help="steps of a trial")
    parser.add_argument(
        "--view",
        choices=("table", "colours"),
        default="table",
        help="table: 39 numbers and 40 actions; colours: potions by colour, all one-hot",
    )
    parser.add_argument(
        "--shaping",
        action="store_true",
        help="reward each dip at once during training; needs --view colours",
    )
    parser.set_defaults(
        parallel_actors=64, timesteps_per_epoch=None, grads_per_epoch=50, epochs=400, memory_size=128, memory_layers=2,
        learning_rate=3e-4,
    )  # fmt: skip


def make_experiment(args: Namespace) -> Experiment:
    def make_env(shaped_for: float | None = None) -> AMAGOEnv:
        env: gym.Env = SymbolicAlchemy(args.num_trials, args.steps_per_trial)
        if args.view == "colours":
            env = AlchemyByColour(env)
        return AMAGOEnv(env if shaped_for is None else AlchemyShaping(env, shaped_for), env_name="symbolic_alchemy")

    if args.shaping and args.view != "colours":
        raise ValueError("--shaping keeps rewards and previous actions from the agent, so it needs --view colours")
    horizon = make_env().env.horizon
    max_seq_len = args.max_seq_len or horizon
    args.timesteps_per_epoch = args.timesteps_per_epoch or horizon
    config: dict = {}
    tstep = cli_utils.switch_tstep_encoder(config, "ff", n_layers=1, d_hidden=256, d_output=128, hide_rl2s=args.shaping)
    traj = cli_utils.switch_traj_encoder(config, args.traj_encoder, memory_size=args.memory_size, layers=args.memory_layers)
    agent = cli_utils.switch_agent(config, args.agent_type)
    explore = cli_utils.switch_exploration(config, "bilevel", rollout_horizon=horizon)
    if args.view == "colours":
        config["ActionMask.key"] = "action_mask"
    cli_utils.use_config(config, ["zoo/alchemy", *args.configs])
    shaped_for = bindings()[f"{selector_of(agent)}.gamma"] if args.shaping else None
    return cli_utils.create_experiment_from_cli(
        args, partial(make_env, shaped_for), make_env, max_seq_len=max_seq_len, val_timesteps_per_epoch=2 * horizon + 1, tstep_encoder_type=tstep,
        traj_encoder_type=traj, agent_type=agent, exploration_wrapper_type=explore, group_name="symbolic_alchemy",
        padded_sampling="both",
    )  # fmt: skip


if __name__ == "__main__":
    cli_utils.main(__doc__, add_cli, make_experiment)
