"""The best settings of a study as a gin file, and as a command that trains with them."""

from __future__ import annotations

import shlex
from argparse import ArgumentParser, Namespace
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from amago.cli import train
from amago.cli_utils.arguments import experiment_fields_from_cli
from amago.run.tuning import Dimension

_OF_TUNE = frozenset(
    {"space", "trials", "processes", "metric", "direction", "no_prune", "seed", "run_name", "configs", "progress"}
)
_ARGUMENT_OF = {
    "train_timesteps_per_epoch": "timesteps_per_epoch", "train_batches_per_epoch": "grads_per_epoch",
    "val_timesteps_per_epoch": "eval_timesteps",
}  # fmt: skip
"""Arguments of ``amago train``, by the fields of `amago.Experiment` of another name that they set."""
_SET_BY_TRAIN = frozenset({"max_seq_len", "padded_sampling", "tstep_encoder_type", "traj_encoder_type", "agent_type"})


def best_command(args: Namespace, space: Iterable[tuple[Dimension, str]], params: Mapping[str, Any], file: Path) -> str:
    """Write the settings of a trial that gin holds to a file, and return a command that trains with all of its settings.

    Args:
        args: of ``amago tune``.
        space: each dimension with what it sets: "argument", "field" or "gin".
        params: of the trial.
        file: a gin file. Not written if no setting is gin's, but deleted if there is one of an earlier best trial.
    """
    given: dict[str, Any] = {}
    bound: dict[str, Any] = {}
    by_hand: list[str] = []
    by_arguments = {*experiment_fields_from_cli(args), *_SET_BY_TRAIN}
    for dimension, target in space:
        if dimension.name not in params:
            continue
        value = dimension.value_of(params[dimension.name])
        field = dimension.name.removeprefix("Experiment.")
        if target == "argument":
            given[dimension.name] = value
        elif target == "field" and field in _ARGUMENT_OF:
            given[_ARGUMENT_OF[field]] = value
        elif target == "field" and field in by_arguments:
            by_hand.append(f"# experiment.{field} = {value!r} in Python: amago train sets this field itself")
        else:
            bound[f"Experiment.{field}" if target == "field" else dimension.name] = value
    for name, other in (("grads_per_epoch", "batches_per_epoch"), ("batches_per_epoch", "grads_per_epoch")):  # two names of one
        if name in given:
            given.setdefault(other, given[name])
    lines = [f"# The best settings of {file.parent}", *by_hand, *(f"{name} = {value!r}" for name, value in bound.items())]
    if bound or by_hand:
        file.write_text("\n".join(lines) + "\n")
    else:
        file.unlink(missing_ok=True)
    configs = [*map(str, args.configs), *([str(file)] if bound or by_hand else [])]
    words = ["amago", "train", str(args.env), "--run_name", f"{args.run_name}_best", *_options(args, given)]
    return shlex.join([*words, *(["--configs", *configs] if configs else [])])


def _options(args: Namespace, given: Mapping[str, Any]) -> list[str]:
    """The options of ``amago train`` that differ from its defaults, those of the trial in place of those of ``args``."""
    parser = ArgumentParser()
    train.add_arguments(parser)
    words: list[str] = []
    seen: set[int] = set()
    for action in parser._actions:
        if not action.option_strings or action.dest in _OF_TUNE or action.dest == "help" or id(action) in seen:
            continue
        seen.add(id(action))
        value = given.get(action.dest, getattr(args, action.dest, None))
        if value == parser.get_default(action.dest):
            continue
        if action.nargs == 0:
            words += [action.option_strings[0]] if value else []
        else:
            words += [action.option_strings[0], *map(str, value if isinstance(value, list | tuple) else [value])]
    return words
