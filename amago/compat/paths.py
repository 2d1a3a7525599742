"""Directories as text.

The fact that this serves: `Experiment.ckpt_dir` of the original system is a str, which subclasses join with ``+`` and `os.path.join`.
"""

from __future__ import annotations

from os import PathLike
from pathlib import Path


class TextPath(str):
    """A path as a str that also has the ``/`` of `pathlib.Path`, which gives a `Path`."""

    def __new__(cls, path: str | PathLike[str]) -> TextPath:
        return super().__new__(cls, Path(path))

    def __truediv__(self, name: str | PathLike[str]) -> Path:
        return Path(self) / name
