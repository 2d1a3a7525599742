"""T-Maze: both versions against plans whose return is known by counting, and its exploration."""

from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from amago import config
from amago.envs.amago_env import AMAGOEnv
from amago.envs.builtin import TMazeActive, TMazePassive
from amago.envs.builtin.tmaze import TMazeExploration
from amago.envs.statistics import AMAGO_ENV_LOG_PREFIX

RIGHT, UP, LEFT, DOWN = range(4)
TURN = {1: UP, -1: DOWN}
Maze = TMazePassive | TMazeActive


def with_goal(env: Maze, goal: int) -> np.ndarray:
    """Reset until the goal is ``goal``; the first observation."""
    for seed in range(100):
        obs, info = env.reset(seed=seed)
        assert info == {}
        if env.goal == goal:
            return obs
    raise AssertionError("no such goal in 100 episodes")


def play(env: Maze, actions: list[int]) -> list[tuple[np.ndarray, float, bool, dict[str, Any]]]:
    out = []
    for action in actions:
        obs, reward, terminated, _, info = env.step(action)
        out.append((obs, reward, terminated, info))
    return out


@settings(max_examples=80, deadline=None)
@given(length=st.integers(1, 60), goal=st.sampled_from([1, -1]), active=st.booleans())
def test_the_oracle_earns_one_and_sees_the_sign_once(length: int, goal: int, active: bool) -> None:
    """The sign of the active maze is a step behind the start."""
    env = (TMazeActive if active else TMazePassive)(length)
    plan = [LEFT] * active + [RIGHT] * (length + active) + [TURN[goal]]
    assert env.episode_length == env.horizon == len(plan)
    np.testing.assert_array_equal(with_goal(env, goal), np.array([0, 0 if active else goal], dtype=np.float32))
    steps = play(env, plan)
    before = len(plan) - 1
    assert [s[1] for s in steps] == [0.0] * before + [1.0]
    assert [s[2] for s in steps] == [False] * before + [True]
    assert [s[3] for s in steps] == [{}] * before + [{f"{AMAGO_ENV_LOG_PREFIX} Success": 1.0}]
    expected = [[0, goal]] * active + [[0, 0]] * (length - 1 + active) + [[1, 0], [1, goal]]
    np.testing.assert_array_equal(np.stack([s[0] for s in steps]), np.array(expected, dtype=np.float32))
    with pytest.raises(gym.error.ResetNeeded):
        env.step(RIGHT)


@pytest.mark.parametrize("goal", [1, -1])
def test_the_active_sign_shows_only_from_its_own_cell(goal: int) -> None:
    """Without the step back nothing that is seen before the turn tells the goals apart."""
    seen = []
    for shown in (goal, -goal):
        env = TMazeActive(4)
        first = with_goal(env, shown)
        seen.append(np.stack([first, *(s[0] for s in play(env, [RIGHT] * 6))]))
    np.testing.assert_array_equal(seen[0], seen[1])
    env = TMazeActive(4)
    with_goal(env, goal)
    back_twice = play(env, [LEFT, LEFT, RIGHT, LEFT])
    assert [s[0].tolist() for s in back_twice] == [[0, goal], [0, goal], [0, 0], [0, goal]]
    assert env.position == (-1, 0)


@settings(max_examples=60, deadline=None)
@given(
    length=st.integers(1, 30), active=st.booleans(), penalty=st.none() | st.sampled_from([0.0, -0.25, -3]), data=st.data(),
)  # fmt: skip
def test_each_action_but_forward_costs_the_penalty_except_first_and_last(
    length: int, active: bool, penalty: float | None, data: st.DataObject
) -> None:
    env = (TMazeActive if active else TMazePassive)(length, penalty)
    horizon = length + (3 if active else 1)
    each = -1.0 / horizon if penalty is None else float(penalty)
    assert env.penalty == each
    env.reset(seed=data.draw(st.integers(0, 1000)))
    actions = data.draw(st.lists(st.integers(0, 3), min_size=horizon, max_size=horizon))
    steps = play(env, actions)
    expected = [0.0] + [0.0 if a == RIGHT else each for a in actions[1:-1]]
    assert [s[1] for s in steps[:-1]] == expected
    won = env.position == (length, env.goal)
    assert steps[-1][1] == float(won)
    assert [s[2] for s in steps] == [False] * (horizon - 1) + [True]


def explorer(corridor: int, **bindings: float) -> TMazeExploration:
    env = AMAGOEnv(TMazePassive(corridor), env_name="tmaze")
    config.bind({"TMazeExploration.horizon": corridor + 1} | {f"EpsilonGreedy.{k}": v for k, v in bindings.items()})
    return TMazeExploration(env)


@pytest.mark.parametrize("horizon", [4, 5, 10, 400])
def test_the_schedule(horizon: int) -> None:
    wrapped = explorer(horizon - 1, eps_start=0.8, eps_end=0.8, randomize_eps=False)
    usual = [step == 0 or step >= horizon - 3 for step in range(horizon)]
    assert wrapped.current_eps(np.arange(horizon)).tolist() == [0.8 if u else 0.5 / horizon for u in usual]
    assert wrapped.current_eps(np.array([0])).tolist() == [0.8]


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
