"""The policy acting in a pool of actors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor

from amago.agent import BaseAgent
from amago.envs.pool import ActorPool
from amago.run.group_timing import Pace


class Rollout:
    """A policy's memory of every actor of one pool, and the loop between the two.

    The pool names groups of actors that may be stepped independently. They can take turns: while one group's environments step, the
    policy computes for the next. Or the policy computes for all of them together, which takes it less time than one after the
    other. Which of the two is faster depends on environments, model and machine, so both are tried (`amago.run.group_timing.Pace`).
    The choice follows the clock, and other batches draw other actions: a run that must repeat takes turns only.

    Args:
        pool: the actors.
        device: where the policy lives.
        autocast: makes the context of mixed precision; default: none.
        repeatable: the groups only take turns.

    Attributes:
        memory: of each group; None before the first step. Groups whose memory is set from outside only take turns.
    """

    def __init__(
        self,
        pool: ActorPool,
        device: torch.device | str = "cpu",
        autocast: Callable[[], AbstractContextManager[Any]] = nullcontext,
        repeatable: bool = False,
    ):
        self.repeatable = repeatable
        self.pool, self.device, self.autocast = pool, torch.device(device), autocast
        self._memory: list[Any] | None = None
        self._whole: Any = _NOTHING  # the memory of all groups, of which each group's is a slice
        self._pace = Pace()
        self._pinned: dict[tuple[int, str], Tensor] = {}

    @property
    def memory(self) -> list[Any] | None:
        return self._memory

    @memory.setter
    def memory(self, memory: list[Any] | None) -> None:
        self._memory, self._whole = memory, _NOTHING

    def reset(self) -> None:
        """Reset every actor and forget everything."""
        self.pool.reset()
        self.memory = None

    def run(
        self,
        agent: BaseAgent,
        timesteps: int,
        sample: bool = True,
        episodes: int | None = None,
        on_step: Callable[[int], None] | None = None,
        should_stop: Callable[[], bool] | None = None,
    ) -> int:
        """Act for ``timesteps`` steps of every actor.

        Args:
            agent: acts in evaluation mode; its mode is put back afterwards.
            sample: draw actions from the policy; else take its mode.
            episodes: stop as soon as this many rollouts have ended in all.
            on_step: called after each step with the number of environment steps taken.
            should_stop: asked after each step.

        Returns:
            steps taken by each actor.
        """
        was_training = agent.training
        agent.eval()
        try:
            with torch.inference_mode(), self.autocast(), _one_thread(self.device):
                return self._loop(agent, timesteps, sample, episodes, on_step, should_stop)
        finally:
            agent.train(was_training)

    def _loop(
        self,
        agent: BaseAgent,
        timesteps: int,
        sample: bool,
        episodes: int | None,
        on_step: Callable[[int], None] | None,
        should_stop: Callable[[], bool] | None,
    ) -> int:
        pool, groups = self.pool, self.pool.groups
        if self._memory is None:
            self._remember(agent)
        in_flight = [False] * len(groups)
        ended, taken = 0, 0
        self._pace.begin()
        try:
            while taken < timesteps:
                taken += 1
                together = self._whole is not _NOTHING and self._pace.together()
                for batch in [range(len(groups))] if together else [range(g, g + 1) for g in range(len(groups))]:
                    for g in batch:
                        if in_flight[g]:
                            in_flight[g] = False  # what goes wrong from here on is not waited for again
                            pool.wait(g)
                            ended += int(pool.resets[groups[g]].sum())
                    if together:
                        pool.send_all(self._act_together(agent, sample))
                    else:
                        pool.send(batch[0], self._act(agent, batch[0], sample))
                    for g in batch:
                        in_flight[g] = True
                if on_step is not None:
                    on_step(pool.num_actors)
                if (episodes is not None and ended >= episodes) or (should_stop is not None and should_stop()):
                    break
        finally:
            for g, busy in enumerate(in_flight):
                if busy:
                    pool.wait(g)
        return taken

    def _remember(self, agent: BaseAgent) -> None:
        """Empty memory: one for all actors, where it can be sliced into that of each group."""
        groups = self.pool.groups
        if len(groups) > 1 and not self.repeatable:
            whole = agent.init_hidden_state(self.pool.num_actors, self.device)
            try:
                self._memory = [agent.slice_hidden_state(whole, g.start, g.stop) for g in groups]
                self._whole = whole
                return
            except NotImplementedError:
                pass
        self._memory = [agent.init_hidden_state(g.stop - g.start, self.device) for g in groups]

    def _act(self, agent: BaseAgent, g: int, sample: bool) -> np.ndarray[Any, Any]:
        """Actions of one group."""
        assert self._memory is not None
        actions, memory = self._answer(agent, g, self.pool.groups[g], self._memory[g], sample)
        if memory is not self._memory[g]:
            self._memory[g], self._whole = memory, _NOTHING  # it is made anew each step, and no slice any more
        return actions

    def _act_together(self, agent: BaseAgent, sample: bool) -> np.ndarray[Any, Any]:
        """Actions of all groups."""
        actions, memory = self._answer(agent, -1, slice(0, self.pool.num_actors), self._whole, sample)
        if memory is not self._whole:
            self._whole = memory
            self._memory = [agent.slice_hidden_state(memory, g.start, g.stop) for g in self.pool.groups]
        return actions

    def _answer(self, agent: BaseAgent, g: int, rows: slice, memory: Any, sample: bool) -> tuple[np.ndarray[Any, Any], Any]:
        pool = self.pool
        resets = pool.resets[rows]
        if resets.any():
            memory = agent.reset_hidden_state(memory, resets)
        obs = {k: self._tensor(g, k, v[rows]) for k, v in pool.obs.items()}
        rl2s, time_idxs = self._tensor(g, " rl2s", pool.rl2s[rows]), self._tensor(g, " time", pool.time_idxs[rows])
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

    def _tensor(self, g: int, key: str, array: np.ndarray[Any, Any]) -> Tensor:
        host = torch.from_numpy(array)  # shares the pool's memory
        if self.device.type != "cuda":
            return host
        if (g, key) not in self._pinned:
            self._pinned[g, key] = torch.empty(host.shape, dtype=host.dtype, pin_memory=True)
        return self._pinned[g, key].copy_(host).to(self.device, non_blocking=True)


_NOTHING = object()


@contextmanager
def _one_thread(device: torch.device) -> Iterator[None]:
    """Compute with one thread on a CPU: the products of a step are too small to share, and environments want the other cores."""
    before = torch.get_num_threads()
    if device.type == "cpu":
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
