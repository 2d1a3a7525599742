"""Random actions, and the probabilities of actions after noise and under masks of legal actions; no environment is seen here.

Probabilities of an action have the layout of its vector: a discrete part has one for each choice, a part of bits the
probability of each bit being 1.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from amago.spaces import ActionSpec

Array = NDArray[Any]
_TINY = float(np.finfo(np.float32).tiny)


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


def legal_probabilities(spec: ActionSpec, probabilities: Array, mask: Array) -> Array:
    """The probabilities (B, A) after `made_legal`. Where the mask (B, ...) allows nothing, choices stay."""
    legal = (mask != 0).reshape(len(probabilities), spec.dim)
    out = probabilities.copy()
    for part in spec.parts:
        allowed, p = legal[:, part.vector], probabilities[:, part.vector]
        if part.kind == "discrete":
            number = allowed.sum(axis=1, keepdims=True)
            lost = np.where(allowed, 0.0, p).sum(axis=1, keepdims=True)
            replaced = np.where(allowed, p + lost / np.maximum(number, 1), 0.0)
            out[:, part.vector] = np.where(number > 0, replaced, p)
        elif part.kind == "multibinary":
            out[:, part.vector] = np.where(allowed, p, 0.0)
    return out


def with_random_actions(spec: ActionSpec, probabilities: Array, eps: Array) -> Array:
    """The probabilities (B, A) after a uniform choice, or a flip of each bit, with probability eps (B,)."""
    out = probabilities.copy()
    for part in spec.parts:
        out[:, part.vector] = _mixed(part.kind, probabilities[:, part.vector], eps[:, None])
    return out


def _mixed(kind: str, probabilities: Array, eps: Array) -> Array:
    """`with_random_actions` of one part; eps is broadcast."""
    random = 1.0 / probabilities.shape[-1] if kind == "discrete" else 1.0 - probabilities
    return (1.0 - eps) * probabilities + eps * random


def log_prob_of(spec: ActionSpec, probabilities: Array, action: Array) -> NDArray[np.float64]:
    """(B,) log-probabilities of actions (B, S) in stored form, whose parts are choices and bits."""
    total = np.zeros(len(action))
    for part in spec.parts:
        p, taken = probabilities[:, part.vector], action[:, part.stored]
        if part.kind == "discrete":
            chosen = np.take_along_axis(p, taken.astype(np.int64), axis=1)
        else:
            chosen = np.where(taken != 0, p, 1.0 - p)
        total += np.log(np.maximum(chosen, _TINY)).sum(axis=1)
    return total


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
        begins = self._begins(eps)
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

    def _begins(self, eps: NDArray[np.float64]) -> NDArray[np.float64]:
        """(B, 1) the probability that a random choice begins where none is being held."""
        m, e = self.mean_steps[:, None], eps[:, None]
        out: NDArray[np.float64] = np.where(self.new[:, None], e, e / (m - e * (m - 1.0)))
        return out

    def probabilities(self, probabilities: Array, eps: NDArray[np.float64]) -> Array:
        """Probabilities (B, A) of choices and bits after the noise of the next `apply`, from the policy's, given the
        choices that are being held."""
        begins = self._begins(eps)
        held = np.where(self.on & ~self.new[:, None], 1.0 - 1.0 / self.mean_steps[:, None], 0.0)  # (B, S) it goes on
        out = probabilities.copy()
        for part in self.spec.parts:
            p, goes_on = probabilities[:, part.vector], held[:, part.stored]
            if part.kind == "discrete":
                same = self.noise[:, part.stored].astype(np.int64) == np.arange(part.dim)
            else:
                same = 1.0 - p
            out[:, part.vector] = goes_on * same + (1.0 - goes_on) * _mixed(part.kind, p, begins)
        return out
