"""The policy acting in a pool of actors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import gin
import numpy as np
import torch
from torch import Tensor

from amago.agent import BaseAgent
from amago.config import NamedArguments
from amago.envs.pool import ActorPool
from amago.envs.statistics import PhaseStatistics
from amago.run.group_timing import GroupTiming

Array = np.ndarray[Any, Any]


def shares(total: int, parts: int) -> list[int]:
    """Divide a number into parts that differ by one at most, the larger ones first."""
    return [total // parts + (i < total % parts) for i in range(parts)]


class GroupMemories(list[Any]):
    """One memory for each group of actors."""


@gin.configurable
class Rollout(NamedArguments):
    """The loop between a policy and a pool of actors, and the policy's memory (hidden state) of every actor.

    A pool has one or more groups of actors that step independently. They are stepped either *alternately*: while the environments
    of one group step, the policy computes for the next; or *jointly*: the policy computes for all actors at once, which takes less
    time than once a group. Which is faster depends on environments, model and machine, so both are timed
    (`amago.run.group_timing.GroupTiming`). Joint steps need a model whose memory of all actors can be sliced into that of each group
    (`TrajEncoder.can_slice_hidden_state`).

    Args:
        pool: the actors.
        device: the policy's device.
        autocast: returns the context of mixed precision; default: none.
        repeatable: only step alternately. Other batch sizes draw other random actions, so a choice by the clock does not repeat.
        equal_shares: divide the ``episodes`` of `run_phase` equally among the actors. False: stop when so many rollouts have
            ended in all, and count all that have ended by then, as the original system does. The rollouts that end first are the
            short ones, which biases every mean.

    Attributes:
        memory: hidden state of each group; None before the first step. If it is set from outside, steps are alternate.
        timing: chooses between alternate and joint steps.
    """

    def __init__(
        self,
        pool: ActorPool,
        device: torch.device | str = "cpu",
        autocast: Callable[[], AbstractContextManager[Any]] = nullcontext,
        repeatable: bool = False,
        equal_shares: bool = True,
    ):
        self.repeatable, self.equal_shares = repeatable, equal_shares
        self.pool, self.device, self.autocast = pool, torch.device(device), autocast
        self.timing = GroupTiming()
        self._all = slice(0, pool.num_actors)
        self._in_flight: set[int] = set()  # groups whose environments step
        self._ended = np.zeros(pool.num_actors, dtype=np.int64)  # rollouts of each actor that have ended in this run
        self._quotas: Array | None = None  # of each actor; those that have reached theirs are idle
        self._pinned: dict[tuple[int, int, str], Tensor] = {}
        self.memory = None

    @property
    def memory(self) -> list[Any] | None:
        return self._memory

    @memory.setter
    def memory(self, memory: list[Any] | None) -> None:
        self._memory = memory
        self._joint_memory: Any = None
        self._can_step_jointly = False  # whether the groups' memories are slices of the joint one

    @property
    def hidden_state(self) -> Any:
        """The memory of all actors, to go on with later: of a pool with one group what the policy returned, else a `GroupMemories`
        unless there is one memory for all groups. None before the first step."""
        if self._memory is None or self._can_step_jointly:
            return None if self._memory is None else self._joint_memory
        only = self._memory[0]
        return only if len(self._memory) == 1 and not isinstance(only, list) else GroupMemories(self._memory)

    def take_hidden_state(self, agent: BaseAgent, hidden_state: Any) -> None:
        """Go on with a memory: `hidden_state` of before, a list with one memory for each group, or one of all actors.

        Args:
            agent: whose memory it is.

        Raises:
            ValueError: there are several groups of actors, and the memory can be divided among them no more.
        """
        groups = self.pool.groups
        if hidden_state is None or (type(hidden_state) in (list, GroupMemories) and len(hidden_state) == len(groups)):
            self.memory = hidden_state
        elif len(groups) == 1:
            self.memory = [hidden_state]
        elif agent.can_slice_hidden_state(hidden_state):
            self._set_joint_memory(agent, hidden_state)
            self._can_step_jointly = not self.repeatable
        else:
            raise ValueError(
                f"hidden_state is one of {self.pool.num_actors} actors, which are stepped in {len(groups)} groups, and "
                f"{type(hidden_state).__name__} cannot be divided: pass what interact() returned, None, or a list with one for each group"
            )

    def reset(self) -> None:
        """Reset every actor and forget everything."""
        self.pool.reset()
        self.memory = None

    def run_phase(
        self,
        agent: BaseAgent,
        timesteps: int,
        sample: bool = True,
        episodes: int | None = None,
        on_step: Callable[[int], None] | None = None,
        should_stop: Callable[[], bool] | None = None,
    ) -> tuple[int, PhaseStatistics]:
        """Act for some steps or some rollouts, and return the statistics of them.

        Args:
            agent: as for `run`.
            timesteps: most steps of each actor.
            sample: as for `run`.
            episodes: take exactly so many rollouts, or fewer if ``timesteps`` are over first. Each actor has its share, decided in
                advance: the first ``episodes % num_actors`` actors have one more than the others. An actor with all of its share
                is idle until the others have theirs; a row of a vectorised environment goes on, and its further rollouts do not count.
            on_step: as for `run`.
            should_stop: as for `run`.

        Returns:
            steps taken by each actor, and the statistics.
        """
        taken, stats = 0, PhaseStatistics()
        if episodes is None:
            taken = self.run(agent, timesteps, sample, None, on_step, should_stop)
            return taken, self.pool.drain()
        quotas = shares(episodes, self.pool.num_actors)
        # Rollouts that a fault has dropped end without a record: continue until enough records have arrived.
        while taken < timesteps and not (should_stop is not None and should_stop()):
            missing = np.asarray(quotas) - np.asarray(stats.episodes_by_actor(self.pool.num_actors))
            with self._idle_after(missing):
                steps = self.run(agent, timesteps - taken, sample, self._enough(missing), on_step, should_stop)
            if steps == 0:
                break
            taken += steps
            stats.merge(self.pool.drain())
        if self.equal_shares:
            stats.keep_first(quotas)
        return taken, stats

    def _enough(self, missing: Array) -> Callable[[Array], bool]:
        """Whether enough rollouts have ended, as a function of the number that each actor has ended."""
        if self.equal_shares:
            return lambda ended: bool((ended >= missing).all())
        return lambda ended: bool(ended.sum() >= missing.sum())

    @contextmanager
    def _idle_after(self, quotas: Array) -> Iterator[None]:
        """Within the block, actors that have ended so many rollouts skip their steps, where they can and have equal shares."""
        if not (self.equal_shares and self.pool.can_idle):
            yield
            return
        self._quotas, self.pool.idle[:] = quotas, quotas <= 0
        try:
            yield
        finally:
            self._quotas, self.pool.idle[:] = None, False

    def run(
        self,
        agent: BaseAgent,
        timesteps: int,
        sample: bool = True,
        enough: Callable[[Array], bool] | None = None,
        on_step: Callable[[int], None] | None = None,
        should_stop: Callable[[], bool] | None = None,
    ) -> int:
        """Act for ``timesteps`` steps of every actor.

        Args:
            agent: acts in evaluation mode; its mode is restored afterwards.
            timesteps: most steps of each actor.
            sample: draw actions from the policy; else take its mode.
            enough: called before each step with the number of rollouts that each actor has ended, (num_actors,); True stops.
            on_step: called after each step with the number of environment steps taken.
            should_stop: called after each step; True stops.

        Returns:
            steps taken by each actor.
        """
        was_training = agent.training
        agent.eval()
        try:
            with torch.inference_mode(), self.autocast(), _one_thread(self.device):
                return self._loop(agent, timesteps, sample, enough, on_step, should_stop)
        finally:
            agent.train(was_training)

    def _loop(
        self,
        agent: BaseAgent,
        timesteps: int,
        sample: bool,
        enough: Callable[[Array], bool] | None,
        on_step: Callable[[int], None] | None,
        should_stop: Callable[[], bool] | None,
    ) -> int:
        if self._memory is None:
            self._init_memory(agent)
        taken = 0
        self._ended[:] = 0
        self.timing.begin_run()
        try:
            while taken < timesteps and not (enough is not None and enough(self._ended)):
                taken += 1
                if self._can_step_jointly and self.timing.joint():
                    self._step_jointly(agent, sample)
                else:
                    self._step_alternately(agent, sample)
                if on_step is not None:
                    on_step(self.pool.num_actors)
                if should_stop is not None and should_stop():
                    break
        finally:
            in_flight, self._in_flight = self._in_flight, set()
            for g in sorted(in_flight):
                self.pool.wait(g)
        return taken

    # ------------------------------------------------------------------ the two ways to take a step

    def _step_alternately(self, agent: BaseAgent, sample: bool) -> None:
        """Begin a step of each group, the policy computing for one while the others' environments step."""
        assert self._memory is not None
        for g, rows in enumerate(self.pool.groups):
            self._wait(g)
            actions, memory = self._act(agent, rows, self._memory[g], sample)
            if memory is not self._memory[g]:  # a new object is no slice of the joint memory, which is now out of date
                self._memory[g], self._joint_memory, self._can_step_jointly = memory, None, False
            self.pool.send(g, actions)
            self._in_flight.add(g)

    def _step_jointly(self, agent: BaseAgent, sample: bool) -> None:
        """Begin a step of all groups, the policy computing for all of them at once."""
        groups = self.pool.groups
        for g in range(len(groups)):
            self._wait(g)
        actions, memory = self._act(agent, self._all, self._joint_memory, sample)
        if memory is not self._joint_memory:
            self._set_joint_memory(agent, memory)
        self.pool.send_all(actions)
        self._in_flight.update(range(len(groups)))

    def _wait(self, g: int) -> None:
        """Finish the step of a group if one is in flight, and count the rollouts that it ended."""
        if g not in self._in_flight:
            return
        self._in_flight.discard(g)  # first: a step that fails is not waited for again
        self.pool.wait(g)
        rows = self.pool.groups[g]
        if self._quotas is None:
            self._ended[rows] += self.pool.resets[rows]
        else:
            self._ended[rows] += self.pool.resets[rows] & ~self.pool.idle[rows]
            self.pool.idle[rows] = self._ended[rows] >= self._quotas[rows]

    # ------------------------------------------------------------------ the policy

    def _init_memory(self, agent: BaseAgent) -> None:
        """Begin with an empty memory: one of all actors if it can be sliced, else one a group."""
        groups = self.pool.groups
        if len(groups) > 1 and not self.repeatable:
            memory = agent.init_hidden_state(self.pool.num_actors, self.device)
            if agent.can_slice_hidden_state(memory):
                self._set_joint_memory(agent, memory)
                return
        self._memory = [agent.init_hidden_state(g.stop - g.start, self.device) for g in groups]

    def _set_joint_memory(self, agent: BaseAgent, memory: Any) -> None:
        self._joint_memory, self._can_step_jointly = memory, True
        self._memory = [agent.slice_hidden_state(memory, g.start, g.stop) for g in self.pool.groups]

    def _act(self, agent: BaseAgent, rows: slice, memory: Any, sample: bool) -> tuple[Array, Any]:
        """Actions (in stored form) of some actors, and their next memory."""
        pool = self.pool
        resets = pool.resets[rows]
        if resets.any():
            memory = agent.reset_hidden_state(memory, resets)
        obs = {key: self._tensor(rows, "obs/" + key, array[rows]) for key, array in pool.obs.items()}
        rl2s = self._tensor(rows, "rl2s", pool.rl2s[rows])
        time_idxs = self._tensor(rows, "time_idxs", pool.time_idxs[rows])
        if not pool.extras:
            actions, memory = agent.get_actions(obs, rl2s, time_idxs, memory, sample)
            return actions.cpu().numpy(), memory
        actions, extras, memory = agent.get_actions_and_extras(obs, rl2s, time_idxs, memory, tuple(pool.extras), sample)
        for name, array in pool.extras.items():
            value = extras[name].cpu().numpy()
            if value.shape != array[rows].shape:
                raise ValueError(
                    f"extra field {name!r} is declared with shape {array.shape[1:]}, but {type(agent).__name__} computes {value.shape[1:]}"
                )
            array[rows] = value
        return actions.cpu().numpy(), memory

    def _tensor(self, rows: slice, name: str, array: Array) -> Tensor:
        """Rows of one of the pool's arrays on the policy's device: without a copy on a CPU, through pinned memory on a GPU."""
        host = torch.from_numpy(array)
        if self.device.type != "cuda":
            return host
        key = (rows.start, rows.stop, name)
        if key not in self._pinned:
            self._pinned[key] = torch.empty(host.shape, dtype=host.dtype, pin_memory=True)
        return self._pinned[key].copy_(host).to(self.device, non_blocking=True)


@contextmanager
def _one_thread(device: torch.device) -> Iterator[None]:
    """Compute with one thread on a CPU: a step's products are too small to divide, and the environments need the other cores."""
    before = torch.get_num_threads()
    if device.type == "cpu":
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
