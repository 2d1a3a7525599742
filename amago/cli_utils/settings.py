"""Settings in YAML files and words NAME=VALUE: read, applied to the arguments of a program, and written for a run."""

from __future__ import annotations

import dataclasses
import math
import re
from argparse import Action, ArgumentError, ArgumentParser, Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import gin
import yaml

from amago import config
from amago.describe import flatten
from amago.experiment import Experiment
from amago.run.rundir import SETTINGS_YAML
from amago.run.settings import NAMED_FIELDS, ExperimentSettings

FIELDS = {field.name: field for field in dataclasses.fields(ExperimentSettings)}
_ARGUMENT_OF = {
    "train_timesteps_per_epoch": "timesteps_per_epoch", "train_batches_per_epoch": "grads_per_epoch",
    "val_timesteps_per_epoch": "eval_timesteps", "total_steps": "steps",
}  # fmt: skip
"""Arguments, by the fields of `amago.Experiment` of another name that they set."""
OF_ONE_RUN = {
    "run_name", "buffer_dir", "ckpt", "resume", "overwrite", "share_buffer", "mode", "trials", "seeds", "processes", "collectors", "learners", "bus",
    "ray", "quiet", "progress", "no_log", "command", "words", "configs", "env_of_run",
}  # fmt: skip
"""Arguments of a program that are no settings: another run has others."""


class Sweep(list[Any]):
    """Several values of one setting, each of which is to be tried."""


class _Yaml(yaml.SafeLoader):
    """YAML in which "1e-4" is a number, "no" a text, and "None" nothing."""


_Yaml.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in known if not tag.endswith(":bool")]
    for first, known in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
for _tag, _pattern, _first in (
    ("bool", "true|True|false|False", "tTfF"), ("null", "None", "N"), ("float", r"[-+]?(\d[\d_]*\.?\d*|\.\d+)[eE][-+]?\d+", "-+.0123456789"),
):  # fmt: skip
    _Yaml.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(rf"(?:{_pattern})$"), list(_first))


def is_word(entry: str) -> bool:
    """True for "NAME=VALUE"; False for the name of a file, and for other texts."""
    return re.match(r"[A-Za-z_][\w./]*=.", entry) is not None and not entry.endswith((".gin", ".yaml", ".yml"))


def read_settings(entry: str) -> dict[str, Any] | None:
    """The settings of a YAML file or of "NAME=VALUE", by dotted name; None for another file.

    Values are YAML's, and lists have brackets: "NAME=VALUE,VALUE" is a `Sweep`. A ValueError names what cannot be read.
    """
    name, _, text = entry.partition("=")
    try:
        if is_word(entry):
            values = [text] if text.startswith("@") else yaml.load(f"[{text}]", _Yaml)  # a SafeLoader
            return {name: values[0] if len(values) == 1 else Sweep(values)}
        if not entry.endswith((".yaml", ".yml")):
            return None
        tree = yaml.load(Path(entry).read_text(encoding="utf-8"), _Yaml) or {}
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as err:
        raise ValueError(f"cannot read {entry!r}: {' '.join(str(err).split())}") from err
    if not isinstance(tree, dict):
        raise ValueError(f"{entry} must have lines NAME: VALUE, got {tree!r:.80}")
    return flatten(tree)


def check_single(name: str, value: object) -> None:
    """Refuse a `Sweep`, where one value is expected."""
    if isinstance(value, Sweep):
        raise ValueError(
            f"{name} has {len(value)} values, and one is expected. 'amago train ENV {name}={','.join(map(str, value))}' tries each, and so "
            f"does 'amago tune'; a list has brackets: {name}=[...]"
        )


class Configs(Action):
    """Adds files of settings and NAME=VALUE."""

    def __call__(self, parser: ArgumentParser, namespace: Namespace, values: Any, option_string: str | None = None) -> None:
        try:
            _apply(parser, namespace, values)
        except ValueError as err:
            raise ArgumentError(self, str(err)) from err


def _apply(parser: ArgumentParser, args: Namespace, entries: Sequence[str]) -> None:
    """Add files of settings and NAME=VALUE to ``args``. Arguments of the program among them are set: by a file, those that the command line
    has not. Where ``args`` has a ``sweep``, it takes settings of several values."""
    for entry in entries:
        found, word = read_settings(entry), is_word(entry)
        if found and "sweep" in vars(args):
            found.pop("env", None)  # of a settings.yaml: only --from takes it
            args.sweep = args.sweep | {name: found.pop(name) for name in list(found) if isinstance(found[name], Sweep)}
        rest = entry if found is None else set_arguments(parser, args, found, replace=word)
        args.configs = [*args.configs, *([rest] if rest else [])]


def set_arguments(parser: ArgumentParser, args: Namespace, settings: Mapping[str, Any], replace: bool = True) -> dict[str, Any]:
    """Set the arguments of a program that ``settings`` name, also by the fields that they set, with the checks of the command line;
    unless ``replace``, only those that have their defaults, which are then the new ones. Returns the other settings; a ValueError for a mistake."""
    actions, rest = {action.dest: action for action in parser._actions if action.option_strings}, {}
    for name, value in settings.items():
        check_single(name, value)
        field = name.removeprefix("experiment.").removeprefix("Experiment.")
        action = actions.get(_ARGUMENT_OF.get(field, field))
        if action is not None:
            if replace or vars(args)[action.dest] == action.default:
                _set(parser, args, action, name, value)
                if not replace:
                    action.default = vars(args)[action.dest]
            continue
        if field in FIELDS:
            check = None if field in NAMED_FIELDS else FIELDS[field].metadata["check"]
            if check is not None and (problem := check(field, value)) is not None:
                raise ValueError(problem)
        elif "." not in field:
            known = config.suggestion(field, sorted(FIELDS.keys() | actions.keys()))
            raise ValueError(
                f"{field!r} is neither an argument nor a field of amago.Experiment; {known} gin names have the form Agent.gamma"
            )
        rest[f"Experiment.{field}" if field in FIELDS else name] = value
    return rest


def _set(parser: ArgumentParser, args: Namespace, action: Action, name: str, value: object) -> None:
    action.required = False
    if action.nargs == 0 and not isinstance(value, bool):
        raise ValueError(f"{name} must be True or False, got {value!r}")
    if isinstance(value, list) and action.nargs is None:
        raise ValueError(f"{name} takes one value, got {value!r}")
    if value is None or action.nargs == 0:
        setattr(args, action.dest, value)
        return
    given = value if isinstance(value, list) else [value]
    try:
        parsed = parser._get_values(action, [*map(str, given)])
    except ArgumentError as err:
        raise ValueError(str(err)) from err
    action(parser, args, parsed, action.option_strings[0])


def take_settings(parser: ArgumentParser, args: Namespace, words: Sequence[str]) -> None:
    """Apply the words NAME=VALUE of a command line, which win over files."""
    if "sweep" in vars(args) and is_word(args.env or ""):  # argparse took the first of them for the environment
        words = [args.env, *words]
        named = next((word for word in words if not is_word(word) and not word.startswith("-")), None)
        words, args.env = [word for word in words if word != named], named or args.env_of_run
    if unknown := [word for word in words if not is_word(word)]:
        raise ValueError(f"unrecognized arguments: {' '.join(unknown)}")
    _apply(parser, args, words)


# ---- settings.yaml ---------------------------------------------------------------------------------------------------------


def record_settings(experiment: Experiment, args: Namespace) -> None:
    """Write ``settings.yaml`` into a run's directory: its arguments, its seed, and what gin has, for ``--config`` or ``amago train --from``.
    Values that are neither numbers, texts nor lists are left out."""
    if not (experiment.learns and experiment.rundir.is_open and experiment.accelerator.is_main_process):
        return
    of_args = {k: v for k, v in vars(args).items() if k not in OF_ONE_RUN and not k.startswith("common_")}
    kept = {
        k: v for k, v in of_args.items() if (type(v) in (int, float, str, list) and v not in (math.inf, "", [])) or v is True
    }
    if "steps" in kept:
        kept.pop("epochs", None)  # which they take
    own = {
        k: v for entry in args.configs if isinstance(entry, Mapping) for k, v in entry.items() if k.startswith("Experiment.")
    }
    text = as_yaml(kept | {"seed": experiment.run_seed} | config.bindings() | own)
    (experiment.run_dir / SETTINGS_YAML).write_text(text, encoding="utf-8")


def as_yaml(settings: Mapping[str, Any]) -> str:
    """Settings as YAML, for `read_settings`: classes and functions as gin names them, without other objects."""
    found = {name: _storable(value) for name, value in settings.items()}
    kept = {name: value for name, value in found.items() if value is not ...}
    return f"# settings of a run; 'amago train --from DIR' repeats it\n{yaml.safe_dump(kept, sort_keys=False)}"


def _storable(value: object) -> Any:
    """A value for YAML; ``...`` for one that has no form there."""
    value = config.plain(value)
    if isinstance(value, list | tuple):
        found = [_storable(v) for v in value]
        return ... if ... in found else found
    if isinstance(value, gin.config.ConfigurableReference):
        return repr(value)
    if callable(value):
        return next((f"@{full}" for full, known in config.registry().items() if value in (known.wrapped, known.wrapper)), ...)
    return value if value is None or isinstance(value, bool | int | float | str) else ...
