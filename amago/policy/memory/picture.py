"""A study of memory as a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from amago.policy.memory.saliency import Influence
from amago.policy.memory.study import NONE, MemoryStudy, describe, stage_estimates
from amago.policy.playing import FULL, THIS_ATTEMPT, View
from amago.run.plots import COLORS, MARKERS

_STYLE = {
    view: {"color": COLORS[i], "marker": MARKERS[i], "markersize": 5, "linewidth": 2}
    for i, view in enumerate((FULL, NONE, THIS_ATTEMPT))
}


def plot_memory(study: MemoryStudy, path: str | Path) -> Path:
    """Draw scores by attempt, returns by length of the context, and the influence of earlier steps, in three panels of a PNG.

    Bands and bars are 95% intervals. Matplotlib's global state is not changed, and no display is needed.

    Args:
        study: of `study_memory`.
        path: of the PNG, whatever its suffix; missing directories are created.

    Returns:
        ``path``.

    Raises:
        ImportError: matplotlib is not installed; names the extra.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as err:
        raise ImportError("the picture of --memory needs matplotlib: pip install 'amago[plots]'") from err
    figure = Figure(figsize=(15.0, 4.8), layout="constrained")
    left, middle, right = figure.subplots(1, 3)
    _plot_stages(left, study)
    _plot_contexts(middle, study)
    _plot_influence(right, study.influence)
    figure.suptitle(f"Memory in {study.name}".replace("$", r"\$"), fontsize=14)
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="png", dpi=120)
    return path


def _plot_stages(axes: Any, study: MemoryStudy) -> None:
    from matplotlib.ticker import MaxNLocator

    for view, style in _STYLE.items():
        if view not in study.stages.values:
            continue
        estimates = stage_estimates(study.stages.values[view])
        x = range(1, len(estimates) + 1)
        axes.fill_between(
            x, [e.low for e in estimates], [e.high for e in estimates], color=style["color"], alpha=0.15, linewidth=0
        )
        axes.plot(x, [e.mean for e in estimates], label=describe(view), **style)
    axes.set(title=f"Score by {study.stages.stage}", xlabel=study.stages.stage, ylabel=study.stages.score)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=12, min_n_ticks=1))
    axes.legend(title="memory in sight", frameon=False)
    _clean(axes)


def _plot_contexts(axes: Any, study: MemoryStudy) -> None:
    estimates = [study.estimate(View(context=n)) for n in study.contexts]
    means = np.array([e.mean for e in estimates])
    bars = [means - [e.low for e in estimates], [e.high for e in estimates] - means]
    axes.errorbar(
        study.contexts, means, yerr=bars, capsize=3, color=COLORS[4], marker="o", linewidth=2, label="the last n steps"
    )
    for view in (FULL, THIS_ATTEMPT):
        if view in study.returns:
            axes.axhline(
                study.estimate(view).mean, color=_STYLE[view]["color"], linewidth=2, linestyle="--", label=describe(view)
            )
    axes.set_xscale("log", base=2)
    axes.set_xticks(study.contexts, [str(n) for n in study.contexts])
    axes.minorticks_off()
    axes.set(
        title="Return by length of the context", xlabel="n, steps in sight (1: no memory)", ylabel="mean return per rollout"
    )
    axes.legend(frameon=False)
    _clean(axes)


def _plot_influence(axes: Any, found: Influence | None) -> None:
    axes.set_title("Influence of each step on later actions, one rollout")
    if found is None:
        axes.text(
            0.5, 0.5, "the agent gives no log-probabilities", transform=axes.transAxes, ha="center", va="center", color="0.5"
        )
        return
    length = found.share.shape[1]
    image = np.where(np.arange(length) <= found.queries[:, None], found.share, np.nan)
    edges = np.append(found.queries, length) - 0.5
    drawn = axes.pcolormesh(
        np.arange(length + 1) - 0.5, edges, image, cmap="viridis", vmin=0.0, vmax=max(1e-6, float(np.nanmax(image)))
    )
    for end in np.flatnonzero(np.diff(found.attempts)) + 0.5:
        axes.axvline(end, color="w", linewidth=0.8, linestyle=":")
        axes.axhline(end, color="w", linewidth=0.8, linestyle=":")
    axes.invert_yaxis()
    axes.set_facecolor("0.9")
    axes.set(xlabel="step that was seen", ylabel="step of the action")
    axes.figure.colorbar(drawn, ax=axes, label="share of the gradient's norm")


def _clean(axes: Any) -> None:
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
