"""``amago train ENV``: train on any Gymnasium environment, with settings chosen from its spaces, its horizon and its origin."""

from __future__ import annotations

import itertools
import sys
from argparse import REMAINDER, Action, ArgumentError, ArgumentParser, Namespace
from contextlib import closing
from pathlib import Path
from typing import Any

from amago import cli_utils
from amago.cli import main
from amago.cli.choices import ARGUMENTS, GREEDY, NETS, choose_settings, remembers
from amago.cli.gym_env import ENVIRONMENT, LIMIT, GymEnv, eval_command, is_own_code
from amago.cli_utils.arguments import LIBRARY_DEFAULTS, at_least
from amago.cli_utils.settings import read_settings, set_arguments
from amago.experiment import Experiment
from amago.nets.traj_base import TRAJ_ENCODERS
from amago.run.console import metrics_table
from amago.run.record import read_record
from amago.run.rundir import SETTINGS_YAML
from amago.run.settings import unwritable

VAL_SHARE = 0.1
MEMORIES = ("auto", "none", *filter(remembers, sorted(TRAJ_ENCODERS)))


def add_arguments(parser: ArgumentParser) -> None:
    parser.description = (
        "Train an agent with memory on a Gymnasium environment, then evaluate it. Checkpoints, logs and the replay buffer are in "
        "BUFFER_DIR/RUN_NAME. Ctrl-C and SIGTERM save a training state before the program ends; --resume auto continues from it, and --overwrite begins anew. "
        "Arguments without a default are chosen for the environment and printed. "
        "Example: amago train CartPole-v1 --run-name demo --buffer-dir runs"
    )
    env = parser.add_argument("env", help=f"{ENVIRONMENT}, such as CartPole-v1 or my_module:make_env")
    env.required = False  # with --from
    cli_utils.add_common_cli(parser)
    horizon = f"truncate rollouts after this many steps; if not given, at the environment's limit, and after {LIMIT} steps if it has none"
    parser.add_argument("--horizon", type=cli_utils.whole_number, help=horizon)
    memory = (
        "auto: none for Gymnasium's own environments with vectors as observations, which are their whole state; else a gru where observations "
        "change little from step to step, or a transformer"
    )
    parser.add_argument("--memory", default="auto", choices=MEMORIES, help=memory)
    plain = "do not choose settings for the environment: a small transformer, and the library's defaults"
    parser.add_argument("--no_choices", "--no-choices", action="store_true", help=plain)
    origin = "begin with all settings of a run, from its settings.yaml: ENV, --run_name and --buffer_dir are then optional"
    parser.add_argument("--from", dest="configs", action=_From, default=(), metavar="RUN", help=origin)
    seeds = (
        "train each setting with so many seeds, from --seed on, and print a table; so do lists of values, agent.gamma=0.9,0.99"
    )
    parser.add_argument("--seeds", type=at_least(1), default=1, help=seeds)
    parser.add_argument(
        "--processes",
        type=at_least(1),
        default=None,
        help="runs of --seeds and of lists side by side; if not given, one a core",
    )
    parser.set_defaults(**LIBRARY_DEFAULTS | {"env_mode": "auto", "sweep": {}, "env_of_run": None} | dict.fromkeys(ARGUMENTS))


class _From(Action):
    """Sets the arguments that a run was made with, which the command line has not."""

    def __call__(self, parser: ArgumentParser, namespace: Namespace, values: Any, option_string: str | None = None) -> None:
        run = Path(values).expanduser()
        try:
            settings = read_settings(str(run / SETTINGS_YAML)) or {}
            taken = (run.with_name(f"{run.absolute().name}_{i}") for i in itertools.count(2))
            places = {"buffer_dir": str(run.parent), "run_name": next(path.name for path in taken if not path.exists())}
            env = settings.pop("env", None)
            rest = set_arguments(parser, namespace, settings | places, replace=False)
        except ValueError as err:
            raise ArgumentError(self, str(err)) from err
        namespace.configs = [rest, *namespace.configs]
        namespace.env_of_run = None if env is None or is_own_code(env) else env
        namespace.env = namespace.env or namespace.env_of_run


def add_run_arguments(parser: ArgumentParser) -> None:
    """The arguments of ``amago resume`` and ``amago rerun``."""
    parser.add_argument("run", type=Path, help="directory of a run of amago train")
    rest = "further arguments of amago train, such as --epochs 80; and ENV, if it is code of yours"
    parser.add_argument("more", nargs=REMAINDER, metavar="ARGUMENT", help=rest)


def _begun(run: Path) -> Path:
    """The absolute path of a run that has settings to begin with."""
    run = run.expanduser().absolute()
    if run.is_dir() and not (run / SETTINGS_YAML).is_file():
        raise ValueError(
            f"{run} has no {SETTINGS_YAML}: it is no run of amago train, or was killed before it began: train it anew"
        )
    return run


def resume(args: Namespace) -> int:
    run = _begun(args.run)
    fields = (read_record(run) or {}).get("fields", {})  # none yet in a run that was killed while it was built
    drawn = fields.get("seed", 0) is None  # a seed that is given begins the random streams anew
    words = ["--run_name", run.name, "--buffer_dir", str(run.parent), "--resume", "auto", *(["seed=None"] if drawn else [])]
    return main(["train", "--from", str(run), *words, *args.more])


def rerun(args: Namespace) -> int:
    return main(["train", "--from", str(_begun(args.run)), *args.more])


def make_experiment(args: Namespace, make_env: GymEnv | None = None) -> Experiment:
    """The experiment that the arguments describe, not started; ``make_env`` in place of the environment that they name."""
    if args.env is None:
        raise ValueError(
            "name the environment, as CartPole-v1 or my_module:make_env (a settings.yaml does not decide which code of yours is imported)"
        )
    for problem in unwritable("--buffer_dir", args.buffer_dir, "checkpoints, logs and the replay buffer"):
        raise ValueError(problem)
    make_env = make_env or GymEnv(args.env, args.horizon)
    env = make_env()
    observations = env.observation_space
    horizon = make_env.horizon(env)
    if env.batched_envs > 1:  # its rows are the actors; another number that the user gives is refused by the pool
        mode = "already_vectorized" if args.env_mode in ("auto", "sync") else args.env_mode
        vars(args).update(env_mode=mode, parallel_actors=args.parallel_actors or env.batched_envs)
    settings: dict[str, Any] = {}
    agent = cli_utils.switch_agent(settings, args.agent_type)
    choice = choose_settings(env, horizon, args.memory, args.traj_encoder, agent, plain=args.no_choices)
    given = Namespace(**vars(args))
    vars(args).update({k: v for k, v in choice.arguments.items() if vars(args)[k] is None})  # in place, for `record_settings`
    if args.steps is not None:
        spread_steps(args, given)
        if choice.steps_per_update and given.grads_per_epoch is None:
            most = args.parallel_actors * args.timesteps_per_epoch // choice.steps_per_update
            args.grads_per_epoch = min(args.grads_per_epoch, max(1, most))
    if not args.quiet:
        taken = choice._replace(arguments={name: vars(args)[name] for name in choice.arguments})
        print(taken.describe(make_env.env_id, vars(given)))
    val_episodes = args.val_episodes or (None if args.eval_timesteps else _val_episodes(args, horizon))
    val_steps = make_env.steps_of(env, -(-(val_episodes or 2) // max(1, args.parallel_actors)))
    env.close()
    tstep = cli_utils.default_tstep_encoder(settings, observations, d_hidden=128, d_output=64)
    traj = cli_utils.switch_traj_encoder(settings, args.traj_encoder, memory_size=args.memory_size, layers=args.memory_layers)
    settings |= {f"{NETS}.actor_critic.{head}.d_hidden": 128 for head in ("Actor", "NCritics")} | choice.settings
    if (anneal := f"{GREEDY}.steps_anneal") in settings:
        settings[anneal] = max(1, min(settings[anneal], args.epochs * args.timesteps_per_epoch // 2))
    exploration = cli_utils.switch_exploration(settings, "egreedy")
    cli_utils.use_config(settings, args.configs)
    return cli_utils.create_experiment_from_cli(
        args, make_env, make_env, max_seq_len=args.max_seq_len, total_steps=args.steps, val_timesteps_per_epoch=val_steps, val_episodes=val_episodes,
        tstep_encoder_type=tstep, traj_encoder_type=traj, agent_type=agent, exploration_wrapper_type=exploration,
        padded_sampling="both",  # sequences are shorter than rollouts: without padding the first and last steps are rarely sampled
    )  # fmt: skip


def spread_steps(args: Namespace, given: Namespace) -> None:
    """Set ``epochs`` and ``timesteps_per_epoch`` such that all actors together take ``args.steps`` steps.

    Few steps are spread over the epochs that were chosen, so that there are as many updates; many are more epochs. Of the two, the
    user's arguments, ``given``, may set one.
    """
    if args.steps < 1:  # of `amago.train`; the command refuses it
        raise ValueError(f"--steps must be at least 1, got {args.steps}")
    if given.epochs is not None and given.timesteps_per_epoch is not None:
        raise ValueError("--steps sets --epochs or --timesteps_per_epoch, but both are given: leave one of the three out")
    each = -(-args.steps // args.parallel_actors)
    if given.timesteps_per_epoch is None:
        spread = -(-each // args.epochs)
        args.timesteps_per_epoch = spread if given.epochs is not None else min(args.timesteps_per_epoch, spread)
    if given.epochs is None:
        args.epochs = -(-each // args.timesteps_per_epoch)


def _val_episodes(args: Namespace, horizon: int) -> int:
    """Rollouts in an evaluation: about a tenth of the steps that are collected between two, but 5 at least, and 2 an actor at most."""
    collected = args.parallel_actors * args.timesteps_per_epoch * max(1, args.val_interval)
    return int(min(max(5, VAL_SHARE * collected / horizon), max(5, 2 * args.parallel_actors)))


def run(args: Namespace) -> int:
    unmeasured: list[str] = []

    def test(experiment: Experiment) -> None:
        make_env = GymEnv(args.env, args.horizon)
        with closing(make_env()) as env:
            steps = make_env.steps_of(env, 2)
        rollouts = 2 * experiment.parallel_actors * experiment.accelerator.num_processes
        metrics = experiment.evaluate_test(make_env, timesteps=steps, episodes=rollouts)
        if not metrics:
            reason = f"ended within {steps} steps of each actor: truncate them with --horizon N"
            unmeasured.append(f"no rollout of {args.env} {reason}")
            return
        print(metrics_table(metrics, title=f"{args.env} after training"))
        if not experiment.learns:
            return  # what only collects saves no weights
        options = [] if experiment.sample_actions else ["--greedy"]
        print(f"\nto evaluate it again: {eval_command(experiment.run_dir, args.env, *options)}")
        if remembers(args.traj_encoder):
            print(f"to see what its memory is for: {eval_command(experiment.run_dir, args.env, '--memory')}")

    cli_utils.run_trials(args, make_experiment, test)
    for line in unmeasured:
        print(f"amago train: {line}", file=sys.stderr)
    return 1 if unmeasured else 0
