"""Tasks of the suite that no other part of the project has."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
from numpy.typing import NDArray

from amago.envs import AMAGO_ENV_LOG_PREFIX
from amago.envs.builtin.babyai import CHANNELS, VIEW, partial_grid
from amago.envs.builtin.tmaze import TMazePassive
from amago.envs.builtin.toy_gym import MetaFrozenLake
from benchmarks.recall import RepeatPrevious

SUITS = 4


class Autoencode(gym.Env[NDArray[np.float32], np.int64]):
    """Watch n cards, then name their suits in reverse order.

    After POPGym's game of that name (Morad et al. 2023, arXiv:2303.01859), with fewer cards. The cards are dealt evenly from the
    suits in random order.

    Reward: 1 / n for a correct suit and minus that for a wrong one, in the second half; guessing returns -0.5.

    Observation, float32 ``(6,)``: the suit of the present card (one-hot; zeros in the second half), 1 in the second half, and the
    share of the rollout that is over. Actions, ``Discrete(4)``: the suits.
    """

    def __init__(self, n: int) -> None:
        self.n = n
        self.observation_space = gym.spaces.Box(0.0, 1.0, (SUITS + 2,), np.float32)
        self.action_space = gym.spaces.Discrete(SUITS)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self._suits = self.np_random.permutation(self.n) % SUITS
        self._t = 0
        return self._observe(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        reward, asked = 0.0, self._t - self.n
        if asked >= 0:
            reward = (1.0 if int(action) == self._suits[self.n - 1 - asked] else -1.0) / self.n
        self._t += 1
        return self._observe(), reward, self._t == 2 * self.n, False, {}

    def _observe(self) -> NDArray[np.float32]:
        out = np.zeros(SUITS + 2, np.float32)
        if self._t < self.n:
            out[self._suits[self._t]] = 1.0
        else:
            out[SUITS] = 1.0
        out[SUITS + 1] = self._t / (2 * self.n)
        return out


class BernoulliBandit(gym.Env[NDArray[np.float32], np.int64]):
    """Arms that pay 1 with probabilities drawn uniformly from [0, 1] for each rollout: the task whose rewards are random.

    Observation, float32 ``(1,)``: the share of the pulls that are over; what an arm has paid is in the previous reward and action.
    """

    def __init__(self, arms: int, pulls: int) -> None:
        self.pulls = pulls
        self.observation_space = gym.spaces.Box(0.0, 1.0, (1,), np.float32)
        self.action_space = gym.spaces.Discrete(arms)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self._pays = self.np_random.random(int(self.action_space.n))  # type: ignore[attr-defined]
        self._t = 0
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self._t += 1
        reward = float(self.np_random.random() < self._pays[int(action)])
        return np.full(1, self._t / self.pulls, np.float32), reward, self._t == self.pulls, False, {}


class Positions(gym.ObservationWrapper[Any, Any, Any]):
    """An environment whose velocities are not observed: ``kept`` are the indices of what is left of a vector of observations."""

    def __init__(self, env_id: str, kept: list[int]) -> None:
        super().__init__(gym.make(env_id))
        box, self._kept = self.env.observation_space, kept
        assert isinstance(box, gym.spaces.Box)
        self.observation_space = gym.spaces.Box(box.low[kept], box.high[kept], dtype=np.float32)

    def observation(self, observation: Any) -> Any:
        return observation[self._kept]


# rl-baselines3-zoo has these as CartPoleNoVel-v1, PendulumNoVel-v1 and MountainCarContinuousNoVel-v0
def cartpole_positions() -> gym.Env[Any, Any]:
    """CartPole-v1 without the velocities of the cart and of the pole."""
    return Positions("CartPole-v1", [0, 2])


def pendulum_positions() -> gym.Env[Any, Any]:
    """Pendulum-v1 without its angular velocity."""
    return Positions("Pendulum-v1", [0, 1])


def mountain_car_positions() -> gym.Env[Any, Any]:
    """MountainCarContinuous-v0 without its velocity."""
    return Positions("MountainCarContinuous-v0", [0])


class MemoryRoom(gym.Wrapper[Any, Any, Any, Any]):
    """A ``MiniGrid-Memory*-v0`` whose observation is what the agent sees as bits: of each of 7 x 7 cells, whether it is unseen, empty, a wall,
    a key or a ball. Logs "Success": whether the rollout ended at the right object. Needs ``amago[minigrid]``.
    """

    SEEN = tuple(CHANNELS.index(name) for name in ("unseen", "empty", "wall", "key", "ball"))

    def __init__(self, env_id: str) -> None:
        super().__init__(gym.make(f"minigrid:{env_id}"))
        self.observation_space = gym.spaces.MultiBinary(VIEW * VIEW * len(self.SEEN))

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        _, info = self.env.reset(seed=seed, options=options)
        return self._observe(), info

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        _, reward, terminated, truncated, info = self.env.step(action)
        if terminated or truncated:
            info[f"{AMAGO_ENV_LOG_PREFIX} Success"] = float(reward > 0)
        return self._observe(), float(reward), terminated, truncated, info

    def _observe(self) -> NDArray[np.int8]:
        return partial_grid(self.unwrapped)[..., self.SEEN].ravel().astype(np.int8)  # type: ignore[arg-type]


class ProofOfMemory(gym.Env[NDArray[np.float32], np.int64]):
    """A walk along a line to the goal that was shown in the first two steps: the proof-of-concept task of Pleines et al. 2022
    (arXiv:2205.11498), of our own writing: it was not compared with its authors' code.

    The line is 1 long to either side of its middle, a step .2, and the agent begins at most .4 from the middle; it stands still while the goals
    are shown. Reward: 1 at the right goal, -1 at the wrong one, -.1 / 4 for each other step; a rollout ends at a goal, or after 32 steps.

    Observation, float32 ``(3,)``: the left goal (1 right, -1 wrong, 0 no longer shown), the position, and the right goal. Actions: left, right.
    Logs "Success".
    """

    SHOWN, HALF, LIMIT = 2, 5, 32  # steps shown, steps from the middle to a goal, steps of a rollout at most

    def __init__(self) -> None:
        self.observation_space = gym.spaces.Box(-1.0, 1.0, (3,), np.float32)
        self.action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self._side = int(self.np_random.choice((-1, 1)))
        self._at, self._t = int(self.np_random.integers(-2, 3)), 0
        return self._observe(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        if self._t >= self.SHOWN:
            self._at += 2 * int(action) - 1
        self._t += 1
        arrived = abs(self._at) == self.HALF
        won = arrived and self._at * self._side > 0
        reward = (1.0 if won else -1.0) if arrived else -0.1 / (self.HALF - 1)
        truncated = not arrived and self._t == self.LIMIT
        info = {f"{AMAGO_ENV_LOG_PREFIX} Success": float(won)} if arrived or truncated else {}
        return self._observe(), reward, arrived, truncated, info

    def _observe(self) -> NDArray[np.float32]:
        side = self._side if self._t < self.SHOWN else 0
        return np.array([-side, self._at / self.HALF, side], np.float32)


# without arguments, as `amago train` takes them
def memory_s7() -> gym.Env[Any, Any]:
    """MiniGrid-MemoryS7-v0, in bits."""
    return MemoryRoom("MiniGrid-MemoryS7-v0")


def memory_s9() -> gym.Env[Any, Any]:
    """MiniGrid-MemoryS9-v0, in bits."""
    return MemoryRoom("MiniGrid-MemoryS9-v0")


def recall8() -> gym.Env[Any, Any]:
    """Name the suit of the card of eight steps ago."""
    return RepeatPrevious(8)


def autoencode26() -> gym.Env[Any, Any]:
    """Repeat 26 cards in reverse order."""
    return Autoencode(26)


def bandit5() -> gym.Env[Any, Any]:
    """50 pulls of 5 arms."""
    return BernoulliBandit(5, 50)


def tmaze50() -> gym.Env[Any, Any]:
    """The passive T-Maze of 50 steps."""
    return TMazePassive(49)


def lake3() -> gym.Env[Any, Any]:
    """Six attempts at an unknown frozen lake of 3 x 3 fields."""
    return MetaFrozenLake(size=3, k_episodes=6, max_episode_steps=9)
