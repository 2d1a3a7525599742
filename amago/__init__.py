"""amago: reinforcement learning for agents that adapt through memory.

The public names are imported on first use (PEP 562), so that an actor's process can import `amago.envs` without importing torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from amago.compat.names import attributes

__version__ = "4.0.0"

_LAZY = {
    "Experiment": "amago.experiment",
    "Agent": "amago.agent",
    "MultiTaskAgent": "amago.agent",
    "Callback": "amago.run.callbacks",
    "EarlyStopping": "amago.run.callbacks",
    "KeepBest": "amago.run.callbacks",
    "RecordVideo": "amago.policy.filming",
    "ExtraField": "amago.data.extras",
    "TstepEncoder": "amago.nets.tstep_encoders",
    "TrajEncoder": "amago.nets.traj_encoders",
    "ExplorationWrapper": "amago.envs.exploration",
    "load_policy": "amago.policy",
    "train": "amago.quick",
    "register_agent": "amago.agent",
    "get_agent_cls": "amago.agent",
    "list_registered_agents": "amago.agent",
    "register_tstep_encoder": "amago.nets.tstep_encoders",
    "get_tstep_encoder_cls": "amago.nets.tstep_encoders",
    "list_registered_tstep_encoders": "amago.nets.tstep_encoders",
    "register_traj_encoder": "amago.nets.traj_encoders",
    "get_traj_encoder_cls": "amago.nets.traj_encoders",
    "list_registered_traj_encoders": "amago.nets.traj_encoders",
    "register_exploration": "amago.envs.exploration",
    "get_exploration_cls": "amago.envs.exploration",
    "list_registered_explorations": "amago.envs.exploration",
    "check_env": "amago.envs",
    "check_tstep_encoder": "amago.agent",
    "check_traj_encoder": "amago.agent",
    "check_dataset": "amago.loading",
    "CheckError": "amago.data.findings",
}
_SUBMODULES = (
    "agent", "cli_utils", "config", "distributed", "envs", "experiment", "hindsight", "loading", "nets", "ops", "policy", "spaces", "store",
    "utils",
)  # fmt: skip

__all__ = [*_LAZY, *_SUBMODULES, "__version__"]

if TYPE_CHECKING:
    from amago import agent, config, distributed, envs, experiment, hindsight, loading, nets, ops, policy, spaces, store, utils
    from amago.agent import Agent, MultiTaskAgent, check_traj_encoder, check_tstep_encoder
    from amago.data.extras import ExtraField
    from amago.data.findings import CheckError
    from amago.envs import check_env
    from amago.experiment import Experiment
    from amago.loading import check_dataset
    from amago.nets.traj_encoders import TrajEncoder
    from amago.nets.tstep_encoders import TstepEncoder
    from amago.policy import load_policy
    from amago.policy.filming import RecordVideo
    from amago.quick import train
    from amago.run.callbacks import Callback, EarlyStopping, KeepBest


__getattr__ = attributes(__name__, _LAZY)


def __dir__() -> list[str]:
    return sorted(__all__)
