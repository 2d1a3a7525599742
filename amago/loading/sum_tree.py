"""A sum tree: draws an index with a probability proportional to its weight (numpy only)."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray


class SumTree:
    """Weights of n indices; drawing one, or changing one, takes O(log n) additions.

    Every inner node is the sum of its two children, computed anew after each change. Therefore the tree is a function of the weights
    alone, not of the order in which they were set: a tree that is rebuilt from saved weights draws what the old one would have drawn.

    Args:
        weights: (n,), finite and at least 0.

    Raises:
        ValueError: a weight is negative or not finite.
    """

    def __init__(self, weights: ArrayLike):
        given = _checked(weights)
        self._size = len(given)
        self._leaves = leaves = 1 << max(0, self._size - 1).bit_length()  # a power of two
        self._nodes = nodes = np.zeros(2 * leaves)  # the root is node 1, the children of node i are 2 i and 2 i + 1
        nodes[leaves : leaves + self._size] = given
        while leaves > 1:
            leaves //= 2
            np.add(nodes[2 * leaves : 4 * leaves : 2], nodes[2 * leaves + 1 : 4 * leaves : 2], out=nodes[leaves : 2 * leaves])

    def __len__(self) -> int:
        return self._size

    @property
    def total(self) -> float:
        """The sum of all weights."""
        return float(self._nodes[1])

    @property
    def weights(self) -> NDArray[np.float64]:
        """(n,), a copy."""
        return self._nodes[self._leaves : self._leaves + self._size].copy()

    def __getitem__(self, index: int) -> float:
        """The weight of an index.

        Raises:
            IndexError: it is not in [0, n).
        """
        if not 0 <= index < self._size:
            raise IndexError(f"index {index} of {self._size} weights")
        return self._nodes.item(self._leaves + index)

    def set(self, indices: ArrayLike, weights: ArrayLike) -> None:
        """Change the weights of some indices; of an index that comes twice, the last weight counts.

        Args:
            indices: (k,), in [0, n).
            weights: (k,), or one for all.

        Raises:
            IndexError, ValueError: an index or a weight is out of range; nothing has changed then.
        """
        rows = np.atleast_1d(np.asarray(indices, np.int64))
        given = np.broadcast_to(_checked(weights), rows.shape)
        if not rows.size:
            return
        if rows.min() < 0 or rows.max() >= self._size:
            raise IndexError(f"indices from {rows.min()} to {rows.max()} of {self._size} weights")
        self._nodes[self._leaves + rows] = given
        changed = np.unique((self._leaves + rows) >> 1)
        while changed[0]:  # the parent of the root is 0
            self._nodes[changed] = self._nodes[2 * changed] + self._nodes[2 * changed + 1]
            changed = np.unique(changed >> 1)

    def find(self, mass: float) -> int:
        """The index i for which the weights before i sum to at most ``mass``, and those up to i to more; never one of weight 0.

        Args:
            mass: from 0 up to `total`.

        Raises:
            ValueError: all weights are 0.
        """
        item: Any = self._nodes.item
        if not item(1) > 0:
            raise ValueError("all weights are 0, so that nothing can be drawn")
        node, leaves = 1, self._leaves
        while node < leaves:
            node *= 2
            left = item(node)
            if mass >= left and item(node + 1) > 0:  # rounding may leave a little mass where nothing is on the right
                mass -= left
                node += 1
        return node - leaves

    def draw(self, rng: np.random.Generator) -> int:
        """A random index, with probability weight / `total`; takes one number of ``rng``.

        Raises:
            ValueError: all weights are 0.
        """
        return self.find(rng.random() * self._nodes.item(1))


def _checked(weights: ArrayLike) -> NDArray[np.float64]:
    given = np.atleast_1d(np.asarray(weights, np.float64))
    wrong = ~(np.isfinite(given) & (given >= 0))
    if wrong.any():
        raise ValueError(f"weights must be finite numbers of at least 0, got {given[wrong][0]}")
    return given
