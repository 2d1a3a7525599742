"""Refuse what cannot work before work is wasted: settings that are wrong or contradict each other, then a buffer or
environments that do not fit, then collection that leaves nothing behind."""

from __future__ import annotations

import math
import os
import re
import warnings
from collections.abc import Iterable
from numbers import Integral, Real
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import torch

from amago.agent import BaseAgent
from amago.data.extras import check_extra_fields
from amago.envs.exploration import ExplorationWrapper
from amago.loading.dataset import PADDED_SAMPLING, DiskTrajDataset, RLDataset
from amago.nets.traj_encoders import TrajEncoder
from amago.nets.tstep_encoders import TstepEncoder
from amago.spaces import action_spec

ENV_MODES = ("async", "sync", "already_vectorized")
SAVE_FORMATS = ("segments", "npz", "npz-compressed")
PRECISIONS = ("no", "fp16", "bf16")

_FROM_ONE = ("max_seq_len", "batch_size", "batches_per_update", "parallel_actors", "epochs", "log_interval")
_FROM_ZERO = (
    "dloader_workers", "train_batches_per_epoch", "val_timesteps_per_epoch", "lr_warmup_steps", "max_env_restarts",
)  # fmt: skip
_NOT_NEGATIVE = ("start_learning_at_epoch", "start_collecting_at_epoch")
_WEIGHTS = ("l2_coeff", "critic_loss_weight")
_POSITIVE = ("grad_clip", "env_step_timeout")
_INTERVALS = ("val_interval", "ckpt_interval", "force_reset_train_envs_every", "keep_training_states", "env_workers")
_OPTIONAL = ("train_timesteps_per_epoch", "seed")
_SWITCHES = (
    "sample_actions", "sample_actions_train", "log_to_wandb", "log_to_tensorboard", "verbose", "has_dset_edit_rights",
    "stagger_traj_file_lengths", "always_save_latest", "always_load_latest",
)  # fmt: skip
_CLASSES = {
    "tstep_encoder_type": TstepEncoder, "traj_encoder_type": TrajEncoder, "agent_type": BaseAgent,
    "exploration_wrapper_type": ExplorationWrapper,
}  # fmt: skip


class SettingsError(ValueError):
    """One or more fields of an `Experiment` are wrong; the message has a line for each."""


def check_settings(e: Any) -> None:
    """Raise `SettingsError` listing every field that is wrong, with its value and what would be right."""
    problems = [*_numbers(e), *_choices(e), *_types(e), *_places(e), *_contradictions(e)]
    if problems:
        raise SettingsError("this Experiment cannot start:\n  - " + "\n  - ".join(problems))


def _numbers(e: Any) -> Iterable[str]:
    for names, rule, ok in (
        (_FROM_ONE, "a whole number of at least 1", lambda v: _is_whole(v) and v >= 1),
        (_FROM_ZERO, "a whole number of 0 or more", lambda v: _is_whole(v) and v >= 0),
        (_INTERVALS, "None or a whole number of at least 1", lambda v: v is None or (_is_whole(v) and v >= 1)),
        (_OPTIONAL, "None or a whole number of 0 or more", lambda v: v is None or (_is_whole(v) and v >= 0)),
        (_NOT_NEGATIVE, "a number of 0 or more", lambda v: _is_number(v) and v >= 0),
        (_WEIGHTS, "a finite number of 0 or more", lambda v: _is_number(v) and 0 <= v < math.inf),
        (_POSITIVE, "a number above 0", lambda v: _is_number(v) and v > 0),
        (("learning_rate",), "a finite number above 0", lambda v: _is_number(v) and 0 < v < math.inf),
        (("lr_cooldown",), "a share between 0 and 1", lambda v: _is_number(v) and 0 <= v <= 1),
        (_SWITCHES, "True or False", lambda v: isinstance(v, bool | np.bool_)),
        (("traj_save_len",), "a number of at least 1", lambda v: _is_number(v) and v >= 1),
    ):
        for name in names:
            if not ok(getattr(e, name)):
                yield f"{name} must be {rule}, got {getattr(e, name)!r}"


def _choices(e: Any) -> Iterable[str]:
    for name, known in (
        ("env_mode", ENV_MODES),
        ("save_trajs_as", SAVE_FORMATS),
        ("padded_sampling", PADDED_SAMPLING),
        ("mixed_precision", PRECISIONS),
        ("async_env_mp_context", (None, "fork", "spawn", "forkserver")),
    ):
        value = getattr(e, name)
        if value not in known:
            extra = "; pickled .traj files are never written" if value == "traj" else ""
            yield f"{name} must be one of {', '.join(map(repr, known))}, got {value!r}{extra}"
    if e.resume not in ("never", "auto") and (not _is_whole(e.resume) or e.resume < 0):
        yield f"resume must be 'never', 'auto' or the number of an epoch, got {e.resume!r}"


def _types(e: Any) -> Iterable[str]:
    if not isinstance(e.run_name, str) or not re.fullmatch(r"[^/\\\0]+", e.run_name) or e.run_name in (".", ".."):
        yield f"run_name must be a name without '/', got {e.run_name!r}"
    if e.dataset is None:
        yield "dataset must be given, or dset_root and dset_name to build a DiskTrajDataset"
    elif not isinstance(e.dataset, RLDataset):
        yield f"dataset must be an amago.loading.RLDataset, got {e.dataset!r}"
    try:
        for x in check_extra_fields(e.extra_fields):
            known = getattr(e.agent_type, "policy_extras", ())
            if x.source == "policy" and x.name not in known:
                yield (
                    f"extra_fields has {x.name!r} with source='policy', but agent_type {getattr(e.agent_type, '__name__', e.agent_type)} computes only {list(known)}: "
                    "override act_with_extras and policy_extras, or use source='info'"
                )
    except ValueError as err:
        yield str(err)
    for name, base in _CLASSES.items():
        value = getattr(e, name)
        if value is None and name == "exploration_wrapper_type":
            continue
        if not callable(value) or (isinstance(value, type) and not issubclass(value, base)):
            yield f"{name} must be a subclass of {base.__name__}, got {value!r}"
    for name in ("make_train_env", "make_val_env"):
        value = getattr(e, name)
        if callable(value):
            continue
        if not isinstance(value, Iterable) or isinstance(value, str | bytes):
            yield f"{name} must be a function that returns an AMAGOEnv, or a list of such functions, got {value!r}"
            continue
        makers = list(value)
        setattr(e, name, makers)  # an iterator can be read only once
        if e.env_mode == "already_vectorized":
            if len(makers) != 1:
                yield (
                    f"{name} lists {len(makers)} functions, but env_mode='already_vectorized' takes one, whose environment has "
                    f"batched_envs={e.parallel_actors} (parallel_actors)"
                )
        elif len(makers) != e.parallel_actors:
            yield f"{name} lists {len(makers)} functions, but parallel_actors={e.parallel_actors}: give one for each actor"
        bad = next((m for m in makers if not callable(m)), None)
        if bad is not None:
            yield f"{name} must list functions that return an AMAGOEnv, but holds {bad!r}"


def _places(e: Any) -> Iterable[str]:
    """The directory in which everything will be written."""
    if not isinstance(e.ckpt_base_dir, str | os.PathLike) or not os.fspath(e.ckpt_base_dir):
        yield f"ckpt_base_dir must be the path of a directory, got {e.ckpt_base_dir!r}"
        return
    base = Path(e.ckpt_base_dir).expanduser()
    there = next((p for p in (base, *base.absolute().parents) if os.path.lexists(p)), base)
    if not there.is_dir():
        yield f"ckpt_base_dir is {os.fspath(e.ckpt_base_dir)!r}, but {str(there)!r} is a file: name a directory"
    elif not os.access(there, os.W_OK | os.X_OK):
        yield f"ckpt_base_dir is {os.fspath(e.ckpt_base_dir)!r}, but {str(there)!r} cannot be written to"


def _contradictions(e: Any) -> Iterable[str]:
    if _is_number(e.traj_save_len) and _is_number(e.max_seq_len) and 1 <= e.traj_save_len < e.max_seq_len:
        yield (
            f"traj_save_len={e.traj_save_len:g} is less than max_seq_len={e.max_seq_len}: rollouts would be cut on disk into "
            "pieces shorter than a training sequence; make traj_save_len at least max_seq_len"
        )
    if e.val_interval is not None and e.val_timesteps_per_epoch == 0:
        yield "val_timesteps_per_epoch=0 leaves nothing to evaluate: set it to the length of an episode or more, or val_interval=None"
    if isinstance(e.dataset, RLDataset) and _built_from(e.dataset, e) is False:
        yield (
            f"dataset is given, and dset_root={e.dset_root!r}, dset_name={e.dset_name!r} would build another: give one of the two"
        )
    if e.mixed_precision == "fp16" and not torch.cuda.is_available():
        yield "mixed_precision='fp16' needs a GPU, and there is none: use 'bf16', or 'no'"
    if all(_is_number(v) for v in (e.epochs, e.start_learning_at_epoch, e.start_collecting_at_epoch)) and e.epochs >= 1:
        yield from _idle(e)


def _built_from(dataset: RLDataset, e: Any) -> bool | None:
    """Whether a data set is the one that ``dset_root`` and ``dset_name`` mean; None where they are not both given."""
    if e.dset_root is None or e.dset_name is None:
        return None
    return isinstance(dataset, DiskTrajDataset) and (
        (dataset.dset_root, dataset.dset_name) == (Path(e.dset_root).expanduser(), e.dset_name)
    )


def _idle(e: Any) -> Iterable[str]:
    """No epoch would do anything."""
    collects = bool(e.train_timesteps_per_epoch) and e.start_collecting_at_epoch < e.epochs
    learns = bool(e.train_batches_per_epoch) and e.start_learning_at_epoch < e.epochs
    if not collects and not learns and e.val_interval is None:
        yield (
            f"epochs={e.epochs}, start_collecting_at_epoch={e.start_collecting_at_epoch:g}, start_learning_at_epoch="
            f"{e.start_learning_at_epoch:g}, train_timesteps_per_epoch={e.train_timesteps_per_epoch}, train_batches_per_epoch="
            f"{e.train_batches_per_epoch} and val_interval=None leave nothing to do: this run would neither collect, nor learn, "
            "nor evaluate"
        )


def check_buffer(dataset: RLDataset, obs_space: gym.spaces.Dict, action_space: gym.Space[Any]) -> None:
    """Refuse a buffer whose trajectories are of other spaces than the environments, such as that of an older run.

    Args:
        dataset: configured; other data sets than `DiskTrajDataset` are not looked into.
        obs_space: of the environments, flat.
        action_space: of the environments.

    Raises:
        SettingsError: naming the buffer, the environment that filled it, and what differs.
    """
    if not isinstance(dataset, DiskTrajDataset):
        return
    view = dataset.store.view()
    seen: set[int] = set()
    for index in np.unique(np.linspace(0, len(view) - 1, min(len(view), _LOOKED_INTO)).astype(int)).tolist():
        recorded, spec = view.obs_space(index), view.action_spec(index)
        if id(recorded) in seen:  # one object for all files that have the same
            continue
        seen.add(id(recorded))
        old, new = _shapes(recorded, spec.space), _shapes(obs_space, action_space)
        if view.path(index).endswith(".traj"):  # which tells only how wide its action vectors are
            old["actions"], new["actions"] = f"width {spec.dim}", f"width {action_spec(action_space).dim}"
        differing = [k for k in sorted(old.keys() | new.keys()) if old.get(k) != new.get(k)]
        if differing:
            text = "; ".join(f"{k}: {old.get(k, 'missing')} there, {new.get(k, 'missing')} now" for k in differing)
            raise SettingsError(
                f"the buffer {dataset.buffer_dir} holds trajectories of {view.env_name(index)!r} that do not fit the environments of "
                f"this run ({text}): choose another run_name or dset_name, or delete the buffer"
            )


_PATIENCE = 1_000  # steps of each actor before it is odd that no rollout has ended
_LOOKED_INTO = 1000
"""Trajectories whose spaces are compared with the environments', spread evenly over the buffer."""


def check_evaluation_spaces(
    name: str, obs_space: gym.spaces.Dict, action_space: gym.Space[Any], of_agent: tuple[gym.spaces.Dict, gym.Space[Any]]
) -> None:
    """Refuse environments to evaluate on whose spaces are not those that the agent was built for.

    Args:
        name: the setting or argument that made them, for the error.
        of_agent: the agent's observation and action space.

    Raises:
        SettingsError: naming what differs.
    """
    old, new = _shapes(*of_agent), _shapes(obs_space, action_space)
    differing = [k for k in sorted(old.keys() | new.keys()) if old.get(k) != new.get(k)]
    if differing:
        text = "; ".join(f"{k}: {new.get(k, 'missing')}, not {old.get(k, 'missing')}" for k in differing)
        raise SettingsError(f"{name} makes environments that the agent was not built for ({text}): give both the same spaces")


def _shapes(obs_space: gym.spaces.Dict, action_space: gym.Space[Any]) -> dict[str, str]:
    """{observation key, "actions": what must agree}."""
    spec = action_spec(action_space)
    out = {f"observation {k!r}": f"{s.dtype} {s.shape}" for k, s in obs_space.spaces.items()}
    return out | {"actions": f"{spec.kind} of width {spec.dim}"}


def warn_if_nothing_saved(e: Any) -> bool:
    """Warn that the phases of collection so far have left nothing to learn from; returns whether they have.

    It says nothing before every actor has taken 1,000 steps: long rollouts are no mistake.

    Args:
        e: a started `Experiment`, after ``collect_new_training_data()`` and ``dataset.on_end_of_collection()``.
    """
    begun = e.epoch + 1 - max(0, e.start_collecting_at_epoch)
    if e.dataset.save_new_trajs_to is None or e.dataset.ready_for_training or begun * e.train_timesteps_per_epoch < _PATIENCE:
        return False
    steps, pieces = e.train_timesteps_per_epoch, max(e.max_seq_len, min(e.train_timesteps_per_epoch or 1, 1000))
    warnings.warn(
        f"no rollout ended within train_timesteps_per_epoch={steps} steps of each actor, so nothing was saved and there is "
        f"nothing to learn from. If rollouts are longer, it comes with the epochs; if they never end, save them in pieces "
        f"(traj_save_len={pieces}, say) or give the environment a time limit",
        stacklevel=2,
    )
    return True


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool) and not math.isnan(value)


def _is_whole(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)
