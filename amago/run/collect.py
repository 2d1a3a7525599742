"""The actors of an experiment, as its settings describe them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any

import gymnasium as gym
import numpy as np
import torch

from amago.agent import BaseAgent
from amago.envs import AMAGOEnv
from amago.envs.exploration import ExplorationWrapper
from amago.envs.pool import make_pool
from amago.envs.statistics import PhaseStatistics
from amago.run.rollout import Rollout
from amago.run.settings import EnvMaker, ExperimentSettings


def recorder_settings(e: ExperimentSettings, directory: str | None) -> dict[str, Any] | None:
    """How the actors record their trajectories in a directory; None for none."""
    if directory is None:
        return None
    extra_fields = {"extra_fields": tuple(e.extra_fields)} if e.extra_fields else {}
    return extra_fields | {
        "save_trajs_to": directory,
        "save_trajs_as": e.save_trajs_as,
        "save_every": None if e.traj_save_len >= 1e10 else int(e.traj_save_len),
        "stagger": e.stagger_traj_file_lengths,
    }


def make_rollout(
    e: ExperimentSettings,
    makers: EnvMaker | Iterable[EnvMaker],
    exploration: type[ExplorationWrapper] | None,
    recorder: dict[str, Any] | None,
    seed: tuple[int, ...],
    device: torch.device,
    autocast: Callable[[], AbstractContextManager[Any]],
    env_mode: str | None = None,
) -> Rollout:
    """Start actors, ready for a policy; not yet reset.

    Args:
        seed: of these actors, apart from those of all others.
        env_mode: instead of the experiment's.
    """
    mode = env_mode or e.env_mode
    copies = 1 if mode == "already_vectorized" else e.parallel_actors
    pool = make_pool(
        [makers] * copies if callable(makers) else list(makers),
        env_mode=mode,
        parallel_actors=e.parallel_actors,
        workers=e.env_workers,
        step_timeout=e.env_step_timeout,
        max_env_restarts=e.max_env_restarts,
        exploration=exploration,
        recorder=recorder,
        seed=np.random.SeedSequence(seed),
        mp_context=e.async_env_mp_context,
    )
    return Rollout(pool, device, autocast, repeatable=e.seed is not None)


def spaces_of(makers: EnvMaker | Iterable[EnvMaker]) -> tuple[gym.spaces.Dict, gym.Space[Any], gym.spaces.Box]:
    """The spaces (observation, action, rl2) of an environment that is made for them and closed again.

    Raises:
        TypeError: it is no AMAGOEnv.
    """
    env = (makers if callable(makers) else next(iter(makers)))()
    if not isinstance(env, AMAGOEnv):
        raise TypeError(
            f"make_val_env must return an AMAGOEnv, but returned {type(env).__name__}: wrap it in amago.envs.AMAGOEnv"
        )
    spaces = env.observation_space, env.action_spec.space, env.rl2_space
    env.close()
    return spaces


def interact(
    rollout: Rollout,
    policy: BaseAgent,
    timesteps: int,
    sample: bool,
    episodes: int | None,
    tell: Callable[[int], Any],
    render: bool,
    save_on_done: bool,
    should_stop: Callable[[], bool] | None,
) -> tuple[int, PhaseStatistics]:
    """Let a policy act, see `Rollout.run`; ``tell`` is called with the environment steps taken.

    Returns:
        steps taken by each actor, and what has happened.
    """

    def on_step(steps: int) -> None:
        tell(steps)
        if render:
            rollout.pool.render()
        if save_on_done and rollout.pool.resets.any():
            rollout.pool.flush()

    taken = rollout.run(policy, timesteps, sample, episodes, on_step, should_stop)
    return taken, rollout.pool.drain()
