"""Public names of `amago.data.relabel` and `amago.data.novelty`, under the module that scripts import them from."""

from amago.data.novelty import NoveltyRelabeler
from amago.data.relabel import STRATEGIES, GoalSequenceRelabeler, completion_times

__all__ = ["STRATEGIES", "GoalSequenceRelabeler", "NoveltyRelabeler", "completion_times"]
