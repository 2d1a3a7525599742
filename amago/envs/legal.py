"""Actions and probabilities under a mask of legal actions (`amago.spaces.ActionMask`)."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from amago.spaces import ActionSpec

Array = NDArray[Any]


def made_legal(spec: ActionSpec, action: Array, mask: Array, rng: np.random.Generator) -> Array:
    """Replace illegal choices by legal ones drawn uniformly, and illegal bits by 0.

    Args:
        spec: of the action space.
        action: (B, S) in stored form.
        mask: (B, ...), the `amago.spaces.ActionMask`: 0 where illegal.
        rng: draws the replacements.

    Returns:
        (B, S) a copy.
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
    """The probabilities (B, A) after illegal choices were replaced by legal ones drawn uniformly, and illegal bits by 0.

    Args:
        mask: (B, ...), 0 where illegal. Where it allows nothing, choices stay.
    """
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
