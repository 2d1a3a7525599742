"""Atari 2600 games (Bellemare et al. 2013, arXiv:1207.4708), and console games through the emulators of stable-retro.

stable-retro contains one game (Airstriker); ``python -m stable_retro.import DIRECTORY`` imports the ROMs that you own.
"""

from __future__ import annotations

import difflib
import json
import zlib
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

import gin
import gymnasium as gym
import numpy as np
from numpy.typing import NDArray

from amago.envs.amago_env import AMAGOEnv
from amago.envs.builtin import _common as common
from amago.envs.builtin._common import check_resolution
from amago.envs.builtin._retro_emulator import EmulatorProcess, integrations
from amago.registry import require

if TYPE_CHECKING:
    from retro.data import Integrations

Observation = NDArray[np.uint8]

ACTION_SPACES = ("discrete", "minimal", "multibinary", "continuous")
BITS = ("UP", "RIGHT", "LEFT", "DOWN", "FIRE")
"""The joystick directions and the button that the five bits of a multi-binary action press."""
_THRESHOLD = 0.5  # of the joystick and the button, as in the Continuous ALE (Farebrother and Castro 2024, arXiv:2410.23810)


def atari_games() -> list[str]:
    """The names of all games, "AirRaid" to "Zaxxon"; raises ImportError if ale-py is missing."""
    return sorted(_games())


def game_name(game: str) -> str:
    """``game`` as listed in `atari_games`; also accepts "pong", "space_invaders" and "ALE/Pong-v5"."""
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
class AtariGame(gym.Env[Observation, Any]):
    """One game of the Arcade Learning Environment. Rewards are the game's points, neither clipped nor scaled.

    Observation, uint8 ``(H, W, 3)``, or ``(H, W, 1)`` with ``grayscale``: the pixelwise maximum over the last two frames of a
    step, because the console draws some objects in alternate frames only, resized by area averaging. Frames are not stacked:
    velocities must be remembered.

    Actions: see ``action_space``.

    A rollout terminates when the game is over, and truncates at ``time_limit``.

    Args:
        game: one of `atari_games`.
        action_space: "discrete", all 18 actions of the console; "minimal", the actions with an effect in this game;
            "multibinary", one bit for each of `BITS`, where opposite directions cancel; "continuous", a Box (3,) of the
            joystick's distance from its centre (0 to 1), its angle (-pi to pi, 0 is right), and the button (pressed above 0.5).
        version: of Gymnasium's environments; "v4" has no sticky actions.
        sticky_action_prob: probability, at each frame, that the console repeats its previous action (Machado et al. 2018,
            arXiv:1709.06009); None: by the version, 0 or 0.25.
        clip_rewards: give the sign of each reward.
        resolution: (height, width) of the observation; None is the game's own, (210, 160) for most games.
        grayscale: whether observations have one channel of luminance instead of three colours.
        frame_skip: frames per step; the console has 60 frames per second.
        terminal_on_life_loss: also terminate when a life is lost, for training only. `reset` without a seed then continues the
            game, whose total return is logged as ``Game Return`` when it is over.
        time_limit: maximum steps of a game; the default is 30 minutes.
        render_mode: None or "rgb_array".
    """

    metadata = {"render_modes": ["rgb_array"], "render_fps": 15}

    def __init__(
        self,
        game: str = "Pong",
        action_space: str = "discrete",
        version: str = "v5",
        sticky_action_prob: float | None = None,
        clip_rewards: bool = False,
        resolution: tuple[int, int] | None = (84, 84),
        grayscale: bool = False,
        frame_skip: int = 4,
        terminal_on_life_loss: bool = False,
        time_limit: int = 27_000,
        render_mode: str | None = None,
    ) -> None:
        self.game = game_name(game)
        self._kind = common.check_choice("action_space", action_space, ACTION_SPACES)
        size = None if resolution is None else check_resolution(resolution)
        self.grayscale = common.check_bool("grayscale", grayscale)
        sticky = (0.0 if version == "v4" else 0.25) if sticky_action_prob is None else sticky_action_prob
        self.version, self.clip_rewards = version, common.check_bool("clip_rewards", clip_rewards)
        self.sticky_action_prob = common.check_fraction("sticky_action_prob", sticky, below_one=True)
        self.frame_skip = common.check_int("frame_skip", frame_skip, 1)
        self.terminal_on_life_loss = common.check_bool("terminal_on_life_loss", terminal_on_life_loss)
        self.horizon = common.check_int("time_limit", time_limit, 1)
        self.render_mode = common.check_render_mode(render_mode, self.metadata["render_modes"])  # type: ignore[arg-type]
        self.env_name = f"atari_{self.game}"
        self._cv2 = require("cv2", "atari")
        self._ale_py = require("ale_py", "atari")
        self._ale_py.ALEInterface.setLoggerMode(self._ale_py.LoggerMode.Error)  # the constructor would print a banner
        self._console = console = self._ale_py.ALEInterface()
        console.setFloat("repeat_action_probability", self.sticky_action_prob)
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

    def step(self, action: object) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        if not self._playing:
            common.refuse_step("AtariGame")
        reward, over = self._hold(*self._joystick(action))
        self._steps += 1
        self._return += reward
        lives = self._console.lives()
        lost, self._lives = self.terminal_on_life_loss and lives < self._lives, lives
        timed_out = self._steps >= self.horizon and not over
        game_over = self.terminal_on_life_loss and (over or timed_out)
        info = common.metrics({"Game Return": self._return}) if game_over else {}
        terminated, truncated = over or (lost and not timed_out), timed_out
        self._playing = not (terminated or truncated)
        self._continues = not (self._playing or over or timed_out)
        return self._observe(), float(np.sign(reward)) if self.clip_rewards else reward, terminated, truncated, info

    def _load(self) -> None:
        self._console.loadROM(self._ale_py.roms.get_rom_path(_games()[self.game]))

    def _hold(self, action: object, strength: float) -> tuple[float, bool]:
        """Hold an action for ``frame_skip`` frames or until the game is over; returns the reward, and True if it is over."""
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

    def _joystick(self, action: object) -> tuple[Any, float]:
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
        """The console's picture with ``render_mode="rgb_array"``, uint8 ``(H, W, 3)``."""
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


class RetroLevel(NamedTuple):
    """One level of a game.

    Attributes:
        game: stable-retro's name of the game, with console and version.
        state: name of the saved state with which the level begins; None starts the console.
        buttons: the console's buttons in its order; None for unused positions.
    """

    game: str
    state: str | None
    buttons: tuple[str | None, ...]

    @property
    def name(self) -> str:
        return self.game if self.state is None else f"{self.game}:{self.state}"


def retro_levels(names: Sequence[str], directory: str | None = None) -> list[RetroLevel]:
    """Resolve names of levels.

    Args:
        names: "GAME" means the game's first level, "GAME:LEVEL" the named one, "GAME:*" all. The version "-v0" may be left out.
        directory: your own games in stable-retro's format: a folder per game with rom, data.json, scenario.json and saved states.

    Raises:
        ValueError: a game, its ROM, a level or ``directory`` is not there, or a level is named twice.
    """
    if isinstance(names, str) or not names:
        raise TypeError(f'levels must be a list of names, such as ["Airstriker-Genesis-v0:Level1"], got {names!r}')
    retro = require("stable_retro", "retro")
    kinds = retro.data.Integrations
    before = list(kinds.CUSTOM_ONLY.paths)
    try:
        kind = integrations(retro, _resolved(directory))
        found = [level for name in names for level in _levels_of(retro, kind, str(name))]
    finally:
        kinds.clear_custom_paths()
        for path in before:
            kinds.add_custom_path(path)
    if len(set(found)) < len(found):
        raise ValueError(f"levels must name each level once, got {list(names)!r}")
    return found


def _resolved(directory: str | None) -> str | None:
    if directory is not None and not Path(directory).is_dir():
        raise ValueError(f"directory must be a directory with games, got {directory!r}")
    return None if directory is None else str(Path(directory).resolve())


def _levels_of(retro: ModuleType, kind: Integrations, name: str) -> list[RetroLevel]:
    named, _, wanted = name.partition(":")
    known = retro.data.list_games(kind)
    game = next((full for full in (named, f"{named}-v0") if full in known), None)
    if game is None:
        near = difflib.get_close_matches(named, known, n=3, cutoff=0.5)
        raise ValueError(
            f"levels has the game {named!r}, but stable-retro knows {', '.join(near) or 'no game with a similar name'}"
        )
    try:
        rom = retro.data.get_original_romfile_path(game, kind)
    except FileNotFoundError:
        raise ValueError(
            f"levels has the game {named!r}, whose ROM has not been imported. Import it: python -m stable_retro.import DIRECTORY"
        ) from None
    states = retro.data.list_states(game, kind)
    if wanted and wanted != "*" and wanted not in states:
        raise ValueError(f"levels has {name!r}, but {game} has {', '.join(states) or 'no saved levels'}")
    if not wanted:
        path = retro.data.get_file_path(game, "metadata.json", kind)
        wanted = path and json.loads(Path(path).read_text(encoding="utf-8")).get("default_state")
    buttons = tuple(retro.get_system_info(retro.get_romfile_system(rom))["buttons"])
    return [RetroLevel(game, state, buttons) for state in (states if wanted == "*" else [wanted]) or [None]]


@gin.configurable(module="amago.envs.builtin")
class RetroArcade(gym.Env[Observation, NDArray[np.int8]]):
    """Levels of console games, one drawn uniformly for each rollout.

    The emulator runs in a separate process from the first `reset` to `close`.

    Observation, uint8 ``(H, W, 3)``: the last frame of a step, scaled with its proportions kept, and centred within a border in
    a colour that identifies the game.

    Actions, ``MultiBinary(len(buttons))``: one bit per button of any of the consoles; buttons with the same name share a bit.
    Buttons that the present console lacks, and combinations that the game's integration excludes, have no effect.

    Reward: stable-retro's for the game. A rollout terminates when the game is over, and truncates at ``time_limit``.

    Args:
        levels, directory: see `retro_levels`.
        buttons: the buttons of an action in order; None means all of the levels' consoles. All environments of an agent need the
            same buttons.
        resolution: (height, width) of the observation, including the border.
        border: minimum width of the border in pixels.
        frame_skip: frames per step; most consoles have 60 frames per second.
        sticky_actions: probability that the buttons of the previous step are held for one more frame.
        time_limit: maximum steps per rollout.

    Attributes:
        level: the `RetroLevel` of this rollout; `env_name` contains it, so that metrics are separated by level.
    """

    metadata = {"render_modes": ["rgb_array"], "render_fps": 15}

    def __init__(
        self,
        levels: Sequence[str] = ("Airstriker-Genesis-v0",),
        buttons: Sequence[str] | None = None,
        resolution: tuple[int, int] = (84, 84),
        border: int = 2,
        frame_skip: int = 4,
        sticky_actions: float = 0.25,
        time_limit: int = 4500,
        directory: str | None = None,
    ) -> None:
        self._directory = _resolved(directory)
        self.levels = retro_levels(levels, self._directory)
        self.buttons = buttons_of(self.levels) if buttons is None else common.check_names("buttons", buttons)
        self.border = common.check_int("border", border, 0)
        self.resolution = check_resolution(resolution, low=2 * self.border + 1)
        self.frame_skip = common.check_int("frame_skip", frame_skip, 1)
        self.sticky_actions = common.check_fraction("sticky_actions", sticky_actions, below_one=True)
        self.horizon = common.check_int("time_limit", time_limit, 1)
        require("cv2", "retro")
        self.render_mode = "rgb_array"
        self.observation_space = gym.spaces.Box(0, 255, shape=(*self.resolution, 3), dtype=np.uint8)
        self.action_space = gym.spaces.MultiBinary(len(self.buttons))
        self.level = self.levels[0]
        self._emulator: EmulatorProcess | None = None
        self._steps, self._playing = 0, False
        self._before: list[int] = []

    @property
    def env_name(self) -> str:
        return f"retro_{self.level.name.replace(':', '_')}"

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Observation, dict[str, Any]]:
        super().reset(seed=seed)
        self._playing = False
        self.level = self.levels[int(self.np_random.integers(len(self.levels)))]
        if self._emulator is None:
            self._emulator = EmulatorProcess()
        size = [side - 2 * self.border for side in self.resolution]
        level = {"game": self.level.game, "state": self.level.state, "directory": self._directory}
        _, picture = self._emulator.ask(do="play", size=size, **level)
        self._steps, self._playing, self._before = 0, True, [0] * len(self.level.buttons)
        return self._frame(picture), {}

    def step(self, action: object) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        if not self._playing or self._emulator is None:
            common.refuse_step("RetroArcade")
        bits = np.asarray(action)
        if not self.action_space.contains(bits):
            raise ValueError(f"action must be {len(self.buttons)} bits, got {action!r}")
        pressed = {name for name, bit in zip(self.buttons, bits.tolist(), strict=True) if bit}
        buttons = [int(name in pressed) for name in self.level.buttons]
        late = int(self.np_random.random() < self.sticky_actions)
        result, picture = self._emulator.ask(do="step", buttons=buttons, before=self._before, late=late, frames=self.frame_skip)
        self._before = buttons
        self._steps += 1
        terminated = bool(result["over"])
        truncated = self._steps >= self.horizon and not terminated
        self._playing = not (terminated or truncated)
        return self._frame(picture), float(result["reward"]), terminated, truncated, {}

    def _frame(self, picture: Observation) -> Observation:
        framed = np.empty((*self.resolution, 3), dtype=np.uint8)
        framed[:] = game_colour(self.level.game)
        top, left = ((whole - part) // 2 for whole, part in zip(self.resolution, picture.shape, strict=False))
        framed[top : top + picture.shape[0], left : left + picture.shape[1]] = picture
        return framed

    def render(self) -> Any:
        """The console's image in its own resolution, uint8 ``(H, W, 3)``."""
        if self._emulator is None:
            common.refuse_step("RetroArcade")
        return self._emulator.ask(do="screen")[1]

    def close(self) -> None:
        """End the emulator's process; `reset` starts another."""
        emulator, self._emulator, self._playing = self._emulator, None, False
        if emulator is not None:
            emulator.close()


def buttons_of(levels: Sequence[RetroLevel]) -> tuple[str, ...]:
    """The names of all buttons of the levels' consoles, in order of first occurrence."""
    return tuple(dict.fromkeys(name for level in levels for name in level.buttons if name is not None))


def game_colour(game: str) -> tuple[int, int, int]:
    """The colour (red, green, blue) of a game's border, a function of its name."""
    mixed = zlib.crc32(game.encode())
    return mixed & 255, mixed >> 8 & 255, mixed >> 16 & 255


ALE = AtariGame


class AtariAMAGOWrapper(AMAGOEnv):
    """An `AMAGOEnv` of an `AtariGame`, named by its game."""


class RetroAMAGOWrapper(AMAGOEnv):
    """An `AMAGOEnv` of a `RetroArcade`, named by the game and level of each rollout."""
