"""Dark Key-To-Door: find a key, then a door, repeatedly in the same room."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import gin
import gymnasium as gym
import numpy as np
from numpy.typing import NDArray

from amago.config import NamedArguments
from amago.envs.builtin import _common as common
from amago.envs.builtin import _drawing as drawing
from amago.envs.metrics import AMAGO_ENV_LOG_PREFIX

Observation = NDArray[np.float32]
Location = str | Sequence[int]

_MOVES = ((1, 0), (-1, 0), (0, 1), (0, -1), (0, 0))


@gin.configurable(module="amago.envs.builtin")
class RoomKeyDoor(NamedArguments, gym.Env[Observation, np.int64]):
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
        render_mode: None, "ansi" (text) or "rgb_array" (uint8, 24 pixels per cell); x points right, y down.

    Attributes:
        horizon: steps per rollout.

    Raises:
        TypeError, ValueError: an argument has the wrong type or is out of range.
    """

    metadata = {"render_modes": ["ansi", "rgb_array"], "render_fps": 4}

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
        self._fixed = {
            "start_location": _check_location("start_location", start_location, self.size),
            "key_location": _check_location("key_location", key_location, self.size),
            "goal_location": _check_location("goal_location", goal_location, self.size),
        }
        _refuse_equal(self._fixed)

        self.observation_space = gym.spaces.Box(0.0, 1.0, shape=(4 if self.dark else 8,), dtype=np.float32)
        self.action_space = gym.spaces.Discrete(5)

        self._moves: list[tuple[int, int]] = list(_MOVES)
        self._start = self._key = self._goal = (0, 0)
        self._shown: tuple[float, ...] = ()
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
        self._shown = () if self.dark else tuple(c / self.size for c in (*self._goal, *self._key))
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

    def step(self, action: Any) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
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
            info[f"{AMAGO_ENV_LOG_PREFIX} Doors Opened"] = float(self._doors)
            info[f"{AMAGO_ENV_LOG_PREFIX} Keys Found"] = float(self._keys)
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
            info[f"{AMAGO_ENV_LOG_PREFIX} Trial {self._trial} Return"] = self._trial_return
            self._trial += 1
        return reward

    def _observe(self) -> Observation:
        size = self.size
        own = (self._x / size, self._y / size, float(self._has_key), self._steps / self.max_episode_steps)
        return np.array(own + self._shown, dtype=np.float32)

    def render(self) -> Any:
        """The room as an image or as text, according to ``render_mode``: A agent (a with the key), K key, D door."""
        return drawing.render(self.render_mode, self._text, self._draw)

    def _text(self) -> str:
        rows = [["."] * self.size for _ in range(self.size)]
        rows[self._goal[1]][self._goal[0]] = "D"
        if not self._has_key:
            rows[self._key[1]][self._key[0]] = "K"
        rows[self._y][self._x] = "a" if self._has_key else "A"
        lines = [" ".join(row) for row in rows]
        lines.append(f"trial {self._trial + 1 - self._reset_due}, step {self._clock} of {self.meta_rollout_horizon}")
        return "\n".join(lines)

    def _draw(self) -> NDArray[np.uint8]:
        frame = drawing.blank_grid(self.size, drawing.WHITE)
        drawing.paint(frame, self._goal, drawing.GREEN, inset=3)
        if not self._has_key:
            drawing.paint(frame, self._key, drawing.GOLD, inset=6)
        drawing.paint(frame, (self._x, self._y), drawing.RED, inset=5, round_=True)
        if self._has_key:
            drawing.paint(frame, (self._x, self._y), drawing.GOLD, inset=9)
        return frame


def _check_location(name: str, value: Any, size: int) -> tuple[int, int] | None:
    """None for "random", else the cell."""
    if isinstance(value, str):
        if value == "random":
            return None
        raise ValueError(f'{name} must be "random" or a cell (x, y), got {value!r}')
    try:
        x, y = value
        cell = (common.check_int(name, x, 0), common.check_int(name, y, 0))
    except (TypeError, ValueError):
        cell = (-1, -1)
    if not (0 <= cell[0] < size and 0 <= cell[1] < size):
        raise ValueError(f'{name} must be "random" or a cell (x, y) with both in 0..{size - 1}, got {value!r}')
    return cell


def _refuse_equal(cells: dict[str, tuple[int, int] | None]) -> None:
    seen: dict[tuple[int, int], str] = {}
    for name, cell in cells.items():
        if cell is None:
            continue
        if cell in seen:
            raise ValueError(f"{seen[cell]} and {name} must differ, got {cell!r} for both")
        seen[cell] = name
