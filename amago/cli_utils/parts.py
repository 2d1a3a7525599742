"""Choose the parts of an agent by name, and change their default arguments."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, MutableMapping
from contextlib import suppress
from typing import Any

import gymnasium as gym

from amago import config as gin_config
from amago.agent import BaseAgent
from amago.agent.agent import AGENTS
from amago.cli_utils.settings import check_single, read_settings
from amago.compat import training as training  # its configurables get their names here
from amago.envs.exploration import EXPLORATION, ExplorationWrapper
from amago.nets.actor_critic import Actor, NCritics, NCriticsTwoHot, ResidualActor
from amago.nets.cnn import CNN, SMALLEST, DrQCNN, GridworldCNN, IMPALAishCNN, NatureishCNN
from amago.nets.policy_dists import GMM, Beta, TanhGaussian
from amago.nets.traj_base import TRAJ_ENCODERS
from amago.nets.traj_encoders import TrajEncoder
from amago.nets.tstep_encoders import TSTEP_ENCODERS, TstepEncoder, is_image

log = logging.getLogger(__name__)
Config = MutableMapping[str, Any]

ACTORS: dict[str, type] = {"ff": Actor, "residual": ResidualActor}
CRITICS: dict[str, type] = {"scalar": NCritics, "two_hot": NCriticsTwoHot}
CNNS: dict[str, type[CNN]] = {"drq": DrQCNN, "gridworld": GridworldCNN, "impala": IMPALAishCNN, "nature": NatureishCNN}
DISTRIBUTIONS: dict[str, type] = {"tanh_gaussian": TanhGaussian, "beta": Beta, "gmm": GMM}

REGISTRIES: dict[str, MutableMapping[str, Any]] = {
    "traj_encoder": TRAJ_ENCODERS, "tstep_encoder": TSTEP_ENCODERS, "agent": AGENTS, "exploration": EXPLORATION, "actor": ACTORS,
    "critic": CRITICS, "cnn": CNNS, "distribution": DISTRIBUTIONS,
}  # fmt: skip
"""For each kind of part, its classes by name."""
# arguments of these classes that take a registered name
_NAMED = {"actor_type": "actor", "critic_type": "critic", "cnn_type": "cnn", "continuous_dist_type": "distribution"}


def use_config(
    custom_params: Config | None = None, gin_configs: Iterable[str | Mapping[str, Any]] | None = None, finalize: bool = True
) -> None:
    """Change default arguments: first by ``custom_params``, then by files from left to right. The last change wins.

    Changes apply to the whole process until `reset_config`. The log (``amago.cli_utils.parts``, a warning) lists values of
    earlier calls that are replaced, or still in force from an experiment that was started before. If an entry is wrong, nothing
    changes. It may be called again, also where a script has called ``gin.finalize()``.

    Args:
        custom_params: {"Class.argument": value}.
        gin_configs: paths of gin or YAML files; "zoo/NAME" for settings that come with the library; or settings "NAME=VALUE". In YAML and in
            settings, a name is that of gin, a field of `amago.Experiment`, or an argument of a part by its kind, "agent.gamma", which
            holds for each class of the kind.
        finalize: run gin's finalize hooks, which a script has registered by ``gin.config.register_finalize_hook``. The config is not locked.
    """
    for line in gin_config.change(custom_params or {}, map(_gin_entry, gin_configs or ())):
        log.warning("use_config: %s", line)
    if finalize:
        gin_config.run_finalize_hooks()


def _gin_entry(entry: str | Mapping[str, Any]) -> str | dict[str, Any]:
    """An entry of ``gin_configs`` for `amago.config.parse_files`."""
    found = entry if isinstance(entry, Mapping) else read_settings(str(entry))
    return (
        str(entry) if found is None else {full: value for item in found.items() for full, value in _bindings_of(*item).items()}
    )


def _bindings_of(name: str, value: object) -> dict[str, Any]:
    """A setting by its gin names."""
    check_single(name, value)
    part, _, argument = name.rpartition(".")
    if isinstance(value, str) and value.startswith("@"):
        value = gin_config.reference(value)
    if part in ("", "experiment"):
        return {f"amago.experiment.Experiment.{argument}": value}
    if part not in REGISTRIES:
        if part.islower() and part.isidentifier() and not gin_config.is_registered(part):
            raise ValueError(f"{name}: no part is called {part!r}; {gin_config.suggestion(part, [*REGISTRIES, 'experiment'])}")
        return {name: value}
    value, found = _chosen(_NAMED[argument], value) if argument in _NAMED else value, {}
    for cls in REGISTRIES[part].values():
        try:
            found[_full_name(cls, argument)] = value
        except ValueError as err:
            problem = err
    if not found:
        raise ValueError(f"{name}: {problem}")
    return found


def register(kind: str, name: str, cls: type) -> None:
    """Give your own class a name, for the ``switch_*`` functions and the command line.

    Args:
        kind: "traj_encoder", "tstep_encoder", "agent", "exploration", "actor", "critic", "cnn" or "distribution".
        name: the new name. `add_common_cli` offers it if it is called afterwards.
        cls: a class with the decorator ``@gin.configurable``.
    """
    if kind not in REGISTRIES:
        raise ValueError(f"kind must be one of {', '.join(sorted(REGISTRIES))}, got kind={kind!r}")
    known = REGISTRIES[kind].get(name)
    if known is not None and gin_config.selector_of(known) != gin_config.selector_of(cls):
        raise ValueError(f"name={name!r} is taken by the {kind} {known.__name__}; give {cls.__name__} another")
    gin_config.selector_of(cls)
    REGISTRIES[kind][name] = cls


def _chosen(kind: str, arch: Any) -> Any:
    known = REGISTRIES[kind]
    if callable(arch):  # a class, or what makes one's objects
        return arch
    if arch not in known:
        raise ValueError(f"{kind} must be one of {', '.join(sorted(known))} or a class, got {arch!r}")
    return known[arch]


def _switch(kind: str, arch: object, config: Config, options: dict[str, Any]) -> Any:
    chosen = _chosen(kind, arch)
    gin_config.selector_of(chosen)
    for name, value in options.items():
        config[_full_name(chosen, name)] = _chosen(_NAMED[name], value) if name in _NAMED else value
    return chosen


def _full_name(cls: Any, name: str) -> str:
    """The gin name of an argument of a class, or of the base class that has it, where constructors pass ``**kwargs`` on."""
    known: list[str] = []
    for base in cls.__mro__[:-1] if isinstance(cls, type) else (cls,):
        with suppress(ValueError):  # a class that gin does not know
            selector = gin_config.selector_of(base)
            if name in gin_config.settable_parameters(selector):
                return f"{selector}.{name}"
            known += gin_config.settable_parameters(selector)
            if all(p.kind is not p.VAR_KEYWORD for p in gin_config.signature_of(selector).values()):
                break
    raise ValueError(f"{cls.__name__} has no argument {name!r}; {gin_config.suggestion(name, known)}")


def switch_traj_encoder(
    config: Config, arch: str | type[TrajEncoder], memory_size: int | None = None, layers: int | None = None, **kwargs: object
) -> type[TrajEncoder]:
    """Choose the sequence model, write its arguments into ``config``, and return its class.

    Args:
        config: {"Class.argument": value}, for `use_config`.
        arch: "ff", "gru" (or "rnn"), "lstm", "mamba", "mingru", "transformer", or a class.
        memory_size: width of the model, under the class's own name for it; None: its default. A class without arguments has neither.
        layers: number of layers; None: the class's default.
        kwargs: other arguments of the class. They win over ``memory_size`` and ``layers``.
    """
    chosen = _chosen("traj_encoder", arch)
    sizes: dict[str, object] = {}
    if not (known := gin_config.settable_parameters(gin_config.selector_of(chosen))):
        memory_size = layers = None
    if memory_size is not None:
        sizes = dict(chosen.size_arguments(memory_size))
        if not sizes.keys() <= set(known):
            raise ValueError(
                f"memory_size sets {', '.join(sizes)}, which {chosen.__name__} does not have (it has {', '.join(known)}): set its own "
                "arguments by name and leave out memory_size, or give the class a class method size_arguments"
            )
    depth = {} if layers is None else {"n_layers": layers}
    return _switch("traj_encoder", chosen, config, sizes | depth | kwargs)


def switch_tstep_encoder(config: Config, arch: str | type[TstepEncoder], **kwargs: object) -> type[TstepEncoder]:
    """Choose the timestep encoder ("ff", "cnn", "dict", "goal" or a class) and write its arguments into ``config``; see `switch_traj_encoder`.

    The argument ``cnn_type`` may be "drq", "gridworld", "impala", "nature" or a class.
    """
    return _switch("tstep_encoder", arch, config, kwargs)


switch_step_encoder = switch_tstep_encoder


def default_tstep_encoder(config: Config, obs_space: gym.spaces.Dict, **kwargs: object) -> type[TstepEncoder]:
    """Choose a timestep encoder for these observations, as `switch_tstep_encoder` does.

    "cnn" for one image of 36x36 pixels or more, (H, W, C), and nothing else; "dict" for any other observations with images;
    otherwise "ff" with the arguments ``kwargs``.
    """
    images = [k for k, space in obs_space.spaces.items() if is_image(space)]
    if not images:
        return switch_tstep_encoder(config, "ff", **kwargs)
    if len(obs_space.spaces) == 1 and min((obs_space[images[0]].shape or ())[:2]) >= SMALLEST["NatureishCNN"]:
        return switch_tstep_encoder(config, "cnn", obs_key=images[0])
    return switch_tstep_encoder(config, "dict")


def switch_agent(config: Config, agent: str | type[BaseAgent], **kwargs: object) -> type[BaseAgent]:
    """Choose the agent ("agent", "multitask" or a class) and write its arguments into ``config``; see `switch_traj_encoder`.

    The arguments ``actor_type`` and ``critic_type`` may be names of `switch_actor` and `switch_critic`, or classes.
    """
    return _switch("agent", agent, config, kwargs)


def switch_actor(config: Config, actor: str | type, **kwargs: object) -> type:
    """Choose the actor ("ff", "residual" or a class), to be the ``actor_type`` of `switch_agent`; see `switch_traj_encoder`.

    The argument ``continuous_dist_type`` may be "tanh_gaussian", "beta", "gmm" or a class.
    """
    return _switch("actor", actor, config, kwargs)


def switch_critic(config: Config, critic: str | type, **kwargs: object) -> type:
    """Choose the critics ("scalar", "two_hot" or a class), to be the ``critic_type`` of `switch_agent`; see `switch_traj_encoder`."""
    return _switch("critic", critic, config, kwargs)


def switch_exploration(config: Config, strategy: str | type[ExplorationWrapper], **kwargs: object) -> type[ExplorationWrapper]:
    """Choose exploration ("egreedy", "bilevel" or a class) and write its arguments into ``config``; see `switch_traj_encoder`."""
    return _switch("exploration", strategy, config, kwargs)
