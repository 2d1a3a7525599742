"""Files with the weights of a policy, for processes that only act."""

from __future__ import annotations

import os
import zipfile
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from amago.run.checkpoint import CheckpointError, atomic_write, save_tensors
from amago.run.torch_archive import check_archive

_METADATA = "amago"  # our entry in the metadata that PyTorch stores with a state dict


def save_weights(state_dict: Mapping[str, Tensor], path: Path, version: int = 0) -> None:
    """Write a PyTorch weight file, replacing an older one atomically.

    Args:
        version: number of the publication, for `load_weights_and_version`.
    """
    cpu = OrderedDict((k, v.detach().cpu().clone()) for k, v in without_aliases(state_dict).items())
    first = {_place(state_dict[k]): v for k, v in cpu.items()}
    cpu |= {k: first[_place(v)] for k, v in state_dict.items() if k not in cpu}  # which the file holds once
    cpu._metadata = {_METADATA: {"version": version}}  # type: ignore[attr-defined]
    atomic_write(path, lambda tmp: save_tensors(cpu, tmp))


def _place(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride()


def without_aliases(state_dict: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The entries of a state dict that do not repeat an earlier one, memory and all. The others are second names, such as
    ``maximized_critics``."""
    seen: set[tuple[Any, ...]] = set()
    kept = {}
    for name, tensor in state_dict.items():
        place = _place(tensor)
        if not tensor.numel() or place not in seen:
            kept[name] = tensor
        seen.add(place)
    return kept


def load_weights(path: str | os.PathLike[str]) -> dict[str, Tensor]:
    """Load weights from a ``.safetensors`` file, or from a PyTorch file that holds tensors only.

    Raises:
        CheckpointError: no such file, damaged, or not a file of weights (pickled objects are never loaded).
    """
    return load_weights_and_version(path)[0]


def load_weights_and_version(path: str | os.PathLike[str]) -> tuple[dict[str, Tensor], int]:
    """`load_weights`, and the version given to `save_weights`; 0 if the file has none."""
    path = Path(path)
    if not path.is_file():
        raise CheckpointError(f"no weights at {path}")
    try:
        if path.suffix == ".safetensors":
            return load_file(path), 0
        with open(path, "rb") as f:  # opened once: another process may replace the file at any time
            check_archive(f)
            loaded = torch.load(f, map_location="cpu", weights_only=True)
            ours = getattr(loaded, "_metadata", {}).get(_METADATA)
            damaged = None if ours is None else zipfile.ZipFile(f).testzip()  # PyTorch does not verify the checksums
    except Exception as err:
        raise CheckpointError(f"{path} is not a readable file of weights: {(str(err) or repr(err)).splitlines()[0]}") from err
    if damaged is not None:
        raise CheckpointError(f"{path} is damaged: the checksum of {damaged} differs")
    if not isinstance(loaded, dict) or not all(isinstance(v, Tensor) for v in loaded.values()):
        raise CheckpointError(f"{path} does not hold a state dict (parameter name -> tensor)")
    return dict(loaded), ours["version"] if isinstance(ours, dict) and isinstance(ours.get("version"), int) else 0


def load_into(module: nn.Module, weights: Mapping[str, Tensor], path: str | os.PathLike[str]) -> None:
    """Copy weights into a module: all of them or none. Second names of one tensor may be missing.

    Args:
        path: the file of the weights, for the message.

    Raises:
        CheckpointError: lists all names that are missing or unknown, and all shapes that differ.
    """
    own = module.state_dict()
    missing = [name for name in without_aliases(own) if name not in weights]
    unknown = [name for name in weights if name not in own]
    problems = [f"it lacks {', '.join(missing)}"] if missing else []
    problems += [f"the agent has no {', '.join(unknown)}"] if unknown else []
    problems += [
        f"{name} has shape {tuple(w.shape)}, not {tuple(own[name].shape)}"
        for name, w in weights.items()
        if name in own and w.shape != own[name].shape
    ]
    if problems:
        raise CheckpointError(f"{path} does not fit this agent, its encoders and sizes: {'; '.join(problems)}")
    module.load_state_dict(weights)
