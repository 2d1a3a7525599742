"""What a training script does: make an experiment from its arguments, train, evaluate."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Sequence
from typing import Any

from amago.agent import Agent, BaseAgent
from amago.cli_utils.arguments import DefaultsHelpFormatter, add_common_cli, dataset_limits_from_cli, experiment_fields_from_cli
from amago.cli_utils.errors import running
from amago.cli_utils.relaunch import relaunch_if_asked
from amago.experiment import Experiment
from amago.loading import DiskTrajDataset, RLDataset
from amago.nets.traj_encoders import TformerTrajEncoder, TrajEncoder
from amago.nets.tstep_encoders import FFTstepEncoder, TstepEncoder
from amago.policy.filming import RecordVideo
from amago.run import checkpoint
from amago.run.callbacks import Callback, KeepBest
from amago.run.checkpoint import CheckpointError
from amago.run.console import metrics_table
from amago.run.roles.modes import collect_only, learn_only
from amago.run.run_checkpoints import RunCheckpoints


def switch_async_mode(experiment: Experiment, mode: str) -> Experiment:
    """Let this process only collect or only learn. Call it before ``experiment.start()``.

    All processes of a run need the same run name, directories and networks.

    Args:
        experiment: is changed.
        mode: "collect": act and evaluate with the newest published weights; never train, and delete nothing. "learn": train and
            publish weights; never act. "both": no change.

    Returns:
        the experiment.

    Raises:
        ValueError: the mode is none of these.
    """
    if mode == "collect":
        return make_experiment_collect_only(experiment)
    if mode == "learn":
        return make_experiment_learn_only(experiment)
    if mode != "both":
        raise ValueError(f"mode must be 'collect', 'learn' or 'both', got {mode!r}")
    return experiment


def make_experiment_collect_only(experiment: Experiment) -> Experiment:
    """``switch_async_mode(experiment, "collect")``. Also configures the data set."""
    collect_only(experiment)
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
    **fields: Any,
) -> Experiment:
    """Make an `amago.Experiment` from the arguments of `add_common_cli` and the values that depend on the environment.

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

    Returns:
        the experiment, not started.

    Raises:
        ValueError: nothing says how many steps an evaluation has; the arguments contradict ``--collectors``.
    """
    args = command_line_args
    relaunch_if_asked(args)
    val_timesteps = (
        getattr(args, "common_eval_timesteps", None) or val_timesteps_per_epoch or getattr(args, "eval_timesteps", None)
    )
    if val_timesteps is None:
        raise ValueError("val_timesteps_per_epoch is None: pass the steps of an evaluation, or --eval_timesteps")
    optional = {"run_name": run_name, "traj_save_len": traj_save_len, "dataset": dataset}
    settings = experiment_fields_from_cli(args) | {
        "max_seq_len": getattr(args, "common_max_seq_len", None) or max_seq_len,
        "val_timesteps_per_epoch": val_timesteps,
        "wandb_group_name": group_name,
    }
    settings |= {name: value for name, value in optional.items() if value is not None} | fields
    callbacks: list[Callback] = [KeepBest()] if getattr(args, "keep_best", False) else []
    if getattr(args, "video_interval", None) is not None:
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
        args: of `add_common_cli`; ``--mode`` is applied by `switch_async_mode`. With several trials, trial i gets a copy with the run name
            ``NAME_trial_i`` and the seed ``seed + i``.
        make_experiment: makes an experiment from these arguments; it must not start it.
        test: evaluates a trained experiment. It is not called with ``--mode learn``.
        started: called with each experiment after its ``start()``, for example to write files into the run's directory.

    Raises:
        CheckpointError: the run has no checkpoint ``--ckpt``.
    """
    relaunch_if_asked(args)
    for trial in range(args.trials):
        own = Namespace(**vars(args))
        if args.trials > 1:
            own.run_name = f"{args.run_name}_trial_{trial}"
            own.seed = None if args.seed is None else args.seed + trial
        experiment = switch_async_mode(make_experiment(own), own.mode)
        has_state = own.ckpt is not None and _has_state(experiment, own.ckpt)
        experiment.start()
        try:
            if own.ckpt is not None:
                experiment.load_checkpoint(own.ckpt, resume_training_state=has_state)
            if started is not None:
                started(experiment)
            with running():
                experiment.learn()
                if own.mode != "learn":
                    test(experiment)
        finally:
            experiment.close()


def _has_state(experiment: Experiment, epoch: int) -> bool:
    """Whether the run has the training state of an epoch, and not only its weights (``keep_training_states``).

    Raises:
        CheckpointError: it has neither.
    """
    saved = RunCheckpoints(experiment.run_dir, experiment.run_name)
    if epoch in {checkpoint.epoch_of(path) for path in checkpoint.training_states(saved.states)}:
        return True
    if not saved.weights_of_epoch(epoch).is_file():
        raise CheckpointError(
            f"no training state of epoch {epoch} in {saved.states}, and no weights at {saved.weights_of_epoch(epoch)}"
        )
    return False


def evaluate_after_training(
    experiment: Experiment,
    timesteps: int | None = None,
    make_env: Callable[[], Any] | Sequence[Callable[[], Any]] | None = None,
    title: str = "after training",
) -> None:
    """Evaluate with ``experiment.evaluate_test`` and print the metrics as a table.

    Args:
        experiment: has been started.
        timesteps: steps of each actor; None: 2.5 times ``val_timesteps_per_epoch``, which is five rollouts where that is two.
        make_env: the test environments; None: those of validation.
        title: title of the table.
    """
    steps = 5 * (experiment.val_timesteps_per_epoch // 2) + 1 if timesteps is None else timesteps
    metrics = experiment.evaluate_test(experiment.make_val_env if make_env is None else make_env, timesteps=steps)
    print(metrics_table(metrics, title=title))


def parse_args(
    description: str | None, add_cli: Callable[[ArgumentParser], Any], argv: Sequence[str] | None = None
) -> Namespace:
    """Parse the arguments of a training script: those of `add_common_cli`, and its own.

    Args:
        description: first lines of ``--help``, such as the script's ``__doc__``.
        add_cli: adds the script's own arguments to the parser; it may change defaults of the common ones.
        argv: the words of the command line; None: ``sys.argv[1:]``.
    """
    parser = ArgumentParser(description=description, formatter_class=DefaultsHelpFormatter)
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
    """Run a training script: `parse_args`, then `run_trials`.

    Args:
        description, add_cli, argv: see `parse_args`.
        make_experiment, test: see `run_trials`.
    """
    run_trials(parse_args(description, add_cli, argv), make_experiment, test)
