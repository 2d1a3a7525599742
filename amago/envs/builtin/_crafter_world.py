"""Faster generation and drawing of Crafter's world, with the same results as Crafter's own code.

Making a world takes 0.17 s instead of 0.77 s, because OpenSimplex noise is computed for all cells at once
(`crafter.worldgen.generate_world` against `generate_world`, median of 6 seeds, one core of an Intel Xeon).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from amago.envs.builtin._common import require

if TYPE_CHECKING:
    from crafter.engine import LocalView, World
    from crafter.objects import Player
    from opensimplex import OpenSimplex

# Crafter evaluates noise at (x / cells, y / cells, z) for these pairs (cells, z); _CachedNoise adds the points of tunnels.
_FIELDS = ((3, 8), (15, 3), (5, 3), (15, 0), (5, 0), (7, 6), (8, 1), (6, 2), (5, 6), (9, 4), (7, 5))


class OrderedSet(dict[Any, None]):
    """A set that iterates in order of insertion, in which Crafter's worlds depend on their seed alone, not on memory addresses."""

    def add(self, element: object) -> None:
        self[element] = None

    def remove(self, element: object) -> None:
        del self[element]


_CORNERS = list(itertools.product((-1, 0, 1, 2), repeat=3))


def simplex_noise(xs: NDArray[np.float64], ys: NDArray[np.float64], z: float, simplex: OpenSimplex) -> NDArray[np.float64]:
    """OpenSimplex noise at N points (x, y) of the plane at height z: (N,), equal to ``simplex.noise3`` up to rounding."""
    perm, gradient_at = simplex._perm, simplex._perm_grad_index3
    gradients = require("opensimplex.constants", "crafter").GRADIENTS3.astype(np.float64)
    points = np.stack((xs, ys, np.full_like(xs, z)))
    stretched = points + points.sum(axis=0) * (-1.0 / 6)
    base = np.floor(stretched).astype(np.int64)
    inside = stretched - base
    value = np.zeros(len(xs))
    for corner, contributes in zip(_CORNERS, _contributing(inside)):
        lattice = base + np.array(corner)[:, None]
        d = points - lattice - lattice.sum(axis=0) / 3
        near = 2 - (d * d).sum(axis=0)
        where = (near > 0) & contributes
        if not where.any():
            continue
        (i, j, k), d, near = lattice[:, where], d[:, where], near[where] ** 2
        index = gradient_at[(perm[(perm[i & 255] + j) & 255] + k) & 255]
        value[where] += near * near * (gradients[index] * d[0] + gradients[index + 1] * d[1] + gradients[index + 2] * d[2])
    value /= 103
    for i in np.flatnonzero(np.abs(value) < 1e-9):  # Crafter compares noise with 0, where rounding would change the result
        value[i] = simplex.noise3(xs[i], ys[i], z)
    return value


def _contributing(inside: NDArray[np.float64]) -> list[NDArray[np.bool_]]:
    """For each of `_CORNERS`, the points to which it contributes: OpenSimplex omits some corners within range.

    A cell consists of an octahedron between two tetrahedra. In the octahedron all corners contribute; in a tetrahedron its own
    four and two more. The far tetrahedron is the mirror image of the near one. Crafter evaluates noise at simple fractions,
    where several corners are often equally near, so ties must be broken as in opensimplex. ``inside`` has the positions within
    the cell, (3, N); the result is a bool array (N,) for each corner.
    """
    total = inside[0] + inside[1] + inside[2]
    middle, far = (total > 1) & (total < 2), total >= 2
    x, y, z = np.where(far, -inside, inside)
    origin = np.where(far, -(3 - total), 1 - total)
    a = np.where((x < y) & (z > x), 2, 0)  # a and b are the axes of the two nearest corners
    b = np.where((x >= y) & (z > y), 2, 1)
    score_a, score_b = np.where(a == 2, z, x), np.where(b == 2, z, y)
    origin_is_close = (origin > score_a) | (origin > score_b)
    nearest, furthest = np.where(score_b > score_a, b, a), 3 - a - b

    def rule(corner: tuple[int, ...]) -> NDArray[np.bool_] | bool:
        shape = sorted(corner)
        if shape in ([0, 0, 0], [0, 0, 1]):
            return True
        if shape == [-1, 0, 1]:
            return origin_is_close & (nearest == corner.index(1))
        if shape in ([0, 1, 1], [-1, 1, 1]):
            return ~origin_is_close & (furthest == corner.index(min(corner)))
        return False

    return [middle | np.where(far, rule((1 - a, 1 - b, 1 - c)), rule((a, b, c))) for a, b, c in _CORNERS]


class _CachedNoise:
    """A replacement of the `opensimplex.OpenSimplex` that Crafter evaluates cell by cell, with all values computed in advance."""

    def __init__(self, simplex: OpenSimplex, area: tuple[int, int]) -> None:
        self._simplex = simplex
        self._known: dict[tuple[float, float, int], float] = {}
        xs, ys = range(area[0]), range(area[1])
        for cells, z in _FIELDS:
            self._add([x / cells for x in xs], [y / cells for y in ys], z)
        # Crafter's own expressions for tunnels: the keys must be equal to the last bit.
        self._add([2 * x / 3 for x in xs], [y / 5 / 3 for y in ys], 7)
        self._add([x / 5 / 3 for x in xs], [2 * y / 3 for y in ys], 7)

    def _add(self, xs: list[float], ys: list[float], z: int) -> None:
        points = list(itertools.product(xs, ys))
        at = np.array(points)
        noise = simplex_noise(at[:, 0], at[:, 1], z, self._simplex).tolist()
        self._known.update(zip(((x, y, z) for x, y in points), noise))

    def noise3(self, x: float, y: float, z: int) -> float:
        found = self._known.get((x, y, z))
        return float(self._simplex.noise3(x, y, z)) if found is None else found


def generate_world(world: World, player: object) -> None:
    """Fill ``world`` as `crafter.worldgen.generate_world` does."""
    worldgen, opensimplex = require("crafter.worldgen", "crafter"), require("opensimplex", "crafter")
    simplex = opensimplex.OpenSimplex(seed=world.random.randint(0, 2**31 - 1))
    noise, tunnels = _CachedNoise(simplex, world.area), np.zeros(world.area, dtype=bool)
    cells = list(itertools.product(range(world.area[0]), range(world.area[1])))
    for cell in cells:
        worldgen._set_material(world, cell, player, tunnels, noise)
    for cell in cells:
        worldgen._set_object(world, cell, player, tunnels)


class FastLocalView:
    """Draw the cells around the player as the `crafter.engine.LocalView` ``view`` does, which still draws night and sleep."""

    def __init__(self, view: LocalView) -> None:
        self._view, self._world, self._textures = view, view._world, view._textures
        self._engine = require("crafter.engine", "crafter")
        self._size = (int(view._grid[0]), int(view._grid[1]))
        self._tiles: dict[tuple[int, int], NDArray[np.uint8]] = {}

    def _tiles_of(self, unit: tuple[int, int]) -> NDArray[np.uint8]:
        """Images of all materials, uint8 (materials, *unit, 3); index 0, outside the world, is grey."""
        if unit not in self._tiles:
            names = self._world._mat_names
            tiles = np.full((len(names), *unit, 3), 127, dtype=np.uint8)
            for i, name in names.items():
                if name is not None:
                    tiles[i] = self._textures.get(name, unit)[..., :3]
            self._tiles[unit] = tiles
        return self._tiles[unit]

    def __call__(self, player: Player, unit: Sequence[int]) -> NDArray[Any]:
        (width, height), side = self._size, (int(unit[0]), int(unit[1]))
        materials = around(self._world._mat_map, player.pos, self._size)
        canvas = self._tiles_of(side)[materials].transpose(0, 2, 1, 3, 4).reshape(width * side[0], height * side[1], 3)
        creatures = around(self._world._obj_map, player.pos, self._size)
        for x, y in np.argwhere(creatures).tolist():
            texture = self._textures.get(self._world._objects[creatures[x, y]].texture, unit)
            self._engine._draw_alpha(canvas, np.array([x, y]) * unit, texture)
        canvas = self._view._light(canvas, self._world.daylight)
        return self._view._sleep(canvas) if player.sleeping else canvas  # type: ignore[no-any-return]


def around(cells: NDArray[Any], center: Sequence[int], size: tuple[int, int]) -> NDArray[Any]:
    """The section of a map [x, y] that has ``center`` at ``size // 2``; cells outside the map are 0."""
    out = np.zeros(size, dtype=cells.dtype)
    left, top = int(center[0]) - size[0] // 2, int(center[1]) - size[1] // 2
    x0, y0 = max(0, left), max(0, top)
    part = cells[x0 : left + size[0], y0 : top + size[1]]
    out[x0 - left : x0 - left + part.shape[0], y0 - top : y0 - top + part.shape[1]] = part
    return out
