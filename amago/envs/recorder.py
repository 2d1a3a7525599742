"""The recorder of rollouts: `Recorder` counts returns and metrics and stores trajectories, which grow in a `RolloutBuffer`."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from amago.data.extras import ExtraField, as_array, trajectory_fields
from amago.data.trajectory import EXTRA, OBS, StoredTraj
from amago.envs.amago_env import AMAGOEnv
from amago.envs.inner_env import AutoReset, Info, Mask
from amago.envs.statistics import EpisodeRecord, EpisodeStats, collect_row
from amago.hindsight import Timestep

if TYPE_CHECKING:
    from amago.store import TrajectoryWriter

logger = logging.getLogger(__name__)

Array = NDArray[Any]
Write = Callable[[StoredTraj], None]
SaveEvery = float | tuple[int, int] | None
_ONE = np.ones(1, dtype=bool)
_FIRST_CAPACITY = 64
NEVER = 1 << 62


class RecordingError(RuntimeError):
    """A trajectory could not be written: a fault of the disk or of the data, not of the environment's process."""


def check_save_every(save_every: SaveEvery) -> None:
    """Raise ValueError unless the value is a positive number, a pair (low, high) of them, or None."""
    if isinstance(save_every, (tuple, list)):
        right = len(save_every) == 2 and 1 <= save_every[0] <= save_every[1]
    else:
        right = save_every is None or bool(save_every >= 1)
    if not right:
        raise ValueError(
            f"save_every is {save_every!r}, but must be at least 1, a pair (low, high) with 1 <= low <= high, or None for whole rollouts"
        )


class RolloutBuffer:
    """Arrays of B rollouts in progress, from which pieces are cut and written.

    The arrays have time first and all rows side by side, so that a step is one copy for each field. Row r of the current piece
    has transitions [start[r], t).

    Attributes:
        t: transitions in the arrays.
        capacity: transitions that fit.
        next_cut: ``t`` at which some piece has its full length.
        piece_time: (B,) the time index of the first observation of each row's piece.
    """

    def __init__(
        self,
        env: AMAGOEnv,
        write: Write,
        save_every: SaveEvery,
        stagger: bool,
        rng: np.random.Generator,
        extra_fields: tuple[ExtraField, ...],
    ):
        self._env, self._write, self._rng = env, write, rng
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
        self.piece_time = np.zeros(b, dtype=np.int64)
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
        """Open rollouts in these rows with the observations appended last. ``alone``: nothing else is in progress, so that the arrays
        are used from their start again.
        """
        if alone and self.t:
            for ring in self._arrays.values():
                if len(ring) > self.capacity:
                    ring[0] = ring[self.t]
            self.t = 0
        self._start[rows], self.piece_time[rows] = self.t, 0
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
        """Forget the only rollout, which has ended; `reset` follows."""
        self.t, self._start[0], self.piece_time[0], self.next_cut = 0, 0, 0, NEVER

    def wait(self, rows: Array) -> None:
        """Keep nothing of these rows (B,), in which rollouts have ended, until `begin`."""
        self._start[rows], self._limit[rows] = self.t, NEVER
        self._plan_cut()

    def unfinished(self) -> tuple[Array, int]:
        """The rows with a piece of at least one transition, and the transitions of all of them together."""
        rows = np.flatnonzero(self.t > self._start)
        return rows, int((self.t - self._start[rows]).sum())

    def cut(self, names: list[str], full: bool) -> None:
        """Write the pieces of unfinished rollouts, which continue: all, or those that have their full length."""
        t = self.t
        rows = np.flatnonzero(t - self._start >= self._limit) if full else self.unfinished()[0]
        for row in rows.tolist():
            self.write(row, t, names[row])
            self._prev[row] = (float(self._rews[t - 1, row, 0]), self._actions[t - 1, row].copy())
            self.piece_time[row] += t - self._start[row]
            self._start[row], self._limit[row] = t, self._length()
        self._plan_cut()

    def write(self, row: int, stop: int, name: str, last: Mapping[str, Array] | None = None) -> None:
        """Hand a row's piece, up to ``stop``, to the writer. ``last`` are the observations after the last transition, if they are not
        those in the arrays.
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
            obs=obs, start_time=int(self.piece_time[row]), prev_reward=reward, prev_action=action, env_name=name, extras=extras,
            **found,
        )  # fmt: skip
        try:
            self._write(traj)
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


class InfoReader:
    """Read the extra fields with ``source="info"`` of an environment of B rows.

    An ordinary environment's ``info`` holds one value under the field's name. A vectorised environment's holds an array
    (B, ...), valid where the mask under ``_NAME`` (if any) is True, as in Gymnasium; or it is the dict of a single row.

    Attributes:
        at_reset, at_step: the fields that are read from the info of a reset, and of a step.
    """

    def __init__(self, fields: Iterable[ExtraField], env: AMAGOEnv):
        self._env = env
        self.at_reset = [x for x in fields if x.source == "info" and x.rows != "T"]
        self.at_step = [x for x in fields if x.source == "info" and x.rows != "1"]

    def read(
        self, fields: Sequence[ExtraField], infos: Sequence[Info], required: Mask, steps: Sequence[int]
    ) -> dict[str, Array]:
        """The values {name: (B, *shape)} of the ``required`` rows (B,); other rows are undefined.

        Args:
            infos: infos, each with the rows (B,) that it describes.
            steps: of each row, for messages: steps since the reset.

        Raises:
            ValueError: a value is missing, has another shape or dtype, or is not finite.
        """
        out = {}
        hint = " (that of a rollout's last step belongs into info['final_info'])" if self._env.vectorized else ""
        for x in fields:
            values, found = np.zeros((len(required), *x.shape), x.dtype), np.zeros_like(required)
            for info, rows in infos:
                if x.name in info:
                    found |= self._take(x, info, rows & required, values, steps)
            if not found[required].all():
                row = int(np.flatnonzero(required & ~found)[0])
                raise self._error(x, row, steps, f"expected shape {x.shape} and dtype {x.dtype}, found none{hint}")
            out[x.name] = values
        return out

    def _take(self, x: ExtraField, info: dict[str, Any], rows: Mask, out: Array, steps: Sequence[int]) -> Mask:
        """Write the values of some rows; returns the rows that had one."""
        value, dtype = info[x.name], np.dtype(x.dtype)
        if self._env.vectorized and f"_{x.name}" in info:
            rows = rows & np.asarray(info[f"_{x.name}"], dtype=bool)
        batched = self._env.vectorized and not (rows.sum() == 1 and np.shape(value) == x.shape)
        if batched and np.shape(value)[:1] != rows.shape:
            text = f"expected an array with one value for each of {len(rows)} rows, found shape {np.shape(value)}"
            raise self._error(x, None, steps, text)
        for row in np.flatnonzero(rows).tolist():
            try:
                out[row] = as_array(value[row] if batched else value, dtype, x.shape)
            except ValueError as err:
                raise self._error(x, row, steps, str(err)) from None
        return rows

    def _error(self, x: ExtraField, row: int | None, steps: Sequence[int], text: str) -> ValueError:
        where = self._env.env_name if row is None else self._env.env_names[row]
        if row is not None:
            where += (f" (row {row})" if self._env.batched_envs > 1 else "") + f", step {steps[row]}"
        return ValueError(f"{where}: info[{x.name!r}], an extra field with rows {x.rows!r}: {text}")


class Recorder:
    """Record the rollouts of an environment: always returns and metrics, with ``write`` whole trajectories.

    Call `opened` after each reset and `stepped` after each step. Actions are recorded as the environment took them, after
    exploration; ``dones`` holds *terminated* only. The other arguments are those of `amago.envs.SequenceWrapper`.

    Attributes:
        rng: draws the lengths of pieces.
        counts: of the rollouts in progress.
        pieces: their trajectories; None if they are not recorded.
    """

    def __init__(
        self,
        env: AMAGOEnv,
        write: Write | None = None,
        save_every: SaveEvery = None,
        stagger: bool = False,
        actor: int = 0,
        seed: int | np.random.SeedSequence | None = None,
        extra_fields: Sequence[ExtraField] = (),
    ):
        check_save_every(save_every)
        self._env = env
        self.rng = np.random.default_rng(seed)
        self.counts = EpisodeStats(env.batched_envs, actor)
        self._open = False
        self.pieces: RolloutBuffer | None = None
        self._infos: InfoReader | None = None
        if write is not None:
            self.pieces = RolloutBuffer(env, write, save_every, stagger, self.rng, tuple(extra_fields))
            if any(x.source == "info" for x in extra_fields):
                self._infos = InfoReader(extra_fields, env)

    def attach_extras(self, extras: Mapping[str, Array]) -> None:
        """Record the extra fields of the policy from these arrays {name: (B, ...)}, as they are at each step."""
        if self.pieces is not None:
            self.pieces.attach(extras)

    def opened(self, ts: Timestep, info: dict[str, Any]) -> None:
        """Open new rollouts in all rows, and drop the unfinished ones."""
        b, pieces, counts = self._env.batched_envs, self.pieces, self.counts
        rows, everywhere = np.arange(b), np.ones(b, dtype=bool)
        if self._open:
            counts.count_frames(range(b))
        self._open = True
        counts.begin(rows, self._env.env_names)
        if pieces is not None:
            pieces.reset(ts.obs)
            pieces.begin(rows, alone=True)
            if self._infos is not None:
                opening = self._infos.read(self._infos.at_reset, [(info or {}, everywhere)], everywhere, [0] * b)
                pieces.put_opening(opening, rows)
        counts.collect([(info, everywhere)], self._env.vectorized)

    def stepped(self, ts: Timestep, reward: Array, terminated: Array, truncated: Array, info: dict[str, Any]) -> bool:
        """Record the result of `AMAGOEnv.step`; returns whether the rollout of an environment that is not vectorised has ended.

        Raises:
            RecordingError: a trajectory could not be written.
        """
        auto = self._env.auto
        if auto is not None:
            self._after_batch(ts, reward, terminated, truncated, auto)
            return False
        pieces, counts = self.pieces, self.counts
        extras = None if self._infos is None else self._step_extras([(info, _ONE)], _ONE)
        counts.tick += 1
        counts.ret[0] += reward.item()
        if info:
            collect_row(info, counts.metrics[0])
        if pieces is not None:
            pieces.append(ts.obs, self._env.stored_action, reward, terminated)
            if extras is not None:
                pieces.put_step(extras)
        at_end = terminated.item()
        if at_end or truncated.item():
            counts.names = self._env.env_names  # it may have been found out during the rollout
            self._finish(0, at_end, None, True)
            counts.close_row(0)
            if pieces is not None:
                pieces.clear()
            return True
        if pieces is not None and pieces.t >= pieces.next_cut:
            pieces.cut(counts.names, full=True)
        return False

    def _after_batch(self, ts: Timestep, reward: Array, terminated: Array, truncated: Array, auto: AutoReset) -> None:
        pieces, counts = self.pieces, self.counts
        extras = opening = None
        if self._infos is not None:  # first, so that an error leaves no part of this step
            extras = self._step_extras(auto.step_infos, auto.real)
            if auto.opened.any():
                zeros = [0] * len(auto.opened)
                opening = self._infos.read(self._infos.at_reset, auto.opening_infos, auto.opened, zeros)
        counts.tick += 1
        counts.ret += reward
        ended = terminated | truncated
        (info, rows), *final = auto.step_infos
        rows = rows if auto.tells_apart else np.ones_like(ended)
        counts.collect([(info, rows)], True, masked=len(ended) > 1 and not bool(ended.all()))
        counts.collect(final, True)
        if pieces is not None:
            pieces.append(ts.obs, self._env.stored_action, reward, terminated)
            if extras is not None:
                pieces.put_step(extras)
        for row in np.flatnonzero(ended):
            last = None if auto.last_obs is None else {k: v[row] for k, v in auto.last_obs.items()}
            self._finish(int(row), bool(terminated[row]), last, bool(auto.last_known[row]))
        if auto.opened.any():
            opened = np.flatnonzero(auto.opened)
            counts.begin(opened, self._env.env_names)
            if pieces is not None:
                pieces.begin(opened, alone=bool(auto.opened.all()))
                if opening is not None:
                    pieces.put_opening(opening, opened)
            if auto.tells_apart:
                counts.collect(auto.opening_infos, True)
        waiting = ended & ~auto.opened
        if waiting.any():
            counts.began[waiting] = counts.tick
        if pieces is not None:
            if waiting.any():
                pieces.wait(waiting)
            if pieces.t >= pieces.next_cut:
                pieces.cut(counts.names, full=True)

    def _step_extras(self, infos: Sequence[Info], required: NDArray[np.bool_]) -> dict[str, Array]:
        assert self._infos is not None
        steps = (self.counts.tick + 1 - self.counts.began).tolist()
        return self._infos.read(self._infos.at_step, infos, required, steps)

    def _finish(self, row: int, terminated: bool, last: dict[str, Array] | None, last_known: bool) -> None:
        """Finish a rollout that has ended with the latest transition."""
        self.counts.finish(row, terminated)
        if self.pieces is not None:
            # A terminated rollout's last observation is never used, so any will do; a truncated one's value comes from
            # it, so where it is lost the transition is dropped.
            stop = self.pieces.t if last_known or terminated else self.pieces.t - 1
            self.pieces.write(row, stop, self.counts.names[row], last if last_known else None)

    @property
    def in_progress(self) -> int:
        """Rows whose rollout has at least one step."""
        return int((self.counts.tick > self.counts.began).sum()) if self._open else 0

    @property
    def total_frames(self) -> dict[str, int]:
        """Environment steps by environment name, ever."""
        if self._open:
            self.counts.count_frames(range(self._env.batched_envs))
        return dict(self.counts.total_frames)

    def drain(self) -> tuple[list[EpisodeRecord], dict[str, int]]:
        """Finished rollouts, and steps by environment name, since the last call."""
        if self._open:
            self.counts.count_frames(range(self._env.batched_envs))
        return self.counts.drain()

    def cut(self) -> None:
        """Hand the unfinished rollouts to the writer as pieces; they continue."""
        if self._open and self.pieces is not None:
            self.pieces.cut(self.counts.names, full=False)

    def close(self) -> None:
        """Log how many steps are not recorded."""
        if self._open and self.pieces is not None:
            rows, steps = self.pieces.unfinished()
            if len(rows):
                logger.info("%d unfinished rollouts with %d steps are not recorded", len(rows), steps)
        self._open = False


def flush(writer: TrajectoryWriter | None) -> int:
    """Commit the trajectories that a writer holds; returns how many. RecordingError if a file could not be written."""
    try:
        return 0 if writer is None else writer.flush()
    except Exception as err:
        raise RecordingError(f"trajectories could not be committed: {err}") from err


def open_writer(
    env: AMAGOEnv, directory: str | Path, save_as: str, name: str | None = None, extra_fields: Iterable[ExtraField] = ()
) -> TrajectoryWriter:
    """A writer for trajectories of this environment, whose files carry a name that no other writer has."""
    from amago.store import TrajectoryWriter

    return TrajectoryWriter(
        directory, writer=name or secrets.token_hex(5), action_space=env.action_spec.space, obs_space=env.observation_space,
        save_as=save_as, extra_fields=extra_fields,
    )  # fmt: skip
