"""Environments side by side, without the actor pool of a run: for programs that step by themselves, and of other libraries, none of
which is imported.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import gymnasium as gym
import numpy as np
from numpy.typing import NDArray

from amago.compat.names import attributes
from amago.envs.amago_env import AMAGOEnv

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

    def step(self, actions: Sequence[object] | Array) -> Step:
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

    def reset(self, **kwargs: object) -> tuple[Any, dict[str, Any]]:
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
    return vars(gym.spaces)[kind](**arguments)  # type: ignore[no-any-return]


# Of other libraries


def from_sb3_vec_env(vec_env: Any, env_name: str) -> AMAGOEnv:
    """A ``VecEnv`` of Stable-Baselines3, each of whose ``num_envs`` environments is a row.

    ``TimeLimit.truncated`` in an info makes the end of a rollout a truncation, and ``terminal_observation`` is its last observation.
    """
    return AMAGOEnv(_SB3Rows(vec_env), env_name=env_name, batched_envs=vec_env.num_envs)


def from_pettingzoo(parallel_env: Any, env_name: str) -> AMAGOEnv:
    """An environment of PettingZoo's parallel API, each of whose agents is a row: one policy acts for all of them.

    A rollout ends for all agents together, once the environment has none left. An agent that ended before them keeps its last
    observation and gets no reward until then.

    Raises:
        ValueError: the agents have different spaces, or one does not begin with the others.
    """
    rows = _Agents(parallel_env)
    return AMAGOEnv(rows, env_name=env_name, batched_envs=rows.num_envs)


class _Rows(gym.vector.VectorEnv[Any, Any, Any]):
    """Rows that another environment resets by itself, in the step that ends a rollout."""

    metadata = {"autoreset_mode": gym.vector.AutoresetMode.SAME_STEP}

    def __init__(self, env: Any, rows: int, observation_space: gym.Space[Any], action_space: gym.Space[Any]):
        self.env, self.num_envs = env, rows
        self.single_observation_space, self.single_action_space = observation_space, action_space
        self.observation_space = gym.vector.utils.batch_space(observation_space, rows)
        self.action_space = gym.vector.utils.batch_space(action_space, rows)

    def close_extras(self, **kwargs: object) -> None:
        self.env.close()


class _SB3Rows(_Rows):
    def __init__(self, env: Any):
        super().__init__(env, env.num_envs, env.observation_space, env.action_space)

    def reset(
        self, *, seed: int | Sequence[int] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        if seed is not None:
            self.env.seed(int(np.ravel(seed)[0]))  # row i has this number plus i
        return self.env.reset(), {}

    def step(self, actions: object) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        obs, rewards, ended, infos = self.env.step(actions)
        truncated = np.array([bool(info.get("TimeLimit.truncated")) for info in infos]) & ended
        info: dict[str, Any] = {}
        if ended.any():
            info = {"final_obs": [i.get("terminal_observation") for i in infos], "_final_obs": ended}
        return obs, rewards, ended & ~truncated, truncated, info


class _Agents(_Rows):
    def __init__(self, env: Any):
        self.agents: Sequence[str] = list(env.possible_agents)
        spaces = [(env.observation_space(agent), env.action_space(agent)) for agent in self.agents]
        for agent, found in zip(self.agents, spaces):
            if found != spaces[0]:
                raise ValueError(
                    f"one policy acts for all agents, so their spaces must be equal: {self.agents[0]!r} has {spaces[0]}, {agent!r} has {found}"
                )
        super().__init__(env, len(self.agents), *spaces[0])

    def reset(
        self, *, seed: int | Sequence[int] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        self._last, _ = self.env.reset(seed=None if seed is None else int(np.ravel(seed)[0]), options=options)
        if missing := [agent for agent in self.agents if agent not in self._last]:
            raise ValueError(f"every agent must begin a rollout, but reset() returned no observation of {missing}")
        self._terminated: dict[str, bool] = {}
        return self._batch(), {}

    def _batch(self) -> Any:
        rows = [self._last[agent] for agent in self.agents]
        empty = gym.vector.utils.create_empty_array(self.single_observation_space, len(rows))
        return gym.vector.utils.concatenate(self.single_observation_space, rows, empty)

    def step(self, actions: object) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        each = gym.vector.utils.iterate(self.action_space, actions)
        chosen = {agent: action for agent, action in zip(self.agents, each) if agent in self.env.agents}
        obs, rewards, terminated, _, _ = self.env.step(chosen)
        self._last = {**self._last, **obs}
        self._terminated |= terminated
        over = not self.env.agents
        reward = np.array([rewards.get(agent, 0.0) for agent in self.agents], dtype=np.float64)
        batch, none = self._batch(), np.zeros(self.num_envs, bool)
        if not over:
            return batch, reward, none, none, {}
        ended = np.array([self._terminated.get(agent, False) for agent in self.agents])
        return self.reset()[0], reward, ended, ~ended, {"final_obs": batch, "_final_obs": ~none}


__getattr__ = attributes(__name__)
