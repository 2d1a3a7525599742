"""`make_pool`: start the actors of a run, in this process or in worker processes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from amago.envs.amago_env import innermost
from amago.envs.exploration import ExplorationWrapper
from amago.envs.pool.actors import CrewPlan, EnvMaker, check_recorder
from amago.envs.pool.base import ActorPool
from amago.envs.pool.subprocess import AsyncPool
from amago.envs.pool.sync import InProcessPool

ENV_MODES = ("async", "sync", "already_vectorized")


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
    one_env_per_worker: bool = False,
) -> ActorPool:
    """Start the actors.

    Args:
        make_envs: one function for each actor, each returning an `AMAGOEnv`; a single function is used for all of them.
            "already_vectorized" takes one function, whose environment has ``batched_envs == parallel_actors``.
        env_mode: "async" (worker processes), "sync" (this process) or "already_vectorized".
        parallel_actors: N; by default as many as there are functions (or rows).
        workers: processes of "async"; default: the usable cores, at most N. An explicit 1 steps all actors as one group, and gives
            what "sync" gives, bit for bit.
        step_timeout: seconds after which a step counts as hung ("async" only: nothing can interrupt a step of this process).
        start_timeout: seconds in which a worker must have made its environments, and for a reset of all of them.
        max_env_restarts: environments and workers replaced within an hour before the pool gives up.
        exploration: a subclass of `ExplorationWrapper` put around each environment.
        recorder: ``save_trajs_to``, ``save_every``, ``save_trajs_as`` and ``stagger`` of `SequenceWrapper`, and
            ``writer_name`` (must be unique in the directory; default: random). None records returns and metrics only.
        seed: of the environments' first resets and of exploration; the same in every mode. None draws one.
        mp_context: how workers start: None ("forkserver"), "forkserver", "spawn" or "fork".
        one_env_per_worker: as many workers as actors.

    Raises:
        ValueError: an argument is wrong or contradicts another.
        ActorError: an environment could not be made; the message holds its traceback. (In this process its own exception.)
    """
    if env_mode not in ENV_MODES:
        raise ValueError(f"env_mode is {env_mode!r}, but must be one of {', '.join(map(repr, ENV_MODES))}")
    _check_positive(parallel_actors=parallel_actors, workers=workers, step_timeout=step_timeout, start_timeout=start_timeout)
    if one_env_per_worker and workers is not None:
        raise ValueError(f"workers is {workers}, but one_env_per_worker=True says it, too; give one of the two")
    if exploration is not None and not (isinstance(exploration, type) and issubclass(exploration, ExplorationWrapper)):
        raise TypeError(f"exploration is {exploration!r}, but must be a subclass of ExplorationWrapper, or None")
    makers = _makers(make_envs, env_mode, parallel_actors)
    batch = 1
    if env_mode == "already_vectorized":
        if parallel_actors is None:
            makers, batch = _measure(makers[0])
        else:
            batch = parallel_actors
    root = seed if isinstance(seed, np.random.SeedSequence) else np.random.SeedSequence(seed)
    plan = CrewPlan(
        make_envs=dict(enumerate(makers)),
        batch=batch,
        groups=[list(range(len(makers)))],
        exploration=exploration,
        recorder=check_recorder(recorder),
        entropy=root.entropy,
        spawn_key=tuple(root.spawn_key),
    )
    if env_mode != "async":
        return InProcessPool(plan, max_env_restarts)
    workers = len(makers) if one_env_per_worker else workers
    return AsyncPool(plan, workers, step_timeout, start_timeout, max_env_restarts, mp_context)


def _check_positive(**given: float | None) -> None:
    for name, value in given.items():
        if value is not None and not value > 0:
            raise ValueError(f"{name} is {value!r}, but must be positive")


def _makers(make_envs: Sequence[EnvMaker] | EnvMaker, env_mode: str, parallel_actors: int | None) -> list[EnvMaker]:
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


def _measure(maker: EnvMaker) -> tuple[list[EnvMaker], int]:
    """Make the vectorised environment to see how many rows it has; the pool then gets this one first."""
    made = [maker()]
    batch = innermost(made[0], "the pool").batched_envs

    def first_made() -> Any:
        return made.pop() if made else maker()

    return [first_made], batch
