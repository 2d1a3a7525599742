"""Two reference policies for symbolic Alchemy: an oracle, and a random heuristic without memory (arXiv:2102.02926)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np

from amago.envs.builtin.alchemy import CAULDRON, SymbolicAlchemy, action_for
from amago.envs.builtin.alchemy_chemistry import CORNERS, GOAL, VALUES, Table, colour_meanings, graphs

Path = tuple[int, ...]
"""Potions in the order in which a stone is dipped into them, numbered as in `alchemy_chemistry.Table`."""


class AlchemyOracle:
    """Knows the chemistry, and earns the highest possible return in each trial."""

    def __init__(self) -> None:
        self._plan: list[int] = []

    def act(self, env: SymbolicAlchemy) -> int:
        """The next action. Call it before every step of a rollout: it plans a whole trial at its first step."""
        if env.steps_left == env.steps_per_trial:
            self._plan = best_plan(env)[1]
        return self._plan.pop(0) if self._plan else 0


class AlchemyRandomHeuristic:
    """Dips random stones into random potions. Stones of value 15 go into the cauldron at once, those of value 1 at the end.

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
