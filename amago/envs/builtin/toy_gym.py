"""Toy tasks: FrozenLake with several attempts, and Dark Key-To-Door."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import gin
import gymnasium as gym
import numpy as np
from gymnasium.envs.toy_text.frozen_lake import generate_random_map
from numpy.typing import NDArray

from amago.envs.builtin import _common as common

Observation = NDArray[np.float32]

_LAKE_MOVES = ((0, 0), (1, 0), (-1, 0), (0, 1), (0, -1))
_SWAPPED = (_LAKE_MOVES[0], _LAKE_MOVES[3], _LAKE_MOVES[2], _LAKE_MOVES[1], _LAKE_MOVES[4])
_NEIGHBOURS = tuple((dx, dy) for dx in (-1, 0, 1) for dy in (-1, 0, 1) if dx or dy)

SWAP_CHANCE = 0.5
NOISE_CHANCE = 0.25
CRACK_CHANCE = 1.0 / 3.0
RECOVER_PENALTY = -0.1


@gin.configurable(module="amago.envs.builtin")
class MetaFrozenLake(gym.Env[Observation, np.int64]):
    """Cross an unknown frozen lake, with k attempts at the same lake.

    Each `reset` draws a solvable lake of ``size`` x ``size`` cells with Gymnasium's map generator. Attempts start in cell
    (0, 0); the goal is (size - 1, size - 1). An attempt ends at the goal (reward 1), in a hole (reward 0), or after
    ``max_episode_steps`` steps; its last step returns the first observation of the next attempt. The rollout terminates
    (never truncates) with the k-th attempt, and its last observation is that attempt's.

    Actions, ``Discrete(5)``: 0 stay, 1 x + 1, 2 x - 1, 3 y + 1, 4 y - 1. Moves off the lake stay in place.

    Observation, float32 ``(4,)``: ``x / size``, ``y / size``, 1 at the first observation of an attempt (else 0), and the number
    of finished attempts divided by k. With ``show_k_progress=False`` the last number is left out: ``(3,)``.

    Metrics: ``Attempt {i} Success`` (i from 0) at the end of an attempt, 1 if it reached the goal; ``Success Rate``, the mean
    over attempts, at the end of the rollout.

    Args:
        size: side length of the lake in cells, at least 2.
        k_episodes: k, attempts per rollout.
        hard_mode: with probability 1/2 per lake, actions 1 and 3 are exchanged; with probability 1/4 per step, the observed
            position is one of the eight neighbouring cells, which may lie outside the lake; with probability 1/3, a cell that
            the agent leaves becomes a hole until the attempt ends.
        recover_mode: a step into a hole gives reward -0.1 and has no other effect.
        max_episode_steps: maximum steps per attempt; the default is size^2, doubled in hard mode, divided by
            ``1 - slip_chance`` and rounded.
        show_k_progress: whether the observation contains the number of finished attempts.
        slip_chance: probability, in [0, 1), that a move is replaced by a stay.
        render_mode: None or "rgb_array" (uint8, 24 pixels per cell); x points right, y down.
    """

    metadata = {"render_modes": ["rgb_array"], "render_fps": 4}

    def __init__(
        self,
        size: int,
        k_episodes: int = 10,
        hard_mode: bool = False,
        recover_mode: bool = False,
        max_episode_steps: int | None = None,
        show_k_progress: bool = True,
        slip_chance: float = 0.0,
        render_mode: str | None = None,
    ) -> None:
        self.size = common.check_int("size", size, 2)
        self.k_episodes = common.check_int("k_episodes", k_episodes, 1)
        self.hard_mode = common.check_bool("hard_mode", hard_mode)
        self.recover_mode = common.check_bool("recover_mode", recover_mode)
        self.show_k_progress = common.check_bool("show_k_progress", show_k_progress)
        self.slip_chance = common.check_fraction("slip_chance", slip_chance, below_one=True)
        if max_episode_steps is None:
            limit = self.size**2 * (2 if self.hard_mode else 1)
            self.max_episode_steps = round(limit / (1.0 - self.slip_chance))
        else:
            self.max_episode_steps = common.check_int("max_episode_steps", max_episode_steps, 1)
        self.horizon = self.k_episodes * self.max_episode_steps
        self.render_mode = common.check_render_mode(render_mode, self.metadata["render_modes"])

        margin = -1.0 / self.size if self.hard_mode else 0.0  # a noisy position can lie one cell outside the lake
        low = np.array([margin, margin, 0.0, 0.0], dtype=np.float32)[: 4 if self.show_k_progress else 3]
        self.observation_space = gym.spaces.Box(low, np.ones_like(low), dtype=np.float32)
        self.action_space = gym.spaces.Discrete(5)

        self._moves: tuple[tuple[int, int], ...] = _LAKE_MOVES
        self._lake: list[list[bool]] = []
        self._cracked: list[tuple[int, int]] = []
        self._x = self._y = self._steps = self._successes = 0
        self._attempt = self.k_episodes

    @property
    def holes(self) -> NDArray[np.bool_]:
        """The present holes, including holes made by `hard_mode`, bool (size, size) indexed ``[x, y]``."""
        return np.array(self._lake, dtype=np.bool_).reshape(-1, self.size)

    @property
    def actions_swapped(self) -> bool:
        """True if actions 1 (x + 1) and 3 (y + 1) are exchanged on this lake."""
        return self._moves is _SWAPPED

    @property
    def position(self) -> tuple[int, int]:
        """The agent's true cell ``(x, y)``."""
        return self._x, self._y

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Observation, dict[str, Any]]:
        super().reset(seed=seed)
        rng = self.np_random
        rows = generate_random_map(size=self.size, seed=int(rng.integers(2**31)))
        self._lake = [[rows[y][x] == "H" for y in range(self.size)] for x in range(self.size)]
        self._moves = _SWAPPED if self.hard_mode and rng.random() < SWAP_CHANCE else _LAKE_MOVES
        self._cracked = []
        self._attempt = self._successes = 0
        self._begin_attempt()
        return self._observe(first=1.0), {}

    def step(self, action: object) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        if self._attempt >= self.k_episodes:
            common.refuse_step("MetaFrozenLake")
        dx, dy = self._moves[common.check_action(action, 5)]
        if self.slip_chance and self.np_random.random() < self.slip_chance:
            dx = dy = 0
        old_x, old_y, last = self._x, self._y, self.size - 1
        x, y = min(max(old_x + dx, 0), last), min(max(old_y + dy, 0), last)
        reward, done = 0.0, False
        if self._lake[x][y]:
            if self.recover_mode:
                x, y, reward = old_x, old_y, RECOVER_PENALTY
            else:
                done = True
        success = x == last and y == last
        if success:
            reward, done = 1.0, True
        moved = x != old_x or y != old_y
        self._x, self._y = x, y
        if moved and self.hard_mode and self.np_random.random() < CRACK_CHANCE:
            self._lake[old_x][old_y] = True
            self._cracked.append((old_x, old_y))
        self._steps += 1
        if not done and self._steps < self.max_episode_steps:
            return self._observe(first=0.0), reward, False, False, {}
        return self._end_attempt(reward, success)

    def _end_attempt(self, reward: float, success: bool) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        info = common.metrics({f"Attempt {self._attempt} Success": float(success)})
        self._successes += success
        self._attempt += 1
        if self._attempt == self.k_episodes:
            info |= common.metrics({"Success Rate": self._successes / self.k_episodes})
            return self._observe(first=0.0), reward, True, False, info
        self._begin_attempt()
        return self._observe(first=1.0), reward, False, False, info

    def _begin_attempt(self) -> None:
        for x, y in self._cracked:
            self._lake[x][y] = False
        self._cracked = []
        self._x = self._y = self._steps = 0

    def _observe(self, first: float) -> Observation:
        x, y, size = self._x, self._y, self.size
        if self.hard_mode and self.np_random.random() < NOISE_CHANCE:
            dx, dy = _NEIGHBOURS[self.np_random.integers(8)]
            x, y = x + dx, y + dy
        if self.show_k_progress:
            return np.array((x / size, y / size, first, self._attempt / self.k_episodes), dtype=np.float32)
        return np.array((x / size, y / size, first), dtype=np.float32)

    def render(self) -> Any:
        """The lake: A agent, G goal, O hole, "." ice."""
        return common.render(self.render_mode, self._rows)

    def _rows(self) -> list[str]:
        last = self.size - 1
        rows = [["O" if self._lake and self._lake[x][y] else "." for x in range(self.size)] for y in range(self.size)]
        rows[last][last] = "G"
        rows[self._y][self._x] = "A"
        return ["".join(row) for row in rows]


Location = str | Sequence[int]

_MOVES = ((1, 0), (-1, 0), (0, 1), (0, -1), (0, 0))


@gin.configurable(module="amago.envs.builtin")
class RoomKeyDoor(gym.Env[Observation, np.int64]):
    """Dark Key-To-Door: repeated trials in the same room with a hidden key and a hidden door, until a fixed horizon.

    The task of *In-context Reinforcement Learning with Algorithm Distillation* (Laskin et al. 2022, arXiv:2210.14215). A trial
    ends when the agent reaches the door with the key, or after ``max_episode_steps`` steps. The following step ignores its
    action and returns the agent to the start, without the key; it counts towards the horizon. The rollout terminates (never
    truncates) after ``meta_rollout_horizon`` steps.

    Reward: 1 for reaching the key and 1 for reaching the door with the key, each once per trial.

    Actions, ``Discrete(5)``: 0 x + 1, 1 x - 1, 2 y + 1, 3 y - 1, 4 stay. Moves into a wall stay in place.

    Observation, float32 ``(4,)``: ``x / size``, ``y / size``, 1 if the agent holds the key, and steps of this trial divided by
    ``max_episode_steps``; with ``dark=False`` also ``x / size``, ``y / size`` of the door and then of the key, ``(8,)``.

    Metrics: ``Trial {i} Return`` (i from 0) at the end of a trial, unless the horizon cuts it short; ``Doors Opened`` and
    ``Keys Found``, counted over all trials, at the end of the rollout.

    Args:
        dark: whether the positions of the key and the door are hidden.
        size: side length of the room in cells, at least 2.
        max_episode_steps: maximum steps per trial.
        meta_rollout_horizon: steps per rollout, including those that return the agent to the start.
        start_location, key_location, goal_location: a cell ``(x, y)``, or "random" for a new cell in each rollout, uniform over
            the free cells. The three cells are always different.
        randomize_actions: whether a uniform permutation of the five actions is drawn for each rollout.
        render_mode: None or "rgb_array" (uint8, 24 pixels per cell); x points right, y down.
    """

    metadata = {"render_modes": ["rgb_array"], "render_fps": 4}

    def __init__(
        self,
        dark: bool = True,
        size: int = 9,
        max_episode_steps: int = 50,
        meta_rollout_horizon: int = 500,
        start_location: Location = "random",
        key_location: Location = "random",
        goal_location: Location = "random",
        randomize_actions: bool = False,
        render_mode: str | None = None,
    ) -> None:
        self.dark = common.check_bool("dark", dark)
        self.size = common.check_int("size", size, 2)
        self.max_episode_steps = common.check_int("max_episode_steps", max_episode_steps, 1)
        self.meta_rollout_horizon = common.check_int("meta_rollout_horizon", meta_rollout_horizon, 1)
        self.horizon = self.meta_rollout_horizon
        self.randomize_actions = common.check_bool("randomize_actions", randomize_actions)
        self.render_mode = common.check_render_mode(render_mode, self.metadata["render_modes"])
        cells = {"start_location": start_location, "key_location": key_location, "goal_location": goal_location}
        self._fixed = {name: _check_location(name, cell, self.size) for name, cell in cells.items()}
        given = [cell for cell in self._fixed.values() if cell is not None]
        if len(set(given)) < len(given):
            raise ValueError(f"start_location, key_location and goal_location must differ, got {self._fixed}")

        self.observation_space = gym.spaces.Box(0.0, 1.0, shape=(4 if self.dark else 8,), dtype=np.float32)
        self.action_space = gym.spaces.Discrete(5)

        self._moves: list[tuple[int, int]] = list(_MOVES)
        self._start = self._key = self._goal = (0, 0)
        self._hints: tuple[float, ...] = ()
        self._x = self._y = self._steps = 0
        self._has_key = self._reset_due = False
        self._clock = self.meta_rollout_horizon
        self._trial = self._keys = self._doors = 0
        self._trial_return = 0.0

    @property
    def locations(self) -> dict[str, tuple[int, int]]:
        """The cells of this rollout, ``{"start": (x, y), "key": (x, y), "goal": (x, y)}``."""
        return {"start": self._start, "key": self._key, "goal": self._goal}

    @property
    def action_order(self) -> tuple[int, ...]:
        """For each action of this rollout, the action with the same effect without ``randomize_actions``."""
        return tuple(_MOVES.index(move) for move in self._moves)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Observation, dict[str, Any]]:
        super().reset(seed=seed)
        self._start, self._key, self._goal = self._draw_locations()
        self._moves = [_MOVES[i] for i in self.np_random.permutation(5)] if self.randomize_actions else list(_MOVES)
        self._hints = () if self.dark else tuple(c / self.size for c in (*self._goal, *self._key))
        self._clock = self._trial = self._keys = self._doors = 0
        self._begin_trial()
        return self._observe(), {}

    def _draw_locations(self) -> list[tuple[int, int]]:
        taken = [cell for cell in self._fixed.values() if cell is not None]
        cells = []
        for fixed in self._fixed.values():
            cell = fixed
            while cell is None:
                index = int(self.np_random.integers(self.size**2))
                drawn = divmod(index, self.size)
                if drawn not in taken:
                    cell = drawn
                    taken.append(drawn)
            cells.append(cell)
        return cells

    def _begin_trial(self) -> None:
        self._x, self._y = self._start
        self._steps, self._trial_return = 0, 0.0
        self._has_key = self._reset_due = False

    def step(self, action: object) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        if self._clock >= self.meta_rollout_horizon:
            common.refuse_step("RoomKeyDoor")
        dx, dy = self._moves[common.check_action(action, 5)]
        self._clock += 1
        info: dict[str, Any] = {}
        reward = 0.0
        if self._reset_due:
            self._begin_trial()
        else:
            last = self.size - 1
            self._x = min(max(self._x + dx, 0), last)
            self._y = min(max(self._y + dy, 0), last)
            self._steps += 1
            reward = self._collect(info)
        terminated = self._clock >= self.meta_rollout_horizon
        if terminated:
            info |= common.metrics({"Doors Opened": float(self._doors), "Keys Found": float(self._keys)})
        return self._observe(), reward, terminated, False, info

    def _collect(self, info: dict[str, Any]) -> float:
        """The reward at the agent's present cell; adds the metric of a finished trial to ``info``."""
        here, reward, opened = (self._x, self._y), 0.0, False
        if self._has_key:
            if here == self._goal:
                self._doors += 1
                reward, opened = 1.0, True
        elif here == self._key:
            self._has_key = True
            self._keys += 1
            reward = 1.0
        self._trial_return += reward
        if opened or self._steps >= self.max_episode_steps:
            self._reset_due = True
            info |= common.metrics({f"Trial {self._trial} Return": self._trial_return})
            self._trial += 1
        return reward

    def _observe(self) -> Observation:
        size = self.size
        own = (self._x / size, self._y / size, float(self._has_key), self._steps / self.max_episode_steps)
        return np.array(own + self._hints, dtype=np.float32)

    def render(self) -> Any:
        """The room: A agent (a with the key), K key, D door."""
        return common.render(self.render_mode, self._rows)

    def _rows(self) -> list[str]:
        rows = [["."] * self.size for _ in range(self.size)]
        rows[self._goal[1]][self._goal[0]] = "D"
        if not self._has_key:
            rows[self._key[1]][self._key[0]] = "K"
        rows[self._y][self._x] = "a" if self._has_key else "A"
        return ["".join(row) for row in rows]


def _check_location(name: str, value: Location, size: int) -> tuple[int, int] | None:
    """None for "random", else the cell."""
    if isinstance(value, str) and value == "random":
        return None
    try:
        x, y = (common.check_int(name, part, 0) for part in value)
        if max(x, y) < size:
            return x, y
    except (TypeError, ValueError):
        pass
    raise ValueError(f'{name} must be "random" or a cell (x, y) with both in 0..{size - 1}, got {value!r}')
