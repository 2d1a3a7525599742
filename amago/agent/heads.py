"""The heads of an agent: what they are told of its actions, and whether they fit its options."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor, nn

from amago.agent.targets import AgentWithTargets
from amago.agent.values import ValueRepresentation
from amago.data.batch import Batch
from amago.nets import ranks
from amago.nets.actor_critic import Actor, ResidualActor, StateValues
from amago.nets.heads import BaseCriticHead, EnsembleCritics
from amago.nets.policy_dists import Multibinary
from amago.nets.utils import has_argument
from amago.spaces import check_mask


class AgentWithHeads(AgentWithTargets):
    """A base class of agents whose actor and critics are classes that the user chooses."""

    gammas: Tensor
    values: ValueRepresentation
    exact: bool
    popart: Any
    state_values: StateValues | None
    pass_obs_keys_to_actor: list[str]

    def _start_scaling(self) -> None:
        if not isinstance(self.critics, EnsembleCritics) or hasattr(self.critics, "bins"):
            raise ValueError(
                f"rescale_critics=True needs scalar critics whose networks are an EnsembleMLP, such as NCritics; critic_type="
                f"{type(self.critics).__name__} are not"
            )
        self.critics.start_scaling()
        self.popart.start_scaling()

    def _choose_scale(self, batch: Batch, rews: Tensor) -> None:
        """Set the scale of the critics' outputs, and of the statistics before any data, if this is the first batch.

        Networks should output 1 to 2 for returns as they would be if each reward were the mean one or, where those are below 1, for the largest
        reward. Everything is then as with rewards of another size. A batch without rewards leaves the scale.
        """
        real = batch.transition_mask
        steps = ranks.masked_max(batch.time_idxs[:, 1:].to(rews.dtype), real).clamp(min=1.0)
        size = ranks.masked_mean(rews, real).abs() * torch.minimum(1.0 / (1.0 - self.gammas.amax()), steps)
        growth, shrinkage = (
            self.values.change_of_scale(x, self.critics.output_scale)
            for x in (size, torch.maximum(size, ranks.masked_max(rews.abs(), real)))
        )
        factor = torch.where(growth > 1.0, growth, shrinkage.clamp(max=1.0))
        factor = torch.where(self.popart.updates == 0, factor, torch.ones_like(factor))
        self.popart.scale_start(factor)
        for critics in (self.critics, self.target_critics):
            critics.output_scale.mul_(factor)

    def _grow_scale(self) -> None:
        """Let the scale of the critics' outputs follow the targets, when these outgrow it; values stay the same."""
        factor = self.values.change_of_scale(self.popart.nu.sqrt(), self.critics.output_scale).clamp(min=1.0)
        for critics in (self.critics, self.target_critics):
            critics.grow_scale(factor)
        if self.state_values is not None:
            self.state_values.divide(factor)

    @torch.no_grad()
    def encode_end(self, batch: Batch, timesteps: int) -> Tensor:
        """The state s_L (B, 1, E) as it would be had each sequence begun ``timesteps`` - 1 steps before its end; as in evaluation mode."""
        last = slice(-timesteps, None)
        parts = [(part, part.training) for part in (self.tstep_encoder, self.traj_encoder)]
        try:
            for part, _ in parts:
                part.eval()
            emb = self.tstep_encoder(
                obs={k: v[:, last] for k, v in batch.obs.items()},
                rl2s=batch.rl2s[:, last],
                log_dict=None,
                mask=batch.mask[:, last],
            )
            mask = {"mask": batch.mask[:, last]} if self.traj_encoder.takes_mask else {}
            states, _ = self.traj_encoder(seq=emb, time_idxs=batch.time_idxs[:, last], hidden_state=None, log_dict=None, **mask)
        finally:
            for part, was_training in parts:
                part.train(was_training)
        return states[:, -1:]  # type: ignore[no-any-return]

    def _action_vectors(self, actions: Tensor) -> Tensor:
        """The actions of a batch as float vectors (B, L, A), from vectors or from their stored form (B, L, S)."""
        spec = self.action_spec
        if actions.shape[-1] != spec.dim:  # the stored form, with an index for each discrete part
            actions = torch.cat(
                [
                    nn.functional.one_hot(actions[..., p.stored.start].long(), p.dim).float()
                    if p.kind == "discrete"
                    else actions[..., p.stored].float()
                    for p in spec.parts
                ],
                dim=-1,
            )
        actions = actions.float()
        return actions if spec.kind in ("discrete", "multibinary") else actions.clamp(-1.0, 1.0)

    def _kind_of_actions(self, actor_type: type[nn.Module]) -> dict[str, Any]:
        """What an actor is told beside ``discrete``: nothing, if an action is one choice or a vector of numbers."""
        kind = self.action_spec.kind
        if kind in ("discrete", "continuous"):
            return {}
        if has_argument(actor_type, "action_kind"):
            return {"action_kind": kind}
        if self.multibinary and has_argument(actor_type, "continuous_dist_type"):
            return {"continuous_dist_type": Multibinary}
        raise ValueError(
            f"actor_type={actor_type.__name__} cannot have actions of kind {kind!r}: give its __init__ an argument action_kind, "
            "and hand it to super().__init__"
        )

    def _check_heads(self) -> None:
        """Add the key of a mask of actions to those of the actor; refuse heads that do not fit the options."""
        actor, plain = self.actor, (Actor.actor_network_forward, ResidualActor.actor_network_forward)
        if self.pass_obs_keys_to_actor and getattr(type(actor), "actor_network_forward", None) in plain:
            warnings.warn(
                f"pass_obs_keys_to_actor={self.pass_obs_keys_to_actor}, but {type(actor).__name__} ignores observations: override "
                "actor_network_forward in a subclass",
                stacklevel=2,
            )
        self.mask_key: str | None = getattr(actor, "mask_key", None)
        if self.mask_key is not None:
            check_mask(self.mask_key, self.obs_space, self.action_spec)
            if self.mask_key not in self.pass_obs_keys_to_actor:
                self.pass_obs_keys_to_actor.append(self.mask_key)
        if self.online_coeff > 0 and not actor.policy_dist.actions_differentiable:
            raise ValueError(
                f"online_coeff={self.online_coeff} asks for a policy gradient, but samples of "
                f"{type(actor.policy_dist).__name__} carry none (they are not reparametrised): set "
                f"{type(self).__name__}.online_coeff = 0 to train by filtered behaviour cloning alone, or choose another distribution"
            )
        if self.online_coeff > 0 and not self.exact and isinstance(self.critics, BaseCriticHead):
            self._check_critics_detach()

    def _check_critics_detach(self) -> None:
        """Raise ValueError if critics receive a gradient from the values of the policy's actions, which they must not follow."""
        training, param = self.critics.training, next(self.critics.parameters(), None)
        if param is None:
            return
        shape = (1, 1, 1, len(self.gammas), self.action_spec.dim)
        state = param.new_zeros((1, 1, self.traj_encoder.emb_dim))
        chosen = param.new_zeros(shape).requires_grad_()
        with torch.enable_grad():
            _, values = self.critics.eval().evaluate(state, chosen.detach()[0], chosen, self.values.value)
            self.critics.train(training)
            params = [p for p in self.critics.parameters() if p.requires_grad]
            grads = torch.autograd.grad(values.sum(), params, allow_unused=True) if values.requires_grad and params else ()
        if any(g is not None for g in grads):
            raise ValueError(
                f"critic_type={type(self.critics).__name__} ignores detach_params=True: the actor's loss would train the critics, "
                "towards high values. In its forward, detach every parameter where detach_params is True"
            )
