"""The actor pool: N environments that step side by side, in this process or in worker processes (numpy only, never torch, `device` apart).

| module | content |
| --- | --- |
| `base` | `ActorPool`, the interface of every pool; a pool as a vector environment |
| `sync` | the actors of one process; a pool of actors in this process |
| `device` | actors of an environment in PyTorch or JAX, which stay on its device |
| `subprocess` | actors in worker processes, from the learner's side |
| `worker` | the worker's side, and the messages between both |
| `memory` | the arrays that actors and policy share |
| `faults` | environment faults, the restart budget, and mistakes that end a run |
"""

from __future__ import annotations

import select
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np

from amago.envs.exploration import ExplorationWrapper
from amago.envs.pool.base import ActorPlan, ActorPool, EnvMaker, PoolEnv
from amago.envs.pool.faults import ActorError, EnvironmentMistake
from amago.envs.pool.sync import InProcessPool, env_of

__all__ = ["ENV_MODES", "ActorError", "ActorPool", "EnvironmentMistake", "InProcessPool", "PoolEnv", "make_pool"]

ENV_MODES = ("async", "sync", "already_vectorized", "auto")
RECORDER_OPTIONS = ("save_trajs_to", "save_every", "save_trajs_as", "stagger", "writer_name", "extra_fields")


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
    run: tuple[int, bool] | None = None,
    recorder: dict[str, Any] | None = None,
    seed: int | np.random.SeedSequence | None = None,
    mp_context: str | None = None,
) -> ActorPool:
    """Start the actors of a run.

    Args:
        make_envs: one function an actor, each returning an `AMAGOEnv`; a single function is used for all of them. With
            "already_vectorized" it is one function, whose environment has ``batched_envs == parallel_actors``.
        env_mode: "async" (in worker processes), "sync" (in this process), "already_vectorized" (one environment with a batch),
            or "auto", which is "async". Actors whose vectorised environment has ``metadata["arrays"]`` "torch" or "jax" stay on its
            device (`amago.envs.pool.device`).
        parallel_actors: N; default: the number of functions (or of the vectorised environment's rows).
        workers: processes of "async"; default: the usable cores, at most N. An explicit 1 steps all actors as one group, and
            gives the same results as "sync", bit for bit.
        step_timeout: seconds after which a step counts as hung ("async" only: a step in this process cannot be interrupted).
        start_timeout: seconds allowed to a worker for making its environments, and for a reset of all of them.
        max_env_restarts: most environments and workers that may be replaced within an hour before the run ends.
        exploration: a subclass of `ExplorationWrapper` to put around each environment.
        run: arguments of its `ExplorationWrapper.fit_to_run`; None: schedules are as given.
        recorder: ``save_trajs_to``, ``save_every``, ``save_trajs_as`` and ``stagger`` of `SequenceWrapper`, and
            ``writer_name`` (must be unique in the directory; default: random). None records only returns and metrics.
        seed: of the environments' first resets and of exploration; the same in every mode. None: random.
        mp_context: how workers start: "forkserver" (default), "spawn" or "fork".

    Returns:
        the pool; call its `reset` first and its `close` last.

    Raises:
        TypeError: an entry of ``make_envs`` or ``exploration`` has the wrong type.
        ValueError: an argument is wrong or contradicts another.
        ActorError: an environment of a worker could not be made; the message contains its traceback. (In this process, the
            environment's own exception is raised.)
    """
    if env_mode not in ENV_MODES:
        raise ValueError(f"env_mode is {env_mode!r}, but must be one of {', '.join(map(repr, ENV_MODES))}")
    counts, seconds = (parallel_actors, workers), (step_timeout, start_timeout)
    for name, value in zip(("parallel_actors", "workers", "step_timeout", "start_timeout"), counts + seconds):
        if value is not None and not value > 0:
            raise ValueError(f"{name} is {value!r}, but must be positive")
    if exploration is not None and not (isinstance(exploration, type) and issubclass(exploration, ExplorationWrapper)):
        raise TypeError(f"exploration is {exploration!r}, but must be a subclass of ExplorationWrapper, or None")
    if unknown := sorted(set(recorder or ()) - set(RECORDER_OPTIONS)):
        raise ValueError(f"recorder has unknown options {unknown}; it takes {', '.join(RECORDER_OPTIONS)}")
    makers = _makers(make_envs, env_mode, parallel_actors)
    root = seed if isinstance(seed, np.random.SeedSequence) else np.random.SeedSequence(seed)
    plan = ActorPlan(
        make_envs=dict(enumerate(makers)),
        batch=parallel_actors if env_mode == "already_vectorized" else 1,
        groups=[list(range(len(makers)))],
        exploration=exploration,
        run=run,
        recorder=recorder,
        entropy=root.entropy,
        spawn_key=tuple(root.spawn_key),
    )
    if env_mode == "already_vectorized":
        first = [makers[0]()]
        plan.make_envs[0] = lambda: first.pop() if first else makers[0]()
        if env_of(first[0], makers[0]).env.metadata.get("arrays", "numpy") != "numpy":
            from amago.envs.pool.device import DevicePool

            return DevicePool(plan, max_env_restarts)
    if env_mode in ("async", "auto") and "poll" in vars(select):
        from amago.envs.pool.subprocess import AsyncPool  # with psutil and more, a tenth of the time of `import amago.envs`

        return AsyncPool(plan, workers, step_timeout, start_timeout, max_env_restarts, mp_context)
    if env_mode == "async":
        warnings.warn("env_mode='async' is not available on this system: environments are stepped as with 'sync'", stacklevel=2)
    return InProcessPool(plan, max_env_restarts)


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
