"""Random streams: seeding the generators of a process, and saving and restoring their state."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch


def draw_seed() -> int:
    """A seed from the operating system."""
    return int(np.random.SeedSequence().generate_state(1)[0])


def seed_process(key: tuple[int, ...]) -> None:
    """Seed the generators of PyTorch, NumPy and Python from one key."""
    torch_seed, numpy_seed, python_seed = np.random.SeedSequence(key).generate_state(3).tolist()
    torch.manual_seed(torch_seed)
    np.random.seed(numpy_seed)
    random.seed(python_seed)


def rng_state() -> dict[str, Any]:
    """The state of these generators (and those of CUDA), as JSON types."""
    legacy: Any = np.random.get_state(legacy=True)
    name, keys, pos, has_gauss, gauss = legacy
    version, internal, gauss_next = random.getstate()
    state: dict[str, Any] = {
        "torch": torch.get_rng_state().tolist(),
        "numpy": [name, keys.tolist(), int(pos), int(has_gauss), float(gauss)],
        "python": [version, list(internal), gauss_next],
    }
    if torch.cuda.is_available():
        state["cuda"] = [s.tolist() for s in torch.cuda.get_rng_state_all()]
    return state


def set_rng_state(state: Mapping[str, Any]) -> None:
    """Restore a state from `rng_state`. Streams of CUDA are restored if the number of GPUs is the same."""
    torch.set_rng_state(torch.tensor(state["torch"], dtype=torch.uint8))
    name, keys, pos, has_gauss, gauss = state["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), pos, has_gauss, gauss))
    version, internal, gauss_next = state["python"]
    random.setstate((version, tuple(internal), gauss_next))
    if "cuda" in state and torch.cuda.is_available() and len(state["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all([torch.tensor(s, dtype=torch.uint8) for s in state["cuda"]])
