"""The hidden rules of symbolic Alchemy: which potion changes which stone, and how both look (arXiv:2102.02926).

A stone is a corner of a cube, three bits. Its index is ``bit0 + 2 * bit1 + 4 * bit2``, and index 7, all bits set, is worth most.
A potion sets or clears one bit, if the graph has that edge of the cube. Everything is drawn from finite sets, so all of them
are listed here once: 109 graphs, 48 meanings of the colours, 32 ways to look at a cube, 167,424 chemistries in all.
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
"""What the cauldron pays for the stone at each corner."""
GOAL = CORNERS - 1

# potion 2 * i clears bit i of a stone, potion 2 * i + 1 sets it
Table = tuple[tuple[int, ...], ...]
"""``table[corner][potion]``: the corner that follows; a potion without effect leaves it."""


@dataclass(frozen=True)
class Graph:
    """A cube some of whose edges are missing.

    Attributes:
        constraints: for each bit, the (other bit, value) pairs that a stone must have for that bit to change.
        table: what each potion does to a stone at each corner.
    """

    constraints: tuple[tuple[tuple[int, int], ...], ...]
    table: Table

    @property
    def bottlenecks(self) -> int:
        """How many constraints there are, 0 to 3."""
        return sum(map(len, self.constraints))


@cache
def graphs() -> tuple[Graph, ...]:
    """All 109 graphs: each bit's change may ask for values of the other bits, and every corner can be reached from every other."""
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
        new = set(table[todo.pop()]) - seen  # edges work both ways, so reaching all from one corner is enough
        seen |= new
        todo += new
    return seen


@cache
def graphs_by_bottlenecks() -> tuple[tuple[int, ...], ...]:
    """Indices of the graphs with 0, 1, 2 and 3 bottlenecks."""
    return tuple(tuple(i for i, graph in enumerate(graphs()) if graph.bottlenecks == n) for n in range(4))


@cache
def colour_meanings() -> tuple[tuple[int, ...], ...]:
    """All 48 ways from colour to potion: which bit each pair of opposite colours changes, and which of the two sets it."""
    out = []
    for bits in itertools.permutations(range(3)):
        for flips in itertools.product((0, 1), repeat=3):
            out.append(tuple(2 * bits[c // 2] + (c % 2 ^ flips[c // 2]) for c in range(COLOURS)))
    return tuple(out)


@cache
def appearances() -> tuple[NDArray[np.float32], ...]:
    """All 32 looks of the eight corners, (8, 3) float32 each: size, colour and roundness, in {-1, 0, 1}.

    Eight reflections of the cube, times no rotation or one of 45 degrees around one of the three axes. In a rotated cube two
    of the features take three values, and neither of them stands for one bit.
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
    """What stays the same over the trials of one rollout.

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
        """The number of bottlenecks uniform in 0 to 3, then the graph among those with so many; the rest uniform."""
        alike = graphs_by_bottlenecks()[int(rng.integers(4))]
        graph = alike[int(rng.integers(len(alike)))]
        return Chemistry.of(graph, int(rng.integers(len(colour_meanings()))), int(rng.integers(len(appearances()))))
