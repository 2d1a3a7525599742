"""Exploration of T-Mazes: its schedule by arithmetic, and what it does to real episodes."""

from collections.abc import Iterator

import numpy as np
import pytest

from amago import config
from amago.envs.amago_env import AMAGOEnv
from amago.envs.builtin import TMazePassive
from amago.envs.builtin.tmaze import TMazeExploration

RIGHT = np.array([[0]])


@pytest.fixture(autouse=True)
def _no_bindings_left() -> Iterator[None]:
    yield
    config.clear()


def explorer(corridor: int, **bindings: float) -> TMazeExploration:
    env = AMAGOEnv(TMazePassive(corridor), env_name="tmaze")
    config.bind({"TMazeExploration.horizon": corridor + 1} | {f"EpsilonGreedy.{k}": v for k, v in bindings.items()})
    return TMazeExploration(env)


@pytest.mark.parametrize("horizon", [4, 5, 10, 400])
def test_the_schedule(horizon: int) -> None:
    wrapped = explorer(horizon - 1, eps_start=0.8, eps_end=0.8, randomize_eps=False)
    for step in range(horizon):
        usual = step == 0 or step >= horizon - 3
        eps = wrapped.current_eps(np.array([step]))
        assert eps.shape == (1,)
        assert eps[0] == (0.8 if usual else 0.5 / horizon), step
    several = wrapped.current_eps(np.array([0, 1, horizon - 4, horizon - 3, horizon - 1]))
    low = 0.5 / horizon
    assert several.tolist() == [0.8, low if horizon > 4 else 0.8, low if horizon > 4 else 0.8, 0.8, 0.8]


def test_the_turn_alone_is_explored() -> None:
    config.bind({"TMazeExploration.first": 0, "TMazeExploration.last": 1})
    wrapped = explorer(9, eps_start=0.8, eps_end=0.8, randomize_eps=False)
    assert wrapped.current_eps(np.arange(10)).tolist() == [0.05] * 9 + [0.8]
    with pytest.raises(ValueError, match="last must be at least 0, got -1"):
        TMazeExploration(wrapped.amago_env, horizon=10, last=-1)


@pytest.mark.parametrize("horizon", [20, 300])
def test_epsilon_falls_over_episodes_of_any_length(horizon: int) -> None:
    config.bind({"TMazeExploration.rollouts_anneal": 20})
    wrapped = explorer(horizon - 1, eps_start=1.0, eps_end=0.2, steps_anneal=100, randomize_eps=False)
    for rollouts, expected in [(0, 1.0), (10, 0.6), (20, 0.2), (50, 0.2)]:
        wrapped.global_step = rollouts * horizon
        np.testing.assert_allclose(wrapped.current_eps(np.array([0])), [expected])


def test_it_needs_a_horizon() -> None:
    env = AMAGOEnv(TMazePassive(5), env_name="tmaze")
    with pytest.raises(RuntimeError, match="horizon"):
        TMazeExploration(env)
    with pytest.raises(ValueError, match="horizon must be at least 1, got 0"):
        TMazeExploration(env, horizon=0)
    with pytest.raises(TypeError, match=r"horizon must be an integer, got 6\.0"):
        TMazeExploration(env, 6.0)  # type: ignore[arg-type]
    assert TMazeExploration(env, horizon=6).horizon == 6
    config.bind({"amago.envs.builtin.TMazeExploration.horizon": 7})
    assert TMazeExploration(env).horizon == 7
