"""The recorder of rollouts: `Recorder` counts returns and metrics and stores trajectories, which grow in a `RolloutBuffer`."""

from __future__ import annotations

import logging
import secrets
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from amago.data.extras import ExtraField, as_array, trajectory_fields
from amago.data.trajectory import EXTRA, OBS, StoredTrajs
from amago.envs.amago_env import AMAGOEnv
from amago.envs.inner_env import AutoReset, Info, Mask
from amago.envs.statistics import EpisodeRecord, Sums, collect_row, collect_rows

if TYPE_CHECKING:
    from amago.store import TrajectoryWriter

logger = logging.getLogger(__name__)

Array = NDArray[Any]
Write = Callable[[StoredTrajs], None]
SaveEvery = float | tuple[int, int] | None
_FIRST_CAPACITY = 64
_WRITE_BYTES = 1 << 24  # at most, of the pieces that are handed to the writer together
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
        self._once = {x.name: np.zeros((b, *x.shape), x.dtype) for x in self._fields if x.rows == "1"}
        self._from_policy: list[tuple[str, Array | None]] = [(EXTRA + x.name, None) for x in extra_fields if x.source != "info"]
        self._allocate(_FIRST_CAPACITY)
        self.t, self.next_cut = 0, NEVER
        self._start = np.zeros(b, dtype=np.int64)
        self._limit = np.full(b, NEVER, dtype=np.int64)  # transitions of each row's piece at most
        self.piece_time = np.zeros(b, dtype=np.int64)
        self._prev_reward = np.zeros(b, np.float32)  # reward and action that came with that observation
        self._prev_action = np.zeros_like(self._arrays["actions"][0])

    def _allocate(self, capacity: int) -> None:
        self.capacity, b = capacity, self._env.batched_envs
        self._arrays = {
            x.name: np.zeros((capacity + (x.rows == "T+1"), b, *x.shape), x.dtype) for x in self._fields if x.rows != "1"
        }
        self._obs = [(name[len(OBS) :], a) for name, a in self._arrays.items() if name.startswith(OBS)]
        self._steps = self._arrays["actions"], self._arrays["rews"][..., 0], self._arrays["dones"][..., 0]
        self._row_bytes = sum(a[0, 0].nbytes for a in self._arrays.values())

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

    def append(
        self, obs: Mapping[str, Array], action: Array, reward: Array, terminated: Array, extras: Mapping[str, Array]
    ) -> None:
        """One transition of every row, with the observation after it: action (B, S), reward (B,), terminated (B,), and the extra fields
        (B, ...) from its infos."""
        if self.t == self.capacity:
            self._make_room()
        t, (actions, rewards, dones) = self.t, self._steps
        actions[t], rewards[t], dones[t] = action, reward, terminated
        for name, array in self._from_policy:
            self._arrays[name][t] = array
        t += 1
        for key, ring in self._obs:
            ring[t] = obs[key]
        for name, values in extras.items():
            ring = self._arrays[EXTRA + name]
            ring[t - (len(ring) == self.capacity)] = values
        self.t = t

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
        self._prev_reward[rows], self._prev_action[rows] = 0.0, 0
        low = max(1, self._save_every // 2)
        self._limit[rows] = (
            self._rng.integers(low, self._save_every + 1, len(rows)) if self._stagger else self._lengths(len(rows))
        )
        self._plan_cut()

    def _lengths(self, n: int) -> Any:
        """The lengths of the next pieces."""
        if self._drawn is None:
            return self._save_every
        low, high = self._drawn
        return 1 + self._rng.integers(low, max(low + 1, high), n)

    def wait(self, rows: Array) -> None:
        """Keep nothing of these rows (n,), in which rollouts have ended, until `begin`."""
        self._start[rows], self._limit[rows], self.piece_time[rows] = self.t, NEVER, 0
        self._plan_cut()

    def unfinished(self) -> tuple[Array, int]:
        """The rows with a piece of at least one transition, and the transitions of all of them together."""
        rows = np.flatnonzero(self.t > self._start)
        return rows, int((self.t - self._start[rows]).sum())

    def cut(self, names: list[str], full: bool) -> None:
        """Write the pieces of unfinished rollouts, which continue: all, or those that have their full length."""
        t, arrays = self.t, self._arrays
        rows = np.flatnonzero(t - self._start >= self._limit) if full else self.unfinished()[0]
        self.write(rows, np.full(len(rows), t), names)
        self._prev_reward[rows], self._prev_action[rows] = arrays["rews"][t - 1, rows, 0], arrays["actions"][t - 1, rows]
        self.piece_time[rows] += t - self._start[rows]
        self._start[rows], self._limit[rows] = t, self._lengths(len(rows))
        self._plan_cut()

    def write(
        self, rows: Array, stops: Array, names: list[str], last: Mapping[str, Array] | None = None, known: Array | None = None
    ) -> None:
        """Hand the pieces of some rows (n,), up to ``stops`` (n,), to the writer; ``names`` are those of all rows. ``last`` {key: (n, ...)} are
        the observations after the last transitions of those that are ``known`` (n,), if they are not those in the arrays.
        """
        most = max(1, _WRITE_BYTES // (self._row_bytes * max(1, self.t)))
        spans = zip(range(len(rows)), rows.tolist(), self._start[rows].tolist(), stops.tolist())
        chosen = [(i, row, start, stop) for i, row, start, stop in spans if start < stop]
        for part in (chosen[first : first + most] for first in range(0, len(chosen), most)):
            at = np.array([i for i, *_ in part])
            which, n = rows[at], np.array([stop - start for *_, start, stop in part])
            arrays = {name: array[which] for name, array in self._once.items()}
            for x in self._fields:
                if x.rows != "1":
                    ring, more = self._arrays[x.name], x.rows == "T+1"
                    arrays[x.name] = np.concatenate([ring[start : stop + more, row] for _, row, start, stop in part])
            if last is not None:
                real = known[at]  # type: ignore[index]
                ends = np.cumsum(n + 1)[real]
                for key, _ in self._obs:
                    arrays[OBS + key][ends - 1] = last[key][at[real]]
            try:
                self._write(
                    StoredTrajs(
                        arrays, n, self.piece_time[which], self._prev_reward[which], self._prev_action[which],
                        [names[row] for _, row, *_ in part],
                    )
                )  # fmt: skip
            except Exception as err:
                raise RecordingError(f"a trajectory of {n.max()} steps could not be written: {err}") from err

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


def read_fields(
    env: AMAGOEnv, fields: Sequence[ExtraField], infos: Sequence[Info], required: Mask, steps: Sequence[int]
) -> dict[str, Array]:
    """The values {name: (B, *shape)} of extra fields in the infos of an environment; of rows that are not ``required`` undefined.

    An ordinary environment's ``info`` holds one value under the field's name. A vectorised environment's holds an array
    (B, ...), valid where the mask under ``_NAME`` (if any) is True, as in Gymnasium; or it is the dict of a single row.

    Args:
        infos: infos, each with the rows (B,) that it describes.
        required: (B,) bool.
        steps: of each row, for messages: steps since the reset.

    Raises:
        ValueError: a value is missing, has another shape or dtype, or is not finite.
    """

    def problem(x: ExtraField, row: int | None, text: str) -> ValueError:
        where = env.env_name if row is None else env.env_names[row]
        if row is not None:
            where += (f" (row {row})" if env.batched_envs > 1 else "") + f", step {steps[row]}"
        return ValueError(f"{where}: info[{x.name!r}], an extra field with rows {x.rows!r}: {text}")

    out = {}
    for x in fields:
        values, dtype, found = np.zeros((len(required), *x.shape), x.dtype), np.dtype(x.dtype), np.zeros_like(required)
        for info, rows in infos:
            if x.name not in info:
                continue
            value, rows = info[x.name], rows & required
            if env.vectorized and f"_{x.name}" in info:
                rows = rows & np.asarray(info[f"_{x.name}"], dtype=bool)
            batched = env.vectorized and not (rows.sum() == 1 and np.shape(value) == x.shape)
            if batched and np.shape(value)[:1] != rows.shape:
                text = f"expected an array with one value for each of {len(rows)} rows, found shape {np.shape(value)}"
                raise problem(x, None, text)
            for row in np.flatnonzero(rows).tolist():
                try:
                    values[row] = as_array(value[row] if batched else value, dtype, x.shape)
                except ValueError as err:
                    raise problem(x, row, str(err)) from None
            found |= rows
        if not found[required].all():
            hint = " (that of a rollout's last step belongs into info['final_info'])" if env.vectorized else ""
            text = f"expected shape {x.shape} and dtype {x.dtype}, found none{hint}"
            raise problem(x, int(np.flatnonzero(required & ~found)[0]), text)
        out[x.name] = values
    return out


class Recorder:
    """Record the rollouts of an environment: always returns and metrics, with ``write`` whole trajectories.

    Call `opened` after each reset and `stepped` after each step. Actions are recorded as the environment took them, after
    exploration; ``dones`` holds *terminated* only. Other arguments: see `amago.envs.SequenceWrapper`.

    Attributes:
        rng: draws the lengths of pieces.
        metrics: the numbers logged in the rollout in progress of each row.
        episodes: the rollouts that have ended since the last `drain`.
        pieces: the trajectories in progress; None if they are not recorded.
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
        self._env, self._actor, self._open, self.rng = env, actor, False, np.random.default_rng(seed)
        self._everywhere = np.ones(env.batched_envs, dtype=bool)
        self._tick = 0  # steps of the whole batch, ever
        self._began = np.zeros(env.batched_envs, dtype=np.int64)  # tick at which each row's rollout opened
        self._counted = self._began.copy()  # tick up to which each row's steps are in _frames
        self._returns = np.zeros(env.batched_envs)
        self.metrics: list[Sums] = [{} for _ in self._everywhere]
        self._names = [""] * env.batched_envs  # until a rollout begins: an environment may have no name before
        self.episodes: list[EpisodeRecord] = []
        self._frames: Counter[str] = Counter()
        self._drained: Counter[str] = Counter()  # the part of these that `drain` has returned
        self.pieces: RolloutBuffer | None = None
        self._at_reset: list[ExtraField] = []
        self._at_step: list[ExtraField] = []
        if write is not None:
            self.pieces = RolloutBuffer(env, write, save_every, stagger, self.rng, tuple(extra_fields))
            self._at_reset = [x for x in extra_fields if x.source == "info" and x.rows != "T"]
            self._at_step = [x for x in extra_fields if x.source == "info" and x.rows != "1"]

    def attach_extras(self, extras: Mapping[str, Array]) -> None:
        """Record the extra fields of the policy from these arrays {name: (B, ...)}, as they are at each step."""
        if self.pieces is not None:
            self.pieces.attach(extras)

    def opened(self, obs: Mapping[str, Array], info: dict[str, Any]) -> None:
        """Open new rollouts in all rows with observations {key: (B, ...)}, and drop the unfinished ones."""
        if self._open:
            self._count_frames()
        self._open = True
        if self.pieces is not None:
            self.pieces.reset(obs)
        self._begin(np.arange(len(self._names)), True, self._opening([(info or {}, self._everywhere)], self._everywhere))
        self._collect([(info, self._everywhere)])

    def stepped(
        self, obs: Mapping[str, Array], reward: Array, terminated: Array, truncated: Array, info: dict[str, Any]
    ) -> bool:
        """Record a step: the observations {key: (B, ...)} after it, and the other results of `AMAGOEnv.step`; returns whether the rollout
        of an environment that is not vectorised has ended.

        Raises:
            RecordingError: a trajectory could not be written.
        """
        auto, pieces = self._env.auto, self.pieces
        extras: dict[str, Array] = {}
        if self._at_step:  # first, so that an error leaves no part of this step
            infos, real = ([(info, self._everywhere)], self._everywhere) if auto is None else (auto.step_infos, auto.real)
            extras = read_fields(self._env, self._at_step, infos, real, (self._tick + 1 - self._began).tolist())
        opening = {} if auto is None else self._opening(auto.opening_infos, auto.opened)
        self._tick += 1
        if auto is None:
            self._returns[0] += reward.item()
            if info:
                collect_row(info, self.metrics[0])
        else:
            self._returns += reward
            ended = terminated | truncated
            (info, rows), *final = auto.step_infos
            rows = rows if auto.tells_apart else self._everywhere
            self._collect([(info, rows)], masked=len(ended) > 1 and not bool(ended.all()))
            self._collect(final)
        if pieces is not None:
            pieces.append(obs, self._env.stored_action, reward, terminated, extras)
        over = auto is None and bool(terminated.item() or truncated.item())
        if over:
            self._names = self._env.env_names  # it may have been found out during the rollout
            self._finish(np.zeros(1, np.int64), terminated, None, self._everywhere)
            self._wait(np.zeros(1, np.int64))
        elif auto is not None:
            self._end_and_begin(ended, terminated, auto, opening)
        if pieces is not None and pieces.t >= pieces.next_cut:
            pieces.cut(self._names, full=True)
        return over

    def _end_and_begin(self, ended: Mask, terminated: Mask, auto: AutoReset, opening: dict[str, Array]) -> None:
        """Finish the rollouts that have ended in a vectorised environment, and open those that have begun."""
        if len(rows := np.flatnonzero(ended)):
            last = None if auto.last_obs is None else {k: v[rows] for k, v in auto.last_obs.items()}
            self._finish(rows, terminated[rows], last, auto.last_known[rows])
            if len(waiting := np.flatnonzero(ended & ~auto.opened)):
                self._wait(waiting)
        if len(rows := np.flatnonzero(auto.opened)):
            self._begin(rows, len(rows) == len(ended), opening)
            if auto.tells_apart:
                self._collect(auto.opening_infos)

    def _wait(self, rows: Array) -> None:
        """Count nothing of rows (n,), in which rollouts have ended, until the next begin."""
        self._close(rows)
        if self.pieces is not None:
            self.pieces.wait(rows)

    def _opening(self, infos: Sequence[Info], rows: Mask) -> dict[str, Array]:
        """The extra fields of the rollouts that open in these rows (B,)."""
        if not (self._at_reset and rows.any()):
            return {}
        return read_fields(self._env, self._at_reset, infos, rows, [0] * len(rows))

    def _begin(self, rows: Array, alone: bool, opening: dict[str, Array]) -> None:
        names = self._env.env_names
        self._counted[rows] = self._tick
        for row in rows.tolist():
            self._names[row] = names[row]
        self._close(rows)
        if self.pieces is not None:
            self.pieces.begin(rows, alone)
            self.pieces.put_opening(opening, rows)

    def _collect(self, infos: Iterable[Info], masked: bool = False) -> None:
        for info, rows in infos:
            if info and self._env.vectorized:
                collect_rows(info, rows, self.metrics, masked)
            elif info:
                collect_row(info, self.metrics[0])

    def _finish(self, rows: Array, terminated: Array, last: dict[str, Array] | None, known: Array) -> None:
        """Finish the rollouts of rows (n,) that have ended with the latest transition."""
        self._count_frames(rows.tolist())
        lengths, returns = (self._tick - self._began[rows]).tolist(), self._returns[rows].tolist()
        for row, length, ret, at_end in zip(rows.tolist(), lengths, returns, terminated.tolist()):
            metrics = {k: total / n for k, (total, n) in self.metrics[row].items()}
            self.episodes.append(EpisodeRecord(self._names[row], ret, length, metrics, self._actor + row, at_end))
        if self.pieces is not None:
            # A terminated rollout's last observation is never used, so any will do; a truncated one's value comes from
            # it, so where it is lost the transition is dropped.
            self.pieces.write(rows, self.pieces.t - ~(known | terminated), self._names, last, known)

    def _close(self, rows: Array) -> None:
        self._began[rows], self._returns[rows] = self._tick, 0.0
        for row in rows.tolist():
            self.metrics[row] = {}

    def _count_frames(self, rows: Iterable[int] | None = None) -> None:
        """Count the steps of rows (default: all), up to now, for the environments that have their names."""
        for row in range(len(self._names)) if rows is None else rows:
            if (n := self._tick - int(self._counted[row])) > 0:
                self._frames[self._names[row]] += n
            self._counted[row] = self._tick

    @property
    def in_progress(self) -> int:
        """Rows whose rollout has at least one step."""
        return int((self._tick > self._began).sum()) if self._open else 0

    @property
    def total_frames(self) -> dict[str, int]:
        """Environment steps by environment name, ever."""
        if self._open:
            self._count_frames()
        return dict(self._frames)

    def drain(self) -> tuple[list[EpisodeRecord], dict[str, int]]:
        """Finished rollouts, and steps by environment name, since the last call."""
        frames = Counter(self.total_frames)
        out = self.episodes, dict(frames - self._drained)
        self.episodes, self._drained = [], frames
        return out

    def cut(self) -> None:
        """Hand the unfinished rollouts to the writer as pieces; they continue."""
        if self._open and self.pieces is not None:
            self.pieces.cut(self._names, full=False)

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
