"""The recorder: a wrapper outside the exploration wrapper that counts returns and metrics and stores trajectories."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from amago.data.extras import ExtraField, check_extra_fields
from amago.data.trajectory import Timestep
from amago.envs.amago_env import AMAGOEnv, AMAGOWrapper, Step
from amago.envs.autoreset import AutoReset, Info
from amago.envs.extra_info import InfoReader
from amago.envs.pieces import NEVER, Pieces, RecordingError
from amago.envs.statistics import EpisodeRecord, MetricSums, collect_row, collect_rows

if TYPE_CHECKING:
    from amago.store import TrajectoryWriter

logger = logging.getLogger(__name__)

Array = NDArray[Any]

__all__ = ["RecordingError", "SequenceWrapper"]


class SequenceWrapper(AMAGOWrapper):
    """Records rollouts: always returns and metrics, on request whole trajectories.

    Actions are recorded as the environment took them, after exploration. A finished rollout is handed to the store's writer,
    which commits it when a file is full or at `flush`. ``dones`` holds *terminated* only. With ``save_every`` a longer rollout is
    written in pieces; the first observation of a piece is the last of the piece before.

    Files hold finished rollouts only: `flush` commits these, ``flush(partial=True)`` also writes the pieces of unfinished ones.
    `close` logs how many steps are not recorded.

    Args:
        env: an `AMAGOEnv`, or an exploration wrapper around one.
        save_trajs_to: directory of the store; None records returns and metrics only.
        save_every: longest piece, in transitions; None: whole rollouts.
        save_trajs_as: "npz" or "npz-compressed" (one trajectory a file, written when it ends), or "segments" (many a file, written at
            `flush`, at `close` and when a file is full: faster).
        stagger: draw the length of each rollout's first piece from [save_every / 2, save_every], so that actors that started
            together do not write together, and pieces are not cut at the same places.
        writer: share one writer among recorders of a process; by default each has its own.
        actor: number of the (first) actor in `EpisodeRecord`.
        seed: of the lengths that ``stagger`` draws.
        extra_fields: declared extra fields to record; with ``writer``, the same as the writer's. A value that is missing in
            the environment's ``info``, or does not fit, is an error of the environment's step.

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
        extra_fields: Iterable[ExtraField] = (),
    ):
        super().__init__(env)
        if save_every is not None and not save_every >= 1:
            raise ValueError(f"save_every is {save_every!r}, but must be at least 1, or None for whole rollouts")
        inner: AMAGOEnv = self.amago_env
        self._inner = inner
        self._own_writer = writer is None and save_trajs_to is not None
        extra_fields = check_extra_fields(extra_fields)
        if writer is None and save_trajs_to is not None:
            writer = open_writer(inner, save_trajs_to, save_trajs_as, extra_fields=extra_fields)
        self._writer = writer
        self.rng = np.random.default_rng(seed)
        self._counts = _Counts(inner.batched_envs, actor, inner.env_names)
        self._open = False
        self._pieces: Pieces | None = None
        self._infos: InfoReader | None = None
        if writer is not None:
            longest = NEVER if save_every is None else int(min(save_every, NEVER))
            self._pieces = Pieces(inner, writer, longest, stagger and save_every is not None, self.rng, extra_fields)
            if any(x.source == "info" for x in extra_fields):
                self._infos = InfoReader(extra_fields, inner)

    def attach_extras(self, extras: Mapping[str, Array]) -> None:
        """Record the extra fields of the policy from these arrays {name: (B, ...)}, as they are at each step."""
        if self._pieces is not None:
            self._pieces.attach(extras)

    # ------------------------------------------------------------------ stepping

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Timestep, dict[str, Any]]:
        """Open new rollouts in all rows and drop the unfinished ones."""
        ts, info = self.env.reset(seed=seed, options=options)
        b, pieces, counts = self.batched_envs, self._pieces, self._counts
        rows, everywhere = np.arange(b), np.ones(b, dtype=bool)
        if self._open:
            counts.count_frames(range(b))
        self._open = True
        counts.begin(rows, self._inner.env_names)
        if pieces is not None:
            pieces.reset(ts.obs)
            pieces.begin(rows, alone=True)
            if self._infos is not None:
                opening = self._infos.read(self._infos.at_reset, [(info or {}, everywhere)], everywhere, [0] * b)
                pieces.put_opening(opening, rows)
        if info:
            counts.collect([(info, everywhere)], self._inner.vectorized)
        return ts, info

    def step(self, action: Array) -> Step:  # type: ignore[override]  # arrays: rows side by side
        out: Any = self.env.step(action)
        ts, reward, terminated, truncated, info = out
        auto = self._inner.auto
        if auto is not None:
            self._after_batch(ts, reward, terminated, truncated, auto)
            return out
        pieces, counts = self._pieces, self._counts
        extras = None if self._infos is None else self._step_extras([(info, _ONE)], _ONE)
        counts.tick += 1
        counts.ret[0] += reward.item()
        if info:
            collect_row(info, counts.metrics[0])
        if pieces is not None:
            pieces.append(ts.obs, self._inner.last_action, reward, terminated)
            if extras is not None:
                pieces.put_step(extras)
        if terminated.item() or truncated.item():
            self._finish(0, terminated.item(), None, True)
            counts.close_row(0)
            if pieces is not None:
                pieces.clear()
        elif pieces is not None and pieces.t >= pieces.next_cut:
            pieces.cut_full(counts.names)
        return out

    def _after_batch(self, ts: Timestep, reward: Array, terminated: Array, truncated: Array, auto: AutoReset) -> None:
        pieces, counts = self._pieces, self._counts
        extras = opening = None
        if self._infos is not None:  # first, so that an error leaves no part of this step
            extras = self._step_extras(auto.step_infos, auto.real)
            if auto.opened.any():
                zeros = [0] * len(auto.opened)
                opening = self._infos.read(self._infos.at_reset, auto.opening_infos, auto.opened, zeros)
        counts.tick += 1
        counts.ret += reward[:, 0]
        counts.collect(auto.step_infos, True)
        if pieces is not None:
            pieces.append(ts.obs, self._inner.last_action, reward, terminated)
            if extras is not None:
                pieces.put_step(extras)
        ended = (terminated | truncated)[:, 0]
        for row in np.flatnonzero(ended):
            last = None if auto.last_obs is None else {k: v[row] for k, v in auto.last_obs.items()}
            self._finish(int(row), bool(terminated[row, 0]), last, bool(auto.last_known[row]))
        if auto.opened.any():
            rows = np.flatnonzero(auto.opened)
            counts.begin(rows, self._inner.env_names)
            if pieces is not None:
                pieces.begin(rows, alone=bool(auto.opened.all()))
                if opening is not None:
                    pieces.put_opening(opening, rows)
            counts.collect(auto.opening_infos, True)
        waiting = ended & ~auto.opened
        if waiting.any():
            counts.began[waiting] = counts.tick
        if pieces is not None:
            if waiting.any():
                pieces.wait(waiting)
            if pieces.t >= pieces.next_cut:
                pieces.cut_full(counts.names)

    def _step_extras(self, infos: Sequence[Info], required: NDArray[np.bool_]) -> dict[str, Array]:
        assert self._infos is not None
        steps = (self._counts.tick + 1 - self._counts.began).tolist()
        return self._infos.read(self._infos.at_step, infos, required, steps)

    def _finish(self, row: int, terminated: bool, last: dict[str, Array] | None, last_known: bool) -> None:
        """A rollout has ended with the latest transition."""
        self._counts.finish(row, terminated)
        if self._pieces is not None:
            # A terminated rollout's last observation is never used, so any will do; a truncated one's value comes from
            # it, so where it is lost the transition is dropped.
            stop = self._pieces.t if last_known or terminated else self._pieces.t - 1
            self._pieces.write(row, stop, self._counts.names[row], last if last_known else None)

    # ------------------------------------------------------------------ results

    @property
    def in_progress(self) -> int:
        return self._counts.in_progress if self._open else 0

    def drain(self) -> tuple[list[EpisodeRecord], dict[str, int]]:
        """Finished rollouts, and steps by environment name, since the last call."""
        if self._open:
            self._counts.count_frames(range(self.batched_envs))
        return self._counts.drain()

    def flush(self, partial: bool = False) -> int:
        """Commit finished trajectories, with ``partial`` also the pieces of unfinished ones; returns how many.

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
        if self._open and self._pieces is not None:
            self._pieces.cut_all(self._counts.names)

    def close(self) -> None:
        """Commit finished trajectories and close the environment."""
        if self._open and self._pieces is not None:
            rows, steps = self._pieces.unfinished()
            if len(rows):
                logger.info("%d unfinished rollouts with %d steps are not recorded", len(rows), steps)
        self._open = False
        try:
            if self._own_writer and self._writer is not None:
                self._writer.close()
        finally:
            self.env.close()


_ONE = np.ones(1, dtype=bool)


class _Counts:
    """Returns, lengths, metrics and steps of B rows.

    Attributes:
        tick: steps of the whole batch, ever.
        began: (B,) tick at which each row's rollout opened.
        ret: (B,) its return so far.
        metrics, names: what it has logged so far, and its environment's name.
    """

    def __init__(self, rows: int, actor: int, names: list[str]):
        self.tick, self._actor = 0, actor
        self.began = np.zeros(rows, dtype=np.int64)
        self._counted = np.zeros(rows, dtype=np.int64)  # tick up to which each row's steps are in _frames
        self.ret = np.zeros(rows)
        self.metrics = [MetricSums() for _ in range(rows)]
        self.names = names
        self._episodes: list[EpisodeRecord] = []
        self._frames: dict[str, int] = {}

    @property
    def in_progress(self) -> int:
        return int((self.tick > self.began).sum())

    def begin(self, rows: Array, names: list[str]) -> None:
        """New rollouts open in these rows; ``names`` are those of all rows."""
        self.began[rows] = self._counted[rows] = self.tick
        self.ret[rows] = 0.0
        changed = set(rows.tolist())
        self.names = [new if row in changed else old for row, (old, new) in enumerate(zip(self.names, names))]
        for row in changed:
            self.metrics[row] = MetricSums()

    def collect(self, infos: Iterable[Info], vectorized: bool) -> None:
        """Add what environments log in their infos."""
        for info, rows in infos:
            if info and vectorized:
                collect_rows(info, rows, self.metrics)
            elif info:
                collect_row(info, self.metrics[0])

    def finish(self, row: int, terminated: bool) -> None:
        """Make the record of a rollout that ended with the latest step."""
        self.count_frames((row,))
        length, metrics = self.tick - int(self.began[row]), self.metrics[row].means()
        record = EpisodeRecord(self.names[row], float(self.ret[row]), length, metrics, self._actor + row, terminated)
        self._episodes.append(record)

    def close_row(self, row: int) -> None:
        """Nothing is in progress in a row until `begin`."""
        self.began[row], self.ret[row], self.metrics[row] = self.tick, 0.0, MetricSums()

    def count_frames(self, rows: Iterable[int]) -> None:
        for row in rows:
            n = self.tick - int(self._counted[row])
            if n > 0:
                name = self.names[row]
                self._frames[name] = self._frames.get(name, 0) + n
            self._counted[row] = self.tick

    def drain(self) -> tuple[list[EpisodeRecord], dict[str, int]]:
        out = self._episodes, self._frames
        self._episodes, self._frames = [], {}
        return out


def open_writer(
    env: Any, directory: str | Path, save_as: str, name: str | None = None, extra_fields: Iterable[ExtraField] = ()
) -> TrajectoryWriter:
    """A writer for trajectories of this environment, whose files carry a name that no other writer has."""
    from amago.store import TrajectoryWriter

    return TrajectoryWriter(
        directory, writer=name or secrets.token_hex(5), action_space=env.action_spec.space, obs_space=env.observation_space,
        save_as=save_as, extra_fields=extra_fields,
    )  # fmt: skip
