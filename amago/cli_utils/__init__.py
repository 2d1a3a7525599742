"""Helpers for training scripts: choose the parts of an agent by name, add the common arguments, train and evaluate."""

from amago.cli_utils.arguments import (
    add_common_cli,
    add_pixel_cli,
    dataset_limits_from_cli,
    experiment_fields_from_cli,
    part_name,
    resume_point,
    whole_number,
)
from amago.cli_utils.parts import (
    ACTORS,
    AGENTS,
    CNNS,
    CRITICS,
    DISTRIBUTIONS,
    EXPLORATION,
    TRAJ_ENCODERS,
    TSTEP_ENCODERS,
    default_tstep_encoder,
    register,
    switch_actor,
    switch_agent,
    switch_critic,
    switch_exploration,
    switch_step_encoder,
    switch_traj_encoder,
    switch_tstep_encoder,
    use_config,
)
from amago.cli_utils.scripts import (
    create_experiment_from_cli,
    evaluate_after_training,
    main,
    make_experiment_collect_only,
    make_experiment_learn_only,
    parse_args,
    run_trials,
    switch_async_mode,
)
from amago.compat.names import attributes, importable
from amago.config import reset_config

__all__ = [
    "ACTORS", "AGENTS", "CNNS", "CRITICS", "DISTRIBUTIONS", "EXPLORATION", "TRAJ_ENCODERS", "TSTEP_ENCODERS", "add_common_cli",
    "add_pixel_cli", "create_experiment_from_cli", "dataset_limits_from_cli", "default_tstep_encoder", "evaluate_after_training",
    "experiment_fields_from_cli", "main", "make_experiment_collect_only", "make_experiment_learn_only", "parse_args", "part_name", "register",
    "reset_config", "resume_point", "run_trials", "switch_actor", "switch_agent", "switch_async_mode", "switch_critic",
    "switch_exploration", "switch_step_encoder", "switch_traj_encoder", "switch_tstep_encoder", "use_config", "whole_number",
]  # fmt: skip

__all__ += importable(__name__)  # scripts for the original system write `from amago.cli_utils import *`
__getattr__ = attributes(__name__)
