"""`ActorSet`: the actors of one process, stepped one after the other; those whose environment fails are replaced."""

from __future__ import annotations

import contextlib
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from amago.envs.environment import AMAGOEnv
from amago.envs.pool.actor import Actor
from amago.envs.pool.buffers import Buffers
from amago.envs.pool.faults import MAX_RETRY_PAUSE, MIN_RETRY_PAUSE, PROVEN_STEPS, ActorError, Fault, mistake_in
from amago.envs.pool.plan import ActorPlan, Spaces
from amago.envs.pool.trial import random_state_kept, try_environment
from amago.envs.pool.view import ActorView, Answer, answer_of
from amago.envs.recorder import RecordingError, open_writer
from amago.envs.statistics import PhaseStatistics

if TYPE_CHECKING:
    from amago.store import TrajectoryWriter

_ENV_FAULTS = (Exception, SystemExit)  # an environment that calls `sys.exit` must not end the run as if it were complete


class ActorSet:
    """The actors of one process: of the learner's ("sync", "already_vectorized") or of one worker ("async").

    Args:
        plan: what to make them from.
        on_fault: called with each `Fault` of an environment before it is replaced; may raise to end the run.

    Attributes:
        spaces: of every environment.

    Raises:
        ValueError: the environments have different spaces.
        EnvironmentMistake: one was tried (``plan.trial_steps``), and raised an error of type or shape.
        Exception: whatever an environment's constructor raises.
    """

    def __init__(self, plan: ActorPlan, on_fault: Callable[[Fault], None]):
        self.plan, self._on_fault = plan, on_fault
        self._writer: TrajectoryWriter | None = None  # shared by all actors, opened for the first
        self._actors: dict[int, Actor] = {}
        self._replaced = PhaseStatistics()  # of actors that were replaced since the last `drain`
        self._buffers: Buffers | None = None
        try:
            for number in plan.make_envs:
                self._actors[number] = actor = Actor(plan, number, plan.generation, self._writer_for)
                if len(self._actors) == 1:
                    self._try(actor)
                if actor.exploration is not None:
                    actor.exploration.global_step = plan.steps.get(number, 0)
            self.spaces = _common_spaces(self._actors.values())
        except BaseException:
            self.close()
            raise
        self._form_groups()

    def _try(self, actor: Actor) -> None:
        """Try the first actor's environment; its reset, which comes next, ends the rollout of the trial."""
        plan = self.plan
        if plan.trial_steps and not plan.worker and not plan.generation:
            with random_state_kept():
                try_environment(actor.made, actor.base, plan.trial_steps, plan.trial_seed(actor.number))

    def _form_groups(self) -> None:
        self._groups = [[self._actors[number] for number in group] for group in self.plan.groups]

    def _writer_for(self, env: AMAGOEnv) -> TrajectoryWriter | None:
        """The one writer of these actors; None if trajectories are not recorded."""
        recorder, plan = self.plan.recorder or {}, self.plan
        if self._writer is None and recorder.get("save_trajs_to") is not None:
            name = recorder.get("writer_name")
            name = f"{name}-{plan.worker}-{plan.generation}" if name else None
            self._writer = open_writer(
                env, recorder["save_trajs_to"], recorder.get("save_trajs_as", "npz"), name, self.plan.extra_fields
            )
        return self._writer

    def attach(self, buffers: Buffers) -> None:
        """Read actions from these arrays and write observations to them from now on."""
        self._buffers = buffers
        for actor in self._actors.values():
            actor.attach(buffers)

    def reset(self) -> None:
        """Begin a new rollout for every actor."""
        for actor in self._actors.values():
            try:
                actor.reset()
            except _ENV_FAULTS as err:
                self._replace(actor, err)

    def step(self, group: int) -> None:
        """Take one step of each actor of a group that is not idle."""
        assert self._buffers is not None
        idle = self._buffers.idle
        for actor in self._groups[group]:
            if idle[actor.number]:
                continue
            try:
                actor.step()
            except _ENV_FAULTS as err:
                self._replace(actor, err)
        if self._writer is not None:
            self._report_unsaved(self._writer)

    def _replace(self, broken: Actor, error: BaseException) -> None:
        """Replace an actor whose environment failed by one with its exploration state, in a new rollout."""
        if isinstance(error, RecordingError):  # not the environment's fault
            raise error
        state = broken.state_dict()
        if self._buffers is not None and broken.lasted >= PROVEN_STEPS:  # before the reset of the new one hides it
            self._buffers.any_ended[self.plan.worker] = True
        fault = Fault(f"actor {broken.number}", traceback.format_exc(), broken.recorder.in_progress, mistake=mistake_in(error))
        self._replaced.add(*broken.recorder.drain())
        with contextlib.suppress(*_ENV_FAULTS):
            broken.close()
        actor = self._remake(broken, state, fault)
        if actor.spaces != self.spaces:
            raise ActorError(
                f"actor {actor.number} was replaced, but its new environment has other spaces: {actor.spaces}, not {self.spaces}"
            )
        self._actors[actor.number] = actor
        self._form_groups()

    def _remake(self, broken: Actor, state: dict[str, Any], fault: Fault) -> Actor:
        """Make and reset an environment, again and again until one works or ``on_fault`` raises."""
        generation, pause = broken.generation, MIN_RETRY_PAUSE
        while True:
            self._on_fault(fault)
            generation += 1
            try:
                actor = Actor(self.plan, broken.number, generation, self._writer_for)
                actor.load_state_dict(state)
                if self._buffers is not None:
                    actor.attach(self._buffers)
                actor.reset()
                return actor
            except RecordingError:
                raise
            except _ENV_FAULTS as err:
                fault = Fault(f"actor {broken.number}", traceback.format_exc(), mistake=mistake_in(err))
                self.flush()  # the run may be about to end: no finished trajectory should be lost with it
                time.sleep(pause)
                pause = min(MAX_RETRY_PAUSE, 2 * pause)

    def drain(self) -> PhaseStatistics:
        """Statistics since the last call; restarts are not counted here."""
        out, self._replaced = self._replaced, PhaseStatistics()
        for actor in self._actors.values():
            out.add(*actor.recorder.drain())
            if actor.exploration is not None:
                out.add_exploration({name: [value] for name, value in actor.exploration.exploration_metrics().items()})
        return out

    def flush(self, partial: bool = False) -> int:
        """Commit finished trajectories (with ``partial``, also the finished parts of others) to disk; returns how many.

        Raises:
            RecordingError: they could not be written.
        """
        writer = self._writer
        if writer is None:
            return 0
        if partial:
            for actor in self._actors.values():
                actor.recorder.cut()
        try:
            n = int(writer.flush())
        except Exception as err:
            raise RecordingError(f"trajectories could not be committed: {err}") from err
        self._report_unsaved(writer)
        return n

    def _report_unsaved(self, writer: TrajectoryWriter) -> None:
        """Leave the number of trajectories that are in no file yet where the learner finds it if this process dies, and say whether the disk
        is full."""
        if self._buffers is not None:
            self._buffers.unsaved[self.plan.worker] = writer.pending
            self._buffers.no_space[self.plan.worker] = writer.disk_is_full

    def state_dict(self) -> dict[str, Any]:
        """{actor's number: its state}, JSON-able."""
        return {str(number): actor.state_dict() for number, actor in self._actors.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        for number, actor in self._actors.items():
            actor.load_state_dict(state[str(number)])

    def call(
        self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any], check: Callable[[Any], Any] | None = None
    ) -> dict[int, Answer]:
        """Call a method of each environment, or read an attribute (`ActorView`); errors are in the answers.

        Args:
            check: raises for what cannot be sent to the learner's process; None: the answers stay in this one.

        Returns:
            {actor's number: its answer}.
        """
        return {n: answer_of(ActorView(actor), name, args, kwargs, check) for n, actor in self._actors.items()}

    @property
    def views(self) -> list[ActorView]:
        """The environments, as `call` sees them."""
        return [ActorView(actor) for actor in self._actors.values()]

    def render(self) -> Any:
        """Render the first actor's environment."""
        return next(iter(self._actors.values())).env.render()

    def close(self) -> None:
        """Commit finished trajectories and close every environment, whose errors are ignored."""
        writer, self._writer = self._writer, None
        try:
            if writer is not None:
                writer.close()
        finally:
            for actor in self._actors.values():
                with contextlib.suppress(*_ENV_FAULTS):
                    actor.close()
            self._actors = {}


def _common_spaces(actors: Iterable[Actor]) -> Spaces:
    first, *others = actors
    for actor in others:
        if actor.spaces != first.spaces:
            raise ValueError(
                f"all environments of a pool must have the same spaces, but {actor.base!r} has {actor.spaces}, not {first.spaces}"
            )
    return first.spaces
