"""``env_mode="auto"``: whether actors belong into this process or into workers, found by timing one environment."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable
from typing import NamedTuple

from amago.envs.pool.actor import env_of
from amago.envs.pool.plan import EnvMaker
from amago.envs.pool.subprocess import usable_cores

logger = logging.getLogger(__name__)

WORTH_SECONDS = 5e-4
"""Time that workers must save in a step of all actors to be worth their messages. 32 CartPoles (0.5 ms) in two workers are as fast as
in one process (docs/notes/performance.md, "Acting")."""
WARM_UP_STEPS, MIN_STEPS, MAX_STEPS, MAX_SECONDS = 3, 5, 200, 0.5


class ModeChoice(NamedTuple):
    """What ``env_mode="auto"`` stands for.

    Attributes:
        mode: "sync" or "async".
        reason: why, for people.
    """

    mode: str
    reason: str


def choose_mode(
    maker: EnvMaker,
    num_actors: int,
    workers: int | None = None,
    repeatable: bool = False,
    clock: Callable[[], float] = time.perf_counter,
) -> ModeChoice:
    """Choose between "sync" and "async" for ``num_actors`` environments like the one that ``maker`` makes.

    One environment is made, stepped with random actions for at most half a second, and closed. Workers save (1 - 1 / W) of the
    time that all environments take for a step, W being their number; with less than `WORTH_SECONDS` to save, actors stay in this process.

    Args:
        maker: makes an environment.
        num_actors: N.
        workers: as of `amago.envs.pool.make_pool`.
        repeatable: do not measure: the choice is "sync", because random actions differ between the modes.
        clock: returns the time in seconds.
    """
    w = min(num_actors, workers or usable_cores())
    if repeatable:
        return ModeChoice("sync", "as the run is seeded and must repeat")
    if w < 2:
        return ModeChoice("sync", "for want of a second core or actor")
    try:
        seconds = num_actors * step_seconds(maker, clock)
    except Exception as err:  # the pool meets the same error, and knows how to report it
        logger.info("env_mode='auto' could not time an environment: %r", err)
        return ModeChoice("async", "as its environment could not be timed")
    mode = "async" if seconds * (1 - 1 / w) > WORTH_SECONDS else "sync"
    return ModeChoice(mode, f"as {num_actors} environments take {1e3 * seconds:.2g} ms for a step")


def step_seconds(maker: EnvMaker, clock: Callable[[], float] = time.perf_counter) -> float:
    """Mean seconds of a step of one environment with random actions, resets included.

    Raises:
        TypeError: ``maker`` returned no `AMAGOEnv`.
    """
    made = maker()
    try:
        base = env_of(made, maker)
        spec = base.action_spec
        made.reset()
        taken, start = 0, clock()
        while True:
            _, _, terminated, truncated, _ = made.step(spec.from_env(spec.space.sample())[None])
            if terminated.all() or truncated.all():
                made.reset()
            taken += 1
            if taken == WARM_UP_STEPS:
                start = clock()
                continue
            seconds, timed = clock() - start, taken - WARM_UP_STEPS
            if timed >= MIN_STEPS and (timed >= MAX_STEPS or seconds >= MAX_SECONDS):
                return seconds / timed
    finally:
        with contextlib.suppress(Exception):
            made.close()
