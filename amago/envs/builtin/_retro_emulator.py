"""The other side of `amago.envs.builtin.retro`: one emulator, in a process of its own, because no process can hold two.

Asked by lines of JSON on standard input, it answers each with a line of JSON and the bytes of a picture on standard output. It ends when
its input does.
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
    """Where stable-retro looks for games: wherever its import puts ROMs, and in a directory of yours."""
    kinds = retro.data.Integrations
    kinds.clear_custom_paths()
    if directory is not None:
        kinds.add_custom_path(directory)
    return kinds.ALL


def fitted(cv2: Any, screen: Picture, height: int, width: int) -> Picture:
    """A console's picture as large as fits into (height, width), its proportions kept."""
    scale = min(height / screen.shape[0], width / screen.shape[1])
    size = max(1, round(screen.shape[0] * scale)), max(1, round(screen.shape[1] * scale))
    if size == screen.shape[:2]:
        return np.ascontiguousarray(screen)
    picture: Picture = cv2.resize(np.ascontiguousarray(screen), size[::-1], interpolation=cv2.INTER_AREA)
    return picture


class Emulator:
    """What the requests act on; their names are those of the methods."""

    def __init__(self) -> None:
        self.retro, self.cv2 = require("stable_retro", "retro"), require("cv2", "retro")
        self.env: Any = None
        self.power_on: bytes = b""
        self.game: tuple[str, str | None] | None = None
        self.size = (84, 84)

    def play(self, game: str, state: str | None, directory: str | None, size: list[int]) -> tuple[dict[str, Any], Picture]:
        """From the beginning of a level; ``state`` None is the moment when the console is switched on."""
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
        """Hold ``before`` for the first ``late`` of ``frames``, then ``buttons``, until the level is over."""
        env, reward, over, frame = self.env, 0.0, False, 0
        masks = [env.action_to_array(np.array(pressed, dtype=np.int8))[0] for pressed in (before, buttons)]
        while frame < frames and not over:  # what `RetroEnv.step` does, but for the pictures in between
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
    """Answer requests until there are no more. What goes wrong is an answer, too."""
    emulator: Emulator | None = None
    for line in requests:
        try:
            emulator = emulator or Emulator()
            arguments = json.loads(line)
            told, picture = getattr(emulator, arguments.pop("do"))(**arguments)
            head, body = told | {"shape": picture.shape}, picture.tobytes()
        except Exception as err:
            head, body = {"error": f"{type(err).__name__}: {err}"}, b""
        answers.write(json.dumps(head).encode() + b"\n" + body)
        answers.flush()


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes of a terminal; this one ends with its owner
    own = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # emulators print
    serve(sys.stdin.buffer, own)
