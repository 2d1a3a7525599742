"""Environments side by side for programs that step by themselves, without the actor pool of a run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import gymnasium as gym
import numpy as np
from numpy.typing import NDArray

from amago.compat.names import attributes

Array = NDArray[Any]
Step = tuple[Any, Array, Array, Array, dict[str, Any]]


class DummyAsyncVectorEnv:
    """N environments in this process, with the methods of Gymnasium's `AsyncVectorEnv`.

    A step that ends a rollout is followed by a reset at once, whose observation is returned; rewards and flags belong to the
    step. ``env_fns`` make the environments; they may be `amago.envs.EnvCreator`.
    """

    def __init__(self, env_fns: Iterable[Callable[[], Any]]):
        self.envs = [make() for make in env_fns]
        if not self.envs:
            raise ValueError("env_fns is empty: it must hold a function for each environment")
        self.num_envs = len(self.envs)
        self.single_observation_space: gym.Space[Any] = self.envs[0].observation_space
        self.single_action_space: gym.Space[Any] = self.envs[0].action_space
        self._called: list[Any] | None = None

    def reset(
        self, *, seed: int | Sequence[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Begin a rollout in every environment.

        Args:
            seed: of the first environment, the next have the next seeds; or one an environment.
            options: for all.

        Returns:
            observations, stacked: (N, ...), and the infos: {key: (N,), _key: (N,) whether the environment has it}.
        """
        n = self.num_envs
        seeds = list(seed) if isinstance(seed, Sequence) else [None if seed is None else int(seed) + i for i in range(n)]
        if len(seeds) != n:
            raise ValueError(f"seed has {len(seeds)} entries for {n} environments")
        given = {} if options is None else {"options": options}
        made = [env.reset(seed=s, **given) for env, s in zip(self.envs, seeds)]
        return _stacked([obs for obs, _ in made]), infos_of_rows([info for _, info in made])

    def step(self, actions: Any) -> Step:
        """Take one step of every environment, with a row of actions for each; returns observations, rewards, terminated and truncated,
        stacked: (N, ...), and the infos as in `reset`.
        """
        if len(actions) != self.num_envs:
            raise ValueError(f"there are {len(actions)} actions for {self.num_envs} environments")
        outs = [env.step(action) for env, action in zip(self.envs, actions)]
        all_obs, rewards, terminated, truncated, infos = map(list, zip(*outs))
        for i, env in enumerate(self.envs):
            if np.any(terminated[i]) or np.any(truncated[i]):
                all_obs[i], _ = env.reset()
        return _stacked(all_obs), np.array(rewards), np.array(terminated, bool), np.array(truncated, bool), infos_of_rows(infos)

    def call_async(self, name: str, *args: object, **kwargs: object) -> None:
        """Call a method of each environment, or read an attribute; `call_wait` returns the results."""
        if self._called is not None:
            raise ValueError("call_wait() must take the results of the last call_async() first")
        found = [env.get_wrapper_attr(name) for env in self.envs]
        self._called = [value(*args, **kwargs) if callable(value) else value for value in found]

    def call_wait(self) -> list[Any]:
        """The results of the last `call_async`, one entry an environment."""
        if self._called is None:
            raise ValueError("there is nothing to wait for: call call_async(name, *args) first")
        out, self._called = self._called, None
        return out

    def call(self, name: str, *args: object, **kwargs: object) -> list[Any]:
        """`call_async`, then `call_wait`."""
        self.call_async(name, *args, **kwargs)
        return self.call_wait()

    def render(self) -> Any:
        """Render the first environment."""
        return self.envs[0].render()

    def close(self) -> None:
        """Close every environment."""
        for env in self.envs:
            env.close()


class AlreadyVectorizedEnv(DummyAsyncVectorEnv):
    """One environment that has a batch of rows and resets them itself, made by the only one of ``env_fns``, with the methods of
    `DummyAsyncVectorEnv`.
    """

    def __init__(self, env_fns: Sequence[Callable[[], Any]]):
        if len(env_fns) != 1:
            raise ValueError(f"env_fns has {len(env_fns)} functions, but must have one: the environment is vectorised already")
        super().__init__(env_fns)
        self.env = self.envs[0]
        self.num_envs = int(getattr(self.env, "batched_envs", 1))

    def reset(self, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        """Begin a rollout in every row."""
        return self.env.reset(**kwargs)  # type: ignore[no-any-return]

    def step(self, actions: object) -> Step:
        """Take one step of every row."""
        return self.env.step(actions)  # type: ignore[no-any-return]


def _stacked(parts: Sequence[Any]) -> Any:
    """Observations of several environments, which are arrays or dicts of them."""
    if isinstance(parts[0], dict):
        return {key: _stacked([part[key] for part in parts]) for key in parts[0]}
    return np.stack([np.asarray(part) for part in parts])


def infos_of_rows(infos: Sequence[dict[str, Any] | None]) -> dict[str, Any]:
    """Infos in Gymnasium's form for vectorised environments."""
    out: dict[str, Any] = {}
    for i, info in enumerate(infos):
        for key, value in (info or {}).items():
            if key not in out:
                out[key], out[f"_{key}"] = np.full(len(infos), None, dtype=object), np.zeros(len(infos), dtype=bool)
            out[key][i], out[f"_{key}"][i] = value, True
    return out


_ARGUMENTS = {
    "Box": ("low", "high", "shape", "dtype"), "Discrete": ("n",), "MultiDiscrete": ("nvec",), "MultiBinary": ("n",),
}  # fmt: skip


def space_convert(space: Any) -> gym.Space[Any]:
    """The Gymnasium space that is equal to one of the older ``gym`` package, which need not be installed: a Box, Discrete,
    MultiDiscrete, MultiBinary, or a Dict or Tuple of such spaces. A Gymnasium space is returned as it is.
    """
    if isinstance(space, gym.Space):
        return space
    kind = type(space).__name__
    if kind == "Dict":
        return gym.spaces.Dict({key: space_convert(sub) for key, sub in space.spaces.items()})
    if kind == "Tuple":
        return gym.spaces.Tuple([space_convert(sub) for sub in space.spaces])
    if kind not in _ARGUMENTS:
        raise TypeError(f"space is {space!r}, but must be a Box, Discrete, MultiDiscrete, MultiBinary, Dict or Tuple")
    arguments = {name: getattr(space, name) for name in _ARGUMENTS[kind]}
    if kind == "Discrete":
        arguments["start"] = getattr(space, "start", 0)
    return getattr(gym.spaces, kind)(**arguments)  # type: ignore[no-any-return]


__getattr__ = attributes(__name__)
