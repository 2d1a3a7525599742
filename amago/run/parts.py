"""The parts of an agent by name, as command lines and the fields of `amago.Experiment` take them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from amago.agent import Agent, BaseAgent, MultiTaskAgent
from amago.envs.exploration import BilevelEpsilonGreedy, EpsilonGreedy, ExplorationWrapper
from amago.nets.dict_encoder import DictTstepEncoder
from amago.nets.registry import TRAJ_ENCODERS
from amago.nets.tstep_encoders import CNNTstepEncoder, FFTstepEncoder, GoalTstepEncoder, TstepEncoder

TSTEP_ENCODERS: dict[str, type[TstepEncoder]] = {
    "ff": FFTstepEncoder, "cnn": CNNTstepEncoder, "dict": DictTstepEncoder, "goal": GoalTstepEncoder,
}  # fmt: skip
AGENTS: dict[str, type[BaseAgent]] = {"agent": Agent, "multitask": MultiTaskAgent}
EXPLORATION: dict[str, type[ExplorationWrapper]] = {"egreedy": EpsilonGreedy, "bilevel": BilevelEpsilonGreedy}

NAMED_FIELDS: Mapping[str, Mapping[str, Any]] = {
    "tstep_encoder_type": TSTEP_ENCODERS, "traj_encoder_type": TRAJ_ENCODERS, "agent_type": AGENTS,
    "exploration_wrapper_type": EXPLORATION,
}  # fmt: skip
"""For each field of `amago.Experiment` that takes a part, the parts by name."""
