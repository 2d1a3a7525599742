"""Public names of `amago.data.relabel`, under the module that scripts import them from."""

from amago.data.relabel import STRATEGIES, GoalSequenceRelabeler, completion_times

__all__ = ["STRATEGIES", "GoalSequenceRelabeler", "completion_times"]
