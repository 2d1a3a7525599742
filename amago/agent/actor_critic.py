"""The learning update: an off-policy actor-critic over sequences (Grigsby et al. 2023, arXiv 2310.09971, appendix A)."""

from __future__ import annotations

import copy
import warnings
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

import gymnasium as gym
import torch
from torch import Tensor, nn
from torch.distributions import Distribution

from amago import ops
from amago.agent import diagnostics
from amago.agent.base import AgentLoss
from amago.agent.log_prob import behaviour_of, log_prob_of_stored
from amago.agent.options import ActorCriticOptions, check_gamma_idx, gammas_for
from amago.agent.targets import AgentWithTargets
from amago.agent.traces import Taken, check_targets, taken_next, trace_coefficients
from amago.agent.values import AgentValues, ValueRepresentation
from amago.data.batch import Batch
from amago.data.extras import BEHAVIOUR_LOG_PROB
from amago.nets import ranks
from amago.nets.actor_critic import Actor, PopArtLayer, ResidualActor
from amago.nets.heads import BaseCriticHead, DetachedCritics, EnsembleCritics
from amago.nets.policy_dists import ActionDistribution, Multibinary
from amago.nets.torch_distributions import action_distribution
from amago.nets.traj_encoders import TrajEncoder
from amago.nets.tstep_encoders import TstepEncoder
from amago.nets.utils import has_argument
from amago.spaces import check_mask


class ActorCriticAgent(AgentWithTargets):
    """Actor and critic ensemble on a shared sequence model, trained for several discounts at once.

    A subclass sets what critics output (`values_type`), how discrete actions reach them (`exact_expectation`), and the
    defaults of the options.

    Args:
        obs_space, rl2_space, action_space, max_seq_len, tstep_encoder_type, traj_encoder_type: see `BaseAgent`.
        options: everything else.

    Attributes:
        options: as given.
        gammas: (G,) discounts, the main one last.
        actor, critics, target_actor, target_critics: instances of the chosen `amago.nets.actor_critic.BaseActorHead` and
            `amago.nets.actor_critic.BaseCriticHead`, and their slow copies.
        maximized_critics: the critics, with their parameters held out of the graph.
        popart: running statistics of the targets.

    Raises:
        ValueError: an option does not fit the spaces, or a policy gradient is asked of a distribution that has none.
    """

    values_type: ClassVar[type[ValueRepresentation]]
    """How the outputs of critics represent returns."""
    exact_expectation: ClassVar[bool]
    """Discrete actions: critics give the value of each, weighted by the policy's probabilities; else they evaluate samples."""
    filters_last_observation: ClassVar[bool] = False
    """The filter is called with (B, L + 1, G, 1) advantages. The last row repeats the one before it: no action was taken there."""

    gammas: Tensor
    popart: Any

    @abstractmethod
    def __init__(
        self,
        obs_space: gym.spaces.Dict,
        rl2_space: gym.spaces.Box,
        action_space: gym.Space[Any],
        max_seq_len: int,
        tstep_encoder_type: type[TstepEncoder],
        traj_encoder_type: type[TrajEncoder],
        options: ActorCriticOptions,
    ):
        self.options = options  # first: the constructor of the base class builds everything
        super().__init__(obs_space, rl2_space, action_space, max_seq_len, tstep_encoder_type, traj_encoder_type)
        self.values = self.values_type(self.critics, self.popart)
        self._check_heads()

    def init_options(self) -> None:
        """Set an attribute for each option, and the discounts."""
        options, spec = self.options, self.action_spec
        keys = options.pass_obs_keys_to_actor or ()
        missing = [k for k in keys if k not in self.obs_space.spaces]
        if missing:
            raise ValueError(f"pass_obs_keys_to_actor names {missing}; the observations are {sorted(self.obs_space.spaces)}")
        self.pass_obs_keys_to_actor = list(dict.fromkeys(keys))
        gammas = gammas_for(spec.kind, options.gamma, options.use_multigamma)
        check_gamma_idx("rollout_gamma_idx", options.rollout_gamma_idx, gammas)
        self.rollout_gamma_idx = options.rollout_gamma_idx
        self.num_critics, self.num_critics_td = options.num_critics, options.num_critics_td
        self.online_coeff, self.offline_coeff = options.online_coeff, options.offline_coeff
        self.critic_loss_weight = options.critic_loss_weight
        self.reward_multiplier, self.tau, self.n_step = options.reward_multiplier, options.tau, options.n_step
        self.targets, self.trace_lambda = options.targets, options.trace_lambda
        check_targets(options.targets, spec)
        self.required_extras = (BEHAVIOUR_LOG_PROB,) if options.targets == "retrace" else ()
        self.burn_in = options.burn_in
        if self.burn_in >= self.max_seq_len:
            raise ValueError(
                f"burn_in={self.burn_in} must be less than max_seq_len={self.max_seq_len}: nothing would be trained on"
            )
        self.use_target_actor = options.use_target_actor
        self.fake_filter, self.fbc_filter_func = options.fake_filter, options.fbc_filter_func
        self.num_actions_for_value_in_critic_loss = options.num_actions_for_value_in_critic_loss
        self.num_actions_for_value_in_actor_loss = options.num_actions_for_value_in_actor_loss
        self.use_multigamma = options.use_multigamma
        self.exact = self.discrete and self.exact_expectation
        self.register_buffer("gammas", gammas, persistent=False)

    def init_actor_critic(self) -> None:
        """Build ``popart``, ``critics`` and ``actor``, their targets, and ``maximized_critics``."""
        options = self.options
        heads = {"state_dim": self.state_dim, "action_dim": self.action_dim, "discrete": self.discrete, "gammas": self.gammas}
        self.popart = PopArtLayer(gammas=len(self.gammas), enabled=options.popart)
        self.critics = options.critic_type(**heads, num_critics=options.num_critics)
        if options.rescale_critics:
            self._start_scaling()
        self.target_critics = copy.deepcopy(self.critics).requires_grad_(False)
        self.maximized_critics = DetachedCritics(self.critics)
        self.actor = options.actor_type(**heads, **self._kind_of_actions(options.actor_type))
        self.target_actor = copy.deepcopy(self.actor).requires_grad_(False)

    def _start_scaling(self) -> None:
        if not isinstance(self.critics, EnsembleCritics) or hasattr(self.critics, "bins"):
            raise ValueError(
                f"rescale_critics=True needs scalar critics whose networks are an EnsembleMLP, such as NCritics; critic_type="
                f"{type(self.critics).__name__} are not"
            )
        self.critics.start_scaling()

    def _grow_scale(self, batch: Batch, rews: Tensor) -> None:
        """Let the scale of the critics' outputs follow the returns.

        The first batch sets the scale of the random networks: the size of returns if each reward were the mean one.
        """
        first, real = self.popart.updates == 1, batch.transition_mask
        steps = ranks.masked_max(batch.time_idxs[:, 1:].to(rews.dtype), real).clamp(min=1.0)
        reward = torch.where(first, ranks.masked_mean(rews, real), 0.0)
        expected = reward.abs() * torch.minimum(1.0 / (1.0 - self.gammas.amax()), steps)
        factor = self.values.growth(self.critics.output_scale, expected)
        for critics in (self.critics, self.target_critics):
            critics.grow_scale(factor, keep_values=~first)

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

    # ---- acting -------------------------------------------------------------------------------------------------------

    policy_extras = ("log_prob", BEHAVIOUR_LOG_PROB)

    def act(self, state: Tensor, obs: dict[str, Tensor], sample: bool, gamma_idx: int | None = None) -> Tensor:
        return self.act_with_extras(state, obs, sample, (), gamma_idx)[0]

    def act_with_extras(
        self, state: Tensor, obs: dict[str, Tensor], sample: bool, names: Sequence[str], gamma_idx: int | None = None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        g = self.rollout_gamma_idx if gamma_idx is None else gamma_idx
        check_gamma_idx("gamma_idx", g, self.gammas)
        straight = {k: obs[k].unsqueeze(1) for k in self.pass_obs_keys_to_actor}
        pi = self._policy(self.actor, state.unsqueeze(1), straight)
        actions = pi.sample_action(sample)
        extras = {"log_prob": log_prob_of_stored(pi, actions)[:, 0, g]} if "log_prob" in names else {}
        if BEHAVIOUR_LOG_PROB in names:
            extras[BEHAVIOUR_LOG_PROB] = behaviour_of(pi, actions, sample)[:, 0, g]
        return actions[:, 0, g], extras

    @staticmethod
    def _policy(actor: Any, state: Tensor, straight: dict[str, Tensor], **options: Any) -> ActionDistribution:
        """The policy of an actor for states (B, L, E)."""
        return action_distribution(actor(state, straight_from_obs=straight, **options), actor.policy_dist)

    # ---- learning -----------------------------------------------------------------------------------------------------

    def losses(self, batch: Batch, log_step: bool = False) -> AgentLoss:
        metrics: dict[str, float | Tensor] = {}
        log = metrics if log_step else None
        real = batch.transition_mask  # (B, L, 1)
        rews = batch.rews.float() * self.reward_multiplier
        action = self._action_vectors(batch.actions)  # (B, L, A)

        counted = {"mask": real} if log_step and has_argument(self.actor.forward, "mask") else {}
        states = self.encode(batch, log)
        state, next_state = states[:, :-1], states[:, 1:].detach()
        pi = self._policy(self.actor, state, self._straight(batch, slice(None, -1)), log_dict=log, **counted)
        actor_loss = states.new_zeros((*rews.shape[:2], len(self.gammas), 1), dtype=torch.float32)
        critic_loss, advantage = None, None

        if self.online_coeff > 0 or not self.fake_filter:
            chosen = self._policy_actions(
                pi, self.num_actions_for_value_in_actor_loss, grad=self.online_coeff > 0
            )  # (K, B, L, G, A)
            with torch.no_grad():
                taken = taken_next(self.targets, batch, action)
                target = self._td_target(next_state, rews, batch.dones, real, self._straight(batch, slice(1, None)), taken, log)
                if self.training:
                    self.values.observe(target, self.loss_mask(batch)[:, :, None, :, None].expand_as(target))
                    if self.options.rescale_critics:
                        self._grow_scale(batch, rews)
            stored = self._like_policy(pi, action)
            out_data, q_pi = self._evaluate(state, stored, chosen)  # (B, L, C, G, O), (B, L, C, G, 1)
            critic_loss = self.values.loss(out_data, target)
            if batch.sources is not None:
                self.td_errors = self.values.td_error(out_data, target)
            if self.online_coeff > 0:
                actor_loss = actor_loss - self.online_coeff * self.values.objective(q_pi).amin(dim=2)
            if self.offline_coeff > 0 or log_step:
                q_data = self.values.value(out_data.detach())
                advantage = self._advantage(q_data, q_pi.detach())
            if log_step:
                metrics |= diagnostics.critic_metrics(self.values.returns(q_data), target, self.gammas, real)
                metrics |= self.values.metrics(target, real)

        if self.offline_coeff > 0:
            log_prob = pi.log_prob_of_vector(action[:, :, None]).float()  # (B, L, G, 1)
            weight = self._filter_weight(log_prob, advantage)
            actor_loss = actor_loss - self.offline_coeff * weight * log_prob
            if log_step and advantage is not None:
                metrics |= diagnostics.advantage_metrics(advantage, weight, real)
        if log_step:
            metrics |= diagnostics.batch_metrics(batch.rews, batch.dones, real)
        return AgentLoss(actor_loss, critic_loss, metrics)

    @torch.no_grad()
    def get_values(self, batch: Batch) -> AgentValues:
        """Values and filter weights of the actions of a batch, computed as `losses` does in evaluation mode. The agent's mode
        and running statistics are left as they are."""
        was_training = self.training
        self.eval()
        try:
            state = self.encode(batch)[:, :-1]
            pi = self._policy(self.actor, state, self._straight(batch, slice(None, -1)))
            chosen = self._policy_actions(pi, self.num_actions_for_value_in_actor_loss)
            stored = self._like_policy(pi, self._action_vectors(batch.actions))
            out_data, q_pi = self._evaluate(state, stored, chosen)
        finally:
            self.train(was_training)
        q_data = self.values.value(out_data)
        advantage = self._advantage(q_data, q_pi)
        q, v = (self.values.returns(x) / self.reward_multiplier for x in (q_data, q_pi))
        weights, (q_std, v_std) = self._filter_weight(advantage, advantage), (x.std(dim=2, correction=0) for x in (q, v))
        return AgentValues(
            q_sa=q.mean(dim=2), v_s=v.mean(dim=2), advantage=advantage, filter_weights=weights, q_sa_std=q_std, v_s_std=v_std,
            state_mask=batch.transition_mask,
        )  # fmt: skip

    @staticmethod
    def _advantage(q_data: Tensor, q_pi: Tensor) -> Tensor:
        """(B, L, C, G, 1) each -> (B, L, G, 1)."""
        return (q_data - q_pi).mean(dim=2)

    def _filter_weight(self, like: Tensor, advantage: Tensor | None) -> Tensor:
        """The weights of behaviour cloning (B, L, G, 1); ones where there is no filter."""
        if self.fake_filter or advantage is None:
            return torch.ones_like(like)
        if not self.filters_last_observation:
            return self.fbc_filter_func(advantage)
        return self.fbc_filter_func(torch.cat((advantage, advantage[:, -1:]), dim=1))[:, :-1]

    def _td_target(
        self,
        next_state: Tensor,
        rews: Tensor,
        dones: Tensor,
        real: Tensor,
        straight: dict[str, Tensor],
        taken: Taken | None = None,
        log: dict[str, Any] | None = None,
    ) -> Tensor:
        """Targets (B, L, 1, G, 1), bootstrapped with random target critics at actions a' of the target policy.

        Args:
            next_state, straight: of the states after each transition.
            taken: what the data did there (`taken_next`).
            log: takes a metric, if given.
        """
        pi = self._policy(self.target_actor if self.use_target_actor else self.actor, next_state, straight)
        actions = self._policy_actions(pi, self.num_actions_for_value_in_critic_loss)
        drawn = torch.randint(self.target_critics.num_critics, (self.num_critics_td,), device=next_state.device)
        if taken is not None:  # one more sample
            stored = self._like_policy(pi, taken.action).expand(actions.shape[1:])
            actions = torch.cat((actions, stored[None].to(actions.dtype)))
        out = self.values.value(self.target_critics.evaluate_subset(next_state, actions, drawn))  # (K, B, L, drawn, G, 1)
        step = rews[:, :, None, None], dones[:, :, None, None]
        gammas, counts = self.gammas[:, None], real[:, :, None, None]
        q = self.values.returns((out if taken is None else out[:-1]).mean(dim=0))
        if self.targets == "n_step":
            return ops.n_step_return(*step, self._reduce(q), gammas, counts, n=self.n_step)
        if taken is None:
            value = of_taken = self._reduce(q)
            traces = torch.full_like(value, self.trace_lambda)
        else:
            value, of_taken = self._reduce_both(q, self.values.returns(out[-1]))
            traces = trace_coefficients(pi, taken, self.trace_lambda)[:, :, None]
        if log is not None:
            log["Trace Coefficient (main gamma)"] = ops.masked_mean(traces[:, :-1, :, -1], counts[:, 1:, :, 0])
        return ops.trace_return(*step, value, of_taken, traces, gammas, counts)

    def _like_policy(self, pi: ActionDistribution, action: Tensor) -> Tensor:
        """Stored actions (B, L, A) clipped as those of the policy are: (B, L, 1, A). With a mask (B, L, G, A), with 0 at
        illegal choices."""
        if self.mask_key is not None:
            return pi.clip_like_policy(action[:, :, None])
        return self.actor.policy_dist.action_from_buffer(action)[:, :, None]  # type: ignore[no-any-return]

    def _evaluate(self, state: Tensor, stored: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor]:
        """Evaluate the actions of the data and those of the policy.

        Args:
            state: (B, L, D).
            stored: (B, L, 1 or G, A), actions of the data.
            chosen: (K, B, L, G, A), actions of the policy.

        Returns:
            the critics' outputs (B, L, C, G, O) for ``stored``, with gradients to critics and state; the values
            (B, L, C, G, 1) of ``chosen``, mean over K, with gradients to ``chosen`` alone.
        """
        if self.exact:  # one pass gives the values of all actions
            q = self.critics.all_values(state)  # (B, L, C, G, A)
            out = (q * stored[:, :, None]).sum(-1, keepdim=True)
            return out, self.values.value((q.detach() * chosen.unsqueeze(3)).sum(-1, keepdim=True)).mean(dim=0)
        out, values = self.critics.evaluate(state, stored, chosen, self.values.value)
        return out, values.mean(dim=0)

    def _policy_actions(self, pi: Any, num: int, grad: bool = False) -> Tensor:
        """Vectors (K, B, L, G, A) that represent the policy: its probabilities (K = 1) where expectations are exact, else
        ``num`` samples."""
        if self.exact:
            return (pi.probs if grad else pi.probs.detach())[None]
        return torch.stack([pi.sample_vector(grad) for _ in range(num)])

    def _sample_k_actions(self, dist: Distribution, k: int) -> Tensor:
        """``k`` actions of a policy (B, L, G) as vectors (K, B, L, G, A), with gradient where samples can carry one."""
        policy_dist = self.actor.policy_dist
        grad = torch.is_grad_enabled() and policy_dist.actions_differentiable
        return torch.stack([action_distribution(dist, policy_dist).sample_vector(grad) for _ in range(k)])

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

    def _straight(self, batch: Batch, steps: slice) -> dict[str, Tensor]:
        return {k: batch.obs[k][:, steps] for k in self.pass_obs_keys_to_actor}

    @property
    def trainable_params(self) -> list[nn.Parameter]:
        parts = (self.tstep_encoder, self.traj_encoder, self.critics, self.actor)
        return [p for part in parts for p in part.parameters() if p.requires_grad]
