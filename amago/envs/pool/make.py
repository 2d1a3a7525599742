"""`make_pool`: starts the actors of a run, in this process or in worker processes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from amago.envs.exploration import ExplorationWrapper
from amago.envs.pool.actor import env_of
from amago.envs.pool.auto import choose_mode
from amago.envs.pool.base import ActorPool
from amago.envs.pool.plan import ActorPlan, EnvMaker, check_recorder
from amago.envs.pool.subprocess import AsyncPool
from amago.envs.pool.sync import InProcessPool

ENV_MODES = ("async", "sync", "already_vectorized", "auto")


def make_pool(
    make_envs: Sequence[EnvMaker] | EnvMaker,
    env_mode: str = "async",
    *,
    parallel_actors: int | None = None,
    workers: int | None = None,
    step_timeout: float = 60.0,
    start_timeout: float = 300.0,
    max_env_restarts: int = 100,
    exploration: type[ExplorationWrapper] | None = None,
    recorder: dict[str, Any] | None = None,
    seed: int | np.random.SeedSequence | None = None,
    mp_context: str | None = None,
    trial_steps: int = 0,
) -> ActorPool:
    """Start the actors of a run.

    Args:
        make_envs: one function an actor, each returning an `AMAGOEnv`; a single function is used for all of them. With
            "already_vectorized" it is one function, whose environment has ``batched_envs == parallel_actors``.
        env_mode: "async" (in worker processes), "sync" (in this process), "already_vectorized" (one environment with a batch), or
            "auto": "sync" with a ``seed``, else whichever of "async" and "sync" one environment's speed speaks for
            (`amago.envs.pool.auto.choose_mode`).
        parallel_actors: N; default: the number of functions (or of the vectorised environment's rows).
        workers: processes of "async"; default: the usable cores, at most N. An explicit 1 steps all actors as one group, and
            gives the same results as "sync", bit for bit.
        step_timeout: seconds after which a step counts as hung ("async" only: a step in this process cannot be interrupted).
        start_timeout: seconds allowed to a worker for making its environments, and for a reset of all of them.
        max_env_restarts: most environments and workers that may be replaced within an hour before the run ends.
        exploration: a subclass of `ExplorationWrapper` to put around each environment.
        recorder: ``save_trajs_to``, ``save_every``, ``save_trajs_as`` and ``stagger`` of `SequenceWrapper`, and
            ``writer_name`` (must be unique in the directory; default: random). None records only returns and metrics.
        seed: of the environments' first resets and of exploration; the same in every mode. None: random.
        mp_context: how workers start: "forkserver" (default), "spawn" or "fork".
        trial_steps: take so many random steps in the first environment before it is reset for its first rollout, so that a mistake in
            its code is found at once. 0: do not.

    Returns:
        the pool; call its `reset` first and its `close` last.

    Raises:
        TypeError: an entry of ``make_envs`` or ``exploration`` has the wrong type.
        ValueError: an argument is wrong or contradicts another.
        EnvironmentMistake: the environment that was tried raised an error of type or shape.
        ActorError: an environment of a worker could not be made; the message contains its traceback. (In this process, the
            environment's own exception is raised.)
    """
    if env_mode not in ENV_MODES:
        raise ValueError(f"env_mode is {env_mode!r}, but must be one of {', '.join(map(repr, ENV_MODES))}")
    _check_positive(parallel_actors=parallel_actors, workers=workers, step_timeout=step_timeout, start_timeout=start_timeout)
    if exploration is not None and not (isinstance(exploration, type) and issubclass(exploration, ExplorationWrapper)):
        raise TypeError(f"exploration is {exploration!r}, but must be a subclass of ExplorationWrapper, or None")
    makers = _makers(make_envs, env_mode, parallel_actors)
    if env_mode == "auto":
        env_mode = choose_mode(makers[0], len(makers), workers, repeatable=seed is not None).mode
    batch = 1
    if env_mode == "already_vectorized":
        if parallel_actors is None:
            makers, batch = _count_rows(makers[0])
        else:
            batch = parallel_actors
    root = seed if isinstance(seed, np.random.SeedSequence) else np.random.SeedSequence(seed)
    plan = ActorPlan(
        make_envs=dict(enumerate(makers)),
        batch=batch,
        groups=[list(range(len(makers)))],
        exploration=exploration,
        recorder=check_recorder(recorder),
        entropy=root.entropy,
        spawn_key=tuple(root.spawn_key),
        trial_steps=trial_steps,
    )
    if env_mode != "async":
        return InProcessPool(plan, max_env_restarts)
    return AsyncPool(plan, workers, step_timeout, start_timeout, max_env_restarts, mp_context)


def _check_positive(**given: float | None) -> None:
    for name, value in given.items():
        if value is not None and not value > 0:
            raise ValueError(f"{name} is {value!r}, but must be positive")


def _makers(make_envs: Sequence[EnvMaker] | EnvMaker, env_mode: str, parallel_actors: int | None) -> list[EnvMaker]:
    """One function an actor, checked."""
    if callable(make_envs):
        copies = 1 if env_mode == "already_vectorized" else parallel_actors or 1
        makers: list[EnvMaker] = [make_envs] * copies
    else:
        makers = list(make_envs)
    for i, maker in enumerate(makers):
        if not callable(maker):
            raise TypeError(f"make_envs[{i}] is {maker!r}, but must be a function that returns an AMAGOEnv")
    if not makers:
        raise ValueError("make_envs is empty")
    if env_mode == "already_vectorized":
        if len(makers) != 1:
            raise ValueError(f"env_mode='already_vectorized' takes one function, but make_envs has {len(makers)}")
    elif parallel_actors is not None and len(makers) != parallel_actors:
        raise ValueError(f"parallel_actors is {parallel_actors}, but make_envs has {len(makers)} functions")
    return makers


def _count_rows(maker: EnvMaker) -> tuple[list[EnvMaker], int]:
    """Make the vectorised environment to count its rows; returns a function that returns this one first, and the count."""
    made = [maker()]
    batch = env_of(made[0], maker).batched_envs

    def first_made() -> Any:
        return made.pop() if made else maker()

    return [first_made], batch
