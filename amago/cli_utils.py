"""Helpers for training scripts: command-line arguments, and switching parts of the agent by name."""

from __future__ import annotations

import contextlib
from argparse import ArgumentDefaultsHelpFormatter, ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Callable, Iterable, MutableMapping, Sequence
from typing import Any

from amago import config as gin_config
from amago.agent import Agent, BaseAgent, MultiTaskAgent
from amago.envs.exploration import BilevelEpsilonGreedy, EpsilonGreedy, ExplorationWrapper
from amago.experiment import Experiment
from amago.loading import DiskTrajDataset
from amago.nets.actor_critic import Actor, NCritics, NCriticsTwoHot, ResidualActor
from amago.nets.cnn import CNN, DrQCNN, IMPALAishCNN, NatureishCNN
from amago.nets.policy_dists import GMM, Beta, TanhGaussian
from amago.nets.traj_encoders import FFTrajEncoder, GRUTrajEncoder, MambaTrajEncoder, TformerTrajEncoder, TrajEncoder
from amago.nets.tstep_encoders import CNNTstepEncoder, FFTstepEncoder, GoalTstepEncoder, TstepEncoder
from amago.run.console import metrics_table

Config = MutableMapping[str, Any]

TRAJ_ENCODERS: dict[str, type[TrajEncoder]] = {
    "ff": FFTrajEncoder,
    "gru": GRUTrajEncoder,
    "rnn": GRUTrajEncoder,
    "mamba": MambaTrajEncoder,
    "transformer": TformerTrajEncoder,
}
TSTEP_ENCODERS: dict[str, type[TstepEncoder]] = {"ff": FFTstepEncoder, "cnn": CNNTstepEncoder, "goal": GoalTstepEncoder}
AGENTS: dict[str, type[BaseAgent]] = {"agent": Agent, "multitask": MultiTaskAgent}
EXPLORATION: dict[str, type[ExplorationWrapper]] = {"egreedy": EpsilonGreedy, "bilevel": BilevelEpsilonGreedy}

ACTORS: dict[str, type] = {"ff": Actor, "residual": ResidualActor}
CRITICS: dict[str, type] = {"scalar": NCritics, "two_hot": NCriticsTwoHot}
CNNS: dict[str, type[CNN]] = {"drq": DrQCNN, "impala": IMPALAishCNN, "nature": NatureishCNN}
DISTRIBUTIONS: dict[str, type] = {"tanh_gaussian": TanhGaussian, "beta": Beta, "gmm": GMM}

_REGISTRIES: dict[str, MutableMapping[str, Any]] = {
    "traj_encoder": TRAJ_ENCODERS, "tstep_encoder": TSTEP_ENCODERS, "agent": AGENTS, "exploration": EXPLORATION, "actor": ACTORS,
    "critic": CRITICS, "cnn": CNNS, "distribution": DISTRIBUTIONS,
}  # fmt: skip
# arguments whose value may be a registered name
_NAMED = {"actor_type": "actor", "critic_type": "critic", "cnn_type": "cnn", "continuous_dist_type": "distribution"}

# what `--memory_size` and `--memory_layers` mean for each sequence model
_SIZES: dict[type[TrajEncoder], Callable[[int], dict[str, int]]] = {
    FFTrajEncoder: lambda size: {"d_model": size},
    GRUTrajEncoder: lambda size: {"d_hidden": size, "d_output": size},
    MambaTrajEncoder: lambda size: {"d_model": size},
    TformerTrajEncoder: lambda size: {"d_model": size, "d_ff": 4 * size},
}


def use_config(custom_params: Config | None = None, gin_configs: Iterable[str] | None = None) -> None:
    """Change defaults: first ``custom_params`` (``{"Class.argument": value}``), then ``.gin`` files from left to right.

    Raises:
        ValueError: a name that does not exist, with the nearest ones that do.
    """
    gin_config.bind(custom_params or {})
    gin_config.parse_files(gin_configs or ())


def register(kind: str, name: str, cls: type) -> None:
    """Let ``name`` stand for your own class: in the ``switch_*`` functions, and, if called before `add_common_cli`, on the command
    line.

    Args:
        kind: "traj_encoder", "tstep_encoder", "agent", "exploration", "actor", "critic", "cnn" or "distribution".
        name: what to call it.
        cls: marked ``@gin.configurable``.

    Raises:
        ValueError: there is no such kind, the name stands for another class, or the class is not configurable.
    """
    if kind not in _REGISTRIES:
        raise ValueError(f"kind must be one of {', '.join(sorted(_REGISTRIES))}, got kind={kind!r}")
    known = _REGISTRIES[kind].get(name)
    if known is not None and gin_config.selector_of(known) != gin_config.selector_of(cls):
        raise ValueError(f"name={name!r} already stands for the {kind} {known.__name__}; give {cls.__name__} another")
    gin_config.selector_of(cls)
    _REGISTRIES[kind][name] = cls


def _chosen(kind: str, arch: Any) -> Any:
    known = _REGISTRIES[kind]
    if isinstance(arch, type):
        return arch
    if arch not in known:
        raise ValueError(f"{kind} must be one of {', '.join(sorted(known))} or a class, got {arch!r}")
    return known[arch]


def _switch(kind: str, arch: Any, config: Config, options: dict[str, Any]) -> Any:
    chosen = _chosen(kind, arch)
    selector = gin_config.selector_of(chosen)
    for name, value in options.items():
        if name not in gin_config.parameters_of(selector):
            raise ValueError(
                f"{chosen.__name__} has no argument {name!r}; it has {', '.join(gin_config.parameters_of(selector))}"
            )
        config[f"{selector}.{name}"] = _chosen(_NAMED[name], value) if name in _NAMED else value
    return chosen


def switch_traj_encoder(
    config: Config, arch: str | type[TrajEncoder], memory_size: int | None = None, layers: int | None = None, **kwargs: Any
) -> type[TrajEncoder]:
    """Choose the sequence model and write its settings into ``config`` (apply it with `use_config`).

    Args:
        arch: "ff", "gru" (or "rnn"), "mamba", "transformer", or a class.
        memory_size: width of its states.
        layers: number of its layers.
        kwargs: any other argument of the class.
    """
    chosen = _switch("traj_encoder", arch, config, {})
    options: dict[str, Any] = {}
    if memory_size is not None:
        options |= _SIZES.get(chosen, lambda size: {"d_model": size})(memory_size)
    if layers is not None:
        options["n_layers"] = layers
    return _switch("traj_encoder", chosen, config, options | kwargs)  # type: ignore[no-any-return]


def switch_tstep_encoder(config: Config, arch: str | type[TstepEncoder], **kwargs: Any) -> type[TstepEncoder]:
    """Choose the timestep encoder ("ff", "cnn", "goal" or a class) and write its settings into ``config``.

    ``cnn_type``, of those that have one, may be "drq", "impala", "nature" or a class.
    """
    return _switch("tstep_encoder", arch, config, kwargs)  # type: ignore[no-any-return]


switch_step_encoder = switch_tstep_encoder


def switch_agent(config: Config, agent: str | type[BaseAgent], **kwargs: Any) -> type[BaseAgent]:
    """Choose the agent ("agent", "multitask" or a class) and write its settings into ``config``."""
    return _switch("agent", agent, config, kwargs)  # type: ignore[no-any-return]


def switch_actor(config: Config, actor: str | type, **kwargs: Any) -> type:
    """Choose the actor ("ff", "residual" or a class), write its settings into ``config``, and return it, to be the ``actor_type`` of
    `switch_agent`. ``continuous_dist_type`` may be "tanh_gaussian", "beta", "gmm" or a class."""
    return _switch("actor", actor, config, kwargs)  # type: ignore[no-any-return]


def switch_critic(config: Config, critic: str | type, **kwargs: Any) -> type:
    """Choose the critics ("scalar", "two_hot" or a class), likewise, to be the ``critic_type`` of `switch_agent`."""
    return _switch("critic", critic, config, kwargs)  # type: ignore[no-any-return]


def switch_exploration(config: Config, strategy: str | type[ExplorationWrapper], **kwargs: Any) -> type[ExplorationWrapper]:
    """Choose exploration ("egreedy", "bilevel" or a class) and write its settings into ``config``."""
    return _switch("exploration", strategy, config, kwargs)  # type: ignore[no-any-return]


def switch_async_mode(experiment: Experiment, mode: str) -> Experiment:
    """Let a process do one half of the work; call before ``experiment.start()``.

    "collect": act and evaluate with the newest published weights, never train or delete. "learn": train and publish, never
    act. "both" changes nothing. All processes of a run need the same run name, directories and architecture.
    """
    if mode == "collect":
        experiment.start_learning_at_epoch = float("inf")
        experiment.ckpt_interval = None
        experiment.always_save_latest, experiment.always_load_latest = False, True
        experiment.has_dset_edit_rights = False
    elif mode == "learn":
        experiment.start_collecting_at_epoch = float("inf")
        experiment.train_timesteps_per_epoch = 0
        experiment.val_interval = None
        experiment.always_save_latest, experiment.always_load_latest = True, False
        experiment.has_dset_edit_rights = True
    elif mode != "both":
        raise ValueError(f"mode must be 'collect', 'learn' or 'both', got {mode!r}")
    return experiment


# ---- command line ----------------------------------------------------------------------------------------------------------


def whole_number(text: str) -> int:
    """An argument type: 80_000, 80000 or 8e4."""
    with contextlib.suppress(ValueError):
        return int(text)
    try:
        value = float(text)
    except ValueError:
        raise ArgumentTypeError(f"{text!r} is no number") from None
    if not value.is_integer():
        raise ArgumentTypeError(f"{text!r} is no whole number")
    return int(value)


def resume_point(text: str) -> str | int:
    """An argument type: "never", "auto" or the number of an epoch."""
    if text in ("never", "auto"):
        return text
    try:
        return whole_number(text)
    except ArgumentTypeError:
        raise ArgumentTypeError(f"{text!r} is neither never, nor auto, nor the number of an epoch") from None


def _add(parser: Any, name: str, **kwargs: Any) -> None:
    """Accept both spellings, ``--run_name`` and ``--run-name``."""
    spellings = [f"--{name}"] + ([f"--{name.replace('_', '-')}"] if "_" in name else [])
    parser.add_argument(*spellings, dest=name, **kwargs)


def add_common_cli(parser: ArgumentParser) -> ArgumentParser:
    """Add the arguments that all training scripts share; `create_experiment_from_cli` reads them."""
    files = parser.add_argument_group("files")
    _add(files, "run_name", required=True, help="name of the run; several --trials get _trial_N appended")
    _add(files, "buffer_dir", required=True, help="directory of replay buffers, checkpoints and logs")
    _add(files, "ckpt", type=whole_number, default=None, help="start from the policy of this epoch's checkpoint")
    _add(
        files,
        "resume",
        type=resume_point,
        default="never",
        help="never, auto (continue if there is something to continue), or an epoch",
    )
    _add(files, "dset_max_size", type=whole_number, default=20_000, help="trajectories kept in the replay buffer")

    model = parser.add_argument_group("agent")
    _add(model, "agent_type", default="agent", choices=sorted(AGENTS), help="learning update")
    _add(model, "traj_encoder", default="transformer", choices=sorted(TRAJ_ENCODERS), help="sequence model")
    _add(model, "memory_size", type=whole_number, default=256, help="width of the sequence model")
    _add(model, "memory_layers", type=whole_number, default=3, help="layers of the sequence model")
    _add(model, "max_seq_len", type=whole_number, default=None, help="longest memory, in timesteps; default: of the script")

    data = parser.add_argument_group("data collection")
    _add(data, "parallel_actors", type=whole_number, default=24, help="environments side by side")
    _add(data, "timesteps_per_epoch", type=whole_number, default=1000, help="steps of each actor in an epoch")
    _add(data, "no_async", action="store_true", help="step all environments in this process")
    _add(data, "env_workers", type=whole_number, default=None, help="worker processes; default: the cores")
    _add(data, "mode", default="both", choices=("both", "collect", "learn"), help="what this process does")
    _add(data, "start_learning_at_epoch", type=whole_number, default=0, help="collect this many epochs before training")
    _add(data, "val_interval", type=whole_number, default=10, help="evaluate every so many epochs")
    _add(
        data,
        "eval_timesteps",
        type=whole_number,
        default=None,
        help="steps of each actor in an evaluation; default: of the script",
    )

    learn = parser.add_argument_group("learning")
    _add(learn, "epochs", type=whole_number, default=500, help="epochs of collection and training")
    _add(learn, "grads_per_epoch", type=whole_number, default=700, help="gradient steps in an epoch")
    _add(learn, "batch_size", type=whole_number, default=24, help="sequences in a batch")
    _add(learn, "learning_rate", type=float, default=1e-4, help="of AdamW")
    _add(
        learn,
        "lr_cooldown",
        type=float,
        default=None,
        help="share of training, at its end, in which the learning rate falls to 0",
    )
    _add(learn, "mixed_precision", default="no", choices=("no", "bf16", "fp16"), help="precision of the networks")
    _add(learn, "ckpt_interval", type=whole_number, default=20, help="save a training state every so many epochs")
    _add(learn, "seed", type=whole_number, default=None, help="of everything random")
    _add(
        learn,
        "trials",
        type=whole_number,
        default=1,
        help="train so many agents, one after another, with seeds that follow each other",
    )
    _add(learn, "configs", nargs="*", default=(), metavar="FILE.gin", help="gin files, applied last, from left to right")

    logs = parser.add_argument_group("logging")
    _add(logs, "log", action="store_true", help="log to Weights & Biases (AMAGO_WANDB_PROJECT, AMAGO_WANDB_ENTITY)")
    _add(logs, "tensorboard", action="store_true", help="log to TensorBoard")
    _add(logs, "quiet", action="store_true", help="no progress bars")
    return parser


def add_pixel_cli(parser: ArgumentParser) -> None:
    """Add ``--cnn`` and ``--no_augmentation``, for scripts whose observations are pictures. They are read as
    ``switch_tstep_encoder(config, "cnn", cnn_type=args.cnn, drqv2_aug=not args.no_augmentation)``."""
    parser.add_argument("--cnn", default="impala", choices=sorted(CNNS), help="image encoder")
    parser.add_argument("--no_augmentation", action="store_true", help="do not shift images at random while training")


def experiment_fields_from_cli(args: Namespace) -> dict[str, Any]:
    """The fields of `Experiment` that the common arguments stand for."""
    cooldown = {} if args.lr_cooldown is None else {"lr_cooldown": args.lr_cooldown}
    return {
        "run_name": args.run_name, "ckpt_base_dir": args.buffer_dir, "parallel_actors": args.parallel_actors,
        "train_timesteps_per_epoch": args.timesteps_per_epoch, "env_mode": "sync" if args.no_async else "async",
        "env_workers": args.env_workers, "start_learning_at_epoch": args.start_learning_at_epoch,
        "val_interval": args.val_interval, "epochs": args.epochs, "train_batches_per_epoch": args.grads_per_epoch,
        "batch_size": args.batch_size, "learning_rate": args.learning_rate, "mixed_precision": args.mixed_precision,
        "ckpt_interval": args.ckpt_interval, "seed": args.seed, "resume": args.resume,
        "log_to_wandb": args.log, "log_to_tensorboard": args.tensorboard, "verbose": not args.quiet,
        "save_trajs_as": "segments", **cooldown,
    }  # fmt: skip


def create_experiment_from_cli(
    command_line_args: Namespace,
    make_train_env: Callable[[], Any] | Sequence[Callable[[], Any]],
    make_val_env: Callable[[], Any] | Sequence[Callable[[], Any]],
    max_seq_len: int,
    val_timesteps_per_epoch: int,
    tstep_encoder_type: type[TstepEncoder] = FFTstepEncoder,
    traj_encoder_type: type[TrajEncoder] = TformerTrajEncoder,
    agent_type: type[BaseAgent] = Agent,
    experiment_type: type[Experiment] = Experiment,
    group_name: str | None = None,
    **fields: Any,
) -> Experiment:
    """An `Experiment` from the arguments of `add_common_cli` and what a script knows of its environment.

    Args:
        command_line_args: parsed; ``--max_seq_len`` and ``--eval_timesteps`` replace the script's values.
        max_seq_len, val_timesteps_per_epoch: for this environment.
        experiment_type: a subclass, if you have one.
        group_name: groups runs on Weights & Biases.
        fields: any field of the experiment; these win over the command line.
    """
    args = command_line_args
    settings = experiment_fields_from_cli(args) | {
        "max_seq_len": args.max_seq_len or max_seq_len,
        "val_timesteps_per_epoch": args.eval_timesteps or val_timesteps_per_epoch,
        "wandb_group_name": group_name,
    }
    settings |= fields
    if "dataset" not in settings:
        settings["dataset"] = DiskTrajDataset(args.buffer_dir, settings["run_name"], args.dset_max_size)
    experiment = experiment_type(
        make_train_env=make_train_env, make_val_env=make_val_env, tstep_encoder_type=tstep_encoder_type,
        traj_encoder_type=traj_encoder_type, agent_type=agent_type, **settings,
    )  # fmt: skip
    return switch_async_mode(experiment, args.mode)


def run_trials(args: Namespace, make_experiment: Callable[[Namespace], Experiment], test: Callable[[Experiment], Any]) -> None:
    """Train and test ``args.trials`` agents one after another.

    Args:
        args: from `add_common_cli`; each trial gets a copy with its own ``run_name`` and ``seed``.
        make_experiment: builds an experiment that is not started.
        test: evaluates one that has learned.
    """
    for trial in range(args.trials):
        own = Namespace(**vars(args))
        if args.trials > 1:
            own.run_name = f"{args.run_name}_trial_{trial}"
            own.seed = None if args.seed is None else args.seed + trial
        experiment = make_experiment(own)
        experiment.start()
        try:
            if own.ckpt is not None:
                experiment.load_checkpoint(own.ckpt, resume_training_state=False)
            experiment.learn()
            if own.mode != "learn":
                test(experiment)
        finally:
            experiment.close()


def padding_for(max_seq_len: int, horizon: int) -> str:
    """The ``padded_sampling`` of an `Experiment`: "none" where sequences of ``max_seq_len`` steps hold whole rollouts of at most
    ``horizon`` steps, so that what is remembered and what it is for are in one sequence; else "both", for otherwise the ends of
    rollouts are hardly ever seen."""
    return "none" if max_seq_len >= horizon else "both"


def evaluate_after_training(
    experiment: Experiment,
    timesteps: int | None = None,
    make_env: Callable[[], Any] | Sequence[Callable[[], Any]] | None = None,
    title: str = "after training",
) -> None:
    """Evaluate with `Experiment.evaluate_test` and print the metrics as a table.

    Args:
        experiment: started.
        timesteps: steps of each actor; default: enough for five rollouts, where ``val_timesteps_per_epoch`` is enough for two.
        make_env: of the test; default: the environments of validation.
        title: of the table.
    """
    steps = 5 * (experiment.val_timesteps_per_epoch // 2) + 1 if timesteps is None else timesteps
    metrics = experiment.evaluate_test(experiment.make_val_env if make_env is None else make_env, timesteps=steps)
    print(metrics_table(metrics, title=title))


def parse_args(
    description: str | None, add_cli: Callable[[ArgumentParser], Any], argv: Sequence[str] | None = None
) -> Namespace:
    """The arguments of a training script: those of `add_common_cli`, then its own.

    Args:
        description: opens ``--help``; a script's ``__doc__``.
        add_cli: adds the script's own arguments to the parser, and may change defaults of the common ones.
        argv: instead of ``sys.argv[1:]``.
    """
    parser = ArgumentParser(description=description, formatter_class=ArgumentDefaultsHelpFormatter)
    add_common_cli(parser)
    add_cli(parser)
    return parser.parse_args(argv)


def main(
    description: str | None,
    add_cli: Callable[[ArgumentParser], Any],
    make_experiment: Callable[[Namespace], Experiment],
    test: Callable[[Experiment], Any] = evaluate_after_training,
    argv: Sequence[str] | None = None,
) -> None:
    """A whole training script: `parse_args`, then `run_trials`.

    Args:
        description, add_cli, argv: of `parse_args`.
        make_experiment, test: of `run_trials`; by default `evaluate_after_training`.
    """
    run_trials(parse_args(description, add_cli, argv), make_experiment, test)
