"""The interface of agents: encoders, a loss for training, and actions for rollouts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple

import gymnasium as gym
import torch
from torch import Tensor, nn

from amago.config import NamedArguments
from amago.data.batch import Batch
from amago.nets.traj_encoders import TrajEncoder
from amago.nets.tstep_encoders import TstepEncoder
from amago.spaces import action_spec


class AgentLoss(NamedTuple):
    """Losses before masking, so that an `Experiment` may edit the mask.

    Attributes:
        actor_loss: (B, L, G, 1).
        critic_loss: (B, L, C, G, 1), or None where the settings need no critic.
        metrics: numbers for the log, by name.
    """

    actor_loss: Tensor
    critic_loss: Tensor | None
    metrics: dict[str, float | Tensor]


class AgentValues(NamedTuple):
    """Estimates for the actions of a batch and each discount, all (B, L, G, 1). Values at padded steps are undefined.

    Attributes:
        q: Q(s, a) of the stored action, in the environment's units of return, mean over critics.
        v: Q(s, a ~ pi), likewise.
        advantage: the filter's argument: (q - v) x ``reward_multiplier``; in `Agent` with PopArt a tenth of that.
        filter_weight: of the stored action in behaviour cloning.
        ensemble_spread: standard deviation of q over critics.
    """

    q: Tensor
    v: Tensor
    advantage: Tensor
    filter_weight: Tensor
    ensemble_spread: Tensor


class BaseAgent(NamedArguments, nn.Module, ABC):
    """Timestep encoder and sequence model, on which a subclass trains its own networks.

    Args:
        obs_space: flat dict of boxes (`AMAGOEnv.observation_space`).
        rl2_space: box of width 1 + A (`AMAGOEnv.rl2_space`).
        action_space: any space that `amago.spaces.action_spec` accepts.
        max_seq_len: transitions in a training sequence, and steps of memory when acting.
        tstep_encoder_type, traj_encoder_type: classes, built with their gin defaults.
    """

    def __init__(
        self,
        obs_space: gym.spaces.Dict,
        rl2_space: gym.spaces.Box,
        action_space: gym.Space[Any],
        max_seq_len: int,
        tstep_encoder_type: type[TstepEncoder],
        traj_encoder_type: type[TrajEncoder],
    ):
        super().__init__()
        self.obs_space, self.rl2_space, self.action_space = obs_space, rl2_space, action_space
        self.action_spec = action_spec(action_space)
        self.max_seq_len = max_seq_len
        self.tstep_encoder = tstep_encoder_type(obs_space=obs_space, rl2_space=rl2_space)
        self.traj_encoder = traj_encoder_type(tstep_dim=self.tstep_encoder.emb_dim, max_seq_len=max_seq_len)

    @abstractmethod
    def forward(self, batch: Batch, log_step: bool = False) -> AgentLoss:
        """The losses of a batch; if ``log_step``, with all metrics."""

    @abstractmethod
    def act(self, state: Tensor, obs: dict[str, Tensor], sample: bool, gamma_idx: int | None = None) -> Tensor:
        """Choose actions.

        Args:
            state: (N, E), output of the sequence model.
            obs: {key: (N, ...)}.
            sample: draw from the policy; else take its mode.
            gamma_idx: index of the discount whose policy acts; None: that of rollouts.

        Returns:
            actions in their stored form (N, S).
        """

    policy_extras: tuple[str, ...] = ()
    """Names of the extra fields (`amago.ExtraField` with ``source="policy"``) that `act_with_extras` computes."""

    def act_with_extras(
        self, state: Tensor, obs: dict[str, Tensor], sample: bool, names: Sequence[str], gamma_idx: int | None = None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Choose actions as `act` does, and compute extra fields of them, before exploration changes the actions.

        "log_prob" is the natural log-probability of the chosen action, (N,); a density for continuous actions. A subclass may
        compute others: override this method, call ``super()``, and add their names to ``policy_extras``.

        Args:
            state, obs, sample, gamma_idx: as in `act`.
            names: the declared extra fields with ``source="policy"``.

        Returns:
            actions in their stored form (N, S), and {name: (N, ...)}.
        """
        return self.act(state, obs, sample, gamma_idx), {}

    @property
    @abstractmethod
    def trainable_params(self) -> list[nn.Parameter]:
        """The parameters that the optimizer updates; target networks are not among them."""

    @abstractmethod
    def soft_sync_targets(self) -> None:
        """Move the target networks towards the trained ones; called after each optimizer step."""

    def encode(self, batch: Batch, log: dict[str, Any] | None = None) -> Tensor:
        """States s_0..s_L of a batch, (B, L + 1, E)."""
        emb = self.tstep_encoder(obs=batch.obs, rl2s=batch.rl2s, log_dict=log, mask=batch.mask)
        mask = {"mask": batch.mask} if self.traj_encoder.takes_mask else {}
        states, _ = self.traj_encoder(seq=emb, time_idxs=batch.time_idxs, hidden_state=None, log_dict=log, **mask)
        return states

    def init_hidden_state(self, batch_size: int, device: torch.device | str) -> Any:
        """Empty memory for ``batch_size`` actors."""
        return self.traj_encoder.init_hidden_state(batch_size, device)

    def reset_hidden_state(self, hidden_state: Any, resets: Any) -> Any:
        """Empty the memory of the actors whose ``resets`` (N,) is True."""
        return self.traj_encoder.reset_hidden_state(hidden_state, resets)

    def slice_hidden_state(self, hidden_state: Any, start: int, stop: int) -> Any:
        """The memory of actors ``start`` to ``stop`` - 1, sharing storage.

        Raises:
            NotImplementedError: the sequence model does not implement it.
        """
        return self.traj_encoder.slice_hidden_state(hidden_state, start, stop)

    def can_slice_hidden_state(self, hidden_state: Any) -> bool:
        """Whether the sequence model implements `slice_hidden_state`."""
        return self.traj_encoder.can_slice_hidden_state(hidden_state)

    @torch.no_grad()
    def get_actions(
        self,
        obs: dict[str, Tensor],
        rl2s: Tensor,
        time_idxs: Tensor,
        hidden_state: Any,
        sample: bool = True,
        gamma_idx: int | None = None,
    ) -> tuple[Tensor, Any]:
        """One step of N actors.

        Args:
            obs: {key: (N, ...)}; rl2s: (N, 1 + A); time_idxs: (N, 1).
            hidden_state: memory from `init_hidden_state` or the previous step, already reset where a rollout begins.
            sample: draw from the policy; else take its mode.
            gamma_idx: index of the discount whose policy acts; None: that of rollouts. All discounts share the memory.

        Returns:
            actions in their stored form (N, S), and the new memory.
        """
        state, hidden_state = self._next_state(obs, rl2s, time_idxs, hidden_state)
        return self.act(state, obs, sample, gamma_idx), hidden_state

    @torch.no_grad()
    def get_actions_and_extras(
        self,
        obs: dict[str, Tensor],
        rl2s: Tensor,
        time_idxs: Tensor,
        hidden_state: Any,
        names: Sequence[str],
        sample: bool = True,
    ) -> tuple[Tensor, dict[str, Tensor], Any]:
        """`get_actions` with the extra fields of these names (`act_with_extras`), before the new memory."""
        state, hidden_state = self._next_state(obs, rl2s, time_idxs, hidden_state)
        actions, extras = self.act_with_extras(state, obs, sample, names)
        return actions, extras, hidden_state

    def _next_state(self, obs: dict[str, Tensor], rl2s: Tensor, time_idxs: Tensor, hidden_state: Any) -> tuple[Tensor, Any]:
        """The sequence model's output (N, E) for one step, and the new memory."""
        steps = {k: v.unsqueeze(1) for k, v in obs.items()}
        emb = self.tstep_encoder(obs=steps, rl2s=rl2s.unsqueeze(1))
        states, hidden_state = self.traj_encoder(seq=emb, time_idxs=time_idxs.unsqueeze(1), hidden_state=hidden_state)
        return states[:, 0], hidden_state
