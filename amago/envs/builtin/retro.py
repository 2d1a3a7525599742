"""Console games through the emulators of stable-retro, with several games and levels in one environment.

Needs ``pip install 'amago[retro]'``. stable-retro contains one game (Airstriker); ``python -m stable_retro.import DIRECTORY``
imports the ROMs that you own.
"""

from __future__ import annotations

import contextlib
import difflib
import json
import subprocess
import sys
import weakref
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gin
import gymnasium as gym
import numpy as np
from numpy.typing import NDArray

from amago.config import NamedArguments
from amago.envs.builtin import _common as common
from amago.envs.builtin._extras import require
from amago.envs.builtin._pixels import check_resolution
from amago.envs.builtin._retro_emulator import integrations

Observation = NDArray[np.uint8]


@dataclass(frozen=True)
class RetroLevel:
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
        directory: a directory with your own games in stable-retro's format: a folder per game with rom, data.json,
            scenario.json and saved states.

    Raises:
        ImportError: stable-retro is missing.
        TypeError: ``names`` is not a list of names.
        ValueError: a game or level does not exist, a ROM has not been imported, a level is named twice, or ``directory`` is not
            a directory.
    """
    if isinstance(names, str) or not names:
        raise TypeError(f'levels must be a list of names, such as ["Airstriker-Genesis-v0:Level1"], got {names!r}')
    retro = require("stable_retro", "retro")
    with _looking_in(retro, _resolved(directory)) as kind:
        found = [level for name in names for level in _named(retro, kind, str(name))]
    if len(set(found)) < len(found):
        raise ValueError(f"levels must name each level once, got {list(names)!r}")
    return found


@contextlib.contextmanager
def _looking_in(retro: Any, directory: str | None) -> Iterator[Any]:
    """Let stable-retro search ``directory``, and restore its search paths after the block."""
    kinds = retro.data.Integrations
    before = list(kinds.CUSTOM_ONLY.paths)
    try:
        yield integrations(retro, directory)
    finally:
        kinds.clear_custom_paths()
        for path in before:
            kinds.add_custom_path(path)


def _named(retro: Any, kind: Any, name: str) -> list[RetroLevel]:
    game, _, wanted = name.partition(":")
    game = _game(retro, kind, game)
    core = retro.get_system_info(retro.get_romfile_system(retro.data.get_original_romfile_path(game, kind)))
    states = retro.data.list_states(game, kind)
    if wanted and wanted != "*" and wanted not in states:
        raise ValueError(f"levels has {name!r}, but {game} has {', '.join(states) or 'no saved levels'}")
    chosen = states if wanted == "*" else [wanted or _first(retro, kind, game)]
    return [RetroLevel(game, state, tuple(core["buttons"])) for state in chosen or [None]]


def _resolved(directory: str | None) -> str | None:
    if directory is None:
        return None
    path = Path(directory).resolve()
    if not path.is_dir():
        raise ValueError(f"directory must be a directory with games, got {directory!r}")
    return str(path)


def _game(retro: Any, kind: Any, game: str) -> str:
    known = retro.data.list_games(kind)
    full = next((name for name in (game, f"{game}-v0") if name in known), None)
    if full is None:
        near = difflib.get_close_matches(game, known, n=3, cutoff=0.5)
        raise ValueError(
            f"levels has the game {game!r}, but stable-retro knows {', '.join(near) or 'no game with a similar name'}"
        )
    try:
        retro.data.get_original_romfile_path(full, kind)
    except FileNotFoundError:
        raise ValueError(
            f"levels has the game {game!r}, whose ROM has not been imported. Import it: python -m stable_retro.import DIRECTORY"
        ) from None
    return full


def _first(retro: Any, kind: Any, game: str) -> str | None:
    path = retro.data.get_file_path(game, "metadata.json", kind)
    if path is None:
        return None
    return json.loads(Path(path).read_text(encoding="utf-8")).get("default_state")  # type: ignore[no-any-return]


@gin.configurable(module="amago.envs.builtin")
class RetroArcade(NamedArguments, gym.Env[Observation, NDArray[np.int8]]):
    """Levels of console games, one drawn uniformly for each rollout.

    The emulator runs in a separate process, which starts at the first `reset` and ends at `close`.

    Observation, uint8 ``(H, W, 3)``: the last frame of a step, scaled to fit while keeping its proportions, and centred within
    a border in a colour that identifies the game. All consoles have the same observation shape.

    Actions, ``MultiBinary(len(buttons))``: one bit per button of any of the consoles; buttons with the same name share a bit.
    Buttons that the present console lacks, and combinations that the game's integration excludes, have no effect.

    Reward: stable-retro's for the game. A rollout terminates when the game is over, and truncates at ``time_limit``.

    Args:
        levels: names of levels, see `retro_levels`.
        buttons: the buttons of an action in order; None means all buttons of the levels' consoles. All environments of an agent
            need the same buttons.
        resolution: (height, width) of the observation, including the border.
        border: minimum width of the border in pixels.
        frame_skip: frames per step; most consoles have 60 frames per second.
        sticky_actions: probability that the buttons of the previous step are held for one more frame.
        time_limit: maximum steps per rollout.
        directory: a directory with your own games, see `retro_levels`.

    Attributes:
        env_name: "retro_", the game and the level of this rollout, which separates metrics by level.
        level: the `RetroLevel` of this rollout.
        horizon: ``time_limit``.

    Raises:
        ImportError: stable-retro or opencv is missing.
        TypeError, ValueError: an argument or an action has the wrong type or is out of range.
        RuntimeError: the emulator failed.
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
        self.buttons = _named_once(buttons) if buttons is not None else buttons_of(self.levels)
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
        self._emulator: _Process | None = None
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
            self._emulator = _Process()
        size = [side - 2 * self.border for side in self.resolution]
        level = {"game": self.level.game, "state": self.level.state, "directory": self._directory}
        _, picture = self._emulator.ask(do="play", size=size, **level)
        self._steps, self._playing, self._before = 0, True, [0] * len(self.level.buttons)
        return self._framed(picture), {}

    def step(self, action: Any) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
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
        return self._framed(picture), float(result["reward"]), terminated, truncated, {}

    def _framed(self, picture: Observation) -> Observation:
        shown = np.empty((*self.resolution, 3), dtype=np.uint8)
        shown[:] = game_colour(self.level.game)
        top, left = ((whole - part) // 2 for whole, part in zip(self.resolution, picture.shape, strict=False))
        shown[top : top + picture.shape[0], left : left + picture.shape[1]] = picture
        return shown

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


def _named_once(buttons: Sequence[str]) -> tuple[str, ...]:
    if isinstance(buttons, str) or not buttons or len(set(buttons)) < len(buttons):
        raise ValueError(f"buttons must contain at least one name, and none twice, got {buttons!r}")
    return tuple(str(name) for name in buttons)


def game_colour(game: str) -> tuple[int, int, int]:
    """The colour (red, green, blue) of a game's border, a function of its name."""
    mixed = zlib.crc32(game.encode())
    return mixed & 255, mixed >> 8 & 255, mixed >> 16 & 255


class _Process:
    """A client of `amago.envs.builtin._retro_emulator` in a process of its own."""

    def __init__(self) -> None:
        command = [sys.executable, "-m", "amago.envs.builtin._retro_emulator"]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        self.close = weakref.finalize(self, _end, self._process)

    def ask(self, **request: Any) -> tuple[dict[str, Any], Observation]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):  # reported below, because there will be no answer
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(
                f"the emulator's process ended with exit code {self._process.wait()} during the request {request['do']!r}"
            )
        result = json.loads(line)
        if "error" in result:
            raise RuntimeError(f"the emulator failed: {result['error']}")
        shape = tuple(result["shape"])
        picture = np.frombuffer(self._process.stdout.read(int(np.prod(shape))), dtype=np.uint8)
        return result, picture.reshape(shape)


def _end(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(BrokenPipeError):
        process.stdin.close()  # type: ignore[union-attr]
    try:
        process.wait(5.0)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    process.stdout.close()  # type: ignore[union-attr]


__all__ = ["RetroArcade", "RetroLevel", "buttons_of", "game_colour", "retro_levels"]
