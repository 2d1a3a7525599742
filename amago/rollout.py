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


class Rollout:
    """A policy's memory of every actor of one pool, and the loop between the two.

    The pool names groups of actors that may be stepped independently. While one group's environments step, the policy
    computes for the next; each group has memory of its own.

    Args:
        pool: the actors.
        device: where the policy lives.
        autocast: makes the context of mixed precision; default: none.

    Attributes:
        memory: of each group; None before the first step.
    """

    def __init__(
        self,
        pool: ActorPool,
        device: torch.device | str = "cpu",
        autocast: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ):
        self.pool, self.device, self.autocast = pool, torch.device(device), autocast
        self.memory: list[Any] | None = None
        self._pinned: dict[tuple[int, str], Tensor] = {}

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
        if self.memory is None:
            self.memory = [agent.init_hidden_state(g.stop - g.start, self.device) for g in groups]
        in_flight = [False] * len(groups)
        ended, taken = 0, 0
        try:
            while taken < timesteps:
                taken += 1
                for g in range(len(groups)):
                    if in_flight[g]:
                        in_flight[g] = False  # what goes wrong from here on is not waited for again
                        pool.wait(g)
                        ended += int(pool.resets[groups[g]].sum())
                    pool.send(g, self._act(agent, g, groups[g], sample))
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

    def _act(self, agent: BaseAgent, g: int, rows: slice, sample: bool) -> np.ndarray[Any, Any]:
        pool = self.pool
        assert self.memory is not None
        resets = pool.resets[rows]
        if resets.any():
            self.memory[g] = agent.reset_hidden_state(self.memory[g], resets)
        obs = {k: self._tensor(g, k, v[rows]) for k, v in pool.obs.items()}
        rl2s, time_idxs = self._tensor(g, " rl2s", pool.rl2s[rows]), self._tensor(g, " time", pool.time_idxs[rows])
        actions, self.memory[g] = agent.get_actions(obs, rl2s, time_idxs, self.memory[g], sample)
        return actions.cpu().numpy()

    def _tensor(self, g: int, key: str, array: np.ndarray[Any, Any]) -> Tensor:
        host = torch.from_numpy(array)  # shares the pool's memory
        if self.device.type != "cuda":
            return host
        if (g, key) not in self._pinned:
            self._pinned[g, key] = torch.empty(host.shape, dtype=host.dtype, pin_memory=True)
        return self._pinned[g, key].copy_(host).to(self.device, non_blocking=True)


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
