"""The source of ``amago buffer import`` that is a buffer of the original system."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np

from amago.cli import space_syntax
from amago.loading.offline.original import OriginalDataset, action_width, files_of_original


def open_original(
    path: Path,
    root: Path,
    obs_space: gym.Space[Any] | None,
    action_space: gym.Space[Any] | str | None,
    env_name: str | None,
    allow_pickle: bool,
) -> OriginalDataset:
    """The files of the original system in ``path``, to be copied into the buffer ``root``.

    Args:
        action_space: or its text (`amago.cli.space_syntax`).
        obs_space, env_name, allow_pickle: as of `OriginalDataset`.

    Raises:
        ValueError: there is no action space, or files lie in ``root`` already.
    """
    if action_space is None:
        raise ValueError(
            f"the files in {path} do not say what their actions are: give the environment's id (--env ID), or its action space "
            f"(--action-space SPACE; {space_syntax.KINDS})"
        )
    inside = [f for f in files_of_original(path) if f.suffix == ".npz" and f.resolve().is_relative_to(root.resolve())]
    if inside:
        raise ValueError(
            f"{inside[0]} lies in the buffer {root}, where it is sampled already; after an import it would be there twice"
        )
    if not isinstance(action_space, gym.Space):
        action_space = space_syntax.fitted(action_space, np.zeros((1, action_width(path, allow_pickle))), path)
    return OriginalDataset(path, action_space, obs_space, env_name, allow_pickle)
