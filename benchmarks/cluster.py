"""Wall time to a score: one process that alternates, and a learner with collectors that overlap, on the same cores.

CartPole with a millisecond of waiting a step (`benchmarks.cluster_program`), from the start of the program until the first evaluation
that reaches `SCORE`. Both have 16 actors in all, 4 processes that step environments, and as many updates per environment step: the launch
within 20% of the ratio of the program that alternates. Each round has another seed. The "ceiling" is the time of the alternating program, and
the ratio is how many times faster the launch is.

With one collector, the learner has a core almost for itself. Each further collector acts for fewer environments at a time, which costs more for
each step: on two cores four collectors take from the learner what they gain.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from amago.run.plots import read_metrics
from benchmarks.harness import Row

SCORE, LIMIT = 475.0, 400.0
ACTORS, WORKERS, STEPS = 16, 4, 500
RETURN = "Average Total Return (Across All Env Names)"
_TARGET = 1.5


class Run(NamedTuple):
    """Seconds until a run had the score, or the limit; whether it had; updates per second from the second epoch on."""

    seconds: float
    reached: bool
    rate: float


def rows(options: Namespace) -> Iterator[Row]:
    """One row for each number of collectors and ratio of updates to steps."""
    for collectors, batches in ((1, 125), (1, 250), (4, 125)) if not options.smoke else ((1, 2),):
        case = f"CartPole, 1 ms a step, {batches} updates for {ACTORS * STEPS} steps, collectors: {collectors}"
        if options.only in case:
            yield _row(case, collectors, batches, options)


def _row(case: str, collectors: int, batches: int, options: Namespace) -> Row:
    ratio = batches / (ACTORS * STEPS)
    limits = f"{0.8 * ratio}:{1.2 * ratio}"
    alone, together = [], []
    for seed in range(1 if options.smoke else options.rounds or 3):
        alone.append(_run([], ACTORS, WORKERS, batches, seed, options.smoke))
        launch = ["-m", "amago.cli", "launch", "--quiet", "--collectors", str(collectors), f"--updates-per-step={limits}"]
        together.append(_run(launch, ACTORS // collectors, WORKERS // collectors, batches, seed, options.smoke))
    ours, ceiling = statistics.median(r.seconds for r in together), statistics.median(r.seconds for r in alone)
    both = {"alternating": alone, "launch": together}
    missed = [name for name, runs in both.items() if not all(run.reached for run in runs)]
    details = {f"{name} {i}": run.seconds for name, runs in both.items() for i, run in enumerate(runs)}
    details |= {f"{name} {i}, updates/s": run.rate for name, runs in both.items() for i, run in enumerate(runs)}
    note = f"not reached: {', '.join(missed)}" if missed else f"{SCORE:g} in {ceiling:.0f} s alternating"
    return Row(case, ours, "s", ceiling, ceiling / ours, _TARGET, note=note, details=details)


def _run(launch: list[str], actors: int, workers: int, batches: int, seed: int, smoke: bool) -> Run:
    folder = Path(tempfile.mkdtemp())
    epochs = 1 if smoke else 100
    program = ["-m", "benchmarks.cluster_program", str(folder), str(actors), str(workers), str(epochs), str(batches), str(seed)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    began = time.monotonic()
    process = subprocess.Popen([sys.executable, *launch, *program], env=environment, start_new_session=True)
    try:
        while process.poll() is None and time.monotonic() < began + LIMIT:
            if _reached(folder / "run"):
                return Run(time.monotonic() - began, True, _rate(folder / "run"))
            time.sleep(0.2)
        return Run(time.monotonic() - began, smoke and process.poll() == 0, _rate(folder / "run"))
    finally:
        process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(60)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        shutil.rmtree(folder, ignore_errors=True)


def _rate(run_dir: Path) -> float:
    rows = read_metrics(run_dir) if (run_dir / "metrics.jsonl").is_file() else []
    trained = [row for row in rows if row["section"] == "train"]
    if len(trained) < 2:
        return 0.0
    first, last = trained[0], trained[-1]
    return (last["grad_steps"] - first["grad_steps"]) / (last["wall_time"] - first["wall_time"])


def _reached(run_dir: Path) -> bool:
    if not (run_dir / "metrics.jsonl").is_file():
        return False
    return any(row["section"] == "val" and row["values"][RETURN] >= SCORE for row in read_metrics(run_dir))
