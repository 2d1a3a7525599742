"""`AMAGOWrapper`: base of wrappers around an `AMAGOEnv`."""

from __future__ import annotations

from typing import Any

import gymnasium as gym

from amago.config import NamedArguments
from amago.envs.environment import AMAGOEnv
from amago.envs.forwarding import Forwarding, assignable


class AMAGOWrapper(NamedArguments, Forwarding, gym.Wrapper[Any, Any, Any, Any]):
    """Base of wrappers around an `AMAGOEnv`, or around another such wrapper, whose other attributes it has too.

    Attributes:
        amago_env: the `AMAGOEnv` inside all wrappers.

    Raises:
        TypeError: there is no `AMAGOEnv` inside.
    """

    rl2_space: Any

    def __init__(self, env: Any):
        self.amago_env = innermost(env, f"{type(self).__name__} needs an AMAGOEnv, but got")
        super().__init__(env)
        self.action_spec, self.rl2_space = self.amago_env.action_spec, self.amago_env.rl2_space
        self.batched_envs = self.amago_env.batched_envs

    @assignable
    def env_name(self) -> str:
        return self.amago_env.env_name


def innermost(env: Any, complaint: str) -> AMAGOEnv:
    """The `AMAGOEnv` inside any wrappers.

    Raises:
        TypeError: there is none; the message begins with ``complaint``, such as "EpsilonGreedy needs an AMAGOEnv, but got".
    """
    inner = env
    while not isinstance(inner, AMAGOEnv):
        if not isinstance(inner, gym.Wrapper):
            raise TypeError(f'{complaint} {type(env).__name__}: {env!r}. Wrap it: amago.envs.AMAGOEnv(env, env_name="...")')
        inner = inner.env
    return inner
