"""Retro against stable-retro's own environment, and on a second console with a game written here, byte by byte."""

import gzip
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from hashlib import sha1
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from run_inside import run_example
from tiny import rows

from amago.envs.builtin._retro_emulator import fit
from amago.envs.builtin.ale_retro import RetroArcade, buttons_of, game_colour, retro_levels

retro = pytest.importorskip("stable_retro", reason="stable-retro is not installed: pip install 'amago[retro]'")
cv2 = pytest.importorskip("cv2", reason="opencv is not installed: pip install 'amago[retro]'")

AIRSTRIKER = "Airstriker-Genesis-v0"
GENESIS = ("B", "A", "MODE", "START", "UP", "DOWN", "LEFT", "RIGHT", "C", "Y", "X", "Z")

# A game for the NES: each frame in which A is held is a point, each with B three; 40 points or more end it. The score is the byte at 0.
_PROGRAM = """
    78 D8 A2 FF 9A A9 00 85 00          SEI, CLD, stack, score = 0
    2C 02 20 10 FB 2C 02 20 10 FB       wait for the picture unit, twice
    A9 3F 8D 06 20 A9 00 8D 06 20       background colour: number 16, red
    A9 16 8D 07 20 A9 00 8D 06 20 8D 06 20
    A9 80 8D 00 20 4C 2F C0             interrupt at each frame; then wait for ever
"""
_EACH_FRAME = """
    A9 01 8D 16 40 A9 00 8D 16 40       ask the controller
    AD 16 40 29 01 18 65 00 85 00       A: add 1
    AD 16 40 29 01 F0 07                B: else leave
    A5 00 18 69 03 85 00 40             add 3
    40
"""


def assembled(text: str) -> bytes:
    return bytes(int(word, 16) for line in text.splitlines() for word in re.findall(r"\b[0-9A-F]{2}\b", line[:58]))


def tapping_game() -> bytes:
    """An iNES file: 16 kB of program at C000, 8 kB of (empty) pictures."""
    program = bytearray(0x4000)
    start, each = assembled(_PROGRAM), assembled(_EACH_FRAME)
    start = start[:-2] + (0xC000 + len(start) - 3).to_bytes(2, "little")  # JMP to itself
    program[: len(start)], program[0x100 : 0x100 + len(each)] = start, each
    for vector, address in ((0x3FFA, 0xC100), (0x3FFC, 0xC000), (0x3FFE, 0xC100)):
        program[vector : vector + 2] = address.to_bytes(2, "little")
    return b"NES\x1a" + bytes([1, 1]) + bytes(10) + bytes(program) + bytes(0x2000)


@pytest.fixture(scope="module")
def games(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the game Taps, and one saved level: 30 points are there already."""
    home = tmp_path_factory.mktemp("games")
    taps = home / "Taps-Nes-v0"
    taps.mkdir()
    rom = tapping_game()
    (taps / "rom.nes").write_bytes(rom)
    (taps / "rom.sha").write_text(sha1(rom[16:]).hexdigest() + "\n")
    (taps / "data.json").write_text(json.dumps({"info": {"score": {"address": 0, "type": "|u1"}}}))
    over = {"variables": {"score": {"op": "greater-or-equal", "reference": 40}}}
    (taps / "scenario.json").write_text(json.dumps({"done": over, "reward": {"variables": {"score": {"reward": 1.0}}}}))
    script = (  # in a process of its own: a process can hold one emulator
        "import gzip, sys, stable_retro as retro, numpy as np\n"
        "kinds = retro.data.Integrations; kinds.add_custom_path(sys.argv[1])\n"
        "env = retro.RetroEnv('Taps-Nes-v0', retro.State.NONE, inttype=kinds.CUSTOM, render_mode=None)\n"
        "env.reset(); a = np.zeros(9, dtype=np.int8); a[8] = 1\n"
        "while env.data.lookup_value('score') < 30: env.step(a)\n"
        "gzip.open(sys.argv[1] + '/Taps-Nes-v0/Thirty.state', 'wb').write(env.em.get_state())\n"
    )
    subprocess.run([sys.executable, "-c", script, str(home)], check=True, timeout=60)
    assert gzip.open(taps / "Thirty.state").read()
    return home


@pytest.fixture
def arcade() -> Iterator[Any]:
    """Makes environments, and closes them."""
    made: list[RetroArcade] = []

    def make(*arguments: Any, **options: Any) -> RetroArcade:
        made.append(RetroArcade(*arguments, **options))
        return made[-1]

    yield make
    for env in made:
        env.close()


def press(env: RetroArcade, *names: str) -> np.ndarray:
    return np.array([int(name in names) for name in env.buttons], dtype=np.int8)


def test_pictures_and_points_are_upstreams(arcade: Any) -> None:
    env = arcade(sticky_actions=0.0, resolution=(84, 100), border=3, time_limit=400)
    assert env.buttons == GENESIS
    with closing(retro.RetroEnv(AIRSTRIKER, "Level1", inttype=retro.data.Integrations.STABLE, render_mode=None)) as theirs:
        obs, screen = env.reset(seed=0)[0], theirs.reset()[0]
        rng, points = np.random.default_rng(0), 0.0
        for _ in range(400):
            picture = fit(cv2, screen, 78, 94)
            top, left = (84 - picture.shape[0]) // 2, (100 - picture.shape[1]) // 2
            np.testing.assert_array_equal(obs[top : top + picture.shape[0], left : left + picture.shape[1]], picture)
            np.testing.assert_array_equal(env.render(), screen)
            action = rng.integers(0, 2, size=12).astype(np.int8)
            expected, over = 0.0, False
            for _ in range(4):
                screen, paid, over, _, _ = theirs.step(action)
                expected += paid
                if over:
                    break
            obs, reward, terminated, truncated, info = env.step(action)
            assert (reward, terminated, info) == (expected, over, {})
            points += reward
            if terminated:
                break
        assert points > 0
        assert points % 20 == 0, "an enemy pays 20: nothing is clipped"
        assert terminated or truncated


def test_environments_side_by_side_do_not_disturb_each_other(arcade: Any) -> None:
    def rollout(envs: list[RetroArcade], seeds: list[int]) -> list[list[bytes]]:
        seen = [[env.reset(seed=seed)[0].tobytes()] for env, seed in zip(envs, seeds, strict=True)]
        rng = np.random.default_rng(3)
        for _ in range(30):
            action = rng.integers(0, 2, size=12).astype(np.int8)
            for env, own in zip(envs, seen, strict=True):
                own.append(env.step(action)[0].tobytes())
        return seen

    one, two = arcade(sticky_actions=0.5), arcade(sticky_actions=0.5)
    together = rollout([one, two], [0, 1])
    assert together[0] != together[1], "the seed decides when buttons are late"
    assert (rollout([two], [0])[0], rollout([one], [1])[0]) == (together[0], together[1])


def test_buttons_with_one_name_are_one_bit(games: Path, arcade: Any) -> None:
    taps = arcade(["Taps-Nes"], directory=str(games), sticky_actions=0.0)
    assert taps.buttons == ("B", "SELECT", "START", "UP", "DOWN", "LEFT", "RIGHT", "A")
    both = arcade([AIRSTRIKER, "Taps-Nes-v0"], directory=str(games), sticky_actions=0.0)
    assert both.buttons == (*GENESIS, "SELECT")
    for env in (taps, both):
        env.reset(seed=0)
        for seed in range(20):
            if env.level.game == "Taps-Nes-v0":
                break
            env.reset(seed=seed)
        assert env.step(press(env))[1] == 0.0, "it takes two frames to start"
        assert env.level.buttons == ("B", None, "SELECT", "START", "UP", "DOWN", "LEFT", "RIGHT", "A")
        assert env.step(press(env, "A"))[1] == 4.0, "a point a frame"
        assert (env.step(press(env, "B"))[1], env.step(press(env, "A", "B"))[1]) == (12.0, 16.0)
        assert env.step(press(env))[1] == 0.0
        others = [name for name in env.buttons if name not in ("A", "B", "START", "SELECT")]
        assert env.step(press(env, *others))[1] == 0.0, "buttons that the NES lacks do nothing"


def test_pictures_of_all_consoles_have_one_shape_and_a_colour_of_their_own(games: Path, arcade: Any) -> None:
    env = arcade([AIRSTRIKER, "Taps-Nes-v0"], directory=str(games), resolution=(60, 90), border=5)
    seen: dict[str, np.ndarray] = {}
    for seed in range(12):
        env.reset(seed=seed)
        obs, *_ = env.step(press(env))
        assert env.observation_space.contains(obs)
        seen.setdefault(env.level.game, obs)
        frame = np.ones((60, 90), dtype=bool)
        frame[5:-5, 5:-5] = False
        assert (obs[frame] == game_colour(env.level.game)).all()
    assert set(seen) == {AIRSTRIKER, "Taps-Nes-v0"}
    assert game_colour(AIRSTRIKER) != game_colour("Taps-Nes-v0")
    red = seen["Taps-Nes-v0"][30, 45].astype(int)
    assert red[0] > red[1] + 60, "the game paints its whole screen red"
    height, width = env.render().shape[:2]
    picture = fit(cv2, env.render(), 50, 80)
    assert picture.shape[0] / picture.shape[1] == pytest.approx(height / width, rel=0.03)


def test_levels_begin_where_they_were_saved(games: Path, arcade: Any) -> None:
    assert [level.name for level in retro_levels(["Taps-Nes:*", AIRSTRIKER], str(games))] == [
        "Taps-Nes-v0:Thirty",
        f"{AIRSTRIKER}:Level1",
    ]
    env = arcade(["Taps-Nes", "Taps-Nes:Thirty"], directory=str(games), sticky_actions=0.0)
    lengths: dict[str, set[int]] = {}
    env.reset(seed=0)
    for _ in range(12):
        steps, terminated, points = 0, False, 0.0
        while not terminated:
            _, reward, terminated, truncated, _ = env.step(press(env, "A"))
            assert not truncated
            steps, points = steps + 1, points + reward
        lengths.setdefault(env.env_name, set()).add(steps)
        assert points == (10.0 if env.level.state == "Thirty" else 40.0)
        with pytest.raises(gym.error.ResetNeeded):
            env.step(press(env))
        env.reset()
    assert lengths == {"retro_Taps-Nes-v0": {11}, "retro_Taps-Nes-v0_Thirty": {3}}, "it takes two frames to start"


def test_what_goes_wrong_there_is_told_here(arcade: Any) -> None:
    env = arcade()
    env.reset(seed=0)
    with pytest.raises(RuntimeError, match="the emulator failed: FileNotFoundError: No romfiles found for game: Nothing"):
        env._emulator.ask(do="play", game="Nothing", state=None, directory=None, size=[8, 8])
    os.kill(env._emulator._process.pid, signal.SIGKILL)
    with pytest.raises(RuntimeError, match=r"exit code -9.*step"):
        env.step(press(env))


def test_example_trains_on_two_consoles_and_tests_on_another_level(games: Path, tmp_path: Path) -> None:
    words = "--time_limit 10 --resolution 40 --cnn nature --levels Airstriker-Genesis Taps-Nes --test_levels Taps-Nes:Thirty"
    run_example("17_retro_arcade.py", tmp_path, f"{words} --directory {os.path.relpath(games, tmp_path)}")
    told = " ".join(key for row in rows(tmp_path / "tiny", "test") for key in row["values"])
    assert "retro_Taps-Nes-v0_Thirty" in told
    assert "Airstriker" not in told
    assert len(buttons_of(retro_levels([AIRSTRIKER, "Taps-Nes"], str(games)))) == 13
