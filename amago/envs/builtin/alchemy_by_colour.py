"""Symbolic Alchemy as a player would note it down: potions by colour, stones in words, and what the last dip did."""

from __future__ import annotations

from functools import cache
from typing import Any

import gin
import gymnasium as gym
import numpy as np
from numpy.typing import NDArray

from amago.envs.builtin import _common as common
from amago.envs.builtin.alchemy import CAULDRON, SymbolicAlchemy, action_for
from amago.envs.builtin.alchemy_chemistry import COLOURS, POTIONS, STONES

Observation = dict[str, NDArray[Any]]

Row = NDArray[np.float32]

_TARGETS = 1 + COLOURS
_ACTIONS = 1 + STONES * _TARGETS
_STONE = 3 * 3 + 4 + 1  # three looks of three kinds, four worths, used
_STOCK = 2 * COLOURS  # is there one, and how many
_WORTHS = slice(9, 13)  # of a stone
_OUTCOMES = 3  # worth less, as much, more
_DIP = 1 + COLOURS * _OUTCOMES + 2 * (_STONE - 1)  # was there one, into what and with what outcome, the stone before and after
_ROW, _FIRST_POTION = 5, 5 * STONES  # of what SymbolicAlchemy shows


@gin.configurable(module="amago.envs.builtin")
class AlchemyByColour(gym.Wrapper[Any, Any, Any, Any]):
    """`SymbolicAlchemy` with potions of one colour as one heap, and everything one-hot.

    Nothing is shown that the environment hides, and nothing lost: potions of one colour do the same, so that which of them is taken
    never matters. What 36 actions did, 18 do, and what they do need not be learned again for each place of the table.

    Actions, ``Discrete(22)``: 0 does nothing; ``1 + 7 * stone`` puts a stone into the cauldron, ``2 + 7 * stone + colour`` into the
    first unused potion of a colour, 0 to 5.

    Observations are a dict. "action_mask", ``MultiBinary(22)``, has 1 where an action uses something that is there (and for 0): the
    others do nothing. An agent that has made up its mind about one of those repeats it to the end of the trial, so bind
    ``ActionMask.key = "action_mask"``. "observation" is float32 in [0, 1], ``(99 + steps_per_trial,)``. For each stone 14: three
    looks of three kinds each, its worth (-3, -1, 1, 15), and whether it is used (the rest is 0 then). For each colour 2: whether there
    is an unused potion, and how many there are as a share of 12. How many steps of the trial are left, one-hot from 1. The last step,
    if it dipped a stone into a potion and the trial goes on, in 45 (else 0): a 1; one-hot which colour made the stone worth less, as
    much, or more; and 13 each for the stone before and after.

    Args:
        env: a `SymbolicAlchemy`, itself without wrappers.

    Raises:
        TypeError: ``env`` is something else.
    """

    def __init__(self, env: SymbolicAlchemy) -> None:
        if not isinstance(env, SymbolicAlchemy):
            raise TypeError(f"env must be a SymbolicAlchemy without wrappers, got {env!r}")
        super().__init__(env)
        self.alchemy = env
        self.horizon = env.horizon
        size = STONES * _STONE + _STOCK + env.steps_per_trial + _DIP
        self.observation_space = gym.spaces.Dict(
            action_mask=gym.spaces.MultiBinary(_ACTIONS), observation=gym.spaces.Box(0.0, 1.0, (size,), np.float32)
        )
        self.action_space = gym.spaces.Discrete(_ACTIONS)
        self._raw: Row = np.zeros(0, dtype=np.float32)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Observation, dict[str, Any]]:
        self._raw, info = self.alchemy.reset(seed=seed, options=options)
        return self._noted(np.zeros(_DIP, dtype=np.float32)), info

    def step(self, action: Any) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        before, dip = self._raw, np.zeros(_DIP, dtype=np.float32)
        stone, target = divmod(common.check_action(action, _ACTIONS) - 1, _TARGETS)
        potion = None
        if action and target:
            potion = next(iter(np.flatnonzero(_colours(before) == target - 1).tolist()), None)
        raw_action = (
            0 if not action or (target and potion is None) else action_for(stone, CAULDRON if potion is None else 1 + potion)
        )
        self._raw, reward, terminated, truncated, info = self.alchemy.step(raw_action)
        if potion is not None and not _used(before, stone) and 0 < self.alchemy.steps_left < self.alchemy.steps_per_trial:
            was, now = _stone(before, stone)[:-1], _stone(self._raw, stone)[:-1]
            outcome = 1 + np.sign(now[_WORTHS].argmax() - was[_WORTHS].argmax())
            dip[0] = dip[1 + _OUTCOMES * (target - 1) + outcome] = 1.0
            dip[1 + _OUTCOMES * COLOURS :] = np.concatenate((was, now))
        return self._noted(dip), float(reward), terminated, truncated, info

    def _noted(self, dip: Row) -> Observation:
        have = np.bincount(1 + _colours(self._raw), minlength=1 + COLOURS)[1:]
        clock = np.zeros(self.alchemy.steps_per_trial)
        if left := self.alchemy.steps_left:
            clock[left - 1] = 1.0
        stones = [_stone(self._raw, i) for i in range(STONES)]
        mask = np.ones(_ACTIONS, dtype=np.int8)
        for i in range(STONES):
            mask[1 + i * _TARGETS : 1 + (i + 1) * _TARGETS] = 0 if _used(self._raw, i) else (True, *(have > 0))
        noted = np.concatenate((*stones, have > 0, have / POTIONS, clock, dip)).astype(np.float32)
        return {"action_mask": mask, "observation": noted}


def _colours(raw: Row) -> NDArray[np.int64]:
    """The colour of each potion, -1 where it is used."""
    value, used = raw[_FIRST_POTION::2], raw[_FIRST_POTION + 1 :: 2]
    return np.where(used > 0, -1, np.rint((value + 1) * (COLOURS - 1) / 2)).astype(np.int64)


def _used(raw: Row, stone: int) -> bool:
    return bool(raw[stone * _ROW + _ROW - 1])


def _stone(raw: Row, stone: int) -> Row:
    return _in_words(*raw[stone * _ROW : (stone + 1) * _ROW].tolist())


@cache
def _in_words(size: float, colour: float, roundness: float, worth: float, used: float) -> Row:
    row = np.zeros(_STONE, dtype=np.float32)
    if used:
        row[-1] = 1.0
    else:
        for i, look in enumerate((size, colour, roundness)):
            row[3 * i + 1 + round(look)] = 1.0
        row[9 + round((worth + 1) * 1.5)] = 1.0
    return row
