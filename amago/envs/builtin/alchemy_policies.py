"""Two yardsticks for symbolic Alchemy: one that knows everything, one that learns nothing (arXiv:2102.02926)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np

from amago.envs.builtin.alchemy import CAULDRON, SymbolicAlchemy, action_for
from amago.envs.builtin.alchemy_chemistry import CORNERS, GOAL, VALUES, Table, colour_meanings, graphs

Path = tuple[int, ...]
"""Potions (2 * bit + set), in the order in which a stone is dipped into them."""


class AlchemyOracle:
    """Earns the most that the stones and potions of each trial allow. It sees the chemistry, and needs no experiments."""

    def __init__(self) -> None:
        self._plan: list[int] = []

    def act(self, env: SymbolicAlchemy) -> int:
        """The next action; call it for every step of a rollout. A plan is made at the first step of each trial."""
        if env.steps_left == env.steps_per_trial:
            self._plan = best_plan(env)[1]
        return self._plan.pop(0) if self._plan else 0


class AlchemyRandomHeuristic:
    """Dips random stones into random potions, and pays in what is worth 15; what is worth 1 when the potions are used up.

    It needs no memory and no knowledge of the chemistry, only the worth of the stones in front of it.
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
    """The highest return that is left in this trial, and actions that earn it (exact: every useful way is tried)."""
    meaning = colour_meanings()[env.chemistry.meaning]
    have: list[list[int]] = [[] for _ in range(6)]  # places of the unused potions, by what they do
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
    """The best choice of one way for each stone (None: leave it), with so many potions of each kind and so many steps."""
    if not ways:
        return 0, ()
    rest = ways[1:]
    best, chosen = _best(rest, have, steps)
    chosen = (None, *chosen)
    most = sum(way[0][0] if way else 0 for way in rest)
    for value, path in ways[0]:
        if value + most <= best:
            break  # the ways are sorted by what they earn
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
    """``(value, path)`` of every way for a stone to become worth something, without those that need more to earn no more.

    Sorted by value, highest first, then by length.
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
    """Note every path without a circle that ends where a stone is worth something, by the potions it takes."""
    if VALUES[corner] > 0:
        found.setdefault(tuple(path.count(potion) for potion in range(6)), (VALUES[corner], path))
    if len(seen) == CORNERS:
        return
    for potion, after in enumerate(table[corner]):
        if after not in seen:
            _walk(table, after, seen | {after}, (*path, potion), found)
