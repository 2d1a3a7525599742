"""Tables and pictures of the suite's results."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from benchmarks.suite.pictures import panels
from benchmarks.suite.recorded import is_done, points
from benchmarks.suite.runs import result_path
from benchmarks.suite.statistics import (
    Curve,
    final_score,
    interpolated,
    interval,
    probability_of_improvement,
    time_to_threshold,
)  # fmt: skip
from benchmarks.suite.tasks import TASKS, Task

Results = Mapping[str, Sequence[Curve]]


def read(results: Path, name: str, tasks: Sequence[Task], finished: bool = True) -> dict[str, list[Curve]]:
    """The curves of a configuration by task, one for each seed; only of runs that are done, unless ``finished`` is False."""
    found: dict[str, list[Curve]] = {}
    for task in tasks:
        for path in sorted(result_path(results, name, task.name, 0).parent.glob("seed*.jsonl")):
            curve = points(path)
            if curve and (is_done(path) or not finished):
                found.setdefault(task.name, []).append(curve)
    return found


def times(task: Task, curves: Sequence[Curve]) -> str:
    """Median processor seconds to the threshold, and how many seeds reached it; "" without runs."""
    if not curves:
        return ""
    times = [time_to_threshold(c, task.threshold) for c in curves]
    reached, middle = sum(t < math.inf for t in times), float(np.median(times))
    shown = f"{middle:.0f} s" if middle < math.inf else f"> {max(c[-1].cpu for c in curves):.0f} s"
    return f"{shown} ({reached} of {len(times)})"


def summary(found: Results) -> str:
    """One row for each task: time to the threshold, final score with its interval, steps and updates of the budget."""
    lines = [
        "| task | threshold | CPU until reached, median (seeds) | final score | 95% interval | environment steps | updates |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for task in TASKS:
        if task.name not in found:
            continue
        curves = found[task.name]
        finals = [final_score(c) for c in curves]
        low, high = interval(finals)
        shown = f"{low:.2f} to {high:.2f}" if len(finals) > 1 else "one seed"
        steps, updates = (np.mean([getattr(c[-1], k) for c in curves]) for k in ("steps", "updates"))
        lines.append(
            f"| {task.what} | {task.threshold:g} | {times(task, curves)} | {np.mean(finals):.2f} | {shown} | "
            f"{steps:,.0f} | {updates:,.0f} |"
        )
    return "\n".join(lines)


def with_two_seeds(a: Results, b: Results) -> list[str]:
    """The tasks of which both have two seeds or more: an interval over one seed has no width, and looks like certainty."""
    return [t.name for t in TASKS if min(len(x.get(t.name, ())) for x in (a, b)) >= 2]


def comparison(a: Results, b: Results, names: tuple[str, str]) -> str:
    """Two configurations side by side, and the probability that the first is better, over the tasks with two seeds of both."""
    lines = [f"| task | CPU until reached: {names[0]} | {names[1]} | final: {names[0]} | {names[1]} |", "| --- " * 5 + "|"]
    for task in (t for t in TASKS if t.name in a and t.name in b):
        finals = [float(np.mean([final_score(c) for c in x[task.name]])) for x in (a, b)]
        lines.append(
            f"| {task.what} | {times(task, a[task.name])} | {times(task, b[task.name])} | {finals[0]:.2f} | {finals[1]:.2f} |"
        )
    compared = [t for t in TASKS if t.name in with_two_seeds(a, b)]
    if not compared:
        return "\n".join([*lines, "", "No task with two seeds of both: too few for a probability of improvement."])
    of_final = [{t.name: [final_score(c) for c in x[t.name]] for t in compared} for x in (a, b)]
    of_time = [{t.name: [-time_to_threshold(c, t.threshold) for c in x[t.name]] for t in compared} for x in (a, b)]
    for what, (x, y) in (("final score", of_final), ("time to the threshold", of_time)):
        p, low, high = probability_of_improvement(x, y)
        lines += [
            "",
            f"P({names[0]} beats {names[1]}) by {what}: {p:.2f} (95%: {low:.2f} to {high:.2f}), {len(compared)} tasks",
        ]
    return "\n".join(lines)


def draw(results: Mapping[str, Results], path: Path, axis: str = "cpu") -> None:
    """A picture of the mean curves with intervals over seeds, a panel for each task, a line for each configuration. Titles end with the
    numbers of seeds."""
    shown = [t for t in TASKS if any(t.name in found for found in results.values())]
    what = {"cpu": "processor seconds", "steps": "environment steps", "updates": "updates"}[axis]
    with panels(path, len(shown), 5, (3.4, 2.8), what) as axes:
        for task, panel in zip(shown, axes):
            seeds = []
            for name, found in results.items():
                curves = found.get(task.name, ())
                if not curves:
                    continue
                seeds.append(str(len(curves)))
                x = np.linspace(0.0, max(float(getattr(c[-1], axis)) for c in curves), 100)
                y = np.stack([interpolated(c, x, axis) for c in curves])
                ends = np.array([interval(column) for column in y.T])
                panel.plot(x, y.mean(0), label=name)
                panel.fill_between(x, ends[:, 0], ends[:, 1], alpha=0.25)
            panel.axhline(task.threshold, color="grey", linewidth=0.8, linestyle=":")
            panel.set_title(f"{task.what} ({', '.join(seeds)})", fontsize=9)
        axes[0].legend(fontsize=8)
