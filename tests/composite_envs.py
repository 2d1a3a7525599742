"""Environments whose actions have several parts: the reward tells how many of them are right, the observation what was done."""

from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np

from amago.data.trajectory import StoredTraj
from amago.envs import AMAGOEnv
from amago.spaces import ActionSpec, action_spec

G = gym.spaces
SPACES: dict[str, gym.Space[Any]] = {
    "multidiscrete": G.MultiDiscrete([3, 4]),
    "tuple": G.Tuple((G.Discrete(3, start=-1), G.Box(-2.0, 2.0, (2,)))),
    "dict": G.Dict(move=G.Discrete(4), buttons=G.MultiBinary(3)),
    "nested": G.Dict(
        z=G.MultiDiscrete([2, 3], start=[4, -1]),
        a=G.Tuple((G.Box(0.0, 10.0, (1, 1), np.float64), G.Dict(on=G.MultiBinary([2, 1]), pick=G.Discrete(3, start=5)))),
    ),
}


def numbers(space: gym.Space[Any], action: Any) -> np.ndarray[Any, Any]:
    """An environment's action as plain numbers, checked to be in its space."""
    assert space.contains(action), action
    if isinstance(space, G.Dict):
        return np.concatenate([numbers(space[key], action[key]) for key in sorted(space.spaces)])
    if isinstance(space, G.Tuple):
        return np.concatenate([numbers(sub, a) for sub, a in zip(space.spaces, action)])
    return np.asarray(action, np.float32).reshape(-1)


def score(space: gym.Space[Any], action: Any, target: Any) -> list[float]:
    """How right each part is, 0 to 1."""
    if isinstance(space, G.Dict):
        return [x for key in sorted(space.spaces) for x in score(space[key], action[key], target[key])]
    if isinstance(space, G.Tuple):
        return [x for sub, a, b in zip(space.spaces, action, target) for x in score(sub, a, b)]
    if isinstance(space, G.Box):
        return [float(1.0 - np.mean(2.0 * np.abs(action - target) / (space.high - space.low)))]
    return np.equal(action, target).astype(float).reshape(-1).tolist()


class Lock(gym.Env[Any, Any]):
    """A combination of all parts of the action is wanted, the same always; the reward is how near to it the action is."""

    def __init__(self, name: str, steps: int = 1):
        self.action_space, self.steps = SPACES[name], steps
        self.action_space.seed(11)
        self.target = self.action_space.sample()
        self.blank = np.zeros_like(numbers(self.action_space, self.target))
        self.observation_space = G.Dict(
            time=G.Box(0.0, 1e6, (1,), np.float32), took=G.Box(-np.inf, np.inf, self.blank.shape, np.float32)
        )

    def observe(self, took: Any) -> dict[str, Any]:
        return {"time": np.array([self.t], np.float32), "took": took}

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.t = 0
        return self.observe(self.blank), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.t += 1
        reward = float(np.mean(score(self.action_space, action, self.target)))
        return self.observe(numbers(self.action_space, action)), reward, self.t == self.steps, False, {}


def make_lock(name: str, steps: int = 1) -> Callable[[], AMAGOEnv]:
    def make() -> AMAGOEnv:
        return AMAGOEnv(Lock(name, steps), env_name="lock")

    return make


def make_locks(name: str, num: int, steps: int) -> Callable[[], AMAGOEnv]:
    """A batch that resets itself."""

    def make() -> AMAGOEnv:
        return AMAGOEnv(gym.vector.SyncVectorEnv([lambda: Lock(name, steps)] * num), env_name="lock", batched_envs=num)

    return make


class Rules(gym.Env[Any, Any]):
    """What is legal changes with every step, at random; illegal actions are counted. Ten steps."""

    def __init__(self, space: gym.Space[Any]):
        self.action_space, self.form, self.illegal, self.steps = space, action_spec(space), 0, 0
        self.observation_space = G.Dict(mask=G.Box(0, 1, (self.form.dim, 1), np.int8), clue=G.Box(-1.0, 1.0, (2,), np.float32))

    def observe(self) -> dict[str, Any]:
        mask = self.np_random.random(self.form.dim) < 0.4
        for part in self.form.parts:
            if part.kind == "discrete":  # at least one is legal
                mask[part.vector][self.np_random.integers(part.dim)] = True
        self.mask = mask
        return {"mask": mask.astype(np.int8)[:, None], "clue": self.np_random.uniform(-1, 1, 2).astype(np.float32)}

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.t = 0
        return self.observe(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        vector = self.form.to_vector(self.form.from_env(action))
        masked = np.concatenate([self.mask[p.vector] | (p.kind == "continuous") for p in self.form.parts])
        self.illegal += bool(((vector != 0) & ~masked).any())
        self.steps += 1
        self.t += 1
        return self.observe(), float(self.np_random.random()), self.t == 10, False, {}


def illegal_choices(traj: StoredTraj, spec: ActionSpec, key: str) -> int:
    """Steps of a recorded trajectory whose action the mask before it forbids."""
    legal = traj.obs[key][:-1].reshape(len(traj), spec.dim) != 0
    vector = spec.to_vector(traj.actions) != 0
    for part in spec.parts:
        if part.kind == "continuous":
            vector[:, part.vector] = False
    return int((vector & ~legal).any(axis=1).sum())
