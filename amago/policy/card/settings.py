"""The settings of a run as a card shows them: without what concerns the machine and its user alone."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from amago.policy.card.secrets import LEFT_OUT, is_secret_name, looks_secret
from amago.run.record import read_record

PRIVATE_FIELDS = {
    "ckpt_base_dir", "dset_root", "dset_name", "wandb_project", "wandb_entity", "wandb_group_name", "init_from", "run_name",
}  # fmt: skip
"""Fields of `amago.Experiment`, and arguments of data sets, that say where a run was, and not what it was."""
PACKAGES = ("python", "amago", "torch", "gymnasium", "numpy", "accelerate", "gin-config", "safetensors")


def public_settings(run_dir: Path) -> dict[str, Any] | None:
    """What ``settings.json`` of a run says about its agent and its training, and on what kind of machine; None without that file.

    Left out are the command line, the directory, the host's name, the git commit and the names of places. Values that are absolute
    paths or look like secrets are replaced by "(left out)".
    """
    record = read_record(run_dir)
    if record is None:
        return None
    learned = [s for s in record["starts"] if "learn" in s["role"]] or record["starts"] or [{}]
    newest = learned[-1]
    versions, machine = newest.get("versions") or {}, newest.get("machine") or {}
    kept = {k: record[k] for k in ("experiment", "fields", "parameters", "bound", "unused") if k in record}
    return {
        **_public(kept),
        "versions": {k: versions[k] for k in PACKAGES if k in versions},
        "machine": {k: machine[k] for k in ("system", "cpu", "cores", "memory_gb", "gpus") if k in machine},
        "starts": len(record["starts"]),
    }


def _public(value: Any) -> Any:
    if isinstance(value, Mapping):
        kept = {k: v for k, v in value.items() if k not in PRIVATE_FIELDS}
        return {k: LEFT_OUT if isinstance(v, str) and v and is_secret_name(k) else _public(v) for k, v in kept.items()}
    if isinstance(value, list):
        return [_public(v) for v in value]
    if isinstance(value, str) and (value.startswith(("/", "~")) or value[1:3] == ":\\" or looks_secret(value)):
        return LEFT_OUT
    return value
