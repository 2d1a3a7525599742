"""Observation spaces as the rest of the library uses them, flat dicts of boxes; and the reader of observations in either form."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
from numpy.typing import NDArray

from amago.spaces.actions import ActionSpec, NonFiniteError, all_finite

Array = NDArray[Any]
Path = tuple[Any, ...]
Conversion = Callable[[Any], Array]


class Leaf(NamedTuple):
    """A leaf of an observation space.

    Attributes:
        path: the keys and indices that lead to it in the environment's observation.
        box: its space in the flat dict.
        convert: the conversion of its observations.
        real: True if it can hold NaN or infinity.
    """

    path: Path
    box: gym.spaces.Box
    convert: Conversion
    real: bool


@dataclass(frozen=True)
class ObsSpec:
    """A flat dict of boxes, and the conversion of an environment's observations to it. Create it with `obs_spec`.

    Attributes:
        space: the flat dict.
        convert: environment observation -> {key: array}; raises ValueError, with the key, on a missing or extra key, a wrong
            shape or dtype, or a value that the space does not have.
        real_keys: the keys that can hold NaN or infinity, which ``convert`` accepts.
        leaves: by key.
    """

    space: gym.spaces.Dict
    convert: Callable[[Any], dict[str, Array]]
    real_keys: tuple[str, ...] = ()
    leaves: dict[str, Leaf] = field(default_factory=dict)

    @classmethod
    def of(cls, leaves: dict[str, Leaf], convert: Callable[[Any], dict[str, Array]]) -> ObsSpec:
        """The specification with these leaves."""
        flat = gym.spaces.Dict({name: leaf.box for name, leaf in leaves.items()})
        return cls(flat, convert, tuple(name for name, leaf in leaves.items() if leaf.real), leaves)


def obs_spec(space: gym.Space[Any], batched: bool = False, lead: bool = False) -> ObsSpec:
    """Flatten any supported observation space.

    A space that is not a Dict or Tuple becomes ``{"observation": ...}``. Keys of nested dicts are joined with "/", keys of
    tuples are their indices. Discrete and MultiDiscrete leaves become one-hot float32, MultiBinary leaves float32, float64
    boxes float32.

    Args:
        space: the space of one environment (without a batch dimension).
        batched: whether observations to convert have one leading batch dimension.
        lead: give converted observations, which are not batched, a leading dimension of 1.

    Raises:
        TypeError: a Text, Graph, Sequence or unknown leaf; the message has its key and a remedy. Or a key that is neither a str
            nor an int.
        ValueError: a key that files cannot hold, or two observations whose joined keys are the same; the message has the paths
            of both.
    """
    leaves = {name: _leaf(name, path, sub, int(batched), lead) for name, (path, sub) in _named_leaves(space).items()}
    if not isinstance(space, gym.spaces.Dict):
        return ObsSpec.of(leaves, functools.partial(_converted, leaves))
    keys = set(space.spaces)

    def convert(obs: object) -> dict[str, Array]:
        if not isinstance(obs, dict) or obs.keys() != keys:
            raise ValueError(_key_error(obs, keys))
        return _converted(leaves, obs)

    return ObsSpec.of(leaves, convert)


def _converted(leaves: dict[str, Leaf], obs: Any) -> dict[str, Array]:
    out = {}
    for name, leaf in leaves.items():
        value = obs
        for step in leaf.path:
            value = value[step]
        out[name] = leaf.convert(value)
    return out


def changed_spec(
    spec: ObsSpec,
    wanted: dict[str, gym.Space[Any]],
    batched: bool = False,
    lead: bool = False,
    ignored: Iterable[Any] = (),
) -> ObsSpec:
    """The conversion to a flat dict with keys removed or added.

    Args:
        spec: of the environment's own observations, or an earlier result of this function for them.
        wanted: the spaces by key. Those that are boxes of ``spec`` itself are converted as before; the observation must be a
            dict that has the others, where "observation" stands for an observation that is no dict.
        batched, lead: as in `obs_spec`.
        ignored: keys that observations may have beside these.

    Raises:
        TypeError: as `obs_spec`.
    """
    kept = {k: leaf._replace(path=leaf.path or (k,)) for k, leaf in spec.leaves.items() if wanted.get(k) is leaf.box}
    new = obs_spec(gym.spaces.Dict({k: sub for k, sub in wanted.items() if k not in kept}), batched, lead).leaves
    for key in kept.keys() & new.keys():
        raise ValueError(_same_name(key, kept[key].path, new[key].path))
    leaves = dict(sorted((kept | new).items()))
    needed = {leaf.path[0] for leaf in leaves.values()}
    allowed = needed | set(ignored)

    def convert(obs: object) -> dict[str, Array]:
        given = obs if isinstance(obs, dict) else dict(enumerate(obs)) if isinstance(obs, tuple) else {"observation": obs}
        if not needed <= given.keys() <= allowed:
            raise ValueError(_key_error(given, needed | (allowed & given.keys())))
        return _converted(leaves, given)

    return ObsSpec.of(leaves, convert)


def leaf_spaces(space: gym.Space[Any]) -> dict[str, gym.Space[Any]]:
    """The spaces in ``space`` that are neither Dict nor Tuple, by their keys in the flat dict, sorted."""
    return {name: sub for name, (_, sub) in _named_leaves(space).items()}


def key_problem(key: str) -> str | None:
    """The reason why an observation of this key cannot be stored, or None."""
    if not key or "\0" in key or "\\" in key or len(key) > 1000:
        return "is empty, longer than 1000 characters, or has a NUL or a backslash"
    if key.startswith("/") or any(part in ("..", ".") for part in key.split("/")):
        return "looks like a path outside of the file ('/', '.' or '..')"
    try:
        key.encode("utf-8")
    except UnicodeEncodeError:
        return "is not valid Unicode"
    return None


def _named_leaves(space: gym.Space[Any]) -> dict[str, tuple[Path, gym.Space[Any]]]:
    """The result of `_leaves`, sorted by name; ValueError where two have one name, or one cannot be stored."""
    out: dict[str, tuple[Path, gym.Space[Any]]] = {}
    for name, path, sub in sorted(_leaves(space), key=lambda leaf: leaf[0]):
        if name in out:
            raise ValueError(_same_name(name, out[name][0], path))
        if problem := key_problem(name):
            raise ValueError(
                f"the key {name!r} of the observation at {_in_words(path)} {problem}: rename it in the environment"
            )
        out[name] = path, sub
    return out


def _in_words(path: Path) -> str:
    return "obs" + "".join(f"[{key!r}]" for key in path)


def _same_name(name: str, first: Path, second: Path) -> str:
    return (
        f"the observations at {_in_words(first)} and {_in_words(second)} would both be named {name!r}, since nested keys are joined by "
        "'/': rename one in the environment"
    )


def _leaves(space: gym.Space[Any], name: str = "", path: Path = ()) -> Iterator[tuple[str, Path, gym.Space[Any]]]:
    if not isinstance(space, gym.spaces.Dict | gym.spaces.Tuple):
        yield name or "observation", path, space
        return
    for key, sub in space.spaces.items() if isinstance(space, gym.spaces.Dict) else enumerate(space.spaces):
        if not isinstance(key, str | int | np.integer):
            raise TypeError(
                f"{_in_words((*path, key))} has a key of type {type(key).__name__}, but the keys of a Dict of observations must be str or "
                "int: rename it in the environment"
            )
        yield from _leaves(sub, f"{name}/{key}" if name else str(key), (*path, key))


def _key_error(obs: object, expected: set[Any]) -> str:
    if not isinstance(obs, Mapping):
        return f"the observation space is a Dict with keys {sorted(expected, key=str)}, but the environment returned {type(obs).__name__}"
    missing, extra = sorted(expected - obs.keys(), key=str), sorted(obs.keys() - expected, key=str)
    parts = ([f"missing {missing}"] if missing else []) + ([f"not in the space: {extra}"] if extra else [])
    return f"observation keys differ from the observation space: {'; '.join(parts)}"


def _leaf(name: str, path: Path, space: gym.Space[Any], ndim: int, lead: bool) -> Leaf:
    """The leaf of a space that is not nested, for observations with ``ndim`` batch dimensions; ``lead`` adds one of 1."""
    if isinstance(space, gym.spaces.Box):
        box, convert = _box_leaf(name, space, ndim, lead)
        return Leaf(path, box, convert, np.dtype(space.dtype).kind == "f")
    if isinstance(space, gym.spaces.MultiBinary):
        shape, bits = space.shape, _whole_numbers(name, space, ndim)

        def convert(obs: object) -> Array:
            return bits(obs).astype(np.float32)
    elif isinstance(space, gym.spaces.Discrete | gym.spaces.MultiDiscrete):
        shape, convert = _one_hot(name, space, ndim)
    else:
        raise TypeError(
            f"observation {name!r} has space {type(space).__name__}, which has no fixed-size array form. Wrap the environment with "
            "gymnasium.wrappers.FilterObservation to drop the key, or TransformObservation to turn it into a Box (tokens, say)."
        )
    box = gym.spaces.Box(0.0, 1.0, shape=shape, dtype=np.float32)
    return Leaf(path, box, (lambda obs: convert(obs)[None]) if lead else convert, False)


def _box_leaf(name: str, space: gym.spaces.Box, ndim: int, lead: bool) -> tuple[gym.spaces.Box, Conversion]:
    shape, dtype = space.shape or (1,), np.dtype(space.dtype)
    if dtype == np.float64:  # networks read float32, and files and messages are half as long
        dtype = np.dtype(np.float32)
    original, whole, to_shape = space.shape, dtype.kind in "iu", (1, *shape) if lead else shape

    def convert(obs: object) -> Array:
        a = np.asarray(obs)
        if ndim or a.shape != original:
            _check_shape(name, a, original, ndim)
        if a.dtype != dtype:
            numbers = whole and a.dtype.kind in "iu"  # of a list, or of another width: each is compared below
            if a.dtype.kind == "O" or not (numbers or np.can_cast(a.dtype, dtype, "same_kind")):
                raise ValueError(f"observation {name!r} has dtype {a.dtype}, but its space says {space.dtype}")
            given, a = a, a.astype(dtype)
            if whole and not np.can_cast(given.dtype, dtype) and (given != a).any():
                raise ValueError(f"observation {name!r} holds {given[given != a][0]}, which {space.dtype} cannot")
        return a.reshape(len(a), *shape) if ndim else a.reshape(to_shape)

    with np.errstate(over="ignore"):  # float64 bounds beyond float32 become infinite
        low, high = space.low.astype(dtype).reshape(shape), space.high.astype(dtype).reshape(shape)
    return gym.spaces.Box(low, high, shape=shape, dtype=dtype.type), convert  # type: ignore[arg-type]


def _whole_numbers(name: str, space: Any, ndim: int) -> Conversion:
    """The conversion to int64 from 0, for a Discrete, MultiDiscrete or MultiBinary."""
    bits = isinstance(space, gym.spaces.MultiBinary)
    first, count = (0, 2) if bits else (space.start, space.n if isinstance(space, gym.spaces.Discrete) else space.nvec)

    def convert(obs: object) -> Array:
        a = np.asarray(obs)
        _check_shape(name, a, space.shape, ndim)
        if a.dtype.kind not in "iub":
            raise ValueError(f"observation {name!r} has dtype {a.dtype}, but {space} holds whole numbers")
        index: Array = a.astype(np.int64) - first
        if (index < 0).any() or (index >= count).any():
            raise ValueError(f"observation {name!r} is {obs}, outside {space}")
        return index

    return convert


def _one_hot(name: str, space: gym.spaces.Discrete | gym.spaces.MultiDiscrete, ndim: int) -> tuple[tuple[int, ...], Conversion]:
    counts = np.reshape(space.n if isinstance(space, gym.spaces.Discrete) else space.nvec, -1).astype(np.int64)
    offsets, width, read = np.cumsum(counts) - counts, int(counts.sum()), _whole_numbers(name, space, ndim)

    def convert(obs: object) -> Array:
        index = read(obs)
        index = index.reshape(*index.shape[:ndim], -1)
        out = np.zeros((*index.shape[:ndim], width), dtype=np.float32)
        np.put_along_axis(out, index + offsets, 1.0, axis=-1)
        return out

    return (width,), convert


def _check_shape(name: str, a: Array, shape: tuple[int, ...], ndim: int) -> None:
    if a.shape[ndim:] != shape or a.ndim != ndim + len(shape):
        raise ValueError(f"observation {name!r} has shape {a.shape[ndim:]}, but its space says {shape}")


# ---- observations that an environment has returned, or that are converted already --------------------------------------------------


class ObsReader:
    """A reader of observations of an environment's own space, and observations already converted to the flat space.

    The two are distinguished for each key by its shape. (For a MultiBinary, and a MultiDiscrete of nothing but
    single values, the shapes are equal; floats are then taken to be converted.)

    Args:
        flat: the converted observations, a flat Dict of boxes.
        raw: the environment's observation space, with `obs_spec(raw).space` equal to ``flat``; None: ``flat`` itself.
        rows: B, if observations come in batches; None: observations of one environment.

    Raises:
        ValueError: ``raw`` does not convert to ``flat``.
    """

    def __init__(self, flat: gym.spaces.Dict, raw: gym.Space[Any] | None, rows: int | None):
        self.flat, self.raw, self.rows = flat, flat if raw is None else raw, rows
        if not converts_to(self.raw, flat):
            raise ValueError(f"an environment with observations {raw} does not have the observations {flat}")
        self._batch: tuple[int, ...] = () if rows is None else (rows,)
        of_raw, of_flat = (obs_spec(space, batched=rows is not None).leaves for space in (self.raw, flat))
        self._leaves = {k: (sub, of_raw[k].convert, of_flat[k].convert) for k, sub in leaf_spaces(self.raw).items()}
        self._one = None if rows is None else ObsReader(flat, raw, None)

    def __call__(self, obs: Any) -> dict[str, Array]:
        """Convert an observation or a batch of them.

        Args:
            obs: an observation of one of the two spaces; with ``rows``, one whose arrays have B rows, as a Gymnasium vector
                environment returns it, or a list of B observations. Where there is only one key, the array alone will do.

        Returns:
            {key: (B, ...)}, with the shapes and dtypes of ``flat``; B is 1 without ``rows``.

        Raises:
            ValueError: a key is missing or unknown, or an array has the wrong shape or dtype, or a value that its space lacks.
            NonFiniteError: an array holds NaN or infinity.
        """
        if self._one is not None and self._is_list_of_rows(obs):
            if len(obs) != self.rows:
                raise ValueError(f"obs is a list of {len(obs)} observations, but there are {self.rows} environments")
            each = [self._one(row) for row in obs]
            return {key: np.concatenate([row[key] for row in each]) for key in self._leaves}
        values = self._values(obs)
        arrays = {key: self._read(key, values[key]) for key in self._leaves}  # the order in which networks read them
        return arrays if self._batch else {key: array[None] for key, array in arrays.items()}

    def _is_list_of_rows(self, obs: object) -> bool:
        if not isinstance(obs, list) and not (isinstance(obs, np.ndarray) and obs.dtype == object):
            return False
        return isinstance(self.raw, gym.spaces.Tuple) or any(isinstance(row, Mapping) for row in obs)

    def _values(self, obs: object) -> Mapping[str, Any]:
        """The value of each key of an observation, in either form."""
        if isinstance(obs, Mapping) and obs.keys() == self._leaves.keys():
            return obs
        of_tuple = isinstance(self.raw, gym.spaces.Tuple)
        if len(self._leaves) == 1 and not isinstance(obs, Mapping) and not (of_tuple and isinstance(obs, tuple | list)):
            return dict.fromkeys(self._leaves, obs)
        if of_tuple or (isinstance(self.raw, gym.spaces.Dict) and isinstance(obs, Mapping)):
            return dict(_walk(self.raw, obs, "obs", ""))
        found = f"keys {sorted(map(str, obs))}" if isinstance(obs, Mapping) else f"type {type(obs).__name__}"
        raise ValueError(f"obs has {found}, the policy was trained with keys {sorted(self._leaves)}")

    def _read(self, name: str, value: object) -> Array:
        space, from_raw, from_flat = self._leaves[name]
        try:
            array = np.asarray(value)
        except ValueError as err:
            raise ValueError(f"obs[{name!r}] is no array: {err}") from None
        box = self.flat[name]
        raw, flat = (*self._batch, *(space.shape or ())), (*self._batch, *(box.shape or ()))
        if array.shape not in (raw, flat):
            either = f"{raw}" if raw == flat else f"{raw}, as the environment returns it, or {flat}, converted"
            raise ValueError(f"obs[{name!r}] has shape {array.shape}, it must be {either}")
        same_values = isinstance(space, gym.spaces.Box)
        is_raw = array.shape == raw and (raw != flat or same_values or array.dtype.kind != "f")
        out = (from_raw if is_raw else from_flat)(array)
        if out.dtype.kind == "f" and not all_finite(out):
            raise NonFiniteError(f"obs[{name!r}] holds {out[~np.isfinite(out)][0]}; observations must be finite in float32")
        return out


def converts_to(raw: gym.Space[Any], flat: gym.spaces.Dict) -> bool:
    """True if observations of a space have the keys, shapes and dtypes of ``flat`` once converted."""
    found = obs_spec(raw).space.spaces
    return found.keys() == flat.spaces.keys() and all(
        (a.shape, a.dtype) == (flat[key].shape, flat[key].dtype) for key, a in found.items()
    )


def spaces_of(source: Any) -> tuple[gym.spaces.Dict, gym.Space[Any]]:
    """The flat observation space and the action space of an environment.

    Args:
        source: an environment, vectorised or not; a function that makes one, which is closed; or (observation space, action
            space).

    Raises:
        TypeError: none of these, or a space that is not supported.
    """
    if isinstance(source, (tuple, list)) and len(source) == 2 and all(isinstance(s, gym.Space) for s in source):
        return obs_spec(source[0]).space, source[1]
    env = source() if callable(source) and not hasattr(source, "observation_space") else source
    try:
        obs, action = (
            getattr(env, f"single_{name}", None) or getattr(env, name, None) for name in ("observation_space", "action_space")
        )
        if isinstance(spec := getattr(env, "action_spec", None), ActionSpec):
            action = spec.space  # the `action_space` of an AMAGOEnv is the policy's
    finally:
        if env is not source and callable(getattr(env, "close", None)):
            env.close()
    if not (isinstance(obs, gym.Space) and isinstance(action, gym.Space)):
        raise TypeError(f"{source!r} must be an environment, a function that makes one, or (observation space, action space)")
    return obs_spec(obs).space, action


def _walk(space: gym.Space[Any], value: Any, at: str, name: str) -> Iterator[tuple[str, Any]]:
    """(name, value) of each leaf of an observation of a nested space."""
    if not isinstance(space, gym.spaces.Dict | gym.spaces.Tuple):
        yield name or "observation", value
        return
    of_dict = isinstance(space, gym.spaces.Dict)
    keys: list[Any] = list(space.spaces if isinstance(space, gym.spaces.Dict) else range(len(space.spaces)))
    if of_dict and isinstance(value, Mapping):
        fits, found = value.keys() == set(keys), f"keys {sorted(map(str, value))}"
    elif not of_dict and isinstance(value, tuple | list):
        fits, found = len(value) == len(keys), f"{len(value)} values"
    else:
        fits, found = False, f"type {type(value).__name__}"
    if not fits:
        wanted = f"keys {sorted(map(str, keys))}" if of_dict else f"a tuple of {len(keys)}"
        raise ValueError(f"{at} has {found}, the policy was trained with {wanted}")
    for key in keys:
        yield from _walk(space[key], value[key], f"{at}[{key!r}]", f"{name}/{key}" if name else str(key))
