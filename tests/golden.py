"""Golden vectors: inputs, weights and outputs of each component, computed once with a trusted implementation."""

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

Arrays = dict[str, np.ndarray]


def directory() -> Path:
    """Where the vectors are: $AMAGO_GOLDEN, or ``shared/golden`` beside the repository."""
    beside = Path(__file__).resolve().parents[2] / "shared" / "golden"
    return Path(os.environ.get("AMAGO_GOLDEN", beside))


def load(name: str) -> tuple[Arrays, Arrays, dict[str, Any]]:
    """Arrays, weights by parameter name, and the description of one component; skips the test where there are none."""
    path = directory() / f"{name}.npz"
    if not path.is_file():
        pytest.skip(f"no golden vectors at {path} (set AMAGO_GOLDEN to their directory)")
    with np.load(path, allow_pickle=False) as file:
        stored = {k: file[k] for k in file.files}
    prefix = "weights/"
    arrays = {k: v for k, v in stored.items() if not k.startswith(prefix)}
    weights = {k[len(prefix) :]: v for k, v in stored.items() if k.startswith(prefix)}
    return arrays, weights, json.loads(path.with_suffix(".json").read_text())
