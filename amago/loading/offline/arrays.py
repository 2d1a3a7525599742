"""Plain arrays of transitions, and where the episodes in them begin and end."""

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

    Row i is the observation before a step, the action taken there, and what came of it. An episode ends after a row with
    ``terminations`` or ``truncations``, and with the last row; nothing is ever learned across that boundary.

    With ``next_observations`` every row is a transition. Without, an episode that ends by truncation (or with the last row)
    lacks the observation that its last row led to, whose value the target needs: that row then only serves as the last
    observation. After a termination that value is zero, so the row is kept and the last observation is repeated in place of the unknown one.

    Args:
        observations: (N, ...), or {key: (N, ...)}.
        actions: (N, ...), as the environment takes them. Of a Tuple or Dict {part: (N, ...)}, where parts of parts are named
            "arm/grip" and those of a tuple "0", "1", .., or (N, W): the numbers of the parts side by side, in the order of the space.
        rewards, terminations: (N,).
        action_space: of the environment.
        truncations: (N,); default: none.
        next_observations: like ``observations``.
        observation_space: of the environment; default: boxes as wide as the dtypes.
        env_name: for the statistics by environment.
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
    """Rows [start, stop) of each episode; ``ends`` (N,) is True in its last row (which the very last row is anyway)."""
    start = 0
    for stop in np.flatnonzero(ends) + 1:
        yield start, int(stop)
        start = int(stop)
    if start < len(ends):
        yield start, len(ends)


def _with_last(rows: Rows, start: int, stop: int, last: Any, at: int) -> Any:
    """Rows [start, stop) and row ``at`` of ``last`` after them."""
    if isinstance(rows, Mapping):
        return {k: _with_last(v, start, stop, last[k], at) for k, v in rows.items()}
    return np.concatenate((rows[start:stop], np.asarray(last[at : at + 1])))


def infer_space(rows: Rows) -> gym.Space[Any]:
    """Boxes with the shapes of these rows: uint8 stays what it is, everything else becomes float32."""
    if isinstance(rows, Mapping):
        return gym.spaces.Dict({k: infer_space(v) for k, v in rows.items()})
    shape, dtype = rows.shape[1:], rows.dtype
    if dtype == np.uint8:
        return gym.spaces.Box(0, 255, shape=shape, dtype=np.uint8)
    return gym.spaces.Box(-np.inf, np.inf, shape=shape, dtype=np.float32)


# what other collections call the same arrays
ALIASES = {"terminations": ("terminations", "terminals", "dones"), "truncations": ("truncations", "timeouts")}


def read_npz(path: str) -> dict[str, Any]:
    """The arrays of an ``.npz`` file by the names of `ArrayDataset`'s arguments.

    ``observations`` may be one array or several named ``observations/KEY``, and so may ``next_observations`` and ``actions``;
    ``terminals`` or ``dones`` and ``timeouts`` are taken for ``terminations`` and ``truncations``.

    Raises:
        ValueError: it is no such file, or lacks an array; the message names what it has.
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
