"""Evaluate an agent on a pool of actors, and put the results into named numbers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import torch
from tqdm import tqdm

from amago.agent import BaseAgent
from amago.envs.pool import ActorPool
from amago.envs.statistics import ReturnHistory, SpecialMetricHistory
from amago.run.rollout import Rollout


def bottom_quintile(values: Sequence[float]) -> float:
    """Mean of the lowest fifth (at least one value)."""
    ordered = np.sort(np.asarray(values, dtype=np.float64))
    return float(ordered[: max(1, len(ordered) // 5)].mean())


def merge_returns(histories: Iterable[ReturnHistory]) -> dict[str, list[float]]:
    """Returns of all rollouts by environment name."""
    out: dict[str, list[float]] = {}
    for history in histories:
        for name, values in history.data.items():
            out.setdefault(name, []).extend(values)
    return out


def merge_specials(histories: Iterable[SpecialMetricHistory]) -> dict[str, list[float]]:
    """The environments' own metrics, by "environment name metric name"."""
    out: dict[str, list[float]] = {}
    for history in histories:
        for name, metrics in history.data.items():
            for metric, values in metrics.items():
                out.setdefault(f"{metric} in {name}", []).extend(values)
    return out


def summarise(returns: Mapping[str, Sequence[float]], specials: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Means, and the mean of the worst fifth, under the names of the log; {} if no rollout ended."""
    if not returns:
        return {}
    everything = [x for values in returns.values() for x in values]
    out = {
        "Average Total Return (Across All Env Names)": float(np.mean(everything)),
        "Number of Rollouts": float(len(everything)),
    }
    out |= {f"Average Total Return in {name}": float(np.mean(v)) for name, v in returns.items()}
    out |= {f"Bottom Quintile Total Return in {name}": bottom_quintile(v) for name, v in returns.items()}
    return out | {f"Average {name}": float(np.mean(v)) for name, v in specials.items()}


def evaluate(
    agent: BaseAgent,
    pool: ActorPool,
    timesteps: int,
    sample: bool = True,
    episodes: int | None = None,
    device: torch.device | str = "cpu",
    seed: int | None = None,
    progress: bool = False,
) -> dict[str, float]:
    """Let an agent act in a fresh pool.

    Args:
        timesteps: steps of each actor at most.
        episodes: stop once so many rollouts have ended in all.
        seed: of the policy's samples.
        progress: show a bar.
    """
    if seed is not None:
        torch.manual_seed(seed)
    rollout = Rollout(pool, device)
    rollout.reset()
    with tqdm(total=timesteps * pool.num_actors, desc="evaluate", unit="step", disable=not progress, leave=False) as bar:
        rollout.run(agent, timesteps, sample, episodes, on_step=bar.update)
    ended = pool.drain().episodes
    return summarise(merge_returns([ReturnHistory(ended)]), merge_specials([SpecialMetricHistory(ended)]))
