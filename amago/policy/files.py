"""Files with a policy: finding them, reading and writing them, and copying their weights into an agent."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from amago.agent import BaseAgent
from amago.policy.original import adapt_weights
from amago.policy.spec import SPEC_FILE, checked_spec, read_policy_spec
from amago.run import checkpoint
from amago.run.checkpoint import CheckpointError
from amago.run.weights import WeightFile, load_into, load_weight_file, save_weights

SUFFIXES = (".pt", ".safetensors")
_NAMES = ("ckpts/latest/policy.pt", "policy.pt", "policy.safetensors")
"""Where a directory may hold its policy, the best place first."""


def find_run(path: str | Path) -> tuple[Path, Path]:
    """Find a policy's file of weights, and the directory of its run.

    Args:
        path: a file of weights, a training state, or a directory: a run's (its latest weights, or, where it has none, those of its newest
            complete training state), or one that holds ``policy.pt``, ``policy.safetensors``, or a single file of weights.

    Returns:
        (directory, file of weights). The directory is the nearest one with a ``policy.json``, or, where there is none, that of the file.

    Raises:
        CheckpointError: the path does not exist, or holds no weights.
    """
    path = Path(path).expanduser()
    if not path.exists():
        raise CheckpointError(f"{path} does not exist: give a file of weights, or a run directory, which has a {SPEC_FILE}")
    run_dir = _run_directory(path)
    file = path if path.is_file() else _weights_in(path, path == run_dir)
    return run_dir or file.parent, file


def _run_directory(path: Path) -> Path | None:
    """The run directory that ``path`` is or lies in: the nearest one with a ``policy.json``; None if there is none."""
    return next((p for p in (path, *path.parents) if (p / SPEC_FILE).is_file()), None)


def _weights_in(directory: Path, is_run: bool) -> Path:
    """The file of weights that a directory means."""
    if (directory / "model.safetensors").is_file():
        checkpoint.verify(directory)
        return directory / "model.safetensors"
    for name in _NAMES:
        if (directory / name).is_file():
            return directory / name
    newest = checkpoint.newest_complete(directory / "ckpts" / "training_states")
    if newest is not None:
        return newest / "model.safetensors"
    found = sorted(p for p in directory.iterdir() if p.suffix in SUFFIXES and p.is_file())
    if len(found) == 1:
        return found[0]
    if found:
        raise CheckpointError(f"{directory} holds several files of weights; name one: {', '.join(p.name for p in found)}")
    if is_run:
        raise CheckpointError(f"{directory} holds no weights yet: neither {directory / _NAMES[0]} nor a training state")
    runs = sorted(p.name for p in directory.iterdir() if (p / SPEC_FILE).is_file())
    within = f"; it holds the runs {', '.join(runs)}: name one of them" if runs else ""
    raise CheckpointError(
        f"{directory} holds no policy: it is no run directory (no {SPEC_FILE}), no training state (no model.safetensors), and has "
        f"no file of weights (policy.pt, policy.safetensors){within}"
    )


def read_policy_file(path: str | Path, weights: str | Path | None = None) -> tuple[dict[str, Any], WeightFile, Path]:
    """Read what a policy is made of.

    The description is that of the ``policy.json`` if ``path`` is a directory that has one. Otherwise it is the one in the file of weights,
    or, where it has none, the ``policy.json`` of its run.

    Args:
        path: as of `find_run`.
        weights: a file of weights to read instead of those of ``path``, which then only gives the description.

    Returns:
        the description, the weights, and the file that they come from.

    Raises:
        CheckpointError: there are no weights or no description, or they are damaged.
    """
    path = Path(path).expanduser()
    file = find_run(path)[1] if weights is None else Path(weights).expanduser()
    loaded = load_weight_file(file)
    if (path / SPEC_FILE).is_file():
        return read_policy_spec(path), loaded, file
    if weights is None:
        return _description(file, loaded.description), loaded, file
    described = find_run(path)[1] if path.is_dir() else path
    return _description(described, load_weight_file(described).description), loaded, file


def _description(path: Path, own: dict[str, Any] | None) -> dict[str, Any]:
    """The description of a policy: that of the file itself, or that of the run in which it lies."""
    if own is not None:
        return checked_spec(own, path)
    run_dir = _run_directory(path)
    if run_dir is None:
        raise CheckpointError(
            f"{path} holds weights alone, without the description of the policy that they belong to, and there is no {SPEC_FILE} beside "
            "it or above. Leave it in the directory of its run, or load it as load_policy(RUN, weights=FILE) with the run of an agent "
            "of the same classes and sizes; Policy.save writes files that need nothing else"
        )
    return read_policy_spec(run_dir)


def save_policy_file(agent: BaseAgent, description: Mapping[str, Any], path: str | Path, version: int = 0) -> Path:
    """Write an agent and its description to one file, for `read_policy_file`.

    Raises:
        ValueError: the path ends neither in ``.pt`` nor in ``.safetensors``.
    """
    path = Path(path).expanduser()
    if path.suffix not in SUFFIXES:
        raise ValueError(f"path={str(path)!r} must end in {' or '.join(SUFFIXES)}; `Policy.export` writes .onnx and .pt2")
    save_weights(agent.state_dict(), path, version, description)
    return path


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
    file = load_weight_file(path)
    copy_weights(agent, file, path)
    return file.version


def copy_weights(agent: BaseAgent, file: WeightFile, path: str | Path) -> None:
    """`load_agent_weights` with the content of the file; the path is for the message."""
    try:
        weights = adapt_weights(file.weights, agent)
    except CheckpointError as err:
        raise CheckpointError(f"{path}: {err}") from err
    load_into(agent, weights, path)
