"""`load_policy`: from a run's directory to a policy that acts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from amago.policy.acting import Policy
from amago.policy.discount import choose_discount
from amago.policy.files import find_run, load_agent_weights, run_directory
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
        path: a run directory (its latest weights), a training state, or a file in ``ckpts/policy_weights``.
        device: where the networks compute.
        num_envs: number of environments side by side; None: one, without a batch dimension.
        sample: whether to draw actions from the policy; False takes its mode.
        modules: names of your own packages that the agent's classes come from. They may be imported; others may not.
        gamma: the discount whose policy acts, one of those that the agent was trained for; None: that of its rollouts.
        weights: a file of weights for the agent that the run describes, such as one of the original system; None: the run's own.

    Raises:
        CheckpointError: there is no such run, or its weights are damaged or do not fit.
        ValueError: a class comes from a module that is neither imported nor allowed, or the agent has no such discount.
    """
    if weights is None:
        run_dir, file = find_run(path)
    else:
        run_dir, file = run_directory(path), Path(weights).expanduser()
    agent = build_agent(run_dir, modules)
    version = load_agent_weights(agent, file)
    if gamma is not None:
        choose_discount(agent, gamma)
    return Policy(agent, num_envs, sample, device, version)
