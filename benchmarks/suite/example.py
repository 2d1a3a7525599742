"""A run of one of the examples, or of `amago train`, for a scoreboard.

It ends when its budget of processor time is spent, and is then judged greedy and sampled: the last weights, and those of the best
evaluation.
"""

from __future__ import annotations

import runpy
import shutil
from argparse import ArgumentParser
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from amago import cli_utils
from amago.cli import train as amago_train
from amago.run.callbacks import KeepBest
from amago.run.metric_names import AVERAGE_RETURN
from benchmarks.suite import EXAMPLES
from benchmarks.suite.recorded import BudgetSpent, Point, Recorder, append, is_done, points, rows

_NO_LIMIT = 10**9  # steps: the number of rollouts is the limit
AMAGO_TRAIN = "amago train"
"""In place of an example: the command, with the defaults that it chooses."""
JUDGED = 256
"""Rollouts of each evaluation after training, unless another number is given."""


@dataclass(frozen=True)
class Result:
    """A finished run: its curve; mean returns after training of the most likely actions and of those that the policy draws; processor
    seconds, environment steps and updates; all metrics of the most likely actions; the better mean return of the weights of the best
    evaluation, in new rollouts (None: not measured)."""

    curve: list[Point]
    greedy: float
    sampled: float
    cpu: float
    steps: int
    updates: int
    metrics: dict[str, float]
    best: float | None = None


def train(
    script: str,
    words: str,
    task: str,
    seed: int,
    path: Path,
    work: Path,
    budget: float,
    judged: int = JUDGED,
    goal: float | None = None,
    begins: Path | None = None,
    keeps: Path | None = None,
) -> None:
    """Run an example or `amago train`, or continue it from its last training state; done already: nothing.

    Args:
        script: its name in ``examples/``; or `AMAGO_TRAIN`.
        words: its arguments, without those of the run's name, directory and seed.
        task: what the result is called.
        path: of the result, a file of `benchmarks.suite.recorded`.
        work: folder for the replay buffer and training states of this run alone; deleted at the end.
        budget: processor seconds.
        judged: rollouts of each evaluation after training.
        goal: of `benchmarks.suite.recorded.Recorder`.
        begins: file of the weights with which the run begins; None: as the words say.
        keeps: file for its last weights; None: they are not kept.
    """
    if is_done(path):
        return
    words = f"{words} --seed {seed} --no_async"
    initial = [] if begins is None else ["--init_from", str(begins)]
    run = _experiment(script, [*words.split(), *initial, "--run_name", "run", "--buffer_dir", str(work)])
    run.resume, run.ckpt_interval, run.keep_training_states, run.verbose = "auto", 10, 1, False
    command = f"{script if script == AMAGO_TRAIN else f'examples/{script}'} {words}"
    command += "" if begins is None else f" --init_from {begins.name}"
    recorder, kept = Recorder(path, {"task": task, "seed": seed, "command": command}, budget, goal), KeepBest()
    run.callbacks = [*run.callbacks, kept, recorder]
    try:
        run.start()
        try:
            run.learn()
            seen = True
        except BudgetSpent:  # raised before the last evaluation was compared
            append(path, {"budget": "spent"})
            seen = False
        spent = {"cpu": round(recorder.cpu, 2), "steps": run.env_steps, "updates": run.learner.grad_steps}
        final = judge(run, judged)
        if keeps is not None:
            run.write_latest_policy()
            shutil.copy(run.checkpoints.latest, keeps)
        if kept.best is not None and (seen or points(path)[-1].score < kept.best):
            run.load_checkpoint_from_path(str(run.ckpt_dir / "best" / "policy.pt"), is_accelerate_state=False)
            final["best"] = {name: score for name, score in judge(run, judged).items() if name in ("greedy", "sampled")}
        append(path, {**spent, **final})
        append(path, {"done": True})
    finally:
        run.close()
    shutil.rmtree(work, ignore_errors=True)


def _experiment(script: str, words: list[str]) -> Any:
    """The experiment of a command, not started."""
    if script == AMAGO_TRAIN:
        parser = ArgumentParser()
        amago_train.add_arguments(parser)
        args, make = parser.parse_args(words), amago_train.make_experiment
    else:
        example = runpy.run_path(str(EXAMPLES / script))
        args, make = cli_utils.parse_args(None, example["add_cli"], words), example["make_experiment"]
    args.trial = 0
    return make(args)


def judge(run: Any, rollouts: int) -> dict[str, Any]:
    """Mean returns of the policy's most likely actions ("greedy") and of those it draws ("sampled"), and all metrics of both."""
    found: dict[str, Any] = {"rollouts": rollouts}
    for name, run.sample_actions in (("greedy", False), ("sampled", True)):
        metrics = run.evaluate_test(run.make_val_env, _NO_LIMIT, episodes=rollouts)
        found |= {name: metrics[AVERAGE_RETURN], f"{name} metrics": metrics}
    return found


def curves_in(folder: Path) -> list[list[Point]]:
    """The curves of the finished runs ``seed*.jsonl`` of a folder, one for each seed."""
    found = (points(path) for path in sorted(folder.glob("seed*.jsonl")) if is_done(path))
    return [curve for curve in found if curve]


def read(folder: Path) -> list[Result]:
    """The finished runs ``seed*.jsonl`` of a folder, one for each seed."""
    found = []
    for path in sorted(folder.glob("seed*.jsonl")):
        if is_done(path):
            (judged,) = (row for row in rows(path) if "greedy" in row)
            numbers, curve = (judged[name] for name in ("greedy", "sampled", "cpu", "steps")), points(path)
            updates = judged.get("updates", curve[-1].updates)  # older rows have those of the last evaluation alone
            best = max(judged["best"].values()) if "best" in judged else None
            found.append(Result(curve, *numbers, updates, judged.get("greedy metrics", {}), best))
    return found
