"""Public names of `amago.data.relabel`, `novelty` and `shaping`, under the module that scripts import them from."""

from amago.data.novelty import NoveltyRelabeler
from amago.data.relabel import STRATEGIES, GoalSequenceRelabeler, completion_times
from amago.data.shaping import LastRewardShaping

__all__ = ["STRATEGIES", "GoalSequenceRelabeler", "LastRewardShaping", "NoveltyRelabeler", "completion_times"]
