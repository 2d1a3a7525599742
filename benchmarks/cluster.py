"""Wall time to a score: one process that alternates, and a learner with collectors that overlap, on the same cores.

CartPole with a millisecond of waiting a step (`benchmarks.cluster_program`), from the start of the program until the first evaluation
that reaches `SCORE`. Both have 16 actors in all, as many processes that step environments, and as many updates per environment step: the
launch within 20% of the ratio of the program that alternates. The "ceiling" is the time of the alternating program, and the ratio is how
many times faster the launch is.
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

from amago.run.plots import read_metrics
from benchmarks.harness import Row

SCORE, LIMIT = 400.0, 400.0
COLLECTORS = 4
ACTORS, STEPS = 16, 500
RETURN = "Average Total Return (Across All Env Names)"
_TARGET = 1.5


def rows(options: Namespace) -> Iterator[Row]:
    """One row for each ratio of updates to steps."""
    for batches in (125, 250) if not options.smoke else (2,):
        case = f"CartPole, 1 ms a step, {batches} updates for {ACTORS * STEPS} steps"
        if options.only in case:
            yield _row(case, batches, options)


def _row(case: str, batches: int, options: Namespace) -> Row:
    ratio = batches / (ACTORS * STEPS)
    limits = f"{0.8 * ratio}:{1.2 * ratio}"
    alone, together = [], []
    for _ in range(1 if options.smoke else options.rounds or 3):
        alone.append(_seconds([], ACTORS, COLLECTORS, batches, options.smoke))
        launch = ["-m", "amago.cli", "launch", "--quiet", "--collectors", str(COLLECTORS), f"--updates-per-step={limits}"]
        together.append(_seconds(launch, ACTORS // COLLECTORS, 1, batches, options.smoke))
    ours, ceiling = statistics.median(s for s, _ in together), statistics.median(s for s, _ in alone)
    missed = [name for name, runs in (("alternating", alone), ("launch", together)) if any(not ok for _, ok in runs)]
    details = {f"alternating {i}": s for i, (s, _) in enumerate(alone)} | {
        f"launch {i}": s for i, (s, _) in enumerate(together)
    }
    note = f"not reached: {', '.join(missed)}" if missed else f"{SCORE:g} in {ceiling:.0f} s alternating"
    return Row(case, ours, "s", ceiling, ceiling / ours, _TARGET, note=note, details=details)


def _seconds(launch: list[str], actors: int, workers: int, batches: int, smoke: bool) -> tuple[float, bool]:
    """Seconds until a run has the score, and whether it has."""
    folder = Path(tempfile.mkdtemp())
    epochs = 1 if smoke else 100
    program = ["-m", "benchmarks.cluster_program", str(folder), str(actors), str(workers), str(epochs), str(batches)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    began = time.monotonic()
    process = subprocess.Popen([sys.executable, *launch, *program], env=environment, start_new_session=True)
    try:
        while process.poll() is None and time.monotonic() < began + LIMIT:
            if _reached(folder / "run"):
                return time.monotonic() - began, True
            time.sleep(0.2)
        return time.monotonic() - began, smoke and process.poll() == 0
    finally:
        process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(60)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        shutil.rmtree(folder, ignore_errors=True)


def _reached(run_dir: Path) -> bool:
    if not (run_dir / "metrics.jsonl").is_file():
        return False
    return any(row["section"] == "val" and row["values"][RETURN] >= SCORE for row in read_metrics(run_dir))
