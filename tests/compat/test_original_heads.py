"""What code for the original system relies on in actors, critics and distributions, as such code uses it."""

import pytest
import torch
import torch.nn.functional as F
from test_original_agents import build, padded_batch
from torch import nn
from torch.distributions import Categorical, Independent, Normal, TransformedDistribution
from torch.distributions.transforms import TanhTransform

from amago import config
from amago.agent import Agent, MultiTaskAgent
from amago.nets.actor_critic import (
    BaseCriticHead,
    NCritics,
    NCriticsTwoHot,
)
from amago.nets.policy_dists import PolicyOutput

B, L, G, A, D, C = 2, 5, 3, 4, 8, 3


class Squashed(PolicyOutput):
    """A policy of a client's own, from distributions of PyTorch."""

    is_discrete, actions_differentiable = False, True

    @property
    def input_dimension(self):
        return 2 * self.d_action

    def action_from_buffer(self, action):
        return action.clamp(-0.99, 0.99)

    def forward(self, vec, log_dict=None):
        loc, width = vec.chunk(2, dim=-1)
        return TransformedDistribution(Normal(loc, F.softplus(width) + 0.1), [TanhTransform(cache_size=1)])


class Joint(Squashed):
    def forward(self, vec, log_dict=None):
        loc, width = vec.chunk(2, dim=-1)
        return Independent(Normal(loc, F.softplus(width) + 0.1), 1)


class PlainCategorical(PolicyOutput):
    is_discrete, actions_differentiable = True, True

    @property
    def input_dimension(self):
        return self.d_action

    def forward(self, vec, log_dict=None):
        return Categorical(logits=vec)


@pytest.mark.parametrize("agent_type", [Agent, MultiTaskAgent])
@pytest.mark.parametrize("dist_type", [Squashed, Joint, PlainCategorical])
def test_agents_train_and_act_with_any_distribution_of_torch(agent_type, dist_type):
    kind = "discrete" if dist_type is PlainCategorical else "continuous"
    name = {"discrete": "discrete_dist_type", "continuous": "continuous_dist_type"}[kind]
    config.bind({f"Actor.{name}": dist_type})
    agent, batch = build(kind, agent_type=agent_type, online_coeff=1.0, offline_coeff=1.0), padded_batch(kind)
    if kind == "continuous":
        batch.actions[0, 0] = 1.0  # whose density tanh could not give
    loss = agent(batch, log_step=True)
    loss.backward()
    assert loss.isfinite()
    assert all(p.grad.isfinite().all() for p in agent.trainable_params)
    assert any(p.grad.any() for p in agent.actor.parameters())
    agent.eval()
    step = {k: v[:, :1] for k, v in batch.obs.items()}, batch.rl2s[:, :1], batch.time_idxs[:, :1]
    state, _ = agent.get_state_embedding(*step)
    assert type(agent.actor(state)) in (TransformedDistribution, Independent, Categorical)  # what the client's class returned
    greedy, _ = agent.get_actions(*step, sample=False)
    of = agent.actor(state)
    if dist_type is PlainCategorical:
        want = of.probs.argmax(-1, keepdim=True)
    else:
        want = of.base_dist.mean.tanh() if dist_type is Squashed else of.mean
    torch.testing.assert_close(greedy.float(), want[:, :, -1].float())


class Doubling(NCritics):
    """Overrides the hook with the arguments that the original has."""

    def critic_network_forward(self, state, action, log_dict=None):
        return 2 * super().critic_network_forward(state, action, log_dict)


class Flat(BaseCriticHead):
    """A critic from scratch."""

    def __init__(self, state_dim, action_dim, discrete, gammas, num_critics):
        super().__init__(state_dim, action_dim, discrete, gammas, num_critics)
        self.layer = nn.Linear(state_dim + action_dim, num_critics)

    def critic_network_forward(self, state, action, log_dict=None):
        state = state[None, :, :, None].expand(*action.shape[:-1], -1)
        return self.layer(torch.cat((state, action), -1)).transpose(-1, -2).unsqueeze(-1)


class OwnForward(NCriticsTwoHot):
    def forward(self, state, action, log_dict=None):
        return super().forward(state.tanh(), action, log_dict)


@pytest.mark.parametrize(("agent_type", "critic_type"), [(Agent, Doubling), (Agent, Flat), (MultiTaskAgent, OwnForward)])
def test_critics_of_clients_are_not_trained_by_the_policys_gradient(agent_type, critic_type):
    agent = build("continuous", agent_type=agent_type, critic_type=critic_type, online_coeff=1.0, offline_coeff=0.0)
    batch = padded_batch("continuous")
    agent(batch, log_step=True)
    actor_loss, critic_loss = agent.update_info["Actor Loss"], agent.update_info["Critic Loss"]
    grads = torch.autograd.grad(actor_loss, list(agent.critics.parameters()), allow_unused=True, retain_graph=True)
    assert all(g is None for g in grads)
    assert any(
        g is not None and g.any() for g in torch.autograd.grad(actor_loss, list(agent.actor.parameters()), retain_graph=True)
    )
    assert all(g.isfinite().all() for g in torch.autograd.grad(critic_loss, list(agent.critics.parameters())))
    if critic_type is Doubling:
        state, action = torch.randn(2, 3, 16), torch.rand(1, 2, 3, 7, 2)
        torch.testing.assert_close(
            agent.critics(state, action), 2 * NCritics.critic_network_forward(agent.critics, state, action)
        )
