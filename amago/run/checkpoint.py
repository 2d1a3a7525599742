"""Training states on disk, each complete or absent, and files of weights.

A training state is a directory, written under a temporary name with a manifest of checksums, fsynced, and renamed. The
manifest numbers the states of a run in the order in which they were saved: after a return to an earlier epoch, the newest state
is not the one of the highest epoch. No pickled object is ever loaded: weights are safetensors, the optimizer's tensors are read with
``torch.load(weights_only=True)``, everything else is JSON.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shutil
import uuid
import zipfile
import zlib
from collections import OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from safetensors.torch import save as safetensors_bytes
from torch import Tensor, nn

from amago.agent import BaseAgent
from amago.store.files import TEMPORARY, replace_file, sync, temporary

log = logging.getLogger(__name__)
MANIFEST = "manifest.json"
SCHEMA = 2


class CheckpointError(RuntimeError):
    """A checkpoint is missing, incomplete or damaged; the message names the file."""


def atomic_write(path: Path, write: Callable[[Path], object]) -> None:
    """Replace a file by what ``write`` writes to a temporary path: readers see the old content or the new one. Its directory is made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, write)


def write_text(path: Path, text: str) -> None:
    """Replace a file of text; see `atomic_write`."""
    atomic_write(path, lambda tmp: tmp.write_text(text, encoding="utf-8"))


def write_json(path: Path, value: object) -> None:
    """Replace a file by a value as JSON; see `atomic_write`."""
    write_text(path, json.dumps(value, indent=1, allow_nan=False) + "\n")


# ---- tensors, without pickles ---------------------------------------------------------------------------------------------


def _save_tensors(value: object, path: Path) -> None:
    with open(path, "wb") as f:  # given a path, PyTorch raises a RuntimeError that does not name the reason
        torch.save(value, f)


def _load_tensors(file: BinaryIO) -> Any:
    check_archive(file)
    return torch.load(file, map_location="cpu", weights_only=True)


def _on_cpu(weights: Mapping[str, Tensor]) -> OrderedDict[str, Tensor]:
    """Copies: safetensors cannot hold one tensor under two names."""
    return OrderedDict((name, w.detach().cpu().contiguous().clone()) for name, w in weights.items())


def check_archive(file: BinaryIO) -> None:
    """Raise a ValueError for a file that `torch.save` cannot have written: its archives are never compressed. A compressed member may
    unpack to a thousand times its size; PyTorch's older format, which is no archive, allocates the size that its header declares."""
    at, size = file.tell(), file.seek(0, os.SEEK_END)
    try:
        with zipfile.ZipFile(file) as archive:
            members = archive.infolist()
    except zipfile.BadZipFile as err:
        raise ValueError(f"not an archive written by torch.save: {err}") from None
    finally:
        file.seek(at)
    for member in members:
        if member.compress_type != zipfile.ZIP_STORED or member.file_size != member.compress_size:
            raise ValueError(f"its member {member.filename!r:.100} is compressed, which torch.save never does")
    if sum(member.file_size for member in members) > size:
        raise ValueError(f"its members declare more bytes than the {size} of the file")


# ---- training states ------------------------------------------------------------------------------------------------------

Snapshot = tuple[dict[str, Tensor], dict[str, Any], dict[str, Any]]
"""(weights, tensors, state), the arguments of `save_training_state`."""


def save_training_state(
    directory: Path, weights: Mapping[str, Tensor], tensors: Mapping[str, Any], state: Mapping[str, Any]
) -> None:
    """Write a complete training state in place of an older one, or raise an OSError that leaves the older one intact.

    Args:
        weights: the model's state dict.
        tensors: tensors and numbers that ``torch.load(weights_only=True)`` can read (optimizer).
        state: everything else, as JSON types.
    """
    root = directory.parent
    root.mkdir(parents=True, exist_ok=True)
    saved = 1 + max((_saved(p) or 0 for p in root.iterdir()), default=0)
    tmp = temporary(root)
    tmp.mkdir()
    try:
        (tmp / "model.safetensors").write_bytes(safetensors_bytes(_on_cpu(weights)))
        _save_tensors(dict(tensors), tmp / "optimizer.pt")
        (tmp / "state.json").write_text(json.dumps(state), encoding="utf-8")
        sums = {p.name: {"sha256": _digest(p), "bytes": p.stat().st_size} for p in sorted(tmp.iterdir())}
        manifest = {"schema": SCHEMA, "saved": saved, "check": _check(saved, sums), "files": sums}
        (tmp / MANIFEST).write_text(json.dumps(manifest, indent=1), encoding="utf-8")
        for p in (*tmp.iterdir(), tmp):
            sync(p)
        old = None
        if directory.exists():  # a rename cannot replace a directory: until then the old state is loadable by another name
            old = root / f".old-{uuid.uuid4().hex}-{directory.name}"
            os.rename(directory, old)
        os.rename(tmp, directory)
        sync(root)
        if old is not None:
            shutil.rmtree(old)
    finally:
        shutil.rmtree(tmp, ignore_errors=True)


def _digest(path: Path) -> str:
    h = hashlib.sha256()
    with open(path, "rb") as f:
        while chunk := f.read(1 << 20):
            h.update(chunk)
    return h.hexdigest()


def _check(saved: int, sums: Mapping[str, Any]) -> str:
    """The manifest's checksum of itself."""
    return hashlib.sha256(json.dumps([saved, sums], sort_keys=True).encode()).hexdigest()


def _manifest(directory: Path) -> tuple[int, dict[str, tuple[int, str]]]:
    """(number in the order of saving, {file name: (bytes, SHA-256)}) of a training state."""
    path = directory / MANIFEST
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
        saved, sums = int(manifest["saved"]), manifest["files"]
        if manifest["schema"] != SCHEMA or manifest["check"] != _check(saved, sums):
            raise ValueError("its checksum differs")
        return saved, {str(name): (int(entry["bytes"]), str(entry["sha256"])) for name, entry in sums.items()}
    except FileNotFoundError as err:
        raise CheckpointError(f"{directory} is not a complete training state: it has no {MANIFEST}") from err
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as err:
        raise CheckpointError(f"{path} is damaged: {err}") from err


def _saved(directory: Path) -> int | None:
    """A state's number in the order of saving; None if its manifest cannot be read."""
    try:
        return _manifest(directory)[0]
    except CheckpointError:
        return None


def epoch_of(state: Path) -> int:
    """The epoch at whose end a training state was saved."""
    return int(state.name.rpartition("_")[2])


def identity(directory: Path) -> tuple[int, int]:
    """(epoch + 1, number in the order of saving + 1), which no other training state of the run has."""
    return 1 + epoch_of(directory), 1 + (_saved(directory) or 0)


def verify(directory: Path) -> None:
    """Check a training state against its manifest; raises a `CheckpointError` that names the file that is missing or differs."""
    for name, (size, digest) in _manifest(directory)[1].items():
        path = directory / Path(name).name
        try:
            same = path.stat().st_size == size and _digest(path) == digest
        except OSError as err:
            raise CheckpointError(f"{path} cannot be read: {err}") from err
        if not same:
            raise CheckpointError(f"{path} is damaged: its checksum differs from the manifest")


def load_training_state(directory: Path) -> tuple[dict[str, Tensor], dict[str, Any], dict[str, Any]]:
    """Verify a training state and load (weights, tensors, state) of `save_training_state`; a `CheckpointError` if it is incomplete or
    damaged, or holds other objects than tensors and numbers, which are never loaded."""
    verify(directory)
    path = directory / "model.safetensors"
    try:
        weights = load_file(path)
        path = directory / "optimizer.pt"
        with open(path, "rb") as f:
            tensors = _load_tensors(f)
    except Exception as err:
        raise CheckpointError(f"{path} cannot be read: {(str(err) or repr(err)).splitlines()[0]}") from err
    return weights, tensors, _read_state(directory)


def _read_state(directory: Path) -> dict[str, Any]:
    try:
        return dict(json.loads((directory / "state.json").read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as err:
        raise CheckpointError(f"{directory / 'state.json'} cannot be read: {err}") from err


def settings_in(directory: Path) -> dict[str, Any] | None:
    """The settings that a training state, which is verified, was saved with (`amago.run.record.settings_of`); None if it has none."""
    verify(directory)
    return _read_state(directory).get("settings")


_STATE = re.compile(rf"(?P<old>\.old-[0-9a-f]+-)?(?!{re.escape(TEMPORARY)}).+_epoch_\d+$", re.DOTALL)
"""Names of training states. ``old`` is the prefix while a state is replaced, which remains after a kill at that moment."""


def training_states(root: Path) -> list[Path]:
    """All training states in a directory, in the order in which they were saved, and then those with unreadable manifests; not verified.
    Their names may begin with any run name, so that a run can be renamed."""
    matches = [(path, _STATE.match(path.name)) for path in (root.iterdir() if root.is_dir() else ())]
    names = {path.name for path, _ in matches}
    found = [path for path, m in matches if m and (not m["old"] or path.name.removeprefix(m["old"]) not in names)]
    place = {path: _saved(path) for path in found}
    return sorted(found, key=lambda path: (place[path] is None, place[path] or 0, epoch_of(path)))


def newest_complete(root: Path) -> Path | None:
    """The last saved training state that is complete; None if there are none, `CheckpointError` if all are damaged."""
    while True:
        seen, newest = _entries(root), None
        problems: list[CheckpointError] = []
        for directory in reversed(training_states(root)):
            try:
                verify(directory)
            except CheckpointError as err:
                problems.append(err)
            else:
                newest = directory
                break
        if not problems or _entries(root) == seen:
            break  # otherwise another process has replaced or deleted states in the meantime, which looks like damage
    if newest is None and problems:
        raise CheckpointError("no complete checkpoint to resume from: " + "; ".join(map(str, problems)))
    for problem in problems:
        log.warning("skipping a damaged checkpoint: %s", problem)
    return newest


def _entries(root: Path) -> set[tuple[str, int]]:
    """(name, inode) of what is in a directory."""
    return {(entry.name, entry.inode()) for entry in os.scandir(root)} if root.is_dir() else set()


def prune(root: Path, keep: int | None) -> None:
    """Delete the remains of interrupted saves, and all training states but the ``keep`` last saved (None keeps all). States with a damaged
    manifest are neither counted nor deleted."""
    if keep is not None:
        ordered = [p for p in training_states(root) if _saved(p) is not None]
        for directory in ordered[:-keep]:
            os.rename(directory, temporary(root))  # a state that is half deleted would look damaged
    for path in root.glob(f"{TEMPORARY}*"):
        shutil.rmtree(path, ignore_errors=True)
    for path in root.glob(".old-*"):
        if (root / path.name.split("-", 2)[2]).exists():  # otherwise it is the only state of its epoch
            shutil.rmtree(path, ignore_errors=True)


# ---- files of weights -----------------------------------------------------------------------------------------------------

_METADATA = "amago"  # our entry in the metadata that PyTorch stores with a state dict, and in the header of safetensors


class WeightFile(NamedTuple):
    """The content of a file of weights, by name: the number of their publication (0: none), a description of the policy, and a note on
    these weights, both as JSON types (None: none)."""

    weights: dict[str, Tensor]
    version: int = 0
    description: dict[str, Any] | None = None
    note: dict[str, Any] | None = None


def save_weights(
    state_dict: Mapping[str, Tensor],
    path: Path,
    version: int = 0,
    description: Mapping[str, Any] | None = None,
    note: Mapping[str, Any] | None = None,
) -> None:
    """Write a `WeightFile`, replacing an older one atomically.

    A ``.safetensors`` file has all but the weights in its header. Any other is a PyTorch state dict, which ``torch.load(weights_only=True)``
    reads like one that holds nothing else: they are in the metadata that PyTorch itself stores with a state dict.
    """
    texts = {"description": description, "note": note}
    ours: dict[str, Any] = {"version": version} | {k: json.dumps(v) for k, v in texts.items() if v is not None}
    cpu = _on_cpu(state_dict)
    if path.suffix == ".safetensors":
        content = safetensors_bytes(cpu, {_METADATA: json.dumps(ours | {"crc32": _crc32(cpu)})})
        atomic_write(path, lambda tmp: tmp.write_bytes(content))
        return
    first: dict[object, str] = {}
    for name, tensor in state_dict.items():  # a tensor with two names is stored once
        cpu[name] = cpu[first.setdefault(_place(tensor), name) if tensor.numel() else name]
    cpu._metadata = {_METADATA: ours}  # type: ignore[attr-defined]
    atomic_write(path, lambda tmp: _save_tensors(cpu, tmp))


def _place(tensor: Tensor) -> tuple[object, ...]:
    return tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride()


def without_aliases(state_dict: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The entries of a state dict that do not repeat an earlier one, memory and all. The others are second names, such as
    ``maximized_critics``."""
    first: dict[object, str] = {}
    return {k: t for k, t in state_dict.items() if not t.numel() or first.setdefault(_place(t), k) == k}


def load_weight_file(path: str | os.PathLike[str]) -> WeightFile:
    """Load a ``.safetensors`` file, or a PyTorch file that holds tensors only; a `CheckpointError` where there is none, it is damaged, or it
    holds other objects, which are never loaded."""
    path = Path(path)
    if not path.is_file():
        raise CheckpointError(f"no weights at {path}")
    try:
        loaded, ours = _read_safetensors(path) if path.suffix == ".safetensors" else _read_pytorch(path)
        if not isinstance(loaded, dict) or not all(isinstance(v, Tensor) for v in loaded.values()):
            raise TypeError("it does not hold a state dict (parameter name -> tensor)")
        texts = (json.loads(ours.get(k, "null")) for k in ("description", "note"))
        return WeightFile(dict(loaded), int(ours.get("version", 0)), *(text and dict(text) for text in texts))
    except Exception as err:
        raise CheckpointError(f"{path} is not a readable file of weights: {(str(err) or repr(err)).splitlines()[0]}") from err


def _read_pytorch(path: Path) -> tuple[Any, dict[str, Any]]:
    """(the loaded content, our metadata, {} in files of others)."""
    with open(path, "rb") as f:  # opened once: another process may replace the file at any time
        loaded = _load_tensors(f)
        ours = vars(loaded).get("_metadata", {}).get(_METADATA) if isinstance(loaded, OrderedDict) else None
        if ours is not None and (damaged := zipfile.ZipFile(f).testzip()) is not None:  # PyTorch does not verify the checksums
            raise ValueError(f"the checksum of {damaged} differs")
    return loaded, ours or {}


def _read_safetensors(path: Path) -> tuple[Any, dict[str, Any]]:
    with safe_open(path, framework="pt") as f:
        loaded = {name: f.get_tensor(name) for name in f.keys()}  # noqa: SIM118  # not a dict
        ours = json.loads((f.metadata() or {}).get(_METADATA, "{}"))
    sums = ours.get("crc32")
    if sums is not None and (damaged := [name for name, crc in _crc32(loaded).items() if sums.get(name) != crc]):
        raise ValueError(f"the checksum of {damaged[0]} differs")
    return loaded, ours


def _crc32(weights: Mapping[str, Tensor]) -> dict[str, int]:
    return {name: zlib.crc32(w.contiguous().reshape(-1).view(torch.uint8).numpy().data) for name, w in sorted(weights.items())}


def take_by_itself(module: nn.Module, weights: Mapping[str, Tensor]) -> bool:
    """Pass weights to the ``load_state_dict`` of a user's class, which may rename them. Returns False, and changes nothing, if the class
    does not define it or refuses these weights."""
    owner = next(c for c in type(module).__mro__ if "load_state_dict" in vars(c))
    if owner.__module__.partition(".")[0] in ("amago", "torch"):
        return False
    before = {name: value.clone() for name, value in module.state_dict().items()}
    try:
        module.load_state_dict(weights)
    except RuntimeError:  # PyTorch's, of names or shapes that differ
        nn.Module.load_state_dict(module, before)
        return False
    return True


def misfits(module: nn.Module, weights: Mapping[str, Tensor]) -> list[str]:
    """The names that a module's weights lack or do not know, and shapes that differ. Second names of one tensor may be missing."""
    own = module.state_dict()
    missing = [f"{name} {tuple(w.shape)}" for name, w in without_aliases(own).items() if name not in weights]
    unknown = [f"{name} {tuple(w.shape)}" for name, w in weights.items() if name not in own]
    problems = [f"it lacks {', '.join(missing)}"] if missing else []
    problems += [f"the agent has no {', '.join(unknown)}"] if unknown else []
    return problems + [
        f"{name} has shape {tuple(w.shape)}, not {tuple(own[name].shape)}"
        for name, w in weights.items()
        if name in own and w.shape != own[name].shape
    ]


def load_into(module: nn.Module, weights: Mapping[str, Tensor], path: str | os.PathLike[str]) -> None:
    """Copy weights, of the file ``path``, into a module: all of them, or none and a `CheckpointError` that lists all `misfits`."""
    if take_by_itself(module, weights):
        return
    weights = module.complete_weights(weights) if isinstance(module, BaseAgent) else weights
    if problems := misfits(module, weights):
        raise CheckpointError(f"{path} does not fit this agent, its encoders and sizes: {'; '.join(problems)}")
    module.load_state_dict(weights)
