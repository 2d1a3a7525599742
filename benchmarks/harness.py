"""What all benchmarks share: rows, taking turns, the table and the file.

A benchmark compares *ours* with a *ceiling*, the simplest code that does only the unavoidable work, in one run and in turns, so that whatever
else the machine does meanwhile meets both. Its ratio is the median over rounds of the ratio within a round, and says which share of the ceiling's
speed is reached: 1 is perfect, whether the unit is a rate (more is better) or a cost (less is better).
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
"""Units of which less is better; of all others more is."""


@dataclass(frozen=True)
class Row:
    """A line of a benchmark's table.

    Args:
        case: what was measured.
        ours, ceiling: in ``unit``, medians over rounds.
        unit: one of `COSTS`, or a rate such as "steps/s".
        ratio: share of the ceiling's speed, see this module.
        target: the least ratio that is asked for; None for none.
        peer, ratio_to_peer: the same of another implementation, if one was given.
        note: what a reader must know about this line.
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
    """How fast ``ours`` is in units of ``other``."""
    return other / ours if unit in COSTS else ours / other


def in_turns(contenders: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """Measure each contender once a round; the order turns round every time, so that none always follows the same one.

    Args:
        contenders: by name, functions that do the work and return the figure.
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
    """A row from contenders that take turns.

    Args:
        contenders: "ours", "ceiling" and perhaps "peer"; others are kept as details.
        ceiling: instead of a contender of that name: makes it from one round's figures.
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
    """Mean seconds of a call, over ``at_least`` seconds and at least ``calls`` calls."""
    done, start = 0, time.perf_counter()
    while True:
        work()
        done += 1
        taken = time.perf_counter() - start
        if taken >= at_least and done >= calls:
            return taken / done


def machine() -> str:
    """This machine in a few words."""
    model = platform.processor() or platform.machine()
    if os.path.exists("/proc/cpuinfo"):
        with open("/proc/cpuinfo") as f:
            model = next((line.split(":", 1)[1].strip() for line in f if line.startswith("model name")), model)
    return f"{model}, {len(os.sched_getaffinity(0))} cores"


def commit() -> str:
    """The commit that is checked out, with + if files differ from it."""
    try:
        git = ["git", "-C", str(RESULTS.parent), "describe", "--always", "--dirty=+", "--exclude=*"]
        return subprocess.run(git, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return "unknown"


def report(name: str, rows: Iterable[Row], options: Namespace) -> list[Row]:
    """Print rows as they come, and write them to ``RESULTS/name.json`` (with ``--out DIR`` there)."""
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
            f"  {row.case:<58} {row.ours:10.4g} {row.ceiling:10.4g} {row.unit:<9} {row.ratio:6.2f} {target:>6}{missed:2} {peer}",
            flush=True,
        )
    about = {"machine": machine(), "commit": commit(), "threads": options.threads, "torch": torch.__version__}
    folder = Path(options.out or RESULTS)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.json").write_text(json.dumps([asdict(row) | about for row in done], indent=1) + "\n")
    return done
