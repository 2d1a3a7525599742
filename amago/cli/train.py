"""``amago train ENV``: train on any registered Gymnasium environment."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from typing import Any

from amago import cli_utils
from amago.cli.choices import ARGUMENTS, MEMORIES, choose_settings, library_settings
from amago.cli.gym_env import GymEnv, write_args_file
from amago.experiment import Experiment
from amago.run.checks import unwritable
from amago.run.console import metrics_table

VAL_SHARE = 0.1


def add_arguments(parser: ArgumentParser) -> None:
    parser.description = (
        "Train an agent with memory on a Gymnasium environment, then evaluate it. Checkpoints, logs and the replay buffer are in "
        "BUFFER_DIR/RUN_NAME. Ctrl-C and SIGTERM save a training state before the program ends; --resume auto continues from it, and --overwrite begins anew. "
        "Arguments without a default are chosen for the environment and printed. "
        "Example: amago train CartPole-v1 --run-name demo --buffer-dir runs"
    )
    parser.add_argument("env", help="id of a registered environment, such as CartPole-v1 or Pendulum-v1")
    cli_utils.add_common_cli(parser)
    parser.add_argument(
        "--horizon",
        type=cli_utils.whole_number,
        default=None,
        help="truncate rollouts after this many steps; if not given, at the environment's limit",
    )
    parser.add_argument(
        "--memory",
        default="auto",
        choices=MEMORIES,
        help="auto: none for Gymnasium's own environments with vectors as observations, which are their whole state, else a transformer",
    )
    parser.add_argument(
        "--no_choices",
        "--no-choices",
        action="store_true",
        help="do not choose settings for the environment: a small transformer, and the library's defaults",
    )
    parser.set_defaults(val_interval=10, env_mode="auto", **dict.fromkeys(ARGUMENTS))


def make_experiment(args: Namespace) -> Experiment:
    """The experiment that the arguments describe, not started."""
    for problem in unwritable("--buffer_dir", args.buffer_dir, "checkpoints, logs and the replay buffer"):
        raise ValueError(problem)
    make_env = GymEnv(args.env, args.horizon)
    env = make_env()
    observations = env.observation_space
    horizon = make_env.horizon(env)
    settings: dict[str, Any] = {}
    agent = cli_utils.switch_agent(settings, args.agent_type)
    choose = library_settings if args.no_choices else choose_settings
    choice = choose(env, horizon, args.memory, args.traj_encoder, agent)
    env.close()
    if not args.quiet:
        print(choice.describe(args.env, vars(args)))
    args = Namespace(**vars(args) | {k: v for k, v in choice.arguments.items() if getattr(args, k) is None})
    tstep = cli_utils.default_tstep_encoder(settings, observations, d_hidden=128, d_output=64)
    traj = cli_utils.switch_traj_encoder(settings, args.traj_encoder, memory_size=args.memory_size, layers=args.memory_layers)
    settings |= {"Actor.d_hidden": 128, "NCritics.d_hidden": 128} | choice.settings
    steps = args.epochs * args.timesteps_per_epoch
    exploration = cli_utils.switch_exploration(settings, "egreedy", steps_anneal=max(1, steps // 2))
    cli_utils.use_config(settings, args.configs)
    val_episodes = args.val_episodes or (None if args.eval_timesteps else _val_episodes(args, horizon))
    val_steps = horizon * -(-(val_episodes or 2) // max(1, args.parallel_actors)) + 1
    return cli_utils.create_experiment_from_cli(
        args, make_env, make_env, max_seq_len=args.max_seq_len, val_timesteps_per_epoch=val_steps, val_episodes=val_episodes,
        tstep_encoder_type=tstep, traj_encoder_type=traj, agent_type=agent, exploration_wrapper_type=exploration,
        padded_sampling="both",  # sequences are shorter than rollouts: without padding the first and last steps are rarely sampled
    )  # fmt: skip


def _val_episodes(args: Namespace, horizon: int) -> int:
    """Rollouts in an evaluation: about a tenth of the steps that are collected between two, but 4 at least, and 2 an actor at most."""
    collected = args.parallel_actors * args.timesteps_per_epoch * max(1, args.val_interval)
    return int(min(max(4, VAL_SHARE * collected / horizon), max(4, 2 * args.parallel_actors)))


def run(args: Namespace) -> int:
    def test(experiment: Experiment) -> None:
        make_env = GymEnv(args.env, args.horizon)
        env = make_env()
        steps = 2 * make_env.horizon(env) + 1
        env.close()
        rollouts = 2 * experiment.parallel_actors * experiment.accelerator.num_processes
        metrics = experiment.evaluate_test(make_env, timesteps=steps, episodes=rollouts)
        print(metrics_table(metrics, title=f"{args.env} after training"))
        greedy = "" if experiment.sample_actions else " --greedy"
        print(f"\nto evaluate it again: amago eval {experiment.run_dir}{greedy}")

    def record(experiment: Experiment) -> None:
        write_args_file(experiment.run_dir, args.env, args.horizon)

    cli_utils.run_trials(args, make_experiment, test, started=record)
    return 0
