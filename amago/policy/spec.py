"""The description from which an agent is built again, all but its weights: ``policy.json``, and within files of weights."""

from __future__ import annotations

import functools
import importlib
import json
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import gin
import gymnasium as gym
from torch import nn

from amago import config
from amago.agent import BaseAgent
from amago.nets.traj_encoders import TrajEncoder
from amago.nets.tstep_encoders import TstepEncoder
from amago.run import checkpoint
from amago.run.checkpoint import CheckpointError
from amago.spaces import action_spec, converts_to, describe, from_description, rl2_space

SPEC_FILE = "policy.json"
_FIELDS = ("agent", "tstep_encoder", "traj_encoder", "max_seq_len", "observation_space", "action_space", "bindings")
_BASES: dict[str, type] = {"agent": BaseAgent, "tstep_encoder": TstepEncoder, "traj_encoder": TrajEncoder}
_NOT_OF_A_POLICY = ("amago.experiment.", "amago.envs.", "amago.loading.", "amago.relabeling.")


def describe_agent(agent: BaseAgent, raw_observation_space: gym.Space[Any] | None = None) -> dict[str, Any]:
    """An agent without its weights, as JSON types: its classes, spaces and context length, and the gin bindings in force.

    Args:
        raw_observation_space: of the environment, so that a policy takes its observations; None: not known.
    """
    spec = {
        "schema": 1,
        "agent": _name(type(agent)),
        "tstep_encoder": _name(type(agent.tstep_encoder)),
        "traj_encoder": _name(type(agent.traj_encoder)),
        "max_seq_len": agent.max_seq_len,
        "observation_space": describe(agent.obs_space),
        "action_space": describe(agent.action_space),
        "bindings": {name: _encode(value) for name, value in config.bindings().items()},
    }
    if raw_observation_space is not None and converts_to(raw_observation_space, agent.obs_space):
        spec["raw_observation_space"] = describe(raw_observation_space)
    return spec


def write_policy_spec(run_dir: Path, agent: BaseAgent, raw_observation_space: gym.Space[Any] | None = None) -> dict[str, Any]:
    """Write ``policy.json``, the result of `describe_agent`, and return it.

    Raises:
        ValueError: a parameter of a network or of an agent is bound to a value from which the policy could not be loaded again.
    """
    spec = describe_agent(agent, raw_observation_space)
    for name, value in config.bindings().items():
        if any("<" in found for found in _names_in(spec["bindings"][name])):
            if _is_of_a_policy(name):
                raise ValueError(
                    f"{name} is bound to {value!r}, which cannot be written to {SPEC_FILE} and loaded again: bind numbers, texts, None, "
                    "lists and dicts of these, or functions and classes that stand at the top of a module"
                )
            del spec["bindings"][name]
    checkpoint.write_text(run_dir / SPEC_FILE, json.dumps(spec, indent=1))
    return spec


def _is_of_a_policy(name: str) -> bool:
    """True if a binding belongs to a network, to an agent, or to a function, which these may call."""
    selector = name.rpartition("/")[2].rpartition(".")[0]
    if f"{selector}.".startswith(_NOT_OF_A_POLICY):
        return False
    configurable = config.registry()[selector].wrapped
    return not isinstance(configurable, type) or issubclass(configurable, nn.Module)


def read_policy_spec(run_dir: Path) -> dict[str, Any]:
    """The content of ``policy.json``; CheckpointError if the file is missing or damaged."""
    path = run_dir / SPEC_FILE
    try:
        return checked_spec(json.loads(path.read_text(encoding="utf-8")), path)
    except FileNotFoundError:
        raise CheckpointError(f"{run_dir} is not a run directory: it has no {SPEC_FILE}") from None
    except ValueError as err:
        raise CheckpointError(f"{path} is damaged: {err}") from err


def checked_spec(spec: object, path: Path) -> dict[str, Any]:
    """A description, unchanged; CheckpointError if the description in the file ``path`` is damaged."""
    found = spec if isinstance(spec, dict) else {}
    if missing := [k for k in _FIELDS if k not in found]:
        raise CheckpointError(f"{path} is damaged: its description of the policy lacks {', '.join(missing)}")
    return found


def without_run(spec: Mapping[str, Any]) -> dict[str, Any]:
    """A description without the bindings of classes that are not part of a policy."""
    kept = {k: v for k, v in spec["bindings"].items() if not k.rpartition("/")[2].startswith(_NOT_OF_A_POLICY)}
    return {**spec, "bindings": kept}


def modules_of(spec: Mapping[str, Any]) -> list[str]:
    """The modules of the user's own code that a description names (not of amago, torch or the standard library), sorted."""
    named = [spec[part] for part in _BASES] + _names_in(without_run(spec)["bindings"])
    others = {"", "amago", "torch", *sys.stdlib_module_names} - {"__main__"}
    return sorted({m for name in named if (m := name.partition(":")[0]).partition(".")[0] not in others})


def _names_in(encoded: object) -> list[str]:
    """The names of classes and functions in an encoded value; there is a "<" in those that no process finds again."""
    found = re.findall(r'"@(name|call|unknown)": "([^"]*)', json.dumps(encoded))
    return [":<unknown>" if kind == "unknown" else name for kind, name in found]


def build_agent(description: Mapping[str, Any] | Path, modules: Sequence[str] = ()) -> BaseAgent:
    """Build the agent of a description, with untrained weights.

    Bindings of classes that are not part of a policy (environments, exploration, datasets, the experiment) are ignored.

    Args:
        description: of `describe_agent`; or the directory that holds it as ``policy.json``.
        modules: packages that may be imported, beside amago and those that are imported already.

    Raises:
        CheckpointError: the file is missing or damaged.
        ValueError: a class or a binding cannot be found, or may not be imported.
    """
    spec = read_policy_spec(description) if isinstance(description, Path) else description
    types = {part: _resolve_type(spec, part, modules) for part in _BASES}
    obs_space, action_space = from_description(spec["observation_space"]), from_description(spec["action_space"])
    with config.temporary(_bindings_of_a_policy(spec, modules)):
        return types["agent"](  # type: ignore[no-any-return]
            obs_space=obs_space,
            rl2_space=rl2_space(action_spec(action_space)),
            action_space=action_space,
            max_seq_len=spec["max_seq_len"],
            tstep_encoder_type=types["tstep_encoder"],
            traj_encoder_type=types["traj_encoder"],
        )


def _bindings_of_a_policy(spec: Mapping[str, Any], modules: Sequence[str]) -> dict[str, Any]:
    found = {}
    for name, encoded in without_run(spec)["bindings"].items():
        # of earlier versions, for training
        if name.endswith((".Agent.expectile", ".MultiTaskAgent.expectile", ".NCriticsTwoHot.decoding")) or encoded == "retrace":
            continue
        try:
            found[name] = _decode(encoded, modules)  # imports the module of a class, which may register the selector
        except (ValueError, ImportError) as err:
            if config.is_registered(name.rpartition(".")[0]):
                raise ValueError(f"{name}: {err}") from err
    return {name: value for name, value in found.items() if config.is_registered(name.rpartition(".")[0])}


# ---- values as JSON --------------------------------------------------------------------------------------------------------


def _name(obj: Any) -> str:
    return f"{obj.__module__}:{obj.__qualname__}"


def _encode(value: object) -> Any:
    if isinstance(value, gin.config.ConfigurableReference):
        return _encode_reference(value)
    value = config.plain(value)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple):
        return [_encode(v) for v in value]
    if isinstance(value, dict):
        return {"@dict": [[_encode(k), _encode(v)] for k, v in value.items()]}
    if isinstance(value, functools.partial):
        return {"@partial": [_encode(value.func), _encode(value.args), _encode(value.keywords)]}
    if hasattr(value, "__qualname__") and hasattr(value, "__module__"):
        return {"@name": _name(value)}
    return {"@unknown": repr(value)}


def _encode_reference(reference: gin.config.ConfigurableReference) -> Any:
    """``@Name``, ``@Name()`` or ``%NAME`` of a gin file."""
    wrapped = reference.configurable.wrapped
    if reference.evaluate and wrapped in (gin.config.macro, gin.config._retrieve_constant):
        return _encode(reference.scoped_configurable_fn())
    if reference.scopes:
        return {"@unknown": repr(reference)}
    return {"@call": _name(wrapped)} if reference.evaluate else {"@name": _name(wrapped)}


def _decode(value: object, modules: Sequence[str]) -> Any:
    if isinstance(value, list):
        return [_decode(v, modules) for v in value]
    if isinstance(value, dict):
        if "@name" in value:
            return _resolve(value["@name"], modules)
        if "@call" in value:
            return gin.config.ConfigurableReference(config.selector_of(_resolve(value["@call"], modules)), True)
        if "@partial" in value:
            function, args, keywords = (_decode(v, modules) for v in value["@partial"])
            return functools.partial(function, *args, **keywords)
        if "@dict" in value:
            return {_decode(k, modules): _decode(v, modules) for k, v in value["@dict"]}
        raise ValueError(f"the policy was configured with {value.get('@unknown')}, which cannot be written to a file")
    return value


_MOVED = {
    "amago.nets.cpu.packed:Linear": "amago.nets.utils:Linear",
    "amago.agent.multitask:MultiTaskAgent": "amago.agent.agent:MultiTaskAgent",
}
_MOVED_MODULES = {
    "amago.nets.categorical": "amago.nets.policy_dists",
    "amago.nets.dict_encoder": "amago.nets.tstep_encoders",
    "amago.nets.image_goal_encoder": "amago.nets.tstep_encoders",
    "amago.nets.flex_attention": "amago.nets.attention",
    "amago.nets.sigma_reparam": "amago.nets.transformer",
}
"""Names and modules in the policies of earlier versions, and their present places."""


def _resolve(name: str, modules: Sequence[str]) -> Any:
    """Find the object called "module:qualified.name". Only amago, packages of ``modules`` and imported modules are searched."""
    module, _, path = _MOVED.get(name, name).partition(":")
    module = _MOVED_MODULES.get(module, module)
    if module not in sys.modules:
        if module.split(".")[0] not in ("amago", *(m.split(".")[0] for m in modules)):
            raise ValueError(
                f"the policy uses {name}; import that module first, or allow it: load_policy(..., modules=[{module!r}])"
            )
        importlib.import_module(module)
    found: object = sys.modules[module]
    for part in path.split("."):
        if (found := getattr(found, part, None)) is None:
            raise ValueError(f"the policy uses {name}, but {module} has no {path} in this process")
    return found


def _resolve_type(spec: Mapping[str, Any], part: str, modules: Sequence[str]) -> Any:
    found, base = _resolve(spec[part], modules), _BASES[part]
    if not (isinstance(found, type) and issubclass(found, base)):
        raise ValueError(f"the policy names {spec[part]} as its {part}, which is not a subclass of {base.__name__}")
    return found
