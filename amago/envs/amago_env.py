"""Public names of `amago.envs`, under the module that scripts import them from."""

from amago.envs.creator import EnvCreator
from amago.envs.environment import AMAGOEnv
from amago.envs.metrics import AMAGO_ENV_LOG_PREFIX
from amago.envs.sequence_wrapper import SequenceWrapper
from amago.envs.statistics import ReturnHistory, SpecialMetricHistory
from amago.envs.wrapper import AMAGOWrapper

__all__ = [
    "AMAGO_ENV_LOG_PREFIX", "AMAGOEnv", "AMAGOWrapper", "EnvCreator", "ReturnHistory", "SequenceWrapper", "SpecialMetricHistory",
]  # fmt: skip
