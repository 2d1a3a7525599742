"""Actors, critics and policies of a client's own; filters with a state (M)."""

import gin
import torch
from small import SIZES, experiment, run
from torch import nn

import amago
from amago.cli_utils import use_config
from amago.nets.actor_critic import BaseActorHead, BaseCriticHead, gammas_as_input_seq, symlog
from amago.nets.ff import MLP
from amago.nets.policy_dists import DiscreteLikeContinuous, PolicyOutput, _Categorical, tanh_bounded_positive


@gin.configurable
class Sharpened(PolicyOutput):
    def __init__(self, d_action, clip_prob_low=0.01):
        super().__init__(d_action)
        self.clip_prob_low, self.temperature = clip_prob_low, 1.0

    @property
    def is_discrete(self):
        return True

    @property
    def actions_differentiable(self):
        return False

    @property
    def input_dimension(self):
        return self.d_action

    def forward(self, vec, log_dict=None):
        probs = torch.softmax(vec / self.temperature, -1).clamp(self.clip_prob_low, 0.99)
        dist = _Categorical(probs=probs / probs.sum(-1, keepdim=True))
        assert dist.sample().shape == (*vec.shape[:-1], 1)
        return dist


@gin.configurable
class DeepActor(BaseActorHead):
    def __init__(self, state_dim, action_dim, discrete, gammas, continuous_dist_type=None, discrete_dist_type=Sharpened):
        super().__init__(
            state_dim=state_dim, action_dim=action_dim, discrete=discrete, gammas=gammas, continuous_dist_type=continuous_dist_type,
            discrete_dist_type=discrete_dist_type,
        )  # fmt: skip
        self.net = MLP(d_inp=state_dim, d_hidden=16, n_layers=2, d_output=self.num_gammas * self.policy_dist.input_dimension)

    def actor_network_forward(self, state, log_dict=None, straight_from_obs=None):
        B, L, _ = state.shape
        assert straight_from_obs is None or set(straight_from_obs) == {"turn"}
        return self.net(state).reshape(B, L, self.num_gammas, self.policy_dist.input_dimension)


@gin.configurable
class PlainCritics(BaseCriticHead):
    def __init__(self, state_dim, action_dim, discrete, gammas, num_critics, d_hidden=16):
        super().__init__(state_dim=state_dim, action_dim=action_dim, discrete=discrete, gammas=gammas, num_critics=num_critics)
        self.nets = nn.ModuleList(MLP(state_dim + 1 + action_dim, d_hidden, 1, 1) for _ in range(num_critics))

    def critic_network_forward(self, state, action, log_dict=None):
        if isinstance(action, torch.distributions.Distribution):
            action = action.probs.unsqueeze(0)
        K, B, L, G, _ = action.shape
        gammas = gammas_as_input_seq(self.gammas, B, L).reshape(G, B, L, 1).permute(1, 2, 0, 3)
        inp = torch.cat((state[:, :, None].expand(B, L, G, -1), symlog(gammas)), -1)
        inp = torch.cat((inp.expand(K, B, L, G, -1), action), -1)
        return torch.stack([net(inp) for net in self.nets], 3)


@gin.configurable
class CountingFilter:
    def __init__(self, threshold=0.0):
        self.threshold, self.calls = threshold, 0

    def __call__(self, adv):
        assert adv.ndim == 4 and adv.shape[-1] == 1
        self.calls += 1
        return adv > self.threshold


if __name__ == "__main__":
    use_config(
        SIZES
        | {"Agent.actor_type": DeepActor, "Agent.critic_type": PlainCritics, "Agent.popart": True}
        | {"Agent.pass_obs_keys_to_actor": ["turn"], "Agent.num_actions_for_value_in_critic_loss": 1, "Agent.online_coeff": 0.0}
    )
    gin.parse_config("Agent.fbc_filter_func = @CountingFilter()")
    exp = run(experiment(agent_type=amago.Agent))
    assert exp.policy.fbc_filter_func.calls > 0
    assert len(exp.policy.critics) == exp.policy.num_critics == 4
    exp.policy.actor.policy_dist.temperature = torch.full((2, 1, 1, 1), 0.5)
    exp.evaluate_val()
    assert float(tanh_bounded_positive(torch.zeros(1), low=0.1, high=1.0)) > 0.1
    both = DiscreteLikeContinuous(_Categorical(probs=torch.full((2, 3), 1 / 3)))
    assert both.rsample().shape == (2, 3)
