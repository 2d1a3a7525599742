"""The emulator of a `RetroArcade` in a separate process, because stable-retro supports only one per process, and its client.

The process reads requests from standard input, one line of JSON each, and replies on standard output with a line of JSON followed by the
bytes of an image. It exits at the end of its input.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import weakref
from types import ModuleType
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from amago.registry import require

Picture = NDArray[np.uint8]


def integrations(retro: ModuleType, directory: str | None) -> Any:
    """Set stable-retro's search paths to its own and ``directory``; returns the value of `Integrations` that searches them."""
    kinds = retro.data.Integrations
    kinds.clear_custom_paths()
    if directory is not None:
        kinds.add_custom_path(directory)
    return kinds.ALL


def fit(cv2: ModuleType, screen: Picture, height: int, width: int) -> Picture:
    """The image scaled to fit into (height, width), with its proportions kept."""
    scale = min(height / screen.shape[0], width / screen.shape[1])
    size = max(1, round(screen.shape[0] * scale)), max(1, round(screen.shape[1] * scale))
    if size == screen.shape[:2]:
        return np.ascontiguousarray(screen)
    picture: Picture = cv2.resize(np.ascontiguousarray(screen), size[::-1], interpolation=cv2.INTER_AREA)
    return picture


class Emulator:
    """Handle requests: the value of "do" names the method, all other keys are its arguments."""

    def __init__(self) -> None:
        self.retro, self.cv2 = require("stable_retro", "retro"), require("cv2", "retro")
        self.env: Any = None
        self.power_on: bytes = b""
        self.game: tuple[str, str | None] | None = None
        self.size = (84, 84)

    def play(self, game: str, state: str | None, directory: str | None, size: list[int]) -> tuple[dict[str, Any], Picture]:
        """Begin a level; ``state`` None starts the console."""
        kind = integrations(self.retro, directory)
        self.size = (size[0], size[1])
        if self.game != (game, directory):
            if self.env is not None:
                self.env.close()
            self.env = self.game = None
            self.env = self.retro.RetroEnv(game, self.retro.State.NONE, inttype=kind, render_mode=None)
            self.power_on, self.game = self.env.em.get_state(), (game, directory)
        if state is None:
            self.env.initial_state = self.power_on
        else:
            self.env.load_state(state, kind)
        self.env.reset()
        return {}, self._look()

    def step(self, buttons: list[int], before: list[int], late: int, frames: int) -> tuple[dict[str, Any], Picture]:
        """Hold ``before`` for ``late`` frames, then ``buttons``; stops after ``frames`` or at the end of the level."""
        env, reward, over, frame = self.env, 0.0, False, 0
        masks = [env.action_to_array(np.array(pressed, dtype=np.int8))[0] for pressed in (before, buttons)]
        while frame < frames and not over:  # like `RetroEnv.step`, without the images of intermediate frames
            env.em.set_button_mask(masks[frame >= late], 0)
            env.em.step()
            env.data.update_ram()
            reward, over, frame = reward + float(env.data.current_reward()), bool(env.data.is_done()), frame + 1
        return {"reward": reward, "over": over}, self._look()

    def screen(self) -> tuple[dict[str, Any], Picture]:
        return {}, np.ascontiguousarray(self.env.get_screen(apply_rotation=True))

    def _look(self) -> Picture:
        return fit(self.cv2, self.env.get_screen(apply_rotation=True), *self.size)


class EmulatorProcess:
    """Start this module in a separate process, and send it requests."""

    def __init__(self) -> None:
        command = [sys.executable, "-m", "amago.envs.builtin._retro_emulator"]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        self.close = weakref.finalize(self, _end, self._process)

    def ask(self, **request: object) -> tuple[dict[str, Any], Picture]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):  # reported below, because there will be no reply
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


def serve(requests: BinaryIO, answers: BinaryIO) -> None:
    """Handle requests until the end of the input. The reply to a request that raised an exception is {"error": message}."""
    emulator: Emulator | None = None
    for line in requests:
        try:
            emulator = emulator or Emulator()
            arguments = json.loads(line)
            result, picture = getattr(emulator, arguments.pop("do"))(**arguments)
            head, body = result | {"shape": picture.shape}, picture.tobytes()
        except Exception as err:
            head, body = {"error": f"{type(err).__name__}: {err}"}, b""
        answers.write(json.dumps(head).encode() + b"\n" + body)
        answers.flush()


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches this process too, but its parent decides when it ends
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # output printed by emulators must not mix with the replies
    serve(sys.stdin.buffer, answers)
