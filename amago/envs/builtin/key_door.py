"""Find a key, then a door, in a dark room, as often as a fixed number of steps allows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import gin
import gymnasium as gym
import numpy as np
from numpy.typing import NDArray

from amago.envs.builtin import _common as common
from amago.envs.metrics import AMAGO_ENV_LOG_PREFIX

Observation = NDArray[np.float32]
Location = str | Sequence[int]

_MOVES = ((1, 0), (-1, 0), (0, 1), (0, -1), (0, 0))


@gin.configurable(module="amago.envs.builtin")
class RoomKeyDoor(gym.Env[Observation, np.int64]):
    """Dark Key-To-Door: the same empty room over and over until a horizon, with a key and a door to be found.

    After the problem in *In-context Reinforcement Learning with Algorithm Distillation* (arXiv:2210.14215). A trial gives
    reward 1 for the first step that ends on the key and 1 for the first that ends on the door with the key in hand, which also
    ends the trial; so does ``max_episode_steps``. The step after that ignores its action and puts the agent back at the start
    of the same room, without the key: this costs one step of the horizon. The rollout terminates (never truncates) after
    ``meta_rollout_horizon`` steps.

    Actions, ``Discrete(5)``: 0 x + 1, 1 x - 1, 2 y + 1, 3 y - 1, 4 stay. Moves into a wall stay in place.

    Observation, float32 ``(4,)``: ``x / size``, ``y / size``, 1 if the agent holds the key, and steps of this trial divided by
    ``max_episode_steps``; with ``dark=False`` also ``x / size``, ``y / size`` of the door and then of the key, ``(8,)``.

    Logged: ``Trial {i} Return`` (i from 0) when a trial ends by its own rules, and at the horizon ``Doors Opened`` and
    ``Keys Found``, counted over the rollout.

    Args:
        dark: whether the key and the door are hidden.
        size: cells along a side of the room, at least 2.
        max_episode_steps: limit of one trial.
        meta_rollout_horizon: steps of a rollout, reset steps included.
        start_location, key_location, goal_location: a cell ``(x, y)``, or "random" to draw one for each rollout. The
            three cells always differ: a random one is uniform over the cells that are still free.
        randomize_actions: draw the meaning of the five actions anew for each rollout (a uniform permutation).
        render_mode: None, "ansi" (text) or "rgb_array" (uint8, 24 pixels a cell); x runs to the right, y downwards.

    Attributes:
        horizon: the length of a rollout.

    Raises:
        TypeError, ValueError: an argument is out of range; the message quotes it.
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
        """This rollout's cells, ``{"start": (x, y), "key": ..., "goal": ...}``."""
        return {"start": self._start, "key": self._key, "goal": self._goal}

    @property
    def action_order(self) -> tuple[int, ...]:
        """What each action does in this rollout: ``action_order[a]`` is its index without `randomize_actions`."""
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
        """The reward of standing where the agent stands now; notes the end of a trial in ``info``."""
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
        """The room as it is now, in the form of ``render_mode``: A agent (a once it has the key), K key, D door."""
        if self.render_mode == "rgb_array":
            return self._draw()
        if self.render_mode == "ansi":
            return self._text()
        return None

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
        frame = common.blank_grid(self.size, common.WHITE)
        common.paint(frame, self._goal, common.GREEN, inset=3)
        if not self._has_key:
            common.paint(frame, self._key, common.GOLD, inset=6)
        common.paint(frame, (self._x, self._y), common.RED, inset=5, round_=True)
        if self._has_key:
            common.paint(frame, (self._x, self._y), common.GOLD, inset=9)
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
