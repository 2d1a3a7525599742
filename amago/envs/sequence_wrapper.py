"""`SequenceWrapper`: environments of which sequences are recorded, for programs that step by themselves."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gymnasium as gym
import numpy as np
from numpy.typing import NDArray

from amago.data.extras import ExtraField, check_extra_fields
from amago.data.timesteps import PolicyInput, Timestep, Trajectory, row_of
from amago.envs.pieces import SaveEvery, check_save_every
from amago.envs.recorder import Recorder, open_writer
from amago.envs.statistics import AMAGO_ENV_LOG_PREFIX, EpisodeRecord, ReturnHistory, SpecialMetricHistory
from amago.envs.wrapper import AMAGOWrapper

if TYPE_CHECKING:
    from amago.store import TrajectoryWriter

Array = NDArray[Any]


class SequenceWrapper(AMAGOWrapper):
    """Records rollouts: always returns and metrics, on request whole trajectories.

    `reset` and `step` return observations {key: (B, ...)} as other Gymnasium environments do; `current_timestep` has all that a policy
    takes. Call `reset` after a rollout of an environment that is not vectorised has ended. The actors of a pool record with
    `amago.envs.recorder.Recorder`, without this wrapper.

    Actions are recorded as the environment took them, after exploration. Files hold finished rollouts only, and with ``save_every``
    finished pieces: `flush` commits these, ``flush(partial=True)`` also writes the pieces of unfinished ones. `close` logs how many
    steps are not recorded.

    Args:
        env: an `AMAGOEnv`, or an exploration wrapper around one.
        save_trajs_to: directory of the store; None records returns and metrics only.
        save_every: longest piece, in transitions; the first observation of a piece is the last of the piece before. With a pair (low,
            high) each piece ends after more than a number of steps drawn from [low, high). None: whole rollouts.
        save_trajs_as: "npz" or "npz-compressed" (one trajectory a file, written when it ends), or "segments" (many a file, written at
            `flush`, at `close` and when a file is full: faster).
        stagger: with a number for ``save_every``, draw the length of each rollout's first piece from [save_every / 2, save_every], so
            that actors that started together do not write together, and pieces are not cut at the same places.
        writer: share one writer among recorders of a process; by default each has its own.
        actor: number of the (first) actor in `EpisodeRecord`.
        seed: of the lengths of pieces that are drawn.
        extra_fields: declared extra fields to record; with ``writer``, the same as the writer's. A value that is missing in
            the environment's ``info``, or does not fit, is an error of the environment's step.

    Attributes:
        rl2_space: Dict {"obs": the observation space, "rl2": Box of the reward and the previous action}.
        already_vectorized: whether the environment has several rows.
        return_history: returns of the rollouts that have ended since `reset_stats`.
        special_history: all numbers that environments have logged since then, one a step or more.
        in_progress: rows whose rollout has at least one step.

    Raises:
        TypeError: ``env`` is no `AMAGOEnv`.
        ValueError: an option is wrong.
    """

    rl2_space: Any

    def __init__(
        self,
        env: Any,
        save_trajs_to: str | Path | None = None,
        save_every: SaveEvery = None,
        save_trajs_as: str = "npz",
        stagger: bool = False,
        writer: TrajectoryWriter | None = None,
        actor: int = 0,
        seed: int | np.random.SeedSequence | None = None,
        extra_fields: Iterable[ExtraField] = (),
    ):
        super().__init__(env)
        check_save_every(save_every)
        extra_fields = check_extra_fields(extra_fields)
        self._own_writer = None
        if writer is None and save_trajs_to is not None:
            writer = self._own_writer = open_writer(self.amago_env, save_trajs_to, save_trajs_as, extra_fields=extra_fields)
        self._recorder = Recorder(self.amago_env, writer, save_every, stagger, actor, seed, extra_fields)
        self.rl2_space = gym.spaces.Dict({"obs": self.amago_env.observation_space, "rl2": self.amago_env.rl2_space})
        self.already_vectorized = self.batched_envs > 1
        self._current: Timestep | None = None
        self._latest: list[Timestep] = []  # since the oldest rollout or piece in progress began
        self._opened_at = np.zeros(self.batched_envs, dtype=np.int64)  # where each row's rollout began in this list
        self.reset_stats()

    def attach_extras(self, extras: Mapping[str, Array]) -> None:
        """Record the extra fields of the policy from these arrays {name: (B, ...)}, as they are at each step."""
        self._recorder.attach_extras(extras)

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[dict[str, Array], dict[str, Any]]:
        """Open new rollouts in all rows and drop the unfinished ones; returns observations {key: (B, ...)} and the info."""
        ts, info = self.env.reset(seed=seed, options=options)
        self._recorder.opened(ts, info)
        self._log(info)
        self._current, self._latest = ts, [ts]
        self._opened_at[:] = 0
        return ts.obs, info

    def step(self, action: Any) -> tuple[dict[str, Array], Array, Array, Array, dict[str, Any]]:  # type: ignore[override]
        """Take one step in every row.

        Args:
            action: as `AMAGOEnv.step` takes it.

        Returns:
            observations {key: (B, ...)}, reward (B,), terminated (B,), truncated (B,), and the environment's info.

        Raises:
            RecordingError: a trajectory could not be written.
        """
        out: Any = self.env.step(action)
        ts, reward, terminated, truncated, info = out
        self._log(info)  # while the name is that of the rollout
        ended = self._recorder.counts.ended
        self._recorder.stepped(*out)
        auto = self.amago_env.auto
        opened = auto.opened if auto is not None else terminated | truncated
        if auto is None and opened.any():
            ts = ts.create_reset_version(opened)
        for episode in self._recorder.counts.last(self._recorder.counts.ended - ended):
            self.return_history.add_score(episode.env_name, episode.ret)
        self._current = ts
        self._latest.append(ts)
        self._opened_at[opened] = len(self._latest) - 1
        self._forget()
        return ts.obs, reward, terminated, truncated, info

    def _log(self, info: dict[str, Any] | None) -> None:
        for key, value in (info or {}).items():
            if isinstance(key, str) and key.startswith(AMAGO_ENV_LOG_PREFIX):
                if self.amago_env.vectorized and f"_{key}" in (info or {}):  # Gymnasium's mask of the rows that have a value
                    value = np.asarray(value)[np.asarray((info or {})[f"_{key}"], dtype=bool)]
                self.special_history.add_score(self.env_name, key, value)

    def _first(self, row: int) -> int:
        """Where the piece in progress of a row begins in the list of timesteps."""
        pieces = self._recorder.pieces
        return int(self._opened_at[row]) + (0 if pieces is None else pieces.since_cut(row))

    def _forget(self) -> None:
        """Drop the timesteps that are in no piece in progress, when they are the larger half."""
        first = min(self._first(row) for row in range(self.batched_envs)) if len(self._latest) % 64 == 0 else 0
        if first > len(self._latest) // 2:
            del self._latest[:first]
            self._opened_at -= first

    # ------------------------------------------------------------------ what is known of the rollouts

    @property
    def current_timestep(self) -> PolicyInput:
        """What a policy takes now: observations {key: (B, ...)}, rl2 (B, 1 + A) and time indices (B, 1), zero where a rollout opens.

        Raises:
            ValueError: before `reset`.
        """
        if self._current is None:
            raise ValueError("there is no current timestep: call reset() first")
        return self._current.as_input()

    @property
    def has_begun(self) -> bool:
        """Whether `reset` was called."""
        return self._current is not None

    @property
    def active_trajs(self) -> list[Trajectory]:
        """The timesteps of each row since its rollout began, or since its latest piece was written."""
        return [Trajectory(row_of(t, i) for t in self._latest[self._first(i) :]) for i in range(self.batched_envs)]

    @property
    def total_frames(self) -> int:
        """Environment steps of all rows, ever."""
        return sum(self.total_frames_by_env_name.values())

    @property
    def total_frames_by_env_name(self) -> dict[str, int]:
        """Environment steps by environment name, ever."""
        counts = self._recorder.counts
        if self._current is not None:
            counts.count_frames(range(self.batched_envs))
        return dict(counts.total_frames)

    @property
    def in_progress(self) -> int:
        return self._recorder.in_progress

    def reset_stats(self) -> None:
        """Empty `return_history` and `special_history`."""
        self.return_history, self.special_history = ReturnHistory(), SpecialMetricHistory()

    def drain(self) -> tuple[list[EpisodeRecord], dict[str, int]]:
        """Finished rollouts, and steps by environment name, since the last call."""
        return self._recorder.drain()

    # ------------------------------------------------------------------ files

    def flush(self, partial: bool = False) -> int:
        """Commit finished trajectories, with ``partial`` also the pieces of unfinished ones; returns how many.

        Raises:
            RecordingError: a file could not be written.
        """
        return self._recorder.flush(partial)

    def save_finished_trajs(self) -> int:
        """Commit finished trajectories, as `flush` does; returns how many."""
        return self._recorder.flush()

    def cut(self) -> None:
        """Hand the unfinished rollouts to the writer as pieces; they go on."""
        self._recorder.cut()

    def close(self) -> None:
        """Commit finished trajectories and close the environment."""
        self._recorder.close()
        try:
            if self._own_writer is not None:
                self._own_writer.close()
        finally:
            self.env.close()
