"""Texts of a run for the console: the summary and tables. Progress is in `amago.run.progress`."""

from __future__ import annotations

from collections.abc import Mapping

from amago.agent import BaseAgent
from amago.run.layout import fitted
from amago.run.metric_names import AVERAGE_RETURN
from amago.run.natural import natural
from amago.run.settings import ExperimentSettings

LARGE = 1_500_000
"""Parameters from which an update on a CPU takes tenths of a second."""


def summary(settings: ExperimentSettings, policy: BaseAgent, env_summary: str, processes: int, epoch: int, seed: int) -> str:
    """The most important settings of a run, in two columns. A run that never collects has data in place of exploration.

    Args:
        env_summary: describes the environments.
        processes: that train together.
        epoch: the first to run.
        seed: of the run.
    """
    s, parameters = settings, policy.trainable_params
    count, device = sum(p.numel() for p in parameters), next((p.device for p in parameters), "cpu")
    rows = {
        "run": f"{s.run_name} ({s.run_dir})",
        "environments": env_summary,
        "exploration": getattr(s.exploration_wrapper_type, "__name__", "none") if s.collects else "",
        "data": "" if s.collects or s.dataset is None else s.dataset.describe(),
        "agent": f"{type(policy).__name__}: {type(policy.tstep_encoder).__name__} -> "
        f"{type(policy.traj_encoder).__name__}, {count:,} trainable parameters on {device}",
        "hint": 'this size is meant for a GPU; on a CPU, widths of 128 and 2 layers are about 4 times as fast ("Fast on a CPU" in '
        "docs/performance.md)"
        if count > LARGE and str(device) == "cpu"
        else "",
        "sequences": f"{s.batch_size * processes} a batch, up to {s.max_seq_len} steps each",
        "an epoch": (f"{s.train_timesteps_per_epoch} steps of each actor, " if s.collects else "")
        + f"{s.train_batches_per_epoch} batches",
        "epochs": f"{epoch} to {s.epochs}; {_how_often('evaluation', s.val_interval)}, {_how_often('checkpoint', s.ckpt_interval)}",
        "seed": f"{seed}",
    }
    width = max(map(len, rows))
    return "\n".join(fitted(f"  {k:<{width}}  {v}", width + 4) for k, v in rows.items() if v)


def _how_often(what: str, interval: int | None) -> str:
    return f"no {what}" if interval is None else f"{what} every {interval}" if interval > 1 else f"{what} every epoch"


def metrics_table(metrics: Mapping[str, float], title: str) -> str:
    """Two columns, names and values, sorted by name after the average return."""
    if not metrics:
        return f"{title}: no rollout ended; evaluate for more timesteps"
    names = sorted(metrics, key=lambda k: (k != AVERAGE_RETURN, natural(k)))
    width = max(map(len, names))
    lines = [f"{name:<{width}}  {metrics[name]:>12.4g}" for name in names]
    return "\n".join([title, "-" * (width + 14), *lines])
