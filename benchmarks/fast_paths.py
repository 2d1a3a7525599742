"""What each fast path for CPUs earns: whole updates, with one path switched off at a time.

*Ours* has all paths; the *ceiling* is the same work without the named one. The ratio says how many times as long the work
takes without it. CPU time of the process, which varies less than wall time on a machine that does other work too.
"""

from __future__ import annotations

import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import gymnasium as gym
from torch import nn

from amago.agent import Agent, MultiTaskAgent
from amago.nets.ff import EnsembleMLP
from amago.nets.twohot import Bins
from benchmarks.harness import Row, compare
from benchmarks.learner import SMOKE, Case, Learner

LEARNING: dict[str, tuple[type[nn.Module], ...]] = {
    "critics in blocks": (EnsembleMLP,),
    "classified returns in blocks": (Bins,),
}
"""Paths by name, and the modules whose attribute ``fast`` switches them."""


def without(agent: nn.Module, types: tuple[type[nn.Module], ...], work: Callable[[], Any]) -> Callable[[], Any]:
    """``work`` with the fast paths of ``types`` switched off."""
    switched = [m for m in agent.modules() if isinstance(m, types)]

    def slow() -> None:
        for module in switched:
            module.fast = False  # type: ignore[assignment]
        try:
            work()
        finally:
            for module in switched:
                module.fast = True  # type: ignore[assignment]

    return slow


def cpu_seconds(work: Callable[[], Any], calls: int) -> Callable[[], float]:
    """A contender: mean CPU seconds of a call."""

    def measure() -> float:
        start = time.process_time()
        for _ in range(calls):
            work()
        return (time.process_time() - start) / calls

    return measure


def cases(smoke: bool) -> Iterator[Case]:
    """The updates."""
    for agent_type, space in (
        (Agent, gym.spaces.Discrete(5)), (Agent, gym.spaces.Box(-1, 1, (6,))), (MultiTaskAgent, gym.spaces.Discrete(5)),
    ):  # fmt: skip
        for bf16 in (False, True):
            case = Case(agent_type, space, 4 if smoke else 128, bf16)  # type: ignore[arg-type]
            yield replace(case, **SMOKE) if smoke else case  # type: ignore[arg-type]


def rows(options: Namespace) -> Iterator[Row]:
    """A row for each path and each update that uses it."""
    rounds = options.rounds or (1 if options.smoke else 5)
    for case in cases(options.smoke):
        learner: Learner | None = None
        for path, types in LEARNING.items():
            name = f"{path}: {case.name}"
            if options.only not in name:
                continue
            learner = learner or Learner(case)
            agent = learner.agent
            if any(isinstance(m, types) for m in agent.modules()) and not (agent.exact and EnsembleMLP in types):
                learner.update()
                yield _row(name, agent, types, learner.update, 1, rounds, "s", 1.0)


def _row(
    name: str, agent: nn.Module, types: tuple[type[nn.Module], ...], work: Callable[[], Any], calls: int, rounds: int, unit: str,
    scale: float,
) -> Row:  # fmt: skip
    fast, slow = cpu_seconds(work, calls), cpu_seconds(without(agent, types, work), calls)
    return compare(name, unit, {"ours": lambda: scale * fast(), "ceiling": lambda: scale * slow()}, rounds)
