"""Files with the weights of a policy, for processes that only act."""

from __future__ import annotations

import json
import os
import zipfile
import zlib
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from safetensors.torch import save as safetensors_bytes
from torch import Tensor, nn

from amago.run.checkpoint import CheckpointError, atomic_write, save_tensors
from amago.run.torch_archive import check_archive

_METADATA = "amago"  # our entry in the metadata that PyTorch stores with a state dict, and in the header of safetensors


class WeightFile(NamedTuple):
    """The content of a file of weights.

    Attributes:
        weights: by name.
        version: number of the publication; 0 if the file has none.
        description: of the policy, as JSON types; None if the file has none.
    """

    weights: dict[str, Tensor]
    version: int = 0
    description: dict[str, Any] | None = None


def save_weights(
    state_dict: Mapping[str, Tensor], path: Path, version: int = 0, description: Mapping[str, Any] | None = None
) -> None:
    """Write a file of weights, replacing an older one atomically.

    A ``.safetensors`` file has version and description in its header. Any other is a PyTorch state dict, which
    ``torch.load(weights_only=True)`` reads like one that holds nothing else: version and description are in the metadata that PyTorch
    itself stores with a state dict.

    Args:
        version: number of the publication, for `load_weights_and_version`.
        description: of the policy, as JSON types, for `load_weight_file`.
    """
    ours: dict[str, Any] = {"version": version} | ({} if description is None else {"description": json.dumps(description)})
    if path.suffix == ".safetensors":  # a format that cannot hold one tensor under two names
        cpu = OrderedDict((k, v.detach().cpu().contiguous().clone()) for k, v in state_dict.items())
        content = safetensors_bytes(cpu, {_METADATA: json.dumps(ours | {"crc32": _crc32(cpu)})})
        atomic_write(path, lambda tmp: _write(content, tmp))
        return
    once = {_place(v): v.detach().cpu().contiguous().clone() for v in without_aliases(state_dict).values()}
    cpu = OrderedDict((k, once[_place(v)] if v.numel() else v.detach().cpu().clone()) for k, v in state_dict.items())
    cpu._metadata = {_METADATA: ours}  # type: ignore[attr-defined]
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
    return load_weight_file(path).weights


def load_weights_and_version(path: str | os.PathLike[str]) -> tuple[dict[str, Tensor], int]:
    """`load_weights`, and the version given to `save_weights`; 0 if the file has none."""
    file = load_weight_file(path)
    return file.weights, file.version


def load_weight_file(path: str | os.PathLike[str]) -> WeightFile:
    """`load_weights`, with the version and the description that the file has."""
    path = Path(path)
    if not path.is_file():
        raise CheckpointError(f"no weights at {path}")
    try:
        loaded, ours, damaged = _read_safetensors(path) if path.suffix == ".safetensors" else _read_pytorch(path)
        ours = ours if isinstance(ours, dict) else {}
        version, description = ours.get("version"), json.loads(ours.get("description", "null"))
    except Exception as err:
        raise CheckpointError(f"{path} is not a readable file of weights: {(str(err) or repr(err)).splitlines()[0]}") from err
    if damaged is not None:
        raise CheckpointError(f"{path} is damaged: the checksum of {damaged} differs")
    if not isinstance(loaded, dict) or not all(isinstance(v, Tensor) for v in loaded.values()):
        raise CheckpointError(f"{path} does not hold a state dict (parameter name -> tensor)")
    version = version if isinstance(version, int) else 0
    return WeightFile(dict(loaded), version, description if isinstance(description, dict) else None)


def _read_pytorch(path: Path) -> tuple[Any, Any, str | None]:
    """(what was loaded, our metadata, the name of a damaged part)."""
    with open(path, "rb") as f:  # opened once: another process may replace the file at any time
        check_archive(f)
        loaded = torch.load(f, map_location="cpu", weights_only=True)
        ours = getattr(loaded, "_metadata", {}).get(_METADATA)
        damaged = None if ours is None else zipfile.ZipFile(f).testzip()  # PyTorch does not verify the checksums
    return loaded, ours, damaged


def _read_safetensors(path: Path) -> tuple[Any, Any, str | None]:
    """(what was loaded, our metadata, the name of a damaged part)."""
    with safe_open(path, framework="pt") as f:
        loaded = {name: f.get_tensor(name) for name in f.keys()}  # noqa: SIM118  # not a dict
        ours = json.loads((f.metadata() or {}).get(_METADATA, "null"))
    sums: Any = ours.get("crc32") if isinstance(ours, dict) else None
    damaged = [name for name, crc in _crc32(loaded).items() if sums.get(name) != crc] if isinstance(sums, dict) else []
    return loaded, ours, next(iter(damaged), None)


def _write(content: bytes, path: Path) -> None:
    path.write_bytes(content)


def _crc32(weights: Mapping[str, Tensor]) -> dict[str, int]:
    return {name: zlib.crc32(w.contiguous().reshape(-1).view(torch.uint8).numpy().data) for name, w in sorted(weights.items())}


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
