"""The command-line arguments that training scripts share."""

from __future__ import annotations

import contextlib
from argparse import SUPPRESS, Action, ArgumentDefaultsHelpFormatter, ArgumentParser, ArgumentTypeError, Namespace
from math import inf
from typing import Any

from amago.cli_utils.parts import AGENTS, CNNS, TRAJ_ENCODERS
from amago.envs.pool.make import ENV_MODES
from amago.run.progress import PROGRESS

_DLOADER_WORKERS = 6
_BATCHES_PER_EPOCH = 700

BUFFER_STEPS = 1_000_000
"""Steps in the replay buffer, unless a script or its user says something else. Trajectories differ too much in length to count them."""


def whole_number(text: str) -> int:
    """The type of a whole-number argument: "80_000", "80000" or "8e4" -> 80000."""
    with contextlib.suppress(ValueError):
        return int(text)
    try:
        value = float(text)
    except ValueError:
        raise ArgumentTypeError(f"{text!r} is not a number") from None
    if not value.is_integer():
        raise ArgumentTypeError(f"{text!r} is not a whole number")
    return int(value)


class DefaultsHelpFormatter(ArgumentDefaultsHelpFormatter):
    """Names the default of each argument that has one; texts of several lines stay as they are."""

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


def _add(parser: Any, name: str, *others: str, **kwargs: Any) -> None:
    """Add an argument with both spellings, ``--run_name`` and ``--run-name``, and other names."""
    spellings = [f"--{name}"] + ([f"--{name.replace('_', '-')}"] if "_" in name else [])
    action = parser.add_argument(*spellings, *others, dest=name, **kwargs)
    action.option_strings = _Spellings(action)


class _Together(Action):
    """Sets each of ``dests``: names under which scripts read one argument."""

    def __init__(self, option_strings: list[str], dest: str, dests: tuple[str, ...] = (), **kwargs: Any) -> None:
        super().__init__(option_strings, dest, **kwargs)
        self.dests = dests

    def __call__(self, parser: ArgumentParser, namespace: Namespace, values: Any, option_string: str | None = None) -> None:
        for dest in (self.dest, *self.dests):
            setattr(namespace, dest, values)


class _NoAsync(Action):
    """``--no_async``: ``--env_mode sync``."""

    def __call__(self, parser: ArgumentParser, namespace: Namespace, values: Any, option_string: str | None = None) -> None:
        namespace.no_async, namespace.env_mode = True, "sync"


def add_common_cli(parser: ArgumentParser) -> ArgumentParser:
    """Add the arguments that all training scripts share. `create_experiment_from_cli` reads them.

    An argument of the same name that the script adds afterwards replaces the common one.
    """
    for container in (parser, *parser._action_groups):  # argparse makes groups with the parser's choice at that time
        container.conflict_handler = "resolve"
    _add_files(parser.add_argument_group("files"))
    _add_agent(parser.add_argument_group("agent"))
    _add_collection(parser.add_argument_group("data collection"))
    _add_learning(parser.add_argument_group("learning"))
    _add_processes(parser.add_argument_group("several processes"))
    _add_logging(parser.add_argument_group("logging"))
    return parser


def _add_files(group: Any) -> None:
    _add(group, "run_name", required=True, help="name of the run; --trials appends _trial_N")
    _add(group, "buffer_dir", required=True, help="directory for replay buffers, checkpoints and logs")
    _add(
        group,
        "ckpt",
        type=whole_number,
        default=None,
        help="go on with the training state saved in this epoch, or with the weights where only these are left",
    )
    _add(
        group,
        "resume",
        type=resume_point,
        default="never",
        help="never, auto (continue from the newest training state, if there is one), or the epoch to continue from",
    )
    _add(
        group,
        "overwrite",
        action="store_true",
        help="delete an earlier run of this name: its checkpoints, metrics and collected trajectories",
    )
    _add(group, "init_from", default=None, help="begin with the weights of this run, training state or file of weights")
    _add(group, "share_buffer", action="store_true", help="collect into a buffer that holds the trajectories of another run")
    steps = f"most steps in the replay buffer; {BUFFER_STEPS:,} if it has no other limit"
    _add(group, "dset_max_steps", type=whole_number, default=inf, help=steps)
    _add(group, "dset_max_size", type=whole_number, default=inf, help="most trajectories in the replay buffer")
    _add(group, "dset_max_bytes", type=whole_number, default=inf, help="most bytes in the replay buffer")


def _add_agent(group: Any) -> None:
    _add(group, "agent_type", default="agent", choices=sorted(AGENTS), help="kind of agent")
    _add(group, "traj_encoder", default="transformer", choices=sorted(TRAJ_ENCODERS), help="sequence model")
    _add(group, "memory_size", type=whole_number, default=256, help="width of the sequence model")
    _add(group, "memory_layers", type=whole_number, default=3, help="layers of the sequence model")
    _add(
        group,
        "max_seq_len",
        type=whole_number,
        default=None,
        action=_Together,
        dests=("common_max_seq_len",),
        help="context length in timesteps; if not given, the script chooses",
    )


def _add_collection(group: Any) -> None:
    _add(group, "parallel_actors", type=whole_number, default=24, help="number of environments that run in parallel")
    _add(group, "timesteps_per_epoch", type=whole_number, default=1000, help="environment steps of each actor in an epoch")
    _add(
        group,
        "env_mode",
        default="async",
        choices=ENV_MODES,
        help="worker processes (async), this process (sync), or one environment with a batch dimension",
    )
    _add(
        group,
        "no_async",
        action=_NoAsync,
        nargs=0,
        default=False,
        help="step all environments in this process, without workers",
    )
    _add(group, "env_workers", type=whole_number, default=None, help="worker processes; if not given, one for each core")
    _add(
        group,
        "mode",
        default="both",
        choices=("both", "collect", "learn"),
        help="whether this process collects, learns, or does both",
    )
    _add(group, "start_learning_at_epoch", type=whole_number, default=0, help="epochs of collection before the first update")
    _add(group, "val_interval", type=whole_number, default=10, help="epochs between evaluations")
    _add(
        group,
        "eval_timesteps",
        type=whole_number,
        default=None,
        action=_Together,
        dests=("common_eval_timesteps",),
        help="environment steps of each actor in an evaluation, at most; if not given, the script chooses",
    )
    _add(
        group,
        "val_episodes",
        type=whole_number,
        default=None,
        help="rollouts in an evaluation, over all actors; if not given, as many as end within its steps",
    )


def _add_learning(group: Any) -> None:
    _add(group, "epochs", type=whole_number, default=500, help="epochs of collection and training")
    for name, other in (("batches_per_epoch", "grads_per_epoch"), ("grads_per_epoch", "batches_per_epoch")):
        _add(
            group,
            name,
            type=whole_number,
            default=_BATCHES_PER_EPOCH,
            action=_Together,
            dests=(other,),
            help=f"batches in an epoch; the same as --{other}",
        )
    _add(group, "dloader_workers", type=whole_number, default=_DLOADER_WORKERS, help="threads that read batches ahead")
    _add(group, "batch_size", type=whole_number, default=24, help="sequences in a batch")
    _add(group, "learning_rate", "--lr", type=float, default=1e-4, help="learning rate of AdamW")
    _add(
        group,
        "lr_cooldown",
        type=float,
        default=None,
        help="fraction of training, at its end, over which the learning rate falls to 0",
    )
    _add(group, "mixed_precision", default="no", choices=("no", "bf16", "fp16"), help="precision of the networks")
    _add(group, "ckpt_interval", type=whole_number, default=20, help="epochs between training states")
    _add(group, "keep_best", action="store_true", help="also keep the weights of the best evaluation, in ckpts/best")
    _add(group, "seed", type=whole_number, default=None, help="seed of all random numbers; if not given, a new one is drawn")
    _add(
        group,
        "trials",
        type=whole_number,
        default=1,
        help="number of agents to train, one after another, with consecutive seeds",
    )
    _add(
        group,
        "configs",
        nargs="*",
        default=(),
        metavar="FILE.gin",
        help="gin files, applied from left to right after all other settings",
    )


def _add_processes(group: Any) -> None:
    _add(
        group,
        "collectors",
        type=whole_number,
        default=0,
        help="run as one learner and so many collectors, each with all actors, which overlap ('amago launch'); 0: one process",
    )
    _add(group, "learners", type=whole_number, default=1, help="with --collectors: processes that train together")
    _add(
        group,
        "updates_per_step",
        default=None,
        metavar="MIN:MAX",
        help="with --collectors: updates per environment step, within which learner or collectors wait",
    )
    _add(
        group,
        "ray",
        default=None,
        metavar="ADDRESS",
        help="with --collectors: they run on the nodes of a Ray cluster, of which this machine is one: auto, or HOST:PORT",
    )
    lag = "with --collectors: versions by which the policy of a collector may be older than the newest; then it waits ('amago launch --help')"
    _add(group, "max_policy_lag", type=whole_number, default=None, metavar="VERSIONS", help=lag)
    waiting = (
        "with --collectors: gigabytes that may wait on a machine while they cannot be delivered; then collectors pause (10)"
    )
    _add(group, "max_undelivered", type=float, default=None, metavar="GB", help=waiting)
    _add(group, "node_dir", default=None, metavar="DIR", help="with --ray: directory of each node ('amago launch --help')")


def _add_logging(group: Any) -> None:
    _add(group, "log", action="store_true", help="log to Weights & Biases (AMAGO_WANDB_PROJECT, AMAGO_WANDB_ENTITY)")
    _add(group, "no_log", action="store_true", help="do not log to Weights & Biases, whatever --log says")
    _add(group, "tensorboard", action="store_true", help="log to TensorBoard")
    films = "epochs between films of a rollout, in the run's directory, TensorBoard and Weights & Biases; if not given, there are none"
    _add(group, "video_interval", type=whole_number, default=None, help=films)
    _add(
        group,
        "progress",
        default="rich",
        choices=PROGRESS,
        help="rich: a line for each epoch, and in a terminal a bar with the time left; plain: the lines alone; none: neither",
    )
    _add(group, "quiet", action="store_true", help="print neither progress nor notes")


def add_pixel_cli(parser: ArgumentParser) -> None:
    """Add ``--cnn`` and ``--no_augmentation``, for scripts with image observations.

    Use them as ``switch_tstep_encoder(config, "cnn", cnn_type=args.cnn, drqv2_aug=not args.no_augmentation)``.
    """
    parser.add_argument("--cnn", default="impala", choices=sorted(CNNS), help="image encoder")
    parser.add_argument("--no_augmentation", action="store_true", help="do not shift images randomly during training")


def dataset_limits_from_cli(args: Namespace) -> dict[str, Any]:
    """The limits of a `DiskTrajDataset` that the arguments of `add_common_cli` set, by name; 1,000,000 steps if they set none."""
    limits: dict[str, Any] = {name: getattr(args, name) for name in ("dset_max_size", "dset_max_steps", "dset_max_bytes")}
    return limits if min(limits.values()) < inf else limits | {"dset_max_steps": BUFFER_STEPS}


def experiment_fields_from_cli(args: Namespace) -> dict[str, Any]:
    """The fields of `amago.Experiment` that the arguments of `add_common_cli` set, all but those of `create_experiment_from_cli`."""
    optional: dict[str, Any] = {} if args.lr_cooldown is None else {"lr_cooldown": args.lr_cooldown}
    if args.dloader_workers != _DLOADER_WORKERS:
        optional["dloader_workers"] = args.dloader_workers
    return {
        "run_name": args.run_name, "ckpt_base_dir": args.buffer_dir, "parallel_actors": args.parallel_actors,
        "train_timesteps_per_epoch": args.timesteps_per_epoch, "env_mode": "sync" if args.no_async else args.env_mode,
        "env_workers": args.env_workers, "start_learning_at_epoch": args.start_learning_at_epoch,
        "val_interval": args.val_interval, "val_episodes": args.val_episodes, "epochs": args.epochs,
        "train_batches_per_epoch": _batches_per_epoch(args),
        "batch_size": args.batch_size, "learning_rate": args.learning_rate, "mixed_precision": args.mixed_precision,
        "ckpt_interval": args.ckpt_interval, "seed": args.seed, "resume": args.resume,
        "overwrite": args.overwrite, "share_buffer": args.share_buffer, "init_from": args.init_from,
        "log_to_wandb": args.log and not args.no_log, "log_to_tensorboard": args.tensorboard, "verbose": not args.quiet,
        "progress": getattr(args, "progress", "rich"), "save_trajs_as": "segments", **optional,
    }  # fmt: skip


def _batches_per_epoch(args: Namespace) -> int:
    """Whichever of the two names a script has given another default; on the command line both are set."""
    value: int = args.grads_per_epoch
    return args.batches_per_epoch if value == _BATCHES_PER_EPOCH else value
