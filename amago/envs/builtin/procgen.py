"""Procgen: games whose levels are drawn by a generator, and two attempts at each level (Cobbe et al. 2019, arXiv:1912.01588).

Needs ``pip install 'amago[procgen]'``, which brings Procgen as part of EnvPool, and Qt 5 from the system.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import Any

import gin
import gymnasium as gym
import numpy as np
from numpy.typing import NDArray

from amago.envs.builtin import _common as common
from amago.envs.builtin._extras import require
from amago.envs.metrics import AMAGO_ENV_LOG_PREFIX

Observation = NDArray[np.uint8]

GAMES = (
    "bigfish", "bossfight", "caveflyer", "chaser", "climber", "coinrun", "dodgeball", "fruitbot", "heist", "jumper", "leaper", "maze",
    "miner", "ninja", "plunder", "starpilot",
)  # fmt: skip
MEMORY_GAMES = ("caveflyer", "dodgeball", "heist", "jumper", "maze", "miner")
"""Those that have levels in which less is seen at once than must be remembered."""
MODES = ("easy", "hard", "memory-hard")
SPLITS = ("train", "test")
_LEVELS = 2**31 - 1  # level numbers, from 0
_QT = "Procgen draws with Qt 5: apt-get install -y --no-install-recommends libqt5core5a libqt5gui5"


def game_name(game: str) -> str:
    """``game`` as it is listed in `GAMES`, in any case.

    Raises:
        ValueError: there is no such game; the message names those that are spelled alike.
    """
    short = str(game).lower()
    if short in GAMES:
        return short
    near = difflib.get_close_matches(short, GAMES, n=3, cutoff=0.5)
    raise ValueError(f"game is {game!r}, but Procgen has {', '.join(near or GAMES)}")


def _envpool() -> Any:
    envpool = require("envpool", "procgen")
    try:
        require("envpool.procgen", "procgen")
    except ImportError as err:
        if "libQt5" in str(err):
            raise ImportError(f"envpool.procgen could not be imported ({err.__cause__}). {_QT}") from err
        raise
    return envpool


@gin.configurable(module="amago.envs.builtin")
class TwoAttemptMTProcgen(gym.Env[Observation, np.int64]):
    """Many games, two attempts at each level: what the first finds out pays in the second.

    A rollout draws a game, then one of its levels (uniformly), and plays it ``k_episodes`` times from its beginning. A level is
    the same each time, to the last enemy, as far as the actions are. The step that ends an attempt returns the first picture of the
    next. The rollout terminates (never truncates) with the last. Rewards are Procgen's, neither clipped nor scaled.

    Observation, uint8 ``(64, 64, 3)``: Procgen's picture, whose outermost pixels (``border``) tell what it does not: red is 255 where an
    attempt opens and else 0, green the share of the attempts that are over, blue the share of this one's time.

    Actions, ``Discrete(15)``: Procgen's own: nine directions, of which staying is one, and six keys.

    Logged when attempt i (from 0) ends: ``Attempt {i} Return``, and ``Attempt {i} Level Complete``, 1 if it reached the level's end; with the
    rollout ``Level Complete``, the mean over its attempts. They are logged for each game by `env_name`.

    Args:
        games: names from `GAMES`; None takes all 16.
        mode: "easy"; "hard"; or "memory-hard", in which the games of `MEMORY_GAMES` hide more of their (larger) levels, and all others
            are hard.
        split: "train": levels 0 to ``num_levels - 1``; "test": all others. No level is in both.
        num_levels: levels to train on, of each game.
        k_episodes: attempts at a level.
        time_limit: steps of an attempt; some games end sooner by themselves (500 steps in maze and leaper).
        border: width in pixels; 0 leaves the picture as it is.

    Attributes:
        env_name: "procgen_" and the game of this rollout, with "-test" behind it in the test split.
        game: that game.
        level: its number.
        horizon: the most steps in a rollout.

    Raises:
        ImportError: EnvPool is missing, or Qt 5.
        TypeError, ValueError: an argument or an action is wrong; the message quotes it.
    """

    def __init__(
        self,
        games: Sequence[str] | None = None,
        mode: str = "easy",
        split: str = "train",
        num_levels: int = 10_000,
        k_episodes: int = 2,
        time_limit: int = 1000,
        border: int = 1,
    ) -> None:
        if isinstance(games, str):
            raise TypeError(f"games must be a list of names, got {games!r}")
        self.games = tuple(game_name(game) for game in (GAMES if games is None else games))
        if not self.games or len(set(self.games)) < len(self.games):
            raise ValueError(f"games must name at least one game, and each once, got {games!r}")
        for name, value, known in (("mode", mode, MODES), ("split", split, SPLITS)):
            if value not in known:
                raise ValueError(f"{name} must be one of {', '.join(known)}, got {value!r}")
        self.mode, self.split = mode, split
        self.num_levels = common.check_int("num_levels", num_levels, 1)
        if self.num_levels >= _LEVELS:
            raise ValueError(f"num_levels must be below {_LEVELS}, to leave some for tests, got {num_levels!r}")
        self.k_episodes = common.check_int("k_episodes", k_episodes, 1)
        self.time_limit = common.check_int("time_limit", time_limit, 1)
        self.border = common.check_int("border", border, 0)
        if self.border > 16:
            raise ValueError(f"border must be at most 16, or there is little left to see, got {border!r}")
        self._envpool = _envpool()
        self.horizon = self.k_episodes * self.time_limit
        self.observation_space = gym.spaces.Box(0, 255, shape=(64, 64, 3), dtype=np.uint8)
        self.action_space = gym.spaces.Discrete(15)
        self.game, self.level = self.games[0], 0
        self._play: Any = None
        self._attempt, self._steps = self.k_episodes, 0  # no rollout is under way
        self._return, self._completed = 0.0, 0.0

    @property
    def env_name(self) -> str:
        return f"procgen_{self.game}" + ("-test" if self.split == "test" else "")

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Observation, dict[str, Any]]:
        super().reset(seed=seed)
        self.game = self.games[int(self.np_random.integers(len(self.games)))]
        first, end = (0, self.num_levels) if self.split == "train" else (self.num_levels, _LEVELS)
        self.level = int(self.np_random.integers(first, end))
        self._attempt, self._completed = 0, 0.0
        return self._begin_attempt(), {}

    def _begin_attempt(self) -> Observation:
        """With a game that is made anew, in a millisecond: in dodgeball, a reset leaves something of the episode before."""
        self._steps, self._return = 0, 0.0
        self._play = self._envpool.make(
            f"{self.game.capitalize()}{_suffix(self.game, self.mode)}-v0",
            env_type="gymnasium", num_envs=1, num_threads=1, seed=0, channel_first=False, num_levels=1, start_level=self.level,
        )  # fmt: skip
        return self._shown(self._play.reset()[0])

    def step(self, action: Any) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        if self._attempt >= self.k_episodes:
            common.refuse_step("TwoAttemptMTProcgen")
        index = common.check_action(action, 15)
        picture, paid, terminated, truncated, told = self._play.step(np.array([index], dtype=np.int32))
        reward = float(paid[0])
        self._steps += 1
        self._return += reward
        over = bool(terminated[0] or truncated[0])
        if not over and self._steps < self.time_limit:
            return self._shown(picture), reward, False, False, {}
        complete = float(over and bool(told["prev_level_complete"][0]))
        prefix = f"{AMAGO_ENV_LOG_PREFIX} Attempt {self._attempt}"
        info = {f"{prefix} Return": self._return, f"{prefix} Level Complete": complete}
        self._attempt += 1
        self._completed += complete
        if self._attempt < self.k_episodes:
            return self._begin_attempt(), reward, False, False, info
        info[f"{AMAGO_ENV_LOG_PREFIX} Level Complete"] = self._completed / self.k_episodes
        self._play, last = None, self._shown(picture)
        return last, reward, True, False, info

    def _shown(self, picture: NDArray[np.uint8]) -> Observation:
        shown = np.array(picture[0])
        if self.border:
            told = (self._steps == 0, self._attempt / self.k_episodes, self._steps / self.time_limit)
            colour = np.array([round(255 * share) for share in told], dtype=np.uint8)
            for side in (shown, shown.swapaxes(0, 1)):
                side[: self.border] = side[-self.border :] = colour
        return shown

    def close(self) -> None:
        """Give the game back; `reset` takes one again."""
        self._play, self._attempt = None, self.k_episodes


TwoShotMTProcgen = TwoAttemptMTProcgen
"""The name in some scripts."""


def _suffix(game: str, mode: str) -> str:
    if mode == "memory-hard":
        return "Memory" if game in MEMORY_GAMES else "Hard"
    return mode.capitalize()


__all__ = ["GAMES", "MEMORY_GAMES", "MODES", "TwoAttemptMTProcgen", "TwoShotMTProcgen", "game_name"]
