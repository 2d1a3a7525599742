"""Refuse wrong or contradictory settings of an `Experiment` before any process starts."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from numbers import Integral, Real
from typing import Any

from amago.agent import BaseAgent
from amago.envs.exploration import ExplorationWrapper
from amago.loading.dataset import PADDED_SAMPLING, RLDataset
from amago.nets.traj_encoders import TrajEncoder
from amago.nets.tstep_encoders import TstepEncoder

ENV_MODES = ("async", "sync", "already_vectorized")
SAVE_FORMATS = ("segments", "npz", "npz-compressed")
PRECISIONS = ("no", "fp16", "bf16")

_FROM_ONE = ("max_seq_len", "batch_size", "batches_per_update", "parallel_actors", "epochs", "log_interval")
_FROM_ZERO = (
    "dloader_workers", "train_batches_per_epoch", "val_timesteps_per_epoch", "lr_warmup_steps", "max_env_restarts",
)  # fmt: skip
_NOT_NEGATIVE = ("start_learning_at_epoch", "start_collecting_at_epoch", "l2_coeff", "critic_loss_weight")
_POSITIVE = ("learning_rate", "grad_clip", "env_step_timeout")
_INTERVALS = ("val_interval", "ckpt_interval", "force_reset_train_envs_every", "keep_training_states", "env_workers")
_OPTIONAL = ("train_timesteps_per_epoch", "seed")
_CLASSES = {
    "tstep_encoder_type": TstepEncoder, "traj_encoder_type": TrajEncoder, "agent_type": BaseAgent,
    "exploration_wrapper_type": ExplorationWrapper,
}  # fmt: skip


class SettingsError(ValueError):
    """One or more fields of an `Experiment` are wrong; the message has a line for each."""


def check_settings(e: Any) -> None:
    """Raise `SettingsError` listing every field that is wrong, with its value and what would be right."""
    problems = [*_numbers(e), *_choices(e), *_types(e), *_contradictions(e)]
    if problems:
        raise SettingsError("this Experiment cannot start:\n  - " + "\n  - ".join(problems))


def _numbers(e: Any) -> Iterable[str]:
    for names, rule, ok in (
        (_FROM_ONE, "a whole number of at least 1", lambda v: _is_whole(v) and v >= 1),
        (_FROM_ZERO, "a whole number of 0 or more", lambda v: _is_whole(v) and v >= 0),
        (_INTERVALS, "None or a whole number of at least 1", lambda v: v is None or (_is_whole(v) and v >= 1)),
        (_OPTIONAL, "None or a whole number of 0 or more", lambda v: v is None or (_is_whole(v) and v >= 0)),
        (_NOT_NEGATIVE, "a number of 0 or more", lambda v: _is_number(v) and v >= 0),
        (_POSITIVE, "a number above 0", lambda v: _is_number(v) and v > 0),
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
        if len(makers) != e.parallel_actors and e.env_mode != "already_vectorized":
            yield f"{name} lists {len(makers)} functions, but parallel_actors={e.parallel_actors}: give one for each actor"
        bad = next((m for m in makers if not callable(m)), None)
        if bad is not None:
            yield f"{name} must list functions that return an AMAGOEnv, but holds {bad!r}"


def _contradictions(e: Any) -> Iterable[str]:
    if _is_number(e.traj_save_len) and _is_number(e.max_seq_len) and 1 <= e.traj_save_len < e.max_seq_len:
        yield (
            f"traj_save_len={e.traj_save_len:g} is less than max_seq_len={e.max_seq_len}: rollouts would be cut on disk into "
            "pieces shorter than a training sequence; make traj_save_len at least max_seq_len"
        )
    if e.val_interval is not None and e.val_timesteps_per_epoch == 0:
        yield "val_timesteps_per_epoch=0 leaves nothing to evaluate: set it to the length of an episode or more, or val_interval=None"


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool) and not math.isnan(value)


def _is_whole(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)
