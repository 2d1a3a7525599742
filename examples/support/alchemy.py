"""Symbolic Alchemy seen by colour, shaped rewards for it, and two reference policies: an oracle and a random heuristic."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import gin
import gymnasium as gym
import numpy as np
from numpy.typing import NDArray

from amago.envs.builtin import _common as common
from amago.envs.builtin.alchemy import (
    CAULDRON,
    COLOURS,
    CORNERS,
    GOAL,
    POTIONS,
    STONES,
    VALUES,
    SymbolicAlchemy,
    Table,
    action_for,
    colour_meanings,
    graphs,
)

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
class AlchemyByColour(gym.Wrapper[Any, Any, Any, Any]):
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

    def step(self, action: object) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
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


_POTENTIALS = (1.0, 3.0, 5.0, 15.0)
"""Approximate final values of stones whose present values are -3, -1, 1 and 15, without knowledge of the chemistry."""


@gin.configurable(module="amago.envs.builtin")
class AlchemyShaping(gym.Wrapper[Any, Any, Any, Any]):
    """Add ``discount * potential(after) - potential(before)`` to each reward (Ng, Harada and Russell 1999, ICML, pages 278 to
    287).

    The game rewards a dip only when the stone goes into the cauldron, several steps later; the shaped reward follows at once.
    The potential is the sum over the unused stones of 1, 3, 5 or 15 for a value of -3, -1, 1 or 15. It is 0 at the first
    observation of a trial and at the end of the rollout. So the return of every rollout *discounted by* ``discount`` is
    unchanged, and so is the optimal policy of an agent with that discount. Undiscounted returns change. The metrics of
    `SymbolicAlchemy` contain the game's rewards.

    Use it for training environments only, and hide rewards from the agent (``FFTstepEncoder.hide_rl2s``), because shaped
    rewards are absent in evaluation.

    Args:
        env: a `SymbolicAlchemy`, with or without wrappers.
        discount: the agent's main ``gamma``, in [0, 1].

    Raises:
        TypeError: ``env`` is not a `SymbolicAlchemy`, or ``discount`` is not a number.
        ValueError: ``discount`` is out of range.
    """

    def __init__(self, env: gym.Env[Any, Any], discount: float) -> None:
        if not isinstance(env.unwrapped, SymbolicAlchemy):
            raise TypeError(f"env must be a SymbolicAlchemy or wrap one, got {env!r}")
        self.discount = common.check_fraction("discount", discount)
        super().__init__(env)
        self.alchemy = env.unwrapped
        self.horizon = self.alchemy.horizon

    def step(self, action: object) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        before = self._potential()
        obs, reward, terminated, truncated, info = self.env.step(action)
        return obs, float(reward) + self.discount * self._potential() - before, terminated, truncated, info

    def _potential(self) -> float:
        if self.alchemy.steps_left in (0, self.alchemy.steps_per_trial):
            return 0.0
        return sum(_POTENTIALS[corner.bit_count()] for corner in self.alchemy.stones if corner is not None)


Path = tuple[int, ...]
"""Potions in the order in which a stone is dipped into them, numbered as in `alchemy_chemistry.Table`."""


class AlchemyOracle:
    """An oracle that reads the chemistry, and earns the highest possible return in each trial."""

    def __init__(self) -> None:
        self._plan: list[int] = []

    def act(self, env: SymbolicAlchemy) -> int:
        """The next action. Call it before every step of a rollout: it plans a whole trial at its first step."""
        if env.steps_left == env.steps_per_trial:
            self._plan = best_plan(env)[1]
        return self._plan.pop(0) if self._plan else 0


class AlchemyRandomHeuristic:
    """A heuristic that dips random stones into random potions. Stones of value 15 go into the cauldron at once, stones of value
    1 at the end.

    It uses the values of the stones of this trial alone: no memory, and no knowledge of the chemistry.
    """

    def __init__(self, seed: int | None = None) -> None:
        self._rng = np.random.default_rng(seed)

    def act(self, env: SymbolicAlchemy) -> int:
        """The next action."""
        stones = [(i, corner) for i, corner in enumerate(env.stones) if corner is not None]
        potions = [i for i, colour in enumerate(env.potions) if colour is not None]
        worth = [i for i, corner in stones if VALUES[corner] > 0]
        best = [i for i, corner in stones if corner == GOAL]
        if best:
            return action_for(best[0], CAULDRON)
        if not potions or env.steps_left <= len(worth):
            return action_for(worth[0], CAULDRON) if worth else 0
        if not stones:
            return 0
        stone = stones[int(self._rng.integers(len(stones)))][0]
        return action_for(stone, 1 + potions[int(self._rng.integers(len(potions)))])


def best_plan(env: SymbolicAlchemy) -> tuple[int, list[int]]:
    """The highest possible return of the rest of this trial, and actions that earn it, by exhaustive search."""
    meaning = colour_meanings()[env.chemistry.meaning]
    have: list[list[int]] = [[] for _ in range(6)]  # positions of the unused potions, by their effect
    for place, colour in enumerate(env.potions):
        if colour is not None:
            have[meaning[colour]].append(place)
    stones = [(i, corner) for i, corner in enumerate(env.stones) if corner is not None]
    ways = [useful_ways(env.chemistry.graph, corner) for _, corner in stones]
    value, chosen = _best(ways, [len(places) for places in have], env.steps_left)
    plan = []
    for (stone, _), path in zip(stones, chosen):
        if path is not None:
            plan += [action_for(stone, 1 + have[potion].pop()) for potion in path] + [action_for(stone, CAULDRON)]
    return value, plan


def _best(ways: Sequence[Sequence[tuple[int, Path]]], have: Sequence[int], steps: int) -> tuple[int, tuple[Path | None, ...]]:
    """The highest total value, and the path of each stone that earns it (None: the stone stays on the table).

    Args:
        ways: for each stone, its `useful_ways`.
        have: number of unused potions by effect.
        steps: remaining steps of the trial.
    """
    if not ways:
        return 0, ()
    rest = ways[1:]
    best, chosen = _best(rest, have, steps)
    chosen = (None, *chosen)
    most = sum(way[0][0] if way else 0 for way in rest)
    for value, path in ways[0]:
        if value + most <= best:
            break  # ways are sorted by value
        left = list(have)
        for potion in path:
            left[potion] -= 1
        if min(left) < 0 or len(path) + 1 > steps:
            continue
        more, others = _best(rest, left, steps - len(path) - 1)
        if value + more > best:
            best, chosen = value + more, (path, *others)
    return best, chosen


@cache
def useful_ways(graph: int, start: int) -> tuple[tuple[int, Path], ...]:
    """All paths from the corner ``start`` to a positive value, as ``(value, path)``, sorted by decreasing value, then by
    length.

    Paths that need more potions than another path of at least the same value are left out.
    """
    found: dict[tuple[int, ...], tuple[int, Path]] = {}
    _walk(graphs()[graph].table, start, {start}, (), found)
    ordered = sorted(found.items(), key=lambda item: (-item[1][0], len(item[1][1]), item[1][1]))
    kept: list[tuple[tuple[int, ...], tuple[int, Path]]] = []
    for need, way in ordered:
        if not any(all(a <= b for a, b in zip(other, need)) for other, _ in kept):
            kept.append((need, way))
    return tuple(way for _, way in kept)


def _walk(table: Table, corner: int, seen: set[int], path: Path, found: dict[tuple[int, ...], tuple[int, Path]]) -> None:
    """Add to ``found`` every path without loops that ends at a positive value; keys are the numbers of potions by effect."""
    if VALUES[corner] > 0:
        found.setdefault(tuple(path.count(potion) for potion in range(6)), (VALUES[corner], path))
    if len(seen) == CORNERS:
        return
    for potion, after in enumerate(table[corner]):
        if after not in seen:
            _walk(table, after, seen | {after}, (*path, potion), found)
