"""``settings.json``: the settings of a run, and the time, place and command of each start of its processes."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.metadata
import json
import os
import platform
import re
import subprocess
import sys
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

import gin
import psutil
import torch
from torch import nn

from amago import config
from amago.describe import describe, name_of
from amago.envs.pool.subprocess import usable_cores
from amago.run.checkpoint import CheckpointError, write_json
from amago.run.locks import exclusive
from amago.run.settings import ExperimentSettings

GIT_SECONDS = 3.0  # a repository on a disk that hangs does not keep a run from starting


def provenance() -> dict[str, Any]:
    """{"versions", "git", "machine", "command", "directory"} of this process, as JSON types; None for missing values."""
    directory = None
    with contextlib.suppress(OSError):
        directory = os.getcwd()
    # the directory of the user's script; for the ``amago`` command, a notebook or ``python -c``, the current one
    script = vars(sys.modules["__main__"]).get("__file__")
    home = None if script is None else Path(script).absolute().parent
    ours, programs = Path(__file__).absolute().parents[1], Path(sys.executable).absolute().parent
    git = git_commit(directory if home is None or home == programs or home.is_relative_to(ours) else home)
    command = [sys.executable, *sys.orig_argv[1:]]
    return {"versions": versions(), "git": git, "machine": machine(), "command": command, "directory": directory}


@functools.cache
def versions() -> dict[str, str]:
    """The versions of Python and of all installed packages, by name."""
    found = {"python": platform.python_version()}
    for package in importlib.metadata.distributions():
        with contextlib.suppress(Exception):  # the remains of a broken installation
            # `package.name` and `package.version` would each parse the whole description: 0.2 s for 160 packages
            head = (package.read_text("METADATA") or package.read_text("PKG-INFO") or "").partition("\n\n")[0]
            fields = dict(re.findall("^(Name|Version): *(.+)$", head, re.MULTILINE))
            found.setdefault(fields["Name"].lower().replace("_", "-"), fields["Version"])
    return dict(sorted(found.items()))


def machine() -> dict[str, Any]:
    """Host, system, CPU, cores, memory and GPUs."""
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if torch.cuda.is_available() else []
    cpu = platform.processor() or None
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
        cpu = next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return {
        "host": platform.node(), "system": platform.platform(), "cpu": cpu, "cores": usable_cores(),
        "memory_gb": round(psutil.virtual_memory().total / 2**30, 1), "gpus": gpus,
    }  # fmt: skip


def git_commit(directory: str | Path | None) -> dict[str, Any] | None:
    """{"commit": its hash, "changed": whether tracked files differ from it} of the repository that holds a directory.

    None if there is none, or git is missing, fails, or takes longer than 3 seconds.
    """
    if directory is None:
        return None
    # neither hooks nor file system monitors that the repository's own configuration would start
    git = ["git", "-c", "core.fsmonitor=false", "-c", "core.hooksPath=/dev/null", "-C", str(directory)]
    env = {**os.environ, "GIT_TERMINAL_PROMPT": "0", "GIT_OPTIONAL_LOCKS": "0"}
    options: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "stdin": subprocess.DEVNULL, "env": env}
    found: list[str] = []
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        for arguments in (["rev-parse", "HEAD"], ["status", "--porcelain", "--untracked-files=no"]):
            done = subprocess.run(git + arguments, timeout=GIT_SECONDS, check=True, **options)
            found.append(os.fsdecode(done.stdout).strip())
    return {"commit": found[0], "changed": bool(found[1]) if len(found) > 1 else None} if found else None


Calls = dict[str, dict[str, Any]]
"""{selector: {parameter: value}} of configurables that were called, without the arguments that the caller gave."""


@contextmanager
def recording() -> Iterator[Calls]:
    """Within the block, record which configurables are called. The result is complete when the block has ended."""
    calls: Calls = {}
    operative = gin.config._OPERATIVE_CONFIG
    before = {key: dict(values) for key, values in operative.items()}
    operative.clear()
    try:
        yield calls
    finally:
        for (_, selector), values in operative.items():
            calls.setdefault(selector, {}).update(values)
        for key, values in before.items():
            operative[key] = {**values, **operative.get(key, {})}


def parameters_in_force(parts: Iterable[Any], calls: Calls | None = None) -> dict[str, Any]:
    """The parameters of configurables with their values, {"selector.parameter": value}, defaults included.

    Args:
        parts: classes or functions, configurable or not. Base classes count, for the parameters that a class has not named anew, and
            so do configurables that are the value of a parameter, such as ``Agent.critic_type``.
        calls: of `recording`; these configurables count, too, and parameters that their callers gave do not.
    """
    bound, found = _resolved_bindings(), {}
    waiting = [*parts, *(config.registry()[selector].wrapped for selector in calls or ())]
    seen = set()
    while waiting:
        part = waiting.pop()
        if id(part) in seen:
            continue
        seen.add(id(part))
        names: set[str] = set()  # that a class nearer to the part has
        for selectors in map(config.selectors_of, part.__mro__ if isinstance(part, type) else (part,)):
            new = {f"{selector}.{k}": v for selector in selectors for k, v in defaults_of(selector).items() if k not in names}
            names |= {full.rpartition(".")[2] for full in new}
            for full, default in new.items():
                selector, _, name = full.rpartition(".")
                called = None if calls is None else calls.get(selector)
                if called is not None and name not in called and gin.config._is_literally_representable(default):
                    continue  # gin records all such defaults: the caller gave another value
                value = found[full] = bound.get(full, default)
                waiting += [value] if callable(value) else []
    return found


def configurable(selector: str) -> Any:
    """The class or function with this full name; None if this process has imported none."""
    entry = config.registry().get(selector)
    return None if entry is None else entry.wrapped


def defaults_of(selector: str) -> dict[str, Any]:
    """The parameters of a configurable that have a default value, which is not necessarily in force."""
    parameters = config.signature_of(selector)
    return {name: p.default for name, p in parameters.items() if p.default is not p.empty and p.default is not gin.REQUIRED}


def _resolved_bindings() -> dict[str, Any]:
    """`bindings`, with the classes and functions that ``@Name`` in a gin file refers to."""
    reference = gin.config.ConfigurableReference
    return {k: v.configurable.wrapped if isinstance(v, reference) else v for k, v in config.bindings().items()}


SETTINGS_FILE = "settings.json"
SCHEMA = 1


def settings_of(experiment: ExperimentSettings, agent: nn.Module | None = None, calls: Calls | None = None) -> dict[str, Any]:
    """The settings of an experiment, as JSON types.

    Args:
        agent, calls: the agent that was built, and of `recording` meanwhile; None: not yet.

    Returns:
        {"experiment": its class, "fields": `fields_of`, "parameters": {"selector.parameter": value} of the configurables that
        the run uses, defaults included, and of all that are bound; "bound": the names of those with a binding; "unused": the names of
        those that are bound for networks, agents or exploration that this run does not use}.
    """
    parts = {type(m) for m in agent.modules()} if agent is not None else set()
    parts |= {vars(experiment)[k] for k in ("tstep_encoder_type", "traj_encoder_type", "agent_type") if agent is None}
    used = parameters_in_force([*sorted(parts, key=name_of), experiment.exploration_wrapper_type, config.fast_paths], calls)
    bound = _resolved_bindings()
    unused = [k for k in bound if (name := k.rpartition("/")[2]) not in used and name.startswith(_FOUND_IN_AGENTS)]
    return {
        "experiment": name_of(type(experiment)),
        "fields": fields_of(experiment),
        "parameters": {k: describe(v) for k, v in sorted({**used, **bound}.items())},
        "bound": sorted(bound),
        "unused": sorted(unused),
    }


def fields_of(experiment: ExperimentSettings) -> dict[str, Any]:
    """All fields of an experiment by name, as JSON types."""
    return {f.name: describe(vars(experiment)[f.name]) for f in dataclasses.fields(experiment)}


_FOUND_IN_AGENTS = ("amago.agent.", "amago.nets.", "amago.envs.exploration.")


@contextmanager
def _edited(run_dir: Path, renew: bool = False) -> Iterator[dict[str, Any]]:
    """The content of ``settings.json``, which is written when the block ends; other processes wait meanwhile."""
    run_dir.mkdir(parents=True, exist_ok=True)
    with exclusive(run_dir):
        record = None if renew else read_record(run_dir)
        record = record or {"schema": SCHEMA, "id": uuid.uuid4().hex, "starts": []}
        yield record
        write_json(run_dir / SETTINGS_FILE, masked(record))


_SECRET = re.compile(r"(?:^|[-_.])(?:\w*token|\w*api_?key|secret|password|key)s?$", re.IGNORECASE)
_SECRET_WITHIN = re.compile(
    r"""([\w-]*(?:token|key|secret|password)\w*['"]?\s*[=:]\s*)('[^']*'|"[^"]*"|[^\s,)}'"]+)""", re.IGNORECASE
)
_MASK = "***"


def masked(value: object, secret: bool = False) -> Any:
    """JSON types without the texts that are tokens, keys or passwords by their names: in dicts, command lines and calls such as "f(key='x')"."""
    if isinstance(value, dict):
        return {k: masked(v, bool(_SECRET.search(str(k)))) for k, v in value.items()}
    if isinstance(value, list):
        before = [None, *value]
        options = [isinstance(b, str) and b.startswith("--") and bool(_SECRET.search(b)) for b in before]
        return [masked(v, secret or option) for v, option in zip(value, options, strict=False)]
    if not isinstance(value, str):
        return value
    return _MASK if secret else _SECRET_WITHIN.sub(rf"\1{_MASK}", value)


def run_id(run_dir: Path, renew: bool = False) -> str:
    """The id of a run in its buffer, which does not depend on the directory's name; made if there is none, or to ``renew`` it."""
    with _edited(run_dir, renew) as record:
        return str(record["id"])


def note_start(run_dir: Path, settings: dict[str, Any], start: dict[str, Any]) -> None:
    """Add a start to ``settings.json``, whose settings (of `settings_of`) come from the newest start of a process that learns.

    Args:
        start: {"role": "learn", "collect", "collect and learn" or "evaluate"; "epoch": the first to run; "resumed": the training state from
            which the run goes on; "changed": {name: [value before, value now]}}.
    """
    start = {"time": datetime.now().astimezone().isoformat(timespec="seconds"), **start, **provenance()}
    with _edited(run_dir) as record:
        if "learn" in start["role"] or not has_learned(record):
            record.update(settings)
        record["starts"] = [*record.pop("starts"), start]  # at the end of the file


def has_learned(record: dict[str, Any]) -> bool:
    """True if a process that learns has been started in a run, according to its ``settings.json``."""
    return any("learn" in start["role"] for start in record["starts"])


def read_record(run_dir: Path) -> dict[str, Any] | None:
    """The content of ``settings.json``; None if the run has none, `CheckpointError` if it is damaged."""
    path = run_dir / SETTINGS_FILE
    if not path.is_file():
        return None
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        if not (isinstance(record["id"], str) and all(isinstance(s["role"], str) for s in record["starts"])):
            raise TypeError("an entry has another type")
    except (OSError, ValueError, KeyError, TypeError) as err:
        raise CheckpointError(f"{path} is damaged: {err!r}; remove it to go on without it") from err
    return record  # type: ignore[no-any-return]


def flat(settings: dict[str, Any]) -> dict[str, bool | int | float | str]:
    """Settings as one level of numbers and strings, for the tables of TensorBoard and Weights & Biases."""
    both = {**settings["fields"], **settings["parameters"]}
    return {k: v if isinstance(v, bool | int | float | str) else json.dumps(v) for k, v in both.items()}
