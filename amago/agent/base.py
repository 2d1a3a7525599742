"""The interface of agents: encoders, a loss for training, and actions for rollouts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import gymnasium as gym
import torch
from torch import Tensor, nn

from amago import ops
from amago.data.batch import Batch
from amago.data.trajectory import MAGIC_PAD_VAL
from amago.nets import ranks
from amago.nets.cnn import ImageScale
from amago.nets.ff import InputNorm
from amago.nets.traj_base import Dones
from amago.nets.traj_encoders import TrajEncoder
from amago.nets.tstep_encoders import TstepEncoder
from amago.nets.utils import Log
from amago.spaces import ActionSpec, action_spec


def get_action_dim_and_type(space: gym.Space[Any]) -> tuple[int, bool, bool]:
    """The width of an action's vector form, whether it is one choice, and whether it is bits."""
    spec = action_spec(space)
    return spec.dim, spec.kind == "discrete", spec.kind == "multibinary"


def action_vectors(spec: ActionSpec, actions: Tensor) -> Tensor:
    """Actions as float vectors (B, L, A), from vectors or from their stored form (B, L, S)."""
    if actions.shape[-1] != spec.dim:  # the stored form, with an index for each discrete part
        parts = [
            nn.functional.one_hot(actions[..., p.stored.start].long(), p.dim).float()
            if p.kind == "discrete"
            else actions[..., p.stored].float()
            for p in spec.parts
        ]
        actions = torch.cat(parts, dim=-1)
    actions = actions.float()
    return actions if spec.kind in ("discrete", "multibinary") else actions.clamp(-1.0, 1.0)


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Put a module into evaluation mode within the block."""
    was_training = module.training
    module.eval()
    try:
        yield
    finally:
        module.train(was_training)


class BaseAgent(nn.Module):
    """Timestep encoder and sequence model, on which a subclass trains its own networks.

    The constructor calls `init_options`, `init_encoders`, `init_actor_critic`, `init_extra_networks` and `hard_sync_targets`,
    in this order. A subclass overrides the methods that build its networks, and either `losses` or `forward`.

    Args:
        obs_space: flat dict of boxes (`AMAGOEnv.observation_space`).
        rl2_space: box of width 1 + A (`AMAGOEnv.rl2_space`).
        action_space: any space that `amago.spaces.action_spec` accepts.
        max_seq_len: transitions in a training sequence, and steps of memory when acting.
        tstep_encoder_type, traj_encoder_type: classes, built with their gin defaults.

    Attributes:
        action_dim, discrete, multibinary: of `get_action_dim_and_type`.
        state_dim: E, width of the sequence model's output.
        update_info: metrics of the last `forward`, by name.
        critic_loss_weight: weight of the critics' loss.
        loss_weights: weights of other losses, by their names in `losses`; 1 by default.
        td_errors: (B, L, 1), magnitudes, of the last batch whose sequences were drawn by them (`Batch.sources`), NaN where the
            critics' mask is False; None: not computed.
        burn_in: transitions at the start of a sequence that have no loss, unless the sequence begins a rollout.
        pad_val: value of numbers at padded steps of a batch (`amago.loading.Batch`).
        moves: (), 0 where the present update is skipped and 1 elsewhere, on a device that is not waited for; None: it is not skipped.
    """

    moves: Tensor | None = None

    critic_loss_weight: float = 10.0
    loss_weights: Mapping[str, float] = {}
    burn_in: int = 0
    pad_val: float = MAGIC_PAD_VAL
    tstep_encoder: TstepEncoder
    traj_encoder: TrajEncoder

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
        self.td_errors: Tensor | None = None
        self._mask_editor: Any = None
        self.register_buffer("scale_growth", None)
        self.init_options()
        self.init_encoders()
        self.init_actor_critic()
        self.init_extra_networks()
        self.hard_sync_targets()

    def __getstate__(self) -> dict[str, Any]:
        """The state without the graph of the last loss, which cannot be copied or pickled."""
        info = {k: v.detach() if isinstance(v, Tensor) else v for k, v in self.update_info.items()}
        return super().__getstate__() | {"update_info": info}

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
        """Called after weights, or (``is_resume``) the whole training state, were loaded. Nothing by default."""

    def learn_from_records(self) -> str:
        """Called before each training phase of a run for which nothing was collected. Returns a line about changes; "": none, as by
        default."""
        return ""

    @property
    def state_dim(self) -> int:
        return int(self.traj_encoder.emb_dim)

    # ---- learning -----------------------------------------------------------------------------------------------------

    def losses(self, batch: Batch, log_step: bool = False) -> dict[str, Tensor]:
        """The losses of a batch at each step, by name, before masking; metrics go into `update_info`, costly ones with
        ``log_step``.

        A subclass adds its own losses to the result of ``super()``: ``losses["aux"]``, (B, L, ...), weighted by
        ``loss_weights["aux"]``.

        Returns:
            "actor" (B, L, G, 1), and "critic" (B, L, C, G, 1) where the settings need critics.
        """
        raise NotImplementedError(f"{type(self).__name__} implements neither losses nor forward")

    def forward(self, batch: Batch, log_step: bool = False) -> Tensor:
        """The loss of a batch, a scalar; its metrics are in `update_info`, a new dict in each call.

        An override may add to both after ``super().forward(batch, log_step)``. One that computes the loss itself puts at least
        the metrics "Actor Loss" and "Critic Loss" into ``update_info``.
        """
        self.update_info = {}
        return self._weighted_sum(batch, self.losses(batch, log_step), self.loss_mask(batch))

    def loss_mask(self, batch: Batch) -> Tensor:
        """(B, L, 1) bool, True where a transition has a loss: where it is real, and not burn-in."""
        real = batch.transition_mask
        if not self.burn_in:
            return real
        later = torch.arange(real.shape[1], device=real.device)[:, None] >= self.burn_in
        return real & (later | (batch.time_idxs[:, :1] == 0))

    def _weighted_sum(self, batch: Batch, losses: Mapping[str, Tensor], state_mask: Tensor) -> Tensor:
        """The scalar loss of `losses`; puts the mean of each and the sizes of the batch into `update_info`."""
        weights, drawn = {"critic": self.critic_loss_weight, **self.loss_weights}, batch.weights
        parts = [self._sum_of_loss(batch, name, loss, state_mask.to(torch.bool), drawn) for name, loss in losses.items()]
        sums, counts, least = zip(*parts)
        means = {name: added / count for name, added, count in zip(losses, sums, ranks.divisors(counts, least))}
        b, length = batch.rews.shape[:2]
        self.update_info |= {
            "Critic Loss": torch.zeros_like(next(iter(means.values()))),
            **{f"{name.title()} Loss": mean for name, mean in means.items()},
            "Sequence Length": float(length + 1),
            "Batch Size (in Timesteps)": float(b * length),
            "Unmasked Batch Size (in Timesteps)": state_mask.sum().float(),
        }
        return torch.stack([weights.get(name, 1.0) * mean for name, mean in means.items()]).sum()

    def _sum_of_loss(
        self, batch: Batch, name: str, loss: Tensor, state_mask: Tensor, weights: Tensor | None
    ) -> tuple[Tensor, Tensor, float]:
        """The sum of a loss (B, L, ...) where its mask, which users may edit to a bool or to weights, is True; the mask's count, and the
        least number to divide by. Over several ranks the counts are shared (`amago.nets.ranks.divisors`).

        Sequences that were drawn more often than others count less, but the mean divides by the mask alone: a batch of one
        sequence keeps its weight, and several small batches weigh theirs as one large batch does.
        """
        mask = state_mask.view(*state_mask.shape[:2], *(1,) * (loss.ndim - 2)).expand_as(loss)
        for owner in (self, self._mask_editor):
            if owner is not None and name in ("actor", "critic"):
                mask = (owner.edit_actor_mask if name == "actor" else owner.edit_critic_mask)(batch, loss, mask)
        if name == "critic" and self.td_errors is not None:  # NaN where a step has no loss
            kept = (mask != 0).flatten(2).any(dim=2, keepdim=True)
            self.td_errors = torch.where(kept, self.td_errors.detach(), torch.nan)
        if weights is not None:
            loss = loss * weights.view(-1, *(1,) * (loss.ndim - 1))
        if mask.dtype is torch.bool:
            return torch.where(mask, loss, 0.0).sum(), mask.sum(), 1
        return torch.where(mask != 0, loss * mask, 0.0).sum(), mask.sum(), 1e-5

    def _compute_loss(self, batch: Batch, actor_loss: Tensor, critic_loss: Tensor | None, state_mask: Tensor) -> Tensor:
        """For overrides of `forward`: the scalar loss of losses (B, L, G, 1) and (B, L, C, G, 1) before masking; transitions
        count where ``state_mask`` (B, L, 1) is True."""
        losses = {"actor": actor_loss} | ({} if critic_loss is None else {"critic": critic_loss})
        return self._weighted_sum(batch, losses, state_mask)

    def edit_actor_mask(self, batch: Batch, actor_loss: Tensor, pad_mask: Tensor) -> Tensor:
        """Override to exclude timesteps from the actor's loss (B, L, G, 1): ``pad_mask``, bool of its shape, False at padding and
        burn-in, becomes a mask of the same shape, True where the loss counts. Numbers are weights."""
        return pad_mask

    def edit_critic_mask(self, batch: Batch, critic_loss: Tensor, pad_mask: Tensor) -> Tensor:
        """Override to exclude timesteps from the critics' loss (B, L, C, G, 1); see `edit_actor_mask`."""
        return pad_mask

    @contextmanager
    def masks_edited_by(self, editor: object) -> Iterator[None]:
        """Also pass the masks of `forward` to `edit_actor_mask` and `edit_critic_mask` of ``editor`` within the block."""
        self._mask_editor = editor
        try:
            yield
        finally:
            self._mask_editor = None

    scale_growth: Tensor | None
    """(), the number by which `divided_parameters` have been divided since the agent was built; None: they never are."""

    def divided_parameters(self) -> list[nn.Parameter]:
        """The parameters that an agent divides by a number when it multiplies their layer's outputs by it. Tensors derived from
        such parameters, such as an average, must be divided too."""
        return []

    def complete_weights(self, weights: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """The weights of a whole agent, completed by the start values of tensors that exist only with some of its options."""
        start: dict[str, Tensor] = {}
        for name, module in self.named_modules():
            if isinstance(module, InputNorm) and module.skip:  # statistics without use, which an earlier version did not save
                start |= {f"{name}.{k}": v for k, v in module.state_dict().items()}
            if isinstance(module, ImageScale):  # of images without bounds, which were read as pixels
                start |= {f"{name}.norm.{k}": v for k, v in module.at_start().items()}
        return weights if start.keys() <= weights.keys() else {**start, **weights}

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load a state dict; a whole one (``strict``) is completed by `complete_weights`."""
        return super().load_state_dict(self.complete_weights(state_dict) if strict else state_dict, strict, assign)

    @property
    def trainable_params(self) -> Iterable[nn.Parameter]:
        """The parameters that the optimizer updates, here the encoders'. Target networks are not among them."""
        return [p for part in (self.tstep_encoder, self.traj_encoder) for p in part.parameters() if p.requires_grad]

    def soft_sync_targets(self) -> None:
        """Move the target networks towards the trained ones; called after each optimizer step. Nothing by default."""

    def get_grad_norms(self) -> dict[str, Tensor]:
        """The norms of the gradients of actor, critics and encoders, as far as the agent has them."""
        parts = {"actor": "Actor", "critics": "Critic", "traj_encoder": "TrajEncoder", "tstep_encoder": "TstepEncoder"}
        return {
            f"{parts[name]} Grad Norm": ops.global_norm([p.grad for p in module.parameters() if p.grad is not None])
            for name, module in self.named_children()
            if name in parts
        }

    @torch.no_grad()
    def encode_end(self, batch: Batch, timesteps: int) -> Tensor:
        """The state s_L (B, 1, E), in evaluation mode, if each sequence began ``timesteps`` - 1 steps before its end."""
        parts = [(part, part.training) for part in (self.tstep_encoder, self.traj_encoder)]
        try:  # without a context, at which a compiler stops
            for part, _ in parts:
                part.eval()
            return BaseAgent.encode(self, batch, steps=slice(-timesteps, None))[:, -1:]
        finally:
            for part, was_training in parts:
                part.train(was_training)

    def encode(self, batch: Batch, log: Log = None, steps: slice = slice(None)) -> Tensor:
        """States s_0..s_L of a batch, (B, L + 1, E); with ``steps``, the states of these timesteps alone."""
        mask = batch.mask[:, steps]
        obs = {k: v[:, steps] for k, v in batch.obs.items()}
        emb = self.tstep_encoder(obs=obs, rl2s=batch.rl2s[:, steps], log_dict=log, mask=mask)
        masked = {"mask": mask} if self.traj_encoder.takes_mask else {}
        states, _ = self.traj_encoder(seq=emb, time_idxs=batch.time_idxs[:, steps], hidden_state=None, log_dict=log, **masked)
        return states  # type: ignore[no-any-return]

    # ---- memory: see `TrajEncoder` -------------------------------------------------------------------------------------

    def init_hidden_state(self, batch_size: int, device: torch.device | str) -> Any:
        """Empty memory for ``batch_size`` actors."""
        return self.traj_encoder.init_hidden_state(batch_size, device)

    def reset_hidden_state(self, hidden_state: object, dones: Dones) -> Any:
        """Empty the memory of the actors whose ``dones`` (N,) is True; None is empty."""
        return None if hidden_state is None else self.traj_encoder.reset_hidden_state(hidden_state, dones)

    def slice_hidden_state(self, hidden_state: object, start: int, stop: int) -> Any:
        """The memory of actors ``start`` to ``stop`` - 1, sharing storage."""
        return self.traj_encoder.slice_hidden_state(hidden_state, start, stop)

    def can_slice_hidden_state(self, hidden_state: object) -> bool:
        """True if the sequence model implements `slice_hidden_state`."""
        return self.traj_encoder.can_slice_hidden_state(hidden_state)  # type: ignore[no-any-return]

    # ---- acting -------------------------------------------------------------------------------------------------------

    def act(self, state: Tensor, obs: dict[str, Tensor], sample: bool, gamma_idx: int | None = None) -> Tensor:
        """Choose actions.

        Args:
            state: (N, E), output of the sequence model.
            obs: {key: (N, ...)}.
            sample: draw from the policy; else take its mode.
            gamma_idx: index of the discount whose policy acts; None: the discount for rollouts.

        Returns:
            actions in their stored form (N, S).
        """
        raise NotImplementedError(f"{type(self).__name__} does not implement act")

    policy_extras: tuple[str, ...] = ()
    """Names of the extra fields (``source="policy"`` of `amago.ExtraField`) computed by `act_with_extras`."""

    def act_with_extras(
        self, state: Tensor, obs: dict[str, Tensor], sample: bool, names: Sequence[str], gamma_idx: int | None = None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Choose actions as `act` does, and compute extra fields of them, {name: (N, ...)}, before exploration changes the
        actions. A subclass may compute others: override this method, call ``super()``, and add their names to `policy_extras`.

        "log_prob" is the natural log-probability of the chosen action, (N,); a density for continuous actions.
        """
        return self.act(state, obs, sample, gamma_idx), {}

    @torch.no_grad()
    def get_actions(
        self,
        obs: dict[str, Tensor],
        rl2s: Tensor,
        time_idxs: Tensor,
        hidden_state: object = None,
        sample: bool = True,
        gamma_idx: int | None = None,
    ) -> tuple[Tensor, Any]:
        """One step of N actors.

        Args:
            obs: {key: (N, ...)}; rl2s: (N, 1 + A); time_idxs: (N, 1). A dimension of one timestep may follow N in all of them.
            hidden_state: memory from `init_hidden_state` or the previous step, already reset where a rollout begins. None: no
                memory.
            sample: draw from the policy; else take its mode.
            gamma_idx: index of the discount whose policy acts; None: the discount for rollouts. All discounts share the memory.

        Returns:
            actions and the new memory. Actions are in their stored form (N, S). With a dimension of timesteps they are
            (N, 1, S), and choices and bits are uint8, as far as their number fits.
        """
        if rl2s.ndim == 3:
            if rl2s.shape[1] != 1:
                raise ValueError(f"get_actions takes one timestep, rl2s (N, 1 + A) or (N, 1, 1 + A), got {tuple(rl2s.shape)}")
            step = {key: value[:, 0] for key, value in obs.items()}, rl2s[:, 0], time_idxs[:, 0]
            actions, hidden_state = BaseAgent.get_actions(self, *step, hidden_state, sample, gamma_idx)
            small = self.multibinary or (self.discrete and self.action_dim <= 256)
            return (actions.to(torch.uint8) if small else actions).unsqueeze(1), hidden_state
        steps = {key: value.unsqueeze(1) for key, value in obs.items()}
        states, hidden_state = self.get_state_embedding(steps, rl2s.unsqueeze(1), time_idxs.unsqueeze(1), hidden_state)
        return self.act(states[:, 0], obs, sample, gamma_idx), hidden_state

    @torch.no_grad()
    def get_actions_and_extras(
        self,
        obs: dict[str, Tensor],
        rl2s: Tensor,
        time_idxs: Tensor,
        hidden_state: object,
        names: Sequence[str],
        sample: bool = True,
    ) -> tuple[Tensor, dict[str, Tensor], Any]:
        """`get_actions` with the extra fields of these names (`act_with_extras`), before the new memory."""
        steps = {key: value.unsqueeze(1) for key, value in obs.items()}
        states, hidden_state = self.get_state_embedding(steps, rl2s.unsqueeze(1), time_idxs.unsqueeze(1), hidden_state)
        actions, extras = self.act_with_extras(states[:, 0], obs, sample, names)
        return actions, extras, hidden_state

    def get_state_embedding(
        self, obs: dict[str, Tensor], rl2s: Tensor, time_idxs: Tensor, hidden_state: object = None
    ) -> tuple[Tensor, Any]:
        """The sequence model's output (N, L, E), and the new memory, for obs {key: (N, L, ...)}, rl2s (N, L, 1 + A) and time_idxs
        (N, L, 1): of L timesteps from the start, or of one with memory."""
        emb = self.tstep_encoder(obs=obs, rl2s=rl2s)
        return self.traj_encoder(seq=emb, time_idxs=time_idxs, hidden_state=hidden_state)  # type: ignore[no-any-return]
