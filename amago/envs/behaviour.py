"""The probability with which policy and exploration together choose an action.

Probabilities of an action have the layout of its vector: a discrete part has that of each choice, a part of bits that of each bit being 1.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from amago.envs.legal import legal_probabilities
from amago.spaces import ActionSpec

if TYPE_CHECKING:
    from amago.envs.exploration import ExplorationWrapper

Array = NDArray[Any]
_TINY = float(np.finfo(np.float32).tiny)


class BehaviourLog:
    """Computes the field `amago.data.extras.BEHAVIOUR_LOG_PROB` of B rows, step by step.

    Args:
        given: (B, 1 + A) array into which the policy writes, before each step, the log-probability of its action and the probabilities of
            all.
        exploration: changes the policy's actions; None: they are taken as they are.

    Attributes:
        log_prob: (B,) of the actions of the last step.

    """

    def __init__(self, given: Array, exploration: ExplorationWrapper | None):
        self._given = given
        self.log_prob = given[:, 0]
        if exploration is not None:
            self.log_prob = np.zeros(len(given), given.dtype)
            exploration.behaviour = self

    def explored(self, exploration: ExplorationWrapper, action: Array, mask: Array | None) -> Array:
        """What the wrapper makes of the policy's ``action``, whose log-probability is put down.

        Args:
            mask: of legal actions, (B, ...); None: all are.
        """
        spec = exploration.action_spec
        p = exploration.action_probabilities(self._given[:, 1:].astype(np.float64), exploration.amago_env.step_count)
        if mask is not None:
            p = legal_probabilities(spec, p, mask)
        action = exploration.action(action)
        self.log_prob[:] = log_prob_of(spec, p, action.reshape(len(p), -1))
        return action


def check_known(exploration: ExplorationWrapper) -> None:
    """Raise ValueError unless the wrapper can say how likely each action is after its noise."""
    kind, field = type(exploration), "extra field 'behaviour_log_prob'"
    if any(part.kind == "continuous" for part in exploration.action_spec.parts):
        raise ValueError(
            f"{field}: {kind.__name__} adds noise to actions of {exploration.action_spec.space}, whose density then has no closed form. "
            "Use exploration_wrapper_type=None, so that the policy's own samples explore, or Agent.targets='peng', which needs no "
            "probabilities"
        )
    known = [i for i, c in enumerate(kind.__mro__) if "action_probabilities" in vars(c)][:-1]  # the last one refuses
    changed = min(i for i, c in enumerate(kind.__mro__) if "add_exploration_noise" in vars(c) or "action" in vars(c))
    if not known or known[0] > changed:  # a subclass with another noise than the class that knows the probabilities
        raise ValueError(
            f"{field}: {kind.__name__} does not say how likely each action is after its noise: override "
            "action_probabilities(probabilities, local_step) beside add_exploration_noise"
        )


def with_random_actions(spec: ActionSpec, probabilities: Array, eps: Array) -> Array:
    """The probabilities (B, A) after independent noise of strength eps (B,): a uniform choice, or a bit flipped, with probability eps."""
    out = probabilities.copy()
    for part in spec.parts:
        out[:, part.vector] = mixed(part.kind, probabilities[:, part.vector], eps[:, None])
    return out


def mixed(kind: str, probabilities: Array, eps: Array) -> Array:
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
