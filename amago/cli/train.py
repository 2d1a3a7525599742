"""``amago train ENV``: train on any Gymnasium environment, with settings chosen from its spaces, its horizon and its origin."""

from __future__ import annotations

import itertools
import sys
import time
from argparse import REMAINDER, Action, ArgumentError, ArgumentParser, Namespace
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np

from amago import cli_utils, config
from amago.agent import Agent, BaseAgent
from amago.cli import main
from amago.cli.gym_env import ENVIRONMENT, LIMIT, GymEnv, eval_command, is_own_code
from amago.cli_utils.arguments import LIBRARY_DEFAULTS, at_least
from amago.cli_utils.settings import read_settings, set_arguments
from amago.describe import fit_width
from amago.envs import AMAGOEnv
from amago.experiment import Experiment
from amago.nets.traj_base import TRAJ_ENCODERS
from amago.nets.tstep_encoders import is_image
from amago.run.console import metrics_table
from amago.run.record import read_record
from amago.run.rundir import SETTINGS_YAML
from amago.run.settings import unwritable

VAL_SHARE = 0.1
ARGUMENTS: dict[str, Any] = {
    "traj_encoder": "transformer", "parallel_actors": 8, "timesteps_per_epoch": 500, "grads_per_epoch": 250, "epochs": 40, "memory_size": 64,
    "memory_layers": 2, "max_seq_len": 32, "batch_size": 24, "learning_rate": 3e-4,
}  # fmt: skip
"""The arguments that are chosen unless the user gives them, with their values for agents with memory."""
MEMORIES = ("auto", "none", *sorted(set(TRAJ_ENCODERS) - {"ff"}))
TRIAL_STEPS, TRIAL_SECONDS = 1000, 10.0
"""Most steps of random actions before settings are chosen, and their longest duration: rewards of a slower environment count as informative."""
MULTIGAMMAS, EXPERIMENT, GREEDY = (
    "amago.agent.Multigammas",
    "amago.experiment.Experiment",
    "amago.envs.exploration.EpsilonGreedy",
)
NETS = "amago.nets"  # names are given in full: a program may have an Actor of its own
Settings = tuple[dict[str, Any], dict[str, Any], dict[str, Any]]  # arguments of the command, options of the agent, others


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
    parser.add_argument("--horizon", type=cli_utils.whole_number, default=None, help=horizon)
    memory = "auto: none for Gymnasium's own environments with vectors as observations, which are their whole state, else a transformer"
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


def resume(args: Namespace) -> int:
    run = args.run.expanduser().absolute()
    record = read_record(run)
    drawn = record is not None and record["fields"]["seed"] is None  # a seed that is given begins the random streams anew
    words = ["--run_name", run.name, "--buffer_dir", str(run.parent), "--resume", "auto", *(["seed=None"] if drawn else [])]
    return main(["train", "--from", str(run), *words, *args.more])


def rerun(args: Namespace) -> int:
    return main(["train", "--from", str(args.run), *args.more])


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
    if not args.quiet:
        print(choice.describe(make_env.env_id, vars(args)))
    given = Namespace(**vars(args))
    vars(args).update({k: v for k, v in choice.arguments.items() if vars(args)[k] is None})  # in place, for `record_settings`
    if args.steps is not None:
        spread_steps(args, given)
    val_episodes = args.val_episodes or (None if args.eval_timesteps else _val_episodes(args, horizon))
    val_steps = make_env.steps_of(env, -(-(val_episodes or 2) // max(1, args.parallel_actors)))
    env.close()
    tstep = cli_utils.default_tstep_encoder(settings, observations, d_hidden=128, d_output=64)
    traj = cli_utils.switch_traj_encoder(settings, args.traj_encoder, memory_size=args.memory_size, layers=args.memory_layers)
    settings |= {f"{NETS}.actor_critic.{head}.d_hidden": 128 for head in ("Actor", "NCritics")} | choice.settings
    steps = args.epochs * args.timesteps_per_epoch
    exploration = cli_utils.switch_exploration(settings, "egreedy", steps_anneal=max(1, steps // 2))
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
        options = [] if experiment.sample_actions else ["--greedy"]
        print(f"\nto evaluate it again: {eval_command(experiment.run_dir, args.env, *options)}")
        if args.traj_encoder != "ff":
            print(f"to see what its memory is for: {eval_command(experiment.run_dir, args.env, '--memory')}")

    cli_utils.run_trials(args, make_experiment, test)
    for line in unmeasured:
        print(f"amago train: {line}", file=sys.stderr)
    return 1 if unmeasured else 0


# ---- settings for an environment -------------------------------------------------------------------------------------------


class Choice(NamedTuple):
    """Settings chosen for an environment."""

    arguments: dict[str, Any]  # of the command
    settings: dict[str, Any]  # {"Class.argument": value}; configuration files win over them
    reason: str  # why the agent has memory, or has none; a clause

    def describe(self, env_id: str, given: Mapping[str, Any]) -> str:
        """The choice as text, without the arguments that the user has set (values of ``given`` other than None)."""
        words = [f"--{k} {v}" for k, v in self.arguments.items() if given.get(k) is None]
        bindings = [f"{'.'.join(k.split('.')[-2:])} = {v}" for k, v in self.settings.items()]
        memory = "without memory" if self.arguments["traj_encoder"] == "ff" else "with memory"
        lines = [f"chosen for {env_id}: an agent {memory}, {self.reason}"]
        lines += ["  " + " ".join(words)] if words else []
        lines += ["  " + "; ".join(bindings)] if bindings else []
        return "\n".join(fit_width(line) for line in lines)


def choose_settings(
    env: AMAGOEnv,
    horizon: int,
    memory: str = "auto",
    traj_encoder: str | None = None,
    agent_type: type[BaseAgent] = Agent,
    plain: bool = False,
) -> Choice:
    """Choose settings for an environment.

    Args:
        env: the environment. Its spaces and its Gymnasium spec are read; where actions are choices, random actions are tried for at
            most `TRIAL_STEPS` steps and `TRIAL_SECONDS`.
        horizon: most steps of a rollout.
        memory: "auto", "none", or the name of a sequence model with memory.
        traj_encoder: the sequence model, if the user names one; it decides, and "ff" means no memory.
        agent_type: receives those settings that it has.
        plain: the arguments of agents with memory, and otherwise the library's defaults (``--no_choices``).
    """
    if traj_encoder is not None and memory not in ("auto", "none" if traj_encoder == "ff" else traj_encoder):
        raise ValueError(f"--memory {memory} and --traj_encoder {traj_encoder} contradict each other; leave out one of them")
    images = any(is_image(space) for space in env.observation_space.spaces.values())
    model = traj_encoder or {"auto": ARGUMENTS["traj_encoder"], "none": "ff"}.get(memory, memory)
    if plain:
        return Choice(ARGUMENTS | {"traj_encoder": model}, {}, "with the library's settings, as --no_choices says")
    if traj_encoder is not None or memory != "auto":
        reason = "as --traj_encoder says" if traj_encoder is not None else "as --memory says"
    elif images:
        reason = "because one image does not show what moves"
    elif comes_with_gymnasium(env):
        model, reason = "ff", "because the vectors that Gymnasium's own environments return are their whole state"
    else:
        reason = "because its observations may be less than its state; --memory none is faster where they are not"
    if model != "ff" or images:
        chosen: Settings = {}, {"tau": 0.01}, {f"{EXPERIMENT}.lr_cooldown": 0.5}
    elif any(part.kind == "continuous" for part in env.action_spec.parts):
        chosen = _continuous(horizon)
    else:
        chosen = _discrete(isinstance(env.raw_observation_space, gym.spaces.Discrete), chance_tells_nothing(env))
    arguments, options, settings = chosen
    if images_use_little(env):
        settings |= {
            f"{NETS}.tstep_encoders.{encoder}.normalize_images": True for encoder in ("CNNTstepEncoder", "DictTstepEncoder")
        }
    settings[f"{EXPERIMENT}.ema_decay"] = 0.99  # policies waver around good ones; their average does not
    if issubclass(agent_type, Agent):  # agents that classify returns have no outputs of their size
        options["rescale_critics"] = True
    selector = config.selector_of(agent_type)
    known = config.settable_parameters(selector)
    own = {f"{selector}.{name}": value for name, value in options.items() if name in known}
    return Choice(ARGUMENTS | {"traj_encoder": model} | arguments, own | settings, reason)


def comes_with_gymnasium(env: AMAGOEnv) -> bool:
    """True if the environment is part of Gymnasium, whose environments are fully observed (spaces do not show this)."""
    spec = env.spec
    if spec is None or spec.entry_point is None or spec.additional_wrappers:
        return False
    module = spec.entry_point if isinstance(spec.entry_point, str) else spec.entry_point.__module__
    return module.startswith("gymnasium.envs.")


def chance_tells_nothing(env: AMAGOEnv) -> bool:
    """True if `TRIAL_STEPS` random steps give only one value of reward and no termination, within `TRIAL_SECONDS`.

    False where rows are stepped together, and after an error of the environment: `Experiment.start` raises it again, with an explanation.
    """
    if env.batched_envs > 1:
        return False
    inner = env.env.env  # without the conversion of actions
    inner.action_space.seed(0)
    until, over, rewards = time.monotonic() + TRIAL_SECONDS, True, set()
    try:
        for step in range(TRIAL_STEPS):
            if over:
                inner.reset(seed=0 if step == 0 else None)
            _, reward, terminated, over, _ = inner.step(inner.action_space.sample())
            rewards.add(float(reward))
            if terminated or len(rewards) > 1 or time.monotonic() > until:
                return False
    except Exception:
        return False
    return True


def images_use_little(env: AMAGOEnv) -> bool:
    """True where the first images of an environment use less than a twentieth of the bounds of their space, as codes in a space of colours do.

    False after an error of the environment: `Experiment.start` raises it again, with an explanation.
    """
    spaces = {k: s for k, s in env.observation_space.spaces.items() if isinstance(s, gym.spaces.Box) and is_image(s)}
    try:
        observed = [env.reset(seed=seed)[0].obs for seed in range(4)] if spaces else []
    except Exception:
        return False
    used = {k: np.ptp(np.stack([obs[k] for obs in observed]).astype(np.float64)) for k in spaces}
    return any(0.0 < used[k] < (float(s.high.max()) - float(s.low.min())) / 20.0 for k, s in spaces.items())


def _discrete(counted_states: bool, hard_to_explore: bool) -> Settings:
    arguments = {
        "parallel_actors": 16, "grads_per_epoch": 125, "memory_layers": 1, "max_seq_len": 16, "batch_size": 48, "learning_rate": 6e-4,
    }  # fmt: skip
    options = {"gamma": 0.99, "tau": 0.05, "n_step": 10}
    settings: dict[str, Any] = {
        f"{MULTIGAMMAS}.discrete": [0.9], f"{MULTIGAMMAS}.continuous": [0.9], f"{EXPERIMENT}.lr_cooldown": 0.6,
        f"{NETS}.tstep_encoders.FFTstepEncoder.n_layers": 1,
    }  # fmt: skip
    if counted_states:  # moves are often random there: FrozenLake needs targets of the trained policy, not of the exploring one
        options |= {"n_step": 1, "offline_coeff": 1.0}
        settings[f"{GREEDY}.repeat"] = 4.0
    elif hard_to_explore:  # choices that are held reach further (Acrobot), and end rollouts early where that is easy (CartPole)
        settings |= {f"{GREEDY}.repeat": (1.0, 16.0), f"{GREEDY}.randomize_eps": False}
        arguments["epochs"] = 60  # actions that are found late are learned late
    return arguments, options, settings


def _continuous(horizon: int) -> Settings:
    arguments = {
        "parallel_actors": 12, "epochs": 48, "memory_layers": 1, "max_seq_len": 8, "batch_size": 32, "learning_rate": 5e-4,
    }  # fmt: skip
    # a tenth of a rollout: critics need as many rounds of updates as they look ahead, and noise in actions blurs later rewards
    gamma = round(1.0 - 1.0 / min(max(horizon / 10, 20), 100), 4)
    options = {"gamma": gamma, "tau": 0.02}
    settings: dict[str, Any] = {
        # where the observation is the state, some deterministic policy is optimal
        f"{EXPERIMENT}.sample_actions": False, f"{MULTIGAMMAS}.continuous": [0.8], f"{EXPERIMENT}.lr_cooldown": 0.5,
        f"{NETS}.policy_dists.TanhGaussian.std_low": 0.29, f"{NETS}.policy_dists.TanhGaussian.std_high": 0.3,
        f"{GREEDY}.repeat": (1.0, round(max(4.0, horizon / 20), 1)),  # swinging up a hill takes dozens of steps in one direction
    }  # fmt: skip
    return arguments, options, settings
