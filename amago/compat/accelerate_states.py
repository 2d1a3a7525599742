"""Training states that `accelerate.Accelerator.save_state` has written.

Fact served: ``save_checkpoint`` is overridden with ``accelerator.save_state(directory, safe_serialization=False)``, and the original system
saves so itself: weights, the optimizer's state, and the schedule as ``scheduler.bin`` or as the first custom object. Random states are
pickles, and are not read.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from accelerate.scheduler import AcceleratedScheduler
from safetensors.torch import load_file

from amago.agent import BaseAgent
from amago.run.checkpoint import MANIFEST, CheckpointError, check_archive, load_into

_WEIGHTS = ("model.safetensors", "pytorch_model.bin")
_SCHEDULES = ("scheduler.bin", "custom_checkpoint_0.pkl")


def is_one(path: Path) -> bool:
    """True if a directory is a training state of Accelerate, and not one of this library's."""
    return not (path / MANIFEST).exists() and any((path / name).is_file() for name in _WEIGHTS)


def load(path: Path, policy: BaseAgent, optimizer: object, schedule: object) -> int:
    """Load weights, the optimizer's state and the schedule; returns the updates that the schedule has counted.

    A CheckpointError names a file that is damaged, holds other objects than tensors and numbers, or does not fit.
    """
    weights = next(path / name for name in _WEIGHTS if (path / name).is_file())
    load_into(policy, _read(weights), weights)
    if (path / "optimizer.bin").is_file():
        _into(optimizer, path / "optimizer.bin")
    found = [path / name for name in _SCHEDULES if (path / name).is_file()]
    if not found:
        return 0
    state = _into(schedule.scheduler if isinstance(schedule, AcceleratedScheduler) else schedule, found[0])
    return int(state.get("last_epoch", 0))


def _into(part: Any, path: Path) -> dict[str, Any]:
    state = _read(path)
    try:
        part.load_state_dict(state)
    except (ValueError, KeyError, TypeError) as err:
        raise CheckpointError(
            f"{path} does not fit this run: {err}; load_checkpoint_from_path(WEIGHTS, is_accelerate_state=False) loads the weights alone"
        ) from err
    return state


def _read(path: Path) -> dict[str, Any]:
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        with open(path, "rb") as f:
            check_archive(f)
            found = torch.load(f, map_location="cpu", weights_only=True)
    except Exception as err:
        raise CheckpointError(f"{path} cannot be read: {(str(err) or repr(err)).splitlines()[0]}") from err
    if not isinstance(found, dict):
        raise CheckpointError(f"{path} holds a {type(found).__name__}, not a state dict")
    return found
