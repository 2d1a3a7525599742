"""The actors of one process, stepped one after the other, and `InProcessPool`, which hosts them in the learner's process.

An `Actor` is one environment with exploration and recorder; an `ActorSet` holds the actors of a process and replaces those whose
environments fail.
"""

from __future__ import annotations

import contextlib
import time
import traceback
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import gymnasium as gym
import numpy as np

from amago.data.trajectory import StoredTrajs, split_rl2
from amago.envs.amago_env import AMAGOEnv, innermost
from amago.envs.exploration import ExplorationWrapper
from amago.envs.inner_env import forwarded
from amago.envs.pool.base import ActorPlan, ActorPool, Answer, EnvMaker, Spaces
from amago.envs.pool.faults import PROVEN_STEPS, RETRY_PAUSE, ActorError, Fault, RestartBudget, mistake_in
from amago.envs.pool.memory import Buffers, layout_of
from amago.envs.recorder import Recorder, RecordingError, Write, flush, open_writer
from amago.envs.statistics import PhaseStatistics, ReturnHistory, SpecialMetricHistory
from amago.hindsight import PolicyInput

if TYPE_CHECKING:
    from amago.store import TrajectoryWriter

_SEED_LIMIT = 2**31 - 1_000_000  # a vectorised environment adds the row to the seed, and the sum must fit into an int32
_ENV_FAULTS = (Exception, SystemExit)  # an environment that calls `sys.exit` must not end the run as if it were complete


class Actor:
    """One environment with its wrappers, and its rows of the pool's arrays.

    Args:
        owner: the actors of this process, with the plan and the writer.
        number: of the actor in its pool.
        generation: how often the actor was replaced before; each time it gets new seeds.

    Attributes:
        base: the `AMAGOEnv` inside all wrappers.
        env: the outermost wrapper around it.
        recorder: records its rollouts.
        exploration: the exploration wrapper, or None.
        outcome: reward, terminated, truncated and info of the last step; None before the first.
    """

    def __init__(self, owner: ActorSet, number: int, generation: int):
        plan = owner.plan
        self.owner, self.number, self.generation, self._worker = owner, number, generation, plan.worker
        self.env: gym.Env[Any, Any] = plan.make_envs[number]()
        self.base = env_of(self.env, plan.make_envs[number])
        batch = plan.batch = plan.batch or self.base.batched_envs
        if self.base.batched_envs != batch:
            right = f"{batch} (its rows are the parallel_actors)" if batch > 1 else "1; use env_mode='already_vectorized'"
            raise ValueError(
                f"make_envs[{number}] made an environment with batched_envs={self.base.batched_envs}, but here it must be {right}"
            )
        self._reset_seed, exploration_seed, recorder_seed = plan.actor_seeds(number, generation)
        self._seeded = False
        self.outcome: tuple[Any, ...] | None = None
        self.exploration: ExplorationWrapper | None = None
        if plan.exploration is not None:
            self.env = self.exploration = plan.exploration(self.env)
            if plan.run is not None:
                self.exploration.fit_to_run(*plan.run)
            self.exploration.seed(exploration_seed)
        options = {k: v for k, v in (plan.recorder or {}).items() if k in ("save_every", "stagger", "extra_fields")}
        self.rows = slice(number * batch, (number + 1) * batch)
        self.recorder = Recorder(self.base, owner.write_for(self.base), actor=self.rows.start, seed=recorder_seed, **options)

    @property
    def lasted(self) -> int:
        """Steps that the longest rollout in progress has lasted."""
        return int(self._time.max())

    def attach(self, buffers: Buffers) -> None:
        """Use these arrays from now on."""
        rows, self._buffers = self.rows, buffers
        self._obs = [(key, array[rows]) for key, array in buffers.obs.items()]
        self._rl2s, self._time, self._resets = buffers.rl2s[rows], buffers.time_idxs[rows, 0], buffers.resets[rows]
        reward, self._prev_action = split_rl2(self._rl2s)
        self._reward = reward[:, 0]
        self._action = buffers.actions[rows] if self.base.vectorized else buffers.actions[rows][0]
        self._any_ended = buffers.any_ended[self._worker : self._worker + 1]
        extras = {name: array[rows] for name, array in buffers.extras.items()}
        self.recorder.attach_extras(extras)

    def next_seed(self) -> int | None:
        """The seed of the first reset; None afterwards."""
        seed = None if self._seeded else int(self._reset_seed.generate_state(1, np.uint64)[0] % _SEED_LIMIT)
        self._seeded = True
        return seed

    def settle(self) -> None:
        """Record what is not recorded yet: nothing, unless actors are on a device."""

    def reset(self) -> None:
        """Begin a new rollout; the first call seeds the environment."""
        ts, info = self.env.reset(seed=self.next_seed())
        self.recorder.opened(ts.obs, info)
        for key, array in self._obs:
            array[...] = ts.obs[key]
        self._rl2s[...], self._time[...], self._resets[...] = 0.0, 0, True

    def step(self) -> None:
        """Take one step with the actions in the arrays; a rollout that ends is followed by a new one at once."""
        out: Any = self.env.step(self._action)
        ts, reward, terminated, truncated, info = out
        self.outcome = reward, terminated, truncated, info  # without the observations, whose memory the next step uses again
        if self.recorder.stepped(ts.obs, reward, terminated, truncated, info):
            self._any_ended[0] = True
            self.reset()
            return
        auto = self.base.auto
        if auto is None:
            self._resets[0] = False
        else:
            self._resets[...] = auto.opened
            if not self._any_ended[0]:
                self._any_ended[0] = terminated.any() or truncated.any()
        for key, array in self._obs:
            array[...] = ts.obs[key]
        self._reward[...], self._prev_action[...], self._time[...] = ts.reward, ts.prev_action, ts.time_idx

    def policy_input(self) -> PolicyInput:
        """A copy of what the policy sees next, as `amago.envs.SequenceWrapper.current_timestep`."""
        return {key: array.copy() for key, array in self._obs}, self._rl2s.copy(), self._time[:, None].copy()

    def answer(self, name: str, args: Sequence[object], kwargs: Mapping[str, object]) -> Answer:
        """Call a method, or read an attribute, of its `ActorView`."""
        check = self.owner.check
        try:
            try:
                found = getattr(ActorView(self), name)
            except AttributeError:
                return Answer(error=AttributeError(f"actor {self.number}: {self.env!r} has no method or attribute {name!r}"))
            value = found(*args, **kwargs) if callable(found) else found
            if check is not None:
                check(value)
            return Answer(value)
        except _ENV_FAULTS as err:
            if check is None:
                return Answer(error=err)
            text = "".join(traceback.format_exception(err))  # the error itself perhaps cannot be pickled
            return Answer(error=ActorError(f"{name!r} of actor {self.number} failed: {text}"))

    def close(self) -> None:
        """Close the environment; trajectories that are not finished are lost."""
        self.recorder.close()
        self.env.close()

    def state_dict(self) -> dict[str, Any]:
        """State of exploration and of the recorder's random generator, JSON-able."""
        state: dict[str, Any] = {"recorder_rng": self.recorder.rng.bit_generator.state}
        if self.exploration is not None:
            state["exploration"] = self.exploration.state_dict()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the result of `state_dict`."""
        self.recorder.rng.bit_generator.state = state["recorder_rng"]
        if self.exploration is not None and "exploration" in state:
            self.exploration.load_state_dict(state["exploration"])


def env_of(made: object, maker: EnvMaker) -> AMAGOEnv:
    """The `AMAGOEnv` inside the result of a user's function."""
    return innermost(made, f"{getattr(maker, '__qualname__', maker)} must return an AMAGOEnv, but returned")


class ActorView:
    """An actor's environment, with the attributes of `amago.envs.SequenceWrapper` about its rollouts; others are the
    environment's.

    Attributes:
        env: with all its wrappers.
        outcome: (reward, terminated, truncated, info) of the last step; None before the first of a new environment.
        save_finished_trajs: commits the finished trajectories of this process's actors to disk; returns how many.
    """

    __getattr__ = forwarded

    def __init__(self, actor: Actor):
        self.env, self.outcome, self._actor, self._recorder = actor.env, actor.outcome, actor, actor.recorder
        self.save_finished_trajs = actor.owner.flush

    @property
    def rl2_space(self) -> gym.spaces.Dict:
        return gym.spaces.Dict({"obs": self._actor.base.observation_space, "rl2": self._actor.base.rl2_space})

    @property
    def current_timestep(self) -> PolicyInput:
        return self._actor.policy_input()

    @property
    def return_history(self) -> ReturnHistory:
        """Returns of the rollouts that have ended since the pool's last `drain`, or `reset_stats`."""
        return ReturnHistory.of(self._recorder.episodes)

    @property
    def special_history(self) -> SpecialMetricHistory:
        """Metrics of these rollouts, one value a rollout."""
        return SpecialMetricHistory.of(self._recorder.episodes)

    def reset_stats(self) -> None:
        """Forget the rollouts that have ended; their steps stay counted."""
        self._recorder.episodes = []

    @property
    def total_frames_by_env_name(self) -> dict[str, int]:
        return self._actor.recorder.total_frames

    @property
    def total_frames(self) -> int:
        return sum(self.total_frames_by_env_name.values())


class ActorSet:
    """The actors of one process: of the learner's ("sync", "already_vectorized") or of one worker ("async").

    Args:
        plan: from which they are made.
        on_fault: called with each `Fault` of an environment before it is replaced; may raise to end the run.
        check: raises for a value that cannot be sent to the learner's process; None: this is that process.

    Attributes:
        spaces: of every environment.
    """

    def __init__(
        self,
        plan: ActorPlan,
        on_fault: Callable[[Fault], None],
        check: Callable[[object], object] | None = None,
        actor_type: type[Actor] = Actor,
    ):
        self.plan, self._on_fault, self.check, self._actor_type = plan, on_fault, check, actor_type
        self._writer: TrajectoryWriter | None = None  # shared by all actors, opened for the first
        self._actors: dict[int, Actor] = {}
        self._replaced = PhaseStatistics()  # of actors that were replaced since the last `drain`
        self._buffers: Buffers | None = None
        try:
            for number in plan.make_envs:
                self._actors[number] = actor = actor_type(self, number, plan.generation)
                if actor.exploration is not None:
                    actor.exploration.global_step = plan.steps.get(number, 0)
            first, *others = self._actors.values()
            self.spaces = Spaces.of(first.base)
            for actor in others:
                self.spaces.check(Spaces.of(actor.base), repr(actor.base))
        except BaseException:
            self.close()
            raise

    def write_for(self, env: AMAGOEnv) -> Write | None:
        """The function that takes the trajectories of all actors; None if they are not recorded."""
        recorder, plan = self.plan.recorder or {}, self.plan
        if self._writer is None and recorder.get("save_trajs_to") is not None:
            name = recorder.get("writer_name")
            name = f"{name}-{plan.worker}-{plan.generation}" if name else None
            save_as = recorder.get("save_trajs_as", "npz")
            self._writer = open_writer(env, recorder["save_trajs_to"], save_as, name, plan.extra_fields)
        return None if self._writer is None else self._write

    def _write(self, trajs: StoredTrajs) -> None:
        assert self._writer is not None
        try:
            self._writer.write(trajs)
        finally:
            self._report_unsaved()

    def _report_unsaved(self) -> None:
        """Tell the learner, in case this process dies, how many trajectories are in no file yet, and whether the disk is full."""
        if self._buffers is not None and self._writer is not None:
            self._buffers.unsaved[self.plan.worker] = self._writer.pending
            self._buffers.no_space[self.plan.worker] = self._writer.disk_is_full

    def attach(self, buffers: Buffers) -> None:
        """Read actions from these arrays and write observations to them from now on."""
        self._buffers = buffers
        for actor in self._actors.values():
            actor.attach(buffers)

    def reset(self) -> None:
        """Begin a new rollout for every actor."""
        self._each(lambda actor: actor.reset())

    def step(self, group: int) -> None:
        """Take one step of each actor of a group that is not idle."""
        if not self._actors or self._buffers is None:
            raise ValueError("the pool is closed")
        idle, actors = self._buffers.idle, self._actors
        for number in self.plan.groups[group]:
            if idle[number]:
                continue
            try:
                actors[number].step()
            except _ENV_FAULTS as err:
                self._replace(actors[number], err)

    def _replace(self, broken: Actor, error: BaseException) -> None:
        """Replace an actor whose environment failed by one with its exploration state, in a new rollout.

        Environments are made and reset until one works or ``on_fault`` raises.
        """
        if isinstance(error, RecordingError):  # not the environment's fault
            raise error
        with contextlib.suppress(*_ENV_FAULTS):
            broken.settle()
        state, generation = broken.state_dict(), broken.generation
        if self._buffers is not None and broken.lasted >= PROVEN_STEPS:  # before the reset of the new one hides it
            self._buffers.any_ended[self.plan.worker] = True
        who, dropped = f"actor {broken.number}", broken.recorder.in_progress
        fault = Fault(who, traceback.format_exc(), dropped, mistake=mistake_in(error))
        self._replaced.add(*broken.recorder.drain())
        with contextlib.suppress(*_ENV_FAULTS):
            broken.close()
        while True:
            self._on_fault(fault)
            generation += 1
            try:
                actor = self._actor_type(self, broken.number, generation)
                actor.load_state_dict(state)
                if self._buffers is not None:
                    actor.attach(self._buffers)
                actor.reset()
                break
            except RecordingError:
                raise
            except _ENV_FAULTS as err:
                fault = Fault(who, traceback.format_exc(), mistake=mistake_in(err))
                self.flush()  # the run may be about to end: no finished trajectory should be lost with it
                time.sleep(RETRY_PAUSE)
        self.spaces.check(Spaces.of(actor.base), f"the new environment of {who}")
        self._actors[actor.number] = actor

    def settle(self) -> None:
        """Record what actors have not recorded yet."""
        self._each(lambda actor: actor.settle())

    def _each(self, do: Callable[[Actor], None]) -> None:
        """Let every actor do something, and replace those that fail."""
        for actor in list(self._actors.values()):
            try:
                do(actor)
            except _ENV_FAULTS as err:
                self._replace(actor, err)

    def drain(self) -> PhaseStatistics:
        """Statistics since the last call; restarts are not counted here."""
        out, self._replaced = self._replaced, PhaseStatistics()
        for actor in self._actors.values():
            out.add(*actor.recorder.drain())
            if actor.exploration is not None:
                out.add_exploration({name: [value] for name, value in actor.exploration.exploration_metrics().items()})
        return out

    def flush(self, partial: bool = False) -> int:
        """Commit finished trajectories, with ``partial`` also the finished parts of others, to disk; returns how many."""
        for actor in self._actors.values() if partial else ():
            actor.recorder.cut()
        n = flush(self._writer)
        self._report_unsaved()
        return n

    def state_dict(self) -> dict[str, Any]:
        """{actor's number: its state}, JSON-able."""
        return {str(number): actor.state_dict() for number, actor in self._actors.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the result of `state_dict`, which may have the states of other actors too."""
        for number, actor in self._actors.items():
            actor.load_state_dict(state[str(number)])

    def call(self, name: str, args: Sequence[object], kwargs: Mapping[str, object]) -> dict[int, Answer]:
        """Call a method of each environment, or read an attribute (`ActorView`); returns {actor's number: its answer}."""
        return {number: actor.answer(name, args, kwargs) for number, actor in self._actors.items()}

    @property
    def views(self) -> list[ActorView]:
        """The objects that `call` acts on, one for each environment."""
        return [ActorView(actor) for actor in self._actors.values()]

    def close(self) -> None:
        """Commit finished trajectories and close every environment, whose errors are ignored."""
        for actor in self._actors.values():
            with contextlib.suppress(ValueError):  # a number that is not finite
                actor.settle()
        writer, self._writer = self._writer, None
        try:
            if writer is not None:
                writer.close()
        finally:
            for actor in self._actors.values():
                with contextlib.suppress(*_ENV_FAULTS):
                    actor.close()
            self._actors = {}


class InProcessPool(ActorPool):
    """All actors in this process, as one group whose steps are taken in `send`; or one environment that is vectorised already."""

    shares_process = True
    actor_type: type[Actor] = Actor

    def __init__(self, plan: ActorPlan, max_env_restarts: int):
        budget = RestartBudget(max_env_restarts)
        actors = self._actors = ActorSet(plan, budget.record, actor_type=self.actor_type)
        num_actors = len(plan.make_envs) * (plan.batch or 1)
        super().__init__(num_actors, actors.spaces, [slice(0, num_actors)], budget)
        self.can_idle = plan.batch == 1
        self._finalizer = weakref.finalize(self, actors.close)
        self._use_buffers(self._make_buffers(plan))
        actors.attach(self._buffers)
        self.resets[:] = True

    def _make_buffers(self, plan: ActorPlan) -> Buffers:
        return Buffers(layout_of(self.num_actors, self.observation_space, self.action_spec, 1, plan.extra_fields))

    def _begin(self, group: int) -> None:
        self._actors.step(group)

    def _finish(self, group: int) -> None:
        """Do nothing: `_begin` has taken the step."""

    def _ask(self, method: str, *args: object) -> list[Any]:
        if not self._finalizer.alive:
            raise ValueError("the pool is closed")
        return [getattr(self._actors, method)(*args)]

    @property
    def envs(self) -> list[ActorView]:
        """The environments, one an actor."""
        return self._actors.views

    def render(self) -> Any:
        return self.envs[0].env.render()

    def close(self) -> None:
        self._finalizer()
