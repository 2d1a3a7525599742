"""A meta-learning version of FrozenLake: k attempts at the same unknown lake."""

from __future__ import annotations

from typing import Any

import gin
import gymnasium as gym
import numpy as np
from gymnasium.envs.toy_text.frozen_lake import generate_random_map
from numpy.typing import NDArray

from amago.config import NamedArguments
from amago.envs.builtin import _common as common
from amago.envs.builtin import _drawing as drawing
from amago.envs.metrics import AMAGO_ENV_LOG_PREFIX

Observation = NDArray[np.float32]

_MOVES = ((0, 0), (1, 0), (-1, 0), (0, 1), (0, -1))
_SWAPPED = (_MOVES[0], _MOVES[3], _MOVES[2], _MOVES[1], _MOVES[4])
_NEIGHBOURS = tuple((dx, dy) for dx in (-1, 0, 1) for dy in (-1, 0, 1) if dx or dy)

SWAP_CHANCE = 0.5
NOISE_CHANCE = 0.25
CRACK_CHANCE = 1.0 / 3.0
RECOVER_PENALTY = -0.1


@gin.configurable(module="amago.envs.builtin")
class MetaFrozenLake(NamedArguments, gym.Env[Observation, np.int64]):
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
        render_mode: None, "ansi" (text) or "rgb_array" (uint8, 24 pixels per cell); x points right, y down.

    Attributes:
        horizon: maximum steps per rollout, ``k_episodes * max_episode_steps``.

    Raises:
        TypeError, ValueError: an argument has the wrong type or is out of range.
    """

    metadata = {"render_modes": ["ansi", "rgb_array"], "render_fps": 4}

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

        self._success_keys = [f"{AMAGO_ENV_LOG_PREFIX} Attempt {i} Success" for i in range(self.k_episodes)]
        self._moves: tuple[tuple[int, int], ...] = _MOVES
        self._lake: list[list[bool]] = []
        self._cracked: list[tuple[int, int]] = []
        self._x = self._y = self._steps = self._successes = 0
        self._attempt = self.k_episodes

    @property
    def holes(self) -> NDArray[np.bool_]:
        """The present holes, including those of `hard_mode`, bool (size, size) indexed ``[x, y]``."""
        return np.array(self._lake, dtype=np.bool_).reshape(-1, self.size)

    @property
    def actions_swapped(self) -> bool:
        """Whether actions 1 (x + 1) and 3 (y + 1) are exchanged on this lake."""
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
        self._moves = _SWAPPED if self.hard_mode and rng.random() < SWAP_CHANCE else _MOVES
        self._cracked = []
        self._attempt = self._successes = 0
        self._begin_attempt()
        return self._observe(first=1.0), {}

    def step(self, action: Any) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
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
        info: dict[str, Any] = {self._success_keys[self._attempt]: float(success)}
        self._successes += success
        self._attempt += 1
        if self._attempt == self.k_episodes:
            info[f"{AMAGO_ENV_LOG_PREFIX} Success Rate"] = self._successes / self.k_episodes
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
        """The lake as an image or as text, according to ``render_mode``: A agent, G goal, O hole, "." ice."""
        return drawing.render(self.render_mode, self._text, self._draw)

    def _text(self) -> str:
        last = self.size - 1
        rows = [["O" if self._lake and self._lake[x][y] else "." for x in range(self.size)] for y in range(self.size)]
        rows[last][last] = "G"
        rows[self._y][self._x] = "A"
        lines = [" ".join(row) for row in rows]
        lines.append(f"attempt {min(self._attempt + 1, self.k_episodes)} of {self.k_episodes}, step {self._steps}")
        return "\n".join(lines)

    def _draw(self) -> NDArray[np.uint8]:
        frame = drawing.blank_grid(self.size, drawing.ICE)
        for x, column in enumerate(self._lake):
            for y, hole in enumerate(column):
                if hole:
                    drawing.paint(frame, (x, y), drawing.WATER)
        drawing.paint(frame, (self.size - 1, self.size - 1), drawing.GREEN)
        drawing.paint(frame, (self._x, self._y), drawing.RED, inset=5, round_=True)
        return frame
