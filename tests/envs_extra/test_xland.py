"""XLand-MiniGrid: tasks that a planner who knows them solves, in shots that begin anew, with train and test apart."""

from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from amago.envs import AMAGOEnv
from amago.envs.builtin import xland_minigrid as xland_rulesets
from amago.envs.builtin.xland_minigrid import HOLD, NEAR, SIZES, TILES_NEAR, Rulesets, generate_rulesets, load_rulesets
from amago.envs.statistics import AMAGO_ENV_LOG_PREFIX


def tiles_of(row: Any) -> list[tuple[int, int]]:
    """The objects in a goal or rule, or lying around."""
    numbers = [int(x) for x in np.asarray(row).reshape(-1)]
    return [(a, b) for a, b in zip(numbers[::2], numbers[1::2]) if a]


def parts(rule: Any) -> tuple[list[tuple[int, int]], tuple[int, int]]:
    """What a rule takes, and what it makes."""
    *taken, made = tiles_of(rule[1:])
    return taken, made


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("split", xland_rulesets.SPLITS)
def test_every_task_can_be_solved(size: str, split: str) -> None:
    """From what lies there, each object used once, the rules make all that the goal speaks of."""
    tasks = generate_rulesets(size, 200, split, seed=3)
    assert len(tasks) == 200
    deepest = 0
    for goal, rules, lying in zip(tasks.goals, tasks.rules, tasks.init_tiles):
        there, open_rules, rounds = set(tiles_of(lying)), [parts(r) for r in rules if r.any()], 0
        assert len(there) == len(tiles_of(lying))
        assert len({made for _, made in open_rules}) == len(open_rules)
        wanted = set(tiles_of(goal[1:]))
        while not wanted <= there:
            ready = [r for r in open_rules if set(r[0]) <= there]
            assert ready, "nothing more can be made"
            for taken, made in ready:
                there = there - set(taken) | {made}
                open_rules.remove((taken, made))
            rounds += 1
        deepest = max(deepest, rounds)
        assert goal[0] in (HOLD, NEAR, TILES_NEAR)
    assert deepest == SIZES[size].depth


@pytest.mark.parametrize("size", SIZES)
def test_train_and_test_share_no_task_whatever_the_seed(size: str) -> None:
    def identities(split: str, seed: int) -> set[bytes]:
        tasks = generate_rulesets(size, 150, split, seed)
        return {bytes(g) + b"".join(sorted(bytes(x) for x in r if x.any())) for g, r in zip(tasks.goals, tasks.rules)}

    assert not (identities("train", 0) | identities("train", 1)) & (identities("test", 0) | identities("test", 2))


def test_a_seed_gives_the_same_tasks_and_none_twice() -> None:
    one, two, other = (generate_rulesets("small", 100, "train", seed) for seed in (4, 4, 5))
    for name in ("goals", "rules", "init_tiles"):
        assert np.array_equal(getattr(one, name), getattr(two, name))
    assert not np.array_equal(one.goals, other.goals)
    whole = {bytes(g) + bytes(r) + bytes(t) for g, r, t in zip(one.goals, one.rules, one.init_tiles)}
    assert len(whole) == 100
    assert one.goals[0].tolist() == generate_rulesets("small", 1, "train", 4).goals[0].tolist()


def test_files_come_back_and_pickles_are_refused(tmp_path: Path) -> None:
    tasks = generate_rulesets("small", 30, "train")
    both = Rulesets(*(np.concatenate([getattr(tasks, n), getattr(generate_rulesets("small", 10, "test"), n)])
        for n in ("goals", "rules", "init_tiles")))  # fmt: skip
    both.save(tmp_path / "tasks.npz")
    back = load_rulesets(tmp_path / "tasks.npz")
    assert np.array_equal(back.rules, both.rules)
    assert (len(back.split("train")), len(back.split("test"))) == (30, 10)
    assert np.array_equal(back.split("train").goals, tasks.goals)

    np.savez(tmp_path / "evil.npz", goals=np.array([{}], dtype=object), rules=both.rules, init_tiles=both.init_tiles)
    np.savez(tmp_path / "less.npz", goals=both.goals)
    np.savez(tmp_path / "wide.npz", goals=both.goals.astype(int), rules=both.rules, init_tiles=both.init_tiles)
    for name, said in (("evil", "allow_pickle"), ("less", "rules"), ("wide", "goals .*int64")):
        with pytest.raises(ValueError, match=rf"{name}\.npz contains no tasks: .*{said}"):
            load_rulesets(tmp_path / f"{name}.npz")


K, LENGTH, ROWS = 2, 100, 8


@pytest.fixture(scope="module")
def worlds() -> Any:
    """One for all tests: it takes seconds to compile."""
    pytest.importorskip("jax", reason="jax is not installed: pip install 'amago[xland]'", exc_type=ImportError)
    pytest.importorskip("xminigrid", reason="xminigrid is not installed: pip install 'amago[xland]'", exc_type=ImportError)
    from amago.envs.builtin.xland_minigrid import XLandMiniGrid

    return XLandMiniGrid(ROWS, rulesets="small", k_shots=K, shot_length=LENGTH, num_rulesets=60)


def test_encodings_are_upstreams(worlds: Any) -> None:
    from xminigrid.core import constants, goals, rules

    a, b, c = (np.array(tile) for tile in xland_rulesets.OBJECTS[:3])
    expected = {HOLD: goals.AgentHoldGoal(tile=a), NEAR: goals.AgentNearGoal(tile=a), TILES_NEAR: goals.TileNearGoal(a, b)}
    for kind, goal in expected.items():
        assert goal.encode().tolist() == xland_rulesets._padded([kind, *a, *(b if kind == TILES_NEAR else ())], 5)
    assert rules.AgentHoldRule(tile=a, prod_tile=c).encode().tolist() == [xland_rulesets.HOLD_RULE, *a, *c, 0, 0]
    assert rules.AgentNearRule(tile=a, prod_tile=c).encode().tolist() == [xland_rulesets.NEAR_RULE, *a, *c, 0, 0]
    made = rules.TileNearRule(tile_a=a, tile_b=b, prod_tile=c).encode().tolist()
    assert made == [xland_rulesets.TILES_NEAR_RULE, *a, *b, *c]
    assert all(shape in constants.PICKABLE for shape, _ in xland_rulesets.OBJECTS)


FORWARD, RIGHT, LEFT, PICK, PUT = range(5)
STEPS = ((-1, 0), (0, 1), (1, 0), (0, -1))
FLOOR = 1


class Planner:
    """Knows the task and sees the whole grid; plans anew in each step."""

    def __init__(self, goal: Any, rules: Any, grid: Any, agent: Any) -> None:
        self.goal, self.rules = goal, [(int(r[0]), *parts(r)) for r in rules if r.any()]
        self.grid = {
            (y, x): (int(grid[y, x, 0]), int(grid[y, x, 1])) for y in range(grid.shape[0]) for x in range(grid.shape[1])
        }
        self.where = {tile: cell for cell, tile in self.grid.items() if tile[0] > FLOOR and tile[0] != 2}
        self.start = (int(agent.position[0]), int(agent.position[1]), int(agent.direction))
        self.pocket = tuple(int(x) for x in agent.pocket)

    def act(self) -> int:
        wanted = tiles_of(self.goal[1:])
        for tile in wanted:
            if (action := self.bring(tile)) is not None:
                return action
        if self.goal[0] == HOLD:
            return self.pick(wanted[0])
        return self.beside(wanted[0]) if self.goal[0] == NEAR else self.join(*wanted)

    def bring(self, tile: tuple[int, int]) -> int | None:
        """What to do so that ``tile`` is there; None: it is."""
        if tile in self.where or tile == self.pocket:
            return None
        kind, taken, _ = next(rule for rule in self.rules if rule[2] == tile)
        for part in taken:
            if (action := self.bring(part)) is not None:
                return action
        if kind == xland_rulesets.HOLD_RULE:
            return self.pick(taken[0])
        return self.beside(taken[0]) if kind == xland_rulesets.NEAR_RULE else self.join(*taken)

    def pick(self, tile: tuple[int, int]) -> int:
        if self.pocket[0]:
            return self.put_anywhere()
        return self.go(lambda cell, front, moved: front == self.where[tile], PICK)

    def beside(self, tile: tuple[int, int]) -> int:
        if tile == self.pocket:
            return self.put_anywhere()
        return self.go(lambda cell, front, moved: moved and near(cell, self.where[tile]), None)

    def join(self, a: tuple[int, int], b: tuple[int, int]) -> int:
        if self.pocket not in (a, b):
            return self.pick(a)
        other = self.where[b if self.pocket == a else a]
        return self.go(lambda cell, front, moved: self.free(front) and near(front, other), PUT)

    def put_anywhere(self) -> int:
        return self.go(lambda cell, front, moved: self.free(front), PUT)

    def free(self, cell: tuple[int, int]) -> bool:
        return self.grid[cell][0] == FLOOR

    def go(self, there: Callable[[Any, Any, bool], bool], then: int | None) -> int:
        """The first action on the shortest way to where ``there(cell, cell in front, moved there)``, or ``then``."""
        queue: deque[tuple[tuple[int, int, int], int | None, bool]] = deque([(self.start, None, False)])
        seen = {(self.start, False)}
        while queue:
            (y, x, d), first, moved = queue.popleft()
            front = (y + STEPS[d][0], x + STEPS[d][1])
            if there((y, x), front, moved):
                return first if first is not None else then if then is not None else FORWARD
            for action, new in ((FORWARD, (*front, d)), (RIGHT, (y, x, (d + 1) % 4)), (LEFT, (y, x, (d - 1) % 4))):
                if action == FORWARD and not self.free(front):
                    continue
                if (new, action == FORWARD) not in seen:
                    seen.add((new, action == FORWARD))
                    queue.append((new, action if first is None else first, action == FORWARD))
        return RIGHT  # walled in


def near(a: tuple[int, int], b: tuple[int, int]) -> bool:
    return abs(a[0] - b[0]) + abs(a[1] - b[1]) == 1


def test_a_planner_who_knows_the_task_wins_every_shot(worlds: Any) -> None:
    import jax

    obs, _ = worlds.reset(seed=1)
    logged: list[np.ndarray] = []
    paid, ended, tasks_of_row = np.zeros(ROWS), np.zeros(ROWS, dtype=bool), np.array(worlds._state[1])
    shot_openings = np.zeros(ROWS)
    for _ in range(K * LENGTH):
        step, task, _, _ = jax.device_get(worlds._state)
        assert (task == tasks_of_row)[~ended].all(), "one task through all shots"
        actions = np.zeros(ROWS, dtype=np.int64)
        for row in np.flatnonzero(~ended):
            agent = jax.tree.map(lambda leaf, r=row: leaf[r], step.state.agent)
            grid = step.state.grid[row]
            actions[row] = Planner(worlds.tasks.goals[task[row]], worlds.tasks.rules[task[row]], grid, agent).act()
        obs, reward, terminated, truncated, info = worlds.step(actions)
        assert not truncated.any()
        paid[~ended] += reward[~ended]
        shot_openings += (obs["status"][:, 4] == 1) & ~ended & ~terminated
        if terminated.any():
            first = terminated & ~ended
            logged += [np.array([info["final_info"][f"{AMAGO_ENV_LOG_PREFIX} Success in Shot {i}"][first] for i in range(K)])]
            ended |= terminated
        if ended.all():
            break
    assert ended.all()
    wins = np.concatenate(logged, axis=1)
    assert wins.shape == (K, ROWS)
    assert (wins == 1).all()
    assert (shot_openings == K - 1).all()
    assert (paid > K * 0.1).all()
    assert (paid < K).all()


def test_spaces_ends_and_metrics_through_the_library(worlds: Any) -> None:
    env = AMAGOEnv(worlds, batched_envs=ROWS)
    assert env.env_name == "xland_small"
    assert env.horizon == K * LENGTH
    timestep, _ = env.reset(seed=0)
    rng, ended = np.random.default_rng(0), 0
    for _ in range(K * LENGTH + 3):
        for key, space in env.observation_space.items():
            values = timestep.obs[key]
            assert values.dtype == space.dtype
            assert all(space.contains(row) for row in values)
        assert (timestep.obs["image"].sum(-1) == 2).all()  # one tile, one colour
        assert (timestep.obs["status"][:, :4].sum(-1) == 1).all()
        timestep, reward, terminated, truncated, info = env.step(rng.integers(0, 6, (ROWS, 1)))
        assert not truncated.any()
        assert ((reward >= 0) & (reward < 1)).all()
        for row in np.flatnonzero(terminated):
            ended += 1
            final = info["final_info"]
            shots = [float(final[f"{AMAGO_ENV_LOG_PREFIX} Success in Shot {i}"][row]) for i in range(K)]
            assert final[f"{AMAGO_ENV_LOG_PREFIX} Success"][row] == pytest.approx(np.mean(shots))
            assert timestep.obs["status"][row, 4:].tolist() == [1.0, 0.0, 0.0]
            assert timestep.time_idx[row] == 0
    assert ended >= ROWS


def test_the_seed_decides(worlds: Any) -> None:
    runs = []
    for seed in (7, 7, 8):
        obs, _ = worlds.reset(seed=seed)
        seen = [obs["image"].tobytes()]
        for action in (0, 1, 3, 0, 4, 2):
            obs, reward, *_ = worlds.step(np.full(ROWS, action))
            seen += [obs["image"].tobytes(), reward.tobytes()]
        runs.append(seen)
    assert runs[0] == runs[1] != runs[2]


def test_tasks_from_a_file(worlds: Any, tmp_path: Path) -> None:
    generate_rulesets("medium", 40, "train").save(tmp_path / "mine.npz")
    env = type(worlds)(2, rulesets=tmp_path / "mine.npz")
    assert env.env_name == "xland_mine"
    assert len(env.tasks) == 40
    assert env.horizon == 3 * 3 * 81
