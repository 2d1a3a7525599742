"""Gymnasium environments by their ids, and environments by the names of the functions that make them."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gymnasium as gym

from amago.envs import AMAGOEnv

ARGS_FILE = "train_args.json"


@dataclass(frozen=True)
class GymEnv:
    """A picklable function that makes an environment.

    Args:
        env_id: the id of a registered environment; or "module:function", where the function makes a Gymnasium environment or an
            `AMAGOEnv`. The module is imported.
        max_steps: rollouts are truncated after this many steps; None: the environment's own limit.
    """

    env_id: str
    max_steps: int | None = None

    def __call__(self, render_mode: str | None = None) -> AMAGOEnv:
        options: dict[str, Any] = (
            {} if render_mode is None else {"render_mode": render_mode}
        )  # not every environment takes the argument
        make = maker(self.env_id)
        try:
            if make is not None:
                return self._wrapped(make(**options))
            env = gym.make(self.env_id, max_episode_steps=self.max_steps, **options)
        except gym.error.Error as err:
            raise ValueError(f"cannot make the environment {self.env_id!r}: {err}") from err
        except TypeError as err:
            if render_mode is None or "render_mode" not in str(err):
                raise
            raise ValueError(f"the environment {self.env_id!r} takes no render_mode, so it cannot be shown: {err}") from err
        return AMAGOEnv(env, env_name=self.env_id)

    def _wrapped(self, env: Any) -> AMAGOEnv:
        if isinstance(env, AMAGOEnv):
            if self.max_steps is not None:
                raise ValueError(
                    f"{self.env_id} makes an AMAGOEnv, whose rollouts cannot be truncated after {self.max_steps} steps from outside: "
                    "return the Gymnasium environment itself, or leave the limit out"
                )
            return env
        if not isinstance(env, gym.Env):
            raise ValueError(f"{self.env_id} must return a Gymnasium environment or an AMAGOEnv, but returned {env!r}")
        return AMAGOEnv(env if self.max_steps is None else gym.wrappers.TimeLimit(env, self.max_steps))

    def horizon(self, env: AMAGOEnv) -> int:
        """The time limit of rollouts in steps; 1000 for an environment without one."""
        return self.max_steps or env.horizon or 1000


def write_args_file(run_dir: Path, env_id: str, max_steps: int | None) -> None:
    """Record a run's environment, so that ``amago eval RUN`` needs no ``--env``."""
    run_dir.mkdir(parents=True, exist_ok=True)
    (run_dir / ARGS_FILE).write_text(json.dumps({"env": env_id, "horizon": max_steps}))


def maker_is_named(env_id: str) -> bool:
    """Whether a name has the form "module:function"; nothing is imported."""
    _, colon, name = env_id.partition(":")
    return bool(colon) and name.isidentifier() and name not in gym.registry


def look_in_working_directory(module: str) -> None:
    """Let a module be imported from the working directory, where the command ``amago``, unlike ``python -m``, does not look."""
    try:
        known = importlib.util.find_spec(module.partition(".")[0]) is not None
    except ValueError:  # __main__
        known = True
    here = os.getcwd()
    if not known and here not in sys.path:
        sys.path.append(here)


def maker(env_id: str) -> Callable[..., Any] | None:
    """The function that "module:function" names; None for other names, which are Gymnasium's (it has "module:Id", too).

    Raises:
        ValueError: the module cannot be imported.
    """
    if not maker_is_named(env_id):
        return None
    module, _, name = env_id.partition(":")
    look_in_working_directory(module)
    try:
        found = getattr(importlib.import_module(module), name, None)
    except ImportError as err:
        raise ValueError(f"cannot import the module of the environment {env_id!r}: {err}") from err
    return found if inspect.isroutine(found) or inspect.isclass(found) else None
