"""Policies in files: find, load and write them, and copy their weights, also of the original system, into an agent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from amago.agent import BaseAgent
from amago.policy.acting import SUFFIXES, Policy, choose_discount
from amago.policy.spec import SPEC_FILE, build_agent, checked_spec, read_policy_spec
from amago.run import checkpoint
from amago.run.checkpoint import CheckpointError, WeightFile, load_into, load_weight_file, take_by_itself

_NAMES = ("ckpts/latest/policy.pt", "policy.pt", "policy.safetensors")
"""Places of a policy in a directory, the best place first."""


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
            ``ckpts/policy_weights``; a run directory (its latest weights), a training state, or a directory that holds one such
            file. The description of the policy is read from the ``policy.json`` of a run directory; of a file, from the file
            itself, or, if it holds weights alone, from the ``policy.json`` of its run.
        device: where the networks compute.
        num_envs: number of environments side by side; None: one, without a batch dimension.
        sample: whether to draw actions from the policy; False takes its mode.
        modules: names of your own packages that the agent's classes come from. They may be imported; others may not.
        gamma: the discount whose policy acts, one of those that the agent was trained for; None: the one with which the policy
            was saved (`Policy.save`), or the one of its rollouts.
        weights: a file of weights for the agent that ``path`` describes, such as one of the original system; None: the weights
            of ``path``.

    Raises:
        CheckpointError: there is no such policy, or its weights are damaged or do not fit.
        ValueError: a class comes from a module that is neither imported nor allowed, or the agent has no such discount.
    """
    path = Path(path).expanduser()
    file = find_run(path)[1] if weights is None else Path(weights).expanduser()
    loaded = load_weight_file(file)
    if (path / SPEC_FILE).is_file():
        description = read_policy_spec(path)
    elif weights is None:
        description = _description(file, loaded)
    else:
        described = find_run(path)[1]
        description = _description(described, load_weight_file(described))
    agent = build_agent(description, modules)
    _copy_weights(agent, loaded, file)
    chosen = description.get("gamma") if gamma is None else gamma
    if chosen is not None:
        choose_discount(agent, chosen)
    return Policy(agent, num_envs, sample, device, loaded.version, description)


def find_run(path: str | Path) -> tuple[Path, Path]:
    """(directory of the run, file of weights) of a policy.

    Args:
        path: a file of weights, a training state, or a directory: a run's (its latest weights, or, where it has none, its
            newest complete training state), or one that holds ``policy.pt``, ``policy.safetensors``, or a single file of
            weights. The run's directory is the nearest one with a ``policy.json``, or else the directory of the file.

    Raises:
        CheckpointError: the path does not exist, or holds no weights.
    """
    path = Path(path).expanduser()
    if not path.exists():
        raise CheckpointError(f"{path} does not exist: give a file of weights, or a run directory, which has a {SPEC_FILE}")
    file = path if path.is_file() else _weights_in(path)
    return _run_directory(path) or file.parent, file


def _run_directory(path: Path) -> Path | None:
    """The run directory that ``path`` is or lies in: the nearest one with a ``policy.json``; None if there is none."""
    return next((p for p in (path, *path.parents) if (p / SPEC_FILE).is_file()), None)


def _weights_in(directory: Path) -> Path:
    """The file of weights that a directory means."""
    if (directory / "model.safetensors").is_file():
        checkpoint.verify(directory)
        return directory / "model.safetensors"
    for name in _NAMES:
        if (directory / name).is_file():
            return directory / name
    newest = checkpoint.newest_complete(directory / "ckpts" / "training_states")
    if newest is not None:
        return newest / "model.safetensors"
    found = sorted(p for p in directory.iterdir() if p.suffix in SUFFIXES and p.is_file())
    if len(found) > 1:
        raise CheckpointError(f"{directory} holds several files of weights; name one: {', '.join(p.name for p in found)}")
    if found:
        return found[0]
    if (directory / SPEC_FILE).is_file():
        raise CheckpointError(f"{directory} holds no weights yet: neither {directory / _NAMES[0]} nor a training state")
    runs = sorted(p.name for p in directory.iterdir() if (p / SPEC_FILE).is_file())
    within = f"; it holds the runs {', '.join(runs)}: name one of them" if runs else ""
    raise CheckpointError(
        f"{directory} holds no policy: it is no run directory (no {SPEC_FILE}), no training state (no model.safetensors), and has "
        f"no file of weights (policy.pt, policy.safetensors){within}"
    )


def _description(path: Path, file: WeightFile) -> dict[str, Any]:
    """The description of a policy, from its file of weights, or from the run in which the file lies."""
    if file.description is not None:
        return checked_spec(file.description, path)
    run_dir = _run_directory(path)
    if run_dir is None:
        raise CheckpointError(
            f"{path} holds weights alone, without the description of the policy that they belong to, and there is no {SPEC_FILE} beside "
            "it or above. Leave it in the directory of its run, or load it as load_policy(RUN, weights=FILE) with the run of an agent "
            "of the same classes and sizes; Policy.save writes files that need nothing else"
        )
    return read_policy_spec(run_dir)


def load_agent_weights(agent: BaseAgent, path: str | Path) -> int:
    """Copy a file of weights into an agent: all of them, or none if one does not fit; returns the version they were published with, or 0.

    Args:
        agent: has the classes and sizes that the weights were trained with.
        path: weights of this library, or a state dict of the original system.

    Raises:
        CheckpointError: the file is missing or damaged, or does not fit; the message lists every name without a counterpart.
    """
    file = load_weight_file(path)
    _copy_weights(agent, file, path)
    return file.version


def _copy_weights(agent: BaseAgent, file: WeightFile, path: str | Path) -> None:
    if take_by_itself(agent, file.weights):
        return
    try:
        weights = adapt_weights(file.weights, agent)
    except CheckpointError as err:
        raise CheckpointError(f"{path}: {err}") from err
    load_into(agent, weights, path)


# ---- weights of the original system ----------------------------------------------------------------------------------------

WRAPPERS = ("module.", "_orig_mod.")
"""Prefixes that distributed training and torch.compile put before every name."""
DERIVED = ("maximized_critics.",)
"""Copies of ``critics`` without gradients. Here they are second names of the critics' own parameters."""


def adapt_weights(weights: Mapping[str, Tensor], agent: nn.Module) -> dict[str, Tensor]:
    """Rename the entries of a state dict of the original system, for `amago.run.checkpoint.load_into`.

    Parameters have the same names and layouts in both systems, except below a module, such as the scales of RMS norms: there, the
    parameters that the module lacks and the file's parameters that are not in it must agree in number and in shape, in their order.
    The original adds prefixes of wrappers, and copies of the critics, which are dropped where the agent has no names for them. Weights
    of this library are returned unchanged.
    """
    plain = {_unwrapped(name): w for name, w in weights.items()}
    if len(plain) != len(weights):
        raise CheckpointError(f"some names occur twice, with and without one of the prefixes {', '.join(WRAPPERS)}")
    own, modules = agent.state_dict(), dict(agent.named_modules())
    tables = {f"{name}.weight" for name, module in modules.items() if isinstance(module, nn.Embedding)}
    adapted: dict[str, Tensor] = {}
    unknown: dict[str, list[str]] = {}
    for name, weight in plain.items():
        if name in own:
            adapted[name] = _fitting(weight, own[name]) if name in tables else weight
        elif not name.startswith(DERIVED):
            parts = name.split(".")
            inside = (".".join(parts[:n]) for n in range(len(parts) - 1, 0, -1))
            unknown.setdefault(next((m for m in inside if m in modules), ""), []).append(name)
    for module, names in unknown.items():
        missing = [name for name in own if name not in plain and name.startswith(f"{module}.")]
        found = [_fitting(plain[name], own[mine]) if mine in tables else plain[name] for name, mine in zip(names, missing)]
        if module and len(names) == len(missing) and all(w.shape == own[mine].shape for w, mine in zip(found, missing)):
            adapted |= zip(missing, found)
        else:
            adapted |= {name: plain[name] for name in names}
    return adapted


def _fitting(table: Tensor, own: Tensor) -> Tensor:
    """A table of time indices, to which the agent's may have one more row, for all later ones."""
    return torch.cat((table, table[-1:])) if table.shape[0] + 1 == own.shape[0] else table


def _unwrapped(name: str) -> str:
    while name.startswith(WRAPPERS):
        name = name.partition(".")[2]
    return name
