"""MetaFrozenLake against breadth-first search, arithmetic on small lakes, and binomial bounds."""

from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from shortest_ways import shortest_way

from amago.envs.builtin import MetaFrozenLake
from amago.envs.statistics import AMAGO_ENV_LOG_PREFIX

ACTIONS = {1: (1, 0), 2: (-1, 0), 3: (0, 1), 4: (0, -1)}


def shortest_path(holes: np.ndarray) -> list[int]:
    """Actions of a shortest way to the far corner, found without the environment."""
    last = holes.shape[0] - 1

    def moves(cell: tuple[int, int]) -> list[tuple[int, tuple[int, int]]]:
        near = [(action, (cell[0] + dx, cell[1] + dy)) for action, (dx, dy) in ACTIONS.items()]
        return [(action, after) for action, after in near if min(after) >= 0 and max(after) <= last and not holes[after]]

    return shortest_way((0, 0), lambda cell: cell == (last, last), moves)


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
                obs, reward, terminated, _, info = env.step(action)
                steps, total = steps + 1, total + reward
                if i < len(path) - 1:
                    assert (reward, info, obs[2]) == (0.0, {}, 0.0)
                    np.testing.assert_allclose(obs[3], attempt / k, rtol=1e-6)
            assert info[f"{AMAGO_ENV_LOG_PREFIX} Attempt {attempt} Success"] == 1.0
            np.testing.assert_array_equal(env.holes, holes)  # the same lake for all attempts
            if attempt < k - 1:  # the step that ended this attempt shows the first observation of the next
                np.testing.assert_allclose(obs, [0, 0, 1, (attempt + 1) / k], rtol=1e-6)
        assert terminated
        np.testing.assert_allclose(obs, [(size - 1) / size, (size - 1) / size, 0, 1], rtol=1e-6)
        assert (total, steps) == (k, k * len(path))
        assert info[f"{AMAGO_ENV_LOG_PREFIX} Success Rate"] == 1.0


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


def test_hard_mode_swap_lasts_for_all_attempts_and_spares_the_backward_actions() -> None:
    env = MetaFrozenLake(6, hard_mode=True, recover_mode=True, k_episodes=3, max_episode_steps=30)
    moves: dict[bool, set[tuple[int, int, int]]] = {True: set(), False: set()}
    rng, swaps = np.random.default_rng(0), 0
    for seed in range(40):
        env.reset(seed=seed)
        swapped, terminated = env.actions_swapped, False
        swaps += swapped
        while not terminated:
            before, action = env.position, int(rng.integers(5))
            *_, terminated, _, info = env.step(action)
            assert env.actions_swapped is swapped
            delta = (env.position[0] - before[0], env.position[1] - before[1])
            if delta != (0, 0) and not info:
                moves[swapped].add((action, *delta))
    assert within(swaps, 40, 0.5)
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
    left = cracked = 0
    for seed in range(400):
        env.reset(seed=seed)
        lake = holes = env.holes
        terminated = False
        while not terminated:
            before = env.position
            *_, terminated, _, info = env.step(int(rng.integers(5)))
            new = np.argwhere(env.holes != holes)
            if info and not terminated:
                np.testing.assert_array_equal(env.holes, lake)
                assert env.position == (0, 0)
            elif env.position == before:
                assert len(new) == 0  # who stays cracks nothing
            elif not terminated:
                left += 1
                cracked += len(new)
                assert [tuple(c) for c in new] in ([], [before])
            holes = env.holes
    assert left > 2000
    assert within(cracked, left, 1 / 3)


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
