"""The groups of parameters that the optimizer treats alike: the parts with a learning rate of their own, and what has no weight decay."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from amago.agent import BaseAgent
from amago.run.checks import SettingsError
from amago.run.settings import ExperimentSettings

RATES = {"actor_learning_rate": "actor", "critic_learning_rate": "critics", "traj_learning_rate": "traj_encoder"}
"""Fields of an experiment, and the part of the agent whose rate each is."""
GROUPING = frozenset({*RATES, "l2_weights_only"})
"""The fields that decide on the groups."""

Params = list[nn.Parameter] | list[dict[str, Any]]


def param_groups(agent: BaseAgent, settings: ExperimentSettings) -> Params:
    """The trained parameters of an agent, as an optimizer of torch takes them.

    Args:
        settings: whose ``l2_weights_only``, ``l2_coeff`` and learning rates count.

    Returns:
        a list of parameters where all are treated alike; otherwise a list of groups, each with ``params``, ``lr``, ``weight_decay`` and a
        ``name``, those with ``learning_rate`` first.

    Raises:
        SettingsError: a rate is set for a part that the agent does not have.
    """
    params = list(agent.trainable_params)
    rates = {part: float(rate) for name, part in RATES.items() if (rate := getattr(settings, name)) is not None}
    if not rates and not settings.l2_weights_only:
        return params
    part_of: dict[int, str] = {}
    for part in rates:
        module = getattr(agent, part, None)
        if not isinstance(module, nn.Module):
            (field,) = (name for name, of in RATES.items() if of == part)
            raise SettingsError(
                f"{field}={rates[part]:g}, but agent_type {type(agent).__name__} has no {part!r} to train with that rate"
            )
        part_of |= {id(p): part for p in module.parameters()}
        if part == "critics" and isinstance(values := getattr(agent, "state_values", None), nn.Module):
            part_of |= {id(p): part for p in values.parameters()}
    plain = without_weight_decay(agent) if settings.l2_weights_only else set()
    groups: dict[str, dict[str, Any]] = {}
    for p in params:
        part = part_of.get(id(p), "")
        decays = id(p) not in plain
        name = f"{part or 'others'}{'' if decays else ' without weight decay'}"
        rate, l2 = rates.get(part, float(settings.learning_rate)), float(settings.l2_coeff) if decays else 0.0
        groups.setdefault(name, {"params": [], "lr": rate, "weight_decay": l2, "name": name})["params"].append(p)
    return sorted(groups.values(), key=lambda group: not group["name"].startswith("others"))  # whose rate is logged


def without_weight_decay(agent: nn.Module) -> set[int]:
    """The ids of the parameters that have no weight decay with ``l2_weights_only``.

    These are vectors and scalars (gains of norms, temperatures), those that are called a bias, and those that a module names in its
    attribute ``no_weight_decay``.
    """
    named = {id(getattr(m, name)) for m in agent.modules() for name in getattr(m, "no_weight_decay", ())}
    found = {id(p) for name, p in agent.named_parameters() if p.ndim < 2 or name.rpartition(".")[2].startswith("bias")}
    return named | found


def ignored_settings(settings: ExperimentSettings, optimizer: torch.optim.Optimizer) -> list[str]:
    """The fields of `GROUPING` that are set, where an optimizer was not built from `param_groups`."""
    wanted = sorted(name for name in GROUPING if getattr(settings, name) not in (None, False))
    return [] if not wanted or any("name" in group for group in optimizer.param_groups) else wanted


def names_in(optimizer: torch.optim.Optimizer, agent: nn.Module) -> list[str]:
    """The names of the parameters in the order in which the optimizer's state numbers them; "" for one that is not the agent's."""
    names = {id(p): name for name, p in agent.named_parameters()}
    return [names.get(id(p), "") for group in optimizer.param_groups for p in group["params"]]


def regrouped(
    saved: dict[str, Any], before: Sequence[str], now: Sequence[str], groups: list[dict[str, Any]]
) -> dict[str, Any] | None:
    """The saved state of an optimizer, for one with the same parameters in other groups.

    Args:
        before, now: `names_in`.
        groups: of the optimizer now, from its ``state_dict()``.

    Returns:
        None if the parameters are not the same.
    """
    if sorted(before) != sorted(now) or len(set(now)) != len(now):
        return None
    was = {name: i for i, name in enumerate(before)}
    state = {i: saved["state"][was[name]] for i, name in enumerate(now) if was[name] in saved["state"]}
    return {**saved, "state": state, "param_groups": groups}
