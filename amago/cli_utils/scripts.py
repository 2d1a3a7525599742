"""Steps of a training script: make an experiment from its arguments, train, evaluate."""

from __future__ import annotations

import os
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from amago.agent import Agent, BaseAgent
from amago.cli_utils.arguments import (
    LIBRARY_DEFAULTS,
    DefaultsHelpFormatter,
    add_common_cli,
    dataset_limits_from_cli,
    experiment_fields_from_cli,
)
from amago.cli_utils.settings import record_settings, take_settings
from amago.experiment import Experiment
from amago.launch import command
from amago.loading import DiskTrajDataset, RLDataset
from amago.nets.traj_encoders import TformerTrajEncoder, TrajEncoder
from amago.nets.tstep_encoders import FFTstepEncoder, TstepEncoder
from amago.policy.filming import RecordVideo
from amago.run import checkpoint
from amago.run.callbacks import Callback, KeepBest
from amago.run.console import metrics_table
from amago.run.launched.protocol import VARIABLE
from amago.run.settings import collect_only, learn_only

UNTIL_STOPPED = 10**9
"""Epochs of a process that only collects. Set ``experiment.epochs`` afterwards for another number."""


def switch_async_mode(experiment: Experiment, mode: str) -> Experiment:
    """Let this process only collect or only learn. Call it before ``experiment.start()``; it changes the experiment, and returns it.

    All processes of a run need the same run name, directories and networks.

    Args:
        mode: "collect": act and evaluate with the newest published weights until the process is stopped; never train, and delete
            nothing. "learn": train and publish weights; never act. "both": no change.
    """
    if mode == "collect":
        return make_experiment_collect_only(experiment)
    if mode == "learn":
        return make_experiment_learn_only(experiment)
    if mode != "both":
        raise ValueError(f"mode must be 'collect', 'learn' or 'both', got {mode!r}")
    return experiment


def make_experiment_collect_only(experiment: Experiment) -> Experiment:
    """``switch_async_mode(experiment, "collect")``. Also configures the dataset."""
    collect_only(experiment)
    experiment.epochs = UNTIL_STOPPED
    experiment.init_dsets()
    return experiment


def make_experiment_learn_only(experiment: Experiment) -> Experiment:
    """``switch_async_mode(experiment, "learn")``."""
    learn_only(experiment)
    return experiment


def create_experiment_from_cli(
    command_line_args: Namespace,
    make_train_env: Callable[[], Any] | Sequence[Callable[[], Any]],
    make_val_env: Callable[[], Any] | Sequence[Callable[[], Any]],
    max_seq_len: int,
    val_timesteps_per_epoch: int | None = None,
    tstep_encoder_type: type[TstepEncoder] = FFTstepEncoder,
    traj_encoder_type: type[TrajEncoder] = TformerTrajEncoder,
    agent_type: type[BaseAgent] = Agent,
    experiment_type: type[Experiment] = Experiment,
    group_name: str | None = None,
    run_name: str | None = None,
    traj_save_len: float | None = None,
    dataset: RLDataset | None = None,
    **fields: object,
) -> Experiment:
    """Make an `amago.Experiment`, not started, from the arguments of `add_common_cli` and the values that depend on the environment.

    ``--mode`` has no effect here: `run_trials` and `switch_async_mode` apply it. With ``--collectors`` the process is replaced by a launcher
    that runs the same command line in several processes.

    Args:
        command_line_args: parsed arguments. ``--max_seq_len`` and ``--eval_timesteps``, if given, win over the next values, unless the
            script has arguments of these names itself.
        make_train_env, make_val_env: fields of the experiment.
        max_seq_len, val_timesteps_per_epoch: suitable values for this environment. The second may be None where ``--eval_timesteps``
            is given.
        tstep_encoder_type, traj_encoder_type, agent_type: parts of the agent.
        experiment_type: `amago.Experiment` or a subclass.
        group_name: group of the run on Weights & Biases.
        run_name: None: ``--run_name``.
        traj_save_len: see `amago.Experiment`; None: its default.
        dataset: None: a `amago.loading.DiskTrajDataset` in ``--buffer_dir``, named like the run.
        fields: other fields of the experiment. They win over the command line.
    """
    args = command_line_args
    relaunch_if_asked(args)
    given = vars(args)  # a script may have replaced arguments, and its own mean something else
    val_timesteps = given.get("common_eval_timesteps") or val_timesteps_per_epoch or given.get("eval_timesteps")
    if val_timesteps is None:
        raise ValueError("val_timesteps_per_epoch is None: pass the steps of an evaluation, or --eval_timesteps")
    optional = {"run_name": run_name, "traj_save_len": traj_save_len, "dataset": dataset}
    settings = experiment_fields_from_cli(args) | {
        "max_seq_len": given.get("common_max_seq_len") or max_seq_len,
        "val_timesteps_per_epoch": val_timesteps,
        "wandb_group_name": group_name,
    }
    settings |= {name: value for name, value in optional.items() if value is not None} | fields
    for entry in given.get("configs") or ():
        if isinstance(entry, Mapping):  # what the user asks for wins over the script
            settings |= {
                name.removeprefix("Experiment."): value for name, value in entry.items() if name.startswith("Experiment.")
            }
    callbacks: list[Callback] = [KeepBest()] if given.get("keep_best") else []
    if given.get("video_interval") is not None:
        callbacks.append(RecordVideo(args.video_interval))
    if callbacks:
        settings["callbacks"] = [*settings.get("callbacks", ()), *callbacks]
    if "dataset" not in settings:
        settings["dataset"] = DiskTrajDataset(args.buffer_dir, settings["run_name"], **dataset_limits_from_cli(args))
    return experiment_type(
        make_train_env=make_train_env, make_val_env=make_val_env, tstep_encoder_type=tstep_encoder_type,
        traj_encoder_type=traj_encoder_type, agent_type=agent_type, **settings,
    )  # fmt: skip


def run_trials(
    args: Namespace,
    make_experiment: Callable[[Namespace], Experiment],
    test: Callable[[Experiment], Any],
    started: Callable[[Experiment], Any] | None = None,
) -> None:
    """Train and test ``args.trials`` agents one after another.

    Args:
        args: of `add_common_cli`; ``--mode`` is applied by `switch_async_mode`, but with ``--epochs``. With several trials, trial i gets a copy with the run name
            ``NAME_trial_i`` and the seed ``seed + i``.
        make_experiment: makes an experiment from these arguments; it must not start it.
        test: evaluates a trained experiment. It is not called with ``--mode learn``.
        started: called with each experiment after its ``start()``, for example to write files into the run's directory.
    """
    relaunch_if_asked(args)
    for trial in range(args.trials):
        own = Namespace(**vars(args))
        if args.trials > 1:
            own.run_name = f"{args.run_name}_trial_{trial}"
            own.seed = None if args.seed is None else args.seed + trial
        experiment = make_experiment(own)
        epochs = experiment.epochs
        switch_async_mode(experiment, own.mode)
        experiment.epochs = epochs  # --epochs counts for a collector, too
        experiment.start()
        try:
            if own.ckpt is not None:  # the weights alone, where these are left
                states = checkpoint.training_states(experiment.checkpoints.states)
                experiment.load_checkpoint(own.ckpt, resume_training_state=own.ckpt in map(checkpoint.epoch_of, states))
            record_settings(experiment, own)
            if started is not None:
                started(experiment)
            with running():
                experiment.learn()
                if own.mode != "learn":
                    test(experiment)
        finally:
            experiment.close()


def evaluate_after_training(
    experiment: Experiment,
    timesteps: int | None = None,
    make_env: Callable[[], Any] | Sequence[Callable[[], Any]] | None = None,
    title: str = "after training",
) -> None:
    """Evaluate with ``experiment.evaluate_test`` and print the metrics as a table.

    Args:
        timesteps: steps of each actor; None: 2.5 times ``val_timesteps_per_epoch``, which is five rollouts where that is two, and ten
            times as many if no rollout ends within these.
        make_env: the test environments; None: the validation environments.
    """
    steps = 5 * (experiment.val_timesteps_per_epoch // 2) + 1 if timesteps is None else timesteps
    make_test_env = experiment.make_val_env if make_env is None else make_env
    metrics = experiment.evaluate_test(make_test_env, timesteps=steps)
    if not metrics and timesteps is None:
        metrics = experiment.evaluate_test(make_test_env, timesteps=10 * steps)
    print(metrics_table(metrics, title=title))


def parse_args(
    description: str | None, add_cli: Callable[[ArgumentParser], Any], argv: Sequence[str] | None = None
) -> Namespace:
    """Parse the arguments of a training script: the common ones (`add_common_cli`) and its own.

    Args:
        description: first lines of ``--help``, such as the script's ``__doc__``.
        add_cli: adds the script's own arguments to the parser; it may change defaults of the common ones.
        argv: the words of the command line; None: ``sys.argv[1:]``.
    """
    parser = ArgumentParser(description=description, formatter_class=DefaultsHelpFormatter)
    add_common_cli(parser)
    parser.set_defaults(**LIBRARY_DEFAULTS)
    add_cli(parser)
    args, words = parser.parse_known_args(argv)
    try:
        take_settings(parser, args, words)
    except ValueError as err:
        parser.error(str(err))
    return args


def main(
    description: str | None,
    add_cli: Callable[[ArgumentParser], Any],
    make_experiment: Callable[[Namespace], Experiment],
    test: Callable[[Experiment], Any] = evaluate_after_training,
    argv: Sequence[str] | None = None,
) -> None:
    """Run a training script: `parse_args`, then `run_trials`."""
    run_trials(parse_args(description, add_cli, argv), make_experiment, test)


# ---- errors ----------------------------------------------------------------------------------------------------------------

_MARK = "_amago_raised_while_running"


@contextmanager
def running() -> Iterator[None]:
    """Mark errors of training or evaluation: the `amago` command shows their traceback. Others concern the arguments."""
    try:
        yield
    except Exception as err:
        vars(err)[_MARK] = True
        raise


def raised_while_running(err: Exception) -> bool:
    """True if an error was raised in a block of `running`."""
    return _MARK in vars(err)


# ---- --collectors ----------------------------------------------------------------------------------------------------------


def relaunch_if_asked(args: Namespace) -> None:
    """Replace this process by a launcher that runs the same command line with several processes, if ``--collectors`` is given.

    In the processes that the launcher starts, this does nothing.
    """
    given = vars(args)
    if os.environ.get(VARIABLE):
        return
    if not given.get("collectors"):
        if given.get("ray") is not None:
            raise ValueError(f"--ray {args.ray} says where collectors run, but there are none: give --collectors N")
        return
    for name, usual in (("mode", "both"), ("trials", 1)):
        if given[name] != usual:
            raise ValueError(
                f"--collectors launches one run of a learner and collectors, which --{name} {given[name]} contradicts: give one of them"
            )
    if not any(word.split("=")[0] == "--collectors" for word in sys.argv[1:]):
        raise ValueError(
            "collectors is set, but not on the command line: call amago.distributed.launch(script, argv, collectors=...)"
        )
    names = ("learners", "updates_per_step", "quiet", "max_policy_lag", "max_undelivered", "ray", "bus")
    words = command(*_program(), args.collectors, **{name: given[name] for name in names})
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(words[0], words)


def _program() -> tuple[str, list[str]]:
    """The program of this process, and its arguments."""
    main = vars(sys.modules["__main__"])
    if main.get("__spec__") is not None and main["__spec__"].name:
        return "-m", [main["__spec__"].name.removesuffix(".__main__"), *sys.argv[1:]]
    file = Path(main.get("__file__") or "")
    if not file.is_file():
        raise ValueError("--collectors needs a script in a file, which each process can run")
    if file.name == "amago" and file.parent == Path(sys.executable).parent:  # the command, which other machines have elsewhere
        return "-m", ["amago.cli", *sys.argv[1:]]
    return main["__file__"], sys.argv[1:]
