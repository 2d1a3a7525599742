"""Training states that are complete or absent, and policy weights as other processes see them.

A training state is a directory, written under a temporary name with a manifest of checksums, fsynced, and renamed. The
manifest numbers the states of a run in the order in which they were saved: after a return to an earlier epoch, the newest state
is not the one of the highest epoch. Nothing here pickles: weights are safetensors or ``torch.load(weights_only=True)``,
everything else is JSON.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import random
import re
import shutil
import uuid
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from safetensors.torch import save as safetensors_bytes
from torch import Tensor, nn

from amago.run.torch_archive import check_archive
from amago.store.files import TEMPORARY, is_stale, replace_file, sync, temporary

log = logging.getLogger(__name__)
MANIFEST = "manifest.json"
SCHEMA = 2  # 1 had neither "saved" nor "check"
_OURS = "amago"  # our entry in the metadata that PyTorch keeps with a state dict


class CheckpointError(RuntimeError):
    """A checkpoint is missing, incomplete or damaged; the message names the file."""


# ---- random streams ------------------------------------------------------------------------------------------------------


def seed_process(key: tuple[int, ...]) -> None:
    """Seed every generator of this process from one key."""
    torch_seed, numpy_seed, python_seed = np.random.SeedSequence(key).generate_state(3).tolist()
    torch.manual_seed(torch_seed)
    np.random.seed(numpy_seed)
    random.seed(python_seed)


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


def _digest(path: Path) -> str:
    h = hashlib.sha256()
    with open(path, "rb") as f:
        while chunk := f.read(1 << 20):
            h.update(chunk)
    return h.hexdigest()


def atomic_write(path: Path, write: Callable[[Path], None]) -> None:
    """Let ``write`` fill a temporary file beside ``path``, then put it in place: readers see the old one or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, write)


def remove_leftovers(directory: Path) -> None:
    """Delete the temporary files of processes that were killed while they wrote there."""
    for path in directory.glob(f"{TEMPORARY}*"):
        if is_stale(directory, path.name):
            path.unlink(missing_ok=True)


def _save_tensors(value: Any, path: Path) -> None:
    with open(path, "wb") as f:  # by its path, PyTorch would tell of a full disk without saying so
        torch.save(value, f)


def save_weights(state_dict: Mapping[str, Tensor], path: Path, version: int = 0) -> None:
    """A plain PyTorch weight file, replaced atomically.

    Args:
        version: of weights that are published again and again, for `load_weights_and_version`.
    """
    cpu = OrderedDict((k, v.detach().cpu().clone()) for k, v in state_dict.items())
    cpu._metadata = {_OURS: {"version": version}}  # type: ignore[attr-defined]
    atomic_write(path, lambda tmp: _save_tensors(cpu, tmp))


def load_weights(path: str | os.PathLike[str]) -> dict[str, Tensor]:
    """Weights from a ``.safetensors`` file or a PyTorch file that holds tensors only.

    Raises:
        CheckpointError: no such file, damaged, or not a file of weights (pickled objects are never loaded).
    """
    return load_weights_and_version(path)[0]


def load_weights_and_version(path: str | os.PathLike[str]) -> tuple[dict[str, Tensor], int]:
    """`load_weights`, and the version that they were saved with; 0 where there is none."""
    path = Path(path)
    if not path.is_file():
        raise CheckpointError(f"no weights at {path}")
    try:
        if path.suffix == ".safetensors":
            return load_file(path), 0
        with open(path, "rb") as f:  # one file from here on, though its name may stand for another soon
            check_archive(f)
            loaded = torch.load(f, map_location="cpu", weights_only=True)
            ours = getattr(loaded, "_metadata", {}).get(_OURS)
            damaged = None if ours is None else zipfile.ZipFile(f).testzip()  # PyTorch itself does not look at checksums
    except Exception as err:
        raise CheckpointError(f"{path} is not a readable file of weights: {(str(err) or repr(err)).splitlines()[0]}") from err
    if damaged is not None:
        raise CheckpointError(f"{path} is damaged: the checksum of {damaged} differs")
    if not isinstance(loaded, dict) or not all(isinstance(v, Tensor) for v in loaded.values()):
        raise CheckpointError(f"{path} does not hold a state dict (parameter name -> tensor)")
    return dict(loaded), ours["version"] if isinstance(ours, dict) and isinstance(ours.get("version"), int) else 0


def load_into(module: nn.Module, weights: Mapping[str, Tensor], path: str | os.PathLike[str]) -> None:
    """Copy ``weights``, read from ``path``, into a module: all of them or none.

    Raises:
        CheckpointError: names are missing or unknown, or shapes differ; all are listed.
    """
    own = module.state_dict()
    lacking = [name for name in own if name not in weights]
    unknown = [name for name in weights if name not in own]
    problems = [f"it lacks {', '.join(lacking)}"] if lacking else []
    problems += [f"the agent has no {', '.join(unknown)}"] if unknown else []
    problems += [
        f"{name} has shape {tuple(w.shape)}, not {tuple(own[name].shape)}"
        for name, w in weights.items()
        if name in own and w.shape != own[name].shape
    ]
    if problems:
        raise CheckpointError(f"{path} does not fit this agent, its encoders and sizes: {'; '.join(problems)}")
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
    root = directory.parent
    root.mkdir(parents=True, exist_ok=True)
    saved = 1 + max((_saved(p) or 0 for p in root.iterdir()), default=0)
    tmp = temporary(root)
    tmp.mkdir()
    try:
        model = {k: v.detach().cpu().contiguous().clone() for k, v in weights.items()}
        (tmp / "model.safetensors").write_bytes(safetensors_bytes(model))
        _save_tensors(dict(tensors), tmp / "optimizer.pt")
        (tmp / "state.json").write_text(json.dumps(state))
        sums = {p.name: {"sha256": _digest(p), "bytes": p.stat().st_size} for p in sorted(tmp.iterdir())}
        manifest = {"schema": SCHEMA, "saved": saved, "check": _check(saved, sums), "files": sums}
        (tmp / MANIFEST).write_text(json.dumps(manifest, indent=1))
        for p in tmp.iterdir():
            sync(p)
        sync(tmp)
        old = None
        if directory.exists():  # a directory cannot be replaced in one step: the old one stays loadable under another name
            old = root / f".old-{uuid.uuid4().hex}-{directory.name}"
            os.rename(directory, old)
        os.rename(tmp, directory)
        sync(root)
        if old is not None:
            shutil.rmtree(old)
    finally:
        shutil.rmtree(tmp, ignore_errors=True)


def _check(saved: int, sums: Mapping[str, Any]) -> str:
    """The manifest's checksum of itself."""
    return hashlib.sha256(json.dumps([saved, sums], sort_keys=True).encode()).hexdigest()


# ---- reading -------------------------------------------------------------------------------------------------------------


def _manifest(directory: Path) -> tuple[int, dict[str, Any]]:
    """(number in the order of saving, what each file must be)."""
    path = directory / MANIFEST
    if not path.is_file():
        raise CheckpointError(f"{directory} is no complete training state: it has no {MANIFEST}")
    try:
        manifest = json.loads(path.read_text())
        files = {str(name): (int(entry["bytes"]), str(entry["sha256"])) for name, entry in manifest["files"].items()}
        saved = 0 if manifest["schema"] == 1 else int(manifest["saved"])
        sound = manifest["schema"] == 1 or (
            manifest["schema"] == SCHEMA and manifest["check"] == _check(manifest["saved"], manifest["files"])
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as err:
        raise CheckpointError(f"{path} is damaged") from err
    if not sound:
        raise CheckpointError(f"{path} is damaged: its checksum differs")
    return saved, files


def _saved(directory: Path) -> int | None:
    """A state's number in the order of saving; None where that cannot be read."""
    try:
        return _manifest(directory)[0]
    except CheckpointError:
        return None


def identity(directory: Path) -> tuple[int, int]:
    """Numbers that no other training state of the run has: of its epoch, and in the order of saving; both from 1."""
    return 1 + epoch_of(directory), 1 + (_saved(directory) or 0)


def verify(directory: Path) -> None:
    """Check a training state against its manifest.

    Raises:
        CheckpointError: naming the file that is missing or differs.
    """
    for name, (size, digest) in _manifest(directory)[1].items():
        path = directory / Path(name).name
        if not path.is_file():
            raise CheckpointError(f"{path} is missing")
        try:
            same = path.stat().st_size == size and _digest(path) == digest
        except OSError as err:
            raise CheckpointError(f"{path} cannot be read: {err}") from err
        if not same:
            raise CheckpointError(f"{path} is damaged: its checksum differs from the manifest")


def load_training_state(directory: Path) -> tuple[dict[str, Tensor], dict[str, Any], dict[str, Any]]:
    """(weights, tensors, state) as they were given to `save_training_state`, verified.

    Raises:
        CheckpointError: incomplete, damaged, or not of tensors and numbers alone (pickled objects are never loaded).
    """
    verify(directory)
    path = directory / "model.safetensors"
    try:
        weights = load_file(path)
        path = directory / "optimizer.pt"
        with open(path, "rb") as f:
            check_archive(f)
            tensors = torch.load(f, map_location="cpu", weights_only=True)
        path = directory / "state.json"
        return weights, tensors, json.loads(path.read_text())
    except Exception as err:
        raise CheckpointError(f"{path} cannot be read: {(str(err) or repr(err)).splitlines()[0]}") from err


_STATE = re.compile(rf"(?P<old>\.old-[0-9a-f]+-)?(?!{re.escape(TEMPORARY)}).+_epoch_\d+$")
"""Names of training states; ``old`` while, or after a kill in which, one was replaced."""


def training_states(root: Path) -> list[Path]:
    """Every training state under ``root``, in the order in which they were saved (not yet verified).

    Those whose place in the order cannot be read come last. What precedes ``_epoch_`` in their names is the run's name when they
    were saved; it does not matter here, so that a run may be renamed.
    """
    matches = [(path, _STATE.match(path.name)) for path in (root.iterdir() if root.is_dir() else ())]
    names = {path.name for path, _ in matches}
    found = [path for path, m in matches if m and (not m["old"] or path.name.removeprefix(m["old"]) not in names)]
    place = {path: _saved(path) for path in found}
    return sorted(found, key=lambda path: (place[path] is None, place[path] or 0, epoch_of(path)))


def epoch_of(state: Path) -> int:
    """The epoch at whose end a training state was saved."""
    return int(state.name.rpartition("_")[2])


def newest_complete(root: Path) -> Path | None:
    """The training state saved last of those that verify; None if there never was any.

    Raises:
        CheckpointError: there are some, and all are damaged.
    """
    while True:
        states = training_states(root)
        seen = _identities(states)
        problems: list[CheckpointError] = []
        for directory in reversed(states):
            try:
                verify(directory)
            except CheckpointError as err:
                problems.append(err)
                continue
            break
        else:
            directory = None
        if problems and _identities(training_states(root)) != seen:
            continue  # another process has replaced or pruned states meanwhile, which looks like damage
        if directory is None and problems:
            raise CheckpointError("no complete checkpoint to resume from: " + "; ".join(map(str, problems)))
        for problem in problems:
            log.warning("skipping a damaged checkpoint: %s", problem)
        return directory


def _identities(states: Iterable[Path]) -> set[tuple[Path, int]]:
    found = set()
    for path in states:
        with contextlib.suppress(OSError):
            found.add((path, path.stat().st_ino))
    return found


def prune(root: Path, keep: int | None) -> None:
    """Delete all but the ``keep`` training states saved last, and what interrupted saves left behind.

    One whose manifest is damaged neither counts nor is deleted.
    """
    if keep is not None:
        ordered = [p for p in training_states(root) if _saved(p) is not None]
        for directory in ordered[:-keep]:
            os.rename(directory, temporary(root))  # gone in one step: half of one would look damaged
    for path in root.glob(f"{TEMPORARY}*"):
        shutil.rmtree(path, ignore_errors=True)
    for path in root.glob(".old-*"):
        if (root / path.name.split("-", 2)[2]).exists():  # else it is the only one of its epoch
            shutil.rmtree(path, ignore_errors=True)
