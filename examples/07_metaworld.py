"""Meta-World: k attempts at a manipulation task with a hidden goal; ML1 (one task), ML10, ML25, ML45 (meta-RL).

python examples/07_metaworld.py --benchmark reach-v3 --k 2 --run_name reach --buffer_dir runs

Needs `pip install 'amago[metaworld]'`. ML45: `--benchmark ml45 --agent_type multitask --parallel_actors 30 --memory_size 320`.
"""

from argparse import ArgumentParser, Namespace
from functools import partial

from amago import cli_utils
from amago.envs import AMAGOEnv
from amago.envs.builtin.metaworld_ml import MetaWorld, MetaWorldTasks, metaworld_tasks
from amago.experiment import Experiment


class MakeMetaWorld:
    """A picklable function that makes an environment. It holds the goals, because sampling them takes long."""

    def __init__(self, tasks: MetaWorldTasks, split: str, k: int, episode_length: int) -> None:
        self.arguments = (tasks, split, k, episode_length)

    def __call__(self) -> AMAGOEnv:
        return AMAGOEnv(MetaWorld(*self.arguments))


def add_cli(parser: ArgumentParser) -> None:
    parser.add_argument("--benchmark", default="reach-v3", help="ml10, ml25, ml45, or the name of a task for ML1")
    parser.add_argument("--k", type=int, default=3, help="attempts at each goal")
    parser.add_argument("--episode_length", type=int, default=500, help="steps of an attempt, at most 500")
    parser.add_argument("--goal_seed", type=int, default=0, help="seed of the 50 goals of each task")
    parser.add_argument(
        "--validate_on",
        choices=("train", "test"),
        default="train",
        help="split whose goals the evaluations during training have",
    )
    parser.add_argument("--hide_rl2s", action="store_true", help="do not observe rewards and previous actions")
    parser.set_defaults(
        parallel_actors=24, timesteps_per_epoch=None, grads_per_epoch=200, epochs=500, memory_size=128, memory_layers=2,
        learning_rate=3e-4,
    )  # fmt: skip


def make_experiment(args: Namespace, tasks: MetaWorldTasks | None = None) -> Experiment:
    tasks = metaworld_tasks(args.benchmark, args.goal_seed) if tasks is None else tasks
    make_env = MakeMetaWorld(tasks, "train", args.k, args.episode_length)
    horizon = make_env().horizon
    assert horizon is not None
    max_seq_len = args.max_seq_len or min(horizon, 256)
    args.timesteps_per_epoch = args.timesteps_per_epoch or horizon
    config: dict = {}
    tstep = cli_utils.switch_tstep_encoder(config, "ff", n_layers=2, d_hidden=256, d_output=128, hide_rl2s=args.hide_rl2s)
    traj = cli_utils.switch_traj_encoder(config, args.traj_encoder, memory_size=args.memory_size, layers=args.memory_layers)
    agent = cli_utils.switch_agent(config, args.agent_type)
    explore = cli_utils.switch_exploration(config, "bilevel", rollout_horizon=horizon)
    cli_utils.use_config(config, ["zoo/metaworld", *args.configs])
    make_val_env = MakeMetaWorld(tasks, args.validate_on, args.k, args.episode_length)
    return cli_utils.create_experiment_from_cli(
        args, make_env, make_val_env, max_seq_len=max_seq_len, val_timesteps_per_epoch=horizon + 1, tstep_encoder_type=tstep,
        traj_encoder_type=traj, agent_type=agent, exploration_wrapper_type=explore,
        group_name=f"metaworld_{tasks.benchmark}_k{args.k}", padded_sampling="both",
    )  # fmt: skip


def test(experiment: Experiment, make_test_env: MakeMetaWorld) -> None:
    steps = 2 * experiment.val_timesteps_per_epoch + 1
    cli_utils.evaluate_after_training(experiment, steps, make_test_env, "after training, on goals of the test split")


if __name__ == "__main__":
    args = cli_utils.parse_args(__doc__, add_cli)
    tasks = metaworld_tasks(args.benchmark, args.goal_seed)
    make_test_env = MakeMetaWorld(tasks, "test", args.k, args.episode_length)
    cli_utils.run_trials(args, partial(make_experiment, tasks=tasks), partial(test, make_test_env=make_test_env))
