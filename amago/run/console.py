"""What a run tells on the console."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tqdm import tqdm

from amago import config


def progress_bar(title: str, total: int | None, unit: str, hidden: bool) -> tqdm:  # type: ignore[type-arg]
    """Steps per second and time left of one phase; it vanishes when it is closed."""
    return tqdm(total=total, desc=f"{title:<20}", unit=unit, disable=hidden, leave=False, dynamic_ncols=True, mininterval=0.5)


def summary(e: Any, env_summary: str) -> str:
    """The settings of a started `Experiment` that matter most, in two columns."""
    count = sum(p.numel() for p in e.policy.trainable_params)
    rows = {
        "run": f"{e.run_name} ({e.run_dir})",
        "environments": env_summary,
        "exploration": getattr(e.exploration_wrapper_type, "__name__", "none"),
        "agent": f"{type(e.policy).__name__}: {type(e.policy.tstep_encoder).__name__} -> "
        f"{type(e.policy.traj_encoder).__name__}, {count:,} trainable parameters on {e.DEVICE}",
        "sequences": f"{e.batch_size * e.accelerator.num_processes} a batch, up to {e.max_seq_len} steps each",
        "an epoch": f"{e.train_timesteps_per_epoch or 0} steps of each actor, {e.train_batches_per_epoch} batches",
        "epochs": f"{e.epoch} to {e.epochs}; evaluation every {e.val_interval}, checkpoint every {e.ckpt_interval}",
        "seed": f"{e.run_seed}",
    }
    width = max(map(len, rows))
    return "\n".join(f"  {k:<{width}}  {v}" for k, v in rows.items())


def headline(metrics: Mapping[str, float]) -> str:
    """The few numbers of an evaluation that are worth a line."""
    shown = {"return": metrics["Average Total Return (Across All Env Names)"], "rollouts": metrics["Number of Rollouts"]}
    extra = [k for k in metrics if "Success" in k]
    shown |= {k.removeprefix("Average "): metrics[k] for k in extra[:1] + extra[-1:]}
    return ", ".join(f"{k} {v:.3f}" for k, v in shown.items())


def wandb_options(e: Any) -> dict[str, Any]:
    """What Weights & Biases is told of an `Experiment`."""
    return {
        "project": e.wandb_project, "entity": e.wandb_entity, "name": e.run_name, "group": e.wandb_group_name,
        "config": {k: str(v) for k, v in config.bindings().items()},
    }  # fmt: skip


def metrics_table(metrics: Mapping[str, float], title: str) -> str:
    """Two columns, names and values, sorted by name with the headline first."""
    if not metrics:
        return f"{title}: no rollout ended; evaluate for more timesteps"
    first = "Average Total Return (Across All Env Names)"
    names = sorted(metrics, key=lambda k: (k != first, natural(k)))
    width = max(map(len, names))
    lines = [f"{name:<{width}}  {metrics[name]:>12.4g}" for name in names]
    return "\n".join([title, "-" * (width + 14), *lines])


def natural(text: str) -> list[tuple[int, str]]:
    """A sort key that puts "Attempt 9" before "Attempt 10"."""
    key, digits = [], ""
    for c in text + " ":
        if c.isdigit():
            digits += c
        else:
            if digits:
                key.append((int(digits), ""))
                digits = ""
            key.append((-1, c))
    return key
