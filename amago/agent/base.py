"""The interface of agents: encoders, a loss for training, and actions for rollouts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import gymnasium as gym
import torch
from torch import Tensor, nn

from amago import ops
from amago.config import NamedArguments
from amago.data.batch import Batch
from amago.data.trajectory import MAGIC_PAD_VAL
from amago.nets import ranks
from amago.nets.traj_encoders import TrajEncoder
from amago.nets.tstep_encoders import TstepEncoder
from amago.spaces import action_spec


class AgentLoss(NamedTuple):
    """Losses before masking.

    Attributes:
        actor_loss: (B, L, G, 1).
        critic_loss: (B, L, C, G, 1), or None where the settings need no critic.
        metrics: numbers for the log, by name.
    """

    actor_loss: Tensor
    critic_loss: Tensor | None
    metrics: dict[str, float | Tensor]


class LossTerms(NamedTuple):
    """What `BaseAgent.forward` last computed: the loss, and the masked means that it is the sum of."""

    total: Tensor
    actor: Tensor
    critic: Tensor


def get_action_dim_and_type(space: gym.Space[Any]) -> tuple[int, bool, bool]:
    """The width of an action's vector form, whether it is one choice, and whether it is bits."""
    spec = action_spec(space)
    return spec.dim, spec.kind == "discrete", spec.kind == "multibinary"


class BaseAgent(NamedArguments, nn.Module):
    """Timestep encoder and sequence model, on which a subclass trains its own networks.

    The constructor calls `init_options`, `init_encoders`, `init_actor_critic`, `init_extra_networks` and `hard_sync_targets`, in this
    order. A subclass overrides those whose networks are its own, and either `losses` or `forward`.

    Args:
        obs_space: flat dict of boxes (`AMAGOEnv.observation_space`).
        rl2_space: box of width 1 + A (`AMAGOEnv.rl2_space`).
        action_space: any space that `amago.spaces.action_spec` accepts.
        max_seq_len: transitions in a training sequence, and steps of memory when acting.
        tstep_encoder_type, traj_encoder_type: classes, built with their gin defaults.

    Attributes:
        action_dim: A.
        discrete, multibinary: whether an action is one choice; whether it is bits.
        state_dim: E, width of the sequence model's output.
        update_info: metrics of the last `forward`, by name.
        critic_loss_weight: weight of the critics' loss in the loss; the actor's is 1.
        td_errors: (B, L, 1), magnitudes, of the last batch whose sequences were drawn by them (`Batch.sources`); None: not computed.
        burn_in: transitions at the start of a sequence that have no loss, unless the sequence begins a rollout.
        pad_val: what numbers at padded steps of a batch are (`amago.loading.Batch`).
    """

    critic_loss_weight: float = 10.0
    burn_in: int = 0
    pad_val: float = MAGIC_PAD_VAL
    tstep_encoder: Any
    traj_encoder: Any

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
        self.action_dim, self.discrete, self.multibinary = get_action_dim_and_type(action_space)
        self.max_seq_len = max_seq_len
        self.tstep_encoder_type, self.traj_encoder_type = tstep_encoder_type, traj_encoder_type
        self.update_info: dict[str, Any] = {}
        self.loss_terms: LossTerms | None = None
        self.td_errors: Tensor | None = None
        self._mask_editor: Any = None
        self.init_options()
        self.init_encoders()
        self.init_actor_critic()
        self.init_extra_networks()
        self.hard_sync_targets()

    def __getstate__(self) -> dict[str, Any]:
        """Without the graph of the last loss, which cannot be copied or pickled."""
        info = {k: v.detach() if isinstance(v, Tensor) else v for k, v in self.update_info.items()}
        return self.__dict__ | {"update_info": info, "loss_terms": None}

    # ---- construction -------------------------------------------------------------------------------------------------

    def init_options(self) -> None:
        """Set the attributes that the networks depend on. Nothing by default."""

    def init_encoders(self) -> None:
        """Build ``tstep_encoder`` and ``traj_encoder``."""
        self.tstep_encoder = self.tstep_encoder_type(obs_space=self.obs_space, rl2_space=self.rl2_space)
        self.traj_encoder = self.traj_encoder_type(tstep_dim=self.tstep_encoder.emb_dim, max_seq_len=self.max_seq_len)

    def init_actor_critic(self) -> None:
        """Build actor, critics and their targets. Nothing by default."""

    def init_extra_networks(self) -> None:
        """Build other networks. Nothing by default."""

    def hard_sync_targets(self) -> None:
        """Set the target networks to the trained ones. Nothing by default."""

    def on_checkpoint_loaded(self, is_resume: bool = False) -> None:
        """Called after weights were loaded. Nothing by default.

        Args:
            is_resume: the whole training state was loaded.
        """

    @property
    def state_dim(self) -> int:
        return int(self.traj_encoder.emb_dim)

    # ---- learning -----------------------------------------------------------------------------------------------------

    def losses(self, batch: Batch, log_step: bool = False) -> AgentLoss:
        """The losses of a batch before masking; if ``log_step``, with all metrics."""
        raise NotImplementedError(f"{type(self).__name__} implements neither losses nor forward")

    def forward(self, batch: Batch, log_step: bool = False) -> Tensor:
        """The loss of a batch, a scalar; its metrics are in `update_info`, a new dict in each call.

        An override may add to both after ``super().forward(batch, log_step)``. One that computes the loss itself puts at least the metrics
        "Actor Loss" and "Critic Loss" into ``update_info``.

        Args:
            log_step: also compute costly metrics.
        """
        self.update_info = {}
        loss = self.losses(batch, log_step)
        total = self._compute_loss(batch, loss.actor_loss, loss.critic_loss, self.loss_mask(batch))
        self.update_info |= loss.metrics
        return total

    def loss_mask(self, batch: Batch) -> Tensor:
        """(B, L, 1) bool, True where a transition has a loss: where it is real, and not burn-in."""
        real = batch.transition_mask
        if not self.burn_in:
            return real
        later = torch.arange(real.shape[1], device=real.device)[:, None] >= self.burn_in
        return real & (later | (batch.time_idxs[:, :1] == 0))

    def _compute_loss(self, batch: Batch, actor_loss: Tensor, critic_loss: Tensor | None, state_mask: Tensor) -> Tensor:
        """The scalar loss of losses before masking; puts both means and the sizes of the batch into `update_info`.

        Args:
            actor_loss, critic_loss: see `AgentLoss`.
            state_mask: bool, (B, L, 1), True where a transition has a loss.
        """
        pad, editor = state_mask.to(torch.bool)[:, :, None], self._mask_editor  # (B, L, 1, 1)
        weights = batch.weights  # of sequences that were drawn more often than others
        mask = self.edit_actor_mask(batch, actor_loss, pad.expand_as(actor_loss))
        if editor is not None:
            mask = editor.edit_actor_mask(batch, actor_loss, mask)
        actor = _masked(actor_loss, mask if weights is None else mask * weights[:, None, None, None])
        critic = torch.zeros_like(actor)
        if critic_loss is not None:
            mask = self.edit_critic_mask(batch, critic_loss, pad[:, :, None].expand_as(critic_loss))
            if editor is not None:
                mask = editor.edit_critic_mask(batch, critic_loss, mask)
            critic = _masked(critic_loss, mask if weights is None else mask * weights[:, None, None, None, None])
        b, length = batch.rews.shape[:2]
        self.update_info |= {
            "Actor Loss": actor,
            "Critic Loss": critic,
            "Sequence Length": float(length + 1),
            "Batch Size (in Timesteps)": float(b * length),
            "Unmasked Batch Size (in Timesteps)": state_mask.sum().float(),
        }
        self.loss_terms = LossTerms(actor + self.critic_loss_weight * critic, actor, critic)
        return self.loss_terms.total

    def edit_actor_mask(self, batch: Batch, actor_loss: Tensor, pad_mask: Tensor) -> Tensor:
        """Override to exclude timesteps from the actor's loss.

        Args:
            actor_loss: (B, L, G, 1).
            pad_mask: bool, of the same shape; False at padding and burn-in.

        Returns:
            bool, of the same shape; True where the loss counts. Numbers are weights.
        """
        return pad_mask

    def edit_critic_mask(self, batch: Batch, critic_loss: Tensor, pad_mask: Tensor) -> Tensor:
        """Override to exclude timesteps from the critics' loss; see `edit_actor_mask`.

        Args:
            critic_loss: (B, L, C, G, 1).
        """
        return pad_mask

    @contextmanager
    def masks_edited_by(self, editor: Any) -> Iterator[None]:
        """Within the block, the masks of `forward` also pass the methods `edit_actor_mask` and `edit_critic_mask` of ``editor``."""
        self._mask_editor = editor
        try:
            yield
        finally:
            self._mask_editor = None

    @property
    def trainable_params(self) -> Iterable[nn.Parameter]:
        """The parameters that the optimizer updates: here those of the encoders. Target networks are not among them."""
        return [p for part in (self.tstep_encoder, self.traj_encoder) for p in part.parameters() if p.requires_grad]

    def soft_sync_targets(self) -> None:
        """Move the target networks towards the trained ones; called after each optimizer step. Nothing by default."""

    def get_grad_norms(self) -> dict[str, Tensor]:
        """The norms of the gradients of actor, critics and encoders, those that the agent has."""
        parts = {"Actor": "actor", "Critic": "critics", "TrajEncoder": "traj_encoder", "TstepEncoder": "tstep_encoder"}
        modules = {label: getattr(self, name, None) for label, name in parts.items()}
        return {
            f"{label} Grad Norm": ops.global_norm([p.grad for p in module.parameters() if p.grad is not None])
            for label, module in modules.items()
            if module is not None
        }

    def encode(self, batch: Batch, log: dict[str, Any] | None = None) -> Tensor:
        """States s_0..s_L of a batch, (B, L + 1, E)."""
        emb = self.tstep_encoder(obs=batch.obs, rl2s=batch.rl2s, log_dict=log, mask=batch.mask)
        mask = {"mask": batch.mask} if self.traj_encoder.takes_mask else {}
        states, _ = self.traj_encoder(seq=emb, time_idxs=batch.time_idxs, hidden_state=None, log_dict=log, **mask)
        return states  # type: ignore[no-any-return]

    # ---- memory -------------------------------------------------------------------------------------------------------

    def init_hidden_state(self, batch_size: int, device: torch.device | str) -> Any:
        """Empty memory for ``batch_size`` actors."""
        return self.traj_encoder.init_hidden_state(batch_size, device)

    def reset_hidden_state(self, hidden_state: Any, resets: Any) -> Any:
        """Empty the memory of the actors whose ``resets`` (N,) is True. None, with which some sequence models begin, is empty."""
        if hidden_state is None:
            return None
        return self.traj_encoder.reset_hidden_state(hidden_state, resets)

    def slice_hidden_state(self, hidden_state: Any, start: int, stop: int) -> Any:
        """The memory of actors ``start`` to ``stop`` - 1, sharing storage.

        Raises:
            NotImplementedError: the sequence model does not implement it.
        """
        return self.traj_encoder.slice_hidden_state(hidden_state, start, stop)

    def can_slice_hidden_state(self, hidden_state: Any) -> bool:
        """Whether the sequence model implements `slice_hidden_state`."""
        return self.traj_encoder.can_slice_hidden_state(hidden_state)  # type: ignore[no-any-return]

    # ---- acting -------------------------------------------------------------------------------------------------------

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
        raise NotImplementedError(f"{type(self).__name__} does not implement act")

    policy_extras: tuple[str, ...] = ()
    """Names of the extra fields (`amago.ExtraField` with ``source="policy"`` or "behaviour") that `act_with_extras` computes."""
    required_extras: tuple[str, ...] = ()
    """Names of the extra fields that batches must have."""

    def act_with_extras(
        self, state: Tensor, obs: dict[str, Tensor], sample: bool, names: Sequence[str], gamma_idx: int | None = None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Choose actions as `act` does, and compute extra fields of them, before exploration changes the actions.

        "log_prob" is the natural log-probability of the chosen action, (N,); a density for continuous actions. "behaviour_log_prob" is
        computed where exploration happens, and from (N, 1 + A): that log-probability, then the probability of each choice and of each bit
        being 1, in the order of an action's vector, and 0 for numbers. A subclass may compute others: override this method, call
        ``super()``, and add their names to ``policy_extras``.

        Args:
            state, obs, sample, gamma_idx: as in `act`.
            names: the declared extra fields with ``source="policy"`` or "behaviour".

        Returns:
            actions in their stored form (N, S), and {name: (N, ...)}.
        """
        return self.act(state, obs, sample, gamma_idx), {}

    @torch.no_grad()
    def get_actions(
        self,
        obs: dict[str, Tensor],
        rl2s: Tensor,
        time_idxs: Tensor,
        hidden_state: Any = None,
        sample: bool = True,
        gamma_idx: int | None = None,
    ) -> tuple[Tensor, Any]:
        """One step of N actors.

        Args:
            obs: {key: (N, ...)}; rl2s: (N, 1 + A); time_idxs: (N, 1). A dimension of one timestep may follow N in all of them.
            hidden_state: memory from `init_hidden_state` or the previous step, already reset where a rollout begins. None: no memory.
            sample: draw from the policy; else take its mode.
            gamma_idx: index of the discount whose policy acts; None: that of rollouts. All discounts share the memory.

        Returns:
            actions and the new memory. Actions are in their stored form (N, S). With a dimension of timesteps they are (N, 1, S), and
            choices and bits are uint8, as far as their number fits.
        """
        if rl2s.ndim == 2:
            state, hidden_state = self._next_state(obs, rl2s, time_idxs, hidden_state)
            return self.act(state, obs, sample, gamma_idx), hidden_state
        if rl2s.ndim != 3 or rl2s.shape[1] != 1:
            raise ValueError(f"get_actions takes one timestep, rl2s (N, 1 + A) or (N, 1, 1 + A), got {tuple(rl2s.shape)}")
        first = {key: value[:, 0] for key, value in obs.items()}
        state, hidden_state = self._next_state(first, rl2s[:, 0], time_idxs[:, 0], hidden_state)
        actions = self.act(state, first, sample, gamma_idx)
        small = self.multibinary or (self.discrete and self.action_dim <= 256)
        return (actions.to(torch.uint8) if small else actions).unsqueeze(1), hidden_state

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

    def get_state_embedding(
        self, obs: dict[str, Tensor], rl2s: Tensor, time_idxs: Tensor, hidden_state: Any = None
    ) -> tuple[Tensor, Any]:
        """The sequence model's output.

        Args:
            obs: {key: (N, L, ...)}; rl2s: (N, L, 1 + A); time_idxs: (N, L, 1).
            hidden_state: memory, with L = 1; None: L timesteps from the start.

        Returns:
            states (N, L, E), and the new memory.
        """
        emb = self.tstep_encoder(obs=obs, rl2s=rl2s)
        states, hidden_state = self.traj_encoder(seq=emb, time_idxs=time_idxs, hidden_state=hidden_state)
        return states, hidden_state

    def _next_state(self, obs: dict[str, Tensor], rl2s: Tensor, time_idxs: Tensor, hidden_state: Any) -> tuple[Tensor, Any]:
        """The sequence model's output (N, E) for one step, and the new memory."""
        steps = {k: v.unsqueeze(1) for k, v in obs.items()}
        states, hidden_state = self.get_state_embedding(steps, rl2s.unsqueeze(1), time_idxs.unsqueeze(1), hidden_state)
        return states[:, 0], hidden_state


def _masked(loss: Tensor, mask: Tensor) -> Tensor:
    """The mean of a loss where a mask of its shape is True, or its mean with the weights ``mask``; over several ranks, this rank's share of
    the mean over all (`amago.nets.ranks.divisor`)."""
    if mask.dtype is torch.bool:
        kept = torch.where(mask, loss, torch.zeros((), dtype=loss.dtype, device=loss.device)).sum()
        return kept / ranks.divisor(mask.sum(), 1)
    weighted = torch.where(mask != 0, loss * mask, 0.0).sum()
    return weighted / ranks.divisor(mask.sum(), 1e-5)
