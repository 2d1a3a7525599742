"""``amago tune ENV``: search for good settings with Optuna."""

from __future__ import annotations

import dataclasses
import multiprocessing as mp
import shlex
import warnings
from argparse import ArgumentError, ArgumentParser, Namespace
from collections.abc import Iterable
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from amago import cli_utils, config
from amago.cli import train
from amago.cli.gym_env import eval_command, write_args_file
from amago.cli_utils.arguments import experiment_fields_from_cli
from amago.cli_utils.scripts import running
from amago.envs.pool.subprocess import usable_cores
from amago.experiment import Experiment
from amago.run.group import Stopped
from amago.run.learner import NonFiniteTraining
from amago.run.locks import HeldError, RunLock, exclusive
from amago.run.metric_names import AVERAGE_RETURN
from amago.run.tuning import KINDS, Dimension, PruneTrial, parse_space

if TYPE_CHECKING:
    import optuna

SHOWN = 10
_NOT_TUNED = {
    "run_name", "buffer_dir", "ckpt_base_dir", "resume", "overwrite", "ckpt", "mode", "trials", "configs", "dataset", "callbacks", "env",
    "make_train_env", "make_val_env", "init_from", "share_buffer", "dset_root", "dset_name", "epochs", "progress", "quiet",
}  # fmt: skip
_ARGUMENT_OF = {
    "train_timesteps_per_epoch": "timesteps_per_epoch", "train_batches_per_epoch": "grads_per_epoch",
    "val_timesteps_per_epoch": "eval_timesteps",
}  # fmt: skip
"""Arguments of ``amago train``, by the fields of `amago.Experiment` of another name that they set."""
_SET_BY_TRAIN = {"padded_sampling", "tstep_encoder_type", "traj_encoder_type", "agent_type", "exploration_wrapper_type"}


def add_arguments(parser: ArgumentParser) -> None:
    train.add_arguments(parser)
    parser.description = (
        "Search for good settings: train an agent with each trial's settings, stop trials that are worse than others were at the same epoch, and "
        "print the best. The study (study.db) and the runs of its trials are in BUFFER_DIR/RUN_NAME. The same command again continues it, and several at a "
        "time, on one machine, share the work. All arguments of 'amago train' hold for each trial. "
        'Example: amago tune CartPole-v1 --run-name search --buffer-dir runs --epochs 20 --space "learning_rate=loguniform(1e-5,1e-2)" "Agent.gamma=choice(0.9,0.99)"'
    )
    _add_search_arguments(parser)
    parser.set_defaults(progress=None)


def _add_search_arguments(parser: ArgumentParser) -> None:
    add = parser.add_argument_group("search").add_argument
    kinds = "; ".join(f"{kind}({'A, B, ...' if kind == 'choice' else 'LOW, HIGH'})" for kind in KINDS)
    space = (
        f"NAME: an argument of amago train, a field of amago.Experiment, or a gin name such as Agent.gamma. KIND(...): {kinds}"
    )
    add("--space", nargs="+", action="extend", default=None, metavar="NAME=KIND(...)", help=space)
    trials = "trials of the study, over all processes and restarts"
    add("--trials", type=cli_utils.whole_number, default=20, help=trials)
    add("--processes", type=cli_utils.whole_number, default=1, help="processes that train trials side by side")
    add("--metric", default=AVERAGE_RETURN, help="metric of the evaluations")
    direction = "which values of the metric are better"
    add("--direction", default="maximize", choices=("maximize", "minimize"), help=direction)
    add("--no_prune", "--no-prune", action="store_true", help="train every trial to its end")


def run(args: Namespace) -> int:
    if args.ckpt is not None or args.resume != "never" or args.overwrite or args.mode != "both":
        raise ValueError(
            "amago tune takes none of --ckpt, --resume, --overwrite and --mode: the same command again continues the study; a new one "
            "needs another --run_name"
        )
    if args.processes < 1 or args.trials < 1:
        raise ValueError(f"--trials and --processes must be at least 1, got {args.trials} and {args.processes}")
    study = Study(args)  # checks the space, and creates the study before other processes look for it
    context = mp.get_context("spawn")
    others: list[SpawnProcess] = [context.Process(target=_work, args=(args,)) for _ in range(args.processes - 1)]
    for process in others:
        process.start()
    try:
        _work(args)
    except BaseException:
        for process in others:
            process.terminate()  # it saves a training state, and gives its trial back
        raise
    finally:
        for process in others:
            process.join()
    print(study.summary())
    return next((abs(p.exitcode) for p in others if p.exitcode), 0)


def _work(args: Namespace) -> None:
    """Train trials until the study has enough of them."""
    if args.processes > 1:
        torch.set_num_threads(max(1, usable_cores() // args.processes))
    study = Study(args)
    while study.next_trial():
        continue


class TrainCommand:
    """``amago train`` with the settings of a trial; ValueError if the space names something unknown, or a value does not fit."""

    def __init__(self, args: Namespace, space: list[Dimension]):
        own = ArgumentParser(add_help=False)
        _add_search_arguments(own)
        for name in ("run_name", "progress"):
            own.add_argument(f"--{name}", f"--{name.replace('_', '-')}")
        own.add_argument("--configs", nargs="*")
        self.configs, self.words = [str(path) for path in args.configs], own.parse_known_args(args.words)[1]
        self.parser = ArgumentParser(exit_on_error=False)
        train.add_arguments(self.parser)
        self.plain, self.fields = vars(self.parse([])), {f.name for f in dataclasses.fields(Experiment)}
        self.space = space
        for dimension in space:
            try:
                self._check(dimension)
            except ArgumentError as err:
                raise ValueError(f"{dimension.text!r}: {err} (of a switch, values are choice(True, False))") from err
            except ValueError as err:
                raise ValueError(f"{dimension.text!r}: {err}") from err

    def parse(self, words: list[str]) -> Namespace:
        return self.parser.parse_known_args(["--run_name=", *self.words, *words])[0]

    def _check(self, d: Dimension) -> None:
        field = d.name.removeprefix("Experiment.")
        argument = _ARGUMENT_OF.get(field, field)
        if field in _NOT_TUNED:
            raise ValueError(f"{field} cannot be searched over")
        if argument not in self.plain:
            if field in {*_SET_BY_TRAIN, *experiment_fields_from_cli(Namespace(**self.plain))}:
                raise ValueError(f"amago train sets {field} itself, by one of its arguments: search over that one")
            if field not in self.fields and "." not in d.name:
                near = config.suggestion(d.name, sorted({*self.plain, *self.fields} - _NOT_TUNED))
                known = "neither an argument of amago train nor a field of amago.Experiment"
                raise ValueError(f"{d.name!r} is {known}; {near} gin names have the form Agent.gamma")
        for value in d.values:
            words, bindings = self._settings([(d, value)])
            self.parse(words)
            with config.temporary(bindings):
                pass

    def _settings(self, values: Iterable[tuple[Dimension, object]]) -> tuple[list[str], dict[str, object]]:
        """Values as words of the command line, and those that gin holds by name."""
        words: list[str] = []
        bindings: dict[str, object] = {}
        for d, value in values:
            field = d.name.removeprefix("Experiment.")
            argument = _ARGUMENT_OF.get(field, field)
            if argument not in self.plain:
                bindings[f"Experiment.{field}" if field in self.fields else d.name] = value
            elif value is not False:
                words.append(f"--{argument}" if value is True else f"--{argument}={value}")
        return words, bindings

    def with_values(self, values: Iterable[tuple[Dimension, object]], file: Path) -> list[str]:
        """The words of a command that trains with some values, without a name of the run; values that gin holds are written to ``file``."""
        words, bindings = self._settings(values)
        if bindings:
            file.write_text("".join(f"{name} = {value!r}\n" for name, value in bindings.items()), encoding="utf-8")
        configs = [*self.configs, *([str(file)] if bindings else [])]
        return [*self.words, *words, *(["--configs", *configs] if configs else [])]


class Study:
    """The study of a directory, and its trials in this process; ValueError if the space cannot be read, or differs from the study's."""

    def __init__(self, args: Namespace):
        try:
            import optuna
        except ImportError as err:
            raise ImportError("amago tune needs Optuna: pip install 'amago[tune]'") from err
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self.states = optuna.trial.TrialState
        self.args, self.directory = args, Path(args.buffer_dir).expanduser() / args.run_name
        if not args.space and not (self.directory / "study.db").exists():
            raise ValueError(
                'say what to search over, for example --space "learning_rate=loguniform(1e-5,1e-3)" "Agent.gamma=choice(0.99,0.999)"'
            )
        self.command = TrainCommand(args, parse_space(args.space or ()))
        self.directory.mkdir(parents=True, exist_ok=True)
        with exclusive(self.directory), warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            url = f"sqlite:///{(self.directory / 'study.db').resolve()}"
            pruner = optuna.pruners.NopPruner() if args.no_prune else optuna.pruners.MedianPruner(4, max(1, args.epochs // 5))
            self.study = optuna.create_study(
                storage=optuna.storages.RDBStorage(url, engine_kwargs={"connect_args": {"timeout": 120}}),
                study_name=args.run_name, load_if_exists=True, direction=args.direction, pruner=pruner,
            )  # fmt: skip
            seed = None if args.seed is None else args.seed + len(self.study.trials)
            # other processes' trials count as bad ones
            self.study.sampler = optuna.samplers.TPESampler(seed=seed, constant_liar=True)
            self._compare_with_record()
        if not args.space:
            self.command.space = parse_space(self.study.user_attrs["space"])

    def _compare_with_record(self) -> None:
        """Record what the study was begun with; ValueError if it was begun with other settings."""
        args, known = self.args, self.study.user_attrs
        space = sorted(d.text for d in self.command.space)
        for name, value in {"env": args.env, "metric": args.metric, "direction": args.direction, "space": space}.items():
            if not known:
                self.study.set_user_attr(name, value)
            elif value and known[name] != value:
                raise ValueError(
                    f"the study in {self.directory} has {name} {known[name]!r}, not {value!r}; another --run_name begins a new one"
                )

    def trials(self, *states: optuna.trial.TrialState) -> list[optuna.trial.FrozenTrial]:
        """The trials in some states; of all, if none is given."""
        return self.study.get_trials(deepcopy=False, states=states or None)

    # ---- trials ---------------------------------------------------------------------------------------------------------

    def next_trial(self) -> bool:
        """Train one trial; returns whether there was one to train."""
        with exclusive(self.directory):
            self._give_back_lost_trials()
            if not self.trials(self.states.WAITING) and len({_run_of(t) for t in self.trials()}) >= self.args.trials:
                return False
            trial = self.study.ask()
            lock = self._lock(trial)
            lock.acquire()
        try:
            self._finish(trial, _run_of(trial))
        finally:
            lock.release()
        return True

    def _finish(self, trial: optuna.trial.Trial, name: str) -> None:
        """Train a trial, and record its outcome."""
        from optuna import TrialPruned

        try:
            value = self._train(trial, name)
        except TrialPruned as err:
            self.study.tell(trial, state=self.states.PRUNED)
            outcome = f"stopped early: {err}"
        except (NonFiniteTraining, MemoryError, torch.OutOfMemoryError) as err:
            self.study.tell(trial, state=self.states.FAIL)
            outcome = f"failed: {type(err).__name__}: {str(err).partition(chr(10))[0]}"
        except (Stopped, KeyboardInterrupt):
            self._give_back(trial)
            raise
        except BaseException:
            self.study.tell(trial, state=self.states.FAIL)
            raise
        else:
            self.study.tell(trial, value)
            outcome = f"{value:.4g} (best {self.study.best_value:.4g}, {_run_of(self.study.best_trial)})"
        if not self.args.quiet:
            print(f"{name}: {outcome}; {', '.join(f'{k} {_format(v)}' for k, v in trial.params.items())}", flush=True)

    def _train(self, trial: optuna.trial.Trial, name: str) -> float:
        """The metric of an agent that is trained with the trial's settings."""
        for before in self.trials():
            if before.number != trial.number and _run_of(before) == name:
                for step, value in before.intermediate_values.items():
                    trial.report(value, step)
        args = self.args
        words = self.command.with_values([(d, d.suggest(trial)) for d in self.command.space], self.directory / f"{name}.gin")
        own = self.command.parse(words)
        own.run_name, own.buffer_dir, own.resume = name, str(self.directory), "auto"
        own.quiet, own.progress = args.quiet or args.progress is None, args.progress or "none"
        own.ckpt_interval = max(1, min(own.ckpt_interval, own.val_interval or own.ckpt_interval))
        with config.temporary({}):
            experiment = train.make_experiment(own)
            prune = PruneTrial(trial, args.metric)
            experiment.callbacks = [*experiment.callbacks, prune]
            experiment.start()
            try:
                write_args_file(experiment.run_dir, args.env, args.horizon)
                with running():
                    experiment.learn()
                    experiment.evaluate_val()
            finally:
                experiment.close()
        if prune.value is None:
            raise ValueError("no rollout ended in the last evaluation: set --eval_timesteps to the length of a rollout or more")
        return prune.value

    def _lock(self, trial: optuna.trial.BaseTrial) -> RunLock:
        return RunLock(self.directory / "locks" / _run_of(trial))

    def _give_back_lost_trials(self) -> None:
        """Let trials whose process was killed be continued from their last training state."""
        for trial in self.trials(self.states.RUNNING):
            lock = self._lock(trial)
            try:
                lock.acquire()
            except HeldError:
                continue
            # another process may have ended the trial, and then freed its lock, since the list was made
            if self.trials()[trial.number].state == self.states.RUNNING:
                self._give_back(trial)
            lock.release()

    def _give_back(self, trial: optuna.trial.BaseTrial) -> None:
        from optuna.exceptions import ExperimentalWarning

        self.study.tell(trial.number, state=self.states.FAIL)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ExperimentalWarning)
            self.study.enqueue_trial(trial.params, user_attrs={"run": _run_of(trial)})

    def summary(self) -> str:
        """The best trials, how the others ended, and commands for the best settings."""
        done = self.trials(self.states.COMPLETE)
        done.sort(key=lambda t: float(t.values[0]), reverse=self.args.direction == "maximize")
        ended = f"{len(done)} trials finished, {len(self.trials(self.states.PRUNED))} stopped early"
        if not done:
            return f"\n{ended}: no best settings yet"
        space, file, best = self.command.space, self.directory / "best.gin", done[0]
        rows = [["trial", self.args.metric, *(d.name for d in space)]]
        rows += [[_run_of(t), _format(t.values[0]), *(_format(t.params.get(d.name)) for d in space)] for t in done[:SHOWN]]
        widths = [max(map(len, column)) for column in zip(*rows)]
        table = ["  ".join(cell.ljust(w) for cell, w in zip(row, widths)).rstrip() for row in rows]
        file.unlink(missing_ok=True)
        values = [(d, d.value_of(best.params[d.name])) for d in space]
        words = ["amago", "train", *self.command.with_values(values, file), "--run_name", f"{self.args.run_name}_best"]
        return "\n".join(
            ["", f"the best of {self.directory} ({ended})", *table, "", "to train with these settings:", shlex.join(words), ""]
            + [
                eval_command(self.directory / _run_of(best), self.args.env),
                shlex.join(["amago", "report", str(self.directory)]),
            ]
        )


def _run_of(trial: optuna.trial.BaseTrial) -> str:
    """The name of a trial's run; a trial that continues another one has its run."""
    return str(trial.user_attrs.get("run", f"trial_{trial.number}"))


def _format(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
