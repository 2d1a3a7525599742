"""The recorder: sits outside the exploration wrapper, beside the environment, and keeps what happened."""

from __future__ import annotations

import logging
import secrets
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from amago.data.trajectory import StoredTraj, Timestep
from amago.envs.amago_env import AMAGOEnv, AMAGOWrapper, Step
from amago.envs.autoreset import AutoReset
from amago.envs.statistics import EpisodeRecord, MetricSums, collect_row, collect_rows

if TYPE_CHECKING:
    from amago.store import TrajectoryWriter

logger = logging.getLogger(__name__)

Array = NDArray[Any]
_FIRST_CAPACITY = 64
NEVER = 1 << 62


class RecordingError(RuntimeError):
    """A trajectory could not be written: a fault of the disk or of the data, not of the environment's process."""


class SequenceWrapper(AMAGOWrapper):
    """Records rollouts: returns and metrics always, whole trajectories if asked to.

    Actions are recorded as the environment took them, after exploration. A rollout that ends is given to the store's writer,
    which commits it when a file is full or at `flush`. ``dones`` holds *terminated* only. With ``save_every`` a longer
    rollout is written in pieces, where the first observation of a piece is the last of the one before.

    A rollout that has not ended is in no file: `flush` commits finished ones, ``flush(partial=True)`` also writes what
    there is of the others, as pieces. `close` logs how many steps it leaves behind.

    Args:
        env: an `AMAGOEnv`, or an exploration wrapper around one.
        save_trajs_to: directory of the store; None records returns and metrics only.
        save_every: longest piece, in transitions; None: whole rollouts.
        save_trajs_as: "npz", "npz-compressed" (one trajectory a file) or "segments" (many).
        stagger: draw the length of each rollout's first piece from [save_every / 2, save_every], so that actors that started
            together do not write together, and pieces are not cut at the same places.
        writer: share one writer among recorders of a process; by default each has its own.
        actor: number of the (first) actor in `EpisodeRecord`.
        seed: of the lengths that ``stagger`` draws.

    Attributes:
        in_progress: rows whose rollout has at least one step.

    Raises:
        TypeError: ``env`` is no `AMAGOEnv`.
        ValueError: an option is wrong.
    """

    def __init__(
        self,
        env: Any,
        save_trajs_to: str | Path | None = None,
        save_every: float | None = None,
        save_trajs_as: str = "npz",
        stagger: bool = False,
        writer: TrajectoryWriter | None = None,
        actor: int = 0,
        seed: int | np.random.SeedSequence | None = None,
    ):
        super().__init__(env)
        if save_every is not None and not save_every >= 1:
            raise ValueError(f"save_every is {save_every!r}, but must be at least 1, or None for whole rollouts")
        inner: AMAGOEnv = self.amago_env
        self._inner, b = inner, inner.batched_envs
        self._own_writer = writer is None and save_trajs_to is not None
        if writer is None and save_trajs_to is not None:
            writer = open_writer(inner, save_trajs_to, save_trajs_as)
        self._writer, self.actor = writer, actor
        self.rng = np.random.default_rng(seed)
        self._save_every = NEVER if save_every is None else int(min(save_every, NEVER))
        self._stagger = stagger and save_every is not None
        self._episodes: list[EpisodeRecord] = []
        self._frames: dict[str, int] = {}
        self._tick = 0  # steps of the whole batch, ever
        self._began = np.zeros(b, dtype=np.int64)  # tick at which each row's rollout opened
        self._counted = np.zeros(b, dtype=np.int64)  # tick up to which each row's frames are in _frames
        self._ret = np.zeros(b)
        self._single_ret = 0.0  # the same, for the one row of an ordinary environment
        self._metrics = [MetricSums() for _ in range(b)]
        self._names = inner.env_names
        self._open = False
        self._rings(_FIRST_CAPACITY)
        self._t = 0  # transitions in the rings
        self._start = np.zeros(b, dtype=np.int64)  # ring index of each row's piece
        self._limit = np.full(b, NEVER, dtype=np.int64)  # transitions of that piece at most
        self._piece_time = np.zeros(b, dtype=np.int64)  # time index of its first observation
        self._prev: list[tuple[float, Array | None]] = [(0.0, None)] * b  # what arrived with it
        self._next_cut = NEVER  # ring length at which some piece is full

    # ------------------------------------------------------------------ stepping

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Timestep, dict[str, Any]]:
        """Open new rollouts everywhere; what was unfinished is dropped."""
        ts, info = self.env.reset(seed=seed, options=options)
        b = self.batched_envs
        self._count_frames(range(b) if self._open else ())
        self._t, self._open = 0, True
        for key, ring in self._obs:
            ring[0] = ts.obs[key]
        self._begin(np.arange(b), 0)
        if info:
            self._collect(info, np.ones(b, dtype=bool))
        return ts, info

    def step(self, action: Array) -> Step:  # type: ignore[override]  # arrays: rows side by side
        out: Any = self.env.step(action)
        ts, reward, terminated, truncated, info = out
        self._tick += 1
        auto = self._inner.auto
        if auto is not None:
            self._ret += reward[:, 0]
            self._after_batch(ts, reward, terminated, truncated, auto)
            return out
        self._single_ret += reward.item()
        if info:
            collect_row(info, self._metrics[0])
        if self._writer is not None:
            self._append(ts.obs, reward, terminated)
        if terminated.item() or truncated.item():
            self._ret[0] = self._single_ret
            self._finish(0, terminated.item(), None, True)
            self._began[0] = self._tick
            self._metrics[0] = MetricSums()
            self._single_ret = 0.0
            self._t, self._start[0], self._next_cut = 0, 0, NEVER
        elif self._t >= self._next_cut:
            self._cut_full()
        return out

    def _after_batch(self, ts: Timestep, reward: Array, terminated: Array, truncated: Array, auto: AutoReset) -> None:
        for info, stepped in auto.step_infos:
            if info:
                collect_rows(info, stepped, self._metrics)
        if self._writer is not None:
            self._append(ts.obs, reward, terminated)
        ended = terminated | truncated
        if ended.any():
            for row in np.flatnonzero(ended[:, 0]):
                last = None if auto.last_obs is None else {k: v[row] for k, v in auto.last_obs.items()}
                self._finish(int(row), bool(terminated[row, 0]), last, bool(auto.last_known[row]))
        if auto.opened.any():
            rows = np.flatnonzero(auto.opened)
            if auto.opened.all():  # every row starts anew: the rings can be used from their start again
                for _, ring in self._obs:
                    ring[0] = ring[self._t]
                self._t = 0
            self._begin(rows, self._t)
            for info, mask in auto.opening_infos:
                if info:
                    collect_rows(info, mask, self._metrics)
        waiting = ended[:, 0] & ~auto.opened
        if waiting.any():  # nothing more of these rollouts, until their rows open
            self._start[waiting], self._limit[waiting], self._began[waiting] = self._t, NEVER, self._tick
            self._plan_cut()
        if self._t >= self._next_cut:
            self._cut_full()

    def _collect(self, info: dict[str, Any], rows: NDArray[np.bool_]) -> None:
        if self._inner.vectorized:
            collect_rows(info, rows, self._metrics)
        else:
            collect_row(info, self._metrics[0])

    def _begin(self, rows: Array, at: int) -> None:
        """New rollouts open in these rows, whose first observation is at ring index ``at``."""
        self._began[rows] = self._counted[rows] = self._tick
        self._single_ret = 0.0
        self._ret[rows], self._start[rows], self._piece_time[rows] = 0.0, at, 0
        self._names = self._inner.env_names if self.batched_envs == len(rows) else self._renamed(rows)
        for row in rows:
            self._metrics[row] = MetricSums()
            self._prev[row] = (0.0, None)
            low = max(1, self._save_every // 2)
            self._limit[row] = self.rng.integers(low, self._save_every + 1) if self._stagger else self._save_every
        self._plan_cut()

    def _renamed(self, rows: Array) -> list[str]:
        names, now = list(self._names), self._inner.env_names
        for row in rows:
            names[row] = now[row]
        return names

    # ------------------------------------------------------------------ trajectories

    def _rings(self, capacity: int) -> None:
        """Arrays with time first and all rows side by side: one copy a step and key, however many rows."""
        b, spec = self.batched_envs, self.action_spec
        capacity = capacity if self._writer is not None else 0
        self._capacity = capacity
        spaces = self._inner.observation_space.spaces if self._writer is not None else {}
        self._obs = [(k, np.zeros((capacity + 1, b, *s.shape), dtype=s.dtype)) for k, s in spaces.items()]  # type: ignore[misc]
        self._actions = np.zeros((capacity, b, spec.stored_dim), dtype=spec.stored_dtype)
        self._rews = np.zeros((capacity, b, 1), dtype=np.float32)
        self._dones = np.zeros((capacity, b, 1), dtype=bool)

    def _append(self, obs: dict[str, Array], reward: Array, terminated: Array) -> None:
        if self._t == self._capacity:
            self._make_room()
        t = self._t
        self._actions[t], self._rews[t], self._dones[t] = self._inner.last_action, reward, terminated
        t += 1
        for key, ring in self._obs:
            ring[t] = obs[key]
        self._t = t

    def _make_room(self) -> None:
        """Forget what every row has written already, or double the rings."""
        first, t = int(self._start.min()), self._t
        old_obs, old = self._obs, (self._actions, self._rews, self._dones)
        if first <= t // 2:
            self._rings(2 * self._capacity)
        for (_, new), (_, ring) in zip(self._obs, old_obs):
            new[: t + 1 - first] = ring[first : t + 1].copy() if new is ring else ring[first : t + 1]
        for new, ring in zip((self._actions, self._rews, self._dones), old):
            new[: t - first] = ring[first:t].copy() if new is ring else ring[first:t]
        self._t -= first
        self._start -= first
        self._plan_cut()

    def _plan_cut(self) -> None:
        if self._save_every != NEVER:
            self._next_cut = int((self._start + self._limit).min())

    def _cut_full(self) -> None:
        for row in np.flatnonzero(self._t - self._start >= self._limit):
            self._cut(int(row))
        self._plan_cut()

    def _cut(self, row: int) -> None:
        """Write the piece that a row has, and go on with the next one."""
        self._write(row, self._t, None)
        t, n = self._t, self._t - int(self._start[row])
        self._prev[row] = (float(self._rews[t - 1, row, 0]), self._actions[t - 1, row].copy())
        self._piece_time[row] += n
        self._start[row], self._limit[row] = t, self._save_every

    def _finish(self, row: int, terminated: bool, last: dict[str, Array] | None, last_known: bool) -> None:
        """A rollout has ended with the transition before ring index t."""
        self._count_frames((row,))
        length, metrics = self._tick - int(self._began[row]), self._metrics[row].means()
        record = EpisodeRecord(self._names[row], float(self._ret[row]), length, metrics, self.actor + row, terminated)
        self._episodes.append(record)
        if self._writer is not None:
            # A terminated rollout's last observation is never used, so any will do; a truncated one's value comes from
            # it, so where it is lost the transition goes too.
            self._write(row, self._t if last_known or terminated else self._t - 1, last if last_known else None)

    def _write(self, row: int, stop: int, last: dict[str, Array] | None) -> None:
        start, writer = int(self._start[row]), self._writer
        if stop <= start or writer is None:
            return
        reward, action = self._prev[row]
        obs = {k: np.ascontiguousarray(ring[start : stop + 1, row]) for k, ring in self._obs}
        if last is not None:
            obs = {k: v.copy() for k, v in obs.items()}  # with one row, the array above is the ring itself
            for k, v in obs.items():
                v[-1] = last[k]
        traj = StoredTraj(
            obs=obs,
            actions=np.ascontiguousarray(self._actions[start:stop, row]),
            rews=np.ascontiguousarray(self._rews[start:stop, row]),
            dones=np.ascontiguousarray(self._dones[start:stop, row]),
            start_time=int(self._piece_time[row]),
            prev_reward=reward,
            prev_action=action,
            env_name=self._names[row],
        )
        try:
            writer.write(traj)
        except Exception as err:
            raise RecordingError(f"a trajectory of {len(traj)} steps could not be written: {err}") from err

    # ------------------------------------------------------------------ what others ask for

    def _count_frames(self, rows: Any) -> None:
        for row in rows:
            n = self._tick - int(self._counted[row])
            if n > 0:
                name = self._names[row]
                self._frames[name] = self._frames.get(name, 0) + n
            self._counted[row] = self._tick

    @property
    def in_progress(self) -> int:
        return int((self._tick > self._began).sum()) if self._open else 0

    def drain(self) -> tuple[list[EpisodeRecord], dict[str, int]]:
        """Rollouts that ended, and steps by environment name, since the last call."""
        self._count_frames(range(self.batched_envs) if self._open else ())
        out = self._episodes, self._frames
        self._episodes, self._frames = [], {}
        return out

    def flush(self, partial: bool = False) -> int:
        """Commit finished trajectories; with ``partial`` also what there is of unfinished ones. Returns how many.

        Raises:
            RecordingError: a file could not be written.
        """
        if self._writer is None:
            return 0
        if partial:
            self.cut()
        try:
            return self._writer.flush()
        except Exception as err:
            raise RecordingError(f"trajectories could not be committed: {err}") from err

    def cut(self) -> None:
        """Hand the unfinished rollouts to the writer as pieces; they go on."""
        for row in np.flatnonzero(self._t > self._start) if self._open else ():
            self._cut(int(row))
        self._plan_cut()

    def close(self) -> None:
        """Commit finished trajectories and close the environment."""
        rows = np.flatnonzero(self._t > self._start) if self._writer is not None and self._open else np.zeros(0, dtype=int)
        if len(rows):
            steps = int((self._t - self._start[rows]).sum())
            logger.info("%d unfinished rollouts with %d steps are not recorded", len(rows), steps)
        self._open = False
        try:
            if self._own_writer and self._writer is not None:
                self._writer.close()
        finally:
            self.env.close()


def open_writer(env: Any, directory: str | Path, save_as: str, name: str | None = None) -> TrajectoryWriter:
    """A writer for trajectories of this environment, whose files carry a name that no other writer has."""
    from amago.store import TrajectoryWriter

    writer = name or secrets.token_hex(5)
    return TrajectoryWriter(
        directory, writer=writer, action_space=env.action_spec.space, obs_space=env.observation_space, save_as=save_as
    )
