"""The learning update: an off-policy actor-critic over sequences (Grigsby et al. 2023, arXiv 2310.09971, appendix A).

Shapes: B sequences of L transitions, G discounts, C critics, K actions of the policy, A action width, D state width.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import gymnasium as gym
import torch
from torch import Tensor, nn
from torch.distributions import Distribution

from amago import ops
from amago.agent.base import BaseAgent, action_vectors, evaluating
from amago.agent.methods import (
    exact_entropy,
    log_prob_of,
    sample_with_entropy,
    temperature_for,
)
from amago.agent.options import ActorCriticOptions, binary_filter, check_gamma_idx, exp_filter, gammas_for
from amago.agent.values import AgentValues, PopArtValues, choose_scale, grow_scale, update_metrics
from amago.compat.training import LossStatistics
from amago.config import bound
from amago.data.batch import Batch
from amago.nets import ranks
from amago.nets.actor_critic import LEAST_SIGMA, Actor, PopArtLayer, ResidualActor
from amago.nets.heads import BaseActorHead, DetachedCritics, EnsembleCritics
from amago.nets.policy_dists import ActionDistribution, Multibinary, action_distribution
from amago.nets.traj_encoders import TrajEncoder
from amago.nets.tstep_encoders import TstepEncoder
from amago.nets.utils import Log, has_argument
from amago.spaces import ActionSpec, check_mask


class ActorCriticAgent(LossStatistics, BaseAgent):
    """Actor and critic ensemble on a shared sequence model, trained for several discounts at once.

    A subclass sets the class attributes below, and is decorated with `amago.agent.agent.with_options`.

    Args:
        obs_space, rl2_space, action_space, max_seq_len, tstep_encoder_type, traj_encoder_type: see `BaseAgent`.
        options: fields of ``options_type``; each is an attribute of the agent.

    Attributes:
        gammas: (G,) discounts, the main one last.
        actor, critics, target_actor, target_critics: instances of the chosen `amago.nets.actor_critic.BaseActorHead` and
            `amago.nets.actor_critic.BaseCriticHead`, and their slow copies.
        maximized_critics: the critics, with their parameters held out of the graph.
        popart: running statistics of the targets.
        temperature: weights of the entropy; None: it has none.

    Raises:
        TypeError: an unknown option.
        ValueError: an option does not fit the spaces, or the distribution does not support a policy gradient.
    """

    options_type: ClassVar[type[ActorCriticOptions]] = ActorCriticOptions
    values_type: ClassVar[type[PopArtValues]] = PopArtValues
    """The meaning of critics' outputs: scalars or distributions."""
    exact_expectation: ClassVar[bool]
    """Discrete actions: critics give the value of each, weighted by the policy's probabilities; else they evaluate samples."""
    filters_last_observation: ClassVar[bool] = False
    """The filter is called with (B, L + 1, G, 1) advantages. The last row repeats the one before it: no action was taken
    there."""
    policy_extras = ("log_prob",)

    gammas: Tensor
    fbc_filter_func: Callable[[Tensor], Tensor]
    popart: PopArtLayer
    maximized_critics: nn.Module
    pass_obs_keys_to_actor: list[str]
    if TYPE_CHECKING:  # options are declared in `ActorCriticOptions`; users choose the classes of actor and critics

        def __getattr__(self, name: str) -> Any: ...

    def __init__(
        self,
        obs_space: gym.spaces.Dict,
        rl2_space: gym.spaces.Box,
        action_space: gym.Space[Any],
        max_seq_len: int,
        tstep_encoder_type: type[TstepEncoder],
        traj_encoder_type: type[TrajEncoder],
        **options: Any,
    ):
        self._filter_given = "fbc_filter_func" in options
        vars(self).update(vars(self.options_type(**options)))  # first: the constructor of the base class builds everything
        super().__init__(obs_space, rl2_space, action_space, max_seq_len, tstep_encoder_type, traj_encoder_type)
        self.values = self.values_type(self.critics, self.popart)
        self._filter = self.fbc_filter_func, bound(self.fbc_filter_func)  # without gin's lock, at which a compiler stops
        self._check_heads()

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_filter": (self.fbc_filter_func, self.fbc_filter_func)}

    # ---- construction -------------------------------------------------------------------------------------------------

    def init_options(self) -> None:
        """Check the options against the spaces; make the discounts, and the modules that have no networks."""
        self.pass_obs_keys_to_actor = list(dict.fromkeys(self.pass_obs_keys_to_actor or ()))
        if missing := [k for k in self.pass_obs_keys_to_actor if k not in self.obs_space.spaces]:
            raise ValueError(f"pass_obs_keys_to_actor names {missing}; the observations are {sorted(self.obs_space.spaces)}")
        gammas = gammas_for(self.action_spec.kind, self.gamma, self.use_multigamma)
        check_gamma_idx("rollout_gamma_idx", self.rollout_gamma_idx, gammas)
        if self.targets == "tree_backup" and any(part.kind == "continuous" for part in self.action_spec.parts):
            raise ValueError(
                f"targets='tree_backup' needs actions with probabilities, but those of {self.action_spec.space} have densities: use "
                "targets='n_step'"
            )
        longest = self.max_seq_len
        for name, steps, most in (
            ("burn_in", self.burn_in, longest - 1),
            ("bootstrap_context", self.bootstrap_context or 0, longest),
        ):
            if steps > most:
                raise ValueError(f"{name}={steps} must be at most {most} with max_seq_len={longest}")
        self.temperature = temperature_for(
            self.action_spec, len(gammas), self.entropy_target, self.entropy_coeff, self.entropy_lr
        )
        self.exact = self.discrete and self.exact_expectation
        self.register_buffer("gammas", gammas, persistent=False)
        self.popart = PopArtLayer(gammas=len(gammas), enabled=bool(self.popart))  # until here the option of this name

    def init_actor_critic(self) -> None:
        """Build ``critics`` and ``actor``, their targets, and ``maximized_critics``."""
        heads = {"state_dim": self.state_dim, "action_dim": self.action_dim, "discrete": self.discrete, "gammas": self.gammas}
        self.critics = self.critic_type(**heads, num_critics=self.num_critics)
        if self.rescale_critics:
            if not isinstance(self.critics, EnsembleCritics) or not self.values_type.scalar:
                raise ValueError(
                    f"rescale_critics=True needs scalar critics whose networks are an EnsembleMLP, such as NCritics; critic_type="
                    f"{type(self.critics).__name__} are not"
                )
            self.critics.start_scaling()
            self.popart.start_scaling()
            self.register_buffer("scale_growth", torch.ones((), device=self.gammas.device), persistent=False)
        self.target_critics = copy.deepcopy(self.critics).requires_grad_(False)
        self.maximized_critics = DetachedCritics(self.critics)
        self.actor = self.actor_type(**heads, **_kind_of_actions(self.action_spec, self.actor_type))
        self.target_actor = copy.deepcopy(self.actor).requires_grad_(False)

    def _check_heads(self) -> None:
        """Add the key of a mask of actions to the actor's keys; refuse heads that do not fit the options."""
        plain = (Actor.actor_network_forward, ResidualActor.actor_network_forward)
        if self.pass_obs_keys_to_actor and type(self.actor).actor_network_forward in plain:
            warnings.warn(
                f"pass_obs_keys_to_actor={self.pass_obs_keys_to_actor}, but {type(self.actor).__name__} ignores observations: "
                "override actor_network_forward in a subclass",
                stacklevel=3,
            )
        if self.online_coeff > 0 and not self.actor.policy_dist.actions_differentiable:
            raise ValueError(
                f"online_coeff={self.online_coeff} asks for a policy gradient, but samples of "
                f"{type(self.actor.policy_dist).__name__} carry none (they are not reparametrised): set {type(self).__name__}."
                "online_coeff = 0 to train by filtered behaviour cloning alone, or choose another distribution"
            )
        self._actor_counts = has_argument(self.actor.forward, "mask")
        self._actor_narrows = has_argument(self.actor.forward, "gamma_idx")
        self.mask_key: str | None = self.actor.mask_key
        if self.mask_key is not None:
            check_mask(self.mask_key, self.obs_space, self.action_spec)
            if self.mask_key not in self.pass_obs_keys_to_actor:
                self.pass_obs_keys_to_actor.append(self.mask_key)

    @property
    def trainable_params(self) -> list[nn.Parameter]:
        parts = (self.tstep_encoder, self.traj_encoder, self.critics, self.actor)
        return [p for part in parts for p in part.parameters() if p.requires_grad]

    def divided_parameters(self) -> list[nn.Parameter]:
        return [] if self.scale_growth is None else list(self.critics.net.output_layer.parameters())

    def complete_weights(self, weights: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """The weights of a whole agent; weights saved without ``rescale_critics`` have a scale of 1."""
        without_iql = {k: v for k, v in weights.items() if not k.startswith("state_values.")}  # of earlier versions
        weights = super().complete_weights(without_iql)
        if self.scale_growth is None:
            return weights
        unit, names = torch.ones_like(self.scale_growth), ("critics", "target_critics", "maximized_critics")
        start = {f"{name}.output_scale": unit for name in names} | {"popart.least_sigma": unit * LEAST_SIGMA}
        return weights if any(name in weights for name in start) else {**weights, **start}

    # ---- acting -------------------------------------------------------------------------------------------------------

    def act(self, state: Tensor, obs: dict[str, Tensor], sample: bool, gamma_idx: int | None = None) -> Tensor:
        return self.act_with_extras(state, obs, sample, (), gamma_idx)[0]

    def act_with_extras(
        self, state: Tensor, obs: dict[str, Tensor], sample: bool, names: Sequence[str], gamma_idx: int | None = None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        g = self.rollout_gamma_idx if gamma_idx is None else gamma_idx
        if gamma_idx is not None:
            check_gamma_idx("gamma_idx", gamma_idx, self.gammas)
        straight = {k: obs[k].unsqueeze(1) for k in self.pass_obs_keys_to_actor}
        only = {"gamma_idx": g} if self._actor_narrows else {}  # other discounts' policies do not act
        pi = action_distribution(self.actor(state.unsqueeze(1), straight_from_obs=straight, **only), self.actor.policy_dist)
        actions, g = pi.sample_action(sample), 0 if only else g
        extras = {}
        if "log_prob" in names:
            extras["log_prob"] = log_prob_of(pi, action_vectors(self.action_spec, actions))[:, 0, g, 0]
        return actions[:, 0, g], extras

    def learn_from_records(self) -> str:
        if self._filter_given or self.fbc_filter_func is not binary_filter or not self.offline_coeff:
            return ""
        self.fbc_filter_func = exp_filter
        self._filter = exp_filter, bound(exp_filter)
        return "nothing was collected for this run, which learns from records: fbc_filter_func is exp_filter, unless you set it"

    # ---- learning -----------------------------------------------------------------------------------------------------

    def losses(self, batch: Batch, log_step: bool = False) -> dict[str, Tensor]:
        log = self.update_info if log_step else None
        states = self.encode(batch, log)  # s_0 .. s_L, (B, L + 1, D)
        pi = self._policy(self.actor, states[:, :-1], batch, slice(None, -1), log)
        action = action_vectors(self.action_spec, batch.actions)  # (B, L, A)
        losses = {"actor": states.new_zeros((*action.shape[:2], len(self.gammas), 1), dtype=torch.float32)}
        out = target = advantage = weight = None

        if self.online_coeff > 0 or not self.fake_filter:  # critics are needed
            chosen, entropy = self._policy_actions(pi, self.num_actions_for_value_in_actor_loss, self.online_coeff > 0)
            target = self._observed_target(batch, states.detach(), action, log)
            out, q_data, q_pi = self._evaluate(states[:, :-1], self._like_policy(pi, action), chosen)
            losses["critic"] = self.values.loss(out, target)
            if batch.sources is not None:
                self.td_errors = self.values.td_error(out, target)
            if self.online_coeff > 0:  # policy gradient: ascend the least value of the policy's actions, and its entropy
                objective = self.values.objective(q_pi).amin(dim=2)
                if entropy is not None and self.temperature is not None:
                    objective = objective + self.temperature.value / self.popart.sigma * entropy
                    self.temperature.observe(pi, entropy, self.loss_mask(batch))
                    if log is not None:
                        log |= self.temperature.metrics(entropy, batch.transition_mask)
                losses["actor"] = losses["actor"] - self.online_coeff * objective
            advantage = (q_data - q_pi.detach()).mean(dim=2)  # (B, L, G, 1)

        if self.offline_coeff > 0:  # filtered behaviour cloning
            log_prob = pi.log_prob_of_vector(action[:, :, None]).float()  # (B, L, G, 1)
            weight = self._filter_weight(log_prob, advantage)
            losses["actor"] = losses["actor"] - self.offline_coeff * weight * log_prob
        if log is not None:
            log |= update_metrics(batch, self.gammas, self.values, out, target, advantage, weight)
        return losses

    @torch.no_grad()
    def _observed_target(self, batch: Batch, states: Tensor, action: Tensor, log: Log) -> Tensor:
        """`_td_target`; in training mode, also update the statistics and the scale of the critics."""
        rews = batch.rews.float() * self.reward_multiplier
        scaled, growth = (self.critics, self.target_critics), self.scale_growth if self.training else None
        if growth is not None:
            choose_scale(self.popart, scaled, self.gammas.amax(), batch, rews)
        target = self._td_target(batch, states, rews, action, log)
        if self.training:
            self.popart.update_stats(target, self.loss_mask(batch)[:, :, None, :, None].expand_as(target))
        if growth is not None:
            growth.mul_(grow_scale(self.popart, scaled))
        return target

    def _td_target(self, batch: Batch, states: Tensor, rews: Tensor, action: Tensor, log: Log) -> Tensor:
        """Targets (B, L, 1, G, 1), bootstrapped in the states after each transition with random target critics, at actions a' of
        the target policy."""
        next_state, real, gammas = states[:, 1:], batch.transition_mask[:, :, None, None], self.gammas[:, None]
        if self.bootstrap_context is not None and next_state.shape[1] == self.max_seq_len:
            next_state = torch.cat((next_state[:, :-1], self.encode_end(batch, self.bootstrap_context)), dim=1)
        rews, dones = rews[:, :, None, None], batch.dones[:, :, None, None]
        pi = self._policy(self.target_actor if self.use_target_actor else self.actor, next_state, batch, slice(1, None))
        actions, entropy = self._policy_actions(pi, self.num_actions_for_value_in_critic_loss)
        if entropy is not None and self.temperature is not None:
            # of the state after each transition: targets then hold the entropies of all states that they span, and values leave
            # out the entropy of their own state
            rews = rews + gammas * (1.0 - dones.to(rews.dtype)) * (self.temperature.value * entropy)[:, :, None]
        if self.targets == "n_step":
            q = self.values.returns(self._drawn_target_values(next_state, actions).mean(dim=0))
            return self._nstep_fn(rews, dones, self._reduce(q), gammas, real)
        taken = torch.cat((action[:, 1:], action[:, -1:]), dim=1)  # by the data, evaluated as one more sample
        stored = self._like_policy(pi, taken).expand(actions.shape[1:])
        q = self._drawn_target_values(next_state, torch.cat((actions, stored[None].to(actions.dtype))))
        q, of_taken = self.values.returns(q[:-1].mean(dim=0)), self.values.returns(q[-1])
        if self.online_coeff > 0:
            # the critic with the lowest value of the state gives both: a separate minimum for the action would be lower on average
            # over the policy's actions than the state's, and targets too high
            lowest = q.argmin(dim=-3, keepdim=True)
            q, of_taken = q.gather(-3, lowest), of_taken.gather(-3, lowest)
        else:
            q, of_taken = self._reduce(q), self._reduce(of_taken)
        traces = (self.trace_lambda * log_prob_of(pi, taken[:, :, None]).float().clamp(max=0.0).exp())[:, :, None]
        if log is not None:
            log["Trace Coefficient (main gamma)"] = ranks.masked_mean(traces[:, :-1, :, -1], real[:, 1:, :, 0])
        return ops.trace_return(rews, dones, q, of_taken, traces, gammas, real)

    def _nstep_fn(self, rews: Tensor, dones: Tensor, next_values: Tensor, gammas: Tensor, mask: Tensor) -> Tensor:
        """`amago.ops.n_step_return` with the agent's ``n_step``."""
        return ops.n_step_return(rews, dones, next_values, gammas, mask, n=self.n_step)

    @torch.no_grad()
    def get_values(self, batch: Batch) -> AgentValues:
        """Values and filter weights of the actions of a batch, computed as `losses` does in evaluation mode. The agent's mode
        and running statistics are left as they are."""
        with evaluating(self):
            state = self.encode(batch)[:, :-1]
            pi = self._policy(self.actor, state, batch, slice(None, -1))
            stored = self._like_policy(pi, action_vectors(self.action_spec, batch.actions))
            chosen, _ = self._policy_actions(pi, self.num_actions_for_value_in_actor_loss)
            out, q_data, q_pi = self._evaluate(state, stored, chosen)
        advantage = (q_data - q_pi).mean(dim=2)
        q, v = (self.values.returns(x) / self.reward_multiplier for x in (self.values.value(out), q_pi))
        return AgentValues(
            q_sa=q.mean(dim=2), v_s=v.mean(dim=2), advantage=advantage, filter_weights=self._filter_weight(advantage, advantage),
            q_sa_std=q.std(dim=2, correction=0), v_s_std=v.std(dim=2, correction=0), state_mask=batch.transition_mask,
        )  # fmt: skip

    def _filter_weight(self, like: Tensor, advantage: Tensor | None) -> Tensor:
        """The weights of behaviour cloning (B, L, G, 1); ones where there is no filter."""
        if self.fake_filter or advantage is None:
            return torch.ones_like(like)
        given, without_gin = self._filter
        weight = without_gin if given is self.fbc_filter_func else self.fbc_filter_func
        if not self.filters_last_observation:
            return weight(advantage)
        return weight(torch.cat((advantage, advantage[:, -1:]), dim=1))[:, :-1]

    # ---- policies and values of actions -------------------------------------------------------------------------------

    def _policy(self, actor: BaseActorHead, state: Tensor, batch: Batch, steps: slice, log: Log = None) -> ActionDistribution:
        """The policy (B, L, G) of an actor in the states (B, L, D) of these timesteps of a batch."""
        straight = {k: batch.obs[k][:, steps] for k in self.pass_obs_keys_to_actor}
        counted = {"mask": batch.transition_mask} if log is not None and self._actor_counts else {}
        return action_distribution(actor(state, log_dict=log, straight_from_obs=straight, **counted), actor.policy_dist)

    def _policy_actions(self, pi: Any, num: int, grad: bool = False) -> tuple[Tensor, Tensor | None]:
        """Vectors (K, B, L, G, A) that represent the policy: its probabilities (K = 1) where expectations are exact, else
        ``num`` samples; and its entropy (B, L, G, 1), exact or the mean over the same samples, None without temperature."""
        if self.exact:
            return (pi.probs if grad else pi.probs.detach())[None], None if self.temperature is None else exact_entropy(pi)
        if self.temperature is not None:
            actions, entropies = zip(*(sample_with_entropy(pi, grad) for _ in range(num)))
            return torch.stack(actions), torch.stack(entropies).mean(dim=0)
        return torch.stack([pi.sample_vector(grad) for _ in range(num)]), None

    def _sample_k_actions(self, dist: Distribution, k: int) -> Tensor:
        """``k`` actions of a policy (B, L, G) as vectors (K, B, L, G, A), with gradient where samples can carry one."""
        policy_dist = self.actor.policy_dist
        grad = torch.is_grad_enabled() and policy_dist.actions_differentiable
        return torch.stack([action_distribution(dist, policy_dist).sample_vector(grad) for _ in range(k)])

    def _like_policy(self, pi: ActionDistribution, action: Tensor) -> Tensor:
        """Stored actions (B, L, A) clipped as the policy's actions are: (B, L, 1, A). With a mask (B, L, G, A), with 0 at
        illegal choices."""
        if self.mask_key is not None:
            return pi.clip_like_policy(action[:, :, None])
        return self.actor.policy_dist.action_from_buffer(action)[:, :, None]  # type: ignore[no-any-return]

    def _evaluate(self, state: Tensor, stored: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Evaluate the actions of the data and the actions of the policy.

        Args:
            state: (B, L, D).
            stored: (B, L, 1 or G, A), actions of the data.
            chosen: (K, B, L, G, A), actions of the policy.

        Returns:
            the critics' outputs (B, L, C, G, O) for ``stored``, with gradients to critics and state; their values (B, L, C, G, 1)
            without; the values (B, L, C, G, 1) of ``chosen``, mean over K, with gradients to ``chosen`` alone.
        """
        if self.exact and self.critics.fused:  # one pass gives the values of all actions
            q = self.critics.all_values(state)  # (B, L, C, G, A)
            out = (q * stored[:, :, None]).sum(-1, keepdim=True)
            values = self.values.value((q.detach() * chosen.unsqueeze(3)).sum(-1, keepdim=True))
        else:
            out, values = self.critics.evaluate(state, stored, chosen, self.values.value)
        return out, self.values.value(out.detach()), values.mean(dim=0)

    def _drawn_target_values(self, state: Tensor, actions: Tensor) -> Tensor:
        """The values of actions (K, B, L, G, A) by ``num_critics_td`` random target critics, (K, B, L, drawn, G, 1)."""
        drawn = torch.randint(self.target_critics.num_critics, (self.num_critics_td,), device=state.device)
        return self.values.value(self.target_critics.evaluate_subset(state, actions, drawn))

    def _reduce_critic_ensemble(self, q: Tensor) -> Tensor:
        """Values (..., C, G, 1) of ``num_critics_td`` random critics: their minimum if there is a policy gradient, else their
        mean, (..., 1, G, 1)."""
        drawn = torch.randint(q.shape[-3], (self.num_critics_td,), device=q.device)
        return self._reduce(q[..., drawn, :, :])

    def _reduce(self, q: Tensor) -> Tensor:
        """(..., C, G, 1) -> (..., 1, G, 1)."""
        return q.amin(dim=-3, keepdim=True) if self.online_coeff > 0 else q.mean(dim=-3, keepdim=True)

    # ---- target networks ----------------------------------------------------------------------------------------------

    def hard_sync_targets(self) -> None:
        """Set the target networks, and the critics that a policy gradient passes through, to the trained ones. Networks that a
        subclass has not built are left out."""
        for target, online in (("target_actor", "actor"), ("target_critics", "critics"), ("maximized_critics", "critics")):
            if target in self._modules and online in self._modules:
                self._full_copy(self._modules[target], self._modules[online])  # type: ignore[arg-type]

    def soft_sync_targets(self) -> None:
        targets, online = (self.target_critics, self.target_actor), (self.critics, self.actor)
        self._ema_copy(nn.ModuleList(targets), nn.ModuleList(online))
        if not isinstance(self.maximized_critics, DetachedCritics):
            self._full_copy(self.maximized_critics, self.critics)

    @torch.no_grad()
    def _full_copy(self, target: nn.Module, online: nn.Module) -> None:
        """Copy one network's parameters and buffers to another."""
        if isinstance(target, DetachedCritics):
            target.follow(online)
            return
        for of in (nn.Module.parameters, nn.Module.buffers):
            for t, source in zip(of(target), of(online), strict=True):
                if t is not source:
                    t.copy_(source)

    def _ema_copy(self, target: nn.Module, online: nn.Module, tau: float | None = None) -> None:
        """Move one network towards another by the share ``tau``; None: the agent's."""
        share = self.tau if tau is None else tau
        ops.ema_update(target, online, share if self.moves is None else share * self.moves)


def _kind_of_actions(spec: ActionSpec, actor_type: type[nn.Module]) -> dict[str, Any]:
    """Arguments of an actor beside ``discrete``: none, if an action is one choice or a vector of numbers. Raise ValueError if
    the actor cannot have such actions."""
    if spec.kind in ("discrete", "continuous"):
        return {}
    if has_argument(actor_type, "action_kind"):
        return {"action_kind": spec.kind}
    if spec.kind == "multibinary" and has_argument(actor_type, "continuous_dist_type"):
        return {"continuous_dist_type": Multibinary}
    raise ValueError(
        f"actor_type={actor_type.__name__} cannot have actions of kind {spec.kind!r}: give its __init__ an argument action_kind, "
        "and hand it to super().__init__"
    )
