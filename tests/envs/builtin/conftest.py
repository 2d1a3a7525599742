"""Checks that every built-in environment must pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env


@pytest.fixture
def gym_check() -> Iterator[Callable[..., None]]:
    """``gym_check(cls, **arguments)``: Gymnasium's own checker, with every render mode (which needs a registered id)."""
    made: list[str] = []

    def check(cls: type[gym.Env[Any, Any]], **arguments: Any) -> None:
        name = f"{cls.__name__}Check{len(made)}-v0"
        gym.register(name, entry_point=cls, kwargs=arguments, disable_env_checker=True, order_enforce=False)
        made.append(name)
        check_env(gym.make(name).unwrapped)

    yield check
    for name in made:
        del gym.registry[name]


@pytest.fixture
def same_rollout() -> Callable[..., None]:
    """``same_rollout(make, n_actions)``: one seed, one rollout; another seed, another; arrays handed out stay as they were."""

    def roll(env: gym.Env[Any, Any], seed: int, actions: list[int]) -> list[Any]:
        obs, info = env.reset(seed=seed)
        out: list[Any] = [(obs, info)]
        kept = [(obs, obs.copy())]
        for action in actions:
            out.append(env.step(action))
            kept.append((out[-1][0], out[-1][0].copy()))
            assert out[-1][0] in env.observation_space
            assert type(out[-1][1]) is float
            assert type(out[-1][2]) is bool
            assert out[-1][3] is False
            if out[-1][2]:
                out.append(env.reset())
        for obs, copy in kept:
            np.testing.assert_array_equal(obs, copy)  # later steps leave earlier observations alone
        return out

    def check(make: Callable[[], gym.Env[Any, Any]], n_actions: int) -> None:
        actions = np.random.default_rng(1).integers(n_actions, size=400).tolist()
        first, again = roll(make(), 5, actions), roll(make(), 5, actions)
        used = make()
        roll(used, 77, actions)
        reused, other = roll(used, 5, actions), roll(make(), 6, actions)
        assert repr(first) == repr(again) == repr(reused)
        assert repr(first) != repr(other)

    return check
