"""Environments: the `AMAGOEnv` wrapper, exploration, the recorder and the actor pool (numpy only, never torch)."""

from __future__ import annotations

from amago.compat.names import attributes
from amago.envs.amago_env import AMAGOEnv
from amago.envs.checking import check_env
from amago.envs.env_utils import from_pettingzoo, from_sb3_vec_env
from amago.envs.exploration import BilevelEpsilonGreedy, EpsilonGreedy, ExplorationWrapper
from amago.envs.pool import ActorPool, PoolEnv, make_pool
from amago.envs.pool.faults import ActorError
from amago.envs.recorder import RecordingError
from amago.envs.sequence_wrapper import EnvCreator, SequenceWrapper
from amago.envs.statistics import AMAGO_ENV_LOG_PREFIX, EpisodeRecord, PhaseStatistics, ReturnHistory, SpecialMetricHistory

__all__ = [
    "AMAGO_ENV_LOG_PREFIX", "AMAGOEnv", "ActorError", "ActorPool", "BilevelEpsilonGreedy", "EnvCreator", "EpisodeRecord",
    "EpsilonGreedy", "ExplorationWrapper", "PhaseStatistics", "PoolEnv", "RecordingError", "ReturnHistory",
    "SequenceWrapper", "SpecialMetricHistory", "check_env", "from_pettingzoo", "from_sb3_vec_env", "make_pool",
]  # fmt: skip

__getattr__ = attributes(__name__)
