"""Checks of a run: its directories, the spaces of its buffer and environments, and a user's networks."""

from __future__ import annotations

import difflib
import logging
import os
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import gymnasium as gym

from amago.agent import BaseAgent, check_traj_encoder, check_tstep_encoder
from amago.data.extras import ExtraField, check_extra_fields
from amago.data.findings import CheckError
from amago.fields import Check
from amago.loading.dataset import RLDataset
from amago.loading.disk import DiskTrajDataset
from amago.spaces import space_differences

log = logging.getLogger(__name__)


class SettingsError(ValueError):
    """One or more fields of an `Experiment` are wrong; the message has a line for each."""


def subclass_of(base: type, named: Mapping[str, Any], or_none: bool = False) -> Check:
    """A class below ``base``, or a function in its place; names, which are in ``named``, were replaced before."""

    def check(name: str, value: object) -> str | None:
        if isinstance(value, str):
            near = difflib.get_close_matches(value, named, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            return f"{name} must be {', '.join(map(repr, named))} or a subclass of {base.__name__}, got {value!r}{hint}"
        right = callable(value) and not (isinstance(value, type) and not issubclass(value, base))
        return None if right or (value is None and or_none) else f"{name} must be a subclass of {base.__name__}, got {value!r}"

    return check


def directory(name: str, value: object) -> str | None:
    """Check the path of a directory in which checkpoints and logs can be written."""
    return next(iter(unwritable(name, value, "checkpoints and logs")), None)


def check_required_extras(agent: BaseAgent, extra_fields: Sequence[ExtraField | str]) -> None:
    """Raise SettingsError unless all extra fields that the agent's losses need are declared."""
    declared = {x.name for x in check_extra_fields(extra_fields)}
    missing = [name for name in agent.required_extras if name not in declared]
    if missing:
        raise SettingsError(
            f"agent_type {type(agent).__name__}, as it is configured, learns from {missing}, but extra_fields declares {sorted(declared)}: "
            f"add {', '.join(map(repr, missing))} to extra_fields (the data recorded before has the field's default)"
        )


def unwritable(name: str, path: object, purpose: str) -> Iterable[str]:
    """Reasons why a directory, given by the setting ``name`` for files of a kind, or its nearest existing parent cannot be written to."""
    if not isinstance(path, str | os.PathLike) or not os.fspath(path):
        yield f"{name} must be the path of a directory, got {path!r}"
        return
    directory = Path(path).expanduser()
    existing = next((p for p in (directory, *directory.absolute().parents) if os.path.lexists(p)), directory)
    if not existing.is_dir():
        yield f"{name} is {os.fspath(path)!r}, for {purpose}, but {str(existing)!r} is a file: name a directory"
    elif not os.access(existing, os.W_OK | os.X_OK):
        yield f"{name} is {os.fspath(path)!r}, for {purpose}, but {str(existing)!r} cannot be written to: name another directory"


def check_buffer(dataset: RLDataset, obs_space: gym.spaces.Dict, action_space: gym.Space[Any]) -> None:
    """Refuse a buffer (of a `DiskTrajDataset`) whose trajectories, such as an older run's, have other spaces than the environments."""
    if not isinstance(dataset, DiskTrajDataset):
        return
    try:
        dataset.store.set_spaces(obs_space, action_space)
    except ValueError as err:
        raise SettingsError(f"{err}: choose another run_name or dset_name, or move the file away") from err
    view = dataset.store.view()
    for index, schema in view.kinds():
        recorded = schema.obs_space, schema.action_spec.space
        if differences := space_differences(recorded, (obs_space, action_space), ranges=True):
            text = "; ".join(f"{d.name}: {d.first} there, {d.second} now" for d in differences)
            raise SettingsError(
                f"the buffer {dataset.buffer_dir} holds trajectories of {view.env_name(index)!r} that do not fit the environments of "
                f"this run ({text}): choose another run_name or dset_name, or delete the buffer"
            )


def check_evaluation_spaces(name: str, spaces: tuple[Any, Any], agent: tuple[Any, Any]) -> None:
    """Refuse evaluation environments, made by the setting ``name``, whose spaces (observation, action) differ from the agent's."""
    if differences := space_differences(agent, spaces):
        text = "; ".join(f"{d.name}: {d.second}, not {d.first}" for d in differences)
        raise SettingsError(f"{name} makes environments that the agent was not built for ({text}): give both the same spaces")


def warn_of_faulty_parts(agent: BaseAgent) -> None:
    """Check copies of an agent's timestep encoder and sequence model, unless they are this library's own classes, and warn of faults. Neither
    the agent nor the process's random numbers change."""
    spaces = agent.obs_space, agent.action_space
    checks: list[tuple[Any, Callable[[], object]]] = [
        (agent.tstep_encoder, lambda: check_tstep_encoder(agent.tstep_encoder, spaces)),
        (agent.traj_encoder, lambda: check_traj_encoder(agent.traj_encoder, export=False)),
    ]
    for part, check in checks:
        if type(part).__module__.partition(".")[0] != "amago":
            name = f"{type(part).__module__}.{type(part).__qualname__}"
            try:
                check()
            except CheckError as err:
                warnings.warn(
                    f"{name}: {err}\nTraining begins all the same, and may learn little or act otherwise.", stacklevel=2
                )
            except Exception as err:  # a part that cannot be copied may train all the same
                log.info("%s could not be checked: %r", name, err)
