"""``amago tune ENV``: search for good settings with Optuna."""

from __future__ import annotations

import dataclasses
import multiprocessing as mp
import warnings
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from amago import cli_utils, config
from amago.cli import train
from amago.cli.gym_env import write_args_file
from amago.cli.tune_result import best_command
from amago.cli_utils.errors import running
from amago.envs.pool.subprocess import usable_cores
from amago.experiment import Experiment
from amago.run.locks import HeldError, RunLock, exclusive
from amago.run.metric_names import AVERAGE_RETURN
from amago.run.signals import Stopped
from amago.run.tuning import KINDS, Dimension, PruneTrial, parse_space
from amago.run.update import NonFiniteTraining

if TYPE_CHECKING:
    import optuna

SHOWN = 10
_NOT_TUNED = {
    "run_name", "buffer_dir", "ckpt_base_dir", "resume", "overwrite", "ckpt", "mode", "trials", "configs", "dataset", "callbacks", "env",
    "make_train_env", "make_val_env", "init_from", "share_buffer", "dset_root", "dset_name", "epochs", "progress", "quiet",
}  # fmt: skip
_FAILURES = (NonFiniteTraining, MemoryError, torch.OutOfMemoryError)


def add_arguments(parser: ArgumentParser) -> None:
    train.add_arguments(parser)
    parser.description = (
        "Search for good settings: train an agent with each trial's settings, stop trials that are worse than others were at the same epoch, and "
        "print the best. The study (study.db) and the runs of its trials are in BUFFER_DIR/RUN_NAME. The same command again continues it, and several at a "
        "time, on one machine, share the work. All arguments of 'amago train' hold for each trial. "
        'Example: amago tune CartPole-v1 --run-name search --buffer-dir runs --epochs 20 --space "learning_rate=loguniform(1e-5,1e-2)" "Agent.gamma=choice(0.9,0.99)"'
    )
    tune = parser.add_argument_group("search")
    tune.add_argument(
        "--space",
        nargs="+",
        action="extend",
        default=None,
        metavar="NAME=KIND(...)",
        help="NAME: an argument of amago train, a field of amago.Experiment, or a gin name such as Agent.gamma. KIND(...): "
        + "; ".join(f"{kind}({'A, B, ...' if kind == 'choice' else 'LOW, HIGH'})" for kind in KINDS),
    )
    tune.add_argument(
        "--trials", type=cli_utils.whole_number, default=20, help="trials of the study, over all processes and restarts"
    )
    tune.add_argument("--processes", type=cli_utils.whole_number, default=1, help="processes that train trials side by side")
    tune.add_argument("--metric", default=AVERAGE_RETURN, help="metric of the evaluations")
    tune.add_argument(
        "--direction", default="maximize", choices=("maximize", "minimize"), help="which values of the metric are better"
    )
    tune.add_argument("--no_prune", "--no-prune", action="store_true", help="train every trial to its end")
    parser.set_defaults(progress=None)


def run(args: Namespace) -> int:
    study_of_optuna()
    for name, usual in (("ckpt", None), ("resume", "never"), ("overwrite", False), ("mode", "both")):
        if getattr(args, name) != usual:
            raise ValueError(
                f"amago tune does not take --{name}: the same command again continues the study; a new one needs another --run_name"
            )
    if args.processes < 1 or args.trials < 1:
        raise ValueError(f"--trials and --processes must be at least 1, got {args.trials} and {args.processes}")
    study = Study(args)  # checks the space, and creates the study before other processes look for it
    context = mp.get_context("spawn")
    others: list[Any] = [context.Process(target=_work, args=(args,)) for _ in range(args.processes - 1)]
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
    print(study.table())
    failed = [p.exitcode for p in others if p.exitcode]
    return int(abs(failed[0])) if failed else 0


def _work(args: Namespace) -> None:
    """Train trials until the study has enough of them."""
    if args.processes > 1:
        torch.set_num_threads(max(1, usable_cores() // args.processes))
    study = Study(args)
    while study.next_trial():
        continue


def study_of_optuna() -> Any:
    """The module ``optuna``.

    Raises:
        ImportError: it is not installed; names the extra.
    """
    try:
        import optuna
    except ImportError as err:
        raise ImportError("amago tune needs Optuna: pip install 'amago[tune]'") from err
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna


class Study:
    """The study of a directory, and its trials in this process.

    Args:
        args: of `add_arguments`.

    Raises:
        ValueError: the space cannot be read, names something unknown, or is not that of the study.
    """

    def __init__(self, args: Namespace):
        self.optuna = study_of_optuna()
        self.args, self.directory = args, Path(args.buffer_dir).expanduser() / args.run_name
        new = not (self.directory / "study.db").exists()
        if new and not args.space:
            raise ValueError(
                'say what to search over, for example --space "learning_rate=loguniform(1e-5,1e-3)" "Agent.gamma=choice(0.99,0.999)"'
            )
        space = parse_space(args.space or ())
        for d in space:
            self._target(d)
        self.directory.mkdir(parents=True, exist_ok=True)
        with exclusive(self.directory), warnings.catch_warnings():
            warnings.simplefilter("ignore", self.optuna.exceptions.ExperimentalWarning)
            self.study = self._open()
            kept = self._settled(space)
        self.space = [(d, self._target(d)) for d in kept]

    def _open(self) -> Any:
        optuna, args = self.optuna, self.args
        url = f"sqlite:///{(self.directory / 'study.db').resolve()}"
        storage = optuna.storages.RDBStorage(url, engine_kwargs={"connect_args": {"timeout": 120}})
        study: Any = optuna.create_study(
            storage=storage,
            study_name=args.run_name,
            load_if_exists=True,
            direction=args.direction,
            pruner=optuna.pruners.NopPruner() if args.no_prune else optuna.pruners.MedianPruner(4, max(1, args.epochs // 5)),
        )
        seed = None if args.seed is None else args.seed + len(study.trials)
        study.sampler = optuna.samplers.TPESampler(seed=seed, constant_liar=True)  # other processes' trials count as bad ones
        return study

    def _settled(self, space: list[Dimension]) -> list[Dimension]:
        """The space of the study, which remembers what it was begun with.

        Raises:
            ValueError: it was begun with something else.
        """
        about = {
            "env": self.args.env,
            "metric": self.args.metric,
            "direction": self.args.direction,
            "space": sorted(d.text for d in space),
        }
        known = self.study.user_attrs
        if not known:
            for name, value in about.items():
                self.study.set_user_attr(name, value)
            return space
        for name, value in about.items():
            if value and known[name] != value:
                raise ValueError(
                    f"the study in {self.directory} has {name} {_said(known[name])}, not {_said(value)}; another --run_name begins a new one"
                )
        return space or parse_space(known["space"])

    def _target(self, d: Dimension) -> str:
        """What a dimension changes: "argument", "field" or "gin".

        Raises:
            ValueError: there is nothing of this name, or a value does not fit.
        """
        parser = ArgumentParser(exit_on_error=False)
        train.add_arguments(parser)
        arguments = {a.dest: a for a in parser._actions if a.option_strings}
        fields = {f.name for f in dataclasses.fields(Experiment)}
        field = d.name.removeprefix("Experiment.")
        if d.name in _NOT_TUNED or field in _NOT_TUNED:
            raise ValueError(f"{d.text!r}: {field} cannot be searched over")
        if d.name in arguments:
            for value in d.values:
                self._converted(arguments[d.name], value, d.text, parser)
            return "argument"
        if field in fields:
            return "field"
        if "." not in d.name:
            raise ValueError(
                f"{d.text!r}: {d.name!r} is neither an argument of amago train nor a field of amago.Experiment; "
                f"{config.suggestion(d.name, sorted({*arguments, *fields} - _NOT_TUNED))} gin names have the form Agent.gamma"
            )
        for value in d.values:
            try:
                with config.temporary({d.name: value}):
                    pass
            except ValueError as err:
                raise ValueError(f"{d.text!r}: {err}") from err
        return "gin"

    def _converted(self, action: Any, value: Any, text: str, parser: ArgumentParser) -> Any:
        """A value as the argument would have it."""
        if action.nargs == 0:
            if not isinstance(value, bool):
                raise ValueError(f"{text!r}: --{action.dest} is a switch; its values are choice(True, False)")
            return value
        try:
            value = parser._get_value(action, str(value))
        except Exception as err:
            raise ValueError(f"{text!r}: {err}") from err
        if action.choices is not None and value not in action.choices:
            raise ValueError(f"{text!r}: --{action.dest} must be one of {', '.join(map(str, action.choices))}, got {value!r}")
        return value

    # ---- trials ---------------------------------------------------------------------------------------------------------

    def next_trial(self) -> bool:
        """Train one trial; returns whether there was one to train."""
        states = self.optuna.trial.TrialState
        with exclusive(self.directory):
            self._give_back_lost_trials()
            waiting = self.study.get_trials(deepcopy=False, states=(states.WAITING,))
            if not waiting and len({_run_of(t) for t in self.study.get_trials(deepcopy=False)}) >= self.args.trials:
                return False
            trial = self.study.ask()
            name = _run_of(trial)
            lock = self._lock(name)
            lock.acquire()
        try:
            self._train(trial, name)
        finally:
            lock.release()
        return True

    def _train(self, trial: optuna.trial.Trial, name: str) -> None:
        states = self.optuna.trial.TrialState
        try:
            value = self._objective(trial, name)
        except self.optuna.TrialPruned as err:
            self.study.tell(trial, state=states.PRUNED)
            self._say(name, trial.params, f"stopped early: {err}")
        except _FAILURES as err:
            self.study.tell(trial, state=states.FAIL)
            self._say(name, trial.params, f"failed: {type(err).__name__}: {str(err).splitlines()[0] if str(err) else ''}")
        except (Stopped, KeyboardInterrupt):
            self._give_back(trial.number, name, trial.params)
            raise
        except BaseException:
            self.study.tell(trial, state=states.FAIL)
            raise
        else:
            self.study.tell(trial, value)
            best = self.study.best_trial
            self._say(name, trial.params, f"{value:.4g} (best {best.value:.4g}, {_run_of(best)})")

    def _objective(self, trial: optuna.trial.Trial, name: str) -> float:
        """The metric of an agent that is trained with the trial's settings."""
        for before in self.study.get_trials(deepcopy=False):
            if before.number != trial.number and _run_of(before) == name:
                for step, value in before.intermediate_values.items():
                    trial.report(value, step)
        with config.temporary({}):
            experiment = self._experiment(trial, name)
            prune = PruneTrial(trial, self.args.metric)
            experiment.callbacks = [*experiment.callbacks, prune]
            experiment.start()
            try:
                write_args_file(experiment.run_dir, self.args.env, self.args.horizon)
                with running():
                    experiment.learn()
                    experiment.evaluate_val()
            finally:
                experiment.close()
        if prune.value is None:
            raise ValueError("no rollout ended in the last evaluation: set --eval_timesteps to the length of a rollout or more")
        return prune.value

    def _experiment(self, trial: optuna.trial.Trial, name: str) -> Experiment:
        own = Namespace(**vars(self.args))
        own.run_name, own.buffer_dir, own.resume, own.trials = name, str(self.directory), "auto", 1
        own.quiet, own.progress = own.quiet or own.progress is None, own.progress or "none"
        own.ckpt_interval = max(1, min(own.ckpt_interval, own.val_interval or own.ckpt_interval))
        parser = ArgumentParser()
        train.add_arguments(parser)
        actions = {a.dest: a for a in parser._actions if a.option_strings}
        bound: dict[str, Any] = {}
        changed: dict[str, Any] = {}
        for d, target in self.space:
            value = d.suggest(trial)
            if target == "argument" and actions[d.name].nargs == 0:
                setattr(own, d.name, value)
            elif target == "argument":
                actions[d.name](parser, own, self._converted(actions[d.name], value, d.text, parser))
            elif target == "field":
                changed[d.name.removeprefix("Experiment.")] = value
            else:
                bound[d.name] = value
        experiment = train.make_experiment(own)
        config.bind(bound)  # after the settings that amago train chooses, and after --configs
        for field, value in changed.items():
            setattr(experiment, field, value)
        return experiment

    # ---- trials of processes that ended ---------------------------------------------------------------------------------

    def _lock(self, name: str) -> RunLock:
        return RunLock(self.directory / "locks" / name)

    def _give_back_lost_trials(self) -> None:
        """Let trials whose process was killed be continued from their last training state."""
        running = self.optuna.trial.TrialState.RUNNING
        for trial in self.study.get_trials(deepcopy=False, states=(running,)):
            lock = self._lock(_run_of(trial))
            try:
                lock.acquire()
            except HeldError:
                continue
            try:
                # another process may have ended the trial, and then freed its lock, since the list was made
                if self.study.get_trials(deepcopy=False)[trial.number].state == running:
                    self._give_back(trial.number, _run_of(trial), trial.params)
            finally:
                lock.release()

    def _give_back(self, number: int, name: str, params: dict[str, Any]) -> None:
        self.study.tell(number, state=self.optuna.trial.TrialState.FAIL)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", self.optuna.exceptions.ExperimentalWarning)
            self.study.enqueue_trial(params, user_attrs={"run": name})

    # ---- what is printed ------------------------------------------------------------------------------------------------

    def _say(self, name: str, params: dict[str, Any], outcome: str) -> None:
        if not self.args.quiet:
            print(f"{name}: {outcome}; {_shown(params)}", flush=True)

    def table(self) -> str:
        """The best trials, and how the others ended."""
        states = self.optuna.trial.TrialState
        trials = self.study.get_trials(deepcopy=False)
        done = [t for t in trials if t.state == states.COMPLETE]
        done.sort(key=lambda t: float(t.values[0]), reverse=self.study.direction.name == "MAXIMIZE")
        pruned = sum(t.state == states.PRUNED for t in trials)
        names = [d.name for d, _ in self.space]
        rows = [["trial", self.args.metric, *names]]
        rows += [[_run_of(t), f"{t.values[0]:.4g}", *(f"{_short(t.params.get(n))}" for n in names)] for t in done[:SHOWN]]
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        lines = ["  ".join(cell.ljust(w) for cell, w in zip(row, widths)).rstrip() for row in rows]
        ended = f"{len(done)} trials finished, {pruned} stopped early"
        if not done:
            return f"\n{ended}: no best settings yet"
        best = self.directory / _run_of(done[0])
        command = best_command(self.args, self.space, done[0].params, self.directory / "best.gin")
        return "\n".join(
            ["", f"the best of {self.directory} ({ended})", *lines, "", "to train with these settings:", command, ""]
            + [f"amago eval {best}", f"amago report {self.directory}"]
        )


def _run_of(trial: Any) -> str:
    """The name of a trial's run; a trial that continues another one has its run."""
    return str(trial.user_attrs.get("run", f"trial_{trial.number}"))


def _shown(params: dict[str, Any]) -> str:
    return ", ".join(f"{name} {_short(value)}" for name, value in params.items())


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _said(value: Any) -> str:
    return " ".join(map(repr, value)) if isinstance(value, list) else repr(value)
