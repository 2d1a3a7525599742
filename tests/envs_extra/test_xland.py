"""XLand-MiniGrid: tasks that can be solved, in shots that begin anew, with train and test apart."""

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

    return XLandMiniGrid(ROWS, rulesets="trivial", k_shots=K, shot_length=LENGTH, num_rulesets=60)


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


def test_spaces_ends_and_metrics_through_the_library(worlds: Any) -> None:
    env = AMAGOEnv(worlds, batched_envs=ROWS)
    assert (env.env_name, env.horizon) == ("xland_trivial", K * LENGTH)
    timestep, _ = env.reset(seed=0)
    rng, ended, won = np.random.default_rng(0), 0, 0
    paid, shot, every = np.zeros((ROWS, K)), np.zeros(ROWS, int), np.arange(ROWS)
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
        paid[every, shot] += reward
        shot += (timestep.obs["status"][:, 4] == 1) & ~terminated
        for row in np.flatnonzero(terminated):
            ended += 1
            final = info["final_info"]
            shots = [float(final[f"{AMAGO_ENV_LOG_PREFIX} Success in Shot {i}"][row]) for i in range(K)]
            assert shots == (paid[row] > 0).tolist(), "whoever is paid in a shot has solved its task"
            assert final[f"{AMAGO_ENV_LOG_PREFIX} Success"][row] == pytest.approx(np.mean(shots))
            won, paid[row], shot[row] = won + sum(shots), 0.0, 0
            assert timestep.obs["status"][row, 4:].tolist() == [1.0, 0.0, 0.0]
            assert timestep.time_idx[row] == 0
    assert ended >= ROWS
    assert won > 0


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
    assert (env.env_name, len(env.tasks), env.horizon) == ("xland_mine", 40, 3 * 3 * 81)
