"""Console games of many makes through emulators (stable-retro): several games and levels as one environment.

Needs ``pip install 'amago[retro]'``. One game comes with stable-retro (Airstriker); ``python -m stable_retro.import DIRECTORY`` adds
those that you own.
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

from amago.envs.builtin import _common as common
from amago.envs.builtin._extras import require
from amago.envs.builtin._pixels import check_chance, check_resolution
from amago.envs.builtin._retro_emulator import integrations

Observation = NDArray[np.uint8]


@dataclass(frozen=True)
class RetroLevel:
    """One level: where a game begins."""

    game: str
    """as stable-retro calls it, with the console and a version"""
    state: str | None
    """name of the saved state that it begins with; None: the console is switched on"""
    buttons: tuple[str | None, ...]
    """those of the console, in its order; None where a place is empty"""

    @property
    def name(self) -> str:
        return self.game if self.state is None else f"{self.game}:{self.state}"


def retro_levels(names: Sequence[str], directory: str | None = None) -> list[RetroLevel]:
    """The levels that names stand for.

    Args:
        names: "GAME" is the game's first level, "GAME:LEVEL" another, "GAME:*" all of them. The version may be left out:
            "Airstriker-Genesis" is "Airstriker-Genesis-v0".
        directory: of games of your own, as stable-retro keeps them: each a directory with rom, data.json, scenario.json and levels.

    Raises:
        ImportError: stable-retro is missing.
        TypeError: ``names`` is no list.
        ValueError: there is no such game, its ROM has not been imported, it has no such level, one is named twice, or ``directory`` is none.
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
    """Where to look for games; directories that were registered with stable-retro before are so afterwards."""
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
        raise ValueError(f"directory must be one with games of yours, got {directory!r}, which is none")
    return str(path)


def _game(retro: Any, kind: Any, game: str) -> str:
    known = retro.data.list_games(kind)
    full = next((name for name in (game, f"{game}-v0") if name in known), None)
    if full is None:
        near = difflib.get_close_matches(game, known, n=3, cutoff=0.5)
        raise ValueError(
            f"levels has the game {game!r}, but stable-retro knows {', '.join(near) or 'none that is spelled alike'}"
        )
    try:
        retro.data.get_original_romfile_path(full, kind)
    except FileNotFoundError:
        raise ValueError(
            f"levels has the game {game!r}, whose ROM has not been imported: python -m stable_retro.import DIRECTORY"
        ) from None
    return full


def _first(retro: Any, kind: Any, game: str) -> str | None:
    path = retro.data.get_file_path(game, "metadata.json", kind)
    if path is None:
        return None
    return json.loads(Path(path).read_text(encoding="utf-8")).get("default_state")  # type: ignore[no-any-return]


@gin.configurable(module="amago.envs.builtin")
class RetroArcade(gym.Env[Observation, NDArray[np.int8]]):
    """Levels of console games, one drawn for each rollout; rewards are those that stable-retro defines for the game.

    Observation, uint8 ``(H, W, 3)``: the last frame of a step, as large as fits, its proportions kept, in the middle of a border whose
    colour belongs to the game. So pictures of all consoles have one shape, and show what is played.

    Actions, ``MultiBinary(len(buttons))``: a bit for each button that any of the consoles has, the same for the same name. What
    the console at hand lacks does nothing, and neither do combinations that the game's integration leaves out.

    A rollout terminates when the game is over, and truncates at ``time_limit``. Results are logged for each level by `env_name`.

    Args:
        levels: names as `retro_levels` takes them.
        buttons: the bits of an action; None takes those of the levels' consoles. Environments of one agent must have the same.
        resolution: height and width of the picture, border included.
        border: width of the border where the picture touches it, in pixels.
        frame_skip: frames that an action is held for; most consoles have 60 a second.
        sticky_actions: the chance that the buttons of the step before are held for one frame more.
        time_limit: steps of a rollout.
        directory: of games of your own, see `retro_levels`.

    Attributes:
        env_name: "retro_", the game, and the level of this rollout.
        level: that `RetroLevel`.
        horizon: ``time_limit``.

    Each environment has an emulator in a process of its own, which starts with the first `reset` and ends with `close`.

    Raises:
        ImportError: stable-retro or opencv is missing.
        TypeError, ValueError: an argument or an action is wrong; the message quotes it.
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
        self.sticky_actions = check_chance("sticky_actions", sticky_actions)
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
        told, picture = self._emulator.ask(do="step", buttons=buttons, before=self._before, late=late, frames=self.frame_skip)
        self._before = buttons
        self._steps += 1
        terminated = bool(told["over"])
        truncated = self._steps >= self.horizon and not terminated
        self._playing = not (terminated or truncated)
        return self._framed(picture), float(told["reward"]), terminated, truncated, {}

    def _framed(self, picture: Observation) -> Observation:
        shown = np.empty((*self.resolution, 3), dtype=np.uint8)
        shown[:] = game_colour(self.level.game)
        top, left = ((whole - part) // 2 for whole, part in zip(self.resolution, picture.shape, strict=False))
        shown[top : top + picture.shape[0], left : left + picture.shape[1]] = picture
        return shown

    def render(self) -> Any:
        """The console's picture, uint8 ``(H, W, 3)``, as large as it makes it."""
        if self._emulator is None:
            common.refuse_step("RetroArcade")
        return self._emulator.ask(do="screen")[1]

    def close(self) -> None:
        """End the emulator; `reset` starts one again."""
        emulator, self._emulator, self._playing = self._emulator, None, False
        if emulator is not None:
            emulator.close()


def buttons_of(levels: Sequence[RetroLevel]) -> tuple[str, ...]:
    """The names of all buttons of the levels' consoles, in the order in which they come."""
    return tuple(dict.fromkeys(name for level in levels for name in level.buttons if name is not None))


def _named_once(buttons: Sequence[str]) -> tuple[str, ...]:
    if isinstance(buttons, str) or not buttons or len(set(buttons)) < len(buttons):
        raise ValueError(f"buttons must name at least one button, and each once, got {buttons!r}")
    return tuple(str(name) for name in buttons)


def game_colour(game: str) -> tuple[int, int, int]:
    """The colour (red, green, blue) of a game's border; it depends on the game's name alone."""
    mixed = zlib.crc32(game.encode())
    return mixed & 255, mixed >> 8 & 255, mixed >> 16 & 255


class _Process:
    """An emulator in its own process, see `amago.envs.builtin._retro_emulator`."""

    def __init__(self) -> None:
        command = [sys.executable, "-m", "amago.envs.builtin._retro_emulator"]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        self.close = weakref.finalize(self, _end, self._process)

    def ask(self, **request: Any) -> tuple[dict[str, Any], Observation]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):  # the missing answer says it
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(
                f"the emulator has ended with exit code {self._process.wait()} while it was asked to {request['do']}"
            )
        told = json.loads(line)
        if "error" in told:
            raise RuntimeError(f"the emulator failed: {told['error']}")
        shape = tuple(told["shape"])
        picture = np.frombuffer(self._process.stdout.read(int(np.prod(shape))), dtype=np.uint8)
        return told, picture.reshape(shape)


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
