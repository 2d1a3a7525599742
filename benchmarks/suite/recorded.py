"""What the learning benchmarks keep of a run: a file of JSON lines, and the callback that writes it and ends the run with its budget.

The first line says what the run is; then comes a row for each evaluation, and at last ``{"done": true}``.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from amago.experiment import Experiment
from amago.run.callbacks import Callback, LogRow
from amago.run.locks import HeldError, RunLock
from amago.run.metric_names import AVERAGE_RETURN
from benchmarks.harness import machine

Job = TypeVar("Job")


@dataclass(frozen=True)
class Point:
    """An evaluation: processor seconds, environment steps and updates until then, and the mean return."""

    cpu: float
    steps: int
    updates: int
    score: float


IN_A_ROW = 3
"""Evaluations that must reach a goal for a run to end early."""


class BudgetSpent(Exception):
    """Ends a run whose processor time is spent, or whose goal is reached."""


class Recorder(Callback):
    """Writes a row for each evaluation, and raises `BudgetSpent` after one that ends beyond the budget.

    The processor time of a run that continues includes that until its training state; rows of evaluations after that are dropped.

    Args:
        path: the file.
        head: what the run is; the budget and the machine are added.
        budget: processor seconds of this process, from the making of this object on.
        goal: the run also ends when so many evaluations in a row as `IN_A_ROW` have reached this score; None: it does not.
    """

    def __init__(self, path: Path, head: dict[str, Any], budget: float = math.inf, goal: float | None = None):
        self.path, self.head, self.budget, self.goal = path, head, budget, goal
        self._before, self._began = 0.0, time.process_time()

    @property
    def cpu(self) -> float:
        """Processor seconds of the run."""
        return self._before + time.process_time() - self._began

    def state_dict(self) -> dict[str, Any]:
        return {"cpu": self.cpu}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._before = state["cpu"]

    def on_start(self, experiment: Experiment) -> None:
        done = experiment.learner.grad_steps
        earlier = [r for r in rows(self.path) if "score" in r and r["updates"] <= done and experiment.epoch > 0]
        # an evaluation that counts may have been made after the state
        self._before = max([self._before, *(r["cpu"] for r in earlier)])
        self.path.parent.mkdir(parents=True, exist_ok=True)
        head = self.head | {"budget": self.budget, "goal": self.goal, "machine": machine()}
        self.path.write_text("".join(json.dumps(r) + "\n" for r in [head, *earlier]))

    def on_log(self, experiment: Experiment, row: LogRow) -> None:
        if row.section != "val" or AVERAGE_RETURN not in row.values:
            return
        append(self.path, asdict(Point(round(self.cpu, 2), row.env_steps, row.grad_steps, float(row.values[AVERAGE_RETURN]))))
        if self.cpu >= self.budget or self._solved():
            raise BudgetSpent

    def _solved(self) -> bool:
        found = {p.updates: p for p in points(self.path)}  # a run that continues may repeat the evaluation before it
        last = list(found.values())[-IN_A_ROW:]
        return self.goal is not None and len(last) == IN_A_ROW and min(p.score for p in last) >= self.goal


@contextmanager
def claimed(path: Path) -> Iterator[None]:
    """For the block, the right of this process alone to write a result.

    Raises:
        RuntimeError: another process is writing it.
    """
    lock = RunLock(path.with_suffix(".lock"))
    try:
        lock.acquire()
    except HeldError as err:
        raise RuntimeError(f"{path} is {err}; wait for it, or choose another folder with --results") from None
    try:
        yield
    finally:
        lock.release()


def append(path: Path, row: dict[str, Any]) -> None:
    with path.open("a") as file:
        file.write(json.dumps(row) + "\n")


def rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a result; an incomplete last line, of a run that was killed, does not count."""
    found = []
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            found.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return found


def points(path: Path) -> list[Point]:
    """The evaluations of a result."""
    return [Point(**r) for r in rows(path) if "score" in r]


def is_done(path: Path) -> bool:
    found = rows(path)
    return bool(found) and bool(found[-1].get("done"))


def in_processes(jobs: Sequence[Job], words: Callable[[Job], list[str]], side_by_side: int) -> bool:
    """Run ``python -m WORDS`` of one thread for each job, and print a line when it has ended; returns whether all succeeded."""

    def one(job: Job) -> bool:
        command = [sys.executable, "-m", *words(job)]
        ended = subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
        said = "done" if ended.returncode == 0 else f"failed\n{ended.stderr[-2000:]}"
        print(", ".join(map(str, job)) if isinstance(job, tuple) else job, said, sep=": ", flush=True)
        return ended.returncode == 0

    with ThreadPoolExecutor(side_by_side) as pool:
        return all(list(pool.map(one, jobs)))
