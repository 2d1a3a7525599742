"""The environment inside an `AMAGOEnv`: its properties, which environments declare in several ways, the conversions of its actions
and observations, and how a vectorised one resets its rows.

In each of Gymnasium's autoreset modes (https://farama.org/Vector-Autoreset-Mode) a step gives something else where a rollout ends:
the last observation ("next_step", where the step after it ignores the action and resets), the next rollout's first ("same_step",
where the last may be in the info), or the last, with resets on request ("disabled"). `AutoReset` describes a step alike in all.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import gymnasium as gym
import numpy as np
from numpy.typing import NDArray

from amago.spaces import ActionSpec, ObsSpec, all_finite, changed_spec, obs_spec

Array = NDArray[Any]
Mask = NDArray[np.bool_]
Info = tuple[dict[str, Any], Mask]
T = TypeVar("T")
NEXT_STEP, SAME_STEP, DISABLED = "next_step", "same_step", "disabled"


def forwarded(wrapper: Any, name: str) -> Any:
    """The ``__getattr__`` of a wrapper that looks up missing public attributes in ``self.env``, as in Gymnasium before 1.0."""
    if hasattr(type(wrapper), name):  # a property of this class has raised AttributeError: raise that again, not another
        return object.__getattribute__(wrapper, name)
    if name.startswith("_") or "env" not in wrapper.__dict__:
        raise AttributeError(f"{type(wrapper).__name__!r} object has no attribute {name!r}")
    return getattr(wrapper.env, name)


class assignable(Generic[T]):
    """A property that an assignment to the object replaces, so that subclasses are free to use the name."""

    def __init__(self, getter: Callable[[Any], T]):
        self._getter, self.__doc__ = getter, getter.__doc__

    def __get__(self, obj: object, owner: object = None) -> T:
        return self if obj is None else self._getter(obj)  # type: ignore[return-value]  # of the class: itself


def layers(env: object) -> Iterator[Any]:
    """The environment and those that it wraps, from the outside."""
    while env is not None:
        yield env
        env = env.env if isinstance(env, (gym.Wrapper, gym.vector.VectorWrapper)) else None


def own_name(env: object) -> object:
    """``env_name`` of the environment or the nearest one that it wraps, else the Gymnasium id, else the class."""
    for layer in layers(env):
        if (name := getattr(layer, "env_name", None)) is not None:
            return name
    spec = getattr(env, "spec", None)
    return spec.id if spec is not None else type(getattr(env, "unwrapped", env)).__name__


def horizon(env: object) -> int | None:
    """The most steps of a rollout; None if that is not known.

    The outermost `gymnasium.wrappers.TimeLimit` or attribute ``horizon`` that is a whole number from 1 decides; else the time
    limit in the Gymnasium spec.
    """
    for layer in layers(env):
        is_limit = isinstance(layer, gym.wrappers.TimeLimit)  # there is no public name for its number
        found: Any = layer._max_episode_steps if is_limit else getattr(layer, "horizon", None)
        is_number = isinstance(found, (int, float, np.integer, np.floating)) and not isinstance(found, bool)
        if is_number and found >= 1 and float(found).is_integer():
            return int(found)
    limit = getattr(getattr(env, "spec", None), "max_episode_steps", None)
    return None if limit is None else int(limit)


def learning_wrappers(env: object) -> list[str]:
    """The wrappers around an environment that learn statistics while it runs, from the outside."""
    return [
        type(layer).__name__
        for layer in layers(env)
        if isinstance(layer, (gym.Wrapper, gym.vector.VectorWrapper))
        and {"obs_rms", "return_rms"} & vars(layer).keys()
        and getattr(layer, "update_running_mean", True)
    ]


def spaces_of_rows(env: Any, rows: int) -> tuple[gym.Space[Any], gym.Space[Any]]:
    """The observation and action space of one row of a vectorised environment; ValueError if it has another number of rows."""
    if (num_envs := getattr(env, "num_envs", rows)) != rows:
        raise ValueError(f"batched_envs is {rows}, but the vectorised environment has num_envs={num_envs}")
    obs_space = getattr(env, "single_observation_space", env.observation_space)
    return obs_space, getattr(env, "single_action_space", env.action_space)


def reset_arguments(env: Any) -> set[str]:
    """The arguments among "seed" and "options" that ``env.reset`` accepts: many environments accept neither."""
    both = {"seed", "options"}
    try:
        parameters = inspect.signature(env.reset).parameters
    except (TypeError, ValueError):
        return both
    return both if any(p.kind is p.VAR_KEYWORD for p in parameters.values()) else both & parameters.keys()


def not_gymnasium(out: object, text: str) -> TypeError:
    """An error for a result of ``reset`` or ``step``; ``text`` has {} in the place of its description."""
    what = f"{len(out)} values" if isinstance(out, (tuple, list)) else type(out).__name__
    return TypeError(f"{text.format(what)}: does the environment follow Gymnasium's interface?")


class Observations:
    """The flat observation space, which may be changed, and the conversion to it.

    Keys that are assigned to the space (``space["bag"] = Box(...)``) are observed from then on: the environment's observation
    must be a dict that has them. Keys that are deleted are left out.

    Args:
        raw_space: the environment's own space, of one row.
        batched: whether observations have a batch dimension.

    Attributes:
        convert: maps an observation to {key: (B, ...)}.
        real_keys: the keys that can hold NaN or infinity.
        changed: whether keys were added or removed.
    """

    def __init__(self, raw_space: gym.Space[Any], batched: bool):
        self._batched, self.changed = batched, False
        spec = obs_spec(raw_space, batched, lead=not batched)
        self._space = spec.space
        self._own_keys = {leaf.path[0] if leaf.path else key for key, leaf in spec.leaves.items()}
        self._take(spec)

    def _take(self, spec: ObsSpec) -> None:
        self._spec, self._known = spec, dict(spec.space.spaces)
        self.convert, self.real_keys = spec.convert, spec.real_keys

    def space(self) -> gym.spaces.Dict:
        """The space as it is now, its leaves boxes; TypeError if a space that was added is not supported."""
        if self._space.spaces != self._known:
            wanted = dict(self._space.spaces)
            self._take(changed_spec(self._spec, wanted, self._batched, not self._batched, self._own_keys))
            self._space.spaces.clear()  # in place: a subclass may go on adding keys to the object that it was given
            self._space.spaces.update(self._known)
            self.changed = True
        return self._space

    def replace(self, space: gym.Space[Any]) -> None:
        """Use another space; one that is no Dict becomes ``{"observation": space}``."""
        self._space = gym.spaces.Dict(dict(space.spaces) if isinstance(space, gym.spaces.Dict) else {"observation": space})


def policy_space(spec: ActionSpec) -> gym.Space[Any]:
    """The space of the actions that a policy chooses: Discrete from 0, a flat Box of [-1, 1], or bits in one row. Actions of
    several parts keep the environment's space, although policies choose their stored form (`amago.spaces`).
    """
    if spec.kind == "discrete":
        return gym.spaces.Discrete(spec.dim)
    if spec.kind == "continuous":
        return gym.spaces.Box(-1.0, 1.0, (spec.dim,), np.float32)
    if spec.kind == "multibinary":
        return gym.spaces.MultiBinary(spec.dim)
    return spec.space


def policy_dtype(spec: ActionSpec) -> np.dtype[Any]:
    """The dtype of a policy's actions: as in the original system uint8 for an index below 256, else float32; the stored dtype for
    wider spaces and actions of several parts, which that does not have.
    """
    if spec.kind == "discrete":
        return np.dtype(np.uint8) if spec.dim <= 256 else spec.stored_dtype
    return np.dtype(np.float32) if spec.kind in ("continuous", "multibinary") else spec.stored_dtype


class ActionForm:
    """The actions of B rows: their ``shape`` (B, S), their vectors, and the checks on them.

    Args:
        spec: of the action space.
        rows: B.
        vectorized: whether an action has a batch dimension, (B, S), or belongs to one environment, (S,).
    """

    def __init__(self, spec: ActionSpec, rows: int, vectorized: bool):
        self.spec, self.rows, self.shape = spec, rows, (rows, spec.stored_dim)
        self._own_shape = self.shape if vectorized else self.shape[1:]
        self._discrete = spec.kind == "discrete"
        self._every_row = np.arange(rows)
        self.one_index = self._discrete and not vectorized
        self.vector_dtype = np.dtype(np.uint8 if self._discrete else np.float32)

    def shaped(self, action: object) -> Array:
        """An action of the right shape, whose values are not checked; raises TypeError or ValueError."""
        if not isinstance(action, np.ndarray):
            raise TypeError(f"action is {action!r}, but must be an array in stored form, {self._expected()}")
        if action.shape != self._own_shape:
            single = action.shape == self.shape[1:] or (self.one_index and action.ndim == 0)
            if action.shape != self.shape and (self.rows > 1 or not single):
                raise ValueError(f"action has shape {action.shape}, but must have the stored form, {self._expected()}")
            action = action.reshape(self._own_shape)
        if self.spec.kind == "multibinary" and action.dtype.kind == "f" and np.isin(action, (0.0, 1.0)).all():
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

    def recordable(self, rep: object, env_name: str) -> tuple[Array, Array]:
        """The stored form (B, S) of vectors that a subclass has made, and these vectors (B, A); ValueError if they are no actions."""
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


class PolicyActions(gym.Wrapper[Any, Any, Any, Any]):
    """An environment, or an object with its methods, whose ``step`` takes the action that a policy chose: (S,) in stored form, or
    (B, S) if it is vectorised. A single index may also be an int. Nothing is checked: `AMAGOEnv` does that.
    """

    env: Any
    __getattr__ = forwarded

    def __init__(self, env: Any, spec: ActionSpec, vectorized: bool):
        # without `gym.Wrapper.__init__`, which refuses vectorised environments and those that are no subclass of gym.Env
        self.env = env
        self._action_space, self._observation_space = policy_space(spec), env.observation_space
        self._metadata = dict(getattr(env, "metadata", None) or {})
        self._cached_spec = None
        self._spec, self._vectorized = spec, vectorized
        self._first = int(spec.space.start) if isinstance(spec.space, gym.spaces.Discrete) and not vectorized else None
        self._reset_takes = reset_arguments(env)

    def own_form(self, action: Any) -> Any:
        """The environment's form of a policy's action."""
        if self._first is not None:
            return (action if action.__class__ is int else action.item()) + self._first
        return self._spec.to_env(action if self._vectorized else np.asarray(action).reshape(self._spec.stored_dim))

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        """Reset the environment, with those arguments that are given and that it accepts."""
        given = {k: v for k, v in (("seed", seed), ("options", options)) if v is not None and k in self._reset_takes}
        return self.env.reset(**given)

    def step(self, action: Any) -> Any:
        if action.__class__ is np.ndarray and self._first is not None:  # the common case of `own_form`
            return self.env.step(action.item() + self._first)
        return self.env.step(self.own_form(action))

    @property
    def unwrapped(self) -> Any:
        return getattr(self.env, "unwrapped", self.env)

    @property
    def spec(self) -> Any:  # type: ignore[override]  # Gymnasium's own wrappers override it so
        return getattr(self.env, "spec", None)

    @property
    def render_mode(self) -> str | None:  # type: ignore[override]
        return getattr(self.env, "render_mode", None)

    def close(self) -> None:
        if hasattr(self.env, "close"):
            self.env.close()

    def __repr__(self) -> str:
        return repr(self.env)

    __str__ = __repr__


@dataclass
class AutoReset:
    """The ends and beginnings of rollouts in one step of a vectorised environment with B rows.

    Attributes:
        real: (B,) bool, False where the environment ignored the action and only began a rollout.
        opened: (B,) bool, True where the `Timestep` after this step opens a new rollout.
        last_obs: {key: (B, ...)}, the last observation of the rollouts that ended, undefined in other rows; None: the
            `Timestep` holds it.
        last_known: (B,) bool, False where a rollout ended and the environment does not report its last observation.
        step_infos: (info, rows (B,) that it concerns) of the rollouts that took this step.
        opening_infos: (info, rows (B,) that it concerns) of the rollouts that begin.
        tells_apart: whether these are different infos; False: the environment resets rows in the same step and has no
            "final_info", so that what it logs in a rollout's last step is where it logs in any other.
    """

    real: Mask
    opened: Mask
    last_obs: dict[str, Array] | None
    last_known: Mask
    step_infos: list[Info]
    opening_infos: list[Info]
    tells_apart: bool = True


def autoreset_mode(env: gym.Wrapper[Any, Any, Any, Any]) -> str:
    """The environment's ``metadata["autoreset_mode"]`` as "next_step", "same_step" (also if it has none) or "disabled"."""
    inner, mode = env.unwrapped, env.metadata.get("autoreset_mode")
    if not isinstance(inner, gym.vector.VectorEnv) and getattr(inner, "metadata", None) is gym.Env.metadata:
        mode = None  # vector environments write their mode into the dict that environments without one of their own share
    if mode is None:
        return SAME_STEP
    name = mode.value if isinstance(mode, gym.vector.AutoresetMode) else str(mode)
    name = name.replace("-", "").replace("_", "").lower()
    names = {text.replace("_", ""): text for text in (NEXT_STEP, SAME_STEP, DISABLED)}
    if name not in names:
        raise ValueError(f"metadata['autoreset_mode'] is {mode!r}, but must be a gymnasium.vector.AutoresetMode")
    return names[name]


class AutoResetter:
    """Describe each step of one vectorised environment as an `AutoReset`; reset ended rows if the mode is "disabled".

    Args:
        env: an `AMAGOEnv`, whose ``inner_reset`` resets rows.
        observations: converts batched observations to {key: (B, ...)}.
        single_space: the environment's own observation space of one row.
    """

    def __init__(self, env: Any, observations: Observations, single_space: gym.Space[Any]):
        self.env, self._observations, self.mode = env, observations, autoreset_mode(env)
        self._convert_one = obs_spec(single_space).convert
        self._waiting: Mask | None = None  # rows that the next step resets ("next_step")

    def begin(self) -> None:
        """Mark every row as reset."""
        self._waiting = None

    def after_step(
        self, obs: dict[str, Array], terminated: Array, truncated: Array, info: dict[str, Any]
    ) -> tuple[dict[str, Array], AutoReset]:
        """The policy's next observations {key: (B, ...)}, and the description of a step, whose observations are converted already."""
        ended: Mask = terminated | truncated
        everywhere = np.ones_like(ended)
        if self.mode == NEXT_STEP:
            opened = self._waiting if self._waiting is not None else np.zeros_like(ended)
            real = ~opened
            self._waiting = ended & real
            return obs, AutoReset(real, opened, None, everywhere, [(info, real)], [(info, opened)])
        if not ended.any():
            return obs, AutoReset(everywhere, ended, None, everywhere, [(info, everywhere)], [])
        if self.mode == DISABLED:
            last = {k: v.copy() for k, v in obs.items()}
            raw, opening = self.env.inner_reset(seed=None, options={"reset_mask": ended})
            return self._observations.convert(raw), AutoReset(
                everywhere, ended, last, everywhere, [(info, everywhere)], [(opening, ended)]
            )
        last_obs, known = self._last_observations(obs, ended, info)
        step_infos = [(info, ~ended), *_final_infos(info, ended)]
        return obs, AutoReset(
            everywhere, ended, last_obs, known, step_infos, [(info, ended)], info.get("final_info") is not None
        )

    def _last_observations(self, obs: dict[str, Array], ended: Mask, info: dict[str, Any]) -> tuple[dict[str, Array], Mask]:
        """`AutoReset.last_obs` and ``last_known`` from the info: a batched observation, or one observation a row."""
        key = next((k for k in ("final_obs", "final_observation") if info.get(k) is not None), None)
        if key is None or self._observations.changed:  # the environment lacks the keys that a subclass has added
            return obs, ~ended
        raw, given = info[key], np.asarray(info.get(f"_{key}", ended), dtype=bool)
        if not (isinstance(raw, list) or (isinstance(raw, np.ndarray) and raw.dtype == object)):
            return self._observations.convert(raw), ~ended | given
        last, known = {k: v.copy() for k, v in obs.items()}, ~ended
        for row in np.flatnonzero(ended & given):
            if raw[row] is None:
                continue
            known[row] = True
            for k, v in self._convert_one(raw[row]).items():
                last[k][row] = v
        return last, known


def _final_infos(info: dict[str, Any], ended: Mask) -> list[Info]:
    """``info["final_info"]``, a dict of batches or a list of dicts, with the rows that each dict describes."""
    final = info.get("final_info")
    if final is None:
        return []
    if isinstance(final, dict):
        return [(final, ended)]
    return [(row, np.arange(len(ended)) == i) for i, row in enumerate(final) if ended[i] and isinstance(row, dict)]
