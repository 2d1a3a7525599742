"""Read the metrics of training runs from disk, and plot them."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from amago.registry import require

# the palette of Okabe and Ito, for readers with any colour vision; darkest first
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
MARKERS = "osD^vPX"

_ROW_KEYS = {"epoch", "env_steps", "grad_steps", "wall_time", "section", "values"}


def read_metrics(run_dir: str | Path) -> list[dict[str, Any]]:
    """Read ``metrics.jsonl`` in the directory of a run.

    Unreadable lines are left out: the last one silently, because the run may still be writing it, earlier ones with a warning
    (a run that was killed and resumed may have one).

    Returns:
        rows ``{"epoch", "env_steps", "grad_steps", "wall_time", "section", "values": {name: number}}``, in the order in
        which they were written.

    Raises:
        FileNotFoundError: there is no ``metrics.jsonl``; names the directory.
        ValueError: a line is JSON but not a row; names file and line.
    """
    path = Path(run_dir) / "metrics.jsonl"
    if not path.is_file():
        raise FileNotFoundError(f"no metrics.jsonl in {str(run_dir)!r}: is that the directory of a run?")
    numbered = [(number, line) for number, line in enumerate(path.read_bytes().split(b"\n"), start=1) if line.strip()]
    rows = []
    for number, line in numbered:
        try:
            row = json.loads(line)
        except ValueError:  # or its subclass UnicodeDecodeError, if the line ends inside a character
            if number != numbered[-1][0]:
                warnings.warn(f"{path}:{number}: unreadable line left out: {line[:60]!r}", stacklevel=2)
            continue
        if not isinstance(row, dict) or not row.keys() >= _ROW_KEYS or not isinstance(row["values"], dict):
            raise ValueError(
                f"{path}:{number}: a row must be an object with {', '.join(sorted(_ROW_KEYS))}, values being an object; got {row!r:.200}"
            )
        rows.append(row)
    return rows


def plot_adaptation(
    curves: Mapping[str, Sequence[tuple[int, float]]],
    by_attempt: Mapping[str, Sequence[float]],
    path: str | Path,
    title: str = "Learning to adapt",
) -> Path:
    """Plot success rates over attempts, and returns over training, in two panels of a PNG. No display is needed.

    An agent has the same colour and marker in both panels.

    Args:
        curves: {agent: [(environment steps, mean return per rollout), ...]}, points in any order; NaN leaves a gap.
        by_attempt: {agent: [success rate in attempt 1, in attempt 2, ...]}, rates in [0, 1]; NaN leaves a gap.
        path: of the PNG, with any suffix, which is returned; missing directories are created.
        title: above both panels.

    Raises:
        ImportError: matplotlib is not installed; names the extra.
        ValueError: there is nothing to draw.
    """
    if not any(map(len, (*curves.values(), *by_attempt.values()))):
        raise ValueError("nothing to draw: curves and by_attempt are both empty")
    ticker = require("matplotlib.ticker", "plots", "plot_adaptation")
    figure = require("matplotlib.figure", "plots", "plot_adaptation").Figure(figsize=(11.0, 4.6), layout="constrained")
    right, left = figure.subplots(1, 2, width_ratios=(3, 2))
    left.set(title="Training", xlabel="environment steps", ylabel="mean return per rollout")
    right.set(title="After training: each attempt of a rollout", xlabel="attempt", ylabel="success rate", ylim=(-0.03, 1.03))
    left.xaxis.set_major_formatter(ticker.EngFormatter(sep=""))
    left.xaxis.set_major_locator(ticker.MaxNLocator(integer=True, nbins=6))
    right.yaxis.set_major_formatter(ticker.PercentFormatter(xmax=1.0, decimals=0))
    right.xaxis.set_major_locator(ticker.MaxNLocator(integer=True, nbins=12, min_n_ticks=1))
    lines: dict[str, Any] = {}
    for i, agent in enumerate(dict.fromkeys([*curves, *by_attempt])):
        look = {"color": COLORS[i % len(COLORS)], "marker": MARKERS[i % len(MARKERS)], "markersize": 5, "linewidth": 2}
        if curves.get(agent):
            steps, returns = zip(*sorted(curves[agent], key=lambda point: point[0]))
            sparse = max(1, len(steps) // 12)  # a marker on every point would hide a long curve
            (lines[agent],) = left.plot(steps, returns, markevery=sparse, **look)
        if agent in by_attempt:
            rates = by_attempt[agent]
            (line,) = right.plot(range(1, len(rates) + 1), rates, **look)
            if len(rates):
                style = {"color": look["color"], "weight": "bold", "ha": "center", "textcoords": "offset points"}
                right.annotate(f"{rates[-1]:.0%}", (len(rates), rates[-1]), (0, 8), **style)
            lines.setdefault(agent, line)
    right.set_xlim(0.7, max((len(rates) for rates in by_attempt.values()), default=1) + 0.3)
    for axes, data in ((left, curves), (right, by_attempt)):
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
        if not data:
            axes.text(0.5, 0.5, "no data", transform=axes.transAxes, ha="center", va="center", color="0.5")
    figure.suptitle(_plain(title), fontsize=14)
    names = [_plain(agent) for agent in lines]
    figure.legend(list(lines.values()), names, loc="outside lower center", ncols=min(len(lines), 4), frameon=False)
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="png", dpi=150)
    return path


def _plain(text: str) -> str:
    """Text escaped for matplotlib, which typesets mathematics between dollars and hides labels with a leading underscore."""
    text = text.replace("$", r"\$")
    return f" {text}" if text.startswith("_") else text
