"""MazeRunner: reach a sequence of goals in an unknown maze (after AMAGO, Grigsby et al. 2023, arXiv:2310.09971)."""

from __future__ import annotations

from typing import Any

import gin
import gymnasium as gym
import numpy as np
from numpy.typing import NDArray

from amago.config import NamedArguments
from amago.envs.builtin import _common as common
from amago.envs.builtin import _drawing as drawing
from amago.envs.builtin._mazes import DIRECTIONS, Grid, depths, random_maze
from amago.envs.metrics import AMAGO_ENV_LOG_PREFIX

Cell = tuple[int, int]
Observation = dict[str, NDArray[np.float32]]

DONE = -1.0
"""The value of goals that have been reached, and of unused rows of goals."""
_MOVES: tuple[Cell, ...] = (*DIRECTIONS, (0, 0))


@gin.configurable(module="amago.envs.builtin")
class MazeRunner(NamedArguments, gym.Env[Observation, np.int64]):
    """Reach goals in order in a maze that is new in each rollout and observed through depth sensors only.

    Each `reset` draws a maze, and k + 1 different free cells for the start and k goals, k uniform in ``min_goals`` to
    ``max_goals``. Only the next goal of the sequence can be reached. The rollout terminates (never truncates, because the clock
    is observed) with the last goal, or after ``time_limit`` steps.

    Actions, ``Discrete(5)``: 0 west, 1 north, 2 east, 3 south, 4 stay; walls stop the agent. With ``randomize_actions`` they
    are permuted.

    Observation, a dict of float32 arrays; positions and distances are divided by ``size``:

    - "observation" ``(7,)``: x and y of the agent; the number of consecutive free cells to its west, north, east and south;
      steps divided by ``time_limit``;
    - "goals" ``(max_goals, 2)``: x and y of each goal in order, -1 once reached. With fewer than ``max_goals`` goals the first
      rows are -1;
    - "achieved" ``(2,)``: x and y of the agent, in the form of a goal, for `amago.data.relabel.GoalSequenceRelabeler`.

    Reward: 1 in a step that reaches a goal, else 0.

    Metrics at the end of a rollout: ``Goals Reached`` (a fraction of k) and ``Success`` (1 if all were reached).

    Args:
        size: side length in cells, outer walls included; odd, at least 5.
        min_goals, max_goals: bounds of the number of goals per rollout.
        time_limit: maximum steps per rollout; the default is ``2 * size**2``.
        randomize_actions: whether a uniform permutation of the five actions is drawn for each rollout.
        loop_chance: probability of each further door that would create a loop. With 0 exactly one path joins any two cells.
        render_mode: None, "ansi" (text) or "rgb_array" (uint8, 24 pixels per cell); x points right, y down.

    Attributes:
        horizon: ``time_limit``.

    Raises:
        TypeError, ValueError: an argument has the wrong type or is out of range.
    """

    metadata = {"render_modes": ["ansi", "rgb_array"], "render_fps": 8}

    def __init__(
        self,
        size: int = 15,
        min_goals: int = 1,
        max_goals: int = 3,
        time_limit: int | None = None,
        randomize_actions: bool = False,
        loop_chance: float = 0.0,
        render_mode: str | None = None,
    ) -> None:
        self.size = common.check_int("size", size, 5)
        if self.size % 2 == 0:
            raise ValueError(f"size must be odd, so that walls lie between rooms, got {size!r}")
        self.min_goals = common.check_int("min_goals", min_goals, 1)
        self.max_goals = common.check_int("max_goals", max_goals, 1)
        if self.min_goals > self.max_goals:
            raise ValueError(f"min_goals must be at most max_goals={max_goals!r}, got {min_goals!r}")
        cells = 2 * (self.size // 2) ** 2 - 1  # n rooms, joined by n - 1 doors
        if self.max_goals > cells - 1:
            raise ValueError(f"max_goals must be at most {cells - 1} in a maze of size {self.size}, got {max_goals!r}")
        self.time_limit = 2 * self.size**2 if time_limit is None else common.check_int("time_limit", time_limit, 1)
        self.horizon = self.time_limit
        self.randomize_actions = common.check_bool("randomize_actions", randomize_actions)
        self.loop_chance = common.check_fraction("loop_chance", loop_chance)
        self.render_mode = common.check_render_mode(render_mode, self.metadata["render_modes"])

        box = gym.spaces.Box
        self.observation_space = gym.spaces.Dict(
            {
                "observation": box(0.0, 1.0, (7,), np.float32),
                "goals": box(DONE, 1.0, (self.max_goals, 2), np.float32),
                "achieved": box(0.0, 1.0, (2,), np.float32),
            }
        )
        self.action_space = gym.spaces.Discrete(5)
        self._moves: list[Cell] = list(_MOVES)
        self._free: Grid = np.zeros((self.size, self.size), dtype=bool)
        self._views: dict[Cell, tuple[float, ...]] = {}
        self._goals: list[Cell] = []
        self._goal_rows = np.full((self.max_goals, 2), DONE, dtype=np.float32)
        self._at: Cell = (0, 0)
        self._reached = 0
        self._clock = self.time_limit

    @property
    def maze(self) -> Grid:
        """A copy of this rollout's maze, (size, size) bool indexed [x, y]: True where free."""
        return self._free.copy()

    @property
    def goals(self) -> list[Cell]:
        """All goals of this rollout in order, including those already reached."""
        return list(self._goals)

    @property
    def position(self) -> Cell:
        """The agent's cell ``(x, y)``."""
        return self._at

    @property
    def action_order(self) -> tuple[int, ...]:
        """For each action of this rollout, the action with the same effect without ``randomize_actions``."""
        return tuple(_MOVES.index(move) for move in self._moves)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Observation, dict[str, Any]]:
        super().reset(seed=seed)
        rng = self.np_random
        self._free = random_maze(rng, self.size, self.loop_chance)
        xs, ys = np.nonzero(self._free)
        seen = depths(self._free)[xs, ys]
        own = np.stack((xs, ys), axis=-1)
        views = (np.concatenate((own, seen), axis=-1) / self.size).tolist()
        cells = list(zip(xs.tolist(), ys.tolist()))
        self._views = dict(zip(cells, map(tuple, views)))
        k = int(rng.integers(self.min_goals, self.max_goals + 1))
        self._at, *self._goals = (cells[i] for i in rng.permutation(len(cells))[: 1 + k])
        self._goal_rows = np.full((self.max_goals, 2), DONE, dtype=np.float32)
        self._goal_rows[self.max_goals - k :] = [self._views[goal][:2] for goal in self._goals]
        self._moves = [_MOVES[i] for i in rng.permutation(5)] if self.randomize_actions else list(_MOVES)
        self._clock = self._reached = 0
        return self._observe(), {}

    def step(self, action: Any) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        if self._clock >= self.time_limit or self._reached == len(self._goals):
            common.refuse_step("MazeRunner")
        dx, dy = self._moves[common.check_action(action, 5)]
        target = (self._at[0] + dx, self._at[1] + dy)
        if target in self._views:
            self._at = target
        self._clock += 1
        reward, k = 0.0, len(self._goals)
        if self._at == self._goals[self._reached]:
            self._goal_rows[self.max_goals - k + self._reached] = DONE
            self._reached += 1
            reward = 1.0
        info: dict[str, Any] = {}
        terminated = self._reached == k or self._clock >= self.time_limit
        if terminated:
            info[f"{AMAGO_ENV_LOG_PREFIX} Goals Reached"] = self._reached / k
            info[f"{AMAGO_ENV_LOG_PREFIX} Success"] = float(self._reached == k)
        return self._observe(), reward, terminated, False, info

    def _observe(self) -> Observation:
        own = np.array((*self._views[self._at], self._clock / self.time_limit), dtype=np.float32)
        return {"observation": own, "goals": self._goal_rows.copy(), "achieved": own[:2].copy()}

    def render(self) -> Any:
        """The maze as an image or as text, according to ``render_mode``: # wall, A agent, remaining goals numbered from 1."""
        return drawing.render(self.render_mode, self._text, self._draw)

    def _text(self) -> str:
        rows = [["." if free else "#" for free in column] for column in self._free.T]
        for i, (x, y) in reversed(list(enumerate(self._goals[self._reached :], start=1))):
            rows[y][x] = str(i) if i < 10 else "+"
        rows[self._at[1]][self._at[0]] = "A"
        place = f"step {self._clock} of {self.time_limit}, {self._reached} of {len(self._goals)} goals reached"
        return "\n".join([*("".join(row) for row in rows), place])

    def _draw(self) -> NDArray[np.uint8]:
        frame = drawing.blank_grid(self.size, drawing.WHITE)
        for x, y in np.argwhere(~self._free).tolist():
            drawing.paint(frame, (x, y), drawing.GREY)
        for i, goal in reversed(list(enumerate(self._goals[self._reached :]))):
            drawing.paint(frame, goal, drawing.GOLD if i else drawing.GREEN, inset=3)
        drawing.paint(frame, self._at, drawing.RED, inset=5, round_=True)
        return frame
