"""Noise whose random choices last for several steps."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from amago.envs.behaviour import mixed
from amago.spaces import ActionSpec

Array = NDArray[Any]


class HeldNoise:
    """Random actions whose lengths are geometrically distributed (temporally extended exploration, Dabney et al. 2021, arXiv 2006.01782).

    Args:
        spec: of the action space.
        rows: B.
        mean_steps: mean length of a choice; two numbers: drawn between them for each rollout, log-uniformly.
    """

    def __init__(self, spec: ActionSpec, rows: int, mean_steps: float | tuple[float, float]):
        self.spec = spec
        self.range = mean_steps if isinstance(mean_steps, tuple) else None
        self.mean_steps = np.ones(rows) if isinstance(mean_steps, tuple) else np.full(rows, float(mean_steps))
        shape = (rows, spec.stored_dim)
        self.new = np.ones(rows, dtype=bool)  # a rollout begins
        self.on = np.zeros(shape, dtype=bool)  # a random choice is being held
        self.noise = np.zeros(shape)

    def apply(self, action: Array, eps: NDArray[np.float64], rng: np.random.Generator) -> Array:
        """The actions (B, S) with noise of strength eps (B,). The share of random choices is eps, whatever their length."""
        if self.range is not None and self.new.any():
            low, high = np.log(self.range)
            self.mean_steps = np.where(self.new, np.exp(rng.uniform(low, high, len(self.new))), self.mean_steps)
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
        """Probabilities (B, A) of choices and bits after the noise of the next `apply`, from those of the policy, given what is being
        held."""
        begins = self._begins(eps)
        held = np.where(self.on & ~self.new[:, None], 1.0 - 1.0 / self.mean_steps[:, None], 0.0)  # (B, S) it goes on
        out = probabilities.copy()
        for part in self.spec.parts:
            p, goes_on = probabilities[:, part.vector], held[:, part.stored]
            if part.kind == "discrete":
                same = self.noise[:, part.stored].astype(np.int64) == np.arange(part.dim)
            else:
                same = 1.0 - p
            out[:, part.vector] = goes_on * same + (1.0 - goes_on) * mixed(part.kind, p, begins)
        return out
