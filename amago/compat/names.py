"""Names under which code written for the original system finds classes, functions and modules, each imported on first use.

Fact served: after ``import amago``, every submodule is an attribute of its package, and modules also have names that they use themselves,
such as `amago.loading.Relabeler` or `amago.agent.Batch`.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Mapping
from typing import Any


def _from(module: str, *names: str) -> dict[str, str]:
    return dict.fromkeys(names, module)


_REGISTRIES = {
    **_from("amago.nets.tstep_encoders", "register_tstep_encoder", "get_tstep_encoder_cls", "list_registered_tstep_encoders"),
    **_from("amago.nets.traj_encoders", "register_traj_encoder", "get_traj_encoder_cls", "list_registered_traj_encoders"),
}
_ENCODERS = {**_from("amago.nets.tstep_encoders", "TstepEncoder"), **_from("amago.nets.traj_encoders", "TrajEncoder")}
_HEADS = _from(
    "amago.nets.actor_critic", "Actor", "BaseActorHead", "BaseCriticHead", "NCritics", "NCriticsTwoHot", "PopArtLayer", "ResidualActor"
)  # fmt: skip
_RECORDS = _from("amago.hindsight", "FrozenTraj", "Timestep", "Trajectory", "split_batched_timestep")
_DATA = _from("amago.loading", "Batch", "MAGIC_PAD_VAL", "RLData", "RLDataset", "RLData_pad_collate")
_AGENTS = _from("amago.agent", "Agent", "BaseAgent", "MultiTaskAgent", "Multigammas")
_EXPLORATION = _from("amago.envs.exploration", "BilevelEpsilonGreedy", "EpsilonGreedy", "ExplorationWrapper")
_ACTIONS = _from(
    "amago.compat.envs", "ContinuousActionWrapper", "DiscreteActionWrapper", "MultiBinaryActionWrapper",
    "extend_box_obs_space_by",
)  # fmt: skip
_VECTORS = _from("amago.envs.env_utils", "AlreadyVectorizedEnv", "DummyAsyncVectorEnv", "space_convert")

NAMES: dict[str, Mapping[str, str]] = {
    "amago.agent": {
        **_DATA, **_ENCODERS, **_HEADS, "actor_critic": "amago.nets", "utils": "amago",
        **_from("amago.nets.policy_dists", "Discrete", "DiscreteLikeContinuous", "Multibinary", "PolicyOutput"),
    },
    "amago.cli_utils": {
        **_AGENTS, **_ENCODERS, **_EXPLORATION, "gin": "", "wandb": "", "amago": "", "argparse": "", "ArgumentParser": "argparse",
        "Experiment": "amago.experiment", **_from("amago.loading", "DiskTrajDataset", "RLDataset"), "AMAGOEnv": "amago.envs",
    },
    "amago.envs": {
        **_VECTORS, **_from("amago.envs.exploration", "register_exploration", "get_exploration_cls", "list_registered_explorations"),
    },
    "amago.envs.amago_env": {
        **_from("amago.envs.sequence_wrapper", "EnvCreator", "SequenceWrapper"),
        **_from("amago.envs.statistics", "AMAGO_ENV_LOG_PREFIX", "ReturnHistory", "SpecialMetricHistory"), **_RECORDS, **_VECTORS, **_ACTIONS, **_EXPLORATION},
    "amago.envs.env_utils": _ACTIONS,
    "amago.experiment": {
        **_AGENTS, **_DATA, **_ENCODERS, **_EXPLORATION, **_VECTORS, "utils": "amago", "Accelerator": "accelerate",
        **_from("amago.envs", "AMAGOEnv", "EnvCreator", "ReturnHistory", "SequenceWrapper", "SpecialMetricHistory"),
        "DiskTrajDataset": "amago.loading", "Timestep": "amago.hindsight",
    },
    "amago.loading": {
        **_RECORDS, **_from("amago.hindsight", "NoOpRelabeler", "Relabeler"), "_DatasetStatus": "amago.loading.mixture", "gin": "",
        "DataLoader": "torch.utils.data",
    },
    "amago.nets": {**_REGISTRIES, **_ENCODERS},
    "amago.nets.actor_critic": _from("amago.nets.utils", "symlog", "symexp", "activation_switch", "add_activation_log"),
    "amago.nets.tstep_encoders": {
        **_from("amago.nets.utils", "InputNorm", "symlog", "symexp", "activation_switch", "add_activation_log"),
        **_from("amago.nets", "cnn", "ff", "utils"),
    },
    "amago.nets.transformer": _from("amago.nets.utils", "activation_switch", "symlog"),
}  # fmt: skip
"""For each module {name: module that has it, "" if it is a module itself}."""


def attributes(module: str, names: Mapping[str, str] | None = None) -> Callable[[str], Any]:
    """The ``__getattr__`` of a module (PEP 562): its submodules, and names of other modules, imported on first use.

    ``names``, {name: module that has it}, are known in addition to `NAMES`.
    """
    known = {**NAMES.get(module, {}), **(names or {})}

    def find(name: str) -> Any:
        if name in known:
            source = known[name]
            value = getattr(importlib.import_module(source), name) if source else importlib.import_module(name)
        elif _is_submodule(module, name):
            value = importlib.import_module(f"{module}.{name}")
        else:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        setattr(sys.modules[module], name, value)
        return value

    return find


def importable(module: str) -> list[str]:
    """The names of `NAMES` that ``from module import *`` gives: all but packages that are not installed."""
    return [name for name, source in NAMES[module].items() if source or importlib.util.find_spec(name) is not None]


def _is_submodule(module: str, name: str) -> bool:
    is_package = "__path__" in vars(sys.modules[module])
    return is_package and not name.startswith("__") and importlib.util.find_spec(f"{module}.{name}") is not None
