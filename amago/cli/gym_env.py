"""Gymnasium environments by their ids, and environments by the names of the functions that make them."""

from __future__ import annotations

import importlib
import json
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gymnasium as gym

from amago.cli_utils.settings import read_settings
from amago.envs import AMAGOEnv
from amago.run.rundir import SETTINGS_YAML

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
