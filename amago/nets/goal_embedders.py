"""Goal embedders: goals and instructions to one vector a timestep, which timestep encoders merge with the rest of the
observation.

`FFGoalEmb` is for goals that are numbers (positions to reach), `TokenGoalEmb` for goals that are tokens (words, or the symbols
of a rule). Both take one goal or a fixed number of goals in order.

Shapes: B sequences or actors, L timesteps, K goals, T tokens of a goal, E numbers of output.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Any

import gin
import gymnasium as gym
import numpy as np
import torch
from torch import Tensor, nn

from amago.nets.ff import MLP
from amago.nets.utils import check_positive


class GoalEmb(nn.Module, ABC):
    """Base of all goal embedders, for the space of the observation that holds the goals, a Box. A subclass defines `forward`, and
    `emb_dim` or its value ``_emb_dim``."""

    _emb_dim: int

    def __init__(self, goal_space: gym.Space[Any]) -> None:
        super().__init__()
        if not isinstance(goal_space, gym.spaces.Box) or not goal_space.shape:
            raise ValueError(f"goal_space must be a Box with at least one dimension, got goal_space={goal_space}")
        self.goal_space: gym.spaces.Box = goal_space

    @property
    def emb_dim(self) -> int:
        """E."""
        return self._emb_dim

    @abstractmethod
    def forward(self, goals: Tensor) -> Tensor:
        """(B, L, *goal_space.shape) -> (B, L, E)."""

    def _check_input(self, goals: Tensor) -> None:
        if goals.ndim < 3 or tuple(goals.shape[2:]) != self.goal_space.shape:
            raise ValueError(f"goals must be (batch, length, *{self.goal_space.shape}), got shape {tuple(goals.shape)}")


@gin.configurable
class FFGoalEmb(GoalEmb):
    """The numbers of all goals through one MLP of ``n_layers`` hidden layers; ``d_output`` is E."""

    def __init__(
        self,
        goal_space: gym.Space[Any],
        n_layers: int = 2,
        d_hidden: int = 64,
        d_output: int = 32,
        activation: str = "leaky_relu",
    ) -> None:
        super().__init__(goal_space)
        d_inp = math.prod(self.goal_space.shape)
        self.base = MLP(d_inp, d_hidden, n_layers, d_output, activation=activation)
        self._emb_dim = d_output

    def forward(self, goals: Tensor) -> Tensor:
        self._check_input(goals)
        return self.base(goals.flatten(2).to(self.base.in_layer.weight.dtype))


@gin.configurable
class TokenGoalEmb(GoalEmb):
    """A GRU over the tokens of each goal; a linear layer merges the vectors of K goals.

    Args:
        goal_space: a Box of integers, (T,) or (K, T), whose bounds are the lowest and the highest token.
        d_token: width of the embedding of a token.
        d_hidden: width of the GRU.
        d_output: E.
        pad_token: token at the end of shorter goals, which is not read. A goal of padding alone becomes zeros. None: all tokens
            are read.
    """

    def __init__(
        self,
        goal_space: gym.Space[Any],
        d_token: int = 32,
        d_hidden: int = 64,
        d_output: int = 64,
        pad_token: int | None = 0,
    ) -> None:
        super().__init__(goal_space)
        check_positive(d_token=d_token, d_hidden=d_hidden, d_output=d_output)
        space = self.goal_space
        if not np.issubdtype(space.dtype, np.integer) or len(space.shape) not in (1, 2):
            raise ValueError(f"goal_space must be a Box of integers, (tokens,) or (goals, tokens), got goal_space={space}")
        self.lowest, highest = int(space.low.min()), int(space.high.max())
        if highest - self.lowest >= 2**20:
            raise ValueError(f"goal_space has tokens from {self.lowest} to {highest}: give it the bounds of your vocabulary")
        if pad_token is not None and not self.lowest <= pad_token <= highest:
            raise ValueError(f"pad_token={pad_token} is not among the tokens {self.lowest} to {highest}; None if there is none")
        self.pad_token = pad_token
        self.embedding = nn.Embedding(highest - self.lowest + 1, d_token)
        self.rnn = nn.GRU(d_token, d_hidden, batch_first=True)
        n_goals = space.shape[0] if len(space.shape) == 2 else 1
        self.merge = nn.Linear(n_goals * d_hidden, d_output)
        self._emb_dim = d_output

    def forward(self, goals: Tensor) -> Tensor:
        self._check_input(goals)
        B, L = goals.shape[:2]
        sentences = goals.reshape(-1, goals.shape[-1]).long()
        if L > 1:  # instructions rarely change within a sequence: read each distinct one once
            distinct, which = sentences.unique(dim=0, return_inverse=True)
            vectors = self._read(distinct)[which]
        else:
            vectors = self._read(sentences)
        return self.merge(vectors.reshape(B, L, -1))

    def _read(self, sentences: Tensor) -> Tensor:
        """(M, T) -> (M, d_hidden), the state of the GRU after the last token that is not padding."""
        states, _ = self.rnn(self.embedding(sentences - self.lowest))
        if self.pad_token is None:
            return states[:, -1]
        place = torch.arange(1, sentences.shape[1] + 1, device=sentences.device)
        lengths = torch.where(sentences != self.pad_token, place, 0).amax(dim=1)
        last = (lengths - 1).clamp(min=0)[:, None, None].expand(-1, 1, states.shape[-1])
        return states.gather(1, last).squeeze(1) * (lengths > 0).unsqueeze(-1).to(states.dtype)
