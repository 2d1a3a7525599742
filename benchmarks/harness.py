"""Common parts of the benchmarks: measurement in turns, result rows, tables and files.

A benchmark compares *ours*, the library, with a *ceiling*, the simplest code that does only the unavoidable work. Both are
measured in turns within one run, so that other load on the machine affects both. The ratio is the speed of ours divided by that
of the ceiling, the median over rounds: 1 is perfect, for rates as well as for costs.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import time
from argparse import Namespace
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

RESULTS = Path(__file__).parent / "results"
COSTS = ("s", "ms", "us", "MiB", "KiB")
"""Units of costs, of which less is better; all other units are rates."""


@dataclass(frozen=True)
class Row:
    """A row of a benchmark's table.

    Attributes:
        case: name of the case.
        ours, ceiling: medians over rounds, in ``unit``.
        unit: one of `COSTS`, or a rate such as "steps/s".
        ratio: speed relative to the ceiling, see this module.
        target: the minimum ratio required; None if there is none.
        peer, ratio_to_peer: figure of another implementation, and speed relative to it; None without one.
        note: a remark for the reader of the table.
        details: further figures by name.
    """

    case: str
    ours: float
    unit: str
    ceiling: float
    ratio: float
    target: float | None = None
    peer: float | None = None
    ratio_to_peer: float | None = None
    note: str = ""
    details: Mapping[str, float] = field(default_factory=dict)


def share(ours: float, other: float, unit: str) -> float:
    """The speed of ``ours`` relative to ``other``, given their figures in ``unit``."""
    return other / ours if unit in COSTS else ours / other


def in_turns(contenders: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """Measure each contender once per round, in alternating order.

    Args:
        contenders: functions that do the work and return the figure, by name.
        rounds: number of measurements per contender.

    Returns:
        the figures of each contender, by round.
    """
    figures: dict[str, list[float]] = {name: [] for name in contenders}
    names = list(contenders)
    for i in range(rounds):
        for name in names if i % 2 == 0 else reversed(names):
            figures[name].append(contenders[name]())
    return figures


def compare(
    case: str,
    unit: str,
    contenders: Mapping[str, Callable[[], float]],
    rounds: int = 5,
    target: float | None = None,
    ceiling: Callable[[Mapping[str, float]], float] | None = None,
    note: str = "",
) -> Row:
    """Measure contenders in turns; returns their row.

    Args:
        case, unit, target, note: see `Row`.
        contenders: "ours", "ceiling" and optionally "peer"; figures of others become details.
        rounds: number of measurements per contender.
        ceiling: computes the ceiling from the figures of a round, instead of a contender of that name.
    """
    figures = in_turns(contenders, rounds)
    by_round = [{name: values[i] for name, values in figures.items()} for i in range(rounds)]
    ceilings = [ceiling(r) if ceiling else r["ceiling"] for r in by_round]
    peer = median(figures["peer"]) if "peer" in figures else None
    return Row(
        case,
        median(figures["ours"]),
        unit,
        median(ceilings),
        median(share(r["ours"], c, unit) for r, c in zip(by_round, ceilings)),
        target,
        peer,
        None if peer is None else median(share(r["ours"], r["peer"], unit) for r in by_round),
        note,
        {name: median(values) for name, values in figures.items() if name not in ("ours", "ceiling", "peer")},
    )


def seconds_per_call(work: Callable[[], Any], at_least: float = 0.2, calls: int = 1) -> float:
    """Mean seconds per call of ``work``, over at least ``at_least`` seconds and ``calls`` calls."""
    done, start = 0, time.perf_counter()
    while True:
        work()
        done += 1
        taken = time.perf_counter() - start
        if taken >= at_least and done >= calls:
            return taken / done


def machine() -> str:
    """A short description of this machine: processor and number of cores."""
    model = platform.processor() or platform.machine()
    if os.path.exists("/proc/cpuinfo"):
        with open("/proc/cpuinfo") as f:
            model = next((line.split(":", 1)[1].strip() for line in f if line.startswith("model name")), model)
    return f"{model}, {len(os.sched_getaffinity(0))} cores"


def commit() -> str:
    """The commit that is checked out, followed by + if the working tree differs from it."""
    try:
        git = ["git", "-C", str(RESULTS.parent), "describe", "--always", "--dirty=+", "--exclude=*"]
        return subprocess.run(git, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return "unknown"


def report(name: str, rows: Iterable[Row], options: Namespace) -> list[Row]:
    """Print each row as it arrives, and write all of them to ``name.json`` in ``--out`` or `RESULTS`."""
    import torch

    done: list[Row] = []
    print(f"\n{name}: {machine()}, {options.threads} thread{'s' * (options.threads != 1)}")
    print(f"  {'case':<58} {'ours':>10} {'ceiling':>10} {'unit':<9} {'ratio':>6} {'target':>6}  {'peer':>10} {'/peer':>6}")
    for row in rows:
        done.append(row)
        target = "" if row.target is None else f"{row.target:.2f}"
        peer = "" if row.peer is None else f"{row.peer:10.4g} {row.ratio_to_peer:6.2f}"
        missed = " <" if row.target is not None and row.ratio < row.target else ""
        print(
            f"  {row.case:<58} {row.ours:10.4g} {row.ceiling:10.4g} {row.unit:<9} {row.ratio:6.2f} {target:>6}{missed:2} {peer} {row.note}",
            flush=True,
        )
    about = {"machine": machine(), "commit": commit(), "threads": options.threads, "torch": torch.__version__}
    folder = Path(options.out or RESULTS)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.json").write_text(json.dumps([asdict(row) | about for row in done], indent=1) + "\n")
    return done
