"""Training states on disk, each complete or absent.

A training state is a directory, written under a temporary name with a manifest of checksums, fsynced, and renamed. The
manifest numbers the states of a run in the order in which they were saved: after a return to an earlier epoch, the newest state
is not the one of the highest epoch. No pickled object is ever loaded: weights are safetensors, the optimizer's tensors are read with
``torch.load(weights_only=True)``, everything else is JSON.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import re
import shutil
import uuid
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from safetensors.torch import save as safetensors_bytes
from torch import Tensor

from amago.run.torch_archive import check_archive
from amago.store.files import TEMPORARY, is_stale, replace_file, sync, temporary

log = logging.getLogger(__name__)
MANIFEST = "manifest.json"
SCHEMA = 2  # schema 1 lacks "saved" and "check"


class CheckpointError(RuntimeError):
    """A checkpoint is missing, incomplete or damaged; the message names the file."""


# ---- writing -------------------------------------------------------------------------------------------------------------


def _digest(path: Path) -> str:
    h = hashlib.sha256()
    with open(path, "rb") as f:
        while chunk := f.read(1 << 20):
            h.update(chunk)
    return h.hexdigest()


def atomic_write(path: Path, write: Callable[[Path], None]) -> None:
    """Replace a file: readers see the old content or the new one, never a part.

    Args:
        write: writes the content to the path of a temporary file.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, write)


def write_json(path: Path, value: Any) -> None:
    """Replace a file by a value as JSON; see `atomic_write`."""
    text = json.dumps(value, indent=1, allow_nan=False) + "\n"

    def write(tmp: Path) -> None:
        tmp.write_text(text)

    atomic_write(path, write)


def remove_leftovers(directory: Path) -> None:
    """Delete temporary files that killed processes have left in a directory."""
    for path in directory.glob(f"{TEMPORARY}*"):
        if is_stale(directory, path.name):
            path.unlink(missing_ok=True)


def save_tensors(value: Any, path: Path) -> None:
    """``torch.save``, with an `OSError` if the disk is full."""
    with open(path, "wb") as f:  # given a path, PyTorch raises a RuntimeError that does not name the reason
        torch.save(value, f)


def save_training_state(
    directory: Path,
    weights: Mapping[str, Tensor],
    tensors: Mapping[str, Any],
    state: Mapping[str, Any],
) -> None:
    """Write a complete training state, or nothing.

    Args:
        directory: the training state; an older one is replaced.
        weights: the model's state dict.
        tensors: tensors and numbers that ``torch.load(weights_only=True)`` can read (optimizer).
        state: everything else, as JSON types.

    Raises:
        OSError: it could not be written; an older state is intact.
    """
    root = directory.parent
    root.mkdir(parents=True, exist_ok=True)
    saved = 1 + max((_saved(p) or 0 for p in root.iterdir()), default=0)
    tmp = temporary(root)
    tmp.mkdir()
    try:
        model = {k: v.detach().cpu().contiguous().clone() for k, v in weights.items()}
        (tmp / "model.safetensors").write_bytes(safetensors_bytes(model))
        save_tensors(dict(tensors), tmp / "optimizer.pt")
        (tmp / "state.json").write_text(json.dumps(state))
        sums = {p.name: {"sha256": _digest(p), "bytes": p.stat().st_size} for p in sorted(tmp.iterdir())}
        manifest = {"schema": SCHEMA, "saved": saved, "check": _check(saved, sums), "files": sums}
        (tmp / MANIFEST).write_text(json.dumps(manifest, indent=1))
        for p in tmp.iterdir():
            sync(p)
        sync(tmp)
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


def _check(saved: int, sums: Mapping[str, Any]) -> str:
    """The manifest's checksum of itself."""
    return hashlib.sha256(json.dumps([saved, sums], sort_keys=True).encode()).hexdigest()


# ---- reading -------------------------------------------------------------------------------------------------------------


def _manifest(directory: Path) -> tuple[int, dict[str, Any]]:
    """(number in the order of saving, {file name: (bytes, SHA-256)}) of a training state."""
    path = directory / MANIFEST
    if not path.is_file():
        raise CheckpointError(f"{directory} is not a complete training state: it has no {MANIFEST}")
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
    """A state's number in the order of saving; None if its manifest cannot be read."""
    try:
        return _manifest(directory)[0]
    except CheckpointError:
        return None


def identity(directory: Path) -> tuple[int, int]:
    """(epoch + 1, number in the order of saving + 1), which no other training state of the run has."""
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
    """Verify a training state and load (weights, tensors, state) of `save_training_state`.

    Raises:
        CheckpointError: it is incomplete or damaged, or holds other objects than tensors and numbers, which are never loaded.
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


def settings_in(directory: Path) -> dict[str, Any] | None:
    """The settings that a training state was saved with (`amago.run.record.settings_of`); None for one of an earlier version.

    Raises:
        CheckpointError: the state is incomplete or damaged.
    """
    verify(directory)
    try:
        found = json.loads((directory / "state.json").read_text()).get("settings")
    except (OSError, ValueError, AttributeError) as err:
        raise CheckpointError(f"{directory / 'state.json'} cannot be read: {err}") from err
    return found if isinstance(found, dict) else None


_STATE = re.compile(rf"(?P<old>\.old-[0-9a-f]+-)?(?!{re.escape(TEMPORARY)}).+_epoch_\d+$")
"""Names of training states. ``old`` is the prefix while a state is replaced, which remains after a kill at that moment."""


def training_states(root: Path) -> list[Path]:
    """All training states in a directory, in the order in which they were saved; not verified.

    States whose manifest cannot be read come last. The names may begin with any run name, so that a run can be renamed.
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
    """The last saved training state that is complete; None if there are no training states.

    Raises:
        CheckpointError: all training states are damaged.
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
            continue  # another process has replaced or deleted states in the meantime, which looks like damage
        if directory is None and problems:
            raise CheckpointError("no complete checkpoint to resume from: " + "; ".join(map(str, problems)))
        for problem in problems:
            log.warning("skipping a damaged checkpoint: %s", problem)
        return directory


def _identities(states: Iterable[Path]) -> set[tuple[Path, int]]:
    """(path, inode) of the states that exist."""
    found = set()
    for path in states:
        with contextlib.suppress(OSError):
            found.add((path, path.stat().st_ino))
    return found


def prune(root: Path, keep: int | None) -> None:
    """Delete old training states and the remains of interrupted saves.

    Args:
        keep: number of training states to keep, the last saved; None keeps all. States with a damaged manifest are neither
            counted nor deleted.
    """
    if keep is not None:
        ordered = [p for p in training_states(root) if _saved(p) is not None]
        for directory in ordered[:-keep]:
            os.rename(directory, temporary(root))  # a state that is half deleted would look damaged
    for path in root.glob(f"{TEMPORARY}*"):
        shutil.rmtree(path, ignore_errors=True)
    for path in root.glob(".old-*"):
        if (root / path.name.split("-", 2)[2]).exists():  # otherwise it is the only state of its epoch
            shutil.rmtree(path, ignore_errors=True)
