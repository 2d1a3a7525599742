"""POPGym against upstream's own environments, conservation laws, and random players."""

import random
from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np
import pytest

from amago.envs import AMAGOEnv
from amago.envs.builtin.popgym_envs import GAMES, MULTI_DOMAIN_GAMES, MultiDomainPOPGym, POPGymGame
from amago.envs.statistics import AMAGO_ENV_LOG_PREFIX

popgym = pytest.importorskip("popgym", reason="POPGym is not installed: pip install 'amago[popgym]'", exc_type=ImportError)
pytest.importorskip("mazelib", reason="mazelib is not installed: pip install 'amago[popgym]'")

WARM_UP = f"{AMAGO_ENV_LOG_PREFIX} Warm-up Return"


def test_they_are_all_of_upstream() -> None:
    assert set(GAMES) == {cls.__name__ for cls in popgym.envs.ALL}
    assert (len(GAMES), len(MULTI_DOMAIN_GAMES)) == (48, 27)


@pytest.mark.parametrize("game", GAMES)
def test_spaces_horizon_and_seed(game: str) -> None:
    env, twin = POPGymGame(game), POPGymGame(game)
    env.action_space.seed(0)
    obs, _ = env.reset(seed=7)
    other, _ = twin.reset(seed=7)
    for _ in range(2):  # the second episode is drawn by the generator that the first has seeded
        steps, over = 0, False
        assert obs["timer"] == 0
        while not over:
            assert env.observation_space.contains(obs), obs
            assert repr(obs) == repr(other)
            action = env.action_space.sample()
            obs, reward, over, truncated, info = env.step(action)
            other, *same = twin.step(action)
            assert same == [reward, over, truncated, info]
            assert not truncated
            steps += 1
            assert obs["timer"] == np.float32(steps / env.horizon)
        assert env.observation_space.contains(obs), obs
        assert steps <= env.horizon
        obs, other = env.reset()[0], twin.reset()[0]


def test_without_the_timer_everything_is_as_upstream_says() -> None:
    """Step by step, the wrapper adds and takes nothing; only the way in which an episode is over differs."""
    for name, cls in (
        ("RepeatFirstEasy", popgym.envs.RepeatFirstEasy),
        ("MultiarmedBanditEasy", popgym.envs.MultiarmedBanditEasy),
    ):
        for as_done in (True, False):
            mine, theirs = POPGymGame(name, timer=False, truncated_is_done=as_done), cls()
            assert mine.observation_space == theirs.observation_space
            assert mine.reset(seed=3)[0] == theirs.reset(seed=3)[0]
            over = False
            while not over:
                obs, reward, terminated, truncated, _ = theirs.step(1)
                expected = (terminated or truncated, False) if as_done else (terminated, truncated)
                assert mine.step(1)[:4] == (obs, reward, *expected)
                over = terminated or truncated


def test_a_cell_of_a_board_can_be_one_choice() -> None:
    flat, plain = (POPGymGame("BattleshipEasy", flat_actions=given) for given in (True, False))
    assert (flat.action_space, repr(flat.reset(seed=2))) == (gym.spaces.Discrete(64), repr(plain.reset(seed=2)))
    for cell in range(20, 50, 3):
        assert repr(flat.step(cell)) == repr(plain.step(np.array([cell // 8, cell % 8])))


def test_mazes_depend_on_their_seed_alone() -> None:
    """Upstream draws them with the generators of the process, which it seeds, too."""
    one, two = POPGymGame("LabyrinthEscapeEasy"), POPGymGame("LabyrinthEscapeEasy")
    random.seed(5)
    np.random.seed(5)
    before = random.getstate(), np.random.get_state()[1].tolist()
    mazes: tuple[list[str], list[str]] = ([], [])
    for env, seen in ((one, mazes[0]), (two, mazes[1])):
        env.reset(seed=11)
        for _ in range(3):
            seen.append(str(env._env.maze.grid))
            env.reset()
            if env is two:
                continue
            assert (random.getstate(), np.random.get_state()[1].tolist()) == before
    assert (mazes[0], len(set(mazes[0]))) == (mazes[1], 3)


def test_multi_domain_pays_the_last_episode_only() -> None:
    env = MultiDomainPOPGym(["RepeatFirstEasy", "MineSweeperEasy", "CountRecallEasy"], warmup_episodes=2)
    env.action_space.seed(0)
    games = set()
    for seed in range(12):
        obs, _ = env.reset(seed=seed)
        games.add(env.game)
        shown, paid, openings, over, episode = [0.0, 0.0, 0.0], 0.0, 0, False, 0
        assert obs["status"].tolist() == [0.0, 1.0, 1.0, 0.0]
        while not over:
            obs, reward, over, truncated, info = env.step(env.action_space.sample())
            status = obs["status"]
            assert not truncated
            assert env.observation_space.contains(obs)
            shown[episode] += float(status[0])
            paid += reward
            assert reward == (0.0 if episode < 2 else pytest.approx(float(status[0])))
            episode += int(status[1])
            assert status[2] == (episode < 2)
            openings += int(status[1])
        assert openings == 2
        assert paid == pytest.approx(shown[2], abs=1e-5)
        assert set(info) == {WARM_UP}
        assert info[WARM_UP] == pytest.approx(shown[0] + shown[1], abs=1e-5)
    assert games == set(env.games)


def test_what_multi_domain_shows_can_be_read_back() -> None:
    """The bits are the one-hot numbers of the game itself, played with the same seed."""
    for game in ("AutoencodeEasy", "ConcentrationHard", "HigherLowerEasy"):
        env = MultiDomainPOPGym([game], warmup_episodes=0)
        obs, _ = env.reset(seed=0)
        rng = gym.utils.seeding.np_random(0)[0]
        rng.integers(1)  # which game
        own = POPGymGame(game, timer=False)
        expected, _ = own.reset(seed=int(rng.integers(2**31)))
        for _ in range(20):
            assert np.array_equal(obs["observation"], gym.spaces.flatten(own.observation_space, expected))
            obs, *_ = env.step(1)
            expected, *_ = own.step(1)


def test_all_27_have_common_spaces_and_a_name_each() -> None:
    env = AMAGOEnv(MultiDomainPOPGym())
    assert env.action_space == gym.spaces.Discrete(144)
    assert env.observation_space["observation"].shape == (52 * 14,)
    names = set()
    for seed in range(200):
        env.reset(seed=seed)
        names.add(env.env_name)
        env.step(np.array([[seed % 144]]))
    assert names == {f"popgym_{game}" for game in MULTI_DOMAIN_GAMES}
    assert env.horizon == 2 * 831


@pytest.mark.parametrize("env", [POPGymGame, lambda: MultiDomainPOPGym(["RepeatFirstEasy"])], ids=["game", "multi-domain"])
def test_a_step_without_a_rollout_is_refused(env: Callable[[], Any]) -> None:
    with pytest.raises(gym.error.ResetNeeded, match="call reset"):
        env().step(0)
