"""Between the actions of a policy and those of an environment."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
from numpy.typing import NDArray

from amago.envs import introspect
from amago.envs.forwarding import Forwarding
from amago.spaces import ActionSpec, all_finite

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


class ActionForm:
    """The actions of B rows: their shape, their vectors, and what is refused.

    Args:
        spec: of the action space.
        rows: B.
        vectorized: whether an action has a batch dimension, (B, S), or is that of one environment, (S,).

    Attributes:
        shape: (B, S).
        one_index: whether an action is a single index.
        vector_dtype: of `vectors`.
    """

    def __init__(self, spec: ActionSpec, rows: int, vectorized: bool):
        self.spec, self.rows, self.shape = spec, rows, (rows, spec.stored_dim)
        self._own_shape = self.shape if vectorized else self.shape[1:]
        self._discrete, self._bits = spec.kind == "discrete", spec.kind == "multibinary"
        self._every_row = np.arange(rows)
        self.one_index = self._discrete and not vectorized
        self.vector_dtype = np.dtype(np.uint8 if self._discrete else np.float32)

    def shaped(self, action: Any) -> Array:
        """An action of the right shape, whose values are not checked.

        Raises:
            TypeError: it is no array.
            ValueError: it has another shape.
        """
        if not isinstance(action, np.ndarray):
            raise TypeError(f"action is {action!r}, but must be an array in stored form, {self._expected()}")
        if action.shape != self._own_shape:
            single = action.shape == self.shape[1:] or (self.one_index and action.ndim == 0)
            if action.shape != self.shape and (self.rows > 1 or not single):
                raise ValueError(f"action has shape {action.shape}, but must have the stored form, {self._expected()}")
            action = action.reshape(self._own_shape)
        if self._bits and action.dtype.kind == "f" and np.isin(action, (0.0, 1.0)).all():
            action = action.astype(np.int8)  # policies of the original hand bits over as float32
        return action

    def _expected(self) -> str:
        spec = self.spec
        return f"(B, S) = {self.shape} of {spec.stored_dtype}; ActionSpec.from_env turns an action of {spec.space} into it"

    def vectors(self, action: Any) -> Array:
        """(B, A): one-hot uint8 of an index, and float32 of numbers and bits."""
        if not self._discrete:
            return self.spec.to_vector(np.asarray(action).reshape(self.shape))
        out = np.zeros((self.rows, self.spec.dim), dtype=np.uint8)
        if self.one_index:
            out[0, action if action.__class__ is int else action.item()] = 1
        else:
            out[self._every_row, np.asarray(action).reshape(self.rows)] = 1
        return out

    def recordable(self, rep: Any, env_name: str) -> tuple[Array, Array]:
        """The stored form (B, S) of vectors that a subclass has made, and these vectors (B, A).

        Raises:
            ValueError: they are not the vectors of actions.
        """
        spec, given = self.spec, np.asarray(rep)
        if given.size == self.rows * spec.dim and all_finite(given):
            vectors = given.reshape(self.rows, spec.dim).astype(np.float32)
            stored = spec.from_vector(vectors)
            if np.array_equal(spec.to_vector(stored), vectors):
                spec.check(stored)
                return stored, vectors.astype(self.vector_dtype)
        raise ValueError(
            f"make_action_rep returned {rep!r} for {env_name}, but must return ({self.rows}, {spec.dim}) numbers that are the vector of "
            f"an action of {spec.space}, such as {spec.to_vector(spec.zeros(self.rows)).tolist()}: what is recorded is an action"
        )


class PolicyActions(Forwarding, gym.Wrapper[Any, Any, Any, Any]):
    """An environment whose ``step`` takes the action that a policy chose, (S,) in stored form, or (B, S) if it is vectorised.

    A single index may also be an int. Nothing is checked: `AMAGOEnv` does that.

    Args:
        env: a Gymnasium environment, or what has its methods.
        spec: of its actions.
        vectorized: whether it takes batches.
    """

    env: Any

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
        return (action if action.__class__ is int else action.item()) + self._first

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
    def spec(self) -> Any:  # type: ignore[override]  # Gymnasium's own wrappers override it so
        return getattr(self.env, "spec", None)

    @property
    def render_mode(self) -> Any:  # type: ignore[override]
        return getattr(self.env, "render_mode", None)

    def close(self) -> None:
        close = getattr(self.env, "close", None)
        if close is not None:
            close()

    def __repr__(self) -> str:
        return repr(self.env)

    __str__ = __repr__
