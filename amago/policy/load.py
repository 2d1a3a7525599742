"""`load_policy`: from a file or a run's directory to a policy that acts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from amago.policy.acting import Policy
from amago.policy.discount import choose_discount
from amago.policy.files import copy_weights, read_policy_file
from amago.policy.spec import build_agent


def load_policy(
    path: str | Path,
    device: torch.device | str = "cpu",
    num_envs: int | None = None,
    sample: bool = True,
    modules: Sequence[str] = (),
    gamma: float | None = None,
    weights: str | Path | None = None,
) -> Policy:
    """Load a trained agent, without its environment, gin settings or loggers.

    Args:
        path: a file of weights, such as a ``policy.pt`` or ``policy.safetensors`` that was copied from elsewhere or one of a run's
            ``ckpts/policy_weights``; a run directory (its latest weights), a training state, or a directory that holds one such file. What
            the policy is made of is read from the ``policy.json`` of a run directory; of a file, from the file itself, or, if it holds
            weights alone, from the ``policy.json`` of its run.
        device: where the networks compute.
        num_envs: number of environments side by side; None: one, without a batch dimension.
        sample: whether to draw actions from the policy; False takes its mode.
        modules: names of your own packages that the agent's classes come from. They may be imported; others may not.
        gamma: the discount whose policy acts, one of those that the agent was trained for; None: that with which the policy was saved
            (`Policy.save`), or that of its rollouts.
        weights: a file of weights for the agent that ``path`` describes, such as one of the original system; None: those of ``path``.

    Raises:
        CheckpointError: there is no such policy, or its weights are damaged or do not fit.
        ValueError: a class comes from a module that is neither imported nor allowed, or the agent has no such discount.
    """
    description, loaded, file = read_policy_file(path, weights)
    agent = build_agent(description, modules)
    copy_weights(agent, loaded, file)
    chosen = description.get("gamma") if gamma is None else gamma
    if chosen is not None:
        choose_discount(agent, chosen)
    return Policy(agent, num_envs, sample, device, loaded.version, description)
