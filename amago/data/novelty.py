"""A novelty bonus from counts of observations within a rollout (numpy only)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import gin
import numpy as np
from numpy.typing import NDArray

from amago.data.relabel import Relabeler
from amago.data.trajectory import FrozenTraj

Array = NDArray[Any]


def visits(rows: Array) -> NDArray[np.int64]:
    """For each row of (n, d), how many rows up to this one are equal to it: 1 where it is new."""
    _, place = np.unique(rows, axis=0, return_inverse=True)
    place = place.reshape(-1)  # NumPy 2.0 alone gives it another shape
    order = np.argsort(place, kind="stable")
    first = np.concatenate(([True], np.diff(place[order]) != 0))
    starts = np.flatnonzero(first)
    counts = np.empty(len(rows), np.int64)
    counts[order] = np.arange(len(rows)) - np.repeat(starts, np.diff(np.append(starts, len(rows)))) + 1
    return counts


@gin.configurable(module="amago.relabeling")
class NoveltyRelabeler(Relabeler):
    """Adds ``coeff * n ** -decay`` to the reward of each transition, where n counts the visits, in this rollout, to what it leads to.

    A policy with memory then learns to look for what it has not seen yet, in each rollout anew, which finds sparse rewards that random
    actions do not reach (counts: Strehl and Littman 2008; within an episode: Badia et al. 2020, arXiv 2002.06038). Only the rewards to learn
    from change: what the policy observes (``rl2s``), the stored trajectories and evaluations keep the environment's. The best policy is
    another one, the more so the larger ``coeff`` is: go on without the bonus once rewards are found.

    In a piece of a rollout, counts begin with the piece. Terminations do not begin them anew.

    Args:
        coeff: bonus of what is new, in units of the environment's reward; at least 0.
        decay: 0.5 for 1 / sqrt(n); ``inf``: only what is new has a bonus.
        keys: observations that are counted; None: all. Leave out what changes in each step by itself, such as a clock.
        features: positions of the numbers that are counted, in these observations flattened and joined in the order of ``keys`` (None:
            alphabetical); None: all numbers.
        resolution: numbers that are equal after division by this and rounding are the same; None: only equal numbers are.
    """

    def __init__(
        self,
        coeff: float = 0.1,
        decay: float = 0.5,
        keys: Sequence[str] | None = None,
        resolution: float | None = None,
        features: Sequence[int] | None = None,
    ):
        if not 0 <= coeff < np.inf:
            raise ValueError(f"coeff must be a reward of at least 0, got {coeff!r}")
        if not decay >= 0:
            raise ValueError(f"decay must be at least 0 (0.5: 1 / sqrt(visits)), got {decay!r}")
        if isinstance(keys, str):
            raise ValueError(f"keys must be a list of names of observations, got {keys!r}: write [{keys!r}]")
        if resolution is not None and not 0 < resolution < np.inf:
            raise ValueError(f"resolution must be a distance above 0, or None, got {resolution!r}")
        if features is not None and (not features or any(not isinstance(i, int) or i < 0 for i in features)):
            raise ValueError(f"features must be a list of positions of at least 0, or None, got {features!r}")
        self.coeff, self.decay, self.resolution = coeff, decay, resolution
        self.keys = None if keys is None else tuple(keys)
        self.features = None if features is None else list(features)

    def relabel(self, traj: FrozenTraj) -> FrozenTraj:
        """The trajectory with other rewards.

        Raises:
            ValueError: an observation of ``keys`` is missing, or a number of ``features``; the message names it.
        """
        counts = visits(self._counted(traj))[1:, None]
        bonus = self.coeff * (counts == 1 if self.decay == np.inf else counts.astype(float) ** -self.decay)
        return replace(traj, rews=(traj.rews + bonus).astype(np.float32))

    def _counted(self, traj: FrozenTraj) -> Array:
        """(T + 1, d): what is compared."""
        missing = sorted(set(self.keys or ()) - traj.obs.keys())
        if missing:
            raise ValueError(f"keys has {', '.join(map(repr, missing))}, but the observations are {sorted(traj.obs)}")
        rows = [np.asarray(traj.obs[key]).reshape(len(traj) + 1, -1) for key in self.keys or sorted(traj.obs)]
        if self.resolution is not None:
            rows = [np.round(a / self.resolution) if a.dtype.kind == "f" else a for a in rows]
        joined = np.concatenate(rows, axis=1)
        if self.features is None:
            return joined
        if max(self.features) >= joined.shape[1]:
            raise ValueError(
                f"features has {max(self.features)}, but the observations that are counted have {joined.shape[1]} numbers"
            )
        return joined[:, self.features]
