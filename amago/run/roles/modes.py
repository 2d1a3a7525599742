"""Processes that only collect, or only learn: the settings of ``--mode``."""

from __future__ import annotations

from amago.run.learner import Learner


def collect_only(experiment: Learner) -> None:
    """Let a process act and evaluate with the newest published weights; never train, and delete nothing."""
    experiment.start_learning_at_epoch = float("inf")
    experiment.ckpt_interval = None
    experiment.always_save_latest, experiment.always_load_latest = False, True
    experiment.has_dset_edit_rights = False
    experiment.builds_optimizer = False


def learn_only(experiment: Learner) -> None:
    """Let a process train and publish weights; never act."""
    experiment.start_collecting_at_epoch = float("inf")
    experiment.train_timesteps_per_epoch = 0
    experiment.val_interval = None
    experiment.always_save_latest, experiment.always_load_latest = True, False
    experiment.has_dset_edit_rights = True
