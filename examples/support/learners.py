"""A dark room and a bandit whose tasks can be recorded: learners that begin with nothing, and the best action of each step."""

from __future__ import annotations

from collections.abc import Iterator

import gymnasium as gym
import numpy as np

from amago import ExtraField
from amago.data.trajectory import StoredTraj
from amago.envs import AMAGO_ENV_LOG_PREFIX

SIZE, LENGTH, ARMS = 4, 15, 5
BEST = ExtraField("best", rows="T", dtype="int64")
MOVES = np.array([(1, 0), (-1, 0), (0, 1), (0, -1), (0, 0)])


class Task(gym.Env):
    """Attempts of 15 steps at one task: ``task``, or, for None, a new one in each rollout. Logs the return of each attempt."""

    def __init__(self, attempts: int, task: int | None = None) -> None:
        self.attempts, self.task = attempts, task

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t, self.sum = 0, 0.0
        self.draw(self.np_random if self.task is None else np.random.default_rng(self.task))
        return self.begin(), {}

    def step(self, action):
        reward, obs = self.play(int(action))
        self.t, self.sum, info = self.t + 1, self.sum + reward, {}
        if self.t % LENGTH == 0:
            info[f"{AMAGO_ENV_LOG_PREFIX} Attempt {self.t // LENGTH - 1} Return"] = self.sum
            obs, self.sum = self.begin(), 0.0
        return obs, reward, False, self.t == self.attempts * LENGTH, info


class Room(Task):
    """A reward of 1 for each step on the goal, which is not seen. Each attempt begins in the middle."""

    observation_space, action_space = gym.spaces.Box(0.0, 1.0, (SIZE * SIZE,)), gym.spaces.Discrete(len(MOVES))

    def draw(self, rng):
        self.goal = np.array(divmod(int(rng.integers(SIZE * SIZE)), SIZE))

    def begin(self):
        self.at = np.array([SIZE // 2] * 2)
        return self.observe()

    def observe(self):
        return np.eye(SIZE * SIZE, dtype=np.float32)[self.at[0] * SIZE + self.at[1]]

    def play(self, action):
        self.at = np.clip(self.at + MOVES[action], 0, SIZE - 1)
        return float((self.at == self.goal).all()), self.observe()

    def best(self) -> int:
        """The action that an agent takes which knows the goal."""
        return int(np.abs(self.at + MOVES - self.goal).sum(1).argmin())


class Bandit(Task):
    """Arms that pay 1, each with its own probability; the observation says nothing."""

    observation_space, action_space = gym.spaces.Box(0.0, 1.0, (1,)), gym.spaces.Discrete(ARMS)

    def draw(self, rng):
        self.chances = rng.random(ARMS)

    def begin(self):
        return np.zeros(1, np.float32)

    def play(self, action):
        return float(self.np_random.random() < self.chances[action]), self.begin()

    def best(self) -> int:
        """The arm that pays most often."""
        return int(self.chances.argmax())


def history(env: Task, rng: np.random.Generator) -> Iterator[StoredTraj]:
    """The attempts of a learner at one task, with the best actions beside its own: Q-learning in the room, UCB at the bandit."""
    states, actions, plans = env.observation_space.shape[0], env.action_space.n, isinstance(env, Room)
    values, counts = np.zeros((states, actions)), np.zeros((states, actions))
    obs, _ = env.reset(seed=int(rng.integers(2**31)))
    for attempt in range(env.attempts):
        rows, seen = [], [obs]
        for t in range(LENGTH):
            s, best = int(obs.argmax()), env.best()
            bonus = np.sqrt(0.5 * np.log(attempt * LENGTH + t + 2) / np.maximum(counts[s], 1e-9))
            a = int((values[s] + (1e-6 * rng.random(actions) if plans else bonus)).argmax())
            if plans and rng.random() < max(0.02, 1 - 2 * attempt / env.attempts):
                a = int(rng.integers(actions))
            obs, reward, *_ = env.step(a)
            counts[s, a] += 1
            target = reward + 0.9 * values[int(obs.argmax())].max() if plans else reward
            values[s, a] += (0.5 if plans else 1 / counts[s, a]) * (target - values[s, a])
            rows.append((a, reward, best))
            seen.append(obs)
        a, r, best = (np.array(column) for column in zip(*rows))
        fields = {"obs": {"observation": np.stack(seen)}, "actions": a[:, None], "rews": np.float32(r)[:, None]}
        yield StoredTraj(**fields, dones=np.zeros((LENGTH, 1), bool), env_name=str(env.task), extras={"best": best})
