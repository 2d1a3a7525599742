"""Parts of a training state: the position of a run in its schedule, the settings that differ on resume, and the state of its actors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from amago import config
from amago.agent import BaseAgent
from amago.agent.options import changeable_options
from amago.describe import describe, flatten, format_value
from amago.envs.pool import ActorPool
from amago.run.record import configurable, defaults_of
from amago.run.settings import IGNORE, REFUSE, ExperimentSettings, SettingsError

# ---- settings that differ ---------------------------------------------------------------------------------------------------

SWITCHES = ("entropy_target", "entropy_coeff")
"""Options of agents that may change, but neither from nor to None: weights with and without them differ."""


class Change(NamedTuple):
    """A setting that differs: its descriptions (`amago.describe`), whether a run cannot resume with it, and a note on lost state."""

    name: str
    before: object
    now: object
    refused: bool
    note: str = ""

    def __str__(self) -> str:
        """ "learning_rate 0.001 -> 0.0001", and the note."""
        return f"{self.name} {format_value(self.before)} -> {format_value(self.now)}{f' ({self.note})' if self.note else ''}"


def changes(saved: dict[str, Any], now: dict[str, Any]) -> list[Change]:
    """The settings that differ between two results of `amago.run.record.settings_of`, without those that do not matter."""
    return [*_fields(saved["fields"], now["fields"]), *_parameters(saved, now)]


def refuse(found: list[Change], path: object) -> None:
    """Raise a `SettingsError` that names every change that cannot be applied to the training state at ``path``, with both values."""
    refused = [f"{c.name} was {format_value(c.before)} and is now {format_value(c.now)}" for c in found if c.refused]
    if refused:
        raise SettingsError(
            f"{path} cannot be resumed with other networks, whose weights would not fit or would mean something else:\n  - "
            + "\n  - ".join(refused)
            + "\nset these as they were, or begin a new run under another run_name"
        )


def _fields(saved: dict[str, Any], now: dict[str, Any]) -> Iterator[Change]:
    declared = ExperimentSettings.__dataclass_fields__
    for name, value in now.items():
        rule = declared[name].metadata["resume"] if name in declared else ""
        if name not in saved or rule == IGNORE:  # not saved: a field of a later version, or of the user's subclass
            continue
        refused = rule == REFUSE and not _moved(saved[name], value)
        before, after = flatten(saved[name], name), flatten(value, name)
        # the attributes of another class are not comparable
        for part in [name] if before.get(name) != after.get(name) else sorted(before.keys() | after.keys()):
            if before.get(part) != after.get(part):
                yield Change(part, before.get(part), after.get(part), refused, "" if rule == REFUSE else rule)


def _parameters(saved: dict[str, Any], now: dict[str, Any]) -> Iterator[Change]:
    for name in sorted({*saved["parameters"], *now["bound"]}):
        selector, _, parameter = name.rpartition("/")[2].rpartition(".")
        cls = configurable(selector)
        if isinstance(cls, type) and issubclass(cls, ExperimentSettings) and parameter in cls.__dataclass_fields__:
            continue  # the default of a field
        if not _matters(name, saved, now):
            continue
        default = describe(defaults_of(selector).get(parameter)) if cls is not None else None
        before, after = (side["parameters"].get(name, default) for side in (saved, now))
        if before != after:
            yield Change(name, before, after, not (may_change_on_resume(name, before, after) or _moved(before, after)))


def _moved(before: object, now: object) -> bool:
    """True if two classes differ in their modules only: a script was imported, or a class was moved to another file."""
    return isinstance(before, str) and isinstance(now, str) and before.rpartition(".")[2] == now.rpartition(".")[2]


def _matters(name: str, saved: dict[str, Any], now: dict[str, Any]) -> bool:
    """True if the run uses a parameter. Saved settings list the unused parameters of networks: an agent had been built."""
    if name in saved["unused"] or name not in saved["parameters"]:
        return name in now["parameters"] and name not in now["unused"]
    return name in now["parameters"] or not name.startswith("amago.envs.exploration.")  # of another class than now


def may_change_on_resume(parameter: str, before: object, after: object) -> bool:
    """True if trained weights keep their meaning when a parameter, "scope/selector.parameter", has another value: options of an agent that
    its networks do not depend on, and, of a network, real numbers or None, such as rates and bounds: sizes are whole."""
    selector, _, name = parameter.rpartition("/")[2].rpartition(".")
    cls = configurable(selector) if selector.startswith(("amago.agent.", "amago.nets.")) else None
    if not isinstance(cls, type) or name not in config.settable_parameters(selector):  # a function, or of an earlier version
        return True
    if issubclass(cls, BaseAgent):
        switched = name in SWITCHES and (before is None) != (after is None)
        return name in changeable_options() and not switched
    numbers = all(v is None or (isinstance(v, int | float) and not isinstance(v, bool)) for v in (before, after))
    return numbers and float in (type(before), type(after))


# ---- the position ------------------------------------------------------------------------------------------------------------


@dataclass
class Position:
    """The position of a run in its schedule."""

    epoch: int = 0  # finished ones, which is also the number of the current one
    collected: int = 0  # steps of each actor in the current epoch
    trained: int = 0  # batches in the current epoch
    frames_by_env: dict[str, int] = field(default_factory=dict)  # environment steps collected by all ranks
    explored: Counter[str] = field(default_factory=Counter)  # of a launch: an actor's steps so far, by class of exploration
    set_by_program: bool = False  # a loop outside of the library has set ``epoch`` to the one that it has just finished
    has_collected: bool = False  # this process, in the current epoch
    has_trained: bool = False  # this process has had a training phase, or an evaluation has ended the run before the first

    @property
    def has_begun(self) -> bool:
        """True if the current epoch has had steps or batches."""
        return self.collected > 0 or self.trained > 0

    @property
    def file_epoch(self) -> int:
        """The epoch in the names of files: the current one if it has begun, otherwise the one before."""
        return self.epoch if self.set_by_program or self.has_begun else max(0, self.epoch - 1)

    def begin(self, epoch: int, set_by_program: bool = False) -> None:
        """Begin an epoch."""
        self.epoch, self.collected, self.trained, self.has_collected = int(epoch), 0, 0, False
        self.set_by_program = set_by_program

    def count(self, frames: Mapping[str, int]) -> None:
        """Add the environment steps of a phase of collection, given the steps of each rank."""
        for name, number in frames.items():
            self.frames_by_env[name] = self.frames_by_env.get(name, 0) + number

    def state_dict(self) -> dict[str, object]:
        """The entries in a training state."""
        collected, trained = (0, 0) if self.set_by_program else (self.collected, self.trained)
        epoch = self.epoch + self.set_by_program
        progress = {"epoch": epoch, "collected": collected, "trained": trained}
        return progress | {"frames_by_env": self.frames_by_env, "explored": self.explored}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a training state."""
        self.begin(state["epoch"])
        self.collected, self.trained = state["collected"], state["trained"]
        self.frames_by_env, self.explored = dict(state["frames_by_env"]), Counter(state.get("explored", {}))


# ---- the state of actors ------------------------------------------------------------------------------------------------------


def load_pool_state(pool: ActorPool, saved: dict[str, Any], exploration_is_new: bool) -> None:
    """Restore the exploration schedules and random streams of actors (``saved`` by `ActorPool.state_dict`), of which there may be another
    number now. New actors continue the schedule of an earlier one, with separate random streams; exploration of another class than before
    begins anew."""
    present, before = pool.state_dict(), dict(saved["actors"])
    if exploration_is_new:
        before = {k: {name: v for name, v in state.items() if name != "exploration"} for k, state in before.items()}
    actors, others = present["actors"], list(before.values())
    for i, (k, new) in enumerate(actors.items()):
        source = before.get(k, others[i % len(others)])
        if k in before and _size(source) == _size(new):
            actors[k] = source
        elif "exploration" in source and "exploration" in new:
            schedule = {name: v for name, v in source["exploration"].items() if name == "global_step"}
            actors[k] = {**new, "exploration": {**new["exploration"], **schedule}}
    pool.load_state_dict(present)


def _size(state: Mapping[str, Any]) -> int:
    """Environments that an actor's exploration serves; 0 if it does not distinguish them."""
    return len(state.get("exploration", {}).get("multiplier", ()))
