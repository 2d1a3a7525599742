"""MazeRunner against shortest ways, counts of spanning trees, identities of random walks, and replays of relabelled rollouts."""

import gymnasium as gym
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from replays import check_equal, played
from shortest_ways import shortest_way

from amago.data.trajectory import FrozenTraj
from amago.envs.builtin import MazeRunner
from amago.envs.builtin.mazerunner import depths, random_maze
from amago.envs.statistics import AMAGO_ENV_LOG_PREFIX
from amago.relabeling import GoalSequenceRelabeler

Cell = tuple[int, int]
MOVES = [(-1, 0), (0, -1), (1, 0), (0, 1), (0, 0)]
GOALS_REACHED, SUCCESS = (f"{AMAGO_ENV_LOG_PREFIX} {name}" for name in ("Goals Reached", "Success"))


def way(free: np.ndarray, start: Cell, end: Cell) -> list[int]:
    """A shortest way, as actions."""

    def moves(cell: Cell) -> list[tuple[int, Cell]]:
        near = [(action, (cell[0] + dx, cell[1] + dy)) for action, (dx, dy) in enumerate(MOVES[:4])]
        return [(action, after) for action, after in near if free[after]]

    return shortest_way(start, lambda cell: cell == end, moves)


def ask_for(env: MazeRunner, goals: list[Cell]) -> None:
    """Put other goals into a rollout that has just begun."""
    rows = np.full((env.max_goals, 2), -1, dtype=np.float32)
    rows[env.max_goals - len(goals) :] = np.array(goals) / env.size
    env.goals, env._goal_rows = goals, rows


def reached(free: np.ndarray) -> np.ndarray:
    """The cells that are connected with (1, 1)."""
    seen = np.zeros_like(free)
    seen[1, 1], before = True, 0
    while seen.sum() > before:
        before = seen.sum()
        for axis, shift in ((0, 1), (0, -1), (1, 1), (1, -1)):
            seen |= np.roll(seen, shift, axis) & free
    return seen


@pytest.mark.parametrize("size", [5, 7, 9, 15, 31])
def test_a_maze_without_loops_is_a_tree(size: int) -> None:
    rooms = (size // 2) ** 2
    for seed in range(10):
        free = random_maze(np.random.default_rng(seed), size)
        assert free.shape == (size, size)
        assert not np.concatenate((free[0], free[-1], free[:, 0], free[:, -1])).any()  # walls all around
        assert free[1::2, 1::2].all()  # rooms
        assert not free[::2, ::2].any()  # corners of walls
        assert int(free.sum()) == int(reached(free).sum()) == 2 * rooms - 1
        touching = int((free[1:] & free[:-1]).sum() + (free[:, 1:] & free[:, :-1]).sum())
        assert touching == int(free.sum()) - 1  # connected, with one edge less than cells


def test_depth_sensors_count_free_cells() -> None:
    for seed in range(5):
        free = random_maze(np.random.default_rng(seed), 11, 0.2)
        seen = depths(free)
        for x, y in np.argwhere(free):
            for i, (dx, dy) in enumerate(MOVES[:4]):
                count = 0
                while free[x + dx * (count + 1), y + dy * (count + 1)]:
                    count += 1
                assert seen[x, y, i] == count


@settings(max_examples=60, deadline=None)
@given(
    size=st.sampled_from([5, 7, 9]), low=st.integers(1, 3), more=st.integers(0, 2), limit=st.integers(1, 60), shuffle=st.booleans(),
    loops=st.sampled_from([0.0, 0.5]), seed=st.integers(0, 2**31 - 1),
)  # fmt: skip
def test_the_shortest_way_earns_what_the_limit_allows(
    size: int, low: int, more: int, limit: int, shuffle: bool, loops: float, seed: int
) -> None:
    env = MazeRunner(size, low, low + more, limit, shuffle, loops)
    obs, info = env.reset(seed=seed)
    assert info == {}
    start, goals, free = env.position, env.goals, env.maze
    assert low <= len(goals) <= low + more
    assert len({start, *goals}) == 1 + len(goals)
    assert all(free[cell] for cell in (start, *goals))
    inverse = {meaning: action for action, meaning in enumerate(env.action_order)}
    arrivals, plan = [], []
    for a, b in zip([start, *goals], goals):
        plan += way(free, a, b)
        arrivals.append(len(plan))
    hidden = low + more - len(goals)
    for t in range(min(len(plan), limit) + 1):
        reached = sum(arrival <= t for arrival in arrivals)
        x, y = env.position
        own = [x, y, *depths(free)[x, y].tolist()]
        np.testing.assert_allclose(obs["observation"], [*(v / size for v in own), t / limit], rtol=1e-6)
        np.testing.assert_array_equal(obs["achieved"], obs["observation"][:2])
        assert (obs["goals"][: hidden + reached] == -1).all()
        np.testing.assert_allclose(obs["goals"][hidden + reached :], np.array(goals[reached:]).reshape(-1, 2) / size, rtol=1e-6)
        if t == min(len(plan), limit):
            break
        obs, reward, terminated, _, info = env.step(inverse[plan[t]])
        assert reward == float(t + 1 in arrivals)
        assert terminated is (t + 1 in (len(plan), limit))
        assert bool(info) == terminated
    assert info == {GOALS_REACHED: reached / len(goals), SUCCESS: float(reached == len(goals))}
    with pytest.raises(gym.error.ResetNeeded):
        env.step(4)


def test_only_the_goal_that_is_due_counts_and_one_a_step() -> None:
    env = MazeRunner(5, 1, 3, 50)
    env.reset(seed=0)
    free = env.maze
    a, b = (1, 1), (3, 3)
    env.position = a
    ask_for(env, [b, a, a])  # it stands on the second already, and is asked for it twice
    rewards = [env.step(action)[1] for action in [4, 4, *way(free, a, b), *way(free, b, a), 4]]
    assert [t for t, reward in enumerate(rewards) if reward] == [
        1 + len(way(free, a, b)),
        1 + 2 * len(way(free, a, b)),
        2 + 2 * len(way(free, a, b)),
    ]
    assert env.position == a


def test_walls_stop_the_agent() -> None:
    env = MazeRunner(7, 1, 1, 1000)
    env.reset(seed=1)
    ask_for(env, [(0, 0)])  # never reached
    rng = np.random.default_rng(0)
    free, bumped = env.maze, 0
    for _ in range(300):
        (x, y), action = env.position, int(rng.integers(5))
        aim = (x + MOVES[action][0], y + MOVES[action][1])
        env.step(action)
        assert env.position == (aim if free[aim] else (x, y))
        bumped += not free[aim]
    assert bumped > 50


def record(env: MazeRunner, seed: int, actions: list[int], goals: list[Cell] | None = None) -> FrozenTraj:
    """The rollout of these actions, with other goals than its own if given."""
    obs, _ = env.reset(seed=seed)
    if goals is not None:
        ask_for(env, goals)
        obs = env._observe()
    return played(env, obs, actions)


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 2**31 - 1), draw=st.integers(0, 2**31 - 1), strategy=st.sampled_from(["none", "some", "all"]),
    low=st.integers(1, 3), more=st.integers(0, 2), limit=st.integers(4, 40), shuffle=st.booleans(),
)  # fmt: skip
def test_a_relabelled_rollout_is_what_the_maze_would_have_given(
    seed: int, draw: int, strategy: str, low: int, more: int, limit: int, shuffle: bool
) -> None:
    env, rng = MazeRunner(7, low, low + more, limit, shuffle), np.random.default_rng(draw)
    actions = rng.integers(5, size=limit).tolist()
    traj = record(env, seed, actions)
    k = len(env.goals)
    new = GoalSequenceRelabeler(strategy)(record(env, seed, actions), rng)
    rows = np.rint(new.obs["goals"][0, low + more - k :] * 7).astype(int).tolist()
    replayed = record(env, seed, actions, [(x, y) for x, y in rows])
    check_equal(new, replayed)
    if strategy == "none":
        np.testing.assert_array_equal(new.obs["goals"], traj.obs["goals"])
    if strategy == "all":
        assert new.dones[-1]
        assert new.rews.sum() == min(k, len(new))  # a step reaches one goal at most
