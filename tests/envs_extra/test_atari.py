"""Atari against Gymnasium's own preprocessing, ale-py's own actions, and published scores of the random policy."""

from __future__ import annotations

import itertools
import json
import re
import sys
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from run_inside import run_script

from amago.envs import AMAGOEnv
from amago.envs.builtin.atari import ACTION_SPACES, BITS, AtariGame, atari_games, game_name
from amago.envs.metrics import AMAGO_ENV_LOG_PREFIX

ale_py = pytest.importorskip("ale_py", reason="ale-py is not installed: pip install 'amago[atari]'")
pytest.importorskip("cv2", reason="opencv is not installed: pip install 'amago[atari]'")

EXAMPLE = Path(__file__).parents[2] / "examples" / "08_ale.py"
GAME_RETURN = f"{AMAGO_ENV_LOG_PREFIX} Game Return"


def play(env: AtariGame, seed: int, games: int = 1) -> list[float]:
    """Returns of a random policy."""
    env.action_space.seed(seed)
    env.reset(seed=seed)
    returns, total = [], 0.0
    while len(returns) < games:
        _, reward, terminated, truncated, _ = env.step(env.action_space.sample())
        total += reward
        if terminated or truncated:
            returns.append(total)
            total = 0.0
            env.reset()
    return returns


@pytest.mark.parametrize("module", ["ale_py", "cv2"])
def test_without_its_packages_the_extra_is_named(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ImportError, match=rf"{module} could not be imported.*pip install 'amago\[atari\]'"):
        AtariGame("Pong")


# ---- against upstream --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("grayscale", [False, True], ids=["colour", "grayscale"])
@pytest.mark.parametrize("game", ["Pong", "MsPacman"])
def test_pictures_and_points_are_those_of_gymnasiums_preprocessing(game: str, grayscale: bool) -> None:
    gym.register_envs(ale_py)
    bare = gym.make(f"ALE/{game}-v5", frameskip=1, repeat_action_probability=0.0, full_action_space=True)
    theirs = gym.wrappers.AtariPreprocessing(bare, noop_max=0, grayscale_obs=grayscale, grayscale_newaxis=grayscale)
    mine = AtariGame(game, sticky_actions=0.0, grayscale=grayscale)
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


def test_bits_and_joystick_are_upstreams_actions() -> None:
    upstream = ale_py.AtariEnv.map_action_idx
    bits = AtariGame("Pong", "multibinary")
    for pressed in itertools.product((0, 1), repeat=5):
        on = dict(zip(BITS, pressed, strict=True))
        expected = upstream(on["RIGHT"] - on["LEFT"], on["UP"] - on["DOWN"], bool(on["FIRE"]))
        assert bits._joystick(np.array(pressed, dtype=np.int8)) == (expected, 1.0)
    stick = AtariGame("Pong", "continuous")
    for distance, angle, button in itertools.product((0.0, 0.4, 0.8, 1.0), np.linspace(-3.1, 3.1, 9), (0.2, 0.9)):
        x, y = distance * np.cos(angle), distance * np.sin(angle)
        place = [int(v > 0.5) - int(v < -0.5) for v in (x, y)]
        action, strength = stick._joystick(np.array([distance, angle, button], dtype=np.float32))
        assert action == upstream(place[0], place[1], button > 0.5)
        assert strength == pytest.approx(distance)


def test_a_bit_moves_the_paddle() -> None:
    """Pong's right paddle, which is ours, goes up with RIGHT and down with LEFT, in every kind of action."""

    def rows(env: AtariGame, action: Any) -> float:
        env.reset(seed=0)
        for _ in range(40):
            env.step(action)
        paddle = np.all(env.render()[35:194, 140:144] == (92, 186, 92), axis=-1)
        assert paddle.any()
        return float(np.argwhere(paddle)[:, 0].mean())

    for kind, up, down in (
        ("discrete", 3, 4),
        ("minimal", 2, 3),
        ("multibinary", [0, 1, 0, 0, 0], [0, 0, 1, 0, 0]),
        ("continuous", [1.0, 0.0, 0.0], [1.0, 3.14, 0.0]),
    ):
        env = AtariGame("Pong", kind, sticky_actions=0.0, render_mode="rgb_array")
        dtype = env.action_space.dtype
        high, low = (rows(env, np.array(a, dtype=dtype) if isinstance(a, list) else a) for a in (up, down))
        assert high < 40, kind
        assert low > 110, kind


# ---- published scores --------------------------------------------------------------------------------------------------------


def test_random_scores_are_the_published_ones_and_not_clipped() -> None:
    """Of the random policy: Pong -20.7, Breakout 1.7, Q*bert 163.9 (Mnih et al. 2015)."""
    assert np.mean(play(AtariGame("Pong", sticky_actions=0.0), 0)) <= -18
    assert 0.2 <= np.mean(play(AtariGame("Breakout", sticky_actions=0.0), 0, games=6)) <= 3.5
    scores = play(AtariGame("Qbert", sticky_actions=0.0), 0, games=6)
    assert 80 <= np.mean(scores) <= 320
    assert all(score % 25 == 0 for score in scores), "a field pays 25"


# ---- rollouts ----------------------------------------------------------------------------------------------------------------


def trace(env: AtariGame, seed: int) -> list[Any]:
    """A seeded rollout that is cut, then one without a seed."""
    out: list[Any] = []
    rng = np.random.default_rng(5)
    for own in (seed, None):
        out.append(env.reset(seed=own)[0].tobytes())
        for _ in range(60):
            obs, reward, *_ = env.step(int(rng.integers(18)))
            out += [obs.tobytes(), reward]
    return out


def test_the_seed_decides_what_sticks() -> None:
    one, two = AtariGame("Pong"), AtariGame("Pong")
    first = trace(one, 0)
    other = trace(two, 1)
    assert first != other
    assert trace(two, 0) == first
    assert trace(one, 1) == other
    sure = AtariGame("Pong", sticky_actions=0.0)
    assert trace(sure, 0) == trace(sure, 1)


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
    assert lives == [5, 4, 3, 2, 1, 0]
    assert logged == {GAME_RETURN: total}
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
    assert ends[-1] == (False, True, True)
    assert ends[0] == (True, False, False)
    assert env._console.lives() == 5


# ---- spaces and names --------------------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize("spelled", ["SpaceInvaders", "space_invaders", "spaceinvaders", "ALE/SpaceInvaders-v5"])
def test_spellings(spelled: str) -> None:
    assert game_name(spelled) == "SpaceInvaders"


WRONG: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"game": "Pacmann"}, ValueError, "game is 'Pacmann', but Atari has Pacman"),
    ({"action_space": "box"}, ValueError, "action_space must be one of discrete, minimal, multibinary, continuous, got 'box'"),
    ({"resolution": 84}, TypeError, "resolution must be (height, width), got 84"),
    ({"resolution": (0, 84)}, ValueError, "resolution must be at least 1, got 0"),
    ({"grayscale": 1}, TypeError, "grayscale must be True or False, got 1"),
    ({"sticky_actions": 1.0}, ValueError, "sticky_actions must be in [0, 1), got 1.0"),
    ({"frame_skip": 0}, ValueError, "frame_skip must be at least 1, got 0"),
    ({"time_limit": 0}, ValueError, "time_limit must be at least 1, got 0"),
    ({"render_mode": "human"}, ValueError, "render_mode must be None or one of ['rgb_array'], got 'human'"),
]


@pytest.mark.parametrize(("arguments", "error", "said"), WRONG, ids=[w[2] for w in WRONG])
def test_wrong_arguments_are_named(arguments: dict[str, Any], error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=re.escape(said)):
        AtariGame(**arguments)


def test_wrong_actions_are_refused() -> None:
    for kind, action, said in (
        ("discrete", 18, "action must be in 0..17, got 18"),
        ("minimal", 6, "action must be in 0..5, got 6"),
        ("multibinary", [0, 0, 2, 0, 0], "action must be in MultiBinary(5), got [0, 0, 2, 0, 0]"),
        ("continuous", np.array([2, 0, 0], dtype=np.float32), "action must be in Box("),
    ):
        env = AtariGame("Pong", kind)
        env.reset(seed=0)
        with pytest.raises(ValueError, match=re.escape(said)):
            env.step(action)
    with pytest.raises(ValueError, match="render_mode"):
        env.render()


# ---- the example -------------------------------------------------------------------------------------------------------------

FEW = (
    "--run_name tiny --buffer_dir . --epochs 1 --grads_per_epoch 2 --timesteps_per_epoch 24 --batch_size 4 --memory_size 16 "
    "--memory_layers 1 --seed 0 --quiet --no_async --time_limit 10 --resolution 36 --games Pong Breakout"
)


@pytest.mark.parametrize("kind", ["multibinary", "continuous"])
def test_example_gives_each_actor_a_game(kind: str, tmp_path: Path) -> None:
    arguments = [
        *FEW.split(),
        "--parallel_actors",
        "3",
        "--action_space",
        kind,
        "--cnn",
        "nature",
        "--grayscale",
        "--life_loss",
    ]
    outcome = run_script(EXAMPLE, arguments, tmp_path)
    assert outcome.code == 0, outcome.text
    rows = [json.loads(line) for line in (tmp_path / "tiny" / "metrics.jsonl").read_text().splitlines()]
    told = " ".join(key for row in rows if row["section"] == "test" for key in row["values"])
    assert "atari_Pong" in told
    assert "atari_Breakout" in told


def test_example_refuses_more_games_than_actors(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="parallel_actors must be at least 2, one for each of the games, got 1"):
        run_script(EXAMPLE, [*FEW.split(), "--parallel_actors", "1"], tmp_path)
