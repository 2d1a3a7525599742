"""Names of metrics in the log that are written in one place and read in another. This module imports nothing."""

AVERAGE_RETURN = "Average Total Return (Across All Env Names)"
AVERAGE_RETURN_OF_ROLLOUTS = "Average Total Return (Across All Rollouts)"
NUMBER_OF_ROLLOUTS = "Number of Rollouts"
ROLLOUT_LENGTH = "Average Rollout Length"
STEPS_PER_SECOND = "Steps per Second"
UPDATES_PER_SECOND = "Updates per Second"
SUCCESS = "Success"
"""In the names of metrics that are success rates."""
RETURN_OF = "Average Total Return in "
"""Followed by the name of an environment."""
SECTIONS = {"train-update": "train", "dataset": "buffer"}
"""Sections of the log, by argument of `Experiment.log` where the two differ."""
