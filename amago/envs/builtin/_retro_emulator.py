"""The emulator's process of `amago.envs.builtin.retro`. stable-retro supports only one emulator per process.

It reads requests from standard input, one line of JSON each, and answers on standard output with a line of JSON followed by the
bytes of an image. It exits at the end of its input.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from amago.envs.builtin._extras import require

Picture = NDArray[np.uint8]


def integrations(retro: Any, directory: str | None) -> Any:
    """Set stable-retro's search paths to its own and ``directory``; returns the value of `Integrations` that searches them."""
    kinds = retro.data.Integrations
    kinds.clear_custom_paths()
    if directory is not None:
        kinds.add_custom_path(directory)
    return kinds.ALL


def fitted(cv2: Any, screen: Picture, height: int, width: int) -> Picture:
    """The image scaled to fit into (height, width), with its proportions kept."""
    scale = min(height / screen.shape[0], width / screen.shape[1])
    size = max(1, round(screen.shape[0] * scale)), max(1, round(screen.shape[1] * scale))
    if size == screen.shape[:2]:
        return np.ascontiguousarray(screen)
    picture: Picture = cv2.resize(np.ascontiguousarray(screen), size[::-1], interpolation=cv2.INTER_AREA)
    return picture


class Emulator:
    """Handles requests: the value of "do" names the method, all other keys are its arguments."""

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
        """Hold the buttons ``before`` for ``late`` frames, then ``buttons``; stops after ``frames`` or at the end of the
        level."""
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
        return fitted(self.cv2, self.env.get_screen(apply_rotation=True), *self.size)


def serve(requests: BinaryIO, answers: BinaryIO) -> None:
    """Answer requests until the end of the input. Exceptions are answered as {"error": message}."""
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
    os.dup2(2, 1)  # what emulators print must not mix with the answers
    serve(sys.stdin.buffer, answers)
