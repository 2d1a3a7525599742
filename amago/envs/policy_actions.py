"""Between the actions of a policy and those of an environment."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
from numpy.typing import NDArray

from amago.envs import introspect
from amago.envs.forwarding import Forwarding
from amago.spaces import ActionSpec

Array = NDArray[Any]


def policy_space(spec: ActionSpec) -> gym.Space[Any]:
    """The space of the actions that a policy chooses.

    Discrete counts from 0, boxes are [-1, 1] and flat, bits are in one row. Actions of several parts keep the environment's space,
    although policies choose their stored form (`amago.spaces`).
    """
    if spec.kind == "discrete":
        return gym.spaces.Discrete(spec.dim)
    if spec.kind == "continuous":
        return gym.spaces.Box(-1.0, 1.0, (spec.dim,), np.float32)
    if spec.kind == "multibinary":
        return gym.spaces.MultiBinary(spec.dim)
    return spec.space


def policy_dtype(spec: ActionSpec) -> np.dtype[Any]:
    """The dtype of a policy's actions in the original system: uint8 for an index below 256, else float32.

    Wider spaces and actions of several parts, which the original system does not have, are in their stored dtype.
    """
    if spec.kind == "discrete":
        return np.dtype(np.uint8) if spec.dim <= 256 else spec.stored_dtype
    return np.dtype(np.float32) if spec.kind in ("continuous", "multibinary") else spec.stored_dtype


class PolicyActions(Forwarding, gym.Wrapper[Any, Any, Any, Any]):
    """An environment whose ``step`` takes the action that a policy chose, (S,) in stored form, or (B, S) if it is vectorised.

    A single index may also be an int. Nothing is checked: `AMAGOEnv` does that.

    Args:
        env: a Gymnasium environment, or what has its methods.
        spec: of its actions.
        vectorized: whether it takes batches.
    """

    def __init__(self, env: Any, spec: ActionSpec, vectorized: bool):
        # without `gym.Wrapper.__init__`, which refuses vectorised environments and those that are no subclass of gym.Env
        self.env = env
        self._action_space, self._observation_space = policy_space(spec), env.observation_space
        self._metadata = dict(getattr(env, "metadata", None) or {})
        self._cached_spec = None
        self._spec, self._stored = spec, (spec.stored_dim,)
        self._first = int(spec.space.start) if spec.kind == "discrete" else 0  # type: ignore[attr-defined]
        self._own_form = spec.to_env if vectorized else self._index if spec.kind == "discrete" else self._row
        self._reset_takes = introspect.reset_arguments(env)

    def _index(self, action: Any) -> int:
        return (action if action.__class__ is int else int(action.item())) + self._first

    def _row(self, action: Any) -> Any:
        return self._spec.to_env(np.asarray(action).reshape(self._stored))

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        """Reset the environment, with those arguments that are given and that it accepts."""
        given = {k: v for k, v in (("seed", seed), ("options", options)) if v is not None and k in self._reset_takes}
        return self.env.reset(**given)

    def step(self, action: Any) -> Any:
        return self.env.step(self._own_form(action))

    @property
    def unwrapped(self) -> Any:
        return getattr(self.env, "unwrapped", self.env)

    @property
    def spec(self) -> Any:
        return getattr(self.env, "spec", None)

    @property
    def render_mode(self) -> Any:
        return getattr(self.env, "render_mode", None)

    def close(self) -> None:
        close = getattr(self.env, "close", None)
        if close is not None:
            close()

    def __repr__(self) -> str:
        return repr(self.env)

    __str__ = __repr__
