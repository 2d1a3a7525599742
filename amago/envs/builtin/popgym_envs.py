"""POPGym: 16 families of partially observed games, each in three sizes (Morad et al. 2023, arXiv:2303.01859).

Needs ``pip install 'amago[popgym]'``.
"""

from __future__ import annotations

import contextlib
import math
import random
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import gin
import gymnasium as gym
import numpy as np
from numpy.typing import NDArray

from amago.envs.amago_env import AMAGOEnv
from amago.envs.builtin import _common as common
from amago.registry import require

Observation = Any

SIZES = ("Easy", "Medium", "Hard")
FAMILIES = (
    "Autoencode", "Battleship", "Concentration", "CountRecall", "HigherLower", "LabyrinthEscape", "LabyrinthExplore", "MineSweeper",
    "MultiarmedBandit", "NoisyPositionOnlyCartPole", "NoisyPositionOnlyPendulum", "PositionOnlyCartPole", "PositionOnlyPendulum",
    "RepeatFirst", "RepeatPrevious", "VelocityOnlyCartPole",
)  # fmt: skip
GAMES = tuple(family + size for family in FAMILIES for size in SIZES)
"""The names of all 48 games."""
_PHYSICS = ("CartPole", "Pendulum", "Labyrinth")
MULTI_DOMAIN_GAMES = tuple(game for game in GAMES if not any(word in game for word in _PHYSICS))
"""The 27 games of cards, boards and bandits, whose observations and actions are discrete."""


def game_name(game: str) -> str:
    """``game`` as listed in `GAMES`, in any case; also accepts the ids of POPGym ("popgym-AutoencodeEasy-v0")."""
    short = str(game).removeprefix("popgym-").removesuffix("-v0")
    for known in GAMES:
        if known.lower() == short.lower():
            return known
    raise ValueError(f"game is {game!r}, but POPGym has {common.similar(short, GAMES)}")


def _make(game: str) -> tuple[gym.Env[Any, Any], int]:
    """The environment of POPGym, and the maximum number of steps of its episodes."""
    envs = require("popgym.envs", "popgym")
    if game not in vars(envs):  # popgym omits mazes if mazelib is missing
        require("mazelib", "popgym")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Maze environments", DeprecationWarning)  # advice against them as benchmarks
        env = vars(envs)[game]()
    if game.startswith("Concentration"):
        return env, int(env.episode_length)
    if game.startswith("HigherLower"):
        return env, int(env.deck_size) - 1
    return env, int(env.max_episode_length) - game.startswith("Labyrinth")


@contextlib.contextmanager
def _preserve_global_generators() -> Iterator[None]:
    """Restore the global random generators of Python and NumPy after the block: POPGym draws mazes from them."""
    python, numpy = random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)


@gin.configurable(module="amago.envs.builtin")
class POPGymGame(gym.Env[Observation, Any]):
    """One game of POPGym, with an observed clock, and with mazes that depend on the seed alone.

    Observations, actions and rewards are POPGym's own; the maximum return is about 1.

    Args:
        game: one of `GAMES`, or its id.
        timer: whether observations are a Dict of POPGym's "observation" and a "timer", float32 ``(1,)``: steps divided by
            ``horizon``.
        truncated_is_done: whether the time limit terminates instead of truncating. It belongs to these games, because rewards
            are scaled by its length; POPGym truncates in some games and terminates in others.
        flat_actions: whether a choice of several numbers, such as a row and a column, is one number: cells of a board are numbered
            row by row. Several numbers are drawn independently of each other, so that no policy can rule out single cells.
    """

    def __init__(
        self, game: str = "RepeatPreviousEasy", timer: bool = True, truncated_is_done: bool = True, flat_actions: bool = False
    ) -> None:
        self.game = game_name(game)
        self.timer = common.check_bool("timer", timer)
        self.truncated_is_done = common.check_bool("truncated_is_done", truncated_is_done)
        self._env, self.horizon = _make(self.game)
        self.env_name = f"popgym_{self.game}"
        self.action_space = own = self._env.action_space
        self._sizes: tuple[int, ...] = ()
        if common.check_bool("flat_actions", flat_actions) and isinstance(own, gym.spaces.MultiDiscrete):
            self._sizes = tuple(int(n) for n in own.nvec.reshape(-1))
            self.action_space = gym.spaces.Discrete(math.prod(self._sizes))
        self.observation_space: gym.Space[Any] = self._env.observation_space
        if self.timer:
            clock = gym.spaces.Box(0.0, 1.0, shape=(1,), dtype=np.float32)
            self.observation_space = gym.spaces.Dict({"observation": self._env.observation_space, "timer": clock})
        self._own_maze = self.game.startswith("Labyrinth")
        self._clock: int | None = None

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Observation, dict[str, Any]]:
        super().reset(seed=seed)
        if self._own_maze:
            with _preserve_global_generators():
                obs, _ = self._env.reset(seed=int(self.np_random.integers(2**31)))
        else:
            obs, _ = self._env.reset(seed=seed)
        self._clock = 0
        return self._observe(obs), {}

    def step(self, action: object) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        if self._clock is None:
            common.refuse_step("POPGymGame")
        if self._sizes:
            cell = common.check_action(action, math.prod(self._sizes))
            action = np.array(np.unravel_index(cell, self._sizes), dtype=np.int64)
        obs, reward, terminated, truncated, _ = self._env.step(action)
        self._clock += 1
        terminated = bool(terminated or (truncated and self.truncated_is_done))
        truncated = bool(truncated and not terminated)
        observed = self._observe(obs)
        if terminated or truncated:
            self._clock = None
        return observed, float(reward), terminated, truncated, {}

    def _observe(self, obs: object) -> Observation:
        if not self.timer:
            return obs
        assert self._clock is not None
        return {"observation": obs, "timer": np.array([self._clock / self.horizon], dtype=np.float32)}


@gin.configurable(module="amago.envs.builtin")
class MultiDomainPOPGym(gym.Env[Observation, np.int64]):
    """Many games behind one interface. The game must be identified in a warm-up episode, whose rewards do not count.

    Each rollout draws one of ``games`` and consists of ``warmup_episodes`` + 1 episodes of it, each with new cards or boards.
    Rewards of the warm-up are observed but not paid: the return of a rollout is the return of its last episode. The rollout
    terminates (never truncates) with the last episode.

    Observation, a Dict: "observation", uint8 ``(W,)``, the game's observation as concatenated one-hot vectors, padded with 0 to
    the widest game; "status", float32 ``(4,)``: the game's reward for the last action, 1 at the first observation of an
    episode, 1 during the warm-up, and steps of the episode divided by its maximum. The first observation of an episode replaces
    the last of the one before.

    Actions, ``Discrete(n)``, where n is the largest number of actions of the games. Games with fewer take the action modulo
    their own number; actions on a board are numbered row by row.

    Metrics: ``Warm-up Return`` at the end of the rollout. `env_name` separates them by game.

    Args:
        games: names of games with discrete spaces; the default is `MULTI_DOMAIN_GAMES`.
        warmup_episodes: number of episodes before the last.
    """

    def __init__(self, games: Sequence[str] | None = None, warmup_episodes: int = 1) -> None:
        self.games = common.check_names("games", MULTI_DOMAIN_GAMES if games is None else games, game_name)
        self.warmup_episodes = common.check_int("warmup_episodes", warmup_episodes, 0)
        self._all = [POPGymGame(game, timer=False, flat_actions=True) for game in self.games]
        components = [_components(env.game, "observations", env.observation_space) for env in self._all]
        self._actions = [int(_components(env.game, "actions", env.action_space).prod()) for env in self._all]
        self._offsets = [np.cumsum(sizes) - sizes for sizes in components]
        self._width = width = max(int(sizes.sum()) for sizes in components)
        self.observation_space = gym.spaces.Dict(
            {
                "observation": gym.spaces.Box(0, 1, shape=(width,), dtype=np.uint8),
                "status": gym.spaces.Box(
                    np.array([-1.0, 0.0, 0.0, 0.0], dtype=np.float32), np.ones(4, dtype=np.float32), dtype=np.float32
                ),
            }
        )
        self._most_actions = max(self._actions)
        self.action_space = gym.spaces.Discrete(self._most_actions)
        self.horizon = (1 + self.warmup_episodes) * max(env.horizon for env in self._all)
        self._now, self._episode, self._clock = 0, -1, 0
        self._warmup_return = 0.0

    @property
    def game(self) -> str:
        return self.games[self._now]

    @property
    def env_name(self) -> str:
        return self._all[self._now].env_name

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Observation, dict[str, Any]]:
        super().reset(seed=seed)
        self._now, self._episode, self._warmup_return = int(self.np_random.integers(len(self.games))), 0, 0.0
        return self._observe(self._open(), 0.0, opened=True), {}

    def step(self, action: object) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        if self._episode < 0:
            common.refuse_step("MultiDomainPOPGym")
        obs, reward, over, _, _ = self._all[self._now].step(self._action(action))
        self._clock += 1
        paid = self._episode == self.warmup_episodes
        if not paid:
            self._warmup_return += reward
        if not over:
            return self._observe(obs, reward), reward if paid else 0.0, False, False, {}
        if not paid:
            self._episode += 1
            return self._observe(self._open(), reward, opened=True), 0.0, False, False, {}
        last = self._observe(obs, reward)
        self._episode = -1
        return last, reward, True, False, common.metrics({"Warm-up Return": self._warmup_return})

    def _open(self) -> Any:
        self._clock = 0
        return self._all[self._now].reset(seed=int(self.np_random.integers(2**31)))[0]

    def _action(self, action: object) -> int:
        return common.check_action(action, self._most_actions) % self._actions[self._now]

    def _observe(self, obs: object, reward: float, opened: bool = False) -> Observation:
        bits = np.zeros(self._width, dtype=np.uint8)
        bits[self._offsets[self._now] + np.asarray(obs, dtype=np.int64).reshape(-1)] = 1
        warm, share = self._episode < self.warmup_episodes, self._clock / self._all[self._now].horizon
        return {"observation": bits, "status": np.array([reward, opened, warm, share], dtype=np.float32)}


def _components(game: str, what: str, space: gym.Space[Any]) -> NDArray[np.int64]:
    """The number of values of each component of a discrete space."""
    parts = list(space.spaces) if isinstance(space, gym.spaces.Tuple) else [space]
    sizes: list[int] = []
    for part in parts:
        if isinstance(part, gym.spaces.Discrete):
            sizes.append(int(part.n))
        elif isinstance(part, gym.spaces.MultiDiscrete):
            sizes.extend(int(n) for n in part.nvec.reshape(-1))
        else:
            raise ValueError(f"games must have discrete {what}, but those of {game} are {space}")
    return np.array(sizes, dtype=np.int64)


class POPGymAMAGO(AMAGOEnv):
    """`POPGymGame` without its clock, wrapped; ``env_name`` is the game, such as "popgym-AutoencodeEasy-v0"."""

    def __init__(self, env_name: str, truncated_is_done: bool = True) -> None:
        game = POPGymGame(env_name, timer=False, truncated_is_done=truncated_is_done)
        super().__init__(game, env_name=game.env_name)


class MultiDomainPOPGymAMAGO(AMAGOEnv):
    """`MultiDomainPOPGym`, wrapped."""

    def __init__(self, warmup_episodes: int = 1) -> None:
        super().__init__(MultiDomainPOPGym(warmup_episodes=warmup_episodes), env_name="MultiDomainPOPGym")
