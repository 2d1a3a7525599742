"""`SequenceWrapper`: environments of which sequences are recorded, for programs that step by themselves; `EnvCreator` makes them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gymnasium as gym
import numpy as np
from numpy.typing import NDArray

from amago.data.extras import ExtraField, check_extra_fields
from amago.data.trajectory import StoredTrajs
from amago.envs.amago_env import AMAGOWrapper, innermost
from amago.envs.recorder import Recorder, SaveEvery, check_save_every, flush, open_writer
from amago.envs.statistics import EpisodeRecord, ReturnHistory, SpecialMetricHistory, metric_name
from amago.hindsight import PolicyInput, Timestep, Trajectory, split_batched_timestep

if TYPE_CHECKING:
    from amago.store import TrajectoryWriter

Array = NDArray[Any]


class SequenceWrapper(AMAGOWrapper):
    """Record rollouts: always returns and metrics, on request whole trajectories.

    `reset` and `step` return observations {key: (B, ...)} as other Gymnasium environments do; `current_timestep` has all that a
    policy takes. Call `reset` after a rollout of an environment that is not vectorised has ended. The actors of a pool record
    with `amago.envs.recorder.Recorder`, without this wrapper.

    Actions are recorded as the environment took them, after exploration. Files hold finished rollouts only, and with
    ``save_every`` finished pieces: `flush` commits these, ``flush(partial=True)`` also writes the pieces of unfinished ones.
    `close` logs how many steps are not recorded.

    Args:
        env: an `AMAGOEnv`, or an exploration wrapper around one.
        save_trajs_to: directory of the store; None records returns and metrics only.
        save_every: longest piece, in transitions; the first observation of a piece is the last of the piece before. With a pair
            (low, high) each piece ends after more than a number of steps drawn from [low, high). None: whole rollouts.
        save_trajs_as: "npz" or "npz-compressed" (one trajectory a file, written when it ends), or "segments" (many a file,
            written at `flush`, at `close` and when a file is full: faster).
        stagger: with a number for ``save_every``, draw the length of each rollout's first piece from [save_every / 2,
            save_every], so that actors that started together do not write together, and pieces are not cut at the same places.
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
        has_begun: whether `reset` was called.

    Raises:
        TypeError: ``env`` is no `AMAGOEnv`.
        ValueError: an option is wrong.
    """

    def __init__(
        self,
        env: object,
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
        self._closes_writer = writer is None
        if writer is None and save_trajs_to is not None:
            writer = open_writer(self.amago_env, save_trajs_to, save_trajs_as, extra_fields=extra_fields)
        self._writer = writer
        self._recorder = Recorder(
            self.amago_env, None if writer is None else self._write, save_every, stagger, actor, seed, extra_fields
        )
        self.rl2_space = gym.spaces.Dict({"obs": self.amago_env.observation_space, "rl2": self.amago_env.rl2_space})
        self.already_vectorized = self.batched_envs > 1
        self.has_begun = False
        self._latest: list[Timestep] = []  # since the oldest rollout or piece in progress began
        self._opened_at = np.zeros(self.batched_envs, dtype=np.int64)  # where each row's rollout began in this list
        self.reset_stats()

    def attach_extras(self, extras: Mapping[str, Array]) -> None:
        """Record the extra fields of the policy from these arrays {name: (B, ...)}, as they are at each step."""
        self._recorder.attach_extras(extras)

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[dict[str, Array], dict[str, Any]]:
        """Open new rollouts in all rows and drop the unfinished ones; returns observations {key: (B, ...)} and the info."""
        ts, info = self.env.reset(seed=seed, options=options)
        self._recorder.opened(ts.obs, info)
        self._log(info or {})
        self.has_begun, self._latest = True, [ts]
        self._opened_at[:] = 0
        return ts.obs, info

    def step(self, action: object) -> tuple[dict[str, Array], Array, Array, Array, dict[str, Any]]:  # type: ignore[override]
        """Take one step in every row; returns observations {key: (B, ...)}, reward (B,), terminated (B,), truncated (B,), and the
        environment's info.

        Raises:
            RecordingError: a trajectory could not be written.
        """
        out: Any = self.env.step(action)
        ts, reward, terminated, truncated, info = out
        self._log(info or {})  # while the environment has the name of the rollout
        ended, auto = len(self._recorder.episodes), self.amago_env.auto
        self._recorder.stepped(ts.obs, reward, terminated, truncated, info)
        self.return_history.add(self._recorder.episodes[ended:])
        opened = terminated | truncated
        if auto is not None:
            opened |= auto.opened
        elif opened.any():
            ts = ts.create_reset_version(opened)
        self._latest.append(ts)
        self._opened_at[opened] = len(self._latest) - 1
        if len(self._latest) % 64 == 0 and (first := min(map(self._first, range(self.batched_envs)))) > len(self._latest) // 2:
            del self._latest[:first]  # the timesteps that are in no piece in progress
            self._opened_at -= first
        return ts.obs, reward, terminated, truncated, info

    def _log(self, info: dict[str, Any]) -> None:
        for key, value in info.items():
            if metric_name(key) is not None:
                if self.amago_env.vectorized and f"_{key}" in info:  # Gymnasium's mask of the rows that have a value
                    value = np.asarray(value)[np.asarray(info[f"_{key}"], dtype=bool)]
                self.special_history.add_score(self.env_name, key, value)

    def _first(self, row: int) -> int:
        """The beginning of a row's piece in progress in the list of timesteps."""
        pieces = self._recorder.pieces
        return int(self._opened_at[row]) + (0 if pieces is None else int(pieces.piece_time[row]))

    @property
    def current_timestep(self) -> PolicyInput:
        """The policy's next input: observations {key: (B, ...)}, rl2 (B, 1 + A) and time indices (B, 1), zero where a rollout opens."""
        if not self._latest:
            raise ValueError("there is no current timestep: call reset() first")
        return self._latest[-1].as_input()

    @property
    def active_trajs(self) -> list[Trajectory]:
        """The timesteps of each row since its rollout began, or since its latest piece was written."""
        rows = zip(*map(split_batched_timestep, self._latest)) if self._latest else [()] * self.batched_envs
        return [Trajectory(timesteps[self._first(i) :]) for i, timesteps in enumerate(rows)]

    @property
    def total_frames(self) -> int:
        """Environment steps of all rows, ever."""
        return sum(self._recorder.total_frames.values())

    @property
    def total_frames_by_env_name(self) -> dict[str, int]:
        """Environment steps by environment name, ever."""
        return self._recorder.total_frames

    def reset_stats(self) -> None:
        """Empty `return_history` and `special_history`."""
        self.return_history, self.special_history = ReturnHistory(), SpecialMetricHistory()

    def drain(self) -> tuple[list[EpisodeRecord], dict[str, int]]:
        """Finished rollouts, and steps by environment name, since the last call."""
        return self._recorder.drain()

    def _write(self, trajs: StoredTrajs) -> None:
        for traj in trajs.each():
            self._writer.write(traj)  # type: ignore[union-attr]

    def flush(self, partial: bool = False) -> int:
        """Commit finished trajectories, with ``partial`` also the pieces of unfinished ones; returns how many."""
        if partial:
            self.cut()
        return flush(self._writer)

    def save_finished_trajs(self) -> int:
        """Commit finished trajectories, as `flush` does; returns how many."""
        return self.flush()

    def cut(self) -> None:
        """Hand the unfinished rollouts to the writer as pieces; they continue."""
        self._recorder.cut()

    def close(self) -> None:
        """Commit finished trajectories and close the environment."""
        self._recorder.close()
        try:
            if self._writer is not None and self._closes_writer:
                self._writer.close()
        finally:
            self.env.close()


class EnvCreator:
    """A function without arguments that makes an environment, wraps it in exploration, and records it (`SequenceWrapper`).

    Args:
        make_env: returns an `AMAGOEnv`.
        exploration_wrapper_type: a subclass of `ExplorationWrapper`; None: no exploration.
        save_trajs_to, save_trajs_as: as in `SequenceWrapper`.
        save_every_low, save_every_high: a piece ends after more than a number of steps drawn from [low, high); both None: whole
            rollouts.

    Attributes:
        rl2_space, already_vectorized: of the latest environment; None before.
    """

    def __init__(
        self,
        make_env: Callable[[], gym.Env[Any, Any]],
        exploration_wrapper_type: Callable[[Any], gym.Env[Any, Any]] | None = None,
        save_trajs_to: str | Path | None = None,
        save_every_low: int | None = None,
        save_every_high: int | None = None,
        save_trajs_as: str = "npz",
    ):
        if (save_every_low is None) != (save_every_high is None):
            raise ValueError(
                f"save_every_low is {save_every_low} and save_every_high is {save_every_high}: give both, or neither for whole rollouts"
            )
        self.make_env, self.exploration_wrapper_type = make_env, exploration_wrapper_type
        self.save_trajs_to, self.save_trajs_as = save_trajs_to, save_trajs_as
        self.save_every_low, self.save_every_high = save_every_low, save_every_high
        self.rl2_space: gym.Space[Any] | None = None
        self.already_vectorized: bool | None = None

    @property
    def save_every(self) -> tuple[int, int] | None:
        if self.save_every_low is None or self.save_every_high is None:
            return None
        return self.save_every_low, self.save_every_high

    def __call__(self) -> SequenceWrapper:
        """Make the environment; TypeError if ``make_env`` did not return an `AMAGOEnv`."""
        env = self.make_env()
        innermost(env, "make_env must return an AMAGOEnv, but returned")
        if self.exploration_wrapper_type is not None:
            env = self.exploration_wrapper_type(env)
        made = SequenceWrapper(env, self.save_trajs_to, self.save_every, self.save_trajs_as)
        self.rl2_space, self.already_vectorized = made.rl2_space, made.already_vectorized
        return made
