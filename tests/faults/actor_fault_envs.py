"""Environments for the tests of faulty actors, and a check of what a pool of them shows."""

import os
from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np
from counting_env import CountingEnv, length_of

from amago.envs import AMAGOEnv


def tally(path: str) -> None:
    """Count one event in a file that several processes share."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.write(fd, b"x")
    os.close(fd)


def tallied(path: object) -> int:
    return os.path.getsize(str(path)) if os.path.exists(str(path)) else 0


class Raising(gym.Wrapper[Any, Any, Any, Any]):
    """Raises with given probabilities, seeded by the first reset, and counts it in a file."""

    def __init__(self, env: gym.Env[Any, Any], at_step: float, at_reset: float, path: str):
        super().__init__(env)
        self.at_step, self.at_reset, self.path = at_step, at_reset, path
        self.chances = np.random.default_rng()

    def _perhaps(self, chance: float, where: str) -> None:
        if self.chances.random() < chance:
            tally(self.path)
            raise RuntimeError(f"a fault injected into {where}")

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        if seed is not None:
            self.chances = np.random.default_rng(seed)
        self._perhaps(self.at_reset, "reset")
        return self.env.reset(seed=seed, options=options)

    def step(self, action: Any) -> Any:
        self._perhaps(self.at_step, "step")
        return self.env.step(action)


def make_raising_cartpole(at_step: float, at_reset: float, path: str) -> Callable[[], AMAGOEnv]:
    def make() -> AMAGOEnv:
        return AMAGOEnv(Raising(gym.make("CartPole-v1"), at_step, at_reset, path), env_name="CartPole-v1")

    return make


class Wordy(CountingEnv):
    """Its statistics contain names of a megabyte, too much for the buffer of a socket."""

    @property
    def env_name(self) -> str:
        return "x" * 2**20


class Followed:
    """Follows each actor of a pool of `CountingEnv` from step to step, and counts replacements.

    A new environment begins with episode 0, step 0, which never follows another step: every replacement is seen.
    """

    def __init__(self, pool: Any, seed: int):
        self.pool, self.rng = pool, np.random.default_rng(seed)
        n = pool.num_actors
        self.breaks = np.zeros(n, dtype=int)
        pool.reset()
        self.at = [(0, 0)] * n
        self.look()
        assert not self.breaks.any()

    def step(self) -> None:
        n = self.pool.num_actors
        self.pool.step(self.rng.integers(5, size=(n, 1)))
        for actor, (episode, t) in enumerate(self.at):
            self.at[actor] = (episode + 1, 0) if t + 1 == length_of(actor, episode) else (episode, t + 1)
        self.look()

    def look(self) -> None:
        """Check that each observation follows the one before, or is the first of a new environment."""
        shown = self.pool.obs["count"][:, :3].astype(int)
        times, resets = self.pool.time_idxs[:, 0], self.pool.resets
        for actor, (t, number, episode) in enumerate(shown.tolist()):
            assert (number, (times[actor], resets[actor])) == (actor, (t, t == 0))
            if (episode, t) != self.at[actor]:
                assert (episode, t) == (0, 0), f"actor {actor} was at {self.at[actor]} and is at {(episode, t)}"
                assert not self.pool.rl2s[actor].any()
                self.breaks[actor] += 1
                self.at[actor] = (0, 0)
