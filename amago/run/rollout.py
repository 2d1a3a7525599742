"""The policy acting in a pool of actors."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from statistics import median
from typing import Any

import gin
import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from amago.agent import BaseAgent
from amago.data.batch import Packing
from amago.envs.pool import ActorPool
from amago.envs.statistics import PhaseStatistics
from amago.nets.kv_cache import KVCache
from amago.nets.utils import state_of_weights
from amago.run.compiling import Graphs
from amago.run.process import SharedProcess

Array = np.ndarray[Any, Any]


def shares(total: int, parts: int) -> list[int]:
    """Divide a number into parts that differ by one at most, the larger ones first."""
    return [total // parts + (i < total % parts) for i in range(parts)]


class GroupTiming:
    """Times alternate and joint steps of groups, and chooses the way with the shorter median for `TRIAL_INTERVAL` steps.

    On two cores with two workers (16 actors of CartPole), joint steps were 1.5 (Transformer) and 1.7 times (GRU) as fast as alternate ones,
    which are the faster where environments take longer than the policy.
    """

    WARMUP_STEPS, TIMED_STEPS = 2, 8  # of each way in a trial: caches and pipelines settle; then steps are timed
    TRIAL_INTERVAL = 1000  # trials take 2% of all steps

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock, self._joint, self._steps = clock, False, 0  # steps since the last trial
        self._durations: list[list[float]] = [[], []]  # of alternate and of joint steps of a trial
        self._last: float | None = None  # when the step before began, if its end is this step's beginning

    def begin_run(self) -> None:
        """Do not count the time since the last step of the run before."""
        self._last = None

    def joint(self) -> bool:
        """True if the step that begins now is to be joint; called once a step."""
        if self._steps:  # no trial
            self._steps = (self._steps + 1) % self.TRIAL_INTERVAL
            return self._joint
        now, durations = self._clock(), self._durations[self._joint]
        if self._last is not None:
            durations.append(now - self._last)
        self._last = now
        if len(durations) == self.WARMUP_STEPS + self.TIMED_STEPS:
            self._joint, self._last = not self._joint, None
            if self._durations[self._joint]:  # both ways are timed
                alternate, joint = (median(d[self.WARMUP_STEPS :]) for d in self._durations)
                self._joint, self._durations, self._steps = joint < alternate, [[], []], 1
        return self._joint


@gin.configurable
class Rollout:
    """The loop between a policy and a pool of actors, and the policy's memory (hidden state) of every actor.

    Groups of actors are stepped *alternately*: while the environments of one group step, the policy computes for the next; or *jointly*: the
    policy computes for all actors at once. `GroupTiming` chooses. Joint steps need a model whose memory of all actors can be sliced into
    one for each group (`TrajEncoder.can_slice_hidden_state`).

    Args:
        pool: the actors.
        device: the policy's device.
        autocast: returns the context of mixed precision; default: none.
        repeatable: only step alternately. Other batch sizes draw other random actions, so a choice by the clock does not repeat.
        equal_shares: count equally many rollouts of each actor, the first ones, in an evaluation and where `run_phase` is given
            ``episodes``. False: count all that have ended by the last step, or, with ``episodes``, by the end of that many in all,
            as the original system does. The rollouts that end first are the short ones, which biases every mean.
        process: separates the process state of environments in this process from the run's.
        cuda_graphs: on CUDA, replay each step as a CUDA graph, one for each group of actors, captured after three ordinary steps of each `run`
            (`amago.run.compiling.Graphs`). Actions are those of ordinary steps, with the same random numbers. Python code of the agent runs
            in the capture alone. Where weights have changed in place, one step is an ordinary one, and the next is captured again.

    Attributes:
        memory: hidden state of each group, by number; under None the hidden state of all actors, if they are slices of it. None before the
            first step.
    """

    def __init__(
        self,
        pool: ActorPool,
        device: torch.device | str = "cpu",
        autocast: Callable[[], AbstractContextManager[Any]] = nullcontext,
        repeatable: bool = False,
        equal_shares: bool = True,
        process: SharedProcess | None = None,
        cuda_graphs: bool = False,
    ):
        self.repeatable, self.equal_shares = repeatable, equal_shares
        self.pool, self.device, self.autocast = pool, torch.device(device), autocast
        self.process, self.timing = process or SharedProcess(), GroupTiming()
        self.cuda_graphs = cuda_graphs and self.device.type == "cuda"
        self._graphs: Graphs | None = None  # of the present run
        self._weights: list[Tensor] = []  # of the agent, with graphs
        self.memory: dict[int | None, Any] | None = None
        self._in_flight: set[int] = set()  # groups whose environments step
        self._ended = np.zeros(pool.num_actors, dtype=np.int64)  # rollouts of each actor that have ended in this run
        self._quotas: Array | None = None  # of each actor; those that have reached theirs are idle
        self._counts = False  # whether rollouts that end are counted
        self._staged: dict[tuple[int, int], tuple[Packing, Tensor, dict[str, Tensor]]] = {}  # of some rows

    @property
    def hidden_state(self) -> Any:
        """The memory of all actors, to go on with later: a list with one for each group, unless there is one group, or one memory for
        all groups. None before the first step."""
        if self.memory is None or None in self.memory:
            return None if self.memory is None else self.memory[None]
        parts = list(self.memory.values())
        return parts[0] if len(parts) == 1 and not isinstance(parts[0], list) else parts

    def take_hidden_state(self, agent: BaseAgent, hidden_state: object) -> None:
        """Go on with a memory of ``agent``: `hidden_state` of before, a list with one memory for each group, or one of all actors.

        Raises:
            ValueError: there are several groups of actors, among which the memory cannot be divided.
        """
        groups = self.pool.groups
        if type(hidden_state) is list and len(hidden_state) == len(groups):
            self.memory = dict(enumerate(hidden_state))
        elif hidden_state is None or len(groups) == 1:
            self.memory = None if hidden_state is None else {0: hidden_state}
        elif agent.can_slice_hidden_state(hidden_state):
            self._set_joint_memory(agent, hidden_state)
        else:
            raise ValueError(
                f"hidden_state is one of {self.pool.num_actors} actors, which are stepped in {len(groups)} groups, and "
                f"{type(hidden_state).__name__} cannot be divided: pass what interact() returned, None, or a list with one for each group"
            )

    def reset(self) -> None:
        """Reset every actor, and clear the policy's memory."""
        with self._environments():
            self.pool.reset()
        self.memory = None

    def close(self) -> None:
        """End the actors."""
        with self._environments():
            self.pool.close()

    def _environments(self) -> AbstractContextManager[Any]:
        """A block in which the code of environments in this process runs."""
        return self.process.environments() if self.pool.shares_process else nullcontext()

    def run_phase(
        self,
        agent: BaseAgent,
        timesteps: int,
        sample: bool = True,
        episodes: int | None = None,
        on_step: Callable[[int], None] | None = None,
        should_stop: Callable[[], bool] | None = None,
        evaluation: bool = False,
    ) -> tuple[int, PhaseStatistics]:
        """Act for some steps or some rollouts.

        Args:
            agent, timesteps, sample, on_step, should_stop: as for `run`.
            episodes: take exactly so many rollouts, or fewer if ``timesteps`` are over first. Each actor has its share, decided in
                advance: the first ``episodes % num_actors`` actors have one more than the others. An actor with all of its share
                is idle until the others have theirs; a row of a vectorised environment goes on, and its further rollouts do not count.
            evaluation: all actors were just reset, and the statistics are to be unbiased: without ``episodes``, count the first
                k rollouts of each actor, where k rollouts as long as the longest one fit into the phase. Further rollouts
                that ended are the short ones.

        Returns:
            steps taken by each actor, and the statistics.
        """
        taken, stats = 0, PhaseStatistics()
        if episodes is None:
            taken = self.run(agent, timesteps, sample, None, on_step, should_stop)
            stats = self.pool.drain()
            if evaluation and self.equal_shares and stats.episodes:
                self._keep_unbiased(stats, taken)
            return taken, stats
        quotas = shares(episodes, self.pool.num_actors)
        # Rollouts that a fault has dropped end without a record: continue until enough records have arrived.
        while taken < timesteps and not (should_stop is not None and should_stop()):
            missing = np.asarray(quotas) - np.asarray(stats.episodes_by_actor(self.pool.num_actors))
            steps = self.run(agent, timesteps - taken, sample, missing, on_step, should_stop)
            if steps == 0:
                break
            taken += steps
            stats.merge(self.pool.drain())
        if self.equal_shares:
            stats.keep_first(quotas)
        return taken, stats

    def _keep_unbiased(self, stats: PhaseStatistics, taken: int) -> None:
        """Keep the first k rollouts of each actor, because every actor has ended so many, regardless of their lengths."""
        actors = self.pool.num_actors
        ended = stats.episodes_by_actor(actors)
        longest = max(int(self.pool.time_idxs.max()), *(e.length for e in stats.episodes))
        stats.keep_first([max(1, min(taken // longest, *ended))] * actors)
        if 0 in ended:
            warnings.warn(
                f"the first rollout of {ended.count(0)} of {actors} actors did not end within {taken} steps, so the means are those of "
                "short rollouts: evaluate for more steps of each actor, or give the environment a time limit",
                stacklevel=4,
            )

    def run(
        self,
        agent: BaseAgent,
        timesteps: int,
        sample: bool = True,
        quotas: Array | None = None,
        on_step: Callable[[int], None] | None = None,
        should_stop: Callable[[], bool] | None = None,
    ) -> int:
        """Act for ``timesteps`` steps of every actor.

        Args:
            agent: acts in evaluation mode; its mode is restored afterwards.
            sample: draw actions from the policy; else take its mode.
            quotas: stop when each actor has ended so many rollouts, (num_actors,); without ``equal_shares``, so many in all. With
                them, actors that have reached theirs skip their steps, where they can.
            on_step: called after each step with the number of environment steps taken.
            should_stop: called after each step; True stops.

        Returns:
            steps taken by each actor.
        """
        was_training, taken = agent.training, 0
        agent.eval()
        self._ended[:], self._counts = 0, quotas is not None
        self.timing.begin_run()
        if quotas is not None and self.equal_shares and self.pool.can_idle:
            self._quotas, self.pool.idle[:] = quotas, quotas <= 0
        try:
            with self._environments() if self.pool.shares_process else self._computing():
                if self.memory is None:
                    with self._computing():
                        self._init_memory(agent)
                if self.cuda_graphs:
                    self._graphs = Graphs("steps of the policy")
                    self._weights = [x for x in (*agent.parameters(), *agent.buffers()) if not x.is_inference()]
                while taken < timesteps:
                    if quotas is not None:
                        missing = quotas - self._ended
                        if (missing.max() if self.equal_shares else missing.sum()) <= 0:
                            break
                    taken += 1
                    self._step(agent, sample)
                    if on_step is not None:
                        on_step(self.pool.num_actors)
                    if should_stop is not None and should_stop():
                        break
        finally:
            with self._environments():
                in_flight, self._in_flight = self._in_flight, set()
                for g in sorted(in_flight):
                    self.pool.wait(g)
            if self._quotas is not None:
                self._quotas, self.pool.idle[:] = None, False
            if self._graphs is not None:
                self.cuda_graphs, self._graphs = not self._graphs.failed, None
            agent.train(was_training)
        return taken

    def _step(self, agent: BaseAgent, sample: bool) -> None:
        """Begin a step of each group, after the end of its step before."""
        assert self.memory is not None
        pool, all_groups = self.pool, range(len(self.pool.groups))
        for group in (None,) if None in self.memory and self.timing.joint() else all_groups:
            members = all_groups if group is None else (group,)
            for g in members:
                if g not in self._in_flight:
                    continue
                self._in_flight.discard(g)  # first: a step that fails is not waited for again
                pool.wait(g)
                rows = pool.groups[g]
                if not self._counts:
                    continue
                if self._quotas is None:
                    resets: Any = pool.resets[rows]
                    self._ended[rows] += resets.cpu().numpy() if isinstance(resets, Tensor) else resets
                else:
                    self._ended[rows] += pool.resets[rows] & ~pool.idle[rows]
                    pool.idle[rows] = self._ended[rows] >= self._quotas[rows]
            rows = slice(0, pool.num_actors) if group is None else pool.groups[group]
            with self._computing() if pool.shares_process else nullcontext():
                actions, memory = self._act(agent, rows, self.memory[group], sample)
            if memory is not self.memory[group]:
                if group is None:
                    self._set_joint_memory(agent, memory)
                else:  # a new object is no slice of the joint memory, which is now out of date
                    self.memory[group] = memory
                    self.memory.pop(None, None)
            pool.send(group, actions)
            self._in_flight.update(members)

    @contextmanager
    def _computing(self) -> Iterator[None]:
        """A block in which the policy computes, and no environment in this process.

        On a CPU with one thread: a step's products are too small to divide, and the environments need the other cores.
        """
        before = torch.get_num_threads()
        with self.process.own_work() if self.pool.shares_process else nullcontext(), torch.inference_mode(), self.autocast():
            if self.device.type == "cpu":
                torch.set_num_threads(1)
            try:
                yield
            finally:
                torch.set_num_threads(before)

    def _init_memory(self, agent: BaseAgent) -> None:
        """Begin with an empty memory: one of all actors if it can be sliced, else one a group."""
        groups = self.pool.groups
        if len(groups) > 1 and not self.repeatable:
            memory = agent.init_hidden_state(self.pool.num_actors, self.device)
            if agent.can_slice_hidden_state(memory):
                self._set_joint_memory(agent, memory)
                return
        self.memory = {i: agent.init_hidden_state(g.stop - g.start, self.device) for i, g in enumerate(groups)}

    def _set_joint_memory(self, agent: BaseAgent, memory: object) -> None:
        parts = {i: agent.slice_hidden_state(memory, g.start, g.stop) for i, g in enumerate(self.pool.groups)}
        self.memory = ({} if self.repeatable else {None: memory}) | parts

    def _act(self, agent: BaseAgent, rows: slice, memory: object, sample: bool) -> tuple[Any, Any]:
        """Actions (in stored form, on a device if the actors are there) of some actors, and their next memory."""
        resets: Any = self.pool.resets[rows]
        on_device = isinstance(resets, Tensor)
        given = self._on_device(rows, {f"obs/{key}": array for key, array in self.pool.obs.items()})
        if self._graphs is None:
            resets = given["resets"] if on_device else resets
            if (on_device and resets.device.type != "cpu") or resets.any():  # a GPU is not asked: the host would wait for it
                memory = agent.reset_hidden_state(memory, resets)
            actions, extras, memory = self._step_of_policy(agent, given, memory, sample)
        else:
            after = memory

            def step(tensors: list[Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
                nonlocal after
                torch.clear_autocast_cache()  # a graph casts the weights in each replay
                found = dict(zip(given, tensors))
                begun = agent.reset_hidden_state(memory, found["resets"])
                actions, extras, after = self._step_of_policy(agent, found, begun, sample)
                if torch.cuda.is_current_stream_capturing():
                    after = _write_into(memory, after)
                return actions, extras

            actions, extras = self._graphs((rows.start, rows.stop), step, list(given.values()), state_of_weights(self._weights))
            memory = after
        for name, array in self.pool.extras.items():
            value = extras[name].cpu().numpy()
            if value.shape != array[rows].shape:
                raise ValueError(
                    f"extra field {name!r} is declared with shape {array.shape[1:]}, but {type(agent).__name__} computes {value.shape[1:]}"
                )
            array[rows] = value
        return actions if on_device else actions.cpu().numpy(), memory

    def _step_of_policy(
        self, agent: BaseAgent, given: dict[str, Tensor], memory: object, sample: bool
    ) -> tuple[Tensor, dict[str, Tensor], Any]:
        obs = {key[4:]: x for key, x in given.items() if key.startswith("obs/")}
        if not self.pool.extras:
            actions, memory = agent.get_actions(obs, given["rl2s"], given["time_idxs"], memory, sample)
            return actions, {}, memory
        return agent.get_actions_and_extras(obs, given["rl2s"], given["time_idxs"], memory, tuple(self.pool.extras), sample)

    def _on_device(self, rows: slice, obs: dict[str, Any]) -> dict[str, Tensor]:
        """Rows of the pool's arrays; on a GPU by one copy from page-locked memory, for which nothing waits."""
        arrays = obs | {"rl2s": self.pool.rl2s, "time_idxs": self.pool.time_idxs, "resets": self.pool.resets}
        if isinstance(self.pool.rl2s, Tensor):
            return {name: array[rows].to(self.device) for name, array in arrays.items()}
        given = {name: torch.from_numpy(array[rows]) for name, array in arrays.items()}
        if self.device.type != "cuda":
            return given
        if (rows.start, rows.stop) not in self._staged:
            packing = Packing(given)
            staged = torch.empty(packing.nbytes, dtype=torch.uint8, pin_memory=True)
            self._staged[rows.start, rows.stop] = packing, staged, packing.views(staged)
        packing, staged, views = self._staged[rows.start, rows.stop]
        for name, x in given.items():
            views[name].copy_(x)
        return packing.views(staged.to(self.device, non_blocking=True))


def _write_into(memory: object, new: object) -> object:
    """``memory`` with the values of ``new``, in the same storage, which is where the next replay of a graph reads them."""
    for to, x in zip(pytree.tree_leaves(memory), pytree.tree_leaves(new), strict=True):
        if not isinstance(to, Tensor | KVCache | None):
            raise TypeError(f"the memory holds a {type(to).__name__}, which may change on the host")
        if x is not to:
            to.copy_(x)  # type: ignore[union-attr]
    return memory
