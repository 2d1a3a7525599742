"""The optimizer of an agent: groups of parameters, AdamW, the schedule of its learning rates, and their restoration."""

from __future__ import annotations

from typing import Any

import torch
from accelerate.scheduler import AcceleratedScheduler
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from amago.agent import BaseAgent
from amago.run.settings import ExperimentSettings, SettingsError

PARTS = {"actor_learning_rate": "actor", "critic_learning_rate": "critics"}
"""{field of an experiment: the part of the agent with this learning rate}."""
Params = list[nn.Parameter] | list[dict[str, Any]]


def param_groups(agent: BaseAgent, settings: ExperimentSettings) -> Params:
    """The trained parameters of an agent, as an optimizer of torch takes them: a list of parameters where all are treated alike; otherwise
    a list of groups, each with ``params``, ``lr``, ``weight_decay`` and a ``name``, the one with ``learning_rate`` first.

    Raises:
        SettingsError: a rate is set for a part that the agent does not have.
    """
    params, rates = list(agent.trainable_params), rates_of_parts(settings)
    if not rates:
        return params
    groups: dict[str, dict[str, Any]] = {"others": {"name": "others", "lr": float(settings.learning_rate), "params": []}}
    group_of: dict[int, str] = {}
    modules = dict(agent.named_children())
    for name, rate in rates.items():
        part = PARTS[name]
        if part not in modules:
            raise SettingsError(
                f"{name}={rate:g}, but agent_type {type(agent).__name__} has no {part!r} to train with that rate"
            )
        groups[part] = {"name": part, "lr": rate, "params": []}
        group_of |= {id(p): part for p in modules[part].parameters()}
    for p in params:
        groups[group_of.get(id(p), "others")]["params"].append(p)
    return [group | {"weight_decay": float(settings.l2_coeff)} for group in groups.values() if group["params"]]


def rates_of_parts(settings: ExperimentSettings) -> dict[str, float]:
    """The fields of `PARTS` that are set."""
    return {name: float(vars(settings)[name]) for name in PARTS if vars(settings)[name] is not None}


def adamw(params: Params, learning_rate: float, l2_coeff: float) -> Optimizer:
    """AdamW, in its fused form if the device has one, for parameters or for `param_groups`."""
    every = [p for group in params for p in (group["params"] if isinstance(group, dict) else [group])]
    fused = all(p.device.type in ("cpu", "cuda") and p.is_floating_point() for p in every)
    on_gpu = any(p.is_cuda for p in every)
    return torch.optim.AdamW(params, lr=learning_rate, weight_decay=l2_coeff, fused=fused or None, capturable=on_gpu)


def skips_by_itself(optimizer: Optimizer) -> bool:
    """True if an optimizer of parameters on a GPU takes ``found_inf``, with which it skips a step without the host."""
    groups = optimizer.param_groups
    fused = isinstance(optimizer, torch.optim.Adam) and all(group["fused"] for group in groups)
    return fused and all(p.is_cuda for group in groups for p in group["params"])


def lr_factor(step: int, warmup: int, total: int, cooldown: float) -> float:
    """The factor of the learning rate at an update, from 0.

    It rises linearly to 1 over the first ``warmup`` updates and falls linearly towards 0 over the last ``cooldown * total``
    updates (``cooldown`` in [0, 1]); after ``total`` updates it keeps its last value.
    """
    rise = min(1.0, (step + 1) / max(1, warmup))
    last = cooldown * total
    fall = 1.0 if last < 1.0 else min(1.0, max(1.0, total - step) / last)
    return rise * fall


def lr_schedule(optimizer: Optimizer, warmup: int, total: int, cooldown: float) -> LambdaLR:
    """Multiply an optimizer's learning rates by `lr_factor` at each update."""
    return LambdaLR(optimizer, lambda step: lr_factor(step, warmup, total, cooldown))


def names_in(optimizer: Optimizer, agent: nn.Module) -> list[str]:
    """The names of the parameters in the order in which the optimizer's state numbers them; "" for one that is not the agent's."""
    names = {id(p): name for name, p in agent.named_parameters()}
    return [names.get(id(p), "") for group in optimizer.param_groups for p in group["params"]]


def load_optimizer(optimizer: Optimizer, saved: dict[str, Any], before: list[str], agent: nn.Module) -> None:
    """Restore an optimizer's moments, of the same parameters in the same or in other groups; ``before`` names them in the order of
    ``saved``. Rates, weight decay and the like keep their present values."""
    groups, names, state = optimizer.state_dict()["param_groups"], names_in(optimizer, agent), saved["state"]
    if names != before and sorted(names) == sorted(before) and len(set(names)) == len(names):
        place = {name: i for i, name in enumerate(before)}
        state = {i: state[place[name]] for i, name in enumerate(names) if place[name] in state}
    elif len(names) != len(before):
        raise ValueError(f"the optimizer had {len(before)} parameters, and now has {len(names)}")
    optimizer.load_state_dict({**saved, "state": state, "param_groups": groups})


def load_schedule(schedule: Any, saved: dict[str, Any], optimizer: Optimizer) -> None:
    """Restore the place in a schedule; the rates are the present ones."""
    own = schedule.scheduler if isinstance(schedule, AcceleratedScheduler) else schedule
    base = list(own.base_lrs)
    own.load_state_dict({**saved, "base_lrs": base})
    if isinstance(own, LambdaLR):
        for group, rate, factor in zip(optimizer.param_groups, base, own.lr_lambdas):
            group["lr"] = rate * factor(own.last_epoch)
        own._last_lr = [group["lr"] for group in optimizer.param_groups]
