"""Crafter: follow instructions in an open world, and relabel rollouts with what was achieved instead (arXiv 2310.09971, 2109.06780).

python examples/16_crafter_instructions.py --obs_kind crop --relabel some --run_name crafter --buffer_dir runs

Needs `pip install 'amago[crafter]'`. After training, the same command with `--eval_mode` evaluates the agent on the sequences of
goals in `--eval_tasks`, and writes a video of the first rollout of each to the run's directory.
"""

from argparse import ArgumentParser, Namespace
from functools import partial
from pathlib import Path

from support.video import VideoRecorder

from amago import cli_utils, load_policy
from amago.envs import AMAGOEnv
from amago.envs.builtin.crafter import OBS_KINDS, CrafterInstructions, InstructionRelabeler
from amago.envs.pool import make_pool
from amago.experiment import Experiment
from amago.loading import DiskTrajDataset
from amago.nets.goal_embedders import TokenGoalEmb
from amago.nets.tstep_encoders import ImageGoalTstepEncoder
from amago.relabeling import STRATEGIES
from amago.run.console import metrics_table
from amago.run.evaluate import evaluate

TASKS = ["collect_wood", "collect_sapling,place_plant,eat_cow", "collect_wood,place_table,make_wood_pickaxe", "travel_2_2"]


def add_cli(parser: ArgumentParser) -> None:
    parser.add_argument("--obs_kind", default="local", choices=OBS_KINDS, help="image, image without inventory, or cells")
    parser.add_argument("--instructions", nargs="+", default=None, metavar="NAME", help="goals to draw from; None: all")
    parser.add_argument("--min_goals", type=int, default=1, help="goals of a rollout, at least")
    parser.add_argument("--max_goals", type=int, default=5, help="goals of a rollout, at most")
    parser.add_argument("--time_limit", type=int, default=2000, help="steps of a rollout")
    parser.add_argument(
        "--relabel", default="some", choices=STRATEGIES, help="how many missed goals to replace by what was achieved"
    )
    parser.add_argument("--eval_mode", action="store_true", help="do not train: evaluate on --eval_tasks, and write videos")
    parser.add_argument(
        "--eval_tasks", nargs="+", default=TASKS, metavar="GOAL,GOAL", help="sequences of goals, separated by commas"
    )
    parser.add_argument("--eval_rollouts", type=int, default=8, help="rollouts of each task of --eval_tasks")
    parser.set_defaults(
        timesteps_per_epoch=2000, grads_per_epoch=700, epochs=5000, batch_size=18, start_learning_at_epoch=5, dset_max_size=5000,
    )  # fmt: skip


def make_env(args: Namespace, goals: str | None = None, video: Path | None = None) -> AMAGOEnv:
    world = CrafterInstructions(
        args.instructions, args.min_goals, args.max_goals, None if goals is None else goals.split(","), args.obs_kind,
        args.time_limit, render_mode=None if video is None else "rgb_array",
    )  # fmt: skip
    return AMAGOEnv(world if video is None else VideoRecorder(world, video))


def make_experiment(args: Namespace) -> Experiment:
    make, config = partial(make_env, args), {}
    max_seq_len = min(args.max_seq_len or 512, args.time_limit)
    sizes = {"goal_key": "goals", "goal_emb_type": TokenGoalEmb, "d_hidden": 256, "d_output": 256, "normalize_inputs": False}
    if args.obs_kind == "local":
        tstep = cli_utils.switch_tstep_encoder(config, "goal", n_layers=2, **sizes)
    else:
        tstep = cli_utils.switch_tstep_encoder(config, ImageGoalTstepEncoder, n_layers=1, **sizes)
    traj = cli_utils.switch_traj_encoder(config, args.traj_encoder, memory_size=args.memory_size, layers=args.memory_layers)
    agent = cli_utils.switch_agent(config, args.agent_type)
    anneal = max(1, args.epochs * args.timesteps_per_epoch // 5)
    explore = cli_utils.switch_exploration(config, "bilevel", rollout_horizon=args.time_limit, steps_anneal=anneal)
    cli_utils.use_config(config, ["zoo/crafter", *args.configs])
    return cli_utils.create_experiment_from_cli(
        args, make, make, max_seq_len=max_seq_len, val_timesteps_per_epoch=args.time_limit + 1, tstep_encoder_type=tstep,
        traj_encoder_type=traj, agent_type=agent, exploration_wrapper_type=explore, padded_sampling="both",
        dataset=DiskTrajDataset(args.buffer_dir, args.run_name, args.dset_max_size, relabeler=InstructionRelabeler(args.relabel)),
        group_name=f"crafter_{args.obs_kind}_relabel_{args.relabel}",
    )  # fmt: skip


def test(experiment: Experiment) -> None:
    cli_utils.evaluate_after_training(experiment, experiment.val_timesteps_per_epoch)


def evaluate_tasks(args: Namespace) -> None:
    """Evaluate each of ``--eval_tasks`` with the newest policy of the run, or that of ``--ckpt``."""
    run = Path(args.buffer_dir, args.run_name)
    weights = run if args.ckpt is None else run / "ckpts" / "policy_weights" / f"policy_epoch_{args.ckpt}.pt"
    agent = load_policy(weights).agent
    for task in args.eval_tasks:
        video = run / "videos" / f"{task.replace(',', '+')}.gif"
        pool = make_pool(
            [partial(make_env, args, task, video)] + [partial(make_env, args, task)] * (args.eval_rollouts - 1),
            env_mode="sync", seed=args.seed,
        )  # fmt: skip
        try:
            metrics = evaluate(
                agent, pool, args.time_limit, episodes=args.eval_rollouts, seed=args.seed, progress=not args.quiet
            )
        finally:
            pool.close()
        print(metrics_table(metrics, title=f"{task} ({video})"))


if __name__ == "__main__":
    args = cli_utils.parse_args(__doc__, add_cli)
    if args.eval_mode:
        evaluate_tasks(args)
    else:
        cli_utils.run_trials(args, make_experiment, test)
