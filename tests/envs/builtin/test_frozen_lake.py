"""MetaFrozenLake against breadth-first search, arithmetic on small lakes, and binomial bounds."""

from __future__ import annotations

import itertools
import re
from collections import deque
from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from amago.envs.builtin import MetaFrozenLake
from amago.envs.metrics import AMAGO_ENV_LOG_PREFIX

ACTIONS = {1: (1, 0), 2: (-1, 0), 3: (0, 1), 4: (0, -1)}


def shortest_path(holes: np.ndarray, start: tuple[int, int] = (0, 0)) -> list[int]:
    """Actions of a shortest way to the far corner, found without the environment."""
    size = holes.shape[0]
    goal, came = (size - 1, size - 1), {start: (start, 0)}
    queue = deque([start])
    while queue:
        cell = queue.popleft()
        for action, (dx, dy) in ACTIONS.items():
            x, y = cell[0] + dx, cell[1] + dy
            if 0 <= x < size and 0 <= y < size and not holes[x, y] and (x, y) not in came:
                came[(x, y)] = (cell, action)
                queue.append((x, y))
    path, cell = [], goal
    while cell != start:
        cell, action = came[cell]
        path.append(action)
    return path[::-1]


def path_into_hole(holes: np.ndarray) -> list[int] | None:
    """Actions of a shortest way into any hole; None on a lake without one."""
    seen, queue = {(0, 0)}, deque([((0, 0), [])])
    while queue:
        (cx, cy), path = queue.popleft()
        for action, (dx, dy) in ACTIONS.items():
            x, y = cx + dx, cy + dy
            if not (0 <= x < holes.shape[0] and 0 <= y < holes.shape[0]) or (x, y) in seen:
                continue
            if holes[x, y]:
                return [*path, action]
            seen.add((x, y))
            queue.append(((x, y), [*path, action]))
    return None


def lake_with(holes: set[tuple[int, int]], size: int, **kwargs: Any) -> MetaFrozenLake:
    """An environment whose lake has exactly these holes, found among Gymnasium's random ones."""
    env = MetaFrozenLake(size, **kwargs)
    for seed in range(20_000):
        env.reset(seed=seed)
        if {(int(x), int(y)) for x, y in np.argwhere(env.holes)} == holes:
            return env
    raise AssertionError("no seed gives this lake")


def within(count: int, n: int, p: float) -> bool:
    """Within 4.5 standard deviations of a binomial (a false alarm in 150,000)."""
    return abs(count - n * p) <= 4.5 * (n * p * (1 - p)) ** 0.5


@pytest.mark.parametrize("size", [2, 3, 4, 7, 10])
@pytest.mark.parametrize("k", [1, 2, 5])
def test_the_shortest_path_wins_every_attempt_and_wastes_no_step(size: int, k: int) -> None:
    env = MetaFrozenLake(size, k_episodes=k)
    for seed in range(20):
        obs, _ = env.reset(seed=seed)
        holes = env.holes
        path = shortest_path(holes)
        assert len(path) >= 2 * (size - 1)
        np.testing.assert_allclose(obs, [0, 0, 1, 0])
        steps, total, terminated = 0, 0.0, False
        for attempt in range(k):
            for i, action in enumerate(path):
                assert not terminated
                obs, reward, terminated, truncated, info = env.step(action)
                steps, total = steps + 1, total + reward
                assert not truncated
                if i < len(path) - 1:
                    assert reward == 0.0
                    assert info == {}
                    assert obs[2] == 0.0
                    np.testing.assert_allclose(obs[3], attempt / k, rtol=1e-6)
            assert info[f"{AMAGO_ENV_LOG_PREFIX} Attempt {attempt} Success"] == 1.0
            np.testing.assert_array_equal(env.holes, holes)  # the same lake for all attempts
            if attempt < k - 1:  # the step that ended this attempt shows the first observation of the next
                np.testing.assert_allclose(obs, [0, 0, 1, (attempt + 1) / k], rtol=1e-6)
        assert terminated
        np.testing.assert_allclose(obs, [(size - 1) / size, (size - 1) / size, 0, 1], rtol=1e-6)
        assert total == k
        assert steps == k * len(path)
        assert info[f"{AMAGO_ENV_LOG_PREFIX} Success Rate"] == 1.0


def test_positions_follow_the_actions_and_walls_stop() -> None:
    env = lake_with(set(), 3)
    expected = [(1, (1, 0)), (1, (2, 0)), (1, (2, 0)), (4, (2, 0)), (3, (2, 1)), (2, (1, 1)), (0, (1, 1)), (4, (1, 0))]
    for action, (x, y) in expected:
        obs, *_ = env.step(action)
        np.testing.assert_allclose(obs, [x / 3, y / 3, 0, 0], rtol=1e-6)
        assert env.position == (x, y)


def test_a_hole_ends_the_attempt_with_nothing() -> None:
    env = lake_with({(1, 0)}, 3, k_episodes=2)
    obs, reward, terminated, _, info = env.step(1)
    assert (reward, terminated) == (0.0, False)
    assert info == {f"{AMAGO_ENV_LOG_PREFIX} Attempt 0 Success": 0.0}
    np.testing.assert_allclose(obs, [0, 0, 1, 0.5])
    for action in (3, 1):
        env.step(action)
    assert env.position == (1, 1)
    obs, reward, terminated, _, info = env.step(4)  # from below, into the same hole
    assert (reward, terminated) == (0.0, True)
    assert info == {f"{AMAGO_ENV_LOG_PREFIX} Attempt 1 Success": 0.0, f"{AMAGO_ENV_LOG_PREFIX} Success Rate": 0.0}
    np.testing.assert_allclose(obs, [1 / 3, 0, 0, 1], rtol=1e-6)


def test_every_lake_has_its_holes_where_a_walk_says() -> None:
    env = MetaFrozenLake(5, k_episodes=2)
    fell = 0
    for seed in range(50):
        env.reset(seed=seed)
        path = path_into_hole(env.holes)
        if path is None:
            continue
        outcomes = [env.step(a) for a in path]
        assert [f"{AMAGO_ENV_LOG_PREFIX} Attempt 0 Success" in o[4] for o in outcomes] == [False] * (len(path) - 1) + [True]
        assert sum(o[1] for o in outcomes) == 0.0
        assert outcomes[-1][0][2] == 1.0
        fell += 1
    assert fell > 40


def test_recover_mode_costs_a_tenth_and_stays() -> None:
    env = lake_with({(1, 0)}, 3, k_episodes=1, recover_mode=True)
    for _ in range(3):
        obs, reward, terminated, _, info = env.step(1)
        assert (reward, terminated, info) == (-0.1, False, {})
        np.testing.assert_allclose(obs, [0, 0, 0, 0])
    rewards = [env.step(a)[1] for a in (3, 3, 1, 1)]
    assert rewards == [0.0, 0.0, 0.0, 1.0]


@pytest.mark.parametrize(
    ("kwargs", "limit"),
    [
        ({}, 16),
        ({"hard_mode": True, "recover_mode": True}, 32),
        ({"slip_chance": 0.2}, 20),
        ({"slip_chance": 0.5, "hard_mode": True}, 64),
        ({"max_episode_steps": 5}, 5),
        ({"max_episode_steps": 5, "hard_mode": True, "slip_chance": 0.9}, 5),
    ],
)
def test_an_attempt_ends_at_its_limit(kwargs: dict[str, Any], limit: int) -> None:
    env = MetaFrozenLake(4, k_episodes=3, **kwargs)
    assert env.max_episode_steps == limit
    env.reset(seed=0)
    ends = [i + 1 for i in range(3 * limit) if env.step(0)[4]]
    assert ends == [limit, 2 * limit, 3 * limit]
    with pytest.raises(gym.error.ResetNeeded):
        env.step(0)


def test_reaching_the_goal_on_the_last_step_of_an_attempt_counts() -> None:
    env = lake_with(set(), 3, k_episodes=1, max_episode_steps=4)
    assert [env.step(a)[1:3] for a in (1, 1, 3, 3)] == [(0.0, False)] * 3 + [(1.0, True)]


def test_success_is_logged_by_attempt() -> None:
    env = lake_with({(1, 0)}, 3, k_episodes=4, max_episode_steps=4)
    win, fall, idle = [3, 3, 1, 1], [1], [0] * 4
    logged: dict[str, float] = {}
    for plan in (win, fall, idle, win):
        for action in plan:
            *_, terminated, _, info = env.step(action)
            logged |= info
    assert terminated
    assert [logged[f"{AMAGO_ENV_LOG_PREFIX} Attempt {i} Success"] for i in range(4)] == [1.0, 0.0, 0.0, 1.0]
    assert logged[f"{AMAGO_ENV_LOG_PREFIX} Success Rate"] == 0.5
    assert len(logged) == 5


def test_progress_can_be_hidden() -> None:
    env = MetaFrozenLake(3, k_episodes=2, show_k_progress=False)
    assert env.observation_space.shape == (3,)
    obs, _ = env.reset(seed=0)
    np.testing.assert_array_equal(obs, np.array([0, 0, 1], dtype=np.float32))


def test_lakes_differ_between_rollouts_and_all_can_be_crossed() -> None:
    env = MetaFrozenLake(6)
    env.reset(seed=0)
    lakes = set()
    for _ in range(100):
        env.reset()
        assert shortest_path(env.holes)  # raises KeyError where there is none
        assert not env.holes[0, 0]
        assert not env.holes[-1, -1]
        lakes.add(env.holes.tobytes())
    assert len(lakes) > 95


def test_holes_are_as_likely_as_in_all_solvable_lakes() -> None:
    """Size 3 exactly: every map of seven free cells, a hole with chance 0.2 each, given that it can be crossed."""
    free = [(x, y) for x in range(3) for y in range(3) if (x, y) not in ((0, 0), (2, 2))]
    exact, total = np.zeros((3, 3)), 0.0
    for bits in itertools.product((False, True), repeat=7):
        holes = np.zeros((3, 3), dtype=bool)
        for cell, bit in zip(free, bits):
            holes[cell] = bit
        try:
            shortest_path(holes)
        except KeyError:
            continue
        weight = 0.2 ** sum(bits) * 0.8 ** (7 - sum(bits))
        exact += weight * holes
        total += weight
    exact /= total
    env = MetaFrozenLake(3)
    env.reset(seed=0)
    n, counts = 3000, np.zeros((3, 3))
    for _ in range(n):
        env.reset()
        counts += env.holes
    for cell in free:
        assert within(int(counts[cell]), n, float(exact[cell])), cell
    assert counts[0, 0] == counts[2, 2] == 0


def test_hard_mode_swaps_the_forward_actions_on_half_of_the_lakes() -> None:
    env = MetaFrozenLake(4, hard_mode=True, recover_mode=True)
    swaps = 0
    for seed in range(2000):
        env.reset(seed=seed)
        holes = env.holes
        if not holes[1, 0]:
            env.step(1)
            assert env.position == (
                (0, 1) if env.actions_swapped and not holes[0, 1] else (0, 0) if env.actions_swapped else (1, 0)
            )
        elif not holes[0, 1]:
            env.step(3)
            assert env.position == ((0, 0) if env.actions_swapped else (0, 1))
        swaps += env.actions_swapped
    assert within(swaps, 2000, 0.5)


def test_hard_mode_swap_lasts_for_all_attempts_and_spares_the_backward_actions() -> None:
    env = MetaFrozenLake(6, hard_mode=True, recover_mode=True, k_episodes=3, max_episode_steps=30)
    moves: dict[bool, set[tuple[int, int, int]]] = {True: set(), False: set()}
    rng = np.random.default_rng(0)
    for seed in range(40):
        env.reset(seed=seed)
        swapped, terminated = env.actions_swapped, False
        while not terminated:
            before, action = env.position, int(rng.integers(5))
            *_, terminated, _, info = env.step(action)
            assert env.actions_swapped is swapped
            delta = (env.position[0] - before[0], env.position[1] - before[1])
            if delta != (0, 0) and not info:
                moves[swapped].add((action, *delta))
    assert moves[False] == {(1, 1, 0), (2, -1, 0), (3, 0, 1), (4, 0, -1)}
    assert moves[True] == {(1, 0, 1), (2, -1, 0), (3, 1, 0), (4, 0, -1)}


def test_hard_mode_misreads_the_position_a_quarter_of_the_time_by_one_cell() -> None:
    env = MetaFrozenLake(4, hard_mode=True, max_episode_steps=8000, k_episodes=1)
    env.reset(seed=0)
    offsets: dict[tuple[int, int], int] = {}
    n = 8000
    for _ in range(n - 1):
        obs, *_ = env.step(0)
        reading = (round(float(obs[0]) * 4), round(float(obs[1]) * 4))
        offsets[reading] = offsets.get(reading, 0) + 1
    exact = offsets.pop((0, 0))
    assert within(n - 1 - exact, n - 1, 0.25)
    assert set(offsets) == {(x, y) for x in (-1, 0, 1) for y in (-1, 0, 1)} - {(0, 0)}
    assert all(within(c, n - 1, 0.25 / 8) for c in offsets.values())


def test_hard_mode_cracks_a_third_of_the_cells_left_until_the_attempt_ends() -> None:
    env = MetaFrozenLake(5, hard_mode=True, recover_mode=True, k_episodes=2, max_episode_steps=20)
    rng = np.random.default_rng(0)
    left = cracked = rollouts = 0
    for seed in range(400):
        env.reset(seed=seed)
        lake, holes, attempts = env.holes, env.holes, 0
        for _ in range(40):
            before = env.position
            *_, terminated, _, info = env.step(int(rng.integers(5)))
            if info:
                attempts += 1
                if terminated:
                    break
                np.testing.assert_array_equal(env.holes, lake)
                assert env.position == (0, 0)
            else:
                new = np.argwhere(env.holes != holes)
                if env.position == before:
                    assert len(new) == 0  # who stays cracks nothing
                else:
                    left += 1
                    cracked += len(new)
                    assert [tuple(c) for c in new] in ([], [before])
            holes = env.holes
        rollouts += attempts == 2
    assert rollouts == 400
    assert left > 2000
    assert within(cracked, left, 1 / 3)


def test_without_hard_mode_there_is_no_chance_at_all() -> None:
    env = MetaFrozenLake(5, k_episodes=2, recover_mode=True)
    env.reset(seed=1)
    before = env.np_random.bit_generator.state
    for action in (1, 3, 1, 3, 2, 4, 0) * 6:
        env.step(action)
    assert env.np_random.bit_generator.state == before
    assert not env.actions_swapped


def test_a_slip_turns_a_move_into_a_stay() -> None:
    env = lake_with(set(), 3, slip_chance=0.3, max_episode_steps=10_000, recover_mode=True)
    slips = moves = 0
    for _ in range(2500):
        before = env.position
        env.step(3 if before[1] == 0 else 4)  # up and down beside the left wall
        assert env.position in (before, (0, 1 - before[1]))
        moves += 1
        slips += env.position == before
    assert within(slips, moves, 0.3)


def test_a_random_policy_is_worth_what_the_transition_matrix_says() -> None:
    size, limit, k = 3, 9, 2
    env = lake_with({(1, 1)}, size, k_episodes=k)
    cells = [(x, y) for x in range(size) for y in range(size)]
    chance = {(0, 0): 1.0}
    value = 0.0
    for _ in range(limit):
        new: dict[tuple[int, int], float] = dict.fromkeys(cells, 0.0)
        for (x, y), p in chance.items():
            for dx, dy in ((0, 0), *ACTIONS.values()):
                new[(min(max(x + dx, 0), 2), min(max(y + dy, 0), 2))] += p / 5
        value += new.pop((2, 2))
        new.pop((1, 1))
        chance = new
    rng = np.random.default_rng(0)
    n = wins = 0
    seed = next(s for s in range(20_000) if {tuple(c) for c in np.argwhere(_holes(size, s)).tolist()} == {(1, 1)})
    for _ in range(1500):
        env.reset(seed=seed)
        terminated = False
        while not terminated:
            _, reward, terminated, _, info = env.step(int(rng.integers(5)))
            wins += reward == 1.0
            n += bool(info)
    assert n == 1500 * k
    assert within(wins, n, value)


def _holes(size: int, seed: int) -> np.ndarray:
    env = MetaFrozenLake(size)
    env.reset(seed=seed)
    return env.holes


@settings(max_examples=60, deadline=None)
@given(
    size=st.integers(2, 8),
    k=st.integers(1, 4),
    hard=st.booleans(),
    recover=st.booleans(),
    limit=st.none() | st.integers(1, 12),
    progress=st.booleans(),
    slip=st.sampled_from([0.0, 0.3, 0.9]),
    seed=st.integers(0, 2**31 - 1),
)
def test_any_arguments_give_a_rollout_of_k_attempts(
    size: int, k: int, hard: bool, recover: bool, limit: int | None, progress: bool, slip: float, seed: int
) -> None:
    env = MetaFrozenLake(size, k, hard, recover, limit, progress, slip)
    obs, info = env.reset(seed=seed)
    assert obs in env.observation_space
    assert info == {}
    rng = np.random.default_rng(seed)
    firsts, wins, terminated, steps = 1, 0, False, 0
    while not terminated:
        obs, reward, terminated, truncated, info = env.step(rng.integers(5))
        assert obs in env.observation_space
        assert not truncated
        assert reward in (0.0, 1.0, -0.1)
        firsts += obs[2] == 1.0
        wins += reward == 1.0
        steps += 1
    assert firsts == k
    assert info[f"{AMAGO_ENV_LOG_PREFIX} Success Rate"] == wins / k
    assert k <= steps <= env.horizon == k * env.max_episode_steps


@pytest.mark.parametrize(
    "kwargs", [{}, {"hard_mode": True, "slip_chance": 0.2}, {"recover_mode": True, "show_k_progress": False}]
)
def test_gymnasium_and_determinism(
    gym_check: Callable[..., None], same_rollout: Callable[..., None], kwargs: dict[str, Any]
) -> None:
    gym_check(MetaFrozenLake, size=4, **kwargs)
    same_rollout(lambda: MetaFrozenLake(4, k_episodes=3, **kwargs), 5)


def test_render() -> None:
    env = lake_with({(1, 0)}, 3, k_episodes=2, render_mode="ansi")
    assert env.render() == "A O .\n. . .\n. . G\nattempt 1 of 2, step 0"
    env.step(3)
    assert env.render() == ". O .\nA . .\n. . G\nattempt 1 of 2, step 1"
    drawn = lake_with({(1, 0)}, 3, render_mode="rgb_array")
    frame = drawn.render()
    assert frame.shape == (72, 72, 3)
    assert frame.dtype == np.uint8
    middles = {(x, y): tuple(frame[12 + 24 * y, 12 + 24 * x].tolist()) for x in range(3) for y in range(3)}
    assert len({middles[(0, 0)], middles[(1, 0)], middles[(2, 2)], middles[(0, 1)]}) == 4  # agent, hole, goal, ice
    drawn.step(3)
    moved = drawn.render()
    assert tuple(moved[12 + 24, 12].tolist()) == middles[(0, 0)]
    assert tuple(moved[12, 12].tolist()) == middles[(0, 1)]
    assert MetaFrozenLake(3).render() is None


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"size": 1}, ValueError),
        ({"size": 4.0}, TypeError),
        ({"size": True}, TypeError),
        ({"size": 4, "k_episodes": 0}, ValueError),
        ({"size": 4, "max_episode_steps": 0}, ValueError),
        ({"size": 4, "slip_chance": 1.0}, ValueError),
        ({"size": 4, "slip_chance": -0.1}, ValueError),
        ({"size": 4, "slip_chance": float("nan")}, ValueError),
        ({"size": 4, "slip_chance": "0.1"}, TypeError),
        ({"size": 4, "hard_mode": 1}, TypeError),
        ({"size": 4, "render_mode": "human"}, ValueError),
    ],
)
def test_wrong_arguments_are_named(arguments: dict[str, Any], error: type[Exception]) -> None:
    name, value = list(arguments.items())[-1]
    with pytest.raises(error, match=f"{name}.*got {re.escape(repr(value))}"):
        MetaFrozenLake(**arguments)


def test_bad_actions_and_steps_out_of_turn() -> None:
    env = MetaFrozenLake(4)
    with pytest.raises(gym.error.ResetNeeded, match=r"call reset\(\) first"):
        env.step(0)
    env.reset(seed=0)
    for action in (5, -1, np.int64(5)):
        with pytest.raises(ValueError, match=r"action must be in 0\.\.4, got"):
            env.step(action)
    with pytest.raises(TypeError, match=r"action must be an integer in 0\.\.4, got 1\.5"):
        env.step(1.5)
    assert env.position == (0, 0)
