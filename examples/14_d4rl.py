"""D4RL: learn from recorded data, then optionally also from data that the agent collects (offline to online).

python examples/14_d4rl.py --dataset halfcheetah_medium-v2.hdf5 --env HalfCheetah-v5 --run_name d4rl --buffer_dir runs

--dataset is a D4RL file or the id of a Minari dataset on this machine; nothing is downloaded. To record a dataset first:
--dataset pendulum.hdf5 --record 20000 --env Pendulum-v1 --score_range -1200 -150. Needs `pip install 'amago[offline]'`, and MuJoCo's
environments `'amago[mujoco]'`.
"""

from argparse import ArgumentParser, Namespace
from pathlib import Path

import gymnasium as gym
import numpy as np
from support.d4rl_scores import NormalizedScore, reference_returns

from amago import cli_utils
from amago.envs import AMAGOEnv
from amago.experiment import Experiment
from amago.loading import D4RLDataset, DiskTrajDataset, MinariDataset, MixtureOfDatasets, RLDataset
from amago.registry import require


def add_cli(parser: ArgumentParser) -> None:
    parser.add_argument("--dataset", required=True, help="a .hdf5 file of D4RL, or the id of a Minari dataset")
    parser.add_argument("--env", default="HalfCheetah-v5", help="id of the environment to evaluate (and collect) in")
    parser.add_argument(
        "--score_range", type=float, nargs=2, default=None, metavar=("LOW", "HIGH"),
        help="returns of the scores 0 and 100; None: those published for the dataset",
    )  # fmt: skip
    parser.add_argument(
        "--online_after",
        "--online_after_epoch",
        type=int,
        default=None,
        help="first epoch in which the agent collects; None: never",
    )
    parser.add_argument(
        "--online_share", type=float, default=0.5, help="fraction of training sequences from collected data, once it collects"
    )
    parser.add_argument(
        "--policy_dist", type=cli_utils.part_name("distribution"), default="tanh_gaussian", help="distribution of continuous actions: "
        "tanh_gaussian, beta or gmm",
    )  # fmt: skip
    parser.add_argument(
        "--actor_type", type=cli_utils.part_name("actor"), default="ff", help="network of the policy: ff or residual"
    )
    parser.add_argument(
        "--record",
        type=cli_utils.whole_number,
        default=0,
        help="if the file is missing, record this many steps of random actions",
    )
    parser.set_defaults(
        parallel_actors=8, timesteps_per_epoch=1000, grads_per_epoch=1000, epochs=100, batch_size=32, memory_size=128,
        memory_layers=2, learning_rate=3e-4,
    )  # fmt: skip


def record(path: Path, env_id: str, steps: int, seed: int | None) -> None:
    """Write a D4RL file of random actions."""
    h5py, env, rows = require("h5py", "offline"), gym.make(env_id), []
    env.action_space.seed(seed)
    obs, _ = env.reset(seed=seed)
    for _ in range(steps):
        action = env.action_space.sample()
        after, reward, terminated, truncated, _ = env.step(action)
        rows.append((obs, action, reward, terminated, truncated, after))
        obs = env.reset()[0] if terminated or truncated else after
    path.parent.mkdir(parents=True, exist_ok=True)
    names = ("observations", "actions", "rewards", "terminals", "timeouts", "next_observations")
    with h5py.File(path, "w") as file:
        for name, column in zip(names, zip(*rows, strict=True), strict=True):
            file[name] = np.array(column)


def make_experiment(args: Namespace) -> Experiment:
    is_file = args.dataset.endswith((".hdf5", ".h5"))
    if args.record and is_file and not Path(args.dataset).exists():
        record(Path(args.dataset), args.env, args.record, args.seed)
    scores = args.score_range or reference_returns(args.dataset)

    def make_env() -> AMAGOEnv:
        env = gym.make(args.env)
        return AMAGOEnv(NormalizedScore(env, *scores) if scores else env, env_name=args.env)

    env = make_env()
    horizon, space = env.horizon or 1000, env.action_spec.space
    env.close()
    dataset: RLDataset = D4RLDataset(args.dataset, horizon, space) if is_file else MinariDataset(args.dataset)
    online = args.online_after is not None
    if online:
        buffer = DiskTrajDataset(args.buffer_dir, args.run_name, **cli_utils.dataset_limits_from_cli(args))
        dataset = MixtureOfDatasets(
            [dataset, buffer], [1 - args.online_share, args.online_share], smooth_sudden_starts=max(1, args.epochs // 10)
        )

    config: dict = {}
    tstep = cli_utils.switch_tstep_encoder(config, "ff", n_layers=2, d_hidden=128, d_output=128, hide_rl2s=True)
    traj = cli_utils.switch_traj_encoder(config, args.traj_encoder, memory_size=args.memory_size, layers=args.memory_layers)
    # the policy gradient relies on values of actions that are not in the data: use it only if the agent collects, too
    actor = cli_utils.switch_actor(config, args.actor_type, continuous_dist_type=args.policy_dist)
    agent = cli_utils.switch_agent(config, args.agent_type, actor_type=actor, online_coeff=float(online), offline_coeff=1.0)
    explore = cli_utils.switch_exploration(config, "egreedy")
    cli_utils.use_config(config, ["zoo/d4rl", *args.configs])
    return cli_utils.create_experiment_from_cli(
        args, make_env, make_env, max_seq_len=32, val_timesteps_per_epoch=horizon + 1, tstep_encoder_type=tstep,
        traj_encoder_type=traj, agent_type=agent, exploration_wrapper_type=explore, group_name=f"d4rl_{args.env}", dataset=dataset,
        start_collecting_at_epoch=args.online_after if online else float("inf"), padded_sampling="both",
    )  # fmt: skip


def test(experiment: Experiment) -> None:
    cli_utils.evaluate_after_training(experiment, 2 * experiment.val_timesteps_per_epoch + 1)


if __name__ == "__main__":
    cli_utils.main(__doc__, add_cli, make_experiment, test)
