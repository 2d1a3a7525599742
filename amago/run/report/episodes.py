"""Rewards by time in the rollout, from the newest trajectories in the replay buffer of a run. The buffer is only read."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from amago.run.report.curves import RESAMPLES, Array, Curve, interval
from amago.run.report.runs import Group, Run
from amago.store import BadFileError, EvictedError, TrajectoryStore

NEWEST = 500
"""Trajectories that are read of each run."""
_BINS = 20


def buffer_of(run: Run) -> Path | None:
    """The replay buffer of a run, from its settings or else its directory; None if there is none with trajectories."""
    settings = run.settings or {}
    places = [
        Path(str(settings.get(f"{part}dset_root"))) / str(settings.get(f"{part}dset_name")) / "buffer"
        for part in ("", "dataset.")
    ]
    for place in [*places, run.path / "buffer"]:
        if (place / "fifo").is_dir() and (place / "protected").is_dir():
            return place
    return None


def rewards_by_time(run: Run, newest: int = NEWEST) -> dict[str, tuple[Array, Array]]:
    """Rewards of the newest trajectories of a run's own collection, by environment name.

    Returns:
        {name: (times, rewards)}: the first time index of each of at most 20 equal spans, (bins,); and the mean reward of a step of
        each trajectory in each span, (trajectories, bins), NaN where it has no step.

    Raises:
        OSError, amago.store.StoreError: the buffer cannot be read.
    """
    root = buffer_of(run)
    if root is None:
        return {}
    store = TrajectoryStore(root, edit=False)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            store.refresh(evict=False)
        found: dict[str, list[tuple[int, Array]]] = {}
        view = store.view()
        own = view.indices_in(set(map(str, store.paths_in("fifo"))))
        for index in own[-newest:].tolist():
            try:
                trajectory = view.read(index, keys=())
            except (EvictedError, BadFileError):
                continue  # deleted or damaged since
            rewards = trajectory.rews[:, 0].astype(np.float64)
            found.setdefault(trajectory.env_name, []).append((trajectory.start_time, rewards))
    finally:
        store.close()
    return {name: _binned(parts) for name, parts in found.items()}


def _binned(parts: Sequence[tuple[int, Array]]) -> tuple[Array, Array]:
    """Mean rewards in equal spans of time; as `rewards_by_time`."""
    end = max(start + len(rewards) for start, rewards in parts)
    width = max(1, -(-end // _BINS))
    times = np.arange(0, end, width)
    values = np.full((len(parts), len(times)), np.nan)
    for row, (start, rewards) in zip(values, parts):
        into = (start + np.arange(len(rewards))) // width
        counts = np.bincount(into, minlength=len(times))
        sums = np.bincount(into, rewards, minlength=len(times))
        row[counts > 0] = sums[counts > 0] / counts[counts > 0]
    known = ~np.isnan(values).all(axis=0)
    return times[known].astype(np.float64), values[:, known]


def by_time(group: Group, found: Sequence[tuple[Array, Array]]) -> Curve | None:
    """The mean reward of a step by time in the rollout: over runs with an interval over these, or for one run over its trajectories.

    Args:
        found: of each run, from `rewards_by_time`.
    """
    known = [f for f in found if len(f[0]) > 1]
    if not known:
        return None
    if len(known) == 1:
        times, values = known[0]
        means, low, high = _mean_of_known(values)
        return Curve(times, means, low, high)
    shortest = min(known, key=lambda f: float(f[0][-1]))[0]
    means = np.stack([np.interp(shortest, times, np.nanmean(values, axis=0)) for times, values in known])
    low, high = interval(means)
    return Curve(shortest, means.mean(axis=0), low, high, len(known))


def _mean_of_known(values: Array) -> tuple[Array, Array, Array]:
    """The mean over rows of what is not NaN, with the ends of its bootstrap interval."""
    rng = np.random.default_rng(0)
    known = ~np.isnan(values)
    filled = np.where(known, values, 0.0)
    weights = rng.multinomial(len(values), np.full(len(values), 1.0 / len(values)), size=RESAMPLES).astype(np.float64)
    counts = weights @ known
    resampled = np.divide(weights @ filled, counts, out=np.full(counts.shape, np.nan), where=counts > 0)
    low, high = np.nanquantile(resampled, [0.025, 0.975], axis=0)
    return filled.sum(axis=0) / np.maximum(known.sum(axis=0), 1), low, high
