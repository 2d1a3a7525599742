"""Atari against Gymnasium's own preprocessing, ale-py's own actions, and published scores of the random policy."""

import itertools
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
from run_inside import run_example
from tiny import rows

from amago.envs import AMAGOEnv
from amago.envs.builtin.ale_retro import ACTION_SPACES, BITS, AtariGame, atari_games, game_name
from amago.envs.statistics import AMAGO_ENV_LOG_PREFIX

ale_py = pytest.importorskip("ale_py", reason="ale-py is not installed: pip install 'amago[atari]'")
pytest.importorskip("cv2", reason="opencv is not installed: pip install 'amago[atari]'")

GAME_RETURN = f"{AMAGO_ENV_LOG_PREFIX} Game Return"


@pytest.mark.parametrize("grayscale", [False, True], ids=["colour", "grayscale"])
@pytest.mark.parametrize("game", ["Pong", "MsPacman"])
def test_pictures_and_points_are_those_of_gymnasiums_preprocessing(game: str, grayscale: bool) -> None:
    gym.register_envs(ale_py)
    bare = gym.make(f"ALE/{game}-v5", frameskip=1, repeat_action_probability=0.0, full_action_space=True)
    theirs = gym.wrappers.AtariPreprocessing(bare, noop_max=0, grayscale_obs=grayscale, grayscale_newaxis=grayscale)
    mine = AtariGame(game, sticky_action_prob=0.0, grayscale=grayscale)
    assert mine.observation_space.shape == theirs.observation_space.shape == (84, 84, 1 if grayscale else 3)
    (obs, _), (other, _) = mine.reset(seed=0), theirs.reset(seed=0)
    np.testing.assert_array_equal(obs, other)
    rng, points = np.random.default_rng(0), 0.0
    for _ in range(250):
        action = int(rng.integers(18))
        obs, reward, terminated, _, _ = mine.step(action)
        other, their_reward, their_terminated, _, _ = theirs.step(action)
        assert (reward, terminated) == (their_reward, their_terminated)
        points += abs(reward)
        if terminated:
            break
        np.testing.assert_array_equal(obs, other)
    assert points > 0
    theirs.close()


def test_bits_are_upstreams_actions() -> None:
    upstream = ale_py.AtariEnv.map_action_idx
    bits, indices = (AtariGame("Pong", kind, sticky_action_prob=0.0) for kind in ("multibinary", "discrete"))
    bits.reset(seed=0)
    indices.reset(seed=0)
    for pressed in itertools.product((0, 1), repeat=5):
        on = dict(zip(BITS, pressed, strict=True))
        action = upstream(on["RIGHT"] - on["LEFT"], on["UP"] - on["DOWN"], bool(on["FIRE"])).value
        np.testing.assert_array_equal(bits.step(np.array(pressed, dtype=np.int8))[0], indices.step(action)[0])


def test_each_life_is_a_rollout_and_the_game_goes_on() -> None:
    env = AtariGame("Breakout", terminal_on_life_loss=True)
    rng = np.random.default_rng(0)
    env.reset(seed=0)
    lives, total, logged = [env._console.lives()], 0.0, {}
    for _ in range(5):
        over = False
        while not over:
            _, reward, over, truncated, info = env.step(int(rng.integers(18)))
            total += reward
            assert not truncated
            assert info == {} or over
        lives.append(env._console.lives())
        logged |= info
        env.reset()
        if lives[-1]:
            assert info == {}
            assert env._console.lives() == lives[-1], "the same game"
    assert (lives, logged) == ([5, 4, 3, 2, 1, 0], {GAME_RETURN: total})
    assert env._console.lives() == 5, "a new game"

    over = False
    while not over:
        _, _, over, *_ = env.step(int(rng.integers(18)))
    env.reset(seed=1)
    assert env._console.lives() == 5, "a seed begins a game of its own"


def test_time_is_up_for_the_game_not_the_life() -> None:
    env = AtariGame("Breakout", time_limit=150, terminal_on_life_loss=True)
    rng = np.random.default_rng(0)
    env.reset(seed=0)
    steps, ends = 0, []
    while not ends or not ends[-1][1]:
        _, _, terminated, truncated, info = env.step(int(rng.integers(18)))
        steps += 1
        assert not (terminated and truncated)
        if terminated or truncated:
            ends.append((terminated, truncated, GAME_RETURN in info))
            with pytest.raises(gym.error.ResetNeeded):
                env.step(0)
            env.reset()
    assert steps == env.horizon == 150
    assert (ends[-1], ends[0]) == ((False, True, True), (True, False, False))
    assert env._console.lives() == 5


@pytest.mark.parametrize("kind", ACTION_SPACES)
@pytest.mark.parametrize("game", ["AirRaid", "MsPacman", "JourneyEscape"])
def test_spaces_are_honoured_through_the_library(game: str, kind: str) -> None:
    env = AMAGOEnv(AtariGame(game, kind, resolution=(52, 40), time_limit=15, grayscale=kind == "minimal"))
    assert env.env_name == f"atari_{game}"
    assert env.horizon == 15
    ts, _ = env.reset(seed=0)
    env.action_space.seed(0)
    space, over = env.observation_space["observation"], False
    assert space.shape == (52, 40, 1 if kind == "minimal" else 3)
    while not over:
        assert space.contains(ts.obs["observation"][0])
        ts, _, terminated, truncated, _ = env.step(env.action_space.sample())
        over = bool(terminated | truncated)
    whole = AtariGame(game, resolution=None)
    assert whole.observation_space.contains(whole.reset(seed=0)[0])
    assert whole.resolution == tuple(whole._console.getScreenDims())


def test_all_games_have_all_actions_and_their_own() -> None:
    assert len(atari_games()) == 108
    assert AtariGame("Pong").action_space.n == AtariGame("Seaquest").action_space.n == 18
    assert AtariGame("Pong", "minimal").action_space.n == 6
    assert AtariGame("Breakout", "minimal").action_space.n == 4
    for spelled in ("SpaceInvaders", "space_invaders", "spaceinvaders", "ALE/SpaceInvaders-v5"):
        assert game_name(spelled) == "SpaceInvaders"


def test_the_seed_decides_what_sticks() -> None:
    frames = []
    for sticky, seed in ((0.25, 0), (0.25, 1), (0.0, 0), (0.0, 1)):
        env = AtariGame("Pong", sticky_action_prob=sticky)
        env.reset(seed=seed)
        frames.append([env.step(action)[0].tobytes() for action in (0, 2, 3, 2, 3, 0) * 8])
    assert frames[0] != frames[1]
    assert frames[2] == frames[3]


def test_example_gives_each_actor_a_game(tmp_path: Path) -> None:
    words = "--parallel_actors 3 --action_space continuous --cnn nature --grayscale --life_loss --time_limit 10 --resolution 36"
    run_example("08_ale.py", tmp_path, f"{words} --games Pong Breakout")
    told = " ".join(key for row in rows(tmp_path / "tiny", "test") for key in row["values"])
    assert "atari_Pong" in told
    assert "atari_Breakout" in told
