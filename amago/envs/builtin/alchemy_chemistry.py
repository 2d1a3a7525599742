"""The hidden rules of symbolic Alchemy: the effects of potions, and the appearance of stones and potions (arXiv:2102.02926).

A stone is a corner of a cube, given by three bits. Its index is ``bit0 + 2 * bit1 + 4 * bit2``; index 7 has the highest value.
A potion sets or clears one bit if the graph contains that edge of the cube. There are 109 graphs, 48 assignments of colours to
potions and 32 appearances of the corners: 167,424 chemistries.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

STONES = 3
POTIONS = 12
COLOURS = 6
"""Colours 0 and 1 are opposites, and so are 2 and 3, and 4 and 5, in every chemistry."""
CORNERS = 8
VALUES: tuple[int, ...] = tuple((-3, -1, 1, 15)[corner.bit_count()] for corner in range(CORNERS))
"""The value of the stone at each corner."""
GOAL = CORNERS - 1

Table = tuple[tuple[int, ...], ...]
"""``table[corner][potion]`` is the corner after the potion. Potion 2 * i clears bit i, potion 2 * i + 1 sets it."""


@dataclass(frozen=True)
class Graph:
    """A cube without some of its edges.

    Attributes:
        constraints: for each bit, the (other bit, value) pairs that are necessary for that bit to change.
        table: the effect of each potion on a stone at each corner.
    """

    constraints: tuple[tuple[tuple[int, int], ...], ...]
    table: Table

    @property
    def bottlenecks(self) -> int:
        """The number of constraints, 0 to 3."""
        return sum(map(len, self.constraints))


@cache
def graphs() -> tuple[Graph, ...]:
    """All 109 graphs in which every corner can be reached from every other."""
    choices = []
    for bit in range(3):
        a, b = (other for other in range(3) if other != bit)
        choices.append(
            [
                tuple((other, value) for other, value in ((a, x), (b, y)) if value is not None)
                for x in (None, 0, 1)
                for y in (None, 0, 1)
            ]
        )
    made = (Graph(constraints, _table(constraints)) for constraints in itertools.product(*choices))
    return tuple(graph for graph in made if len(_reachable(graph.table, 0)) == CORNERS)


def _table(constraints: tuple[tuple[tuple[int, int], ...], ...]) -> Table:
    rows = []
    for corner in range(CORNERS):
        row = []
        for bit, needed in enumerate(constraints):
            works = all((corner >> other) & 1 == value for other, value in needed)
            row += [corner & ~(1 << bit), corner | 1 << bit] if works else [corner, corner]
        rows.append(tuple(row))
    return tuple(rows)


def _reachable(table: Table, start: int) -> set[int]:
    seen, todo = {start}, [start]
    while todo:
        new = set(table[todo.pop()]) - seen
        seen |= new
        todo += new
    return seen


@cache
def graphs_by_bottlenecks() -> tuple[tuple[int, ...], ...]:
    """Indices of the graphs with 0, 1, 2 and 3 bottlenecks."""
    return tuple(tuple(i for i, graph in enumerate(graphs()) if graph.bottlenecks == n) for n in range(4))


@cache
def colour_meanings() -> tuple[tuple[int, ...], ...]:
    """All 48 assignments of colours to potions: ``colour_meanings()[i][colour]`` is a potion; opposite colours change the same
    bit."""
    out = []
    for bits in itertools.permutations(range(3)):
        for flips in itertools.product((0, 1), repeat=3):
            out.append(tuple(2 * bits[c // 2] + (c % 2 ^ flips[c // 2]) for c in range(COLOURS)))
    return tuple(out)


@cache
def appearances() -> tuple[NDArray[np.float32], ...]:
    """All 32 appearances of the eight corners, float32 (8, 3) each: size, colour and roundness in {-1, 0, 1}.

    They are the eight reflections of the cube, each without rotation or rotated by 45 degrees around one of three axes. In a
    rotated cube two of the features have three values and do not correspond to single bits.
    """
    corners = np.array([[1 if corner >> bit & 1 else -1 for bit in range(3)] for corner in range(CORNERS)])
    out = []
    for signs in itertools.product((1, -1), repeat=3):
        cube = corners * np.array(signs)
        for axis in (None, 0, 1, 2):
            look = cube.astype(np.float32)
            if axis is not None:
                a, b = (other for other in range(3) if other != axis)
                look[:, a], look[:, b] = (cube[:, a] - cube[:, b]) / 2, (cube[:, a] + cube[:, b]) / 2
            look.flags.writeable = False
            out.append(look)
    return tuple(out)


@dataclass(frozen=True)
class Chemistry:
    """The rules that all trials of a rollout share.

    Attributes:
        graph: index into `graphs`.
        meaning: index into `colour_meanings`.
        appearance: index into `appearances`.
        effects: ``effects[corner][colour]``, the corner after a potion of that colour.
    """

    graph: int
    meaning: int
    appearance: int
    effects: Table

    @staticmethod
    def of(graph: int, meaning: int, appearance: int) -> Chemistry:
        """The chemistry with these three indices."""
        table, potions = graphs()[graph].table, colour_meanings()[meaning]
        effects = tuple(tuple(row[p] for p in potions) for row in table)
        return Chemistry(graph, meaning, appearance, effects)

    @staticmethod
    def random(rng: np.random.Generator) -> Chemistry:
        """A number of bottlenecks uniform in 0 to 3, then a uniform graph with that number; the rest is uniform."""
        alike = graphs_by_bottlenecks()[int(rng.integers(4))]
        graph = alike[int(rng.integers(len(alike)))]
        return Chemistry.of(graph, int(rng.integers(len(colour_meanings()))), int(rng.integers(len(appearances()))))
