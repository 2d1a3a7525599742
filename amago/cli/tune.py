"""``amago tune ENV``: search for good settings with Optuna."""

from __future__ import annotations

import itertools
import math
import multiprocessing as mp
import shlex
import warnings
from argparse import ArgumentParser, Namespace
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from amago import cli_utils, config
from amago.cli import train
from amago.cli.gym_env import eval_command
from amago.cli_utils.arguments import at_least
from amago.cli_utils.scripts import raised_while_running, running
from amago.cli_utils.settings import OF_ONE_RUN, record_settings, set_arguments
from amago.describe import text_table
from amago.envs.pool.subprocess import usable_cores
from amago.registry import require
from amago.run.data import NothingTrainedError
from amago.run.group import Stopped
from amago.run.learner import NonFiniteTraining
from amago.run.locks import HeldError, RunLock, exclusive
from amago.run.metric_names import AVERAGE_RETURN
from amago.run.results import Estimate
from amago.run.tuning import KINDS, PruneTrial, grid_of, parse_space, value_of

if TYPE_CHECKING:
    import optuna

SHOWN = 10
REPEATS = 100
"""Settings that a process draws again, and does not train again, before it takes the space for exhausted."""
_NOT_TUNED = OF_ONE_RUN | {
    "ckpt_base_dir", "dataset", "callbacks", "env", "make_train_env", "make_val_env", "init_from", "dset_root", "dset_name", "epochs", "seed", "sweep",
}  # fmt: skip


def add_arguments(parser: ArgumentParser) -> None:
    train.add_arguments(parser)
    parser.description = (
        "Search for good settings: train an agent with each trial's settings, stop trials that are worse than others were at the same epoch, and "
        "print the best. The study (study.db) and the runs of its trials are in BUFFER_DIR/RUN_NAME. The same command again continues it, and several at a "
        "time, on one machine, share the work. All arguments of 'amago train' hold for each trial. "
        'Example: amago tune CartPole-v1 --run-name search --buffer-dir runs --epochs 20 --space "learning_rate=loguniform(1e-5,1e-2)" "Agent.gamma=choice(0.9,0.99)"'
    )
    parser.set_defaults(progress=None, processes=1)
    add = parser.add_argument_group("search").add_argument
    kinds = "; ".join(f"{kind}({'A, B, ...' if kind == 'choice' else 'LOW, HIGH'})" for kind in KINDS)
    space = (
        f"NAME: an argument of amago train, a field of amago.Experiment, or a name such as agent.gamma. KIND(...): {kinds}. Lists of values "
        "do without: agent.gamma=0.9,0.99"
    )
    add("--space", nargs="+", action="extend", metavar="NAME=KIND(...)", help=space)
    trials = "settings to try, over all processes and restarts, each with --seeds seeds"
    add("--trials", type=at_least(1), default=20, help=trials)
    add("--grid", action="store_true", help="try every combination of choices and whole numbers, once, in place of --trials")
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
    study = Study(args)  # checks the space, and creates the study before other processes look for it
    study.retry()
    context = mp.get_context("spawn")
    others: list[SpawnProcess] = [context.Process(target=_work, args=(args,)) for _ in range(args.processes - 1)]
    for process in others:
        process.start()
    try:
        _work(args)
    except BaseException:
        for process in others:
            process.terminate()  # it saves a training state
        raise
    finally:
        for process in others:
            process.join()
    print(study.summary())
    missing = study.failed() and (args.grid or not study.trials(study.states.COMPLETE))
    return next((abs(p.exitcode) for p in others if p.exitcode), 1 if missing else 0)


def sweep(args: Namespace) -> int:
    """``amago train`` with lists of values, or with several seeds: a study of every combination, none of which is stopped early."""
    processes = args.processes or min(usable_cores(), args.seeds * math.prod(map(len, args.sweep.values())))
    own = {"space": None, "metric": AVERAGE_RETURN, "direction": "maximize", "no_prune": True, "grid": True, "progress": None}
    return run(Namespace(**vars(args) | own | {"processes": processes}))


def _work(args: Namespace) -> None:
    """Train trials until the study has enough of them."""
    if args.processes > 1:
        torch.set_num_threads(max(1, usable_cores() // args.processes))
    study = Study(args)
    while study.next_trial():
        continue


class Study:
    """The study of a directory, and its trials in this process; ValueError if the space cannot be read, or differs from the study's."""

    def __init__(self, args: Namespace):
        optuna = require("optuna", "tune", "amago tune")
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self.states = optuna.trial.TrialState
        self.args, self.directory = args, Path(args.buffer_dir).expanduser() / args.run_name
        choices = (f"{name}=choice({', '.join(map(repr, values))})" for name, values in args.sweep.items())
        self.texts = [*(args.space or ()), *choices]
        self.space = parse_space(self.texts)
        if not self.space and not args.grid:
            raise ValueError(
                'say what to search over, for example --space "learning_rate=loguniform(1e-5,1e-3)" "Agent.gamma=choice(0.99,0.999)"'
            )
        self.parser, self.repeats = ArgumentParser(), 0
        train.add_arguments(self.parser)
        for name, text in zip(self.space, self.texts):
            self._check(name, text)
        values = [grid_of(distribution) or [] for distribution in self.space.values()]
        grid = [dict(zip(self.space, row)) for row in itertools.product(*values)] if args.grid else []
        self.directory.mkdir(parents=True, exist_ok=True)
        with exclusive(self.directory), warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            url = f"sqlite:///{(self.directory / 'study.db').resolve()}"
            epochs = args.epochs or train.ARGUMENTS["epochs"]
            pruner = optuna.pruners.NopPruner() if args.no_prune else optuna.pruners.MedianPruner(4, max(1, epochs // 5))
            self.study = optuna.create_study(
                storage=optuna.storages.RDBStorage(url, engine_kwargs={"connect_args": {"timeout": 120}}),
                study_name=args.run_name, load_if_exists=True, direction=args.direction, pruner=pruner,
            )  # fmt: skip
            # other processes' trials count as bad ones
            seed = None if args.seed is None else args.seed + len(self.study.trials)
            self.study.sampler = optuna.samplers.TPESampler(seed=seed, constant_liar=True)
            self._compare_with_record()
            for i in range(self.study.user_attrs.get("grid_seeds", 0), args.seeds if args.grid else 0):
                for params in grid:
                    self.study.enqueue_trial(params, user_attrs={"seed": i})
                self.study.set_user_attr("grid_seeds", i + 1)
        self.wanted = 0 if args.grid else args.trials * args.seeds

    def _check(self, name: str, text: str) -> None:
        """Refuse a setting that is unknown, or has a value that does not fit."""
        distribution = vars(self.space[name])
        try:
            if name.removeprefix("Experiment.") in _NOT_TUNED:
                raise ValueError(f"{name} cannot be searched over")
            for value in distribution.get("choices") or (distribution["low"], distribution["high"]):
                with config.temporary({}):
                    cli_utils.use_config({}, self._with_values({name: value_of(value)}).configs[len(self.args.configs) :])
            if self.args.grid and grid_of(self.space[name]) is None:
                raise ValueError("has no values that could all be tried: a grid takes choice(...), int(...) and lists")
        except ValueError as err:
            raise ValueError(f"{text!r}: {err}") from err

    def _with_values(self, values: dict[str, object]) -> Namespace:
        """The arguments of ``amago train`` with these settings."""
        of_train = {k: v for k, v in vars(self.args).items() if k not in ("space", "metric", "direction", "grid", "no_prune")}
        own = Namespace(**of_train | {"trials": 1, "seeds": 1, "sweep": {}})
        rest = set_arguments(self.parser, own, values)
        own.configs = [*own.configs, *([rest] if rest else [])]
        return own

    def _compare_with_record(self) -> None:
        """Record what the study was begun with; ValueError if it was begun with other settings."""
        known, now = self.study.user_attrs, {name: vars(self.args)[name] for name in ("env", "metric", "direction")}
        for name, value in (now | {"space": sorted(self.texts)}).items():
            if not known:
                self.study.set_user_attr(name, value)
            elif known[name] != value:
                raise ValueError(
                    f"the study in {self.directory} has {name} {known[name]!r}, not {value!r}; another --run_name begins a new one"
                )

    def trials(self, *states: optuna.trial.TrialState) -> list[optuna.trial.FrozenTrial]:
        """The trials in some states; of all, if none is given."""
        return self.study.get_trials(deepcopy=False, states=states or None)

    def failed(self) -> list[optuna.trial.FrozenTrial]:
        """Trials that failed, unless they have been tried again since."""

        def key(trial: optuna.trial.FrozenTrial) -> str:
            return repr((sorted(trial.system_attrs.get("fixed_params", trial.params).items()), _seed_of(trial)))

        newest = {key(trial): trial for trial in self.trials()}
        return [trial for trial in newest.values() if trial.state == self.states.FAIL]

    def retry(self) -> None:
        """Put what failed in an earlier call back into a grid."""
        for trial in self.failed() if self.args.grid else ():
            self.study.enqueue_trial(trial.params, user_attrs={"seed": _seed_of(trial)})

    # ---- trials ---------------------------------------------------------------------------------------------------------

    def next_trial(self) -> bool:
        """Train one trial; returns whether there was one to train."""
        with exclusive(self.directory):
            found = self._lost_trial() or self._new_trial()
        if found is None:
            return False
        trial, lock = found
        try:
            self._finish(trial, _run_of(trial))
        finally:
            lock.release()
        return True

    def _lost_trial(self) -> tuple[optuna.trial.Trial, RunLock] | None:
        """A trial whose process has ended before it, to be continued from its last training state, and its lock, taken."""
        from optuna.trial import Trial

        for trial in self.trials(self.states.RUNNING):
            lock = self._lock(trial)
            try:
                lock.acquire()
            except HeldError:
                continue
            # another process may have ended the trial, and then freed its lock, since the list was made
            if self.trials()[trial.number].state == self.states.RUNNING:
                return Trial(self.study, trial._trial_id), lock
            lock.release()
        return None

    def _new_trial(self) -> tuple[optuna.trial.Trial, RunLock] | None:
        """The next trial and its lock, taken; None if there are enough. Settings that were drawn before get their earlier result."""
        while (waiting := self.trials(self.states.WAITING)) or (
            self.repeats < REPEATS and len({_run_of(t) for t in self.trials()}) < self.wanted
        ):
            trial = self.study.ask(self.space)
            twin = None if waiting else self._twin(trial)
            if twin is None:
                for i in range(1, 1 if waiting else self.args.seeds):
                    self.study.enqueue_trial(trial.params, user_attrs={"seed": i})
                lock = self._lock(trial)
                lock.acquire()
                return trial, lock
            trial.set_user_attr("run", _run_of(twin))
            self.study.tell(trial, twin.value, state=None if twin.value is not None else self.states.PRUNED)
            self.repeats += 1
        return None

    def _twin(self, trial: optuna.trial.Trial) -> optuna.trial.FrozenTrial | None:
        """An earlier trial of the same settings, which would only be trained again to see whether it is luckier."""
        states = self.states.COMPLETE, self.states.PRUNED, self.states.RUNNING
        return next((t for t in self.trials(*states) if t.number != trial.number and t.params == trial.params), None)

    def _finish(self, trial: optuna.trial.Trial, name: str) -> None:
        """Train a trial, and record its outcome."""
        from optuna import TrialPruned

        try:
            value = self._train(trial, name)
        except TrialPruned as err:
            self.study.tell(trial, state=self.states.PRUNED)
            outcome = f"stopped early: {err}"
        except (Stopped, KeyboardInterrupt):
            raise
        except BaseException as err:
            self.study.tell(trial, state=self.states.FAIL)
            if not _concerns_one_trial(err, trial):
                raise
            outcome = f"failed: {type(err).__name__}: {' '.join(str(err).split())}"
        else:
            self.study.tell(trial, value)
            outcome = f"{value:.4g} (best {self.study.best_value:.4g}, {_run_of(self.study.best_trial)})"
        if not self.args.quiet:
            print(f"{name}: {outcome}; {', '.join(f'{k} {_format(v)}' for k, v in trial.params.items())}", flush=True)

    def _train(self, trial: optuna.trial.Trial, name: str) -> float:
        """The metric of an agent that is trained with the trial's settings."""
        args = self.args
        own = self._with_values({name: value_of(stored) for name, stored in trial.params.items()})
        if args.seeds > 1:
            own.seed = (args.seed or 0) + _seed_of(trial)
        own.run_name, own.buffer_dir, own.resume = name, str(self.directory), "auto"
        own.quiet, own.progress = args.quiet or args.progress is None, args.progress or "none"
        own.ckpt_interval = max(1, min(own.ckpt_interval, own.val_interval or own.ckpt_interval))
        with config.temporary({}):
            experiment = train.make_experiment(own)
            prune = PruneTrial(trial, args.metric)
            experiment.callbacks = [*experiment.callbacks, prune]
            experiment.start()
            try:
                record_settings(experiment, own)
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

    def summary(self) -> str:
        """The best settings, how the other trials ended, and commands for the best."""
        done, names = self.trials(self.states.COMPLETE), list(self.space)
        runs = {_run_of(t): t for t in done}  # a trial that repeats another has its run
        ended = (
            f"{len(runs)} trials finished, {len(self.trials(self.states.PRUNED))} stopped early, {len(self.failed())} failed"
        )
        if not done:
            return f"\n{ended}: no best settings yet"
        groups: dict[str, list[optuna.trial.FrozenTrial]] = {}
        for trial in sorted(runs.values(), key=_seed_of):
            groups.setdefault(repr(sorted(trial.params.items())), []).append(trial)
        sign = 1 if self.args.direction == "maximize" else -1
        found = [(Estimate.of([t.values[0] for t in group]), group) for group in groups.values()]
        found.sort(key=lambda pair: (len(pair[1]), sign * pair[0].mean), reverse=True)  # few seeds may be lucky ones
        rows = []
        for mean, group in found[:SHOWN]:
            spread = f"{_format(mean.low)} to {_format(mean.high)}" if len(group) > 1 else ""
            values = [_format(group[0].params.get(name)) for name in names]
            rows.append([_run_of(group[0]), _format(mean.mean), spread, str(len(group)), *values])
        heads = ["trial", self.args.metric, "95% interval", "seeds", *names]
        best, args = self.directory / _run_of(found[0][1][0]), self.args
        words = ["--from", best, "--buffer_dir", args.buffer_dir, "--run_name", f"{args.run_name}_best"]
        return "\n".join(
            ["", f"the best of {self.directory} ({ended})", text_table(heads, rows), "", "to train with these settings:"]
            + [shlex.join(["amago", "train", args.env, *map(str, words)]), "", eval_command(best, args.env)]
            + [shlex.join(["amago", "report", str(self.directory)])]
        )


def _concerns_one_trial(err: BaseException, trial: optuna.trial.Trial) -> bool:
    """True if other trials may do better: training failed, or the trial's settings do not fit together. Other errors end a study."""
    refused = bool(trial.params) and isinstance(err, ValueError) and not raised_while_running(err)
    return refused or isinstance(err, NonFiniteTraining | NothingTrainedError | MemoryError | torch.OutOfMemoryError)


def _seed_of(trial: optuna.trial.BaseTrial) -> int:
    """The number of a trial's seed among those of its settings."""
    return int(trial.user_attrs.get("seed", 0))


def _run_of(trial: optuna.trial.BaseTrial) -> str:
    """The name of a trial's run; a trial that repeats another one has its run."""
    return str(trial.user_attrs.get("run", f"trial_{trial.number}"))


def _format(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
