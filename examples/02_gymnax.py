"""gymnax: hundreds of environments in one compiled call of jax (Lange 2022, github.com/RobertTLange/gymnax).

python examples/02_gymnax.py --env MemoryChain-bsuite --parallel_actors 512 --run_name gymnax --buffer_dir runs

Needs `pip install 'amago[gymnax]'`. If jax and PyTorch share a GPU, jax allocates memory as needed (see below), not three quarters
at once; with `--env_device cpu` jax does not use the GPU.
"""

import os
from argparse import ArgumentParser, Namespace
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # read when jax is imported

from amago import cli_utils
from amago.envs import AMAGOEnv
from amago.envs.builtin.gymnax_envs import GymnaxCompatibility
from amago.experiment import Experiment
from amago.registry import require

CHAIN = ["memory_length=20", "max_steps_in_episode=21"]  # the defaults of gymnax are 5 and 1000


def add_cli(parser: ArgumentParser) -> None:
    parser.add_argument("--env", default="MemoryChain-bsuite", help="name of the environment in gymnax")
    parser.add_argument(
        "--params",
        nargs="*",
        metavar="NAME=VALUE",
        help=f"parameters of the environment to change; default for MemoryChain-bsuite: {' '.join(CHAIN)}",
    )
    parser.add_argument("--env_device", default=None, choices=("cpu", "gpu", "tpu"), help="device of jax; None: its default")
    parser.set_defaults(
        parallel_actors=64, timesteps_per_epoch=None, grads_per_epoch=50, epochs=60, memory_size=64, memory_layers=2, batch_size=32,
        learning_rate=1e-3,
    )  # fmt: skip


def make_gymnax(name: str, given: list[str] | None) -> tuple[Any, Any]:
    env, params = require("gymnax", "gymnax").make(name)
    for text in CHAIN if given is None and name == "MemoryChain-bsuite" else given or []:
        key, _, value = text.partition("=")
        if not hasattr(params, key):
            raise ValueError(f"{name} has no parameter {key!r}; it has {', '.join(vars(params))}")
        params = params.replace(**{key: type(getattr(params, key))(value)})
    return env, params


def make_experiment(args: Namespace) -> Experiment:
    env, params = make_gymnax(args.env, args.params)  # shared by all environments, so that it is compiled once

    def make_env() -> AMAGOEnv:
        return AMAGOEnv(
            GymnaxCompatibility(env, args.parallel_actors, params, args.env_device), batched_envs=args.parallel_actors
        )

    horizon = make_env().horizon
    assert horizon is not None
    max_seq_len = args.max_seq_len or min(horizon, 256)
    args.timesteps_per_epoch = args.timesteps_per_epoch or max(100, horizon)
    config: dict = {}
    tstep = cli_utils.switch_tstep_encoder(config, "ff", n_layers=1, d_hidden=128, d_output=64)
    traj = cli_utils.switch_traj_encoder(config, args.traj_encoder, memory_size=args.memory_size, layers=args.memory_layers)
    agent = cli_utils.switch_agent(config, args.agent_type, tau=0.02, gamma=0.99)
    config |= {"Actor.d_hidden": 128, "NCritics.d_hidden": 128, "TformerTrajEncoder.n_heads": 4}
    config |= {"Multigammas.discrete": [0.8, 0.95], "Multigammas.continuous": [0.95]}
    explore = cli_utils.switch_exploration(config, "egreedy")
    cli_utils.use_config(config, args.configs)
    return cli_utils.create_experiment_from_cli(
        args, make_env, make_env, max_seq_len=max_seq_len, val_timesteps_per_epoch=horizon + 1, tstep_encoder_type=tstep,
        traj_encoder_type=traj, agent_type=agent, exploration_wrapper_type=explore, env_mode="already_vectorized",
        padded_sampling="both", group_name=f"gymnax_{args.env}",
    )  # fmt: skip


def test(experiment: Experiment) -> None:
    cli_utils.evaluate_after_training(experiment, 5 * (experiment.val_timesteps_per_epoch - 1) + 1)


if __name__ == "__main__":
    cli_utils.main(__doc__, add_cli, make_experiment, test)
