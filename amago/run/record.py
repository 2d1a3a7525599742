"""``settings.json``: what a run was built with, and when, where and how each of its processes was started."""

from __future__ import annotations

import dataclasses
import json
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

from torch import nn

from amago import config
from amago.run import parameters
from amago.run.checkpoint import CheckpointError, write_json
from amago.run.describe import described, name_of
from amago.run.locks import exclusive
from amago.run.settings import ExperimentSettings
from amago.run.surroundings import surroundings

SETTINGS_FILE = "settings.json"
SCHEMA = 1


def settings_of(
    experiment: ExperimentSettings, agent: nn.Module | None = None, calls: parameters.Calls | None = None
) -> dict[str, Any]:
    """The settings of an experiment, as JSON types.

    Args:
        agent: the agent that was built; None: not yet.
        calls: the configurables that were called to build it (`amago.run.parameters.recording`).

    Returns:
        {"experiment": its class, "fields": all fields by name, "parameters": {"selector.parameter": value} of the configurables that
        the run uses, defaults included, and of all that are bound; "bound": the names of those with a binding; "unused": the names of
        those that are bound for networks, agents or exploration that this run does not use}.
    """
    parts = {type(m) for m in agent.modules()} if agent is not None else set()
    parts |= {getattr(experiment, k) for k in ("tstep_encoder_type", "traj_encoder_type", "agent_type") if agent is None}
    used = parameters.parameters_in_force(
        [*sorted(parts, key=name_of), experiment.exploration_wrapper_type, config.fast_paths], calls
    )
    bound = parameters.resolved_bindings()
    return {
        "experiment": name_of(type(experiment)),
        "fields": fields_of(experiment),
        "parameters": {k: described(v) for k, v in sorted({**used, **bound}.items())},
        "bound": sorted(bound),
        "unused": sorted(
            k for k in bound if k.rpartition("/")[2] not in used and k.rpartition("/")[2].startswith(_FOUND_IN_AGENTS)
        ),
    }


def fields_of(experiment: ExperimentSettings) -> dict[str, Any]:
    """All fields of an experiment by name, as JSON types."""
    return {f.name: described(getattr(experiment, f.name)) for f in dataclasses.fields(experiment)}


_FOUND_IN_AGENTS = ("amago.agent.", "amago.nets.", "amago.envs.exploration.")


@contextmanager
def _edited(run_dir: Path) -> Iterator[dict[str, Any]]:
    """The content of ``settings.json``, which is written when the block ends; other processes wait meanwhile."""
    run_dir.mkdir(parents=True, exist_ok=True)
    with exclusive(run_dir):
        record = read_record(run_dir) or {"schema": SCHEMA, "id": uuid.uuid4().hex, "starts": []}
        yield record
        write_json(run_dir / SETTINGS_FILE, record)


def run_id(run_dir: Path, renew: bool = False) -> str:
    """The name by which the buffer of a run knows it, whatever its directory is called; made if there is none.

    Args:
        renew: the run begins anew, and has another from now on.
    """
    with _edited(run_dir) as record:
        if renew:
            record.clear()
            record.update({"schema": SCHEMA, "id": uuid.uuid4().hex, "starts": []})
        return str(record["id"])


def note_start(
    run_dir: Path, settings: dict[str, Any], role: str, epoch: int, resumed: str | None, changed: dict[str, Any]
) -> None:
    """Add a start to ``settings.json``. The settings in it are those of the newest start of a process that learns.

    Args:
        settings: of `settings_of`.
        role: "learn", "collect", "collect and learn" or "evaluate".
        epoch: the first to run.
        resumed: the training state from which the run goes on.
        changed: {name: [value before, value now]}.
    """
    start = {
        "time": datetime.now().astimezone().isoformat(timespec="seconds"), "role": role, "epoch": epoch, "resumed": resumed,
        "changed": changed, **surroundings(),
    }  # fmt: skip
    with _edited(run_dir) as record:
        if "learn" in role or not has_learned(record):
            record.update(settings)
        record["starts"] = [*record.pop("starts"), start]  # at the end of the file


def has_learned(record: dict[str, Any]) -> bool:
    """Whether a process that learns has been started in a run, according to its ``settings.json``."""
    return any("learn" in start["role"] for start in record["starts"])


def read_record(run_dir: Path) -> dict[str, Any] | None:
    """The content of ``settings.json``; None if the run has none.

    Raises:
        CheckpointError: it is damaged.
    """
    path = run_dir / SETTINGS_FILE
    if not path.is_file():
        return None
    try:
        record = json.loads(path.read_text())
        if not (isinstance(record["id"], str) and all(isinstance(s["role"], str) for s in record["starts"])):
            raise TypeError("an entry has another type")
    except (OSError, ValueError, KeyError, TypeError) as err:
        raise CheckpointError(f"{path} is damaged: {err!r}; remove it to go on without it") from err
    return record  # type: ignore[no-any-return]


def role_of(settings: ExperimentSettings) -> str:
    """What this process does in its run: "collect and learn", "learn", "collect" or "evaluate"."""
    roles = [*(["collect"] if settings.collects else []), *(["learn"] if settings.learns else [])]
    return " and ".join(roles) or "evaluate"


def flat(settings: dict[str, Any]) -> dict[str, bool | int | float | str]:
    """Settings as one level of numbers and strings, for the tables of TensorBoard and Weights & Biases."""
    both = {**settings["fields"], **settings["parameters"]}
    return {k: v if isinstance(v, bool | int | float | str) else json.dumps(v) for k, v in both.items()}
