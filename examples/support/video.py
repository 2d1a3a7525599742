"""A film of a rollout, without further packages than Pillow."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
from numpy.typing import NDArray

from amago.registry import require


class VideoRecorder(gym.Wrapper[Any, Any, Any, Any]):
    """Write the first complete rollout of an environment as an animated GIF, without further packages than Pillow.

    Args:
        env: an environment with ``render_mode="rgb_array"``.
        path: path of the file. Missing directories are created.
    """

    def __init__(self, env: gym.Env[Any, Any], path: str | Path) -> None:
        super().__init__(env)
        if env.render_mode != "rgb_array":
            raise ValueError(f'env must have render_mode="rgb_array", got {env.render_mode!r}')
        self.path = Path(path)
        self._frames: list[NDArray[np.uint8]] = []
        self._written = False

    @property
    def env_name(self) -> str:
        return self.env.env_name  # type: ignore[attr-defined,no-any-return]

    def reset(self, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        out = self.env.reset(**kwargs)
        self._frames = [] if self._written else [self._frame()]
        return out

    def step(self, action: object) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        out = self.env.step(action)
        if not self._written:
            self._frames.append(self._frame())
            if out[2] or out[3]:
                self._write()
        return out

    def _frame(self) -> NDArray[np.uint8]:
        return self.env.render()  # type: ignore[return-value]

    def _write(self) -> None:
        image = require("PIL.Image", "crafter")
        first, *rest = [image.fromarray(frame).quantize() for frame in self._frames]
        self.path.parent.mkdir(parents=True, exist_ok=True)
        first.save(
            self.path, save_all=True, append_images=rest, duration=1000 // self.env.metadata.get("render_fps", 10), loop=0
        )
        self._frames, self._written = [], True
