"""Random mazes on a grid, and the distances to walls that depth sensors would measure in them."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Grid = NDArray[np.bool_]
DIRECTIONS = ((-1, 0), (0, -1), (1, 0), (0, 1))
"""West, north, east, south as (dx, dy); y points down."""


def random_maze(rng: np.random.Generator, size: int, loop_chance: float = 0.0) -> Grid:
    """A random maze: rooms at the cells with odd coordinates, doors between some neighbouring rooms.

    The doors form a uniform spanning tree (Wilson 1996, loop-erased random walks), so that exactly one path joins any two
    cells.

    Args:
        rng: source of all randomness.
        size: side length in cells, outer walls included; odd, at least 5.
        loop_chance: probability of a further door between each pair of neighbouring rooms that the tree does not join.

    Returns:
        (size, size) bool indexed [x, y], True for free cells.
    """
    n = size // 2
    free = np.zeros((size, size), dtype=bool)
    free[1::2, 1::2] = True
    for a, b in spanning_tree(rng, n):
        (ax, ay), (bx, by) = divmod(a, n), divmod(b, n)
        free[1 + ax + bx, 1 + ay + by] = True
    if loop_chance > 0:
        free[2:-1:2, 1::2] |= rng.random((n - 1, n)) < loop_chance
        free[1::2, 2:-1:2] |= rng.random((n, n - 1)) < loop_chance
    return free


def spanning_tree(rng: np.random.Generator, n: int) -> list[tuple[int, int]]:
    """A uniform spanning tree of the n x n grid, as n^2 - 1 pairs of cells; cell (x, y) has the index x * n + y."""
    neighbours = [
        [(x + dx) * n + y + dy for dx, dy in DIRECTIONS if 0 <= x + dx < n and 0 <= y + dy < n]
        for x in range(n)
        for y in range(n)
    ]
    draws: list[float] = []
    in_tree = [False] * (n * n)
    in_tree[int(rng.integers(n * n))] = True
    edges, follows = [], [0] * (n * n)
    for start in range(n * n):
        cell = start
        while not in_tree[cell]:
            if not draws:
                draws = rng.random(4 * n * n).tolist()
            around = neighbours[cell]
            follows[cell] = around[int(draws.pop() * len(around))]  # overwriting at a later visit erases the loop
            cell = follows[cell]
        cell = start
        while not in_tree[cell]:
            in_tree[cell] = True
            edges.append((cell, follows[cell]))
            cell = follows[cell]
    return edges


def depths(free: Grid) -> NDArray[np.int64]:
    """For each cell, the number of consecutive free cells to its west, north, east and south, int64 (size, size, 4).

    Values at walls are undefined. The outermost cells must be walls.
    """
    size = free.shape[0]
    out = np.zeros((size, size, 4), dtype=np.int64)
    for i in range(1, size):
        out[i, :, 0] = np.where(free[i - 1], out[i - 1, :, 0] + 1, 0)
        out[:, i, 1] = np.where(free[:, i - 1], out[:, i - 1, 1] + 1, 0)
        j = size - 1 - i
        out[j, :, 2] = np.where(free[j + 1], out[j + 1, :, 2] + 1, 0)
        out[:, j, 3] = np.where(free[:, j + 1], out[:, j + 1, 3] + 1, 0)
    return out
