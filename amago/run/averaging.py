"""`WeightAverage`: an exponential moving average of the trained weights, which acts in their place."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from amago.agent import BaseAgent


class WeightAverage:
    """An exponential moving average over updates of the parameters that an agent trains (Polyak averaging).

    A policy that follows a value function over many updates wavers around a good one; its average does not. Only what acts is
    averaged: updates go on from the weights as they are. Target networks and buffers are left alone.

    Args:
        agent: the average begins with its present weights.
        decay: of the average at each update, in (0, 1). The first updates have a smaller one, (1 + n) / (10 + n) after n of them, so that
            untrained weights are soon forgotten.
    """

    def __init__(self, agent: BaseAgent, decay: float):
        trained = {id(p) for p in agent.trainable_params}
        self.decay = decay
        self._parameters = {name: p for name, p in agent.named_parameters() if id(p) in trained}
        self._kept: list[Tensor] | None = None  # the trained weights, while the average acts
        self.restart()

    def restart(self) -> None:
        """Begin with the present weights, for example after others were loaded."""
        self._mean = self._present()
        if self._kept is not None:
            self._kept = self._present()

    @torch.no_grad()
    def update(self, updates: int) -> None:
        """Include the present weights.

        Args:
            updates: number of updates that led to them, from 1.
        """
        decay = min(self.decay, (1 + updates) / (10 + updates))
        torch._foreach_lerp_(self._mean, list(self._parameters.values()), 1.0 - decay)

    @contextmanager
    def acting(self) -> Iterator[None]:
        """In the block, the agent's parameters hold the average; a block within another one changes nothing."""
        if self._kept is not None:
            yield
            return
        self._kept = self._present()
        self._put(self._mean)
        try:
            yield
        finally:
            self._put(self._kept)
            self._kept = None

    def state_dict(self) -> dict[str, Tensor]:
        """The trained weights, by name."""
        return dict(zip(self._parameters, self._present() if self._kept is None else self._kept))

    def _present(self) -> list[Tensor]:
        return [p.detach().clone() for p in self._parameters.values()]

    @torch.no_grad()
    def _put(self, weights: list[Tensor]) -> None:
        for p, value in zip(self._parameters.values(), weights):
            p.copy_(value)
