"""Finding a run's weights on disk, and copying them into an agent."""

from __future__ import annotations

import os
from pathlib import Path

from amago.agent import BaseAgent
from amago.policy.original import adapt_weights
from amago.policy.spec import SPEC_FILE
from amago.run import checkpoint
from amago.run.checkpoint import CheckpointError
from amago.run.weights import load_into, load_weights_and_version


def run_directory(path: str | Path) -> Path:
    """The run directory that ``path`` is or lies in: the nearest one with a ``policy.json``.

    Raises:
        CheckpointError: there is none.
    """
    path = Path(path).expanduser()
    run_dir = next((p for p in (path, *path.parents) if (p / SPEC_FILE).is_file()), None)
    if run_dir is None:
        raise CheckpointError(f"{path} is neither a run directory nor inside one (no {SPEC_FILE} there or above)")
    return run_dir


def find_run(path: str | Path) -> tuple[Path, Path]:
    """Find a run directory and its weights.

    Args:
        path: a run directory, or a weight file or a training state inside one. A run directory means its latest weights, or,
            where it has none, those of its newest complete training state.

    Returns:
        (run directory, file of weights).

    Raises:
        CheckpointError: the path does not exist, or holds no weights.
    """
    path, run_dir = Path(path).expanduser(), run_directory(path)
    if not path.exists():
        raise CheckpointError(f"{path} does not exist")
    if path.is_file():
        return run_dir, path
    if (path / "model.safetensors").is_file():
        checkpoint.verify(path)
        return run_dir, path / "model.safetensors"
    if path != run_dir:
        raise CheckpointError(f"{path} is not a training state: it has no model.safetensors")
    latest = run_dir / "ckpts" / "latest" / "policy.pt"
    if latest.is_file():
        return run_dir, latest
    newest = checkpoint.newest_complete(run_dir / "ckpts" / "training_states")
    if newest is None:
        raise CheckpointError(f"{run_dir} holds no weights yet: neither {latest} nor a training state")
    return run_dir, newest / "model.safetensors"


def find_weights(path: str | os.PathLike[str]) -> Path:
    """The file of weights that a path means: a file itself, that of a training state, or the one that `find_run` finds.

    Raises:
        CheckpointError: there is none.
    """
    path = Path(path).expanduser()
    if path.is_file():
        return path
    inside = path / "model.safetensors"
    if inside.is_file():
        checkpoint.verify(path)
        return inside
    return find_run(path)[1]


def load_agent_weights(agent: BaseAgent, path: str | Path) -> int:
    """Copy a file of weights into an agent: all of them, or none if one does not fit.

    Args:
        agent: has the classes and sizes that the weights were trained with.
        path: weights of this library, or a state dict of the original system.

    Returns:
        the version that the weights were published with; 0 where there is none.

    Raises:
        CheckpointError: the file is missing or damaged, or does not fit; the message lists every name without a counterpart.
    """
    weights, version = load_weights_and_version(path)
    try:
        weights = adapt_weights(weights, agent)
    except CheckpointError as err:
        raise CheckpointError(f"{path}: {err}") from err
    load_into(agent, weights, path)
    return version
