"""A run of one of the examples for a scoreboard: until its budget of processor time is spent, then judged greedy and sampled."""

from __future__ import annotations

import runpy
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from amago import cli_utils
from amago.run.metric_names import AVERAGE_RETURN, NUMBER_OF_ROLLOUTS
from benchmarks.suite.recorded import BudgetSpent, Point, Recorder, append, is_done, points, rows

EXAMPLES = Path(__file__).parents[2] / "examples"
JUDGED = 256, 1024, 100_000
"""The evaluations after training: rollouts, at least and at most, and steps between these limits."""


@dataclass(frozen=True)
class Result:
    """A finished run: its curve; mean returns after training of the most likely actions and of those that the policy draws; processor
    seconds and environment steps."""

    curve: list[Point]
    greedy: float
    sampled: float
    cpu: float
    steps: int


def train(script: str, words: str, task: str, seed: int, path: Path, work: Path, budget: float) -> None:
    """Run an example, or continue it from its last training state; done already: nothing.

    Args:
        script: its name in ``examples/``.
        words: its arguments, without those of the run's name, directory and seed.
        task: what the result is called.
        path: of the result, a file of `benchmarks.suite.recorded`.
        work: folder for the replay buffer and training states of this run alone; deleted at the end.
        budget: processor seconds.
    """
    if is_done(path):
        return
    example = runpy.run_path(str(EXAMPLES / script))
    words = f"{words} --seed {seed} --no_async"
    args = cli_utils.parse_args(None, example["add_cli"], [*words.split(), "--run_name", "run", "--buffer_dir", str(work)])
    args.trial = 0
    run = example["make_experiment"](args)
    run.resume, run.ckpt_interval, run.keep_training_states, run.verbose = "auto", 10, 1, False
    recorder = Recorder(path, {"task": task, "seed": seed, "command": f"examples/{script} {words}"}, budget)
    run.callbacks = [*run.callbacks, recorder]
    try:
        run.start()
        try:
            run.learn()
        except BudgetSpent:
            append(path, {"budget": "spent"})
        append(path, {"cpu": round(recorder.cpu, 2), "steps": run.env_steps, **judge(run)})
        append(path, {"done": True})
    finally:
        run.close()
    shutil.rmtree(work, ignore_errors=True)


def judge(run: Any) -> dict[str, float]:
    """Mean returns of the policy's most likely actions ("greedy") and of those it draws ("sampled"), over as many rollouts as `JUDGED` says."""
    horizon = (run.val_timesteps_per_epoch - 1) // 2  # as the examples set it
    least, most, steps = JUDGED
    rounds = -(-max(least, min(most, steps // horizon)) // run.parallel_actors)
    found = {}
    for name, run.sample_actions in (("greedy", False), ("sampled", True)):
        metrics = run.evaluate_test(run.make_val_env, rounds * horizon + 1)
        found |= {name: metrics[AVERAGE_RETURN], "rollouts": metrics[NUMBER_OF_ROLLOUTS]}
    return found


def read(folder: Path) -> list[Result]:
    """The finished runs ``seed*.jsonl`` of a folder, one for each seed."""
    found = []
    for path in sorted(folder.glob("seed*.jsonl")):
        last = [row for row in rows(path) if "greedy" in row]
        if is_done(path):
            found.append(Result(points(path), *(last[-1][name] for name in ("greedy", "sampled", "cpu", "steps"))))
    return found
