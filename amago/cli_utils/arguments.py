"""The command-line arguments that training scripts share."""

from __future__ import annotations

import dataclasses
import functools
from argparse import (
    SUPPRESS,
    Action,
    ArgumentDefaultsHelpFormatter,
    ArgumentParser,
    ArgumentTypeError,
    Namespace,
)
from collections.abc import Callable
from decimal import Decimal
from math import inf
from typing import Any

from amago.cli_utils.parts import AGENTS, CNNS, REGISTRIES, TRAJ_ENCODERS
from amago.cli_utils.settings import Configs
from amago.config import Default
from amago.envs.pool import ENV_MODES
from amago.run.settings import LOG_TO, PROGRESS, ExperimentSettings

SETTINGS = {field.name: field for field in dataclasses.fields(ExperimentSettings) if field.metadata["help"]}
"""Fields of `amago.Experiment` by the argument that `amago.run.settings.setting` declares for them."""

LIBRARY_DEFAULTS: dict[str, Any] = {
    "parallel_actors": 24, "epochs": 500, "batches_per_epoch": Default(700), "grads_per_epoch": Default(700), "dset_max_size": inf,
    "val_interval": 10, "ckpt_interval": 20, "dloader_workers": Default(6),
}  # fmt: skip
"""Defaults of `parse_args`, the examples and ``amago train``, where they differ from `add_common_cli`, which has the
original's."""

BUFFER_STEPS = 1_000_000
"""Default number of steps in the replay buffer. Trajectories differ too much in length to count them."""


def whole_number(text: str) -> int:
    """The type of a whole-number argument: "80_000", "80000" or "8e4" -> 80000."""
    try:
        value = Decimal(text)
        if value == int(value):
            return int(value)
    except (ArithmeticError, ValueError):
        pass
    raise ArgumentTypeError(f"{text!r} is not a whole number")


def at_least(least: int) -> Callable[[str], int]:
    """The type of a whole number that is not below ``least``."""

    def parse(text: str) -> int:
        value = whole_number(text)
        if value < least:
            raise ArgumentTypeError(f"must be at least {least}, got {text}")
        return value

    return parse


class DefaultsHelpFormatter(ArgumentDefaultsHelpFormatter):
    """Names the default of each argument that has one; texts of several lines are not refilled."""

    def _get_help_string(self, action: Action) -> str | None:
        absent = action.default is None or action.default is False or action.default in (inf, ())
        return action.help if absent else super()._get_help_string(action)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return text if "\n" in text else super()._fill_text(text, width, indent)


def resume_point(text: str) -> str | int:
    """The type of ``--resume``: "never", "auto" or the number of an epoch."""
    if text in ("never", "auto"):
        return text
    try:
        return whole_number(text)
    except ArgumentTypeError:
        raise ArgumentTypeError(f"{text!r} is neither never, nor auto, nor the number of an epoch") from None


class _Spellings(list[str]):
    """The spellings of an argument. When a script replaces one, argparse takes it away, and the argument that keeps the other
    one must neither set a default, nor be required, nor be shown."""

    def __init__(self, action: Action) -> None:
        super().__init__(action.option_strings)
        self.action = action

    def remove(self, spelling: str) -> None:
        super().remove(spelling)
        self.action.default = self.action.help = SUPPRESS
        self.action.required = False


def part_name(kind: str) -> Callable[[str], str]:
    """For ``type=`` of an argument: a name of `amago.cli_utils.register`, or the name of its class, such as "nature" or
    "NatureishCNN".

    Args:
        kind: "actor", "cnn" or "distribution".
    """

    def find(given: str) -> str:
        names = {name: name for name in REGISTRIES[kind]} | {cls.__name__: name for name, cls in REGISTRIES[kind].items()}
        if given not in names:
            raise ArgumentTypeError(f"invalid choice: {given!r} (choose from {', '.join(sorted(REGISTRIES[kind]))})")
        return names[given]

    return find


class _Together(Action):
    """Sets each of ``dests``: names under which scripts read one argument."""

    def __init__(self, option_strings: list[str], dest: str, dests: tuple[str, ...] = (), **kwargs: Any) -> None:
        super().__init__(option_strings, dest, **kwargs)
        self.dests = dests

    def __call__(self, parser: ArgumentParser, namespace: Namespace, values: object, option_string: str | None = None) -> None:
        for dest in (self.dest, *self.dests):
            setattr(namespace, dest, values)


def add_common_cli(parser: ArgumentParser) -> ArgumentParser:
    """Add the arguments that all training scripts share, with the original's defaults. `create_experiment_from_cli` reads them.

    An argument of the same name that the script adds afterwards replaces the common one.
    """
    for container in (parser, *parser._action_groups):  # argparse makes groups with the parser's choice at that time
        container.conflict_handler = "resolve"
    _add_collecting(parser)
    _add_learning(parser)
    return parser


Add = Callable[..., None]


def _group(parser: ArgumentParser, title: str) -> tuple[Add, Add]:
    """Two functions that add an argument to a new group: one a whole number by default, one False unless it is given.

    Each argument has both spellings, ``--run_name`` and ``--run-name``.
    """
    group = parser.add_argument_group(title)

    def add(name: str, help: str, *others: str, **options: Any) -> None:
        if not options.keys() & {"type", "action", "choices", "nargs"}:
            options["type"] = whole_number
        spellings = dict.fromkeys((f"--{name}", f"--{name.replace('_', '-')}", *others))
        action = group.add_argument(*spellings, **{"dest": name, "help": help, **options})
        action.option_strings = _Spellings(action)

    return add, functools.partial(add, action="store_true")


_BOTH: dict[str, Any] = {"type": whole_number, "action": _Together}


def _add_collecting(parser: ArgumentParser) -> None:
    add, switch = _group(parser, "files")
    add("run_name", "name of the run; --trials appends _trial_N", type=str, required=True)
    add("buffer_dir", "directory for replay buffers, checkpoints and logs", type=str, required=True)
    add("ckpt", "go on with the training state saved in this epoch, or with the weights where only these are left")
    resume = "never, auto (continue from the newest training state, if there is one), or the epoch to continue from"
    add("resume", resume, type=resume_point, default="never")
    switch("overwrite", "delete an earlier run of this name: its checkpoints, metrics and collected trajectories")
    add("init_from", "begin with the weights of this run, training state or file of weights", type=str)
    switch("share_buffer", "collect into a buffer that holds the trajectories of another run")
    add("dset_max_steps", f"most steps in the replay buffer; {BUFFER_STEPS:,} if it has no other limit", default=inf)
    add("dset_max_size", "most trajectories in the replay buffer", default=20_000)
    add("dset_max_bytes", "most bytes in the replay buffer", default=inf)

    add, switch = _group(parser, "agent")
    add("agent_type", "kind of agent", default="agent", choices=sorted(AGENTS))
    add("traj_encoder", "sequence model", default="transformer", choices=sorted(TRAJ_ENCODERS))
    add("memory_size", "width of the sequence model", default=256)
    add("memory_layers", "layers of the sequence model", default=3)
    context = "context length in timesteps; if not given, the script chooses"
    add("max_seq_len", context, dests=("common_max_seq_len",), **_BOTH)

    add, switch = _group(parser, "data collection")
    add("parallel_actors", "number of environments that run in parallel", default=12)
    budget = "environment steps of all actors together, in place of --epochs: the last epoch collects what is left"
    add("steps", budget, dests=("common_steps",), type=at_least(1), action=_Together)
    add("timesteps_per_epoch", "environment steps of each actor in an epoch", default=1000)
    modes = "worker processes (async), this process (sync), or one environment with a batch dimension"
    add("env_mode", modes, default="async", choices=ENV_MODES)
    switch("no_async", "step all environments in this process, without workers: --env_mode sync")
    roles = "whether this process collects, learns, or does both"
    add("mode", roles, default="both", choices=("both", "collect", "learn"))
    add("start_learning_at_epoch", "epochs of collection before the first update", default=0)
    steps = "environment steps of each actor in an evaluation, at most; if not given, the script chooses"
    add("eval_timesteps", steps, dests=("common_eval_timesteps",), **_BOTH)


def _add_learning(parser: ArgumentParser) -> None:
    add, switch = _group(parser, "learning")
    for name, other in (("batches_per_epoch", "grads_per_epoch"), ("grads_per_epoch", "batches_per_epoch")):
        add(name, f"batches in an epoch; the same as --{other}", default=Default(1000), dests=(other,), **_BOTH)
    add("dloader_workers", "threads that read batches ahead", default=8)
    add("learning_rate", "learning rate of AdamW", "--lr", type=float, default=1e-4)
    add("lr_cooldown", "fraction of training, at its end, over which the learning rate falls to 0", type=float)
    add("mixed_precision", "precision of the networks", default="no", choices=("no", "bf16", "fp16"))
    switch("keep_best", "also keep the weights of the best evaluation, in ckpts/best")
    add("trials", "number of agents to train, one after another, with consecutive seeds", default=1)
    files = "gin files, YAML files and settings such as agent.gamma=0.99, applied from left to right after all other settings"
    add("configs", files, nargs="*", default=(), action=Configs, metavar="FILE")
    one = {"dest": "configs", "action": Configs, "nargs": 1, "default": (), "metavar": "FILE"}
    add("config", "a file of settings, as --configs takes them", **one)

    add, switch = _group(parser, "several processes")
    launch = "run as one learner and so many collectors, each with all actors, which overlap ('amago launch'); 0: one process"
    add("collectors", launch, default=0)
    add("learners", "with --collectors: processes that train together", default=1)
    ratio = "updates per environment step, within which learner or collectors wait (from half to twice the script's own ratio)"
    add("updates_per_step", f"with --collectors: {ratio}", type=str, metavar="MIN:MAX")
    ray = "with --collectors: Ray starts them on the nodes of a cluster: auto, or HOST:PORT; needs --bus"
    add("ray", ray, type=str, metavar="ADDRESS")
    lag = "with --collectors: versions by which the policy of a collector may be older than the newest; then it waits"
    add("max_policy_lag", lag, metavar="VERSIONS")
    waiting = (
        "with --collectors: gigabytes that may wait on a machine while they cannot be delivered; then collectors pause (10)"
    )
    add("max_undelivered", waiting, type=float, metavar="GB")
    add("bus", "collectors on other machines deliver there ('amago launch --help')", type=str, metavar="URL")

    add, switch = _group(parser, "logging")
    switch("log", "log to Weights & Biases (AMAGO_WANDB_PROJECT, AMAGO_WANDB_ENTITY)")
    switch("no_log", "do not log to Weights & Biases, whatever --log says")
    switch("tensorboard", "log to TensorBoard")
    add("log_to", "loggers by name", nargs="*", default=(), choices=LOG_TO, metavar="NAME")
    films = "epochs between films of a rollout, in the run's directory, TensorBoard and Weights & Biases; if not given, there are none"
    add("video_interval", films)
    progress = "rich: a line for each epoch, and in a terminal a bar with the time left; plain: the lines alone; none: neither"
    add("progress", progress, default="rich", choices=PROGRESS)
    switch("quiet", "print neither progress nor notes")

    add, switch = _group(parser, "settings of the experiment")
    known = {action.dest for action in parser._actions}
    for name, field in SETTINGS.items():  # that declare their arguments themselves
        if name not in known and isinstance(field.default, bool):
            switch(name, field.metadata["help"])
        elif name not in known:
            kind = type(field.default) if isinstance(field.default, float | str) else whole_number
            add(name, field.metadata["help"], type=kind, default=field.default)


def add_pixel_cli(parser: ArgumentParser) -> None:
    """Add ``--cnn`` and ``--no_augmentation``, for scripts with image observations.

    Use them as ``switch_tstep_encoder(config, "cnn", cnn_type=args.cnn, drqv2_aug=not args.no_augmentation)``.
    """
    parser.add_argument("--cnn", default="impala", type=part_name("cnn"), help=f"image encoder: {', '.join(sorted(CNNS))}")
    parser.add_argument("--no_augmentation", action="store_true", help="do not shift images randomly during training")


def dataset_limits_from_cli(args: Namespace) -> dict[str, Any]:
    """The limits of a `DiskTrajDataset` that the arguments of `add_common_cli` set, by name; 1,000,000 steps if they set none."""
    limits = {name: vars(args)[name] for name in ("dset_max_size", "dset_max_steps", "dset_max_bytes")}
    return limits if min(limits.values()) < inf else limits | {"dset_max_steps": BUFFER_STEPS}


def experiment_fields_from_cli(args: Namespace) -> dict[str, Any]:
    """The fields of `amago.Experiment` that arguments of `add_common_cli` set, except parameters of
    `create_experiment_from_cli`."""
    optional: dict[str, Any] = {} if args.lr_cooldown is None else {"lr_cooldown": args.lr_cooldown}
    if not isinstance(args.dloader_workers, Default):
        optional["dloader_workers"] = args.dloader_workers
    # the one of two names whose default a script has changed; None before a command has chosen
    batches = args.batches_per_epoch if isinstance(args.grads_per_epoch, Default) else args.grads_per_epoch
    given = vars(args)
    found = {name: given[name] for name in SETTINGS} | {
        "ckpt_base_dir": args.buffer_dir, "parallel_actors": args.parallel_actors, "train_timesteps_per_epoch": args.timesteps_per_epoch,
        "env_mode": "sync" if args.no_async else args.env_mode, "start_learning_at_epoch": args.start_learning_at_epoch,
        "train_batches_per_epoch": None if batches is None else int(batches), "resume": args.resume, "overwrite": args.overwrite,
        "total_steps": given.get("common_steps"), "share_buffer": args.share_buffer, "init_from": args.init_from, "log_to_wandb": args.log and not args.no_log,
        "log_to_tensorboard": args.tensorboard, "log_to": args.log_to, "verbose": not args.quiet, "progress": args.progress, "save_trajs_as": "segments",
        **optional,
    }  # fmt: skip
    # without an argument gin's value counts, or the default, which is None
    unset = {f.name for f in dataclasses.fields(ExperimentSettings) if f.default is None and found.get(f.name) is None}
    return {name: value for name, value in found.items() if name not in unset}
