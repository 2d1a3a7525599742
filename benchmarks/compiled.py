"""The effect of `torch.compile` with its default options on an update and on a step of the policy.

The compiled agent takes the place of the ceiling: a ratio above 1 means that the agent is faster without compilation. The note
is the time of the first calls, which a run spends at its start and for each new shape. On a CPU a C++ compiler is necessary.

Steps are those of an agent without memory: PyTorch 2.13 does not compile models with hidden states that change in place under
`torch.inference_mode` ("dispatch key set mismatch").
"""

from __future__ import annotations

import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import gymnasium as gym
import torch

from amago.agent import Agent
from benchmarks.harness import Row, compare
from benchmarks.learner import SMOKE, Case, Learner
from benchmarks.policy_step import Acting, make_agent, milliseconds


def first_call(work: Callable[[], Any]) -> float:
    """Seconds of the first call, which compiles, and of the second, which may compile for another shape."""
    start = time.perf_counter()
    work()
    work()
    return time.perf_counter() - start


def _updates(options: Namespace) -> Iterator[Row]:
    for space in (gym.spaces.Discrete(5), gym.spaces.Box(-1, 1, (6,))):
        for bf16 in (False, True):
            case = Case(Agent, space, 4 if options.smoke else 128, bf16)
            if options.smoke:
                case = replace(case, **SMOKE)  # type: ignore[arg-type]
            if options.only not in f"update, {case.name}":
                continue
            plain, compiled = Learner(case), Learner(case)
            compiled.agent = torch.compile(compiled.agent)
            plain.update()
            waited = first_call(compiled.update)
            contenders = {"ours": plain.seconds, "ceiling": compiled.seconds}
            note = f"ceiling: compiled in {waited:.0f} s"
            yield compare(f"update, {case.name}", "s", contenders, options.rounds or (1 if options.smoke else 5), note=note)


def _steps(options: Namespace) -> Iterator[Row]:
    at_least, rounds = (0.0, 1) if options.smoke else (0.25, options.rounds or 5)
    for actors in (4,) if options.smoke else (16, 64):
        case = f"policy_step, FF, {actors} actors"
        if options.only not in case:
            continue
        ours, agent = Acting(make_agent("FF", 32, options.smoke), actors), make_agent("FF", 32, options.smoke)
        agent.get_actions = torch.compile(agent.get_actions)  # type: ignore[method-assign]
        start = time.perf_counter()
        compiled = Acting(agent, actors)
        waited = time.perf_counter() - start
        contenders = {"ours": milliseconds(ours.step, at_least), "ceiling": milliseconds(compiled.step, at_least)}
        yield compare(case, "ms", contenders, rounds, note=f"ceiling: compiled in {waited:.0f} s")


def rows(options: Namespace) -> Iterator[Row]:
    """Updates on sequences of 128 steps, then steps of the policy for 16 and 64 actors."""
    torch.manual_seed(0)
    yield from _updates(options)
    yield from _steps(options)
