"""A wrapper of symbolic Alchemy with one-hot observations, and actions that choose potions by colour."""

from __future__ import annotations

from functools import cache
from typing import Any

import gin
import gymnasium as gym
import numpy as np
from numpy.typing import NDArray

from amago.config import NamedArguments
from amago.envs.builtin import _common as common
from amago.envs.builtin.alchemy import CAULDRON, SymbolicAlchemy, action_for
from amago.envs.builtin.alchemy_chemistry import COLOURS, POTIONS, STONES

Observation = dict[str, NDArray[Any]]

Row = NDArray[np.float32]

_TARGETS = 1 + COLOURS
_ACTIONS = 1 + STONES * _TARGETS
_STONE = 3 * 3 + 4 + 1  # three features with three values each, four values of the stone, used
_STOCK = 2 * COLOURS  # whether a colour is available, and how many potions of it
_VALUES = slice(9, 13)  # the one-hot value of a stone
_OUTCOMES = 3  # the value of the stone fell, stayed, rose
_DIP = 1 + COLOURS * _OUTCOMES + 2 * (_STONE - 1)  # whether there was a dip, its colour and outcome, the stone before and after
_ROW, _FIRST_POTION = 5, 5 * STONES  # layout of SymbolicAlchemy's observation


@gin.configurable(module="amago.envs.builtin")
class AlchemyByColour(NamedArguments, gym.Wrapper[Any, Any, Any, Any]):
    """`SymbolicAlchemy` with one-hot observations, and one action for all potions of a colour.

    The information is the same, because potions of one colour are interchangeable. The 36 actions that dip a stone become 18,
    and their effects need not be learned again for each position of a potion.

    Actions, ``Discrete(22)``: 0 does nothing; ``1 + 7 * stone`` puts a stone into the cauldron, ``2 + 7 * stone + colour`` into
    the first unused potion of a colour (0 to 5).

    Observation, a dict:

    - "action_mask", ``MultiBinary(22)``: 1 for action 0 and for actions whose stone and potion are unused; the others do
      nothing. Bind ``ActionMask.key = "action_mask"``: an agent that prefers an action without effect repeats it until the
      trial ends;
    - "observation", float32 ``(99 + steps_per_trial,)`` in [0, 1], the concatenation of
        - 14 numbers for each stone: size, colour and roundness (one-hot, 3 each), value (one-hot of -3, -1, 1, 15), and whether
          it is used (all others are then 0);
        - 2 numbers for each colour: whether there is an unused potion, and the number of unused potions divided by 12, all of
          the former before all of the latter;
        - the number of remaining steps of the trial, one-hot from 1;
        - 45 numbers on the last step, 0 unless it dipped a stone into a potion within this trial: 1; the colour combined with
          whether the stone's value fell, stayed or rose (one-hot, 18); the stone before and after (13 each).

    Args:
        env: a `SymbolicAlchemy` without wrappers.

    Raises:
        TypeError: ``env`` is not a `SymbolicAlchemy`.
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
        return self._observe(np.zeros(_DIP, dtype=np.float32)), info

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
            outcome = 1 + np.sign(now[_VALUES].argmax() - was[_VALUES].argmax())
            dip[0] = dip[1 + _OUTCOMES * (target - 1) + outcome] = 1.0
            dip[1 + _OUTCOMES * COLOURS :] = np.concatenate((was, now))
        return self._observe(dip), float(reward), terminated, truncated, info

    def _observe(self, dip: Row) -> Observation:
        have = np.bincount(1 + _colours(self._raw), minlength=1 + COLOURS)[1:]
        clock = np.zeros(self.alchemy.steps_per_trial)
        if left := self.alchemy.steps_left:
            clock[left - 1] = 1.0
        stones = [_stone(self._raw, i) for i in range(STONES)]
        mask = np.ones(_ACTIONS, dtype=np.int8)
        for i in range(STONES):
            mask[1 + i * _TARGETS : 1 + (i + 1) * _TARGETS] = 0 if _used(self._raw, i) else (True, *(have > 0))
        observation = np.concatenate((*stones, have > 0, have / POTIONS, clock, dip)).astype(np.float32)
        return {"action_mask": mask, "observation": observation}


def _colours(raw: Row) -> NDArray[np.int64]:
    """The colour of each potion, -1 if it is used."""
    value, used = raw[_FIRST_POTION::2], raw[_FIRST_POTION + 1 :: 2]
    return np.where(used > 0, -1, np.rint((value + 1) * (COLOURS - 1) / 2)).astype(np.int64)


def _used(raw: Row, stone: int) -> bool:
    return bool(raw[stone * _ROW + _ROW - 1])


def _stone(raw: Row, stone: int) -> Row:
    return _one_hot_stone(*raw[stone * _ROW : (stone + 1) * _ROW].tolist())


@cache
def _one_hot_stone(size: float, colour: float, roundness: float, value: float, used: float) -> Row:
    row = np.zeros(_STONE, dtype=np.float32)
    if used:
        row[-1] = 1.0
    else:
        for i, look in enumerate((size, colour, roundness)):
            row[3 * i + 1 + round(look)] = 1.0
        row[9 + round((value + 1) * 1.5)] = 1.0
    return row
