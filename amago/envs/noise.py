"""Random actions, and legal ones in place of illegal ones; no environment is seen here."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from amago.spaces import ActionSpec

Array = NDArray[Any]


def made_legal(spec: ActionSpec, action: Array, mask: Array, rng: np.random.Generator) -> Array:
    """Replace illegal choices by legal ones drawn uniformly, and illegal bits by 0.

    Args:
        action: (B, S) in stored form, which is not changed.
        mask: (B, ...), the `amago.spaces.ActionMask`: 0 where illegal.
    """
    legal = (mask != 0).reshape(len(action), spec.dim)
    out = action.copy()
    for part in spec.parts:
        allowed, column = legal[:, part.vector], part.stored.start
        if part.kind == "discrete":
            chosen = np.take_along_axis(allowed, action[:, column, None].astype(np.int64), axis=1)[:, 0]
            for row in np.flatnonzero(~chosen & allowed.any(axis=1)):
                out[row, column] = rng.choice(np.flatnonzero(allowed[row]))
        elif part.kind == "multibinary":
            out[:, part.stored] *= allowed
    return out


def random_part(
    kind: str, dim: int, action: Array, eps: NDArray[np.float64], rng: np.random.Generator, explore: Array | None = None
) -> Array:
    """Add noise of strength eps (B,) to one part of stored actions (B, s).

    ``explore`` (B,) is True where a discrete action becomes random; None: draw it.
    """
    if kind == "discrete":
        drawn = rng.random(len(action)) < eps if explore is None else explore
        return np.where(drawn[:, None], rng.integers(dim, size=(len(action), 1), dtype=np.int64), action)
    if kind == "multibinary":
        flip = rng.random(action.shape) < eps[:, None]
        return np.where(flip, 1 - action, action).astype(action.dtype)
    noisy = action + eps[:, None] * rng.standard_normal(action.shape)
    return np.minimum(np.maximum(noisy, -1.0), 1.0).astype(np.float32)


class HeldNoise:
    """Random actions held for geometrically distributed numbers of steps (temporally extended exploration, Dabney et al. 2021,
    arXiv 2006.01782).

    Args:
        spec: of the action space.
        rows: B.
        low, high: mean length of a choice; if they differ, drawn between them for each rollout, log-uniformly.
    """

    def __init__(self, spec: ActionSpec, rows: int, low: float, high: float):
        self.spec, self.range = spec, np.log([low, high])
        self.mean_steps = np.full(rows, float(low))
        shape = (rows, spec.stored_dim)
        self.new = np.ones(rows, dtype=bool)  # a rollout begins
        self.on = np.zeros(shape, dtype=bool)  # a random choice is being held
        self.noise = np.zeros(shape)

    def apply(self, action: Array, eps: NDArray[np.float64], rng: np.random.Generator) -> Array:
        """The actions (B, S) with noise of strength eps (B,). The share of random choices is eps, whatever their length."""
        if self.range[0] < self.range[1] and self.new.any():
            self.mean_steps = np.where(
                self.new, np.exp(rng.uniform(self.range[0], self.range[1], len(self.new))), self.mean_steps
            )
        m = self.mean_steps[:, None]
        hold = (rng.random(self.on.shape) * m >= 1.0) & ~self.new[:, None]
        e = eps[:, None]
        begins = np.where(self.new[:, None], e, e / (m - e * (m - 1.0)))  # where none is being held
        self.on &= hold
        begin = ~self.on & (rng.random(self.on.shape) < begins)
        self.on |= begin
        self.new[:] = False
        out = action.copy()
        for part in self.spec.parts:
            where = part.stored
            if part.kind == "discrete":
                drawn = rng.integers(part.dim, size=self.noise[:, where].shape)
                self.noise[:, where] = np.where(begin[:, where], drawn, self.noise[:, where])
                out[:, where] = np.where(self.on[:, where], self.noise[:, where], action[:, where])
            elif part.kind == "multibinary":
                out[:, where] = np.where(self.on[:, where], 1 - action[:, where], action[:, where])
            else:
                fresh = rng.standard_normal(self.noise[:, where].shape)
                self.noise[:, where] = np.where(hold[:, where], self.noise[:, where], fresh)
                out[:, where] = np.clip(action[:, where] + eps[:, None] * self.noise[:, where], -1.0, 1.0)
        return out
