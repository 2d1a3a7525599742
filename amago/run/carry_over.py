"""What of a training state still applies when the data set, the actors or the processes of a run are others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from amago.envs.pool import ActorPool
from amago.loading import MixtureOfDatasets, RLDataset
from amago.run.describe import described

RUN_NAME = "<run_name>"


def load_dataset_state(
    dataset: RLDataset, state: dict[str, Any], saved: Mapping[str, Any] | None, run_name: str, saved_name: str | None
) -> str:
    """Restore the state of a data set, as far as it is the same as before.

    A data set that has become a member of a mixture, or was one, keeps its state.

    Args:
        state: of ``state_dict``.
        saved: the description of the data set that ``state`` is of; None: assume that it is this one.
        run_name, saved_name: of the run, now and then: a data set may have been renamed with its run.

    Returns:
        what was not restored, as a sentence; empty if all of it was.

    Raises:
        ValueError, KeyError: the data set refuses the state.
    """
    kind = _kind(described(dataset), run_name)
    before = kind if saved is None else _kind(saved, saved_name)
    if kind == before:
        dataset.load_state_dict(state)
        return ""
    members = dataset.datasets if isinstance(dataset, MixtureOfDatasets) else [dataset]
    parts = list(zip(state["datasets"], before["datasets"])) if "datasets" in before else [(state, before)]
    kept = 0
    for member in members:
        found = [s for s, k in parts if k == _kind(described(member), run_name)]
        if len(found) == 1:
            member.load_state_dict(found[0])
            kept += 1
    if kept == len(members):
        return "the proportions of the data sets begin anew" if kept > 1 else ""
    return "data sets that are new begin with their files in the order of their names" + (
        ", and the proportions of the mixture anew" if len(members) > 1 else ""
    )


def _kind(description: Mapping[str, Any], run_name: str | None) -> dict[str, Any]:
    """What must agree for a state to fit: classes, and names of buffers."""
    kind: dict[str, Any] = {"type": description.get("type")}
    if "datasets" in description:
        kind["datasets"] = [_kind(d, run_name) for d in description["datasets"]]
    if "dset_name" in description:
        kind["dset_name"] = RUN_NAME if description["dset_name"] == run_name else description["dset_name"]
    return kind


def load_pool_state(pool: ActorPool, saved: dict[str, Any], exploration_is_new: bool) -> None:
    """Restore the exploration schedules and random streams of actors, of which there may be another number now.

    Actors that are new continue the schedule of one that was there, with random streams of their own.

    Args:
        saved: of `ActorPool.state_dict`.
        exploration_is_new: exploration is of another class than before, and begins anew.
    """
    actors = saved["actors"]
    if exploration_is_new:
        actors = {k: {name: v for name, v in state.items() if name != "exploration"} for k, state in actors.items()}
    fresh = pool.state_dict()
    if (fresh["num_actors"], fresh["actors"].keys()) != (saved["num_actors"], actors.keys()):
        old = list(actors.values())
        actors = {k: _fitted(state, actors.get(k), old[i % len(old)]) for i, (k, state) in enumerate(fresh["actors"].items())}
    pool.load_state_dict({"num_actors": fresh["num_actors"], "actors": actors})


def _fitted(fresh: dict[str, Any], own: dict[str, Any] | None, other: dict[str, Any]) -> dict[str, Any]:
    """The state of an actor: its own if there is one of the same size, otherwise a new one with the schedule of another."""
    if own is not None and _rows(own) == _rows(fresh):
        return own
    source = other if own is None else own
    if "exploration" not in source or "exploration" not in fresh:
        return fresh
    schedule = {k: v for k, v in source["exploration"].items() if k == "global_step"}
    return {**fresh, "exploration": {**fresh["exploration"], **schedule}}


def _rows(state: Mapping[str, Any]) -> int | None:
    exploration = state.get("exploration", {})
    return len(exploration["multiplier"]) if "multiplier" in exploration else None
