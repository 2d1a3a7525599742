"""The learning update: an off-policy actor-critic over sequences (Grigsby et al. 2023, arXiv 2310.09971, appendix A)."""

from __future__ import annotations

import copy
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
from amago.agent.entropy import Temperature, exact_entropy, sample_with_entropy, soft_rewards, temperature_for
from amago.agent.log_prob import behaviour_of, log_prob_of_stored
from amago.agent.options import ActorCriticOptions, check_gamma_idx, gammas_for
from amago.agent.state_values import AgentWithStateValues
from amago.agent.traces import Taken, check_targets, taken_next, trace_coefficients
from amago.agent.values import AgentValues, ValueRepresentation
from amago.data.batch import Batch
from amago.data.extras import BEHAVIOUR_LOG_PROB
from amago.nets.actor_critic import PopArtLayer, StateValues
from amago.nets.heads import DetachedCritics
from amago.nets.policy_dists import ActionDistribution
from amago.nets.torch_distributions import action_distribution
from amago.nets.traj_encoders import TrajEncoder
from amago.nets.tstep_encoders import TstepEncoder
from amago.nets.utils import has_argument


class ActorCriticAgent(AgentWithStateValues):
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
        temperature: weights of the entropy; None: it has none.
        state_values: values of states, learned with an ``expectile``; None: those of the policy's actions.

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
    temperature: Temperature | None

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
        self.critics_td_per_step = options.critics_td_per_step
        self.online_coeff, self.offline_coeff = options.online_coeff, options.offline_coeff
        self.critic_loss_weight = options.critic_loss_weight
        self.reward_multiplier, self.tau, self.n_step = options.reward_multiplier, options.tau, options.n_step
        self.targets, self.trace_lambda = options.targets, options.trace_lambda
        self.advantage_learning = options.advantage_learning
        check_targets(options.targets, spec)
        self.required_extras = (BEHAVIOUR_LOG_PROB,) if options.targets == "retrace" else ()
        self.temperature = temperature_for(spec, len(gammas), options.entropy_target, options.entropy_coeff, options.entropy_lr)
        self.expectile, self.state_values = options.expectile, None
        if self.expectile is not None and not self.values_type.scalar:
            raise ValueError(
                f"expectile={self.expectile} needs critics with scalar values, but those of {type(self).__name__} classify returns: "
                "use Agent"
            )
        self.burn_in = options.burn_in
        if self.burn_in >= self.max_seq_len:
            raise ValueError(
                f"burn_in={self.burn_in} must be less than max_seq_len={self.max_seq_len}: nothing would be trained on"
            )
        self.bootstrap_context = options.bootstrap_context
        if self.bootstrap_context is not None and self.bootstrap_context > self.max_seq_len:
            raise ValueError(
                f"bootstrap_context={self.bootstrap_context} must be at most max_seq_len={self.max_seq_len}: no trained state remembers more"
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
        if self.expectile is not None:
            self.state_values = StateValues(self.state_dim, self.gammas)
        self.actor = options.actor_type(**heads, **self._kind_of_actions(options.actor_type))
        self.target_actor = copy.deepcopy(self.actor).requires_grad_(False)

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
        state = states[:, :-1]
        pi = self._policy(self.actor, state, self._straight(batch, slice(None, -1)), log_dict=log, **counted)
        actor_loss = states.new_zeros((*rews.shape[:2], len(self.gammas), 1), dtype=torch.float32)
        critic_loss, advantage = None, None

        if self.online_coeff > 0 or not self.fake_filter:
            num, grad = self.num_actions_for_value_in_actor_loss, self.online_coeff > 0
            drawn = self._policy_actions_and_entropy(pi, num, grad) if self.state_values is None else None
            target = self._observed_target(batch, states.detach(), rews, action, log)
            stored = self._like_policy(pi, action)
            if drawn is not None:
                (chosen, entropy), q_taken = drawn, None  # (K, B, L, G, A), (B, L, G, 1)
                out_data, q_pi = self._evaluate(state, stored, chosen)  # (B, L, C, G, O), (B, L, C, G, 1)
                critic_loss = self.values.loss(out_data, target)
            else:
                out_data, q_pi, q_taken = self._evaluate_taken(state, stored)
                critic_loss = self.values.loss(out_data, target) + self._state_value_loss(q_pi, q_taken)
            if batch.sources is not None:
                self.td_errors = self.values.td_error(out_data, target)
            if self.online_coeff > 0:
                objective = self.values.objective(q_pi).amin(dim=2)
                if self.temperature is not None and entropy is not None:
                    objective = objective + self.temperature.value / self.popart.sigma * entropy
                    if self.training:
                        self.temperature.observe(pi, entropy, self.loss_mask(batch))
                actor_loss = actor_loss - self.online_coeff * objective
            if self.offline_coeff > 0 or log_step:
                q_data = self.values.value(out_data.detach())
                advantage = self._advantage(q_data if q_taken is None else q_taken, q_pi.detach())
            if log_step:
                metrics |= diagnostics.critic_metrics(self.values.returns(q_data), target, self.gammas, real)
                metrics |= self.values.metrics(target, real)
                if self.temperature is not None and entropy is not None:
                    metrics |= self.temperature.metrics(entropy, real)

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
    def _observed_target(
        self, batch: Batch, states: Tensor, rews: Tensor, action: Tensor, log: dict[str, float | Tensor] | None
    ) -> Tensor:
        """Targets (B, L, 1, G, 1) for states s_0..s_L, which in training move the statistics and the scale of the critics."""
        if self.training and self.options.rescale_critics:
            self._choose_scale(batch, rews)
        taken, straight = taken_next(self.targets, batch, action), self._straight(batch, slice(1, None))
        next_state = states[:, 1:]
        if self.bootstrap_context is not None and next_state.shape[1] == self.max_seq_len:
            next_state = torch.cat((next_state[:, :-1], self.encode_end(batch, self.bootstrap_context)), dim=1)
        target = self._td_target(next_state, rews, batch.dones, batch.transition_mask, straight, taken, log)
        if self.advantage_learning > 0.0:
            target = target + self.advantage_learning * self._target_advantage(batch, states[:, :-1], action)
        if self.training:
            self.values.observe(target, self.loss_mask(batch)[:, :, None, :, None].expand_as(target))
            if self.options.rescale_critics:
                self._grow_scale()
        return target

    @torch.no_grad()
    def get_values(self, batch: Batch) -> AgentValues:
        """Values and filter weights of the actions of a batch, computed as `losses` does in evaluation mode. The agent's mode
        and running statistics are left as they are."""
        was_training = self.training
        self.eval()
        try:
            state = self.encode(batch)[:, :-1]
            pi = self._policy(self.actor, state, self._straight(batch, slice(None, -1)))
            stored = self._like_policy(pi, self._action_vectors(batch.actions))
            if self.state_values is None:
                chosen, q_taken = self._policy_actions(pi, self.num_actions_for_value_in_actor_loss), None
                out_data, q_pi = self._evaluate(state, stored, chosen)
            else:
                out_data, q_pi, q_taken = self._evaluate_taken(state, stored)
        finally:
            self.train(was_training)
        q_data = self.values.value(out_data)
        advantage = self._advantage(q_data if q_taken is None else q_taken, q_pi)
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
        if self.state_values is not None:
            return self._n_step_target(next_state, rews, dones, real)
        pi = self._policy(self.target_actor if self.use_target_actor else self.actor, next_state, straight)
        actions, entropy = self._policy_actions_and_entropy(pi, self.num_actions_for_value_in_critic_loss)
        if taken is not None:  # one more sample
            stored = self._like_policy(pi, taken.action).expand(actions.shape[1:])
            actions = torch.cat((actions, stored[None].to(actions.dtype)))
        out = self._drawn_target_values(next_state, actions)  # (K, B, L, drawn, G, 1)
        gammas, counts = self.gammas[:, None], real[:, :, None, None]
        step = rews[:, :, None, None], dones[:, :, None, None]
        if self.temperature is not None and entropy is not None:
            step = soft_rewards(*step, gammas, (self.temperature.value * entropy)[:, :, None]), step[1]
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

    def _target_advantage(self, batch: Batch, state: Tensor, action: Tensor) -> Tensor:
        """Q - V (B, L, 1, G, 1) of the data's actions (B, L, A), by the same random target critics; V is the value of the target policy."""
        pi = self._policy(
            self.target_actor if self.use_target_actor else self.actor, state, self._straight(batch, slice(None, -1))
        )
        chosen = self._policy_actions(pi, self.num_actions_for_value_in_critic_loss)
        stored = self._like_policy(pi, action).expand(chosen.shape[1:])
        q = self.values.returns(self._drawn_target_values(state, torch.cat((chosen, stored[None].to(chosen.dtype)))))
        return (q[-1] - q[:-1].mean(dim=0)).mean(dim=2, keepdim=True)

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

    def _policy_actions_and_entropy(self, pi: Any, num: int, grad: bool = False) -> tuple[Tensor, Tensor | None]:
        """`_policy_actions`, and the policy's entropy (B, L, G, 1), exact or the mean over the same samples; None without temperature."""
        if self.temperature is None:
            return self._policy_actions(pi, num, grad), None
        if self.exact:
            return self._policy_actions(pi, num, grad), exact_entropy(pi)
        pairs = [sample_with_entropy(pi, grad) for _ in range(num)]
        return torch.stack([vector for vector, _ in pairs]), torch.stack([entropy for _, entropy in pairs]).mean(dim=0)

    def _sample_k_actions(self, dist: Distribution, k: int) -> Tensor:
        """``k`` actions of a policy (B, L, G) as vectors (K, B, L, G, A), with gradient where samples can carry one."""
        policy_dist = self.actor.policy_dist
        grad = torch.is_grad_enabled() and policy_dist.actions_differentiable
        return torch.stack([action_distribution(dist, policy_dist).sample_vector(grad) for _ in range(k)])

    def _straight(self, batch: Batch, steps: slice) -> dict[str, Tensor]:
        return {k: batch.obs[k][:, steps] for k in self.pass_obs_keys_to_actor}

    @property
    def trainable_params(self) -> list[nn.Parameter]:
        parts = [self.tstep_encoder, self.traj_encoder, self.critics, self.actor]
        parts += [] if self.state_values is None else [self.state_values]
        return [p for part in parts for p in part.parameters() if p.requires_grad]
