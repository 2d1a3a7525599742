"""Procgen: games with procedurally generated levels, and several attempts per level (Cobbe et al. 2019, arXiv:1912.01588)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import gin
import gymnasium as gym
import numpy as np
from numpy.typing import NDArray

from amago.envs.amago_env import AMAGOEnv
from amago.envs.builtin import _common as common
from amago.envs.builtin._common import Attempts
from amago.registry import require

Observation = NDArray[np.uint8]

GAMES = (
    "bigfish", "bossfight", "caveflyer", "chaser", "climber", "coinrun", "dodgeball", "fruitbot", "heist", "jumper", "leaper", "maze",
    "miner", "ninja", "plunder", "starpilot",
)  # fmt: skip
MEMORY_GAMES = ("caveflyer", "dodgeball", "heist", "jumper", "maze", "miner")
"""The games with larger, partially visible levels in the mode "memory-hard"."""
MODES = ("easy", "hard", "memory-hard")
SPLITS = ("train", "test")
_LEVELS = 2**31 - 1  # level numbers, from 0
_QT = "Procgen draws with Qt 5: apt-get install -y --no-install-recommends libqt5core5a libqt5gui5"


def game_name(game: str) -> str:
    """``game`` as listed in `GAMES`; accepts upper case."""
    short = str(game).lower()
    if short in GAMES:
        return short
    raise ValueError(f"game is {game!r}, but Procgen has {common.similar(short, GAMES)}")


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
    """k attempts (two by default) at one level of a Procgen game; each rollout draws another game and level.

    A rollout draws a game and one of its levels, both uniformly. All attempts begin with the same level, whose random events
    repeat as long as the actions do. The last step of an attempt returns the first observation of the next. The rollout
    terminates (never truncates) with the last attempt.

    Reward: Procgen's, neither clipped nor scaled.

    Observation, uint8 ``(64, 64, 3)``: Procgen's image with a coloured border. Its red is 255 at the first observation of an
    attempt and else 0; green is the fraction of attempts that are over, and blue the fraction of the attempt's steps, both
    times 255.

    Actions, ``Discrete(15)``: Procgen's eight directions, no movement, and six keys.

    Metrics at the end of attempt i (from 0): ``Attempt {i} Return``, and ``Attempt {i} Level Complete``, 1 if it completed the
    level; at the end of the rollout ``Level Complete``, the mean over attempts. `env_name` separates them by game.

    Args:
        games: names from `GAMES`; None means all 16.
        mode: "easy", "hard", or "memory-hard", in which `MEMORY_GAMES` have larger, partially visible levels and the others are
            hard.
        split: "train" has levels 0 to ``num_levels - 1``, "test" all others.
        num_levels: number of training levels per game.
        k_episodes: attempts per rollout.
        time_limit: maximum steps per attempt; some games have a lower limit (maze and leaper: 500).
        border: width of the border in pixels; 0 leaves Procgen's image unchanged.

    Attributes:
        game, level: of this rollout.
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
        self.games = common.check_names("games", GAMES if games is None else games, game_name)
        self.mode, self.split = common.check_choice("mode", mode, MODES), common.check_choice("split", split, SPLITS)
        self.num_levels = common.check_int("num_levels", num_levels, 1)
        if self.num_levels >= _LEVELS:
            raise ValueError(f"num_levels must be below {_LEVELS}, so that test levels remain, got {num_levels!r}")
        self.k_episodes = common.check_int("k_episodes", k_episodes, 1)
        self.time_limit = common.check_int("time_limit", time_limit, 1)
        self.border = common.check_int("border", border, 0)
        if self.border > 16:
            raise ValueError(f"border must be at most 16 of the image's 64 pixels, got {border!r}")
        self._envpool = _envpool()
        self.horizon = self.k_episodes * self.time_limit
        self.observation_space = gym.spaces.Box(0, 255, shape=(64, 64, 3), dtype=np.uint8)
        self.action_space = gym.spaces.Discrete(15)
        self.game, self.level = self.games[0], 0
        self._play: Any = None
        self._attempts = Attempts(self.k_episodes, self.time_limit, mean=("Level Complete", "Level Complete"))

    @property
    def env_name(self) -> str:
        return f"procgen_{self.game}" + ("-test" if self.split == "test" else "")

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Observation, dict[str, Any]]:
        super().reset(seed=seed)
        self.game = self.games[int(self.np_random.integers(len(self.games)))]
        first, end = (0, self.num_levels) if self.split == "train" else (self.num_levels, _LEVELS)
        self.level = int(self.np_random.integers(first, end))
        self._attempts.begin_rollout()
        return self._begin_attempt(), {}

    def _begin_attempt(self) -> Observation:
        self._attempts.begin()
        mode = self.mode.capitalize()
        if self.mode == "memory-hard":
            mode = "Memory" if self.game in MEMORY_GAMES else "Hard"
        # A new environment for each attempt: a reset of dodgeball keeps some state of the previous episode.
        self._play = self._envpool.make(
            f"{self.game.capitalize()}{mode}-v0",
            env_type="gymnasium", num_envs=1, num_threads=1, seed=0, channel_first=False, num_levels=1, start_level=self.level,
        )  # fmt: skip
        return self._observe(self._play.reset()[0])

    def step(self, action: object) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        if not self._attempts.under_way:
            common.refuse_step("TwoAttemptMTProcgen")
        index = common.check_action(action, 15)
        images, rewards, terminated, truncated, game_info = self._play.step(np.array([index], dtype=np.int32))
        reward = float(rewards[0])
        timed_out, over = self._attempts.step(reward), bool(terminated[0] or truncated[0])
        if not (over or timed_out):
            return self._observe(images), reward, False, False, {}
        complete = float(over and bool(game_info["prev_level_complete"][0]))
        info = self._attempts.end({"Level Complete": complete})
        if self._attempts.under_way:
            return self._begin_attempt(), reward, False, False, info
        self._play = None
        return self._observe(images), reward, True, False, info

    def _observe(self, images: NDArray[np.uint8]) -> Observation:
        image = np.array(images[0])
        if self.border:
            time, attempts = self._attempts.progress
            colour = np.array([round(255 * part) for part in (time == 0, attempts, time)], dtype=np.uint8)
            for side in (image, image.swapaxes(0, 1)):
                side[: self.border] = side[-self.border :] = colour
        return image

    def close(self) -> None:
        """Release the game and end the rollout; `reset` makes another game."""
        self._play, self._attempts.over = None, self.k_episodes


TwoShotMTProcgen = TwoAttemptMTProcgen
"""An alternative name."""


ALL_PROCGEN_GAMES = list(GAMES)


class ProcgenAMAGO(AMAGOEnv):
    """An `AMAGOEnv` of a `TwoAttemptMTProcgen`, named by the game of each rollout."""

    def __init__(self, env: object) -> None:
        super().__init__(env)
