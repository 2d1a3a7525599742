"""The default agent: an off-policy actor-critic over sequences (Grigsby et al. 2023, arXiv 2310.09971, appendix A)."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import gin
import gymnasium as gym
import torch
from torch import Tensor, nn

from amago import ops
from amago.agent import diagnostics
from amago.agent.base import AgentLoss, BaseAgent
from amago.agent.options import binary_filter, gammas_for
from amago.agent.values import PopArtValues
from amago.loading.data import Batch
from amago.nets.actor_critic import Actor, NCritics
from amago.nets.popart import PopArtLayer
from amago.nets.traj_encoders import TrajEncoder
from amago.nets.tstep_encoders import TstepEncoder


@gin.configurable(module="amago.agent")
class Agent(BaseAgent):
    """Actor and critic ensemble on a shared sequence model, trained for several discounts at once.

    Args:
        obs_space, rl2_space, action_space, max_seq_len, tstep_encoder_type, traj_encoder_type: see `BaseAgent`.
        num_critics: C, size of the ensemble.
        num_critics_td: critics drawn at random (with replacement) for a target; their min is taken if ``online_coeff`` > 0,
            else their mean (Chen et al. 2021, arXiv 2101.05982).
        online_coeff: weight of the policy-gradient loss -min_C Q(s, a ~ pi).
        offline_coeff: weight of the filtered behaviour cloning loss -f(A) log pi(a | s).
        gamma: main discount; rollouts act by it.
        use_multigamma: train those of `Multigammas` too.
        reward_multiplier: scales rewards in losses, nowhere else.
        tau: rate of the target networks.
        n_step: rewards in a TD target.
        popart: normalise returns.
        use_target_actor: take the action of a target from a slow copy of the actor.
        fake_filter: f = 1, plain behaviour cloning.
        fbc_filter_func: f, from advantages (B, L, G, 1) to weights.
        num_actions_for_value_in_critic_loss, num_actions_for_value_in_actor_loss: samples of the policy that stand for its
            expectation; discrete policies need none, theirs is exact.
        actor_type, critic_type: classes of `amago.nets.actor_critic`.
        pass_obs_keys_to_actor: observations handed to the actor beside the state (an action mask, say).

    Raises:
        ValueError: an argument out of range, or both losses switched off.
    """

    gammas: Tensor
    # modules of the classes that the user chose; their contracts are BaseActorHead and NCritics
    actor: Any
    critics: Any
    target_actor: Any
    target_critics: Any

    def __init__(
        self,
        obs_space: gym.spaces.Dict,
        rl2_space: gym.spaces.Box,
        action_space: gym.Space[Any],
        max_seq_len: int,
        tstep_encoder_type: type[TstepEncoder],
        traj_encoder_type: type[TrajEncoder],
        num_critics: int = 4,
        num_critics_td: int = 2,
        online_coeff: float = 1.0,
        offline_coeff: float = 0.1,
        gamma: float = 0.999,
        use_multigamma: bool = True,
        reward_multiplier: float = 10.0,
        tau: float = 0.003,
        n_step: int = 1,
        popart: bool = True,
        use_target_actor: bool = True,
        fake_filter: bool = False,
        fbc_filter_func: Callable[[Tensor], Tensor] = binary_filter,
        num_actions_for_value_in_critic_loss: int = 1,
        num_actions_for_value_in_actor_loss: int = 1,
        actor_type: type[nn.Module] = Actor,
        critic_type: type[nn.Module] = NCritics,
        pass_obs_keys_to_actor: Sequence[str] = (),
    ):
        super().__init__(obs_space, rl2_space, action_space, max_seq_len, tstep_encoder_type, traj_encoder_type)
        _check_options(
            num_critics=num_critics, num_critics_td=num_critics_td, n_step=n_step, tau=tau, online_coeff=online_coeff,
            offline_coeff=offline_coeff, num_actions_for_value_in_critic_loss=num_actions_for_value_in_critic_loss,
            num_actions_for_value_in_actor_loss=num_actions_for_value_in_actor_loss,
        )  # fmt: skip
        missing = [k for k in pass_obs_keys_to_actor if k not in obs_space.spaces]
        if missing:
            raise ValueError(f"pass_obs_keys_to_actor names {missing}; the observations are {sorted(obs_space.spaces)}")
        self.num_critics_td, self.online_coeff, self.offline_coeff = num_critics_td, online_coeff, offline_coeff
        self.reward_multiplier, self.tau, self.n_step = reward_multiplier, tau, n_step
        self.use_target_actor, self.fake_filter, self.filter = use_target_actor, fake_filter, fbc_filter_func
        self.k_critic, self.k_actor = num_actions_for_value_in_critic_loss, num_actions_for_value_in_actor_loss
        self.pass_obs_keys_to_actor = tuple(pass_obs_keys_to_actor)

        spec, state_dim = self.action_spec, self.traj_encoder.emb_dim
        self.discrete = spec.kind == "discrete"
        gammas = gammas_for(spec.kind, gamma, use_multigamma)
        self.register_buffer("gammas", gammas, persistent=False)
        heads = {"state_dim": state_dim, "action_dim": spec.dim, "action_kind": spec.kind, "gammas": gammas}
        self.popart = PopArtLayer(gammas=len(gammas), enabled=popart)
        self.critics = critic_type(**heads, num_critics=num_critics)
        self.target_critics = copy.deepcopy(self.critics).requires_grad_(False)
        self.actor = actor_type(**heads)
        self.target_actor = copy.deepcopy(self.actor).requires_grad_(False)
        self.values = PopArtValues(self.popart)
        if online_coeff > 0 and not (self.discrete or self.actor.policy_dist.actions_differentiable):
            raise ValueError(
                f"online_coeff={online_coeff} asks for a policy gradient, but samples of {type(self.actor.policy_dist).__name__} "
                "carry none: set Agent.online_coeff = 0, or choose another distribution"
            )

    # ---- acting -------------------------------------------------------------------------------------------------------

    def act(self, state: Tensor, obs: dict[str, Tensor], sample: bool) -> Tensor:
        pi = self.actor(state, straight_from_obs={k: obs[k] for k in self.pass_obs_keys_to_actor})
        return pi.sample_action(sample)[..., -1, :]

    # ---- learning -----------------------------------------------------------------------------------------------------

    def forward(self, batch: Batch, log_step: bool = False) -> AgentLoss:
        metrics: dict[str, float | Tensor] = {}
        log = metrics if log_step else None
        real = batch.transition_mask  # (B, L, 1)
        rews = batch.rews.float() * self.reward_multiplier
        action = self._action_vectors(batch.actions)  # (B, L, A)

        states = self.encode(batch, log)
        state, next_state = states[:, :-1], states[:, 1:].detach()
        pi = self.actor(state, log_dict=log, straight_from_obs=self._straight(batch, slice(None, -1)))
        actor_loss = states.new_zeros((*rews.shape[:2], len(self.gammas), 1), dtype=torch.float32)
        critic_loss, advantage = None, None

        if self.online_coeff > 0 or not self.fake_filter:
            with torch.no_grad():
                target = self._td_target(next_state, rews, batch.dones, real, self._straight(batch, slice(1, None)))
                if self.training:
                    self.values.observe(target, real[:, :, None, :, None].expand_as(target))
            q_data, q_pi = self._evaluate(state, action, pi)  # (B, L, C, G, 1) each
            critic_loss = self.values.loss(q_data, target)
            if self.online_coeff > 0:
                actor_loss = actor_loss - self.online_coeff * self.values.objective(q_pi).amin(dim=2)
            with torch.no_grad():
                advantage = (self.values.advantage_units(q_data) - self.values.advantage_units(q_pi)).mean(dim=2)
            if log_step:
                estimate = self.values.estimate(q_data.detach())
                metrics |= diagnostics.critic_metrics(estimate, target, self.gammas, real)

        if self.offline_coeff > 0:
            log_prob = self._log_prob(pi, action)  # (B, L, G, 1)
            weight = torch.ones_like(log_prob) if self.fake_filter or advantage is None else self.filter(advantage)
            actor_loss = actor_loss - self.offline_coeff * weight * log_prob
            if log_step and advantage is not None:
                metrics |= diagnostics.advantage_metrics(advantage, weight, real)
        if log_step:
            metrics |= diagnostics.batch_metrics(batch.rews, batch.dones, real)
        return AgentLoss(actor_loss, critic_loss, metrics)

    def _td_target(self, next_state: Tensor, rews: Tensor, dones: Tensor, real: Tensor, straight: dict[str, Tensor]) -> Tensor:
        """(B, L, 1, G, 1) n-step targets, bootstrapped with a random choice of target critics at a' ~ target policy."""
        pi = (self.target_actor if self.use_target_actor else self.actor)(next_state, straight_from_obs=straight)
        if self.discrete:
            q = (self.target_critics.all_values(next_state) * pi.probs[:, :, None]).sum(-1, keepdim=True)
        else:
            samples = torch.stack([pi.sample() for _ in range(self.k_critic)])
            q = self.target_critics(next_state, samples.to(next_state.dtype)).mean(dim=0)
        chosen = torch.randint(q.shape[2], (self.num_critics_td,), device=q.device)
        q = self.values.estimate(q)[:, :, chosen]
        value = q.amin(dim=2, keepdim=True) if self.online_coeff > 0 else q.mean(dim=2, keepdim=True)
        gammas = self.gammas[:, None]
        return ops.n_step_return(
            rews[:, :, None, None], dones[:, :, None, None], value, gammas, real[:, :, None, None], n=self.n_step
        )

    def _evaluate(self, state: Tensor, action: Tensor, pi: Any) -> tuple[Tensor, Tensor]:
        """Q of the stored action, with gradient to critics and state; Q of the policy's, with gradient to the action alone."""
        if self.discrete:
            q = self.critics.all_values(state)  # (B, L, C, G, A)
            stored = self.actor.policy_dist.clip_like_policy(action)[:, :, None, None]
            q_data = (q * stored).sum(-1, keepdim=True)
            return q_data, (q.detach() * pi.probs[:, :, None]).sum(-1, keepdim=True)
        stored = action[None, :, :, None].expand(-1, -1, -1, len(self.gammas), -1)
        q_data = self.critics(state, stored).mean(dim=0)
        grad = self.online_coeff > 0
        with torch.set_grad_enabled(grad and torch.is_grad_enabled()):
            samples = torch.stack([pi.rsample() if grad else pi.sample() for _ in range(self.k_actor)])
            q_pi = self.critics(state.detach(), samples.to(state.dtype), detach_params=True).mean(dim=0)
        return q_data, q_pi

    def _log_prob(self, pi: Any, action: Tensor) -> Tensor:
        """(B, L, G, 1): summed over the dimensions of a continuous action, averaged over bits."""
        if self.discrete:
            index = action.argmax(-1)[:, :, None].expand(-1, -1, len(self.gammas))
            return pi.log_prob(index)[..., None].float()
        per_dim = pi.log_prob(action[:, :, None].expand(-1, -1, len(self.gammas), -1)).float()
        if self.action_spec.kind == "multibinary":
            return per_dim.mean(-1, keepdim=True)
        return per_dim.sum(-1, keepdim=True)

    def _action_vectors(self, actions: Tensor) -> Tensor:
        """Stored actions of a batch as float vectors (B, L, A)."""
        if self.discrete and actions.shape[-1] != self.action_spec.dim:
            return nn.functional.one_hot(actions[..., 0].long(), self.action_spec.dim).float()
        actions = actions.float()
        return actions.clamp(-1.0, 1.0) if self.action_spec.kind == "continuous" else actions

    def _straight(self, batch: Batch, steps: slice) -> dict[str, Tensor]:
        return {k: batch.obs[k][:, steps] for k in self.pass_obs_keys_to_actor}

    @property
    def trainable_params(self) -> list[nn.Parameter]:
        parts = (self.tstep_encoder, self.traj_encoder, self.critics, self.actor)
        return [p for part in parts for p in part.parameters() if p.requires_grad]

    def soft_sync_targets(self) -> None:
        ops.ema_update(self.target_critics, self.critics, self.tau)
        ops.ema_update(self.target_actor, self.actor, self.tau)


def _check_options(**options: float) -> None:
    for name, value in options.items():
        if name in ("tau",):
            if not 0.0 < value <= 1.0:
                raise ValueError(f"{name} must lie in (0, 1], got {name}={value}")
        elif name.endswith("_coeff"):
            if value < 0:
                raise ValueError(f"{name} must not be negative, got {name}={value}")
        elif value < 1 or int(value) != value:
            raise ValueError(f"{name} must be a whole number of at least 1, got {name}={value}")
    if options["online_coeff"] == 0 and options["offline_coeff"] == 0:
        raise ValueError("online_coeff and offline_coeff are both 0: nothing would train the actor")
