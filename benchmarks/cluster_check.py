"""The simulation of launches beside real ones: 1, 2, 4 and 8 collectors on this machine.

Each case launches `benchmarks.cluster_sleeping`, whose environments and updates mostly sleep, for `SECONDS` after its last collector
has begun, and simulates the same: with the measured constants (``python -m benchmarks cluster --constants``) and with collectors that
begin when the real ones did. "ours" is the real launch and the "ceiling" the simulation; the ratio is that of the smaller figure to the
larger. Rates are slopes of least squares from `SETTLED` seconds after the last beginning, since trajectories arrive in lumps.

``--only '8 collectors'`` launches one case. ``--rounds N`` takes the median of N launches.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from argparse import Namespace
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from amago.run.launched.protocol import UpdateLimits
from benchmarks import cluster_sleeping as program
from benchmarks.cluster_model import MEASURED, Cluster, Constants
from benchmarks.cluster_simulation import simulate
from benchmarks.harness import Row

COLLECTORS = (1, 2, 4, 8)
LIMITS = UpdateLimits(0.035, 0.08)
"""So that the learner waits for one collector, neither side waits with two, and collectors pause with four and eight."""
SECONDS, SETTLED = 45.0, 8.0
WITHIN = 1 / 1.2


@dataclass(frozen=True)
class Series:
    """A run, real or simulated, as seen from outside at some times.

    Attributes:
        time: seconds since the learner was ready.
        steps, updates: as the learner counts them.
        lag_versions, lag_seconds: means over the collectors.
        starts: when each collector began.
    """

    time: np.ndarray
    steps: np.ndarray
    updates: np.ndarray
    lag_versions: np.ndarray
    lag_seconds: np.ndarray
    starts: Sequence[float]

    def figures(self) -> dict[str, float]:
        """The figures to compare, by unit."""
        late = self.time >= max(self.starts) + SETTLED
        slope = {n: float(np.polyfit(self.time[late], getattr(self, n)[late], 1)[0]) for n in ("steps", "updates")}
        return {
            "steps/s": slope["steps"],
            "updates/s": slope["updates"],
            "updates/step": float(self.updates[-1] / self.steps[-1]),
            "versions of lag": float(self.lag_versions[late].mean()),
            "s of lag": float(self.lag_seconds[late].mean()),
        }


def rows(options: Namespace) -> Iterator[Row]:
    """Five figures for each number of collectors."""
    path = Path(options.out) / MEASURED.name if options.out else MEASURED
    about, constants = described(path if path.exists() else MEASURED)
    for collectors in COLLECTORS if not options.smoke else (1,):
        case = f"{collectors} collector{'s' * (collectors > 1)}"
        if options.only not in case:
            continue
        pairs = []
        for _ in range(options.rounds or 1):
            real = launched(collectors, 12.0 if options.smoke else SECONDS)
            pairs.append((real.figures(), simulated(cluster(collectors, about), constants, real).figures()))
        for unit in pairs[0][0]:
            ours, expected = (statistics.median(pair[i][unit] for pair in pairs) for i in (0, 1))
            ratio = min(ours, expected) / max(ours, expected, 1e-12)
            yield Row(f"{case}, {unit}", ours, unit, expected, ratio, WITHIN, details={"load": os.getloadavg()[0]})


def described(path: Path) -> tuple[dict[str, float], Constants]:
    """The small run and the constants, as measured."""
    return json.loads(path.read_text())["about"]["small run"], Constants.load_from(path)


def cluster(collectors: int, about: dict[str, float]) -> Cluster:
    """The small run as a `Cluster`."""
    transitions = program.ACTORS * program.PHASE
    return Cluster(
        collectors=collectors, actors=program.ACTORS, step=about["step"], phase=program.PHASE, horizon=program.HORIZON,
        update=about["update"], epoch=program.EPOCH, least=LIMITS.least, most=LIMITS.most, step_bytes=about["file"] / transitions,
        file_bytes=0.0, weights=about["weights"], batch=program.BATCH, jitter=0.1,
    )  # fmt: skip


def simulated(what: Cluster, constants: Constants, real: Series) -> Series:
    """The simulation of a launch, as long as that was, whose collectors begin when those did."""
    run = simulate(what, constants, float(real.time[-1]), since=0.0, starts=real.starts, sample=0.1)
    columns = ("time", "stored", "updates", "lag_versions", "lag_seconds")
    return Series(*(np.array([getattr(s, name) for s in run.samples]) for name in columns), real.starts)


def launched(collectors: int, seconds: float) -> Series:
    """Launch the small run."""
    folder = Path(tempfile.mkdtemp())
    try:
        record, limits = folder / "record", f"{LIMITS.least}:{LIMITS.most}"
        words = ["-m", "benchmarks.cluster_watched", str(record), str(seconds), str(collectors), limits]
        program_words = ["-m", "benchmarks.cluster_sleeping", str(folder)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        subprocess.run(
            [sys.executable, *words, *program_words], env=environment, timeout=seconds + 300, stderr=subprocess.DEVNULL
        )
        return read(record.read_text().splitlines())
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def read(lines: Sequence[str]) -> Series:
    """The series in a record of `benchmarks.cluster_watched`."""
    ticks = [json.loads(line) for line in lines]
    ticks = [tick for tick in ticks if tick["learner"].get("state") in ("waiting", "training")]
    began = ticks[0]["time"]
    times = np.array([tick["time"] - began for tick in ticks])
    starts = [
        next(t for t, tick in zip(times, ticks) if tick["collectors"][i].get("state") == "collecting")
        for i in range(len(ticks[0]["collectors"]))
    ]
    published: dict[int, float] = {}  # when a version was first heard of
    lags, ages = [], []
    for now, tick in zip(times, ticks):
        acting = [beat["version"] for beat in tick["collectors"] if beat.get("version")]
        for version in range(max(published, default=0) + 1, max([tick["learner"]["version"], *acting]) + 1):
            published[version] = now
        lags.append(np.mean([max(published) - v for v in acting]) if acting else 0.0)
        ages.append(np.mean([now - published[v] for v in acting]) if acting else 0.0)
    counted: dict[str, Any] = {n: np.array([tick["learner"][n] for tick in ticks], float) for n in ("steps", "updates")}
    return Series(times, counted["steps"], counted["updates"], np.array(lags), np.array(ages), starts)
