"""The training state of a run: the position in its schedule, the settings that differ on resume, saving and restoring all parts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from amago import config
from amago.agent import BaseAgent
from amago.agent.options import changeable_options
from amago.compat import accelerate_states
from amago.describe import describe, flatten, format_value
from amago.envs.pool import ActorPool
from amago.run.checkpoint import CheckpointError, epoch_of, identity, load_into, load_training_state
from amago.run.process import rng_state, seed_process, set_rng_state
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
    set_by_program: bool = False  # a loop outside of the library has set ``epoch`` to the one that it has just finished
    has_collected: bool = False  # this process, in the current epoch
    has_trained: bool = False  # this process has had a training phase

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
        return {"epoch": epoch, "collected": collected, "trained": trained, "frames_by_env": self.frames_by_env}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a training state."""
        self.begin(state["epoch"])
        self.collected, self.trained = state["collected"], state["trained"]
        self.frames_by_env = dict(state["frames_by_env"])


# ---- all parts: ``run`` is a started `amago.Experiment` ----------------------------------------------------------------------

Snapshot = tuple[dict[str, Tensor], dict[str, Any], dict[str, Any]]
"""(weights, tensors, state), the arguments of `amago.run.checkpoint.save_training_state`."""


def save(run: Any) -> Path | None:
    """Save a training state, and a file of the policy's weights, those that act; with an average, the trained ones are beside them. All ranks
    call this together. Returns the directory, in the main process, if it could be written."""
    run.learner.average_gradients(run.group)
    local = {"rng": rng_state(), "pools": {kind: rollout.pool.state_dict() for kind, rollout in run.actors.pools.items()}}
    ranks, number, saved = run.group.gather([local]), run.position.file_epoch, False
    if run.group.index == 0:
        saved = run.checkpoints.save(number, _snapshot(run, ranks), run.keep_training_states, run.keep_policy_weights)
    run.accelerator.wait_for_everyone()
    return run.checkpoints.path_of(number) if saved else None


def _snapshot(run: Any, ranks: list[dict[str, Any]]) -> Snapshot:
    """The training state, with what differs between ranks: random streams, and the exploration schedules of the actors."""
    state, tensors = run.learner.state_dict()
    state |= {
        **run.position.state_dict(), "seed": run.run_seed, "next_batch": run.batches.loader.next_batch, "dataset": run.data.state_dict(),
        "wall_time": run.run_log.wall_time, "processes": len(ranks), "ranks": ranks,
        "settings": run.rundir.settings_now(),
    }  # fmt: skip
    if callbacks := run.moments.state_dict():
        tensors["callbacks"] = callbacks
    return run.policy.state_dict(), tensors, state


def restore(run: Any, path: Path, started: bool) -> list[str]:
    """Load a training state into all parts; the present settings of optimizer and schedule remain.

    Args:
        started: ``start()`` is over: fields that were changed since count.

    Returns:
        notes on settings that differ and on lost state.

    Raises:
        SettingsError: a setting that differs cannot be applied.
        CheckpointError: it is incomplete or damaged, or was saved for another agent.
    """
    if run.optimizer is None:
        raise CheckpointError(
            "this process only collects, and has nothing into which a training state could be loaded: load the weights alone "
            "(resume_training_state=False)"
        )
    if accelerate_states.is_one(path):
        run.grad_update_counter = accelerate_states.load(path, run.policy, run.optimizer, run.lr_schedule)
        run.position.begin(1 + epoch_of(path))
        return [f"note: {path.name} was written by Accelerate: frames, batches and random numbers begin anew"]
    found = run.rundir.changes(path, started)
    refuse(found, path)
    notes = _restore(run, path, {c.name.partition(".")[0] for c in found})
    run.checkpoints.skip_latest()
    differing = [f"settings that differ from those of {path.name}:", *map(str, found)] if found else []
    return ["\n  ".join(differing)] * bool(found) + [f"note: {note}" for note in notes]


def _restore(run: Any, path: Path, changed: set[str]) -> list[str]:
    """Load a training state of this library, after fields that have changed; returns notes on lost state."""
    new_seed = int(run.seed) if "seed" in changed and run.seed is not None else None
    rank, now = run.group.index, run.group.count
    if new_seed is not None:
        seed_process((new_seed, rank, *identity(path)))
    weights, tensors, state = load_training_state(path)
    load_into(run.policy, weights, path)
    try:
        notes, saved = [], state["processes"]
        run.learner.load_state_dict(state, tensors, saved == now and "batches_per_update" not in changed)
        run.run_seed = run.batches.loader.seed = state["seed"] if new_seed is None else new_seed
        run.batches.loader.next_batch = state["next_batch"]
        fields = state["settings"]["fields"]
        if _kind(describe(run.data), run.run_name) == _kind(fields["dataset"], fields["run_name"]):
            run.data.load_state_dict(state["dataset"])
        else:
            notes.append(
                "datasets that are new begin with their files in the order of their names, and the proportions of a mixture anew"
            )
        run.run_log.rewind(state["wall_time"])
        _restore_process(run, state["ranks"], rank, "exploration_wrapper_type" in changed, new_seed is not None)
        if saved != now:
            notes.append(f"{saved} processes saved it, and there are {now}: the run is not repeated exactly")
        run.position.load_state_dict(state)
    except KeyError as err:
        raise CheckpointError(f"{path} lacks {err}: it was not saved by this version of amago") from err
    except ValueError as err:
        raise CheckpointError(f"{path} does not fit this run: {err}") from err
    unused = run.moments.load_state_dict(tensors.get("callbacks", {}))
    return notes + [f"the state of the callback {key} is not used: this run has no such callback" for key in unused]


def _kind(description: Mapping[str, Any], run_name: str) -> list[Any]:
    """The properties of a dataset that must agree for a state to fit: classes, and names of buffers, which are renamed with their run."""
    name = description.get("dset_name")
    members = [_kind(d, run_name) for d in description.get("datasets", ())]
    return [description.get("type"), None if name == run_name else name, members]


def _restore_process(run: Any, ranks: list[dict[str, Any]], rank: int, exploration_is_new: bool, reseeded: bool) -> None:
    """Restore random streams and actors; a new process takes the actors of an earlier one, with separate random streams."""
    local, is_new = ranks[rank % len(ranks)], rank >= len(ranks)
    for kind, saved in local["pools"].items():
        if kind in run.actors.pools:
            known = {**saved, "actors": {f"-{k}": v for k, v in saved["actors"].items()}} if is_new else saved
            load_pool_state(run.actors.pools[kind].pool, known, exploration_is_new)
    if is_new and not reseeded:
        seed_process((run.run_seed, rank, len(ranks)))
    elif not reseeded:
        set_rng_state(local["rng"])


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
