"""Nim, a game in which the set of legal actions changes with every move."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import gin
import gymnasium as gym
import numpy as np
from numpy.typing import NDArray

from amago.envs.builtin import _common as common
from amago.envs.statistics import AMAGO_ENV_LOG_PREFIX

Observation = dict[str, NDArray[Any]]


@gin.configurable(module="amago.envs.builtin")
class Nim(gym.Env[Observation, np.int64]):
    """Take objects from heaps in turns with an opponent. The player that takes the last object wins.

    A move takes 1 to ``max_take`` objects from one heap, and is legal if the heap has that many. The agent moves first. With
    optimal play (Bouton 1901) the player to move wins unless the XOR of the heap sizes modulo ``max_take + 1`` is 0. A rollout
    is one game; it terminates (never truncates) at the end of the game.

    Actions, ``Discrete(len(heaps) * max_take)``: action ``i * max_take + k`` takes k + 1 objects from heap i.

    Observation, a dict: "heaps", float32 ``(len(heaps),)``, the remaining objects divided by the largest initial size; and
    "action_mask", ``MultiBinary``, the legal actions. Bind ``ActionMask.key = "action_mask"`` for an agent that makes legal
    moves only.

    Reward: 1 for taking the last object, -1 if the opponent takes it, -1 for an illegal move, which ends the game; else 0.

    Metrics at the end of a game: ``Won``, and ``Illegal Move`` (1 if there was one).

    Args:
        heaps: the maximum size of each heap; initial sizes are uniform from 1 to the maximum.
        max_take: maximum number of objects per move.
        opponent_skill: probability that the opponent makes a winning move if there is one; otherwise it makes a random legal
            move.
        raise_if_illegal: raise ValueError for an illegal move instead of ending the game.
        render_mode: None or "ansi".

    Attributes:
        left: remaining objects in each heap, int64 ``(len(heaps),)``.
        illegal_moves: number of illegal moves since the environment was made.

    Raises:
        TypeError, ValueError: an argument or an action has the wrong type or is out of range.
    """

    metadata = {"render_modes": ["ansi"], "render_fps": 1}

    def __init__(
        self,
        heaps: Sequence[int] = (3, 4, 5),
        max_take: int = 3,
        opponent_skill: float = 0.5,
        raise_if_illegal: bool = False,
        render_mode: str | None = None,
    ) -> None:
        sizes = [common.check_int(f"heaps[{i}]", size, 1) for i, size in enumerate(heaps)]
        if not sizes:
            raise ValueError(f"heaps must contain the size of at least one heap, got {heaps!r}")
        self.max_take = common.check_int("max_take", max_take, 1)
        self.opponent_skill = common.check_fraction("opponent_skill", opponent_skill)
        self.raise_if_illegal = common.check_bool("raise_if_illegal", raise_if_illegal)
        self.render_mode = common.check_render_mode(render_mode, self.metadata["render_modes"])
        self._sizes = np.array(sizes, dtype=np.int64)
        self.horizon = int(self._sizes.sum() + 1) // 2
        n = len(sizes) * self.max_take
        self.action_space = gym.spaces.Discrete(n)
        self.observation_space = gym.spaces.Dict(
            action_mask=gym.spaces.MultiBinary(n), heaps=gym.spaces.Box(0.0, 1.0, (len(sizes),), np.float32)
        )
        self.left = np.zeros_like(self._sizes)
        self.illegal_moves = 0

    def legal(self) -> NDArray[np.int8]:
        """The mask of legal actions, int8 ``(len(heaps) * max_take,)``."""
        return (self.left[:, None] > np.arange(self.max_take)).astype(np.int8).reshape(-1)

    def winning(self) -> NDArray[np.int64]:
        """The moves that win with optimal play; empty in a lost position."""
        values = self.left % (self.max_take + 1)
        total = np.bitwise_xor.reduce(values)
        after = (self.left[:, None] - np.arange(1, self.max_take + 1)) % (self.max_take + 1)
        wins = ((total ^ values)[:, None] ^ after) == 0
        return np.flatnonzero(wins.reshape(-1) & self.legal().astype(bool))

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Observation, dict[str, Any]]:
        super().reset(seed=seed)
        self.left = self.np_random.integers(1, self._sizes, endpoint=True)
        return self._observe(), {}

    def step(self, action: object) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        """Make the agent's move, then the opponent's."""
        index = common.check_action(action, int(self.action_space.n))  # type: ignore[attr-defined]
        if not self.left.any():
            common.refuse_step("Nim")
        if not self.legal()[index]:
            self.illegal_moves += 1
            if self.raise_if_illegal:
                raise ValueError(f"action {index} takes {index % self.max_take + 1} objects from a heap of {self._heap(index)}")
            self.left[:] = 0
            return self._ended(-1.0, illegal=True)
        self._take(index)
        if not self.left.any():
            return self._ended(1.0)
        best = self.winning()
        skilled = len(best) and self.np_random.random() < self.opponent_skill
        self._take(int(self.np_random.choice(best if skilled else np.flatnonzero(self.legal()))))
        if not self.left.any():
            return self._ended(-1.0)
        return self._observe(), 0.0, False, False, {}

    def _heap(self, action: int) -> int:
        return int(self.left[action // self.max_take])

    def _take(self, action: int) -> None:
        self.left[action // self.max_take] -= action % self.max_take + 1

    def _ended(self, reward: float, illegal: bool = False) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        info = {f"{AMAGO_ENV_LOG_PREFIX} Won": float(reward > 0), f"{AMAGO_ENV_LOG_PREFIX} Illegal Move": float(illegal)}
        return self._observe(), reward, True, False, info

    def _observe(self) -> Observation:
        return {"action_mask": self.legal(), "heaps": (self.left / self._sizes.max()).astype(np.float32)}

    def render(self) -> Any:
        """One line of text per heap, with ``render_mode="ansi"``."""
        return "\n".join("| " * int(n) or "." for n in self.left) if self.render_mode == "ansi" else None
