"""The trajectories of rollouts in progress, and how they reach the store's writer in pieces."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from amago.data.extras import ExtraField, trajectory_fields
from amago.data.trajectory import EXTRA, OBS, StoredTraj
from amago.envs.environment import AMAGOEnv

if TYPE_CHECKING:
    from amago.store import TrajectoryWriter

Array = NDArray[Any]
SaveEvery = float | tuple[int, int] | None
_FIRST_CAPACITY = 64
NEVER = 1 << 62


class RecordingError(RuntimeError):
    """A trajectory could not be written: a fault of the disk or of the data, not of the environment's process."""


def check_save_every(save_every: Any) -> None:
    """Raise ValueError for what is neither a positive number, nor a pair (low, high) of them, nor None."""
    if isinstance(save_every, (tuple, list)):
        right = len(save_every) == 2 and 1 <= save_every[0] <= save_every[1]
    else:
        right = save_every is None or bool(save_every >= 1)
    if not right:
        raise ValueError(
            f"save_every is {save_every!r}, but must be at least 1, a pair (low, high) with 1 <= low <= high, or None for whole rollouts"
        )


class Pieces:
    """Arrays of B rollouts in progress, from which pieces are cut and written.

    The arrays have time first and all rows side by side, so that a step is one copy for each field. Row r of the current piece
    has transitions [start[r], t).

    Args:
        env: the environment, whose spaces give the fields.
        writer: takes the pieces.
        save_every: longest piece, in transitions; a pair (low, high): each piece ends after more than a number of steps drawn from
            [low, high); None: whole rollouts.
        stagger: draw the length of each rollout's first piece from [save_every / 2, save_every].
        rng: of these lengths.
        extra_fields: declared extra fields.

    Attributes:
        t: transitions in the arrays.
        capacity: transitions that fit.
        next_cut: ``t`` at which some piece has its full length.
    """

    def __init__(
        self,
        env: AMAGOEnv,
        writer: TrajectoryWriter,
        save_every: SaveEvery,
        stagger: bool,
        rng: np.random.Generator,
        extra_fields: tuple[ExtraField, ...],
    ):
        self._env, self._writer, self._rng = env, writer, rng
        self._drawn = (int(save_every[0]), int(save_every[1])) if isinstance(save_every, (tuple, list)) else None
        longest = save_every if not isinstance(save_every, (tuple, list)) else save_every[1] + 1
        self._save_every = NEVER if longest is None else int(min(longest, NEVER))
        self._stagger = stagger and save_every is not None and self._drawn is None
        b = env.batched_envs
        fields = trajectory_fields(env.observation_space, env.action_spec, extra_fields)
        self._fields = [x for x in fields if x.role != "context"]
        self._once = {x.name: np.zeros((b, *(x.shape or ())), x.dtype) for x in self._fields if x.rows == "1"}
        self._from_policy: list[tuple[str, Array | None]] = [(EXTRA + x.name, None) for x in extra_fields if x.source != "info"]
        self._allocate(_FIRST_CAPACITY)
        self.t, self.next_cut = 0, NEVER
        self._start = np.zeros(b, dtype=np.int64)
        self._limit = np.full(b, NEVER, dtype=np.int64)  # transitions of each row's piece at most
        self._piece_time = np.zeros(b, dtype=np.int64)  # time index of its first observation
        self._prev: list[tuple[float, Array | None]] = [(0.0, None)] * b  # reward and action that came with that observation

    def _allocate(self, capacity: int) -> None:
        self.capacity, b = capacity, self._env.batched_envs
        self._arrays = {
            x.name: np.zeros((capacity + (x.rows == "T+1"), b, *(x.shape or ())), x.dtype)
            for x in self._fields
            if x.rows != "1"
        }
        self._obs = [(name[len(OBS) :], a) for name, a in self._arrays.items() if name.startswith(OBS)]
        self._actions, self._rews = self._arrays["actions"], self._arrays["rews"]
        self._rew_rows, self._done_rows = self._rews[..., 0], self._arrays["dones"][..., 0]

    def attach(self, extras: Mapping[str, Array]) -> None:
        """Take the extra fields of the policy, at each step, from these arrays (B, ...)."""
        self._from_policy = [(name, extras[name[len(EXTRA) :]]) for name, _ in self._from_policy]

    def reset(self, obs: Mapping[str, Array]) -> None:
        """Forget everything; all rows have these first observations."""
        for name, array in self._from_policy:
            if array is None:
                raise ValueError(
                    f"extra field {name[len(EXTRA) :]!r} comes from a policy, but no policy is attached: record it through a pool"
                )
        self.t = 0
        for key, ring in self._obs:
            ring[0] = obs[key]

    def append(self, obs: Mapping[str, Array], action: Array, reward: Array, terminated: Array) -> None:
        """One transition of every row, with the observation after it: action (B, S), reward (B,), terminated (B,)."""
        if self.t == self.capacity:
            self._make_room()
        t = self.t
        self._actions[t], self._rew_rows[t], self._done_rows[t] = action, reward, terminated
        for name, array in self._from_policy:
            self._arrays[name][t] = array
        t += 1
        for key, ring in self._obs:
            ring[t] = obs[key]
        self.t = t

    def put_step(self, extras: Mapping[str, Array]) -> None:
        """Values (B, ...) of the extra fields from the infos of the step that was appended last."""
        for name, values in extras.items():
            ring = self._arrays[EXTRA + name]
            ring[self.t - (len(ring) == self.capacity)] = values

    def put_opening(self, extras: Mapping[str, Array], rows: Array) -> None:
        """Values (B, ...) of the extra fields from the infos with which rollouts open in some rows."""
        for name, values in extras.items():
            to = self._once[EXTRA + name] if EXTRA + name in self._once else self._arrays[EXTRA + name][self.t]
            to[rows] = values[rows]

    def begin(self, rows: Array, alone: bool) -> None:
        """Rollouts open in these rows with the observations appended last.

        Args:
            alone: nothing else is in progress, so that the arrays are used from their start again.
        """
        if alone and self.t:
            for ring in self._arrays.values():
                if len(ring) > self.capacity:
                    ring[0] = ring[self.t]
            self.t = 0
        self._start[rows], self._piece_time[rows] = self.t, 0
        for row in rows:
            self._prev[row] = (0.0, None)
            low = max(1, self._save_every // 2)
            self._limit[row] = self._rng.integers(low, self._save_every + 1) if self._stagger else self._length()
        self._plan_cut()

    def _length(self) -> int:
        """The length of the next piece."""
        if self._drawn is None:
            return self._save_every
        low, high = self._drawn
        return 1 + int(self._rng.integers(low, max(low + 1, high)))

    def clear(self) -> None:
        """The only rollout has ended; `reset` follows."""
        self.t, self._start[0], self.next_cut = 0, 0, NEVER

    def wait(self, rows: Array) -> None:
        """Rollouts have ended in these rows (B,), and nothing of them is kept until `begin`."""
        self._start[rows], self._limit[rows] = self.t, NEVER
        self._plan_cut()

    def since_cut(self, row: int) -> int:
        """The time index of the first observation of a row's piece."""
        return int(self._piece_time[row])

    def unfinished(self) -> tuple[Array, int]:
        """The rows with a piece of at least one transition, and the transitions of all of them together."""
        rows = np.flatnonzero(self.t > self._start)
        return rows, int((self.t - self._start[rows]).sum())

    def cut_full(self, names: list[str]) -> None:
        """Write the pieces that have their full length."""
        self._cut(np.flatnonzero(self.t - self._start >= self._limit), names)

    def cut_all(self, names: list[str]) -> None:
        """Write the pieces of all unfinished rollouts, which go on."""
        self._cut(self.unfinished()[0], names)

    def _cut(self, rows: Array, names: list[str]) -> None:
        t = self.t
        for row in rows.tolist():
            self.write(row, t, names[row])
            self._prev[row] = (float(self._rews[t - 1, row, 0]), self._actions[t - 1, row].copy())
            self._piece_time[row] += t - self._start[row]
            self._start[row], self._limit[row] = t, self._length()
        self._plan_cut()

    def write(self, row: int, stop: int, name: str, last: Mapping[str, Array] | None = None) -> None:
        """Hand a row's piece, up to ``stop``, to the writer.

        Args:
            last: the observations after the last transition, if they are not those in the arrays.

        Raises:
            RecordingError: it could not be written.
        """
        start = int(self._start[row])
        if stop <= start:
            return
        found: dict[str, Array] = {}
        for x in self._fields:
            if x.rows == "1":
                found[x.name] = self._once[x.name][row : row + 1]
            else:
                found[x.name] = np.ascontiguousarray(self._arrays[x.name][start : stop + (x.rows == "T+1"), row])
        obs = {k: found.pop(OBS + k) for k, _ in self._obs}
        if last is not None:
            obs = {k: v.copy() for k, v in obs.items()}  # with one row, the array above is the ring itself
            for k, v in obs.items():
                v[-1] = last[k]
        extras = {k[len(EXTRA) :]: found.pop(k) for k in list(found) if k.startswith(EXTRA)}
        reward, action = self._prev[row]
        traj = StoredTraj(
            obs=obs, start_time=int(self._piece_time[row]), prev_reward=reward, prev_action=action, env_name=name, extras=extras,
            **found,
        )  # fmt: skip
        try:
            self._writer.write(traj)
        except Exception as err:
            raise RecordingError(f"a trajectory of {len(traj)} steps could not be written: {err}") from err

    def _make_room(self) -> None:
        """Drop what every row has written already, or double the arrays."""
        first, t = int(self._start.min()), self.t
        old, capacity = self._arrays, self.capacity
        if first <= t // 2:
            self._allocate(2 * capacity)
        for name, new in self._arrays.items():
            kept = old[name][first : t + (len(old[name]) > capacity)]
            new[: len(kept)] = kept.copy() if new is old[name] else kept
        self.t -= first
        self._start -= first
        self._plan_cut()

    def _plan_cut(self) -> None:
        if self._save_every != NEVER:
            self.next_cut = int((self._start + self._limit).min())
