"""Procgen against an explorer who finds every exit, and against EnvPool's own environments."""

import sys
from typing import Any

import gymnasium as gym
import numpy as np
import pytest

from amago.envs.builtin.procgen_envs import GAMES, MEMORY_GAMES, MODES, TwoAttemptMTProcgen
from amago.envs.statistics import AMAGO_ENV_LOG_PREFIX

envpool = pytest.importorskip("envpool", reason="EnvPool is not installed: pip install 'amago[procgen]'")
pytest.importorskip(
    "envpool.procgen", reason="Procgen draws with Qt 5: apt-get install libqt5core5a libqt5gui5", exc_type=ImportError
)

ATTEMPT = f"{AMAGO_ENV_LOG_PREFIX} Attempt"
COMPLETE = f"{AMAGO_ENV_LOG_PREFIX} Level Complete"


def bare(game_id: str, level: int) -> Any:
    return envpool.make(
        game_id, env_type="gymnasium", num_envs=1, num_threads=1, seed=7, channel_first=False, num_levels=1, start_level=level
    )


def test_without_qt_the_system_packages_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    class NoQt:
        """What the dynamic linker says, through Python's import."""

        def find_spec(self, name: str, *_: Any) -> None:
            if name == "envpool.procgen":
                raise ImportError("libQt5Gui.so.5: cannot open shared object file: No such file or directory")

    monkeypatch.delitem(sys.modules, "envpool.procgen")
    monkeypatch.setattr(sys, "meta_path", [NoQt(), *sys.meta_path])
    with pytest.raises(ImportError, match=r"libQt5Gui\.so\.5: cannot open.*apt-get install .*libqt5core5a libqt5gui5"):
        TwoAttemptMTProcgen()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("game", GAMES)
def test_attempts_are_upstreams_episodes_of_one_level(game: str, mode: str) -> None:
    env, limit = TwoAttemptMTProcgen([game], mode=mode, time_limit=40, border=0), 40
    obs, info = env.reset(seed=1)
    assert info == {}
    difficulty = {"easy": "Easy", "hard": "Hard", "memory-hard": "Memory" if game in MEMORY_GAMES else "Hard"}[mode]
    actions = np.random.default_rng(2).integers(0, 15, size=limit)
    for attempt in range(2):
        upstream = bare(f"{game.capitalize()}{difficulty}-v0", env.level)
        theirs, told = upstream.reset()
        assert told["level_seed"][0] == env.level
        np.testing.assert_array_equal(obs, theirs[0])
        total, over = 0.0, False
        for step in range(limit):
            theirs, paid, their_end, cut, told = upstream.step(actions[step : step + 1].astype(np.int32))
            obs, reward, terminated, truncated, info = env.step(actions[step])
            assert reward == paid[0]
            total, over = total + reward, bool(their_end[0] or cut[0])
            if over or step == limit - 1:
                break
            np.testing.assert_array_equal(obs, theirs[0])
            assert (terminated, truncated, info) == (False, False, {})
        assert info.pop(f"{ATTEMPT} {attempt} Return") == pytest.approx(total)
        assert info.pop(f"{ATTEMPT} {attempt} Level Complete") == float(over and told["prev_level_complete"][0])
        assert (terminated, truncated) == (attempt == 1, False)
    assert set(info) == {COMPLETE}
    with pytest.raises(gym.error.ResetNeeded):
        env.step(0)


def test_no_level_is_in_both_splits() -> None:
    levels = {}
    for split in ("train", "test"):
        env = TwoAttemptMTProcgen(["maze", "coinrun"], split=split, num_levels=30)
        env.reset(seed=0)
        found = set()
        for _ in range(80):
            env.reset()
            found.add(env.level)
            assert env.env_name == f"procgen_{env.game}" + ("-test" if split == "test" else "")
        levels[split] = found
    assert levels["train"] <= set(range(30))
    assert len(levels["train"]) > 20
    assert min(levels["test"]) >= 30
    assert len(levels["test"]) == 80


def test_the_border_tells_opening_attempt_and_time() -> None:
    env, plain = (
        TwoAttemptMTProcgen(["bigfish"], time_limit=5, k_episodes=4),
        TwoAttemptMTProcgen(["bigfish"], time_limit=5, k_episodes=4, border=0),
    )
    obs, other = env.reset(seed=0)[0], plain.reset(seed=0)[0]
    for step in range(20):
        attempt, t = divmod(step, 5)
        expected = [255 * (t == 0), round(255 * attempt / 4), round(255 * t / 5)]
        ring = np.ones((64, 64), dtype=bool)
        ring[1:-1, 1:-1] = False
        assert (obs[ring] == expected).all()
        np.testing.assert_array_equal(obs[~ring], other[~ring])
        obs, _, terminated, *_ = env.step(4)
        other = plain.step(4)[0]
    assert terminated
    assert obs[0, 0].tolist() == [0, 255, 255]
