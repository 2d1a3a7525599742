"""Is an agent's memory used, and what for? The same rollouts, played with more and with less of the past in sight."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from amago.agent import BaseAgent
from amago.envs import AMAGOEnv
from amago.policy.memory.saliency import Influence, influence
from amago.policy.playing import FULL, THIS_ATTEMPT, Played, View, play
from amago.run.report.curves import interval

Array = NDArray[np.float64]
NONE = View(context=1)
_NUMBER = re.compile(r"\b(Attempt|Trial) (\d+)\b")
_PARTS = 10


@dataclass(frozen=True)
class Estimate:
    """A mean over rollouts, with the 95% interval of a percentile bootstrap."""

    mean: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Array) -> Estimate:
        """From one value a rollout (n,); values that are NaN are left out."""
        kept = values[~np.isnan(values)]
        if not len(kept):
            return cls(np.nan, np.nan, np.nan)
        low, high = interval(kept[:, None])
        return cls(float(kept.mean()), float(low[0]), float(high[0]))

    def __str__(self) -> str:
        return f"{self.mean:.3g} [{self.low:.3g}, {self.high:.3g}]"


@dataclass(frozen=True)
class Stages:
    """Scores within rollouts, by attempt or (where there are no attempts) by time.

    Attributes:
        score: its name, such as "Attempt # Success".
        stage: "attempt" or "tenth of the rollout".
        values: {view: (rollouts, stages)}, NaN where a rollout had no such stage.
    """

    score: str
    stage: str
    values: dict[View, Array]


@dataclass(frozen=True)
class MemoryStudy:
    """What an agent scores with more and less of the past in sight.

    Attributes:
        name: of the environment.
        returns: {view: (rollouts,)}, in the same order of tasks for each view.
        lengths: {view: (rollouts,)} steps.
        stages: scores within rollouts.
        influence: of earlier steps on actions, in the first rollout; None where the agent gives no log-probabilities.
        broken_off: rollouts of all views that did not end within the limit of steps.
    """

    name: str
    returns: dict[View, Array]
    lengths: dict[View, Array]
    stages: Stages
    influence: Influence | None
    broken_off: int

    @property
    def contexts(self) -> list[int]:
        """The lengths of context that were tried, in increasing order."""
        return sorted(v.context for v in self.returns if v.context is not None)

    def estimate(self, view: View) -> Estimate:
        """The mean return."""
        return Estimate.of(self.returns[view])

    def gain(self, view: View, over: View) -> Estimate:
        """The mean difference of returns on the same tasks."""
        return Estimate.of(self.returns[view] - self.returns[over])


def default_contexts(longest: int) -> list[int]:
    """Powers of two from 1 to below ``longest``."""
    return [2**i for i in range(max(1, (longest - 1).bit_length()))]


def study_memory(
    agent: BaseAgent,
    envs: Sequence[AMAGOEnv],
    episodes: int = 40,
    max_steps: int = 1000,
    contexts: Sequence[int] | None = None,
    sample: bool = True,
    device: torch.device | str = "cpu",
    seed: int = 0,
    on_view: Callable[[str], Callable[[int], None] | None] | None = None,
) -> MemoryStudy:
    """Play the same tasks with all of the memory, with memory erased at the end of each attempt, and with contexts of several lengths.

    A context of n steps is computed anew in each step from the last n steps, whatever the sequence model. Memory that is cut short can be
    unlike anything in training, so what is lost without it is at least in part lost to that: a bound from above on what the
    information is worth. An agent trained without memory is the comparison that settles it.

    Args:
        agent: on ``device``.
        envs: of one row each; rollouts are played in so many at a time. They should obey ``reset(seed=...)``, so that all views are
            compared on the same tasks.
        episodes: rollouts for each view.
        max_steps: rollouts are broken off after so many steps.
        contexts: lengths in steps, the current one included; 1 (no memory) is always among them. None: powers of two below the
            longest rollout, and up to the agent's ``max_seq_len``.
        sample: draw actions from the policy; else take its mode.
        seed: of tasks and of the policy's samples.
        on_view: called with the name of each view before it is played; returns what is called with the number of steps taken.

    Raises:
        ValueError: ``episodes`` is below 2, or a context below 1.
    """
    if episodes < 2:
        raise ValueError(f"episodes={episodes}: an interval needs at least 2")
    if contexts is not None and min(contexts, default=1) < 1:
        raise ValueError(f"contexts={list(contexts)}: a context has at least 1 step, the current one")
    seeds = [int(s) for s in np.random.SeedSequence(seed).generate_state(episodes)]
    played: dict[View, list[Played]] = {}

    def add(view: View) -> None:
        on_step = None if on_view is None else on_view(describe(view))
        first = not played
        played[view] = play(agent, envs, seeds, max_steps, view, sample, device, seed, keep_first=first, on_step=on_step)

    add(FULL)
    longest = max(len(p.rewards) for p in played[FULL])
    if any(len(p.attempt_ends) > 1 for p in played[FULL]):
        add(THIS_ATTEMPT)
    tried = default_contexts(min(longest, agent.max_seq_len + 1)) if contexts is None else contexts
    for n in sorted({1, *tried}):
        add(View(context=n))
    kept = played[FULL][0]
    assert kept.steps is not None
    return MemoryStudy(
        name=kept.name,
        returns={v: np.array([sum(p.rewards) for p in ps]) for v, ps in played.items()},
        lengths={v: np.array([float(len(p.rewards)) for p in ps]) for v, ps in played.items()},
        stages=stages(played, longest),
        influence=influence(agent, kept.steps, kept.attempt_ends, device, seed),
        broken_off=sum(not p.ended for ps in played.values() for p in ps),
    )


def describe(view: View) -> str:
    """A view in words."""
    if view.this_attempt:
        return "erased after each attempt"
    if view.context is None:
        return "all of it"
    return "none (the current step)" if view.context == 1 else f"the last {view.context} steps"


def stages(played: dict[View, list[Played]], longest: int) -> Stages:
    """Scores by attempt, if rollouts have several, else rewards by tenths of the longest rollout."""
    rollouts = [p for ps in played.values() for p in ps]
    attempts = max(len(p.attempt_ends) for p in rollouts)
    if attempts > 1:
        score = _attempt_score(rollouts)
        values = {v: np.array([_by_attempt(p, score, attempts) for p in ps]) for v, ps in played.items()}
        return Stages(score, "attempt", values)
    values = {v: np.array([_by_time(p, longest) for p in ps]) for v, ps in played.items()}
    return Stages("reward per step", "tenth of the rollout", values)


def _attempt_score(rollouts: Sequence[Played]) -> str:
    """The environment's score of an attempt: its success if there is one, else its return, else the sum of its rewards."""
    names = dict.fromkeys(_NUMBER.sub(r"\1 #", name) for p in rollouts for name in p.metrics if _NUMBER.search(name))
    for word in ("Success", "Return"):
        for name in names:
            if word in name:
                return name
    return "sum of rewards"


def _by_attempt(p: Played, score: str, attempts: int) -> list[float]:
    if "#" in score:
        return [p.metrics.get(score.replace("#", str(i)), np.nan) for i in range(attempts)]
    edges = [0, *p.attempt_ends]
    sums = [sum(p.rewards[a:b]) for a, b in zip(edges, edges[1:])]
    return sums + [np.nan] * (attempts - len(sums))


def _by_time(p: Played, longest: int) -> list[float]:
    parts = min(_PARTS, longest)
    edges = np.linspace(0, longest, parts + 1).round().astype(int)
    pieces = [p.rewards[a:b] for a, b in zip(edges, edges[1:])]
    return [float(np.mean(r)) if r else np.nan for r in pieces]


def stage_estimates(values: Any) -> list[Estimate]:
    """An estimate for each stage that at least half of the rollouts had."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        return [Estimate.of(column) for column in values.T if np.mean(~np.isnan(column)) >= 0.5]
