"""Crafter with instructions against Crafter itself, scripted players, and replays of relabelled rollouts."""

import re
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from replays import check_equal, played
from run_inside import run_example
from tiny import rows

from amago.data.trajectory import FrozenTraj
from amago.envs.builtin.crafter import (
    ACHIEVEMENTS,
    CHANNELS,
    GOAL_WORDS,
    CrafterInstructions,
    InstructionRelabeler,
    OrderedSet,
    goal_tokens,
)
from amago.envs.statistics import AMAGO_ENV_LOG_PREFIX
from amago.relabeling import completion_times

crafter = pytest.importorskip("crafter", reason="Crafter is not installed: pip install 'amago[crafter]'")

ACTIONS = list(crafter.constants.actions)
NOOP, LEFT, RIGHT, UP, DOWN, DO, SLEEP = range(7)
LOGGED = ("Goals Reached", "Success", "Achievements", "Died")


def logged(info: dict[str, Any]) -> dict[str, float]:
    return {name: info[f"{AMAGO_ENV_LOG_PREFIX} {name}"] for name in LOGGED}


def words(row: np.ndarray) -> str:
    """A goal in its written form, "" for none."""
    return re.sub(r"(?<=_)[xy](?=\d)", "", "_".join(GOAL_WORDS[i] for i in row if i))


def before_player(env: CrafterInstructions, material: str) -> None:
    """Put something before the player (who looks down at first)."""
    player = env._env._player
    env._env._world[tuple(player.pos + np.array(player.facing))] = material


def alone(env: CrafterInstructions) -> None:
    """Remove all creatures, and let no others come."""
    for thing in env._env._world.objects:
        if thing is not env._env._player:
            env._env._world.remove(thing)
    env._env._balance_chunk = lambda chunk, objs: None


@pytest.mark.parametrize("kind", ["render", "crop"])
def test_rollouts_are_those_of_upstream(kind: str) -> None:
    """Its own environment with the same seed and, so that it is the same each time, ordered sets of creatures."""
    theirs = crafter.Env(seed=7, length=None)
    theirs.reset()
    chunks: dict[Any, OrderedSet] = defaultdict(OrderedSet)
    for thing in theirs._world.objects:
        chunks[theirs._world.chunk_key(thing.pos)].add(thing)
    theirs._world._chunks = chunks
    ours = CrafterInstructions(goals=["eat_plant"], obs_kind=kind)
    ours.reset(seed=0)
    ours._begin(hash((7, 1)) % (2**31 - 1))
    assert ours._env._world._mat_map.tolist() == theirs._world._mat_map.tolist()
    rng = np.random.default_rng(1)
    for step in range(120):
        if step == 40:
            ours._env._step = theirs._step = 250  # night
        action = SLEEP if 60 <= step < 80 else int(rng.integers(17))
        picture, _, done, told = theirs.step(action)
        obs, _, over, _, _ = ours.step(action)
        np.testing.assert_array_equal(obs["observation"], picture if kind == "render" else picture[:49, :63])
        assert ours._env._player.inventory == told["inventory"]
        np.testing.assert_allclose(obs["status"][:16], np.array(list(told["inventory"].values())) / 9, rtol=1e-6)
        assert over == bool(done)
        if done:
            break


def test_local_cells_are_the_world() -> None:
    env = CrafterInstructions(obs_kind="local")
    rng = np.random.default_rng(0)
    obs, _ = env.reset(seed=1)
    world, player, kinds = env._env._world, env._env._player, Counter[str]()
    world.add(
        crafter.objects.Plant(
            world, next(tuple(c) for c in player.pos + np.argwhere(np.ones((3, 3))) if world[tuple(c)][1] is None)
        )
    )
    for _ in range(80):
        obs, *_ = env.step(int(rng.integers(1, 6)))
        for x in range(9):
            for y in range(7):
                material, thing = world[tuple(player.pos + np.array([x, y]) - (4, 3))]
                expected = {material or "outside"}
                if thing is not None and thing is not player:
                    expected.add(type(thing).__name__)
                assert {CHANNELS[i] for i in np.flatnonzero(obs["observation"][x, y])} == expected
                kinds.update(expected)
        if player.health <= 0:
            break
    assert kinds["Plant"] > 0
    assert kinds["Cow"] > 0
    for thing in world.objects:
        if isinstance(thing, crafter.objects.Plant):
            thing.grown = 301
    assert obs["observation"][..., CHANNELS.index("ripe Plant")].sum() == 0
    assert env._view()[..., CHANNELS.index("ripe Plant")].sum() == (env._view() != obs["observation"]).sum() / 2


def test_goals_in_words() -> None:
    assert list(ACHIEVEMENTS) == list(crafter.constants.achievements)
    for goal in (*ACHIEVEMENTS, "travel_0_7", "travel_3_3"):
        assert words(goal_tokens(goal)) == goal
    assert len({tuple(goal_tokens(goal)) for goal in ACHIEVEMENTS}) == 22
    for wrong in ("collect_gold", "travel_8_0", "travel", "travel_1", "collect_wood_up", "", "collect_x1", "travel_x1_y1"):
        with pytest.raises(ValueError, match=f"goals has '{wrong}'"):
            goal_tokens(wrong)


def test_goals_are_reached_in_order_and_one_at_a_time() -> None:
    env = CrafterInstructions(goals=["collect_wood", "collect_wood", "collect_sapling", "place_plant"], time_limit=200)
    obs, _ = env.reset(seed=5)
    alone(env)
    assert [words(row) for row in obs["goals"]] == ["", *env.rollout_goals]
    before_player(env, "water")
    obs, reward, *_ = env.step(DO)  # not what is due
    assert (reward, words(obs["achieved"])) == (0, "collect_drink")
    before_player(env, "tree")
    for left in (3, 2):
        obs, reward, over, _, _ = env.step(DO)
        assert (reward, over, words(obs["achieved"])) == (1, False, "collect_wood")
        assert np.count_nonzero(obs["goals"].any(axis=1)) == left
        before_player(env, "tree")
    obs, reward, over, _, _ = env.step(DO)
    assert (reward, over, words(obs["achieved"])) == (0, False, "collect_wood")
    before_player(env, "grass")
    tries, reward = 0, 0.0
    while reward == 0:  # one in ten
        obs, reward, *_ = env.step(DO)
        tries += 1
    assert words(obs["achieved"]) == "collect_sapling"
    assert [words(row) for row in obs["goals"]] == ["", "", "", "", "place_plant"]
    obs, reward, over, truncated, info = env.step(ACTIONS.index("place_plant"))
    assert (reward, over, truncated) == (1, True, False)
    assert not obs["goals"].any()
    assert logged(info) == {"Goals Reached": 1, "Success": 1, "Achievements": 4, "Died": 0}
    with pytest.raises(gym.error.ResetNeeded):
        env.step(NOOP)


def test_travelling() -> None:
    env = CrafterInstructions(goals=["travel_4_4", "travel_3_4", "travel_3_3"], time_limit=50)
    obs, _ = env.reset(seed=0)
    alone(env)
    env._env._world._mat_map[:] = env._env._world._mat_ids["grass"]
    assert words(obs["achieved"]) == "travel_4_4"  # the start, which reaches nothing
    assert len([row for row in obs["goals"] if row.any()]) == 3
    paid = [env.step(action)[1] for action in (NOOP, LEFT, UP)]
    assert (paid, env._env._player.pos.tolist()) == ([1, 1, 1], [31, 31])


def test_ends() -> None:
    env = CrafterInstructions(goals=["eat_plant", "wake_up"], time_limit=5)
    env.reset(seed=0)
    for step in range(1, 6):
        _, _, over, truncated, info = env.step(NOOP)
        assert (over, truncated) == (step == 5, False)
    assert logged(info)["Died"] == logged(info)["Success"] == 0
    env.reset(seed=0)
    before_player(env, "lava")
    alone(env)
    _, reward, over, truncated, info = env.step(DOWN)
    assert (reward, over, truncated) == (0, True, False)
    assert logged(info) == {"Goals Reached": 0, "Success": 0, "Achievements": 0, "Died": 1}


def recorded(env: CrafterInstructions, seed: int, actions: np.ndarray) -> FrozenTraj:
    return played(env, env.reset(seed=seed)[0], actions)


@pytest.mark.parametrize("strategy", ["some", "all"])
def test_relabelled_rollouts_are_what_crafter_would_have_given(strategy: str) -> None:
    env, changed, reached = CrafterInstructions(max_goals=4, time_limit=90), 0, 0
    rng, relabeler = np.random.default_rng(0), InstructionRelabeler(strategy)
    for seed in range(5):
        actions = rng.choice(17, size=90, p=[0.02] + [0.13] * 4 + [0.4] + [0.0] + [0.006] * 10)
        traj = recorded(env, seed, actions)
        asked = env.rollout_goals
        new = relabeler.relabel_with(traj, rng)
        goals = [words(row) for row in new.obs["goals"][0] if row.any()]
        assert len(goals) == len(asked)
        if goals == asked:
            continue
        changed += 1
        twin = recorded(CrafterInstructions(goals=goals, max_goals=4, time_limit=90), seed, actions)
        check_equal(new, twin)
        reached += int(new.rews.sum())
        if strategy == "all":
            assert new.rews.sum() == len(goals)
            assert new.dones[-1, 0]
    assert changed >= 2
    assert reached > 2


def test_nothing_done_is_nothing_to_relabel() -> None:
    env = CrafterInstructions(instructions=["make_iron_sword", "eat_plant"], time_limit=6)
    traj = recorded(env, 0, np.zeros(6, dtype=np.int64))
    assert InstructionRelabeler("all").relabel_with(traj, np.random.default_rng(0)) is traj
    assert completion_times(traj.obs["achieved"], traj.obs["goals"][0, -1:], 1e-5) == []
    with pytest.raises(ValueError, match="strategy must be one of"):
        InstructionRelabeler("most")


def test_evaluation_of_listed_tasks(tmp_path: Path) -> None:
    few = "--obs_kind crop --time_limit 12 --max_goals 3 --timesteps_per_epoch 12 --start_learning_at_epoch 0"
    run_example("16_crafter_instructions.py", tmp_path, few)
    log = (tmp_path / "tiny" / "metrics.jsonl").read_text()
    (row,) = rows(tmp_path / "tiny", "test")
    assert {f"Average {name} in crafter" for name in LOGGED} <= set(row["values"])
    more = "--ckpt 0 --eval_mode --eval_rollouts 2 --eval_tasks travel_4_4 collect_wood,eat_cow"
    text = run_example("16_crafter_instructions.py", tmp_path, f"{few} {more}")
    for task in ("travel_4_4", "collect_wood+eat_cow"):
        assert f"crafter_{task}" in text
        assert (tmp_path / "tiny" / "videos" / f"{task}.gif").stat().st_size > 1000
    assert (tmp_path / "tiny" / "metrics.jsonl").read_text() == log, "the run itself is left alone"
