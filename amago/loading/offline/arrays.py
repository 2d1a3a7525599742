"""Transitions in plain arrays as a data set."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import gin
import gymnasium as gym
import numpy as np
from numpy.typing import NDArray

from amago.data.relabel import Relabeler
from amago.data.trajectory import StoredTraj
from amago.loading.offline.action_rows import action_rows, slice_rows
from amago.loading.offline.base import OfflineDataset
from amago.loading.sources import Converter, InMemory

Array = NDArray[Any]
Rows = Array | Mapping[str, Array]


@gin.configurable(module="amago.loading")
class ArrayDataset(OfflineDataset):
    """Transitions in arrays of N rows, in the order in which they happened, one episode after the other.

    Row i holds an observation, the action taken there, and the reward and end flags that followed. An episode ends after a row
    with ``terminations`` or ``truncations``, and with the last row; no sequence crosses the end of an episode.

    With ``next_observations`` every row is a transition. Without, the observation after the last row of an episode is unknown.
    If the episode was truncated (or ends with the data), that observation would be bootstrapped from, so the last row serves as
    the final observation only. If it terminated, the value there is zero, so the last observation is repeated instead.

    Args:
        observations: (N, ...), or {key: (N, ...)}.
        actions: (N, ...), as the environment takes them. Of a Tuple or Dict {part: (N, ...)}, where parts of parts are named
            "arm/grip" and those of a tuple "0", "1", .., or (N, W): the numbers of the parts side by side, in the order of the
            space.
        rewards, terminations: (N,).
        action_space: the environment's.
        truncations: (N,); default: none.
        next_observations: like ``observations``.
        observation_space: the environment's; default: boxes bounded by their dtypes only.
        env_name: name in the statistics by environment.
        relabeler: rewrites each trajectory before a training sequence is cut from it.

    Raises:
        ValueError: (when opened) arrays of different lengths, numbers that are not finite, actions outside of their space.
    """

    def __init__(
        self,
        observations: Rows,
        actions: Rows,
        rewards: Array,
        terminations: Array,
        action_space: gym.Space[Any],
        truncations: Array | None = None,
        next_observations: Rows | None = None,
        observation_space: gym.Space[Any] | None = None,
        env_name: str = "arrays",
        relabeler: Relabeler | None = None,
    ):
        super().__init__(relabeler)
        self.observations, self.next_observations = observations, next_observations
        self.actions, self.rewards, self.terminations, self.truncations = actions, rewards, terminations, truncations
        self.action_space, self.observation_space, self.env_name = action_space, observation_space, env_name

    def load(self) -> InMemory:
        n = len(np.asarray(self.rewards))
        truncations = np.zeros(n, dtype=bool) if self.truncations is None else self.truncations
        rows = {"terminations": self.terminations, "truncations": truncations}
        several = {"actions": self.actions, "observations": self.observations, "next_observations": self.next_observations}
        for name, value in several.items():
            if isinstance(value, Mapping):
                rows |= {f"{name}[{k!r}]": v for k, v in value.items()}
            elif value is not None:
                rows[name] = value
        for name, value in rows.items():
            if len(value) != n:
                raise ValueError(f"{self.name}: {name} has {len(value)} rows, but rewards has {n}")
        space = infer_space(self.observations) if self.observation_space is None else self.observation_space
        converter = Converter(space, self.action_space)
        try:
            actions = action_rows(self.action_space, self.actions)
        except ValueError as err:
            raise ValueError(f"{self.name}: {err}") from err
        source = InMemory(self._episodes(converter, actions, truncations), converter.obs_space, converter.spec)
        converter.report(self.name)
        return source

    def _episodes(self, converter: Converter, actions: Any, truncations: Array) -> Iterator[StoredTraj]:
        terminations = np.asarray(self.terminations).astype(bool).reshape(-1)
        ends = terminations | np.asarray(truncations).astype(bool).reshape(-1)
        for start, stop in episodes(ends):
            known = self.next_observations is not None
            steps = stop - start if known or terminations[stop - 1] else stop - start - 1
            if steps == 0:
                continue
            last = self.next_observations if known else self.observations
            at = stop - 1  # the row of `last` that follows the last step
            yield converter.convert(
                f"{self.name}, rows {start} to {stop - 1}",
                _with_last(self.observations, start, start + steps, last, at),
                slice_rows(actions, start, start + steps),
                self.rewards[start : start + steps],
                terminations[start : start + steps],
                self.env_name,
            )


def episodes(ends: Array) -> Iterator[tuple[int, int]]:
    """Rows [start, stop) of each episode; ``ends`` (N,) is True in last rows. The last row of all ends an episode in any case."""
    start = 0
    for stop in np.flatnonzero(ends) + 1:
        yield start, int(stop)
        start = int(stop)
    if start < len(ends):
        yield start, len(ends)


def _with_last(rows: Rows, start: int, stop: int, last: Any, at: int) -> Any:
    """Rows [start, stop), followed by row ``at`` of ``last``."""
    if isinstance(rows, Mapping):
        return {k: _with_last(v, start, stop, last[k], at) for k, v in rows.items()}
    return np.concatenate((rows[start:stop], np.asarray(last[at : at + 1])))


def infer_space(rows: Rows) -> gym.Space[Any]:
    """Boxes with the shapes of these rows: uint8 if the rows are, else float32."""
    if isinstance(rows, Mapping):
        return gym.spaces.Dict({k: infer_space(v) for k, v in rows.items()})
    shape, dtype = rows.shape[1:], rows.dtype
    if dtype == np.uint8:
        return gym.spaces.Box(0, 255, shape=shape, dtype=np.uint8)
    return gym.spaces.Box(-np.inf, np.inf, shape=shape, dtype=np.float32)


# names of the same arrays in other collections
ALIASES = {"terminations": ("terminations", "terminals", "dones"), "truncations": ("truncations", "timeouts")}


def read_npz(path: str) -> dict[str, Any]:
    """The arrays of an ``.npz`` file by the names of `ArrayDataset`'s arguments.

    ``observations`` may be one array or several named ``observations/KEY``, and so may ``next_observations`` and ``actions``;
    ``terminals`` or ``dones`` are read as ``terminations``, ``timeouts`` as ``truncations``.

    Raises:
        ValueError: the file cannot be read or lacks an array; the message lists the arrays that it has.
    """
    try:
        with np.load(path, allow_pickle=False) as archive:
            found = {name: archive[name] for name in archive.files}
    except (OSError, ValueError, EOFError) as err:
        raise ValueError(f"{path} cannot be read as an .npz file of plain arrays: {err}") from err
    out: dict[str, Any] = {}
    for name in ("observations", "next_observations", "actions"):
        parts = {k.removeprefix(f"{name}/"): v for k, v in found.items() if k.startswith(f"{name}/")}
        if parts or name in found:
            out[name] = parts or found[name]
    for name in ("rewards", "terminations", "truncations"):
        value = next((found[alias] for alias in ALIASES.get(name, (name,)) if alias in found), None)
        if value is not None:
            out[name] = value
    missing = [n for n in ("observations", "actions", "rewards", "terminations") if n not in out]
    if missing:
        raise ValueError(f"{path} lacks {', '.join(missing)}; it has {sorted(found)}")
    return out
