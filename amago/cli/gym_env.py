"""Environments and action spaces as commands take them in text: environments by their ids, or by the names of the functions that make them."""

from __future__ import annotations

import importlib
import json
import re
import shlex
from argparse import ArgumentTypeError
from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np

from amago.envs import AMAGOEnv

ENVIRONMENT = (
    "id of a registered environment, module:Id-v0 for one that a module registers, or module:function for what makes one"
)
"""For help: each form in which commands take an environment."""

LIMIT = 1000
"""Steps after which rollouts of an environment without a time limit are truncated, so that an evaluation ends with a result."""


@dataclass(frozen=True)
class GymEnv:
    """A picklable function that makes an environment.

    Args:
        env_id: the id of a registered environment; or "module:function", where the function makes a Gymnasium environment, a `VectorEnv` or
            an `AMAGOEnv`. The module is imported.
        max_steps: rollouts are truncated after this many steps; None: at the environment's own limit or, if a Gymnasium environment has
            none, after `LIMIT` steps.
        make: the function; ``env_id`` is then its name in messages. None: ``env_id`` says which.
    """

    env_id: str
    max_steps: int | None = None
    make: Callable[..., object] | None = None

    def __call__(self, render_mode: str | None = None) -> AMAGOEnv:
        """The environment; ValueError if there is none of this name, or it takes no ``render_mode``."""
        # not every environment takes the argument
        options: dict[str, Any] = {} if render_mode is None else {"render_mode": render_mode}
        try:
            make = self.make or _maker(self.env_id)
            if make is not None:
                return self._wrapped(make(**options))
            return self._wrapped(gym.make(self.env_id, max_episode_steps=self.max_steps, **options), self.env_id)
        except (gym.error.Error, ImportError) as err:
            raise ValueError(f"cannot make the environment {self.env_id!r}: {err}") from err
        except TypeError as err:
            if render_mode is None or "render_mode" not in str(err):
                raise
            raise ValueError(f"the environment {self.env_id!r} takes no render_mode, so it cannot be shown: {err}") from err

    def _wrapped(self, env: object, name: str | None = None) -> AMAGOEnv:
        if isinstance(env, gym.vector.VectorEnv):
            env = AMAGOEnv(env, batched_envs=env.num_envs)
        if isinstance(env, AMAGOEnv):
            if self.max_steps is not None:
                raise ValueError(
                    f"{self.env_id} makes an AMAGOEnv or a VectorEnv, whose rollouts cannot be truncated after {self.max_steps} steps from outside: "
                    "return the Gymnasium environment itself, or leave the limit out"
                )
            return env
        if not isinstance(env, gym.Env):
            raise ValueError(
                f"{self.env_id} must return a Gymnasium environment, a VectorEnv or an AMAGOEnv, but returned {env!r}"
            )
        if self.max_steps is not None and name is None:
            env = gym.wrappers.TimeLimit(env, self.max_steps)
        wrapped = AMAGOEnv(env, env_name=name)
        return wrapped if wrapped.horizon is not None else AMAGOEnv(gym.wrappers.TimeLimit(env, LIMIT), env_name=name)

    def horizon(self, env: AMAGOEnv) -> int:
        """The time limit of rollouts in steps; `LIMIT` for an `AMAGOEnv` that names none."""
        return self.max_steps or env.horizon or LIMIT

    def steps_of(self, env: AMAGOEnv, rollouts: int) -> int:
        """Steps within which so many rollouts of one actor end; ten times as many where no time limit enforces the horizon."""
        enforced = self.max_steps or (env.spec and env.spec.max_episode_steps)
        return rollouts * (enforced or 10 * max(LIMIT, self.horizon(env))) + 1


def _maker(env_id: str) -> Callable[..., object] | None:
    """The function that "module:function" names; None for other names, which are Gymnasium's (it has "module:Id", too)."""
    module, colon, name = env_id.partition(":")
    if not colon or not name.isidentifier() or name in gym.registry:
        return None
    found = getattr(importlib.import_module(module), name, None)
    return found if callable(found) else None


def read_environment(run_dir: Path) -> tuple[str, int | None] | None:
    """The name of the environment on which a run was trained, and the steps after which its rollouts are truncated; None if that is not
    recorded."""
    # not above: `GymEnv` is imported in workers, which need no torch
    from amago.cli_utils.settings import read_settings
    from amago.run.rundir import SETTINGS_YAML

    path = run_dir / SETTINGS_YAML
    found: dict[str, Any] = (read_settings(str(path)) if path.is_file() else None) or {}
    if "memory" not in found and not found.keys() <= {"env", "horizon"}:
        found = {}  # a script's, whose argument of this name is its own affair
    if "env" not in found and (earlier := run_dir / "train_args.json").is_file():  # of earlier versions
        found = json.loads(earlier.read_text(encoding="utf-8"))
    return (str(found["env"]), found.get("horizon")) if "env" in found else None


def is_own_code(env_id: str) -> bool:
    """True if a name imports a module outside of amago: "module:function" or "module:Id-v0"."""
    module, colon, _ = env_id.partition(":")
    return bool(colon) and module.partition(".")[0] != "amago"


def eval_command(run: str | Path, env_id: str, *options: str) -> str:
    """The command that evaluates a run again, for a shell. Environments of the user's own modules are named in it: a file of the
    run does not decide which of them is imported."""
    return shlex.join(["amago", "eval", str(run), *(["--env", env_id] if is_own_code(env_id) else []), *options])


# ---- action spaces, for ``amago buffer import --action-space`` -----------------------------------------------------------------

SPACE_KINDS = "discrete:N, multidiscrete:N,N,.., box:LOW,HIGH, bits, tuple(SPACE;SPACE;..) or dict(NAME=SPACE;..)"
SPACE_SYNTAX = """\
a SPACE is one of
  discrete:N                  an index from 0 to N-1
  multidiscrete:N,N,..        several indices
  box:LOW,HIGH,SIZE           numbers; SIZE is their count (6) or shape (2x3)
  bits:SIZE                   bits; SIZE likewise
  'tuple(SPACE;SPACE;..)'     several spaces, which may be nested; quoted,
  'dict(NAME=SPACE;..)'       because the shell would interpret ( and ;
Without a SIZE, box and bits have the shape of the recorded actions; inside a
tuple or dict they are one number. The numbers of a tuple or dict lie side by
side in each row of actions, in the order written here; or an .npz file has an
array actions/NAME for each part ("arm/grip" for a part of a part, "0", "1", ..
for those of a tuple). Example:
  --action-space 'dict(drive=discrete:3; steer=box:-30,30; switches=bits:2)'
"""
_FORMS = {
    "discrete": "discrete:N with N at least 1",
    "multidiscrete": "multidiscrete:N,N,.. with each N at least 1",
    "box": "box:LOW,HIGH with numbers LOW below HIGH, or box:LOW,HIGH,SIZE with a SIZE such as 6 or 2x3",
    "bits": "bits, or bits:SIZE with a SIZE such as 6 or 2x3",
    "tuple": "tuple(SPACE;SPACE;..)",
    "dict": "dict(NAME=SPACE;..), with different names of letters, digits, _, - and .",
}
_MOST_NUMBERS = 1 << 20  # more numbers than any environment has would fill the memory


def parse_space(text: str, shape: tuple[int, ...] = (1,)) -> gym.Space:
    """Read an action space from text, such as "discrete:4" or "tuple(discrete:3; box:-1,1)"; `SPACE_SYNTAX` explains the syntax.

    ``shape`` is that of a box or of bits without a size; inside a tuple or dict it is (1,). A ValueError quotes the wrong part of the text
    and shows the right form.
    """
    text = text.strip()
    kind = re.match("[a-z]*", text)[0]  # type: ignore[index]
    inside = text.removeprefix(kind).strip()
    refusal = ValueError(
        f"{text[:200]!r} is not an action space: write {_FORMS.get(kind, SPACE_KINDS)}; at most {_MOST_NUMBERS:,} numbers"
    )
    if kind in ("tuple", "dict"):
        parts = _split(inside[1:-1])
        names = [part.partition("=")[0].strip() if kind == "dict" else str(i) for i, part in enumerate(parts)]
        named = len(set(names)) == len(names) and all(re.fullmatch(r"[\w.-]+", name) for name in names)
        if not (inside.startswith("(") and inside.endswith(")") and all(parts) and named):
            raise refusal
        if kind == "tuple":
            return gym.spaces.Tuple(map(parse_space, parts))
        return gym.spaces.Dict([(name, parse_space(part.partition("=")[2])) for name, part in zip(names, parts)])
    if kind not in _FORMS or inside[:1] not in ("", ":"):
        raise refusal
    try:
        return _flat_space(kind, inside[1:].split(",") if inside else [], shape)
    except ValueError:
        raise refusal from None


def _flat_space(kind: str, words: list[str], shape: tuple[int, ...]) -> gym.Space:
    """A space that is neither tuple nor dict, from the words after its kind; ValueError if they are no such numbers."""
    if kind in ("discrete", "multidiscrete"):
        counts = _counts(words)
        if kind == "multidiscrete":
            return gym.spaces.MultiDiscrete(counts)
        (count,) = counts
        return gym.spaces.Discrete(count)
    bounds, sizes = (words[:2], words[2:]) if kind == "box" else (["0", "1"], words)
    if sizes:
        (size,) = sizes
        shape = tuple(_counts(size.split("x")))
    low, high = np.array(bounds, np.float32)
    if not 0 < prod(shape) <= _MOST_NUMBERS or not -np.inf < low < high < np.inf:
        raise ValueError
    if kind == "bits":
        return gym.spaces.MultiBinary(shape if len(shape) > 1 else prod(shape))
    return gym.spaces.Box(low, high, shape, np.float32)


def _counts(words: list[str]) -> list[int]:
    """Numbers of 1 and more, at least one."""
    counts = [int(word) for word in words]
    if not counts or min(counts) < 1 or max(counts) > _MOST_NUMBERS:
        raise ValueError
    return counts


def _split(inside: str) -> list[str]:
    """Split at the semicolons that are outside of brackets."""
    parts, depth = [""], 0
    for c in inside:
        depth += (c == "(") - (c == ")")
        if c == ";" and depth == 0:
            parts.append("")
        else:
            parts[-1] += c
    return [part.strip() for part in parts]


def space_argument(text: str) -> str:
    """The type of ``--action-space``: checks the text and returns it. It is parsed later, when the shape of actions is known."""
    try:
        parse_space(text)
    except ValueError as err:
        raise ArgumentTypeError(f"{text[:200]!r}: {err}") from err
    return text


def space_of_actions(space: gym.Space | str | None, actions: np.ndarray | dict[str, np.ndarray], path: Path) -> gym.Space:
    """The space of recorded actions, (N, ...) or {part: (N, ...)}.

    ``space`` is a space, a text for `parse_space`, or None: a Box from -1 to 1, if the actions are such numbers. ``path`` is for messages.
    """
    if isinstance(space, gym.Space):
        return space
    if isinstance(actions, dict):
        if space is None:
            named = ", actions/".join(sorted(actions))
            raise ValueError(
                f"{path} has actions/{named}; name their spaces with --action-space 'dict(NAME=SPACE;..)' or --env"
            )
        return parse_space(space)
    if space is None and (actions.dtype.kind != "f" or not np.abs(actions).max(initial=0.0) <= 1):
        raise ValueError(
            f"{path}: actions of dtype {actions.dtype} and shape {actions.shape} are not in a Box from -1 to 1; name their space "
            f"with --action-space ({SPACE_KINDS}) or --env"
        )
    return parse_space(space or "box:-1,1", actions.shape[1:])
