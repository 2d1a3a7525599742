"""A recall task that needs no extra package: name the suit of the card shown four steps ago."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
from numpy.typing import NDArray

SUITS, DECK = 4, 52


class RepeatPrevious(gym.Env[NDArray[np.float32], np.int64]):
    """Name the suit of the card dealt ``k`` cards before the present one, from a deck of 52 cards.

    After POPGym's game of that name (Morad et al. 2023, arXiv:2303.01859).

    Reward: 1 / (DECK - k) for a correct answer and minus that for a wrong one, from the first due answer on. The maximum return
    is 1, and the expected return of guessing -0.5.

    Observation, float32 ``(5,)``: the suit of the present card (one-hot) and the fraction of the deck dealt so far.

    Actions, ``Discrete(4)``: the suits.

    Args:
        k: distance in cards.

    Raises:
        ValueError: ``k`` is out of range.
    """

    def __init__(self, k: int = 4) -> None:
        if not 1 <= k < DECK:
            raise ValueError(f"k must lie in [1, {DECK - 1}], got {k}")
        self.k, self.horizon = k, DECK - 1
        self.observation_space = gym.spaces.Box(0.0, 1.0, (SUITS + 1,), np.float32)
        self.action_space = gym.spaces.Discrete(SUITS)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self._suits = self.np_random.permutation(DECK) % SUITS
        self._dealt = 0
        return self._observe(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        reward, due = 0.0, self._dealt - self.k  # the card whose suit is asked for
        if due >= 0:
            reward = (1.0 if int(action) == self._suits[due] else -1.0) / (self.horizon - self.k)
        self._dealt += 1
        return self._observe(), reward, self._dealt == self.horizon, False, {}

    def _observe(self) -> NDArray[np.float32]:
        out = np.zeros(SUITS + 1, np.float32)
        out[self._suits[self._dealt]] = 1.0
        out[SUITS] = self._dealt / DECK
        return out
