"""State dicts of the original system, renamed for this library."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from amago.run.checkpoint import CheckpointError
from amago.run.weights import without_aliases

WRAPPERS = ("module.", "_orig_mod.")
"""Prefixes that distributed training and torch.compile put before every name."""
DERIVED = ("maximized_critics.",)
"""Copies of ``critics`` without gradients. Here they are second names of the critics' own parameters."""


def adapt_weights(weights: Mapping[str, Tensor], agent: nn.Module) -> dict[str, Tensor]:
    """Rename the entries of a state dict of the original system, for `amago.run.weights.load_into`.

    Parameters have the same names and layouts in both systems. The original adds prefixes of wrappers, and copies of the critics,
    which are dropped where the agent has no names for them. Weights of this library are returned unchanged.

    Args:
        weights: {name of the parameter: tensor}.
        agent: the agent that the weights are for.

    Raises:
        CheckpointError: the weights are of the original system and do not fit the agent; the message lists each name and shape.
    """
    plain = {_unwrapped(name): w for name, w in weights.items()}
    if len(plain) != len(weights):
        raise CheckpointError(f"some names occur twice, with and without one of the prefixes {', '.join(WRAPPERS)}")
    own = agent.state_dict()
    adapted = {name: w for name, w in plain.items() if name in own or not name.startswith(DERIVED)}
    if adapted.keys() == weights.keys():
        return adapted
    problems = [f"the agent has no {name} {tuple(w.shape)}" for name, w in adapted.items() if name not in own]
    problems += [f"the weights lack {name} {tuple(w.shape)}" for name, w in without_aliases(own).items() if name not in adapted]
    problems += [
        f"{name} has shape {tuple(w.shape)}, the agent's has {tuple(own[name].shape)}"
        for name, w in adapted.items()
        if name in own and w.shape != own[name].shape
    ]
    if problems:
        raise CheckpointError(f"these weights do not fit the agent, its encoders and sizes: {'; '.join(problems)}")
    return adapted


def _unwrapped(name: str) -> str:
    while name.startswith(WRAPPERS):
        name = name.removeprefix(next(w for w in WRAPPERS if name.startswith(w)))
    return name
