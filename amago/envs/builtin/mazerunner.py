"""MazeRunner: reach a sequence of goals in an unknown maze (after AMAGO, Grigsby et al. 2023, arXiv:2310.09971)."""

from __future__ import annotations

from typing import Any

import gin
import gymnasium as gym
import numpy as np
from numpy.typing import NDArray

from amago.envs.amago_env import AMAGOEnv
from amago.envs.builtin import _common as common

Grid = NDArray[np.bool_]
DIRECTIONS = ((-1, 0), (0, -1), (1, 0), (0, 1))
"""West, north, east, south as (dx, dy); y points down."""


def random_maze(rng: np.random.Generator, size: int, loop_chance: float = 0.0) -> Grid:
    """A random maze: rooms at the cells with odd coordinates, doors between some neighbouring rooms.

    The doors form a uniform spanning tree (Wilson 1996, loop-erased random walks), so that exactly one path joins any two cells;
    ``loop_chance`` is the probability of a further door between each other pair of neighbours. ``size``, odd and at least 5, is
    the side length in cells, outer walls included.

    Returns:
        (size, size) bool indexed [x, y], True for free cells.
    """
    n = size // 2
    free = np.zeros((size, size), dtype=bool)
    free[1::2, 1::2] = True
    for a, b in spanning_tree(rng, n):
        (ax, ay), (bx, by) = divmod(a, n), divmod(b, n)
        free[1 + ax + bx, 1 + ay + by] = True
    if loop_chance > 0:
        free[2:-1:2, 1::2] |= rng.random((n - 1, n)) < loop_chance
        free[1::2, 2:-1:2] |= rng.random((n, n - 1)) < loop_chance
    return free


def spanning_tree(rng: np.random.Generator, n: int) -> list[tuple[int, int]]:
    """A uniform spanning tree of the n x n grid, as n^2 - 1 pairs of cells; cell (x, y) has the index x * n + y."""
    neighbours = [
        [(x + dx) * n + y + dy for dx, dy in DIRECTIONS if 0 <= x + dx < n and 0 <= y + dy < n]
        for x in range(n)
        for y in range(n)
    ]
    draws: list[float] = []
    in_tree = [False] * (n * n)
    in_tree[int(rng.integers(n * n))] = True
    edges, follows = [], [0] * (n * n)
    for start in range(n * n):
        cell = start
        while not in_tree[cell]:
            if not draws:
                draws = rng.random(4 * n * n).tolist()
            around = neighbours[cell]
            follows[cell] = around[int(draws.pop() * len(around))]  # overwriting at a later visit erases the loop
            cell = follows[cell]
        cell = start
        while not in_tree[cell]:
            in_tree[cell] = True
            edges.append((cell, follows[cell]))
            cell = follows[cell]
    return edges


def depths(free: Grid) -> NDArray[np.int64]:
    """For each cell, the number of consecutive free cells to its west, north, east and south, int64 (size, size, 4).

    Values at walls are undefined. The outermost cells must be walls.
    """
    size = free.shape[0]
    out = np.zeros((size, size, 4), dtype=np.int64)
    for i in range(1, size):
        out[i, :, 0] = np.where(free[i - 1], out[i - 1, :, 0] + 1, 0)
        out[:, i, 1] = np.where(free[:, i - 1], out[:, i - 1, 1] + 1, 0)
        j = size - 1 - i
        out[j, :, 2] = np.where(free[j + 1], out[j + 1, :, 2] + 1, 0)
        out[:, j, 3] = np.where(free[:, j + 1], out[:, j + 1, 3] + 1, 0)
    return out


Cell = tuple[int, int]
Observation = dict[str, NDArray[np.float32]]

DONE = -1.0
"""The value of goals that have been reached, and of unused rows of goals."""
_MOVES: tuple[Cell, ...] = (*DIRECTIONS, (0, 0))


@gin.configurable(module="amago.envs.builtin")
class MazeRunner(gym.Env[Observation, np.int64]):
    """Reach goals in order in a maze that is new in each rollout and observed through depth sensors only.

    Each `reset` draws a maze, and k + 1 different free cells for the start and k goals, k uniform in ``min_goals`` to
    ``max_goals``. Only the next goal of the sequence can be reached. The rollout terminates (never truncates, because the clock
    is observed) with the last goal, or after ``time_limit`` steps.

    Actions, ``Discrete(5)``: 0 west, 1 north, 2 east, 3 south, 4 stay; walls stop the agent.

    Observation, a dict of float32 arrays; positions and distances are divided by ``size``:

    - "observation" ``(7,)``: x and y of the agent; the number of consecutive free cells to its west, north, east and south;
      steps divided by ``time_limit``;
    - "goals" ``(max_goals, 2)``: x and y of each goal in order, -1 once reached. With fewer than ``max_goals`` goals the first
      rows are -1;
    - "achieved" ``(2,)``: x and y of the agent, in the form of a goal, for `amago.relabeling.GoalSequenceRelabeler`.

    Reward: 1 in a step that reaches a goal, else 0.

    Metrics at the end of a rollout: ``Goals Reached`` (a fraction of k) and ``Success`` (1 if all were reached).

    Args:
        size: side length in cells, outer walls included; odd, at least 5.
        min_goals, max_goals: bounds of the number of goals per rollout.
        time_limit: maximum steps per rollout; the default is ``2 * size**2``.
        randomize_actions: whether a uniform permutation of the five actions is drawn for each rollout.
        loop_chance: probability of each further door that would create a loop. With 0 exactly one path joins any two cells.
        render_mode: None or "rgb_array" (uint8, 24 pixels per cell); x points right, y down.

    Attributes:
        position: the agent's cell (x, y).
        goals: all goals of this rollout in order, including those already reached.
    """

    metadata = {"render_modes": ["rgb_array"], "render_fps": 8}

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
        self.goals: list[Cell] = []
        self._goal_rows = np.full((self.max_goals, 2), DONE, dtype=np.float32)
        self.position: Cell = (0, 0)
        self._reached = 0
        self._clock = self.time_limit

    @property
    def maze(self) -> Grid:
        """A copy of this rollout's maze, (size, size) bool indexed [x, y]: True where free."""
        return self._free.copy()

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
        self.position, *self.goals = (cells[i] for i in rng.permutation(len(cells))[: 1 + k])
        self._goal_rows = np.full((self.max_goals, 2), DONE, dtype=np.float32)
        self._goal_rows[self.max_goals - k :] = [self._views[goal][:2] for goal in self.goals]
        self._moves = [_MOVES[i] for i in rng.permutation(5)] if self.randomize_actions else list(_MOVES)
        self._clock = self._reached = 0
        return self._observe(), {}

    def step(self, action: object) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        if self._clock >= self.time_limit or self._reached == len(self.goals):
            common.refuse_step("MazeRunner")
        dx, dy = self._moves[common.check_action(action, 5)]
        target = (self.position[0] + dx, self.position[1] + dy)
        if target in self._views:
            self.position = target
        self._clock += 1
        reward, k = 0.0, len(self.goals)
        if self.position == self.goals[self._reached]:
            self._goal_rows[self.max_goals - k + self._reached] = DONE
            self._reached += 1
            reward = 1.0
        if self._reached < k and self._clock < self.time_limit:
            return self._observe(), reward, False, False, {}
        ended = {"Goals Reached": self._reached / k, "Success": float(self._reached == k)}
        return self._observe(), reward, True, False, common.metrics(ended)

    def _observe(self) -> Observation:
        own = np.array((*self._views[self.position], self._clock / self.time_limit), dtype=np.float32)
        return {"observation": own, "goals": self._goal_rows.copy(), "achieved": own[:2].copy()}

    def render(self) -> Any:
        """The maze: # wall, A agent, remaining goals numbered from 1."""
        return common.render(self.render_mode, self._rows)

    def _rows(self) -> list[str]:
        rows = [["." if free else "#" for free in column] for column in self._free.T]
        for i, (x, y) in reversed(list(enumerate(self.goals[self._reached :], start=1))):
            rows[y][x] = str(i) if i < 10 else "+"
        rows[self.position[1]][self.position[0]] = "A"
        return ["".join(row) for row in rows]


class MazeRunnerGymEnv(MazeRunner):
    """`MazeRunner` with the original's arguments, whose observations are called "obs", "goals" and "achieved"."""

    def __init__(
        self, maze_dim: int = 15, num_goals: int = 3, time_limit: int | None = None, randomized_action_space: bool = False
    ) -> None:
        super().__init__(maze_dim, num_goals, num_goals, time_limit, randomized_action_space)
        assert isinstance(self.observation_space, gym.spaces.Dict)
        spaces = dict(self.observation_space.spaces)
        self.observation_space = gym.spaces.Dict({"obs": spaces.pop("observation"), **spaces})

    def _observe(self) -> Observation:
        seen = super()._observe()
        return {"obs": seen.pop("observation"), **seen}


class MazeRunnerAMAGOEnv(AMAGOEnv):
    """`MazeRunnerGymEnv`, wrapped."""

    def __init__(
        self, maze_dim: int = 15, num_goals: int = 3, time_limit: int | None = None, randomized_action_space: bool = False
    ) -> None:
        env = MazeRunnerGymEnv(maze_dim, num_goals, time_limit, randomized_action_space)
        super().__init__(env, env_name=f"mazerunner_{maze_dim}_{num_goals}")
