"""Metrics of finished rollouts, and evaluation of an agent on a pool of actors."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import torch
from tqdm import tqdm

from amago.agent import BaseAgent
from amago.envs.pool import ActorPool
from amago.envs.statistics import PhaseStatistics, ReturnHistory, SpecialMetricHistory
from amago.run.metric_names import AVERAGE_RETURN, AVERAGE_RETURN_OF_ROLLOUTS, NUMBER_OF_ROLLOUTS, RETURN_OF, ROLLOUT_LENGTH
from amago.run.results import Evaluation
from amago.run.rollout import Rollout


def merge_values(parts: Iterable[Mapping[str, Sequence[float]]]) -> dict[str, list[float]]:
    """Concatenate lists of the same name."""
    out: dict[str, list[float]] = {}
    for part in parts:
        for name, values in part.items():
            out.setdefault(name, []).extend(values)
    return out


def merge_returns(histories: Iterable[ReturnHistory]) -> dict[str, list[float]]:
    """Returns of all rollouts, by environment name."""
    return merge_values(history.data for history in histories)


def merge_specials(histories: Iterable[SpecialMetricHistory]) -> dict[str, list[float]]:
    """The environments' own metrics, by "METRIC in ENVIRONMENT"."""
    return merge_values(
        {f"{metric} in {name}": values}
        for h in histories
        for name, metrics in h.data.items()
        for metric, values in metrics.items()
    )


def summarise(returns: Mapping[str, Sequence[float]], specials: Mapping[str, Sequence[float]]) -> Evaluation:
    """The metrics of rollouts, by their names in the log; {} if no rollout ended.

    The mean return over environment names (each counts the same, however many rollouts it has), the mean over rollouts, and the number
    of rollouts; for each environment name mean, 20th percentile (interpolated linearly) and mean of the lowest fifth of its returns, and
    means of its special metrics.

    Args:
        returns: of each rollout, by environment name.
        specials: the environments' own metrics, as from `merge_specials`.
    """
    if not returns:
        return Evaluation({}, {}, {})
    means = {name: float(np.mean(values)) for name, values in returns.items()}
    rollouts = [x for values in returns.values() for x in values]
    out = {
        AVERAGE_RETURN: float(np.mean(list(means.values()))),
        AVERAGE_RETURN_OF_ROLLOUTS: float(np.mean(rollouts)),
        NUMBER_OF_ROLLOUTS: float(len(rollouts)),
    }
    for name, values in returns.items():
        out[f"{RETURN_OF}{name}"] = means[name]
        out[f"Bottom Quintile Total Return in {name}"] = float(np.percentile(values, 20))
        worst = sorted(values)[: max(1, len(values) // 5)]
        out[f"Mean of Bottom Quintile Total Return in {name}"] = float(np.mean(worst))
    return Evaluation(out | {f"Average {name}": float(np.mean(v)) for name, v in specials.items()}, returns, specials)


def warn_if_too_short(
    metrics: Mapping[str, float], timesteps: int, episodes: int | None = None, name: str = "val_timesteps_per_epoch"
) -> None:
    """Warn if an evaluation was too short to measure anything, or for the number of rollouts that was requested.

    Args:
        metrics: of `summarise`.
        timesteps: of each actor.
        episodes: requested rollouts, over all actors; None: as many as end.
        name: of the argument that set the steps.
    """
    if not metrics:
        warnings.warn(
            f"no rollout ended within {name}={timesteps} steps of each actor, so nothing was measured; make it longer than a "
            "rollout, or give the environment a time limit",
            stacklevel=3,
        )
    elif episodes is not None and metrics[NUMBER_OF_ROLLOUTS] < episodes:
        warnings.warn(
            f"only {metrics[NUMBER_OF_ROLLOUTS]:.0f} of the {episodes} rollouts asked for ended within {name}={timesteps} steps of "
            "each actor, and long ones are missing first; allow more steps (on the command line: --eval_timesteps), or ask for fewer",
            stacklevel=3,
        )


def outcomes(stats: PhaseStatistics) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """The arguments of `summarise` for the rollouts that ended in a phase."""
    return merge_returns([ReturnHistory.of(stats.episodes)]), merge_specials([SpecialMetricHistory.of(stats.episodes)])


def mean_length(parts: Iterable[Sequence[int]]) -> dict[str, float]:
    """The mean length of the rollouts of all processes, in steps, by its name in the log; {} if there are none."""
    lengths = [length for part in parts for length in part]
    return {ROLLOUT_LENGTH: float(np.mean(lengths))} if lengths else {}


def evaluate(
    agent: BaseAgent,
    pool: ActorPool,
    timesteps: int,
    sample: bool = True,
    episodes: int | None = None,
    device: torch.device | str | None = None,
    seed: int | None = None,
    progress: bool = False,
) -> Evaluation:
    """Evaluate an agent in a pool of actors, without an `Experiment`; returns the metrics of `summarise`.

    Args:
        agent: on ``device``.
        pool: is reset first, and stays open.
        timesteps: steps of each actor at most.
        sample: sample actions from the policy; otherwise take its mode.
        episodes: take exactly so many rollouts, divided equally among the actors beforehand (`Rollout.run_phase`); fewer if ``timesteps``
            are over first. None: of each actor as many as end within ``timesteps``, regardless of their lengths.
        device: of the agent; None: that of its parameters, and the processor where it has none.
        seed: of the policy's samples; None continues PyTorch's random stream.
        progress: show a progress bar, if standard error is a terminal.
    """
    if seed is not None:
        torch.manual_seed(seed)
    found = next((p.device for p in agent.parameters()), "cpu") if device is None else device
    rollout = Rollout(pool, found)
    rollout.reset()
    with tqdm(
        total=timesteps * pool.num_actors, desc="evaluate", unit="step", disable=None if progress else True, leave=False
    ) as bar:
        _, stats = rollout.run_phase(agent, timesteps, sample, episodes, on_step=bar.update, evaluation=True)
    return summarise(*outcomes(stats))
