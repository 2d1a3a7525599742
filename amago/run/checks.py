"""Checks of a run: its settings, the spaces of its buffer and environments, and whether collection saves anything."""

from __future__ import annotations

import difflib
import math
import os
import re
import warnings
from collections.abc import Iterable, Sequence
from numbers import Integral, Real
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import torch

from amago.agent import BaseAgent
from amago.data.extras import ExtraField, check_extra_fields
from amago.data.windows import PADDED_SAMPLING
from amago.envs.exploration import ExplorationWrapper
from amago.envs.pool import ENV_MODES
from amago.loading.dataset import RLDataset
from amago.loading.disk import DiskTrajDataset
from amago.nets.traj_encoders import TrajEncoder
from amago.nets.tstep_encoders import TstepEncoder
from amago.run.callbacks import mistakes_in
from amago.run.parts import NAMED_FIELDS
from amago.run.progress import PROGRESS
from amago.run.settings import ExperimentSettings
from amago.spaces import action_spec, space_differences

SAVE_FORMATS = ("segments", "npz", "npz-compressed")
PRECISIONS = ("no", "fp16", "bf16")

_FROM_ONE = ("max_seq_len", "batch_size", "batches_per_update", "parallel_actors")
_FROM_ZERO = (
    "dloader_workers", "train_batches_per_epoch", "val_timesteps_per_epoch", "lr_warmup_steps", "max_env_restarts", "env_trial_steps",
    "epochs", "log_interval",
)  # fmt: skip
_NOT_NEGATIVE = ("start_learning_at_epoch", "start_collecting_at_epoch", "refused_data_timeout")
_POSITIVE = ("grad_clip", "env_step_timeout")
_COUNTS = ("keep_training_states", "env_workers", "val_episodes")
_OPTIONAL = ("train_timesteps_per_epoch", "seed", "val_interval", "ckpt_interval", "force_reset_train_envs_every")
_SWITCHES = (
    "sample_actions", "sample_actions_train", "sample_actions_val", "log_to_wandb", "log_to_tensorboard", "verbose", "has_dset_edit_rights",
    "stagger_traj_file_lengths", "always_save_latest", "always_load_latest", "cut_short_trajectories",
    "overwrite", "share_buffer", "l2_weights_only",
)  # fmt: skip
_CLASSES = {
    "tstep_encoder_type": TstepEncoder, "traj_encoder_type": TrajEncoder, "agent_type": BaseAgent,
    "exploration_wrapper_type": ExplorationWrapper,
}  # fmt: skip
_STEPS_BEFORE_WARNING = 1000  # of each actor: long rollouts are not a mistake


class SettingsError(ValueError):
    """One or more fields of an `Experiment` are wrong; the message has a line for each."""


def check_settings(s: ExperimentSettings) -> None:
    """Check all fields, without changing any.

    Args:
        s: after `ExperimentSettings.resolve`.

    Raises:
        SettingsError: lists every wrong field, its value and what would be right.
    """
    problems = [*_numbers(s), *_choices(s), *_names_and_classes(s), *_env_makers(s), *_directory(s), *_contradictions(s)]
    if not problems:
        problems = list(_weights_to_begin_with(s))
    if problems:
        raise SettingsError("this Experiment cannot start:\n  - " + "\n  - ".join(problems))


def _numbers(s: ExperimentSettings) -> Iterable[str]:
    for names, rule, ok in (
        (_FROM_ONE, "a whole number of at least 1", lambda v: _is_whole(v) and v >= 1),
        (_FROM_ZERO, "a whole number of 0 or more", lambda v: _is_whole(v) and v >= 0),
        (_COUNTS, "None or a whole number of at least 1", lambda v: v is None or (_is_whole(v) and v >= 1)),
        (_OPTIONAL, "None or a whole number of 0 or more", lambda v: v is None or (_is_whole(v) and v >= 0)),
        (_NOT_NEGATIVE, "a number of 0 or more", lambda v: _is_number(v) and v >= 0),
        (("l2_coeff",), "a finite number of 0 or more", lambda v: _is_number(v) and 0 <= v < math.inf),
        (
            ("critic_loss_weight",),
            "None or a finite number of 0 or more",
            lambda v: v is None or (_is_number(v) and 0 <= v < math.inf),
        ),
        (_POSITIVE, "a number above 0", lambda v: _is_number(v) and v > 0),
        (("learning_rate",), "a finite number above 0", lambda v: _is_number(v) and 0 < v < math.inf),
        (
            ("actor_learning_rate", "critic_learning_rate", "traj_learning_rate"),
            "None or a finite number above 0",
            lambda v: v is None or (_is_number(v) and 0 < v < math.inf),
        ),
        (("lr_cooldown",), "a share between 0 and 1", lambda v: _is_number(v) and 0 <= v <= 1),
        (("ema_decay",), "a number of at least 0 and below 1", lambda v: _is_number(v) and 0 <= v < 1),
        (_SWITCHES, "True or False", lambda v: isinstance(v, bool | np.bool_)),
        (("traj_save_len",), "a number of at least 1", lambda v: _is_number(v) and v >= 1),
    ):
        for name in names:
            if not ok(getattr(s, name)):
                yield f"{name} must be {rule}, got {getattr(s, name)!r}"


def _choices(s: ExperimentSettings) -> Iterable[str]:
    for name, known in (
        ("env_mode", ENV_MODES),
        ("save_trajs_as", SAVE_FORMATS),
        ("padded_sampling", PADDED_SAMPLING),
        ("mixed_precision", PRECISIONS),
        ("progress", PROGRESS),
        ("async_env_mp_context", (None, "fork", "spawn", "forkserver")),
    ):
        value = getattr(s, name)
        if value not in known:
            extra = "; pickled .traj files are never written" if value == "traj" else ""
            yield f"{name} must be one of {', '.join(map(repr, known))}, got {value!r}{extra}"
    resume: Any = s.resume
    if resume not in ("never", "auto") and (not _is_whole(resume) or resume < 0):
        yield f"resume must be 'never', 'auto' or the number of an epoch, got {resume!r}"
    yield from mistakes_in(s.callbacks)


def check_required_extras(agent: Any, extra_fields: Sequence[ExtraField | str]) -> None:
    """Raise SettingsError unless all extra fields that the agent's losses need are declared."""
    declared = {x.name for x in check_extra_fields(extra_fields)}
    missing = [name for name in getattr(agent, "required_extras", ()) if name not in declared]
    if missing:
        raise SettingsError(
            f"agent_type {type(agent).__name__}, as it is configured, learns from {missing}, but extra_fields declares {sorted(declared)}: "
            f"add {', '.join(map(repr, missing))} to extra_fields (the data recorded before has the field's default)"
        )


def _names_and_classes(s: ExperimentSettings) -> Iterable[str]:
    if not isinstance(s.run_name, str) or not re.fullmatch(r"[^/\\\0]+", s.run_name) or s.run_name in (".", ".."):
        yield f"run_name must be a name without '/', got {s.run_name!r}"
    if s.dataset is None:
        yield "dataset must be given, or dset_root and dset_name to build a DiskTrajDataset"
    elif not isinstance(s.dataset, RLDataset):
        yield f"dataset must be an amago.loading.RLDataset, got {s.dataset!r}"
    try:
        for x in check_extra_fields(s.extra_fields):
            known = getattr(s.agent_type, "policy_extras", ())
            if x.source != "info" and x.name not in known:
                agent = getattr(s.agent_type, "__name__", s.agent_type)
                yield (
                    f"extra_fields has {x.name!r} with source={x.source!r}, but agent_type {agent} computes only {list(known)}: "
                    "override act_with_extras and policy_extras, or use source='info'"
                )
    except ValueError as err:
        yield str(err)
    for name, base in _CLASSES.items():
        value = getattr(s, name)
        if value is None and name == "exploration_wrapper_type":
            continue
        if isinstance(value, str):
            near = difflib.get_close_matches(value, NAMED_FIELDS[name], n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            yield f"{name} must be {', '.join(map(repr, NAMED_FIELDS[name]))} or a subclass of {base.__name__}, got {value!r}{hint}"
        elif not callable(value) or (isinstance(value, type) and not issubclass(value, base)):
            yield f"{name} must be a subclass of {base.__name__}, got {value!r}"


def _env_makers(s: ExperimentSettings) -> Iterable[str]:
    for name in ("make_train_env", "make_val_env"):
        value = getattr(s, name)
        if callable(value):
            continue
        if not isinstance(value, list):
            yield f"{name} must be a function that returns an AMAGOEnv, or a list of such functions, got {value!r}"
            continue
        if s.env_mode == "already_vectorized":
            if len(value) != 1:
                yield (
                    f"{name} lists {len(value)} functions, but env_mode='already_vectorized' takes one, whose environment has "
                    f"batched_envs={s.parallel_actors} (parallel_actors)"
                )
        elif len(value) != s.parallel_actors:
            yield f"{name} lists {len(value)} functions, but parallel_actors={s.parallel_actors}: give one for each actor"
        bad = next((m for m in value if not callable(m)), None)
        if bad is not None:
            yield f"{name} must list functions that return an AMAGOEnv, but holds {bad!r}"


def _directory(s: ExperimentSettings) -> Iterable[str]:
    """The directories that the run writes to."""
    yield from unwritable("ckpt_base_dir", s.ckpt_base_dir, "checkpoints and logs")
    if isinstance(s.dataset, DiskTrajDataset) and (s.collects or not s.dataset.buffer_dir.exists()):
        yield from unwritable("dset_root", s.dataset.buffer_dir, "the replay buffer")


def unwritable(name: str, path: Any, purpose: str) -> Iterable[str]:
    """Why a directory, or its nearest existing parent, cannot be written to; nothing if it can.

    Args:
        name: of the setting.
        purpose: what is written there.
    """
    if not isinstance(path, str | os.PathLike) or not os.fspath(path):
        yield f"{name} must be the path of a directory, got {path!r}"
        return
    directory = Path(path).expanduser()
    existing = next((p for p in (directory, *directory.absolute().parents) if os.path.lexists(p)), directory)
    if not existing.is_dir():
        yield f"{name} is {os.fspath(path)!r}, for {purpose}, but {str(existing)!r} is a file: name a directory"
    elif not os.access(existing, os.W_OK | os.X_OK):
        yield f"{name} is {os.fspath(path)!r}, for {purpose}, but {str(existing)!r} cannot be written to: name another directory"


def _weights_to_begin_with(s: ExperimentSettings) -> Iterable[str]:
    """``init_from`` must exist, and must not be what ``overwrite`` deletes."""
    if s.init_from is None:
        return
    if not isinstance(s.init_from, str | os.PathLike) or not os.fspath(s.init_from):
        yield f"init_from must be None or the path of a run, of a training state or of a file of weights, got {s.init_from!r}"
        return
    path = Path(s.init_from).expanduser()
    if not path.exists():
        yield f"init_from is {os.fspath(s.init_from)!r}, which does not exist: name a run's directory, a training state or a file of weights"
    elif s.overwrite is True and path.resolve().is_relative_to(s.run_dir.resolve()):
        yield f"init_from is {os.fspath(s.init_from)!r}, which overwrite=True deletes: choose another run_name"


def _contradictions(s: ExperimentSettings) -> Iterable[str]:
    if _is_number(s.traj_save_len) and _is_number(s.max_seq_len) and 1 <= s.traj_save_len < s.max_seq_len:
        yield (
            f"traj_save_len={s.traj_save_len:g} is less than max_seq_len={s.max_seq_len}: rollouts would be cut on disk into "
            "pieces shorter than a training sequence; make traj_save_len at least max_seq_len"
        )
    if isinstance(s.dataset, RLDataset) and not _is_of_shorthand(s.dataset, s.dset_root, s.dset_name):
        yield (
            f"dataset is given, and dset_root={s.dset_root!r}, dset_name={s.dset_name!r} would build another: give one of the two"
        )
    if s.overwrite is True and s.resume != "never":
        yield f"overwrite=True deletes the run that resume={s.resume!r} would continue: give one of the two"
    yield from _ignored_limits(s)
    if s.mixed_precision == "fp16" and not torch.cuda.is_available():
        yield "mixed_precision='fp16' needs a GPU, and there is none: use 'bf16', or 'no'"


def _ignored_limits(s: ExperimentSettings) -> Iterable[str]:
    """Limits of the buffer that the data set does not have: they only count for the one that ``dset_root`` and ``dset_name`` build."""
    if not isinstance(s.dataset, RLDataset):
        return
    for name in ("dset_max_size", "dset_max_steps", "dset_max_bytes"):
        value = getattr(s, name)
        if value != math.inf and getattr(s.dataset, name, None) != value:
            yield f"{name}={value} does not change the dataset that is given: give it to {type(s.dataset).__name__} instead"


def _is_of_shorthand(dataset: RLDataset, root: str | None, name: str | None) -> bool:
    """Whether a data set agrees with ``dset_root`` and ``dset_name``; it does if one of them is None."""
    if root is None or name is None:
        return True
    return isinstance(dataset, DiskTrajDataset) and (dataset.dset_root, dataset.dset_name) == (Path(root).expanduser(), name)


def warn_if_nothing_to_do(s: ExperimentSettings) -> None:
    """Warn at the start of a loop of empty epochs."""
    if s.epochs and not s.collects and not s.learns and not s.evaluates:
        warnings.warn(
            f"epochs={s.epochs}, start_collecting_at_epoch={s.start_collecting_at_epoch:g}, start_learning_at_epoch="
            f"{s.start_learning_at_epoch:g}, train_timesteps_per_epoch={s.train_timesteps_per_epoch}, train_batches_per_epoch="
            f"{s.train_batches_per_epoch}, val_interval={s.val_interval} and val_timesteps_per_epoch={s.val_timesteps_per_epoch} leave "
            "nothing to do: learn() neither collects, nor learns, nor evaluates",
            stacklevel=3,
        )


def check_buffer(dataset: RLDataset, obs_space: gym.spaces.Dict, action_space: gym.Space[Any]) -> None:
    """Refuse a buffer whose trajectories have other spaces than the environments, such as that of an older run.

    Args:
        dataset: configured. Only a `DiskTrajDataset` is checked.
        obs_space: of the environments, flat.
        action_space: of the environments.

    Raises:
        SettingsError: names the buffer, the environment of the trajectories, and what differs.
    """
    if not isinstance(dataset, DiskTrajDataset):
        return
    try:
        dataset.store.set_spaces(obs_space, action_space)
    except ValueError as err:
        raise SettingsError(f"{err}: choose another run_name or dset_name, or move the file away") from err
    view = dataset.store.view()
    for index, schema in view.kinds():
        recorded, spec = schema.obs_space, schema.action_spec
        differences = space_differences((recorded, spec.space), (obs_space, action_space), ranges=True)
        if view.path(index).endswith(".traj") and spec.dim == action_spec(action_space).dim:
            differences = [d for d in differences if d.name != "actions"]  # this format records the width of actions only
        if differences:
            text = "; ".join(f"{d.name}: {d.first} there, {d.second} now" for d in differences)
            raise SettingsError(
                f"the buffer {dataset.buffer_dir} holds trajectories of {view.env_name(index)!r} that do not fit the environments of "
                f"this run ({text}): choose another run_name or dset_name, or delete the buffer"
            )


def check_evaluation_spaces(
    name: str,
    obs_space: gym.spaces.Dict,
    action_space: gym.Space[Any],
    agent_obs_space: gym.spaces.Dict,
    agent_action_space: gym.Space[Any],
) -> None:
    """Refuse evaluation environments whose spaces are not those of the agent.

    Args:
        name: the setting or argument that made the environments, for the message.

    Raises:
        SettingsError: names what differs.
    """
    differences = space_differences((agent_obs_space, agent_action_space), (obs_space, action_space))
    if differences:
        text = "; ".join(f"{d.name}: {d.second}, not {d.first}" for d in differences)
        raise SettingsError(f"{name} makes environments that the agent was not built for ({text}): give both the same spaces")


def warn_if_nothing_saved(dataset: RLDataset, phases: float, timesteps: int, max_seq_len: int, saved: int = 0) -> None:
    """Warn if collection has left nothing to learn from although every actor has taken 1,000 steps.

    Args:
        dataset: after ``on_end_of_collection()``.
        phases: of collection so far.
        timesteps: of each actor in a phase.
        max_seq_len: transitions in a training sequence.
        saved: trajectories that this process has saved; others may have taken them away since.
    """
    if dataset.save_new_trajs_to is None or dataset.ready_for_training or saved or phases * timesteps < _STEPS_BEFORE_WARNING:
        return
    warnings.warn(
        f"no rollout ended within train_timesteps_per_epoch={timesteps} steps of each actor, so nothing was saved and there is "
        "nothing to learn from. If rollouts are longer than this, data will appear in later epochs; if they never end, save them "
        f"in pieces (for example traj_save_len={max(max_seq_len, min(timesteps, 1000))}) or give the environment a time limit",
        stacklevel=2,
    )


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool) and not math.isnan(value)


def _is_whole(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)
