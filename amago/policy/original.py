"""Weights that the original system trained, under the names that this one gives them."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from amago.run.checkpoint import CheckpointError

WRAPPERS = ("module.", "_orig_mod.")
"""Prefixes that distributed training and torch.compile put before every name."""
DERIVED = ("maximized_critics.",)
"""Copies of ``critics``, kept there to take a gradient to actions; here the critics themselves are held out of the graph."""


def adapt_weights(weights: Mapping[str, Tensor], agent: nn.Module) -> dict[str, Tensor]:
    """The part of a state dict that an agent of the same sizes has, by our names; for `amago.run.weights.load_into`.

    Parameters have the same names and layouts in both systems. What differs: wrappers' prefixes, and copies of the critics that we
    do not keep. Weights of our own come back as they are.

    Args:
        weights: parameter name -> tensor.
        agent: what they are meant for.

    Raises:
        CheckpointError: wrappers or copies show that the weights are foreign, and some name or shape does not fit; all are listed.
    """
    plain = {_unwrapped(name): w for name, w in weights.items()}
    if len(plain) != len(weights):
        raise CheckpointError(f"some names are there twice, with and without one of the prefixes {', '.join(WRAPPERS)}")
    own = agent.state_dict()
    adapted = {name: w for name, w in plain.items() if name in own or not name.startswith(DERIVED)}
    if adapted.keys() == weights.keys():
        return adapted
    problems = [f"the agent has no {name} {tuple(w.shape)}" for name, w in adapted.items() if name not in own]
    problems += [f"the weights lack {name} {tuple(w.shape)}" for name, w in own.items() if name not in adapted]
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
