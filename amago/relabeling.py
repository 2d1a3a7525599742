"""Trajectories rewritten before a training sequence is cut from them: goals in hindsight, novelty, shaping (numpy only)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import gin
import numpy as np
from numpy.typing import NDArray

from amago.data.trajectory import FrozenTraj, rl2, split_rl2

__all__ = [
    "STRATEGIES", "GoalSequenceRelabeler", "LastRewardShaping", "NoOpRelabeler", "NoveltyRelabeler", "Relabeler", "completion_times",
]  # fmt: skip
Array = NDArray[Any]
STRATEGIES = ("none", "some", "all")


class Relabeler:
    """Rewrite a whole trajectory each time before a training sequence is cut from it (hindsight relabelling).

    Subclass and override `relabel`, or `relabel_with` where the rewriting is random. The arrays may be changed in place: every
    sample reads its own. Extra fields that the returned trajectory lacks are kept from the original, unless its length
    changed. `GoalSequenceRelabeler` relabels sequences of goals.
    """

    def relabel(self, traj: FrozenTraj) -> FrozenTraj:
        """Return the trajectory to learn from."""
        raise NotImplementedError(f"{type(self).__name__} must override relabel() or relabel_with()")

    def relabel_with(self, traj: FrozenTraj, rng: np.random.Generator) -> FrozenTraj:
        """Return the trajectory to learn from, with ``rng`` as the only randomness (then a run can be repeated exactly)."""
        return self.relabel(traj)

    def __call__(self, traj: FrozenTraj, rng: np.random.Generator | None = None) -> FrozenTraj:
        """Relabel and check that the fields still fit together; without ``rng``, a fresh random stream is used."""
        return self.relabel_with(traj, np.random.default_rng() if rng is None else rng).validate()


def with_extras_of(original: FrozenTraj, relabeled: FrozenTraj) -> FrozenTraj:
    """The relabelled trajectory, with the extra fields of the original that it lacks.

    Raises:
        ValueError: it lacks one with a row for each step, and its length has changed.
    """
    missing = {k: v for k, v in original.extras.items() if k not in relabeled.extras}
    if not missing:
        return relabeled
    lost = [k for k, v in missing.items() if len(v) > 1]
    if lost and len(relabeled) != len(original):
        raise ValueError(
            f"the relabeler changed the trajectory from {len(original)} to {len(relabeled)} transitions and returned no extras "
            f"{lost}: return traj.slice(start, stop), or a FrozenTraj with extras={{name: rows}}"
        )
    return replace(relabeled, extras=missing | relabeled.extras)


class NoOpRelabeler(Relabeler):
    """Leave trajectories unchanged; datasets then read only the part of a file that they need."""

    def relabel(self, traj: FrozenTraj) -> FrozenTraj:
        return traj


def completion_times(achieved: Array, goals: Array, tolerance: float) -> list[int]:
    """The steps at which the goals of a sequence are reached, in order, up to the first that is missed.

    As in the environment, each step compares the achieved position with the next goal that is due, and reaches at most one
    goal.

    Args:
        achieved: (T + 1, d); row 0, the start, reaches nothing.
        goals: (k, d), in order.
        tolerance: reached where no coordinate differs by more.

    Returns:
        Indices of observations, 1 to T, strictly increasing; at most k of them.
    """
    times: list[int] = []
    for goal in goals:
        first = times[-1] + 1 if times else 1
        hits = np.flatnonzero((np.abs(achieved[first:] - goal) <= tolerance).all(axis=-1))
        if not hits.size:
            break
        times.append(first + int(hits[0]))
    return times


@gin.configurable(module="amago.relabeling")
class GoalSequenceRelabeler(Relabeler):
    """Replace goals that were missed by positions that were reached, in rollouts with a sequence of goals to reach in order
    (hindsight instruction relabelling, AMAGO, arXiv:2310.09971; after Andrychowicz et al. 2017, arXiv:1707.01495).

    The environment must observe the goals still to come under one key and the achieved position under another. The step
    that reaches the goal that is due (at most one a step, none at the start) adds ``goal_reward`` to the reward and
    overwrites that goal with ``done_value``; the last goal terminates. Nothing else may depend on the goals; it is kept.

    A rollout that reached all goals is returned unchanged. Otherwise n of the missed goals are replaced: n is 0 ("none"),
    all ("all"), or uniform between the two, ends included ("some"). The new goals are positions achieved at n different
    times, drawn uniformly among the times at which no goal was reached, and are ordered by time together with the reached
    goals. Goals, rewards, ``rl2s`` and terminations are then recomputed. A rollout that reaches its last goal is cut there.

    Args:
        strategy: "none", "some" or "all".
        goal_key: key of the observed goals, (k, d) or (k * d,) a step.
        achieved_key: key of the achieved position, (d,) a step, in the units of the goals.
        goal_reward: reward of reaching a goal.
        done_value: value of all numbers of a goal that has been reached.
        tolerance: largest difference in any coordinate at which a goal is reached.
        terminates: reaching the last goal terminates the rollout.
    """

    def __init__(
        self,
        strategy: str = "some",
        goal_key: str = "goals",
        achieved_key: str = "achieved",
        goal_reward: float = 1.0,
        done_value: float = -1.0,
        tolerance: float = 1e-5,
        terminates: bool = True,
    ):
        if strategy not in STRATEGIES:
            raise ValueError(f"strategy must be one of {', '.join(map(repr, STRATEGIES))}, got {strategy!r}")
        if not tolerance >= 0:
            raise ValueError(f"tolerance must be a distance of at least 0, got {tolerance!r}")
        if goal_key == achieved_key:
            raise ValueError(f"goal_key and achieved_key must be two observations, both are {goal_key!r}")
        self.strategy, self.goal_key, self.achieved_key = strategy, goal_key, achieved_key
        self.goal_reward, self.done_value, self.tolerance, self.terminates = goal_reward, done_value, tolerance, terminates

    def relabel_with(self, traj: FrozenTraj, rng: np.random.Generator) -> FrozenTraj:
        """The trajectory to learn from, with its own arrays where they differ.

        Raises:
            ValueError: an observation is missing, or the two keys' shapes do not fit together; the message names them.
        """
        if self.strategy == "none":
            return traj
        goals, achieved = self._split(traj)
        first = int((goals[0] == self.done_value).all(axis=-1).sum())  # reached before this piece of a rollout began
        asked = goals[0, first:]
        reached = completion_times(achieved, asked, self.tolerance)
        missed = len(asked) - len(reached)
        n = missed if self.strategy == "all" else int(rng.integers(missed + 1))
        chosen = self.choose_times(achieved, np.setdiff1d(np.arange(1, len(traj) + 1), reached), n, rng)
        n = len(chosen)
        if n == 0:
            return traj
        places = [(t, goal) for t, goal in zip(reached, asked)] + [(int(t), achieved[t]) for t in chosen]
        in_order = [goal for _, goal in sorted(places, key=lambda place: place[0])]
        new = np.stack([*in_order, *asked[len(reached) : len(asked) - n]]).astype(goals.dtype)
        return self._replay(traj, goals, achieved, first, reached, new)

    def choose_times(self, achieved: Array, free: Array, n: int, rng: np.random.Generator) -> Array:
        """Draw the times whose achieved positions become goals: ``n`` different elements of ``free``, or all if it has fewer.

        Override it to prefer some times. The achieved position at a chosen time must differ from ``done_value``.

        Args:
            achieved: (T + 1, d).
            free: indices of observations at which no goal was reached, increasing.
        """
        return rng.choice(free, size=min(n, len(free)), replace=False)

    def _split(self, traj: FrozenTraj) -> tuple[Array, Array]:
        """(T + 1, k, d) goals and (T + 1, d) achieved."""
        for name, key in (("goal_key", self.goal_key), ("achieved_key", self.achieved_key)):
            if key not in traj.obs:
                raise ValueError(f"{name} is {key!r}, but the observations are {sorted(traj.obs)}")
        achieved = traj.obs[self.achieved_key].reshape(len(traj) + 1, -1)
        goals, d = traj.obs[self.goal_key], achieved.shape[1]
        if d == 0 or goals.ndim < 2 or int(np.prod(goals.shape[1:])) % d:
            raise ValueError(
                f"observation {self.goal_key!r} has shape {goals.shape[1:]} a step, which is no sequence of goals of "
                f"{d} numbers like {self.achieved_key!r}"
            )
        return goals.reshape(len(traj) + 1, -1, d), achieved

    def _replay(
        self, traj: FrozenTraj, goals: Array, achieved: Array, first: int, reached: list[int], new: Array
    ) -> FrozenTraj:
        """The trajectory that the environment would have given for the same actions with the goals ``new``."""
        times = completion_times(achieved, new, self.tolerance)
        goals, rews, dones = goals.copy(), traj.rews.copy(), traj.dones.copy()
        goals[:, first:] = new
        for i, t in enumerate(times):
            goals[t:, first + i] = self.done_value
        rews[[t - 1 for t in times if t not in reached], 0] += self.goal_reward  # reached goals stay reached
        before, prev_actions = split_rl2(traj.rl2s)
        out = replace(
            traj,
            obs=traj.obs | {self.goal_key: goals.reshape(traj.obs[self.goal_key].shape)},
            rl2s=rl2(np.concatenate((before[:1], rews)), prev_actions),
            rews=rews,
            dones=dones,
        )
        if self.terminates and len(times) == len(new):
            dones[times[-1] - 1] = True
            out = out.slice(0, times[-1])
        return out


def visits(rows: Array) -> NDArray[np.int64]:
    """For each row of (n, d), how many rows up to this one are equal to it: 1 where it is new."""
    seen, counts = Counter[bytes](), np.empty(len(rows), np.int64)
    for i, row in enumerate(rows + 0):  # -0.0 becomes 0.0
        seen[row.tobytes()] += 1
        counts[i] = seen[row.tobytes()]
    return counts


@gin.configurable(module="amago.relabeling")
class NoveltyRelabeler(Relabeler):
    """Add ``coeff * n ** -decay`` to the reward of each transition, where n counts the visits, in this rollout, to the
    observation it leads to.

    A policy with memory then learns to look for new observations, in each rollout anew, which finds sparse rewards that random
    actions do not reach (counts: Strehl and Littman 2008; within an episode: Badia et al. 2020, arXiv 2002.06038). Only the
    rewards to learn from change: the policy's inputs (``rl2s``), the stored trajectories and evaluations keep the
    environment's. The best policy is another one, the more so the larger ``coeff`` is: go on without the bonus once rewards are
    found.

    In a piece of a rollout, counts begin with the piece. Terminations do not begin them anew.

    Args:
        coeff: bonus of a new observation, in units of the environment's reward; at least 0.
        decay: 0.5 for 1 / sqrt(n); ``inf``: only new observations have a bonus.
        keys: observations that are counted; None: all. Leave out observations that change in each step by themselves, such as a
            clock.
        features: positions of the numbers that are counted, in these observations flattened and joined in the order of ``keys``
            (None: alphabetical); None: all numbers.
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
        positions = features is None or (bool(features) and all(isinstance(i, int) and i >= 0 for i in features))
        for name, value, right, wanted in (
            ("coeff", coeff, 0 <= coeff < np.inf, "a reward of at least 0"),
            ("decay", decay, decay >= 0, "at least 0 (0.5: 1 / sqrt(visits))"),
            ("keys", keys, not isinstance(keys, str), "a list of names of observations"),
            ("resolution", resolution, resolution is None or 0 < resolution < np.inf, "a distance above 0, or None"),
            ("features", features, positions, "a list of positions of at least 0, or None"),
        ):
            if not right:
                raise ValueError(f"{name} must be {wanted}, got {value!r}")
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
        """(T + 1, d): the numbers that are compared."""
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


@gin.configurable(module="amago.relabeling")
class LastRewardShaping(Relabeler):
    """Add ``gamma Phi(s') - Phi(s)`` to each reward, with the potential Phi = ``coeff`` times the reward that was observed
    last.

    Potential-based shaping leaves the best policy as it is (Ng, Harada and Russell 1999), if the agent observes rewards, as it
    does by default: values become V - Phi. Where rewards of a step change slowly and by the task rather than by the action, as
    the distance from a hidden speed does, Phi removes most of the differences between tasks from the values, so that the
    differences between actions are no longer small beside them. Only the rewards to learn from change: the policy's inputs
    (``rl2s``), the stored trajectories and evaluations keep the environment's.

    Args:
        gamma: the discount of the agent; with several discounts the best policies of the others change. At least 0, below 1.
        coeff: of the last reward in the potential, at least 0; None: 1 / (1 - gamma), the value of rewards that stay as they
            are. The reward to learn from is then the change of the reward, divided by 1 - gamma.
    """

    def __init__(self, gamma: float = 0.99, coeff: float | None = None):
        if not 0 <= gamma < 1:
            raise ValueError(f"gamma must be the agent's discount, at least 0 and below 1, got {gamma!r}")
        if coeff is not None and not 0 <= coeff < np.inf:
            raise ValueError(f"coeff must be at least 0, or None for 1 / (1 - gamma), got {coeff!r}")
        self.gamma, self.coeff = gamma, 1 / (1 - gamma) if coeff is None else coeff

    def relabel(self, traj: FrozenTraj) -> FrozenTraj:
        potential = self.coeff * split_rl2(traj.rl2s)[0]
        after = np.where(traj.dones, 0.0, potential[1:])  # nothing follows a termination
        return replace(traj, rews=(traj.rews + self.gamma * after - potential[:-1]).astype(np.float32))
