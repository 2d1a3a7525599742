"""The parts of an agent by name, as command lines and the fields of `amago.Experiment` take them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from amago.agent.registry import AGENTS as AGENTS
from amago.envs.exploration import EXPLORATION as EXPLORATION
from amago.nets import dict_encoder as dict_encoder  # it gives itself a name
from amago.nets.registry import TRAJ_ENCODERS as TRAJ_ENCODERS
from amago.nets.tstep_encoders import TSTEP_ENCODERS as TSTEP_ENCODERS

NAMED_FIELDS: Mapping[str, Mapping[str, Any]] = {
    "tstep_encoder_type": TSTEP_ENCODERS, "traj_encoder_type": TRAJ_ENCODERS, "agent_type": AGENTS,
    "exploration_wrapper_type": EXPLORATION,
}  # fmt: skip
"""For each field of `amago.Experiment` that takes a part, the parts by name."""
