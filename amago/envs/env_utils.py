"""Environments side by side for programs that step by themselves, without the actor pool of a run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import gymnasium as gym
import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


class _Calls:
    """Environments whose methods can be called and attributes read by name: ``call_async(name, *args)``, then ``call_wait()``."""

    envs: list[Any]
    _called: list[Any] | None = None

    @property
    def num_envs(self) -> int:
        """The number of environments."""
        return len(self.envs)

    @property
    def single_observation_space(self) -> gym.Space[Any]:
        """Of each environment."""
        return self.envs[0].observation_space  # type: ignore[no-any-return]

    @property
    def single_action_space(self) -> gym.Space[Any]:
        """Of each environment."""
        return self.envs[0].action_space  # type: ignore[no-any-return]

    def call_async(self, name: str, *args: Any, **kwargs: Any) -> None:
        """Call a method of each environment, or read an attribute; `call_wait` returns the results.

        Raises:
            ValueError: the results of the last call were not taken.
            AttributeError: an environment has neither.
        """
        if self._called is not None:
            raise ValueError("call_wait() must take the results of the last call_async() first")
        found = [env.get_wrapper_attr(name) for env in self.envs]
        self._called = [value(*args, **kwargs) if callable(value) else value for value in found]

    def call_wait(self) -> list[Any]:
        """What the last `call_async` found, one entry an environment.

        Raises:
            ValueError: there was no `call_async`.
        """
        if self._called is None:
            raise ValueError("there is nothing to wait for: call call_async(name, *args) first")
        out, self._called = self._called, None
        return out

    def call(self, name: str, *args: Any, **kwargs: Any) -> list[Any]:
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


class DummyAsyncVectorEnv(_Calls):
    """N environments in this process, with the methods of Gymnasium's `AsyncVectorEnv`.

    A step that ends a rollout is followed by a reset at once, whose observation is returned; rewards and flags are those of the step.

    Args:
        env_fns: functions that make the environments, such as `amago.envs.EnvCreator`.

    Attributes:
        envs: the N environments.
        num_envs: N.

    Raises:
        ValueError: there is no function.
    """

    def __init__(self, env_fns: Iterable[Callable[[], Any]]):
        self.envs = [make() for make in env_fns]
        if not self.envs:
            raise ValueError("env_fns is empty: it must hold a function for each environment")

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
        seeds = (
            [seed + i for i in range(n)] if isinstance(seed, (int, np.integer)) else [None] * n if seed is None else list(seed)
        )
        if len(seeds) != n:
            raise ValueError(f"seed has {len(seeds)} entries for {n} environments")
        made = [
            env.reset(seed=s) if options is None else env.reset(seed=s, options=options) for env, s in zip(self.envs, seeds)
        ]
        return _stacked([obs for obs, _ in made]), infos_of_rows([info for _, info in made])

    def step(self, actions: Any) -> tuple[Any, Array, Array, Array, dict[str, Any]]:
        """Take one step of every environment.

        Args:
            actions: (N, ...), a row for each.

        Returns:
            observations, rewards, terminated and truncated, stacked: (N, ...), and the infos as in `reset`.

        Raises:
            ValueError: there is another number of actions.
        """
        if len(actions) != self.num_envs:
            raise ValueError(f"there are {len(actions)} actions for {self.num_envs} environments")
        all_obs, outs = [], []
        for env, action in zip(self.envs, actions):
            obs, reward, terminated, truncated, info = env.step(action)
            if np.any(terminated) or np.any(truncated):
                obs, _ = env.reset()
            all_obs.append(obs)
            outs.append((reward, terminated, truncated, info))
        rewards, terminated, truncated, infos = zip(*outs)
        return _stacked(all_obs), np.array(rewards), np.array(terminated, bool), np.array(truncated, bool), infos_of_rows(infos)


class AlreadyVectorizedEnv(_Calls):
    """One environment that has a batch of rows and resets them itself, with the methods of `DummyAsyncVectorEnv`.

    Args:
        env_fns: a list with the function that makes it.

    Raises:
        ValueError: there is not exactly one function.
    """

    def __init__(self, env_fns: Sequence[Callable[[], Any]]):
        if len(env_fns) != 1:
            raise ValueError(f"env_fns has {len(env_fns)} functions, but must have one: the environment is vectorised already")
        self.envs = [env_fns[0]()]
        self.env = self.envs[0]

    @property
    def num_envs(self) -> int:
        """The number of rows."""
        return int(getattr(self.env, "batched_envs", 1))

    def reset(self, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        """Begin a rollout in every row."""
        return self.env.reset(**kwargs)  # type: ignore[no-any-return]

    def step(self, actions: Any) -> tuple[Any, Array, Array, Array, dict[str, Any]]:
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


def space_convert(space: Any) -> gym.Space[Any]:
    """The Gymnasium space that is equal to one of the older ``gym`` package, which need not be installed.

    Args:
        space: a Box, Discrete, MultiDiscrete, MultiBinary, or a Dict or Tuple of such spaces, of any package whose attributes have
            these names. A Gymnasium space is returned as it is.

    Raises:
        TypeError: another kind of space.
    """
    if isinstance(space, gym.Space):
        return space
    kind = type(space).__name__
    if kind == "Box":
        return gym.spaces.Box(low=space.low, high=space.high, shape=space.shape, dtype=space.dtype)
    if kind == "Discrete":
        return gym.spaces.Discrete(int(space.n), start=int(getattr(space, "start", 0)))
    if kind == "MultiDiscrete":
        return gym.spaces.MultiDiscrete(space.nvec)
    if kind == "MultiBinary":
        return gym.spaces.MultiBinary(space.n)
    if kind == "Dict":
        return gym.spaces.Dict({key: space_convert(sub) for key, sub in space.spaces.items()})
    if kind == "Tuple":
        return gym.spaces.Tuple([space_convert(sub) for sub in space.spaces])
    raise TypeError(f"space is {space!r}, but must be a Box, Discrete, MultiDiscrete, MultiBinary, Dict or Tuple")
