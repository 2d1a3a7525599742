"""Training states that are complete or absent, and policy weights as other processes see them.

A training state is a directory, written under a temporary name with a manifest of checksums, fsynced, and renamed. Nothing
here pickles: weights are safetensors or ``torch.load(weights_only=True)``, everything else is JSON.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import random
import re
import shutil
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

log = logging.getLogger(__name__)
MANIFEST = "manifest.json"


class CheckpointError(RuntimeError):
    """A checkpoint is missing, incomplete or damaged; the message names the file."""


# ---- random streams ------------------------------------------------------------------------------------------------------


def rng_state() -> dict[str, Any]:
    """The state of every generator of this process, as JSON types."""
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
    """Continue where `rng_state` was taken."""
    torch.set_rng_state(torch.tensor(state["torch"], dtype=torch.uint8))
    name, keys, pos, has_gauss, gauss = state["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), pos, has_gauss, gauss))
    version, internal, gauss_next = state["python"]
    random.setstate((version, tuple(internal), gauss_next))
    if "cuda" in state and torch.cuda.is_available() and len(state["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all([torch.tensor(s, dtype=torch.uint8) for s in state["cuda"]])


# ---- writing -------------------------------------------------------------------------------------------------------------


def _fsync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _digest(path: Path) -> str:
    h = hashlib.sha256()
    with open(path, "rb") as f:
        while chunk := f.read(1 << 20):
            h.update(chunk)
    return h.hexdigest()


def atomic_write(path: Path, write: Callable[[Path], None]) -> None:
    """Let ``write`` fill a temporary file beside ``path``, then put it in place: readers see the old one or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    tmp = path.parent / f".tmp-{uuid.uuid4().hex}{path.suffix}"
    try:
        write(tmp)
        _fsync(tmp)
        os.replace(tmp, path)
        _fsync(path.parent)
    finally:
        tmp.unlink(missing_ok=True)


def save_weights(state_dict: Mapping[str, Tensor], path: Path) -> None:
    """A plain PyTorch weight file, replaced atomically."""
    cpu = {k: v.detach().cpu().clone() for k, v in state_dict.items()}
    atomic_write(path, lambda tmp: torch.save(cpu, tmp))


def load_weights(path: str | os.PathLike[str]) -> dict[str, Tensor]:
    """Weights from a ``.safetensors`` file or a PyTorch file that holds tensors only.

    Raises:
        CheckpointError: no such file, or not a file of weights (pickled objects are never loaded).
    """
    path = Path(path)
    if not path.is_file():
        raise CheckpointError(f"no weights at {path}")
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        loaded = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as err:
        raise CheckpointError(f"{path} is not a readable file of weights: {str(err).splitlines()[0]}") from err
    if not isinstance(loaded, dict) or not all(isinstance(v, Tensor) for v in loaded.values()):
        raise CheckpointError(f"{path} does not hold a state dict (parameter name -> tensor)")
    return loaded


def load_into(module: nn.Module, weights: Mapping[str, Tensor], path: str | os.PathLike[str]) -> None:
    """Copy ``weights``, read from ``path``, into a module: all of them or none.

    Raises:
        CheckpointError: a name is missing or unknown, or a shape differs.
    """
    own = module.state_dict()
    problems = [f"it lacks {name}" for name in own if name not in weights]
    problems += [f"the agent has no {name}" for name in weights if name not in own]
    problems += [
        f"{name} has shape {tuple(w.shape)}, not {tuple(own[name].shape)}"
        for name, w in weights.items()
        if name in own and w.shape != own[name].shape
    ]
    if problems:
        more = f" (and {len(problems) - 3} more)" if len(problems) > 3 else ""
        raise CheckpointError(f"{path} does not fit this agent, its encoders and sizes: {'; '.join(problems[:3])}{more}")
    module.load_state_dict(weights)


def save_training_state(
    directory: Path,
    weights: Mapping[str, Tensor],
    tensors: Mapping[str, Any],
    state: Mapping[str, Any],
) -> None:
    """Write a complete training state, or nothing.

    Args:
        directory: where it shall lie; an older one there is replaced.
        weights: the model's state dict.
        tensors: further state of tensors and numbers (optimizer), as ``torch.load(weights_only=True)`` takes it.
        state: everything else, as JSON types.
    """
    directory.parent.mkdir(parents=True, exist_ok=True)
    tmp = directory.parent / f".tmp-{uuid.uuid4().hex}"
    tmp.mkdir()
    try:
        save_file({k: v.detach().cpu().contiguous().clone() for k, v in weights.items()}, tmp / "model.safetensors")
        torch.save(dict(tensors), tmp / "optimizer.pt")
        (tmp / "state.json").write_text(json.dumps(state))
        sums = {p.name: {"sha256": _digest(p), "bytes": p.stat().st_size} for p in sorted(tmp.iterdir())}
        (tmp / MANIFEST).write_text(json.dumps({"schema": 1, "files": sums}, indent=1))
        for p in tmp.iterdir():
            _fsync(p)
        _fsync(tmp)
        old = None
        if directory.exists():  # a directory cannot be replaced in one step: the old one stays loadable under another name
            old = directory.parent / f".old-{uuid.uuid4().hex}-{directory.name}"
            os.rename(directory, old)
        os.rename(tmp, directory)
        _fsync(directory.parent)
        if old is not None:
            shutil.rmtree(old)
    finally:
        shutil.rmtree(tmp, ignore_errors=True)


# ---- reading -------------------------------------------------------------------------------------------------------------


def verify(directory: Path) -> None:
    """Check a training state against its manifest.

    Raises:
        CheckpointError: naming the file that is missing or differs.
    """
    manifest = directory / MANIFEST
    if not manifest.is_file():
        raise CheckpointError(f"{directory} is no complete training state: it has no {MANIFEST}")
    try:
        files = json.loads(manifest.read_text())["files"]
        sums = [(directory / Path(name).name, entry["bytes"], entry["sha256"]) for name, entry in files.items()]
    except (ValueError, KeyError, TypeError, AttributeError) as err:
        raise CheckpointError(f"{manifest} is damaged") from err
    for path, size, digest in sums:
        if not path.is_file():
            raise CheckpointError(f"{path} is missing")
        if path.stat().st_size != size or _digest(path) != digest:
            raise CheckpointError(f"{path} is damaged: its checksum differs from the manifest")


def load_training_state(directory: Path) -> tuple[dict[str, Tensor], dict[str, Any], dict[str, Any]]:
    """(weights, tensors, state) as they were given to `save_training_state`, verified.

    Raises:
        CheckpointError: incomplete, damaged, or not of tensors and numbers alone (pickled objects are never loaded).
    """
    verify(directory)
    weights = load_file(directory / "model.safetensors")
    path = directory / "optimizer.pt"
    try:
        tensors = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as err:
        raise CheckpointError(f"{path} cannot be read: {str(err).splitlines()[0]}") from err
    return weights, tensors, json.loads((directory / "state.json").read_text())


def training_states(root: Path, run_name: str) -> dict[int, Path]:
    """Epoch -> directory of every training state under ``root``, oldest first (not yet verified)."""
    found = {}
    pattern = re.compile(rf"^(\.old-[0-9a-f]+-)?{re.escape(run_name)}_epoch_(\d+)$")
    for path in root.iterdir() if root.is_dir() else ():
        if match := pattern.match(path.name):
            epoch = int(match[2])
            if not match[1] or epoch not in found:
                found[epoch] = path
    return dict(sorted(found.items()))


def newest_complete(root: Path, run_name: str) -> Path | None:
    """The newest training state that verifies; None if there never was any.

    Raises:
        CheckpointError: there are some, and all are damaged.
    """
    states = training_states(root, run_name)
    problems = []
    for directory in reversed(states.values()):
        try:
            verify(directory)
            return directory
        except CheckpointError as err:
            log.warning("skipping a damaged checkpoint: %s", err)
            problems.append(str(err))
    if problems:
        raise CheckpointError("no complete checkpoint to resume from: " + "; ".join(problems))
    return None


def prune(root: Path, run_name: str, keep: int | None) -> None:
    """Delete all but the newest ``keep`` training states, and what interrupted saves left behind."""
    for path in root.glob(".tmp-*"):
        shutil.rmtree(path, ignore_errors=True)
    for path in root.glob(".old-*"):
        if (root / path.name.split("-", 2)[2]).exists():  # else it is the only one of its epoch
            shutil.rmtree(path, ignore_errors=True)
    if keep is not None:
        for directory in list(training_states(root, run_name).values())[: -keep or None]:
            shutil.rmtree(directory, ignore_errors=True)
