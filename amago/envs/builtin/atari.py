"""Atari 2600 games with unclipped rewards (Bellemare et al. 2013, arXiv:1207.4708).

Needs ``pip install 'amago[atari]'``.
"""

from __future__ import annotations

from typing import Any

import gin
import gymnasium as gym
import numpy as np
from numpy.typing import NDArray

from amago.config import NamedArguments
from amago.envs.builtin import _common as common
from amago.envs.builtin._extras import require
from amago.envs.builtin._pixels import check_resolution
from amago.envs.metrics import AMAGO_ENV_LOG_PREFIX

Observation = NDArray[np.uint8]

ACTION_SPACES = ("discrete", "minimal", "multibinary", "continuous")
BITS = ("UP", "RIGHT", "LEFT", "DOWN", "FIRE")
"""The joystick directions and the button that the five bits of a multi-binary action press."""
_THRESHOLD = 0.5  # of the joystick and the button, as in the Continuous ALE (Farebrother and Castro 2024, arXiv:2410.23810)


def atari_games() -> list[str]:
    """The names of all games, "AirRaid" to "Zaxxon"; raises ImportError if ale-py is missing."""
    return sorted(_games())


def game_name(game: str) -> str:
    """``game`` as listed in `atari_games`; also accepts "pong", "space_invaders" and "ALE/Pong-v5".

    Raises:
        ImportError: ale-py is missing.
        ValueError: there is no such game; the message suggests similar names.
    """
    known = {name.lower(): name for name in _games()}
    short = str(game).removeprefix("ALE/").removesuffix("-v5").replace("_", "").lower()
    if short in known:
        return known[short]
    raise ValueError(f"game is {game!r}, but Atari has {common.similar(short.title(), list(known.values()))}")


def _games() -> dict[str, str]:
    """Name of a game -> ale-py's name of its ROM."""
    require("ale_py", "atari")
    roms = require("ale_py.roms", "atari")
    return {rom.title().replace("_", ""): rom for rom in roms.get_all_rom_ids()}


@gin.configurable(module="amago.envs.builtin")
class AtariGame(NamedArguments, gym.Env[Observation, Any]):
    """One game of the Arcade Learning Environment. Rewards are the game's points, neither clipped nor scaled.

    Observation, uint8 ``(H, W, 3)``, or ``(H, W, 1)`` with ``grayscale``: the pixelwise maximum over the last two frames of a
    step, because the console draws some objects in alternate frames only, resized by area averaging. Frames are not stacked:
    velocities must be remembered.

    Actions: see ``action_space``.

    A rollout terminates when the game is over, and truncates at ``time_limit``. With ``terminal_on_life_loss`` it also
    terminates when a life is lost; `reset` without a seed then continues the game, whose total return is logged as
    ``Game Return`` when it is over.

    Args:
        game: one of `atari_games`.
        action_space: "discrete", all 18 actions of the console; "minimal", the actions with an effect in this game;
            "multibinary", one bit for each of `BITS`, where opposite directions cancel; "continuous", a Box (3,) of the
            joystick's distance from its centre (0 to 1), its angle (-pi to pi, 0 is right), and the button (pressed above 0.5).
        resolution: (height, width) of the observation; None is the game's own, (210, 160) for most games.
        grayscale: whether observations have one channel of luminance instead of three colours.
        sticky_actions: probability, at each frame, that the console repeats its previous action (Machado et al. 2018,
            arXiv:1709.06009).
        frame_skip: frames per step; the console has 60 frames per second.
        terminal_on_life_loss: see above; for training only.
        time_limit: maximum steps of a game; the default is 30 minutes.
        render_mode: None or "rgb_array".

    Attributes:
        horizon: ``time_limit``.
        env_name: "atari_" and the name of the game.

    Raises:
        ImportError: ale-py or opencv is missing.
        TypeError, ValueError: an argument or an action has the wrong type or is out of range.
    """

    metadata = {"render_modes": ["rgb_array"], "render_fps": 15}

    def __init__(
        self,
        game: str = "Pong",
        action_space: str = "discrete",
        resolution: tuple[int, int] | None = (84, 84),
        grayscale: bool = False,
        sticky_actions: float = 0.25,
        frame_skip: int = 4,
        terminal_on_life_loss: bool = False,
        time_limit: int = 27_000,
        render_mode: str | None = None,
    ) -> None:
        self.game = game_name(game)
        self._kind = common.check_choice("action_space", action_space, ACTION_SPACES)
        size = None if resolution is None else check_resolution(resolution)
        self.grayscale = common.check_bool("grayscale", grayscale)
        self.sticky_actions = common.check_fraction("sticky_actions", sticky_actions, below_one=True)
        self.frame_skip = common.check_int("frame_skip", frame_skip, 1)
        self.terminal_on_life_loss = common.check_bool("terminal_on_life_loss", terminal_on_life_loss)
        self.horizon = common.check_int("time_limit", time_limit, 1)
        self.render_mode = common.check_render_mode(render_mode, self.metadata["render_modes"])  # type: ignore[arg-type]
        self.env_name = f"atari_{self.game}"
        self._cv2 = require("cv2", "atari")
        self._ale_py = require("ale_py", "atari")
        self._ale_py.ALEInterface.setLoggerMode(self._ale_py.LoggerMode.Error)  # the constructor would print a banner
        self._console = console = self._ale_py.ALEInterface()
        console.setFloat("repeat_action_probability", self.sticky_actions)
        self._load()
        self._actions = list(console.getMinimalActionSet() if action_space == "minimal" else console.getLegalActionSet())
        self.action_space = _action_space(action_space, len(self._actions))
        self._screen = tuple(console.getScreenDims())
        self.resolution = self._screen if size is None else size
        self.observation_space = gym.spaces.Box(0, 255, (*self.resolution, 1 if grayscale else 3), np.uint8)
        self._frame = np.zeros(self._screen if grayscale else (*self._screen, 3), dtype=np.uint8)
        self._frame_before = self._frame.copy()
        self._steps, self._lives, self._return = 0, 0, 0.0
        self._seeded = self._playing = self._continues = False

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Observation, dict[str, Any]]:
        super().reset(seed=seed)
        if seed is not None or not self._seeded:
            self._console.setInt("random_seed", int(self.np_random.integers(2**31 - 1)))
            self._load()  # the console reads its seed only when it loads a game
            self._seeded = True
        if seed is not None or not self._continues:
            self._console.reset_game()
            self._steps, self._return = 0, 0.0
        self._playing, self._continues, self._lives = True, False, self._console.lives()
        self._read_screen(self._frame)
        return self._observe(), {}

    def step(self, action: Any) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        if not self._playing:
            common.refuse_step("AtariGame")
        reward, over = self._hold(*self._joystick(action))
        self._steps += 1
        self._return += reward
        lives = self._console.lives()
        lost, self._lives = self.terminal_on_life_loss and lives < self._lives, lives
        timed_out = self._steps >= self.horizon and not over
        info = {}
        if self.terminal_on_life_loss and (over or timed_out):
            info[f"{AMAGO_ENV_LOG_PREFIX} Game Return"] = self._return
        terminated, truncated = over or (lost and not timed_out), timed_out
        self._playing = not (terminated or truncated)
        self._continues = not (self._playing or over or timed_out)
        return self._observe(), reward, terminated, truncated, info

    def _load(self) -> None:
        self._console.loadROM(self._ale_py.roms.get_rom_path(_games()[self.game]))

    def _hold(self, action: Any, strength: float) -> tuple[float, bool]:
        """Hold an action for ``frame_skip`` frames or until the game is over; returns the reward and whether the game is
        over."""
        console, reward, left, over = self._console, 0.0, self.frame_skip, False
        while left and not over:
            left -= 1
            reward += console.act(action, strength)
            over = bool(console.game_over(with_truncation=False))
            if left == 1 and not over:
                self._read_screen(self._frame_before)
        self._read_screen(self._frame)
        if self.frame_skip > 1 and left == 0:
            np.maximum(self._frame, self._frame_before, out=self._frame)
        return float(reward), over

    def _read_screen(self, frame: NDArray[np.uint8]) -> None:
        if self.grayscale:
            self._console.getScreenGrayscale(frame)
        else:
            self._console.getScreenRGB(frame)

    def _observe(self) -> Observation:
        height, width = self.resolution
        if self.resolution == self._screen:
            picture = self._frame.copy()
        else:
            picture = self._cv2.resize(self._frame, (width, height), interpolation=self._cv2.INTER_AREA)
        return picture[..., None] if self.grayscale else picture

    def _joystick(self, action: Any) -> tuple[Any, float]:
        """The action of ale-py, and the strength with which it moves a paddle."""
        if self._kind in ("discrete", "minimal"):
            return self._actions[common.check_action(action, len(self._actions))], 1.0
        given = np.asarray(action)
        if not self.action_space.contains(given):
            raise ValueError(f"action must be in {self.action_space}, got {action!r}")
        if self._kind == "multibinary":
            up, right, left, down, fire = (int(bit) for bit in given)
            return self._actions[_index(right - left, up - down, fire)], 1.0
        distance, angle = float(given[0]), float(given[1])
        x, y = distance * np.cos(angle), distance * np.sin(angle)
        place = (int(x > _THRESHOLD) - int(x < -_THRESHOLD), int(y > _THRESHOLD) - int(y < -_THRESHOLD))
        return self._actions[_index(*place, int(given[2] > _THRESHOLD))], distance

    def render(self) -> Any:
        """With ``render_mode="rgb_array"``: the console's picture, uint8 ``(H, W, 3)``."""
        if self.render_mode is None:
            raise ValueError('render() needs render_mode="rgb_array"')
        return self._console.getScreenRGB()


def _action_space(kind: str, n: int) -> gym.Space[Any]:
    if kind == "multibinary":
        return gym.spaces.MultiBinary(len(BITS))
    if kind == "continuous":
        low, high = np.array([0.0, -np.pi, 0.0], dtype=np.float32), np.array([1.0, np.pi, 1.0], dtype=np.float32)
        return gym.spaces.Box(low, high, dtype=np.float32)
    return gym.spaces.Discrete(n)


_ORDER = (  # (x, y, button) of ALE's actions 0 to 17; x points right, y up
    (0, 0, 0), (0, 0, 1), (0, 1, 0), (1, 0, 0), (-1, 0, 0), (0, -1, 0), (1, 1, 0), (-1, 1, 0), (1, -1, 0), (-1, -1, 0),
    (0, 1, 1), (1, 0, 1), (-1, 0, 1), (0, -1, 1), (1, 1, 1), (-1, 1, 1), (1, -1, 1), (-1, -1, 1),
)  # fmt: skip


def _index(x: int, y: int, fire: int) -> int:
    return _ORDER.index((x, y, fire))


__all__ = ["ACTION_SPACES", "BITS", "AtariGame", "atari_games", "game_name"]
