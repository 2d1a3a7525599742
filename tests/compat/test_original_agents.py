"""What code for the original system relies on in its agents, actors, critics and distributions, as such code uses it."""

import copy
import itertools

import pytest
import tiny
import torch
import torch.nn.functional as F
from agent.test_agent import SPACES, make_batch
from agent.test_agent import build as agent_of
from torch import nn
from torch.distributions import Categorical, Independent, Normal, TransformedDistribution
from torch.distributions.transforms import TanhTransform

import amago
from amago import config
from amago.agent import Agent, BaseAgent, MultiTaskAgent
from amago.nets.actor_critic import Actor, BaseCriticHead, NCritics, NCriticsTwoHot
from amago.nets.policy_dists import PolicyOutput
from amago.nets.traj_encoders import GRUTrajEncoder

B, L, G, C = 3, 6, 7, 4  # L transitions
BOTH = pytest.mark.parametrize("agent_type", [Agent, MultiTaskAgent])


def build(kind="discrete", agent_type=Agent, **options):
    torch.manual_seed(0)
    return agent_of(kind, GRUTrajEncoder, agent_type, **options)


def padded_batch(kind="discrete"):
    """Lengths 6, 4 and 1, padded with 4.0."""
    batch = make_batch(kind)
    batch.rl2s[~batch.mask.expand_as(batch.rl2s)] = 4.0
    return batch


def test_observations_that_an_actor_would_ignore_are_told():
    with pytest.warns(UserWarning, match=r"pass_obs_keys_to_actor=\['mask'\], but Actor ignores observations"):
        agent = build(pass_obs_keys_to_actor=["mask"])
    assert agent.pass_obs_keys_to_actor == ["mask"]


class Masks(Agent):
    def edit_actor_mask(self, batch, actor_loss, pad_mask):
        assert (actor_loss.shape, pad_mask.dtype) == ((B, L, G, 1), torch.bool)
        assert pad_mask.shape == actor_loss.shape
        return pad_mask & (batch.rews > 0)[:, :, None].expand_as(pad_mask)

    def edit_critic_mask(self, batch, critic_loss, pad_mask):
        if critic_loss is None:
            return pad_mask
        assert critic_loss.shape == pad_mask.shape == (B, L, C, G, 1)
        return torch.zeros_like(pad_mask)


def test_masks_of_agents_as_methods_and_on_an_instance():
    batch, plain, masked = padded_batch(), build().eval(), build(agent_type=Masks).eval()
    torch.manual_seed(3)
    losses = plain.losses(batch)
    torch.manual_seed(3)
    masked(batch, log_step=False)
    counted = losses["actor"][(batch.transition_mask & (batch.rews > 0)).squeeze(-1)]
    torch.testing.assert_close(masked.update_info["Actor Loss"], counted.mean())
    assert masked.update_info["Critic Loss"] == 0
    plain.edit_actor_mask = lambda batch, actor_loss, pad_mask: torch.zeros_like(pad_mask)
    plain(batch, log_step=False)
    assert plain.update_info["Actor Loss"] == 0
    assert plain.update_info["Critic Loss"] > 0
    # numbers are weights
    plain.edit_actor_mask = lambda batch, actor_loss, pad_mask: pad_mask * 0.5
    torch.manual_seed(3)
    plain(batch, log_step=False)
    mean = losses["actor"][batch.transition_mask.squeeze(-1)].mean()
    torch.testing.assert_close(plain.update_info["Actor Loss"], mean)


def test_masks_of_the_experiment_come_after_those_of_the_agent(tmp_path):
    seen = []

    class FirstStep(Agent):
        def edit_critic_mask(self, batch, critic_loss, pad_mask):
            return pad_mask & (torch.arange(pad_mask.shape[1]) == 0)[None, :, None, None, None]

    class Watch(amago.Experiment):
        def edit_critic_mask(self, batch, critic_loss, pad_mask):
            seen.append(pad_mask)
            return torch.zeros_like(pad_mask)

    e = tiny.learned(tmp_path, experiment_type=Watch, agent_type=FirstStep)
    assert seen
    assert not seen[0][:, 1:].any()
    assert tiny.rows(e.run_dir, "train")[-1]["values"]["Critic Loss"] == 0.0


def test_an_agent_is_copied_after_a_loss():
    agent, batch = build(), padded_batch()
    agent(batch, log_step=True).backward()
    twin = copy.deepcopy(agent)
    assert twin.update_info.keys() == agent.update_info.keys()
    assert tiny.differing(dict(agent.state_dict()), dict(twin.state_dict())) == []
    twin(batch, log_step=False).backward()
    assert twin.actor.base.out_layer.bias.grad is not agent.actor.base.out_layer.bias.grad


def test_maximized_critics_are_the_critics_without_a_gradient_to_them():
    agent, state = build("continuous"), torch.randn(2, 5, 16)
    action = torch.rand(1, 2, 5, G, 3).requires_grad_()
    q = agent.maximized_critics(state, action)
    torch.testing.assert_close(q, agent.critics(state, action))
    q.sum().backward()
    assert action.grad.any()
    assert all(p.grad is None for p in agent.critics.parameters())
    with torch.no_grad():
        for p in agent.critics.parameters():
            p.mul_(2.0)
    torch.testing.assert_close(agent.maximized_critics(state, action), agent.critics(state, action))
    copied = copy.deepcopy(agent)
    nn.init.zeros_(copied.critics.net.output_layer.weight)
    nn.init.zeros_(copied.critics.net.output_layer.bias)
    assert not copied.maximized_critics(state, action).any()
    assert agent.maximized_critics(state, action).any()


@BOTH
@pytest.mark.parametrize("kind", SPACES)
def test_actions_with_a_dimension_of_timesteps(agent_type, kind):
    agent, batch = build(kind, agent_type=agent_type).eval(), padded_batch(kind)
    memory, theirs = (agent.init_hidden_state(B, "cpu") for _ in range(2))
    for t in range(3):
        obs = {k: v[:, t : t + 1] for k, v in batch.obs.items()}
        rl2s, times = batch.rl2s[:, t : t + 1], batch.time_idxs[:, t : t + 1]
        actions, theirs = agent.get_actions(obs=obs, rl2s=rl2s, time_idxs=times, hidden_state=theirs, sample=False)
        flat, memory = agent.get_actions({k: v[:, 0] for k, v in obs.items()}, rl2s[:, 0], times[:, 0], memory, sample=False)
        assert actions.shape == (B, 1, {"discrete": 1, "continuous": 3, "multibinary": 5}[kind])
        assert actions.dtype == (torch.float32 if kind == "continuous" else torch.uint8)
        torch.testing.assert_close(actions[:, 0].to(flat.dtype), flat)
    with pytest.raises(ValueError, match=r"takes one timestep, rl2s \(N, 1 \+ A\) or \(N, 1, 1 \+ A\), got \(3, 2,"):
        agent.get_actions(batch.obs, batch.rl2s[:, :2], batch.time_idxs, None)


def test_weights_load_strictly_with_copies_of_the_critics_and_without():
    agent, other = build(), build()
    theirs = {k: v.clone() + 0.5 for k, v in agent.state_dict().items()}
    other.load_state_dict(theirs, strict=True)
    assert tiny.differing(theirs, dict(other.state_dict())) == []
    of_before = {k: v for k, v in agent.state_dict().items() if not k.startswith("maximized_critics.")}
    other.load_state_dict(of_before, strict=True)
    assert tiny.differing(dict(agent.state_dict()), dict(other.state_dict())) == []
    with pytest.raises(RuntimeError, match="unexpected_part"):
        other.load_state_dict(theirs | {"unexpected_part.weight": torch.zeros(1)}, strict=True)


def test_a_base_agent_of_ones_own(tmp_path):
    class Cloning(BaseAgent):
        def init_actor_critic(self):
            self.actor = nn.Linear(self.state_dim, self.action_dim)

        @property
        def trainable_params(self):
            return itertools.chain(super().trainable_params, self.actor.parameters())

        def forward(self, batch, log_step):
            logits = self.actor(self.encode(batch)[:, :-1])
            loss = -(logits.log_softmax(-1) * batch.actions).sum(-1, keepdim=True)[batch.transition_mask].mean()
            self.update_info = {"Actor Loss": loss.item(), "Critic Loss": 0.0}
            return loss

        def act(self, state, obs, sample, gamma_idx=None):
            return self.actor(state).argmax(-1, keepdim=True)

    e = tiny.learned(tmp_path, agent_type=Cloning)
    values = tiny.rows(e.run_dir, "train")[-1]["values"]
    assert values["Loss"] == pytest.approx(values["Actor Loss"])


def test_heads_and_agents_have_what_overrides_read():
    class Early(Agent):
        def init_actor_critic(self):
            assert self.popart.sigma.shape == (len(self.gammas), 1)
            assert (self.actor_type, self.critic_type) == (Actor, NCritics)
            super().init_actor_critic()

    agent = build(agent_type=Early, n_step=3)
    for head in (agent.actor, agent.critics, agent.target_actor):
        assert torch.equal(head.gammas, agent.gammas)
    one = torch.ones(B, L, 1, G, 1)
    found = agent._nstep_fn(one, torch.zeros_like(one), torch.zeros_like(one), agent.gammas[:, None], one)
    torch.testing.assert_close(found[0, 0, 0, :, 0], 1 + agent.gammas + agent.gammas**2)


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


@BOTH
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
        state, action = torch.randn(2, 3, 16), torch.rand(1, 2, 3, G, 3)
        torch.testing.assert_close(
            agent.critics(state, action), 2 * NCritics.critic_network_forward(agent.critics, state, action)
        )
