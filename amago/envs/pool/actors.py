"""Some actors of a pool, and how they step, record, explore and recover: the same code in this process and in a worker."""

from __future__ import annotations

import contextlib
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import gymnasium as gym
import numpy as np

from amago.data.extras import ExtraField
from amago.data.trajectory import split_rl2
from amago.envs.amago_env import AMAGOEnv, innermost
from amago.envs.exploration import ExplorationWrapper
from amago.envs.pool.buffers import Buffers
from amago.envs.pool.faults import LONGEST_PAUSE, ActorError, Fault
from amago.envs.recorder import RecordingError, SequenceWrapper, open_writer
from amago.envs.statistics import EpisodeRecord

EnvMaker = Callable[[], Any]
RECORDER_OPTIONS = ("save_trajs_to", "save_every", "save_trajs_as", "stagger", "writer_name", "extra_fields")
_FAULTS = (Exception, SystemExit)  # an environment that calls `sys.exit` must not end the run as if it were complete
_SEED_LIMIT = 2**31 - 1_000_000  # vectorised environments add their row's number


@dataclass
class CrewPlan:
    """Everything a crew is made from.

    Attributes:
        make_envs: {actor: function}, in order.
        batch: rows of each actor's environment; actor i has rows [i * batch, (i + 1) * batch).
        groups: for each group, the actors of this crew that belong to it.
        exploration: class of the wrapper, or None.
        recorder: options of the `SequenceWrapper`, or None to record returns only.
        entropy, spawn_key: of the run's SeedSequence.
        index: number of the crew among its pool's.
        life: how many crews there were in its place before.
        steps: {actor: steps taken ever}, for the exploration schedules of a replaced crew.
    """

    make_envs: dict[int, EnvMaker]
    batch: int
    groups: list[list[int]]
    exploration: type[ExplorationWrapper] | None
    recorder: dict[str, Any] | None
    entropy: Any
    spawn_key: tuple[int, ...]
    index: int = 0
    life: int = 0
    steps: dict[int, int] = field(default_factory=dict)

    @property
    def extra_fields(self) -> Sequence[ExtraField]:
        """The declared extra fields that are recorded."""
        return (self.recorder or {}).get("extra_fields", ())

    def seeds(self, actor: int, life: int) -> list[np.random.SeedSequence]:
        """For an actor's first reset, its exploration, its recorder; the same whichever process it lives in."""
        root = np.random.SeedSequence(self.entropy, spawn_key=(*self.spawn_key, actor, life))
        return root.spawn(3)

    def process_seed(self) -> np.random.SeedSequence:
        """For the global generators of a worker."""
        return np.random.SeedSequence(self.entropy, spawn_key=(*self.spawn_key, 1 << 31, self.index, self.life))


@dataclass(frozen=True)
class Spaces:
    """What all actors of a pool must agree on."""

    observation_space: gym.spaces.Dict
    action_space: gym.Space[Any]


class Actor:
    """One environment with its wrappers, and its rows of the buffers."""

    def __init__(self, plan: CrewPlan, number: int, life: int, writer: Any):
        self.number, self.life = number, life
        maker = plan.make_envs[number]
        made = maker()
        self.base: AMAGOEnv = innermost(made, f"the pool: {_name(maker)} must return an AMAGOEnv, and")
        if self.base.batched_envs != plan.batch:
            raise ValueError(
                f"{_name(maker)} made an environment with batched_envs={self.base.batched_envs}, but here it must be {plan.batch}"
                + (" (its rows are the parallel_actors)" if plan.batch > 1 else "; use env_mode='already_vectorized'")
            )
        self._seed, explore, record = plan.seeds(number, life)
        self.exploration: ExplorationWrapper | None = None
        if plan.exploration is not None:
            made = self.exploration = plan.exploration(made)
            self.exploration.seed(explore)
        options = {k: v for k, v in (plan.recorder or {}).items() if k in ("save_every", "stagger", "extra_fields")}
        if plan.recorder is not None and writer[0] is None and plan.recorder.get("save_trajs_to") is not None:
            name = plan.recorder.get("writer_name")
            name = f"{name}-{plan.index}-{plan.life}" if name else None
            save_as = plan.recorder.get("save_trajs_as", "npz")
            extra_fields = plan.recorder.get("extra_fields", ())
            writer[0] = open_writer(self.base, plan.recorder["save_trajs_to"], save_as, name, extra_fields)
        self.env = SequenceWrapper(made, writer=writer[0], actor=number * plan.batch, seed=record, **options)
        self.rows = slice(number * plan.batch, (number + 1) * plan.batch)
        self._fresh = True

    def attach(self, buffers: Buffers) -> None:
        rows = self.rows
        self._obs = [(key, array[rows]) for key, array in buffers.obs.items()]
        self._rl2s, self._time, self._resets = buffers.rl2s[rows], buffers.time_idxs[rows], buffers.resets[rows]
        self._reward, self._prev_action = split_rl2(self._rl2s)
        self._actions = buffers.actions[rows]
        self.env.attach_extras({name: array[rows] for name, array in buffers.extras.items()})

    def reset(self) -> None:
        seed = int(self._seed.generate_state(1, np.uint64)[0] % _SEED_LIMIT) if self._fresh else None
        ts, _ = self.env.reset(seed=seed)
        self._fresh = False
        for key, array in self._obs:
            array[...] = ts.obs[key]
        self._rl2s[...], self._time[...], self._resets[...] = 0.0, 0, True

    def step(self) -> None:
        ts, _, terminated, truncated, _ = self.env.step(self._actions)
        auto = self.base.auto
        if auto is not None:
            self._resets[...] = auto.opened
        elif terminated.item() or truncated.item():
            return self.reset()
        else:
            self._resets[0] = False
        for key, array in self._obs:
            array[...] = ts.obs[key]
        self._reward[...], self._prev_action[...], self._time[...] = ts.reward, ts.prev_action, ts.time_idx
        return None

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = {"recorder_rng": self.env.rng.bit_generator.state}
        if self.exploration is not None:
            state["exploration"] = self.exploration.state_dict()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.env.rng.bit_generator.state = state["recorder_rng"]
        if self.exploration is not None and "exploration" in state:
            self.exploration.load_state_dict(state["exploration"])


class Crew:
    """The actors of one process (or of one worker).

    Args:
        plan: what to build.
        on_fault: told of each environment that is replaced; may raise to stop the run.

    Raises:
        Exception: whatever an environment's constructor raises.
    """

    def __init__(self, plan: CrewPlan, on_fault: Callable[[Fault], None]):
        self.plan, self._on_fault = plan, on_fault
        self._writer: list[Any] = [None]  # one for all actors, opened by the first
        self.actors: dict[int, Actor] = {}
        self._episodes: list[EpisodeRecord] = []
        self._frames: list[dict[str, int]] = []
        self._buffers: Buffers | None = None
        self._written = -1
        try:
            for number in plan.make_envs:
                self.actors[number] = actor = Actor(plan, number, plan.life, self._writer)
                if actor.exploration is not None:
                    actor.exploration.global_step = plan.steps.get(number, 0)
            self.spaces = _common_spaces(self.actors.values())
        except BaseException:
            self.close()
            raise
        self._groups = [[self.actors[number] for number in group] for group in plan.groups]

    def attach(self, buffers: Buffers) -> None:
        """Read actions from, and write observations to, these arrays from now on."""
        self._buffers = buffers
        for actor in self.actors.values():
            actor.attach(buffers)

    def reset(self) -> None:
        for actor in self.actors.values():
            try:
                actor.reset()
            except RecordingError:
                raise
            except _FAULTS:
                self._recover(actor)

    def step(self, group: int) -> None:
        """One step of each actor of a group; one that fails is replaced."""
        for actor in self._groups[group]:
            try:
                actor.step()
            except RecordingError:
                raise
            except _FAULTS:
                self._recover(actor)
        if self._writer[0] is not None:
            assert self._buffers is not None
            self._buffers.unsaved[self.plan.index] = self._writer[0].pending

    def _recover(self, broken: Actor) -> None:
        """Replace an environment: the new one goes on with the schedule and the writer of the old one, in a new rollout."""
        state, number, life, pause = broken.state_dict(), broken.number, broken.life, 0.05
        fault = Fault(f"actor {number}", traceback.format_exc(), broken.env.in_progress)
        episodes, frames = broken.env.drain()
        self._episodes += episodes
        self._frames.append(frames)
        with contextlib.suppress(*_FAULTS):
            broken.env.close()
        while True:
            self._on_fault(fault)
            life += 1
            try:
                actor = Actor(self.plan, number, life, self._writer)
                actor.load_state_dict(state)
                if self._buffers is not None:
                    actor.attach(self._buffers)
                actor.reset()
                break
            except RecordingError:
                raise
            except _FAULTS:
                fault = Fault(f"actor {number}", traceback.format_exc())
                self.flush()  # this may not end well: save what there is
                time.sleep(pause)
                pause = min(LONGEST_PAUSE, 2 * pause)
        if _spaces(actor) != self.spaces:
            raise ActorError(f"actor {number} was made anew with other spaces: {_spaces(actor)}, not {self.spaces}")
        self.actors[number] = actor
        self._groups = [[self.actors[a] for a in group] for group in self.plan.groups]

    def drain(self) -> tuple[list[EpisodeRecord], list[dict[str, int]]]:
        episodes, frames = self._episodes, self._frames
        self._episodes, self._frames = [], []
        for actor in self.actors.values():
            more, counted = actor.env.drain()
            episodes += more
            frames.append(counted)
        return episodes, frames

    def flush(self, partial: bool = False) -> int:
        """Commit finished trajectories; returns how many files' worth of them, in trajectories."""
        writer = self._writer[0]
        if writer is None:
            return 0
        if partial:
            for actor in self.actors.values():
                actor.env.cut()
        try:
            n = int(writer.flush())
        except Exception as err:
            raise RecordingError(f"trajectories could not be committed: {err}") from err
        if self._buffers is not None:
            self._buffers.unsaved[self.plan.index] = writer.pending
        return n

    def state_dict(self) -> dict[str, Any]:
        return {str(number): actor.state_dict() for number, actor in self.actors.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for number, actor in self.actors.items():
            actor.load_state_dict(state[str(number)])

    def render(self) -> Any:
        """What the first actor's environment draws."""
        return next(iter(self.actors.values())).env.render()

    def close(self) -> None:
        """Commit finished trajectories and close every environment; errors of environments are swallowed."""
        writer, self._writer = self._writer[0], [None]
        try:
            if writer is not None:
                writer.close()
        finally:
            for actor in self.actors.values():
                with contextlib.suppress(*_FAULTS):
                    actor.env.close()
            self.actors = {}


def _spaces(actor: Actor) -> Spaces:
    return Spaces(actor.base.observation_space, actor.base.action_space)


def _common_spaces(actors: Any) -> Spaces:
    first: Spaces | None = None
    for actor in actors:
        spaces = _spaces(actor)
        if first is not None and spaces != first:
            raise ValueError(
                f"all environments of a pool must have the same spaces, but {actor.base!r} has {spaces}, not {first}"
            )
        first = spaces
    assert first is not None
    return first


def _name(maker: Any) -> str:
    return getattr(maker, "__qualname__", None) or repr(maker)


def check_recorder(recorder: dict[str, Any] | None) -> dict[str, Any] | None:
    """Raise ValueError for an option that a recorder does not have."""
    unknown: Sequence[str] = sorted(set(recorder or ()) - set(RECORDER_OPTIONS))
    if unknown:
        raise ValueError(f"recorder has unknown options {unknown}; it takes {', '.join(RECORDER_OPTIONS)}")
    return recorder
