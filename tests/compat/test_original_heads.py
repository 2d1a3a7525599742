"""What code for the original system relies on in actors, critics and distributions, as such code uses it."""

import pytest
import torch
import torch.nn.functional as F
from test_original_agents import build, padded_batch
from torch import nn
from torch.distributions import Categorical, Distribution, Independent, Normal, TransformedDistribution
from torch.distributions.transforms import TanhTransform

from amago import config
from amago.agent import Agent, MultiTaskAgent
from amago.nets.actor_critic import (
    Actor,
    BaseActorHead,
    BaseCriticHead,
    NCritics,
    NCriticsTwoHot,
    PopArtLayer,
    ResidualActor,
    gammas_as_input_seq,
)
from amago.nets.policy_dists import GMM, Beta, Discrete, DiscreteLikeContinuous, Multibinary, PolicyOutput, TanhGaussian

GAMMAS = torch.tensor([0.5, 0.9, 0.999])
B, L, G, A, D, C = 2, 5, 3, 4, 8, 3


# ---- distributions -------------------------------------------------------------------------------------------------------


def test_discrete_is_torchs_categorical():
    kind = Discrete(A, clip_prob_low=0.001, clip_prob_high=0.99)
    assert isinstance(kind, PolicyOutput)
    assert (kind.is_discrete, kind.input_dimension, list(kind.parameters())) == (True, A, [])
    dist = kind(torch.randn(B, L, G, A), log_dict={})
    assert isinstance(dist, Categorical)
    assert dist.sample().shape == (B, L, G, 1)
    assert dist.sample((6,)).shape == (6, B, L, G, 1)
    index = torch.randint(A, (B, L, G))
    assert dist.log_prob(index).shape == (B, L, G)
    torch.testing.assert_close(dist.log_prob(index), Categorical(probs=dist.probs).log_prob(index))
    torch.testing.assert_close(dist.log_prob(index[..., None]), dist.log_prob(index))
    torch.testing.assert_close(dist.logits, dist.probs.log())
    torch.testing.assert_close(dist.entropy(), Categorical(probs=dist.probs).entropy(), rtol=1e-3, atol=1e-4)
    one_hot = F.one_hot(index, A).float()
    clipped = one_hot.clamp(0.001, 0.99)
    torch.testing.assert_close(kind.action_from_buffer(one_hot), clipped / clipped.sum(-1, keepdim=True))
    assert dist.expand((7, B, L, G)).probs.shape == (7, B, L, G, A)


@pytest.mark.parametrize("made", ["ours", "torch"])
def test_discrete_actions_as_continuous_ones(made):
    logits = torch.randn(B, L, G, A, requires_grad=True)
    categorical = Discrete(A)(logits) if made == "ours" else Categorical(logits=logits)
    dist = DiscreteLikeContinuous(categorical, gumbel_softmax_temperature=0.5)
    assert isinstance(dist, Distribution)
    assert dist.probs.shape == dist.logits.shape == (B, L, G, A)
    assert dist.entropy().shape == (B, L, G)
    drawn = dist.sample((3,))
    assert drawn.shape == (3, B, L, G, A)
    assert not drawn.requires_grad
    torch.testing.assert_close(dist.log_prob(drawn), categorical.log_prob(drawn.argmax(-1)))
    (dist.rsample() * torch.arange(4.0)).sum().backward()
    assert logits.grad.any()


def test_the_temperature_of_its_gradient_is_bound_by_its_name():
    config.bind({"DiscreteLikeContinuous.gumbel_softmax_temperature": 7.0})
    assert DiscreteLikeContinuous(Categorical(torch.ones(3))).temperature == 7.0
    with pytest.raises(ValueError, match="gumbel_softmax_temperature must be positive, got 0"):
        DiscreteLikeContinuous(Categorical(torch.ones(3)), 0.0)


def test_continuous_distributions_are_torchs():
    for kind in (
        TanhGaussian(A, std_low=0.01, std_high=2.0, std_activation="tanh", clip_actions_on_log_prob=(-0.9, 0.9)),
        TanhGaussian(A, std_low=0.01, std_high=2.0, std_activation="softplus"),
        Beta(A, alpha_low=1.0001, alpha_high=20.0, beta_low=1.1, beta_high=30.0, std_activation="tanh"),
        Beta(A), Multibinary(A), GMM(A, gmm_modes=5, std_low=1e-4, std_high=3.0, std_activation="softplus"),
    ):  # fmt: skip
        dist = kind(torch.randn(B, L, G, kind.input_dimension))
        assert isinstance(dist, Distribution)
        assert not kind.is_discrete
        actions = dist.sample((2,))
        assert actions.shape == (2, B, L, G, A)
        assert dist.log_prob(actions).shape == (2, B, L, G, 1 if isinstance(kind, GMM) else A)
        assert dist.mean.shape == (B, L, G, A)
        assert kind.action_from_buffer(actions) is actions
        assert kind.actions_differentiable != isinstance(kind, GMM)
    wide, narrow = (
        TanhGaussian(1, std_high=h, std_activation="softplus")(torch.tensor([0.0, 50.0])).scale for h in (None, 2.0)
    )
    assert (float(wide), float(narrow)) == (pytest.approx(50.0, abs=0.1), 2.0)
    alpha = Beta(1, alpha_low=2.0, alpha_high=3.0)(torch.tensor([[-50.0, 0.0], [50.0, 0.0]])).alpha
    assert alpha.flatten().tolist() == [2.0, 3.0]
    with pytest.raises(ValueError, match="std_activation='relu' is unknown: use tanh or softplus"):
        GMM(A, std_activation="relu")
    with pytest.raises(ValueError, match="std_activation='tanh' needs an upper bound: set alpha_high"):
        Beta(A, std_activation="tanh")


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


def test_what_is_not_a_distribution_is_named():
    class Broken(PlainCategorical):
        def forward(self, vec, log_dict=None):
            return vec

    config.bind({"Actor.discrete_dist_type": Broken})
    with pytest.raises(TypeError, match=r"Broken must return a torch.distributions.Distribution, got Tensor"):
        build()(padded_batch())


# ---- actors --------------------------------------------------------------------------------------------------------------


def test_actors_and_their_hook():
    class Logits(BaseActorHead):
        def __init__(self, state_dim, action_dim, discrete, gammas, continuous_dist_type=None, discrete_dist_type=Discrete):
            super().__init__(
                state_dim=state_dim, action_dim=action_dim, discrete=discrete, gammas=gammas,
                continuous_dist_type=continuous_dist_type, discrete_dist_type=discrete_dist_type,
            )  # fmt: skip
            self.out = nn.Linear(state_dim, self.num_gammas * self.policy_dist.input_dimension)

        def actor_network_forward(self, state, log_dict=None, straight_from_obs=None):
            batch, length, _ = state.shape
            assert straight_from_obs["legal"].shape == (batch, length, A)
            return self.out(state).view(batch, length, self.num_gammas, -1)

    actor = Logits(D, A, True, GAMMAS)
    assert (actor.num_gammas, actor.discrete, actor.actions_differentiable) == (G, True, True)
    dist = actor(torch.randn(B, L, D), {}, {"legal": torch.ones(B, L, A)})
    assert dist.probs.shape == (B, L, G, A)
    for made in (Actor(D, A, True, GAMMAS), ResidualActor(state_dim=D, action_dim=A, discrete=False, gammas=GAMMAS)):
        made(torch.randn(B, L, D), log_dict={}, straight_from_obs={"anything": torch.zeros(B, L, 2)})
    assert Actor(D, A, True, GAMMAS).base.out_layer.out_features == G * A
    assert isinstance(Actor(D, A, True, GAMMAS, discrete_dist_type=PlainCategorical).policy_dist, PlainCategorical)


# ---- critics -------------------------------------------------------------------------------------------------------------


def test_scalar_critics():
    critics = NCritics(D, A, True, GAMMAS, num_critics=C)
    state, weights = torch.randn(B, L, D), torch.rand(1, B, L, G, A).softmax(-1)
    assert len(critics) == C
    q = critics(state, weights)
    assert q.shape == (1, B, L, C, G, 1)
    each = torch.stack([critics(state, F.one_hot(torch.full((1, B, L, G), a), A).float()) for a in range(A)], -1)
    torch.testing.assert_close(q, (each[..., 0, :] * weights[:, :, :, None]).sum(-1, keepdim=True))
    out, features = NCritics(D, A, False, GAMMAS, num_critics=C, d_hidden=16).net(torch.randn(B, L, D + 1 + A))
    assert (out.shape, features.shape) == ((B, L, C, 1), (B, L, C, 16))
    seq = gammas_as_input_seq(GAMMAS, B, L)
    assert seq.shape == (G * B, L, 1)
    assert seq[:, 0, 0].tolist() == sorted(seq[:, 0, 0].tolist())


@pytest.mark.parametrize("label_type", ["twohot", "hlgauss"])
def test_critics_that_classify(label_type):
    critics = NCriticsTwoHot(
        D, A, True, GAMMAS, num_critics=C, min_return=None, max_return=None, output_bins=32, use_symlog=True,
        label_type=label_type, sigma=0.75, init_value=None,
    )  # fmt: skip
    dist = critics(torch.randn(B, L, D), torch.rand(2, B, L, G, A))
    assert isinstance(dist, Categorical)
    assert dist.probs.shape == dist.logits.shape == (2, B, L, C, G, 32)
    torch.testing.assert_close(dist.logits.exp(), dist.probs)
    raw = critics.bin_dist_to_raw_vals(dist)
    assert raw.shape == (2, B, L, C, G, 1)
    torch.testing.assert_close(critics.bin_dist_to_raw_vals(Categorical(probs=dist.probs)), raw, rtol=1e-3, atol=1e-3)
    labels = critics.raw_vals_to_labels(torch.tensor([[50.0], [-3.0]]))
    assert labels.shape == (2, 32)
    torch.testing.assert_close(labels.sum(-1), torch.ones(2))
    assert critics.num_bins == len(critics.bin_vals) == 32
    assert float(critics.bin_dist_to_raw_vals(Categorical(probs=labels))[1]) == pytest.approx(-3.0, rel=0.1)


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
    terms = agent.loss_terms
    grads = torch.autograd.grad(terms.actor, list(agent.critics.parameters()), allow_unused=True, retain_graph=True)
    assert all(g is None for g in grads)
    assert any(
        g is not None and g.any() for g in torch.autograd.grad(terms.actor, list(agent.actor.parameters()), retain_graph=True)
    )
    assert all(g.isfinite().all() for g in torch.autograd.grad(terms.critic, list(agent.critics.parameters())))
    if critic_type is Doubling:
        state, action = torch.randn(2, 3, 16), torch.rand(1, 2, 3, 7, 2)
        torch.testing.assert_close(
            agent.critics(state, action), 2 * NCritics.critic_network_forward(agent.critics, state, action)
        )


def test_popart_among_the_critics():
    config.bind({"actor_critic.PopArtLayer.init_nu": 4.0})
    layer = PopArtLayer(gammas=GAMMAS, beta=5e-4, enabled=True)
    assert layer.sigma.flatten().tolist() == [2.0] * 3
    target = torch.randn(B, L, 1, G, 1) * 5 + 3
    before = layer(target, normalized=False)
    layer.update_stats(target, torch.ones_like(target))
    torch.testing.assert_close(layer(target, normalized=False), before, rtol=1e-3, atol=1e-3)
    assert layer.normalize_values(target).abs().mean() < 2
    assert [t.shape for t in (layer.mu, layer.nu, layer.w, layer.b, layer.sigma)] == [(G, 1)] * 5
