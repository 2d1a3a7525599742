"""BabyAI against MiniGrid's own views, rules and worlds, and attempts of which the outcome is known."""

import contextlib
import io
import re
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from shortest_ways import shortest_way

from amago.envs.builtin import babyai as view
from amago.envs.builtin.babyai import (
    FAMILIES,
    LEVELS,
    OBS_KINDS,
    TEST_LEVELS,
    TRAIN_LEVELS,
    MultitaskMetaBabyAI,
    longest_mission,
)
from amago.envs.statistics import AMAGO_ENV_LOG_PREFIX
from benchmarks.suite.envs import memory_s7

minigrid = pytest.importorskip("minigrid", reason="MiniGrid is not installed: pip install 'amago[minigrid]'")

LEFT, RIGHT, FORWARD, PICKUP, DROP, TOGGLE, DONE = range(7)
STEPS = ((1, 0), (0, 1), (-1, 0), (0, -1))


def upstream(env: MultitaskMetaBabyAI) -> dict[str, Any]:
    """What MiniGrid itself would show now."""
    return type(env._env).gen_obs(env._env)  # type: ignore[no-any-return]


def decoded(bits: np.ndarray) -> np.ndarray:
    """MiniGrid's (type, colour, state) numbers from our bits."""
    constants = minigrid.core.constants
    out = np.zeros((*bits.shape[:2], 3), dtype=np.uint8)
    for at in np.ndindex(*bits.shape[:2]):
        names = [view.CHANNELS[i] for i in np.flatnonzero(bits[at])]
        out[at + (0,)] = constants.OBJECT_TO_IDX[names[0]]
        for name in names[1:]:
            if name in constants.COLOR_TO_IDX:
                out[at + (1,)] = constants.COLOR_TO_IDX[name]
            else:
                out[at + (2,)] = constants.STATE_TO_IDX[name]
    return out


def way_to_face(env: Any, targets: list[tuple[int, int]]) -> list[int]:
    """A shortest way to stand before one of these cells and look at it."""
    start = (int(env.agent_pos[0]), int(env.agent_pos[1]), int(env.agent_dir))

    def ahead(state: tuple[int, int, int]) -> tuple[int, int]:
        return state[0] + STEPS[state[2]][0], state[1] + STEPS[state[2]][1]

    def moves(state: tuple[int, int, int]) -> list[tuple[int, tuple[int, int, int]]]:
        x, y, d = state
        turns = [(LEFT, (x, y, (d - 1) % 4)), (RIGHT, (x, y, (d + 1) % 4))]
        return turns + [(FORWARD, (*ahead(state), d))] * (env.grid.get(*ahead(state)) is None)

    return shortest_way(start, lambda state: state != start and ahead(state) in targets, moves)


def test_the_levels_are_all_of_upstream() -> None:
    ids = {name for name in gym.registry if name.startswith("BabyAI-") and "Debug" not in name}
    assert len(LEVELS) == len(set(LEVELS))
    assert {re.sub(r"^BabyAI-|-v\d$", "", name) for name in ids} == set(LEVELS)
    assert set(TRAIN_LEVELS) | set(TEST_LEVELS) == set(LEVELS)
    assert not set(TRAIN_LEVELS) & set(TEST_LEVELS)
    for levels in FAMILIES.values():  # something of every kind is left for training
        assert set(levels) & set(TRAIN_LEVELS)


@pytest.mark.parametrize("level", LEVELS)
def test_every_level_keeps_its_spaces_and_is_what_upstream_makes(level: str) -> None:
    words = longest_mission(level)
    env = MultitaskMetaBabyAI(level, k_episodes=2, episode_length=9, mission_length=words)
    own = gym.make(re.sub("-v0$", "-v1", f"BabyAI-{level}-v0") if level == "GoToObjS6" else f"BabyAI-{level}-v0")
    env.action_space.seed(1)
    for seed in range(2):
        obs, _ = env.reset(seed=seed)
        with contextlib.redirect_stdout(io.StringIO()):
            theirs, _ = own.reset(seed=env.seed)
        assert env.mission == theirs["mission"]
        assert " ".join(view.WORDS[t] for t in obs["mission"] if t) == env.mission.replace(",", "")
        over, steps, last_time_limit = False, 0, env._env.max_steps
        assert last_time_limit <= 9
        while not over:
            assert env.observation_space.contains(obs)
            np.testing.assert_array_equal(decoded(obs["observation"]), upstream(env)["image"])
            assert obs["status"][:4].tolist() == [d == env._env.agent_dir for d in range(4)]
            obs, reward, over, truncated, _ = env.step(env.action_space.sample())
            assert not truncated
            assert 0 <= reward <= 1
            steps += 1
        assert steps <= env.horizon == 18


@pytest.mark.parametrize("level", ["GoToRedBallGrey", "GoToLocalS6N3", "GoToObj"])
def test_the_shortest_way_succeeds_in_every_attempt(level: str) -> None:
    env = MultitaskMetaBabyAI(level, k_episodes=3, episode_length=40, mission_length=5)
    for seed in range(5):
        obs, _ = env.reset(seed=seed)
        first, total = obs, 0.0
        for attempt in range(3):
            assert obs["status"][4:].tolist() == pytest.approx([1, attempt / 3, 0])
            for key in ("observation", "mission"):  # the same world, and the same place in it
                np.testing.assert_array_equal(obs[key], first[key])
            way = way_to_face(env._env, [tuple(map(int, p)) for p in env._env.instrs.desc.obj_poss])
            limit = env._env.max_steps
            assert limit == min(40, 36 if "S6" in level else 64)
            for i, action in enumerate(way):
                obs, reward, over, _, info = env.step(action)
                last = i == len(way) - 1
                assert reward == pytest.approx(1 - 0.9 * len(way) / limit if last else 0)
                assert over == (last and attempt == 2)
                assert bool(info) == last
                if not last:
                    assert obs["status"][4:].tolist() == pytest.approx([0, attempt / 3, (i + 1) / limit])
            total += reward
            assert info[f"{AMAGO_ENV_LOG_PREFIX} Attempt {attempt} Success"] == 1
            assert info[f"{AMAGO_ENV_LOG_PREFIX} Attempt {attempt} Return"] == reward
        assert info[f"{AMAGO_ENV_LOG_PREFIX} Success Rate"] == 1
        assert 0.3 < total <= 3
        with pytest.raises(gym.error.ResetNeeded):
            env.step(DONE)


def test_attempts_that_fail_take_their_time() -> None:
    env = MultitaskMetaBabyAI("GoToLocal", k_episodes=2, episode_length=30, mission_length=5)
    env.reset(seed=3)
    for step in range(1, 61):
        _, reward, over, truncated, info = env.step(DONE)
        assert (reward, over, truncated) == (0, step == 60, False)
        assert bool(info) == (step in (30, 60))
    assert info == {
        f"{AMAGO_ENV_LOG_PREFIX} Attempt 1 Success": 0.0,
        f"{AMAGO_ENV_LOG_PREFIX} Attempt 1 Return": 0.0,
        f"{AMAGO_ENV_LOG_PREFIX} Success Rate": 0.0,
    }


def test_splits() -> None:
    few = MultitaskMetaBabyAI("GoToObjS4", num_seeds=3, mission_length=5)
    tests = MultitaskMetaBabyAI("GoToObjS4", split="test", num_seeds=3, mission_length=5)
    drawn: tuple[list[int], list[int]] = ([], [])
    for env, seeds in ((few, drawn[0]), (tests, drawn[1])):
        for _ in range(30):
            env.reset()
            seeds.append(env.seed)
    assert set(drawn[0]) == {0, 1, 2}
    assert min(drawn[1]) >= 2**30
    assert (len(set(drawn[1])), few.env_name) == (30, "babyai_GoToObjS4")
    assert (tests.env_name, MultitaskMetaBabyAI().levels) == ("babyai_GoToObjS4-test", TRAIN_LEVELS)
    assert MultitaskMetaBabyAI(split="test").levels == TEST_LEVELS


@pytest.mark.parametrize("kind", OBS_KINDS)
def test_kinds_of_observation(kind: str) -> None:
    env = MultitaskMetaBabyAI(
        ["GoToLocal", "OpenRedDoor"], obs_kind=kind, grid_size=9, tile_size=6, episode_length=4, mission_length=5,
        render_mode="rgb_array",
    )  # fmt: skip
    shape = {"partial-grid": (7, 7, 17), "full-grid": (9, 9, 17), "partial-image": (42, 42, 3), "full-image": (54, 54, 3)}[kind]
    assert env.observation_space["observation"].shape == shape
    for seed in range(3):
        obs, _ = env.reset(seed=seed)
        for _ in range(8):
            assert env.observation_space.contains(obs)
            if kind == "partial-image":
                np.testing.assert_array_equal(obs["observation"], env._env.get_pov_render(6))
            if kind == "full-image":
                own = env._env.get_full_render(False, 6)
                np.testing.assert_array_equal(obs["observation"][: own.shape[0], : own.shape[1]], own)
                assert not obs["observation"][own.shape[0] :].any()
            obs, *_ = env.step(RIGHT)
    assert env.render().shape == (24 * env._env.height, 24 * env._env.width, 3)


def test_what_does_not_fit_is_refused() -> None:
    env = MultitaskMetaBabyAI("OneRoomS20", obs_kind="full-grid", grid_size=19, mission_length=9)
    with pytest.raises(ValueError, match=r"grid_size must be at least 20.*OneRoomS20.*got 19"):
        env.reset(seed=0)
    short = MultitaskMetaBabyAI("GoToLocal", mission_length=4)
    with pytest.raises(ValueError, match="mission_length must be at least 5"):
        short.reset(seed=0)


def test_a_memory_room_shows_what_minigrid_shows_and_logs_success():
    env, objects = memory_s7(), minigrid.core.constants.OBJECT_TO_IDX
    kinds, ends = [objects[name] for name in ("unseen", "empty", "wall", "key", "ball")], set()
    for seed in range(40):
        (obs, _), rng, over = env.reset(seed=seed), np.random.default_rng(seed), False
        while not over:
            seen = env.unwrapped.gen_obs()["image"][..., 0]
            np.testing.assert_array_equal(obs.reshape(7, 7, 5), seen[..., None] == kinds)
            obs, reward, terminated, truncated, info = env.step(rng.integers(3))
            over = terminated or truncated
        success = tuple(env.unwrapped.agent_pos) == env.unwrapped.success_pos
        assert (info[f"{AMAGO_ENV_LOG_PREFIX} Success"], reward > 0) == (success, success)
        ends.add((terminated, success))
    assert ends >= {(True, True), (True, False)}
