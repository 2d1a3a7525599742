"""The recorder: counts returns and metrics of rollouts, and stores trajectories."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from amago.data.extras import ExtraField
from amago.data.timesteps import Timestep
from amago.envs.autoreset import AutoReset, Info
from amago.envs.counts import Counts
from amago.envs.environment import AMAGOEnv
from amago.envs.extra_info import InfoReader
from amago.envs.pieces import Pieces, RecordingError, SaveEvery, check_save_every
from amago.envs.statistics import EpisodeRecord, collect_row

if TYPE_CHECKING:
    from amago.store import TrajectoryWriter

logger = logging.getLogger(__name__)

Array = NDArray[Any]
_ONE = np.ones(1, dtype=bool)


class Recorder:
    """Records the rollouts of an environment: always returns and metrics, with a writer whole trajectories.

    Tell it of each reset (`opened`) and each step (`stepped`). Actions are recorded as the environment took them, after exploration.
    A finished rollout is handed to the writer, which commits it when a file is full or at `flush`. ``dones`` holds *terminated* only.
    With ``save_every`` a longer rollout is written in pieces; the first observation of a piece is the last of the piece before.

    Args:
        env: the environment itself, inside exploration and other wrappers.
        writer: takes the trajectories; None: only returns and metrics are recorded.
        save_every, stagger, actor, seed, extra_fields: as in `amago.envs.SequenceWrapper`.

    Attributes:
        rng: draws the lengths of pieces.
        counts: of the rollouts in progress.
        pieces: their trajectories; None without a writer.

    Raises:
        ValueError: an option is wrong.
    """

    def __init__(
        self,
        env: AMAGOEnv,
        writer: TrajectoryWriter | None = None,
        save_every: SaveEvery = None,
        stagger: bool = False,
        actor: int = 0,
        seed: int | np.random.SeedSequence | None = None,
        extra_fields: Sequence[ExtraField] = (),
    ):
        check_save_every(save_every)
        self._env, self._writer = env, writer
        self.rng = np.random.default_rng(seed)
        self.counts = Counts(env.batched_envs, actor)
        self._open = False
        self.pieces: Pieces | None = None
        self._infos: InfoReader | None = None
        if writer is not None:
            self.pieces = Pieces(env, writer, save_every, stagger, self.rng, tuple(extra_fields))
            if any(x.source == "info" for x in extra_fields):
                self._infos = InfoReader(extra_fields, env)

    def attach_extras(self, extras: Mapping[str, Array]) -> None:
        """Record the extra fields of the policy from these arrays {name: (B, ...)}, as they are at each step."""
        if self.pieces is not None:
            self.pieces.attach(extras)

    # ------------------------------------------------------------------ resets and steps

    def opened(self, ts: Timestep, info: dict[str, Any]) -> None:
        """New rollouts have opened in all rows; the unfinished ones are dropped."""
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
        if info:
            counts.collect([(info, everywhere)], self._env.vectorized)

    def stepped(self, ts: Timestep, reward: Array, terminated: Array, truncated: Array, info: dict[str, Any]) -> bool:
        """A step was taken; takes what `AMAGOEnv.step` returned.

        Returns:
            whether the rollout of an environment that is not vectorised has ended.

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
            pieces.append(ts.obs, self._env._taken, reward, terminated)
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
            pieces.cut_full(counts.names)
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
        counts.collect(auto.step_infos, True)
        if pieces is not None:
            pieces.append(ts.obs, self._env._taken, reward, terminated)
            if extras is not None:
                pieces.put_step(extras)
        ended = terminated | truncated
        for row in np.flatnonzero(ended):
            last = None if auto.last_obs is None else {k: v[row] for k, v in auto.last_obs.items()}
            self._finish(int(row), bool(terminated[row]), last, bool(auto.last_known[row]))
        if auto.opened.any():
            rows = np.flatnonzero(auto.opened)
            counts.begin(rows, self._env.env_names)
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
        steps = (self.counts.tick + 1 - self.counts.began).tolist()
        return self._infos.read(self._infos.at_step, infos, required, steps)

    def _finish(self, row: int, terminated: bool, last: dict[str, Array] | None, last_known: bool) -> None:
        """A rollout has ended with the latest transition."""
        self.counts.finish(row, terminated)
        if self.pieces is not None:
            # A terminated rollout's last observation is never used, so any will do; a truncated one's value comes from
            # it, so where it is lost the transition is dropped.
            stop = self.pieces.t if last_known or terminated else self.pieces.t - 1
            self.pieces.write(row, stop, self.counts.names[row], last if last_known else None)

    # ------------------------------------------------------------------ results

    @property
    def in_progress(self) -> int:
        """Rows whose rollout has at least one step."""
        return self.counts.in_progress if self._open else 0

    def drain(self) -> tuple[list[EpisodeRecord], dict[str, int]]:
        """Finished rollouts, and steps by environment name, since the last call."""
        if self._open:
            self.counts.count_frames(range(self._env.batched_envs))
        return self.counts.drain()

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
        if self._open and self.pieces is not None:
            self.pieces.cut_all(self.counts.names)

    def close(self) -> None:
        """Log how many steps are not recorded."""
        if self._open and self.pieces is not None:
            rows, steps = self.pieces.unfinished()
            if len(rows):
                logger.info("%d unfinished rollouts with %d steps are not recorded", len(rows), steps)
        self._open = False


def open_writer(
    env: Any, directory: str | Path, save_as: str, name: str | None = None, extra_fields: Iterable[ExtraField] = ()
) -> TrajectoryWriter:
    """A writer for trajectories of this environment, whose files carry a name that no other writer has."""
    from amago.store import TrajectoryWriter

    return TrajectoryWriter(
        directory, writer=name or secrets.token_hex(5), action_space=env.action_spec.space, obs_space=env.observation_space,
        save_as=save_as, extra_fields=extra_fields,
    )  # fmt: skip
