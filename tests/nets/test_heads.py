"""Actors, critics, PopArt and distributions: gradients, slow references, refusals."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from amago import config
from amago.nets.actor_critic import Actor, NCritics, ResidualActor
from amago.nets.policy_dists import GMM, ActionDistribution, Beta, Discrete, Multibinary, PolicyOutput, TanhGaussian
from amago.nets.popart import PopArtLayer

GAMMAS = torch.tensor([0.5, 0.9, 0.999])
B, L, K, C, G, A, D = 2, 5, 3, 4, 3, 4, 8


def critics(kind, **options):
    torch.manual_seed(0)
    return NCritics(D, A, kind == "discrete", GAMMAS, d_hidden=16, **options)


def slow_critics(net, state, action):
    """One critic, one discount, one sample at a time, on the concatenation."""
    net = net.double()
    state, action = state.double(), action.double()
    out = torch.zeros(*action.shape[:3], net.num_critics, G, 1, dtype=torch.float64)
    layers = [net.net.inp_layer, *net.net.core_layers, net.net.output_layer]
    for c in range(net.num_critics):
        for g in range(G):
            horizon = 1 / min(max(1 - GAMMAS[g].double().item(), 1e-6), 1.0)
            h = torch.full((*state.shape[:2], 1), math.log1p(horizon), dtype=torch.float64)
            for k in range(action.shape[0]):
                x = torch.cat((state, h, action[k, :, :, g].clamp(-0.999, 0.999)), -1)
                for i, layer in enumerate(layers):
                    x = x @ layer.weight[c] + layer.bias[0, 0, c]
                    x = x if i == len(layers) - 1 else torch.nn.functional.leaky_relu(x)
                out[k, :, :, c, g] = x
    return out


@pytest.mark.parametrize("kind", ["continuous", "multibinary"])
def test_critics_never_concatenate_but_equal_it(kind):
    net = critics(kind, n_layers=3)
    state, action = torch.randn(B, L, D), 2 * torch.randn(K, B, L, G, A)
    got = net(state, action)
    assert got.shape == (K, B, L, C, G, 1)
    torch.testing.assert_close(got.double(), slow_critics(net, state, action), rtol=1e-5, atol=1e-5)


def test_an_action_that_all_discounts_share():
    for kind in ("continuous", "discrete"):
        net = critics(kind)
        state, action = torch.randn(B, L, D), torch.rand(1, B, L, 1, A)
        expected = net(state, action.expand(1, B, L, G, A))
        torch.testing.assert_close(net(state, action), expected, rtol=1e-5, atol=1e-6)


def test_discrete_critics_weigh_the_value_of_each_action():
    net = critics("discrete")
    state = torch.randn(B, L, D)
    values = net.all_values(state)
    assert values.shape == (B, L, C, G, A)
    index = torch.randint(A, (K, B, L, G))
    got = net(state, torch.nn.functional.one_hot(index, A).float())
    for k in range(K):
        expected = values.gather(-1, index[k][:, :, None, :, None].expand(B, L, C, G, 1))
        torch.testing.assert_close(got[k], expected)
    with pytest.raises(ValueError, match="all_values: only the critics of discrete actions"):
        critics("continuous").all_values(state)


@pytest.mark.parametrize("normalization", ["none", "layer"])
@pytest.mark.parametrize("kind", ["continuous", "discrete"])
def test_detach_params_lets_the_gradient_reach_the_action_alone(kind, normalization):
    net = critics(kind, normalization=normalization)
    state, action = torch.randn(B, L, D), torch.rand(K, B, L, G, A) * 0.9
    expected_state, expected_action = state.clone().requires_grad_(), action.clone().requires_grad_()
    net(expected_state, expected_action).sum().backward()
    net.zero_grad()
    state.requires_grad_()
    action.requires_grad_()
    value = net(state, action, detach_params=True)
    torch.testing.assert_close(value, net(state, action))
    value.sum().backward()
    assert all(p.grad is None for p in net.parameters())
    torch.testing.assert_close(action.grad, expected_action.grad)
    torch.testing.assert_close(state.grad, expected_state.grad)
    assert action.grad.abs().sum() > 0


def test_gradients_of_critics_against_finite_differences():
    net = critics("continuous", num_critics=2).double()
    state = torch.randn(1, 2, D, dtype=torch.float64, requires_grad=True)
    action = (torch.rand(1, 1, 2, G, A, dtype=torch.float64) * 0.9).requires_grad_()
    assert torch.autograd.gradcheck(lambda s, a: net(s, a), (state, action))


@pytest.mark.parametrize("kind", ["continuous", "discrete"])
def test_normalised_critics_are_the_same_by_every_way(kind):
    """Also a subset of them, in blocks or not, and for actions of the data and of the policy together."""
    net = critics(kind, normalization="layer", n_layers=3)
    with torch.no_grad():
        for p in net.parameters():
            p.add_(torch.randn_like(p))
    state, action = torch.randn(B, L, D), torch.rand(K, B, L, G, A)
    want = net(state, action)
    subset = torch.tensor([2, 0])
    torch.testing.assert_close(net.evaluate_subset(state, action, subset), want[:, :, :, subset])
    of_data, of_policy = net.evaluate(state, action[0], action, lambda out: out)
    torch.testing.assert_close(of_data, want[0])
    torch.testing.assert_close(of_policy, want)
    features = net.net(torch.randn(B, L, net.net.inp_layer.weight.shape[1]))[1]
    assert features.shape == (B, L, C, 16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        torch.testing.assert_close(net(state, action), want, rtol=0.1, atol=0.5)


def test_the_values_of_normalised_critics_stay_near_the_data_far_from_it():
    state, action = torch.randn(B, L, D), torch.rand(1, B, L, G, A)
    near, far = (critics("discrete", normalization="layer")(scale * state, action) for scale in (1.0, 1e4))
    assert far.abs().max() < 3.0 * near.abs().max()
    assert critics("discrete")(1e4 * state, action).abs().max() > 1e3 * near.abs().max()


def test_critics_without_a_norm_have_no_names_of_one():
    assert not [name for name in critics("discrete").state_dict() if "norm" in name]
    with pytest.raises(ValueError, match="unknown normalization 'batch' of critics: use 'layer'"):
        critics("discrete", normalization="batch")


def test_critic_refusals_and_metrics():
    net = critics("continuous")
    with pytest.raises(ValueError, match=r"action must be \(samples, 2, 5, 3, 4\), got shape \(1, 2, 5, 2, 4\)"):
        net(torch.randn(B, L, D), torch.randn(1, B, L, 2, A))
    with pytest.raises(ValueError, match=r"state must be \(batch, length, 8\), got shape \(2, 5, 7\)"):
        net(torch.randn(B, L, 7), torch.randn(1, B, L, G, A))
    with pytest.raises(ValueError, match="action_kind='tuple' is unknown: use one of discrete, continuous, multibinary"):
        Actor(D, A, False, GAMMAS, action_kind="tuple")
    with pytest.raises(ValueError, match="discrete=True contradicts action_kind='multibinary'"):
        Actor(D, A, True, GAMMAS, action_kind="multibinary")
    with pytest.raises(TypeError, match="discrete='discrete': heads take state_dim, action_dim, discrete"):
        NCritics(D, A, "discrete", GAMMAS)
    with pytest.raises(ValueError, match="continuous_dist_type=None, but actions of kind 'continuous' have a continuous part"):
        Actor(D, A, False, GAMMAS, continuous_dist_type=None)
    with pytest.raises(ValueError, match="num_critics must be at least 1, got num_critics=0"):
        critics("discrete", num_critics=0)
    with pytest.raises(ValueError, match="dropout_p must be in"):
        critics("discrete", dropout_p=1.0)
    with pytest.raises(ValueError, match=r"gammas must be a vector .* got shape \(\)"):
        NCritics(D, A, True, torch.tensor(0.9))
    log = {}
    net(torch.randn(B, L, D), torch.randn(1, B, L, G, A), log_dict=log)
    assert all(torch.isfinite(v) for v in log.values())
    assert len(log) == 2


def test_half_precision_values_come_out_in_float32():
    for kind in ("continuous", "discrete"):
        net = critics(kind)
        state, action = torch.randn(B, L, D), torch.rand(K, B, L, G, A)
        expected = net(state, action)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            got = net(state, action)
        assert got.dtype == torch.float32
        torch.testing.assert_close(got, expected, rtol=0.1, atol=0.05)


@pytest.mark.parametrize(("kind", "stored", "dtype"), [
    ("discrete", 1, torch.int64), ("continuous", A, torch.float32), ("multibinary", A, torch.int8),
])  # fmt: skip
@pytest.mark.parametrize("sample", [True, False])
@pytest.mark.parametrize("actor_type", [Actor, ResidualActor])
def test_actors_of_every_kind(kind, stored, dtype, sample, actor_type):
    actor = actor_type(D, A, kind == "discrete", GAMMAS, action_kind=kind)
    log = {}
    pi = actor(torch.randn(B, L, D), log_dict=log)
    action = pi.sample_action(sample)
    assert action.shape == (B, L, G, stored)
    assert action.dtype == dtype
    assert not action.requires_grad
    log_prob = pi.log_prob(pi.sample())
    assert log_prob.shape == ((B, L, G) if kind == "discrete" else (B, L, G, A))
    log_prob.sum().backward()
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in actor.parameters())
    assert log
    assert all(not v.requires_grad for v in log.values())
    assert pi.sample_action(False).equal(pi.sample_action(False))
    assert actor(torch.randn(7, D)).mode.shape[:2] == (7, G)


def test_straight_from_obs_reaches_an_actor_that_uses_it():
    class Masked(Actor):
        def actor_network_forward(self, state, log_dict=None, straight_from_obs=None):
            logits = super().actor_network_forward(state, log_dict, straight_from_obs)
            return logits.masked_fill(~straight_from_obs["legal"][..., None, :], -1e9)

    state, legal = torch.randn(B, L, D), torch.arange(A).expand(B, L, A) == 2
    config.bind({"Discrete.clip_prob_low": 0.0, "Discrete.clip_prob_high": 1.0})
    pi = Masked(D, A, True, GAMMAS)(state, straight_from_obs={"legal": legal})
    assert (pi.sample() == 2).all()
    for plain in (Actor, ResidualActor):
        actor = plain(D, A, True, GAMMAS)
        probs = actor(state, straight_from_obs={}).probs
        assert probs.shape == (B, L, G, A)
        assert actor(state, straight_from_obs={"legal": legal}).probs.equal(probs)


def test_a_residual_actor_without_blocks_or_with_an_unknown_norm_is_refused():
    with pytest.raises(ValueError, match="residual_blocks must be at least 1, got residual_blocks=0"):
        ResidualActor(D, A, True, GAMMAS, residual_blocks=0)
    with pytest.raises(ValueError, match="unknown normalization 'batch'"):
        ResidualActor(D, A, True, GAMMAS, normalization="batch")


def test_a_residual_actor_is_its_skip_path_where_the_blocks_give_nothing():
    actor = ResidualActor(D, A, True, GAMMAS, feature_dim=12, residual_ff_dim=20, residual_blocks=3)
    assert len(actor.residual_blocks) == 3
    for block in actor.residual_blocks:
        torch.nn.init.zeros_(block[4].norm.weight)
    state = torch.randn(B, L, D)
    expected = actor.out(actor.inp(state)).unflatten(-1, (G, A)).softmax(-1)
    torch.testing.assert_close(actor(state).probs, Discrete(A).action_from_buffer(expected))


def test_a_users_own_distribution():
    class Uniform(ActionDistribution):
        def __init__(self, width):
            super().__init__(width.shape)
            self.width = width

        def sample(self, sample_shape=()):
            return (2 * torch.rand_like(self.width) - 1) * self.width

        @property
        def mode(self):
            return torch.zeros_like(self.width)

        def log_prob(self, action):
            return -(2 * self.width).log()

        def sample_action(self, sample):
            return (self.sample() if sample else self.mode).detach()

    class UniformType(PolicyOutput):
        is_discrete, actions_differentiable = False, False

        @property
        def input_dimension(self):
            return self.d_action

        def make(self, vec):
            return Uniform(vec.sigmoid())

    actor = Actor(D, A, False, GAMMAS, continuous_dist_type=UniformType)
    pi = actor(torch.randn(B, L, D), log_dict={})
    assert pi.sample_action(True).shape == (B, L, G, A)
    with pytest.raises(NotImplementedError, match="Uniform has no reparametrised sample"):
        pi.rsample()
    with pytest.raises(NotImplementedError, match="the entropy of Uniform has no closed form"):
        pi.entropy()


def test_gin_reaches_the_heads():
    config.bind({
        "amago.nets.actor_critic.Actor.d_hidden": 7,
        "amago.nets.actor_critic.NCritics.num_critics": 2,
        "amago.nets.policy_dists.Discrete.clip_prob_high": 0.5,
        "amago.nets.actor_critic.PopArtLayer.init_nu": 9.0,
    })  # fmt: skip
    assert Actor(D, A, True, GAMMAS).base.in_layer.out_features == 7
    assert NCritics(D, A, True, GAMMAS).num_critics == 2
    assert Discrete(A).clip_prob_high == 0.5
    assert PopArtLayer(2).sigma.tolist() == [[3.0], [3.0]]


# distributions


def test_discrete_sampling_follows_the_probabilities():
    torch.manual_seed(1)
    dist = Discrete(4)(torch.tensor([0.0, 1.0, 2.0, -1.0]).expand(20_000, 4))
    freq = torch.bincount(dist.sample()[:, 0], minlength=4) / 20_000
    torch.testing.assert_close(freq, dist.probs[0], rtol=0, atol=0.02)
    assert (dist.mode == 2).all()


@pytest.mark.parametrize("n", [1, 2, 70_000])
def test_discrete_of_any_size(n):
    dist = Discrete(n)(torch.randn(3, 2, n))
    action = dist.sample_action(True)
    assert action.shape == (3, 2, 1)
    assert action.min() >= 0
    assert action.max() < n
    torch.testing.assert_close(dist.probs.sum(-1), torch.ones(3, 2), rtol=1e-4, atol=1e-4)
    assert torch.isfinite(dist.log_prob(action.squeeze(-1))).all()
    assert torch.isfinite(dist.entropy()).all()


def test_discrete_gradient_ignores_the_renormalisation():
    vec = torch.tensor([[2.0, -1.0, 0.5]], dtype=torch.float64, requires_grad=True)
    Discrete(3)(vec).log_prob(torch.tensor([0])).sum().backward()
    got = vec.grad.clone()
    expected = torch.tensor([1.0, 0.0, 0.0], dtype=torch.float64) - vec.detach().softmax(-1)[0]  # that of a plain softmax
    torch.testing.assert_close(got[0], expected)


def gradient(kind, logits, action):
    logits = torch.tensor([logits], dtype=torch.float64, requires_grad=True)
    kind(logits).log_prob(torch.tensor([action])).sum().neg().backward()
    return logits.grad[0]


def test_discrete_gradient_leads_back_from_the_clip_alone():
    """Choice 0 has a probability above the upper clip, choices 1 and 2 lie below the lower one."""
    stuck, sure, kind = Discrete(3, clip_gradient=False), [12.0, 0.0, 0.0], Discrete(3)
    torch.testing.assert_close(kind(torch.tensor([sure])).probs, stuck(torch.tensor([sure])).probs)
    for action in range(3):
        assert not gradient(stuck, sure, action).any()
    assert not gradient(kind, sure, 0).any()  # it would make the policy surer still
    back = gradient(kind, sure, 1)
    assert back[0] > 0  # descent lowers this logit
    assert back[1] < 0
    assert back[2] == 0  # at its bound: no lower
    within = [0.5, 0.0, -0.5]
    torch.testing.assert_close(gradient(kind, within, 1), gradient(stuck, within, 1))
    masked = gradient(kind, [12.0, 0.0, -math.inf], 1)
    assert masked.isfinite().all()
    assert masked[2] == 0


def test_discrete_refusals():
    with pytest.raises(ValueError, match=r"got clip_prob_low=0.5, clip_prob_high=0.1"):
        Discrete(3, clip_prob_low=0.5, clip_prob_high=0.1)
    with pytest.raises(ValueError, match="d_action must be at least 1, got d_action=0"):
        Discrete(0)
    dist = Discrete(3)(torch.zeros(2, 3))
    with pytest.raises(ValueError, match=r"actions must be indices of shape \(2,\), got \(2, 3\)"):
        dist.log_prob(torch.zeros(2, 3))
    with pytest.raises(NotImplementedError, match="DiscreteOutput has no reparametrised sample"):
        dist.rsample()
    with pytest.raises(ValueError, match=r"Discrete takes \(..., 3\), got shape \(2, 4\)"):
        Discrete(3)(torch.zeros(2, 4))


@given(loc=st.floats(-3, 3), raw=st.floats(-3, 3), action=st.floats(-0.99, 0.99))
@settings(max_examples=50, deadline=None)
def test_tanh_gaussian_log_prob_is_a_change_of_variables(loc, raw, action):
    dist = TanhGaussian(1)(torch.tensor([loc, raw], dtype=torch.float64))
    x = math.atanh(action)
    normal = torch.distributions.Normal(dist.loc, dist.scale).log_prob(torch.tensor([x], dtype=torch.float64))
    expected = normal - math.log(1 - action**2)
    torch.testing.assert_close(dist.log_prob(torch.tensor([action], dtype=torch.float64)), expected, rtol=1e-6, atol=1e-6)


def test_tanh_gaussian_density_integrates_to_one():
    kind = TanhGaussian(1, clip_actions_on_log_prob=(-0.999999, 0.999999))
    grid = torch.linspace(-0.99999, 0.99999, 200_001, dtype=torch.float64).unsqueeze(-1)
    density = kind(torch.tensor([0.3, 0.2], dtype=torch.float64)).log_prob(grid).exp()
    assert abs(float(torch.trapezoid(density[:, 0], grid[:, 0])) - 1.0) < 1e-3


def test_tanh_gaussian_samples_and_their_gradient():
    vec = torch.tensor([[0.5, -0.5, 0.0, 0.0]]).expand(20_000, 4).clone().requires_grad_()
    torch.manual_seed(2)
    dist = TanhGaussian(2)(vec)
    sample = dist.rsample()
    torch.testing.assert_close(sample.atanh().mean(0), torch.tensor([0.5, -0.5]), rtol=0, atol=0.01)
    sample.sum().backward()
    torch.testing.assert_close(vec.grad[:, :2], (1 - sample.detach() ** 2))
    assert not dist.sample().requires_grad
    low, high = TanhGaussian(1, std_low=0.1, std_high=0.5)(torch.tensor([[0.0, -99.0], [0.0, 99.0]])).scale
    torch.testing.assert_close(torch.cat((low, high)), torch.tensor([0.1, 0.5]))


def test_tanh_gaussian_at_the_bounds_is_finite():
    dist = TanhGaussian(2)(torch.tensor([50.0, -50.0, -50.0, 50.0]))
    for a in (torch.ones(2), -torch.ones(2)):
        assert torch.isfinite(dist.log_prob(a)).all()
    with pytest.raises(ValueError, match=r"0 < std_low < std_high must hold, got std_low=2.0, std_high=1.0"):
        TanhGaussian(1, std_low=2.0, std_high=1.0)
    with pytest.raises(ValueError, match=r"clip_actions_on_log_prob must be within \(-1, 1\), got \(-1.0, 0.5\)"):
        TanhGaussian(1, clip_actions_on_log_prob=(-1.0, 0.5))


def test_multibinary_agrees_with_torch():
    vec = torch.randn(5, 3)
    dist, reference = Multibinary(3)(vec), torch.distributions.Bernoulli(logits=vec)
    bits = dist.sample()
    assert set(bits.unique().tolist()) <= {0.0, 1.0}
    torch.testing.assert_close(dist.log_prob(bits.to(torch.int8)), reference.log_prob(bits))
    torch.testing.assert_close(dist.entropy(), reference.entropy())
    assert dist.mode.equal((vec > 0).float())


@pytest.mark.parametrize("temperature", [0.1, 0.5, 2.0])
def test_one_hot_samples_and_their_gumbel_softmax_gradient(temperature):
    n, kind = 20_000, Discrete(4, gumbel_temperature=temperature)
    vec = torch.tensor([0.0, 1.0, 2.0, -1.0]).expand(n, 4).clone().requires_grad_()
    dist = kind(vec)
    torch.manual_seed(4)
    drawn = dist.sample_vector(grad=True)
    torch.manual_seed(4)
    assert drawn.detach().equal(dist.sample_vector())  # the same draws, with and without gradient
    freq = torch.bincount(drawn.argmax(-1), minlength=4) / n
    torch.testing.assert_close(freq, dist.probs[0].detach(), rtol=0, atol=0.02)
    stored = kind.action_from_buffer(torch.nn.functional.one_hot(drawn.argmax(-1), 4).float())
    assert drawn.detach().equal(stored)  # exactly what a stored action looks like to a critic

    weight = torch.tensor([1.0, 5.0, -3.0, 0.5])
    (drawn * weight).sum().backward()
    torch.manual_seed(4)
    gumbel = -torch.empty(n, 4).exponential_().log()
    again = vec.detach().clone().requires_grad_()
    ((((kind(again).probs.log() + gumbel) / temperature).softmax(-1)) * weight).sum().backward()
    torch.testing.assert_close(vec.grad, again.grad)
    assert vec.grad.any()


def test_impossible_actions_are_never_sampled_as_vectors():
    dist = Discrete(3, clip_prob_low=0.0, clip_prob_high=1.0)(torch.tensor([0.0, -1e9, 0.0]).expand(5000, 3))
    drawn = dist.sample_vector()
    assert not drawn[:, 1].any()
    assert torch.isfinite(drawn).all()
    with pytest.raises(ValueError, match="gumbel_temperature must be positive, got gumbel_temperature=0"):
        Discrete(3, gumbel_temperature=0)


def test_the_density_of_a_whole_action():
    index = torch.tensor([[2, 0], [1, 3]])
    one_hot = torch.nn.functional.one_hot(index, A).float()
    pi = Discrete(A)(torch.randn(2, 2, A))
    torch.testing.assert_close(pi.log_prob_of_vector(one_hot)[..., 0], pi.log_prob(index))
    action = torch.rand(2, 2, A) * 1.8 - 0.9
    for kind in (TanhGaussian(A), Beta(A)):
        pi = kind(torch.randn(2, 2, kind.input_dimension))
        torch.testing.assert_close(pi.log_prob_of_vector(action)[..., 0], pi.log_prob(action).sum(-1))
    gmm = GMM(A)(torch.randn(2, 2, GMM(A).input_dimension))
    assert gmm.log_prob_of_vector(action).shape == (2, 2, 1)
    assert gmm.log_prob_of_vector(action).equal(gmm.log_prob(action))
    bits = Multibinary(A)(torch.randn(2, 2, A))
    torch.testing.assert_close(bits.log_prob_of_vector(one_hot)[..., 0], bits.log_prob(one_hot).mean(-1))
    for kind in (Discrete(A), TanhGaussian(A), Beta(A), GMM(A), Multibinary(A)):  # one action, several discounts
        pi = kind(torch.randn(B, L, G, kind.input_dimension))
        stored = one_hot.view(B, 2, 1, A)[:, :1].expand(B, L, 1, A)
        torch.testing.assert_close(pi.log_prob_of_vector(stored), pi.log_prob_of_vector(stored.expand(B, L, G, A)))


@pytest.mark.parametrize("make", [Beta, GMM])
def test_densities_on_an_interval_integrate_to_one_and_give_the_samples(make):
    torch.manual_seed(5)
    kind = make(1, clip_actions_on_log_prob=(-0.999999, 0.999999)) if make is Beta else make(1, gmm_modes=3)
    vec = 0.5 * torch.randn(kind.input_dimension, dtype=torch.float64)
    grid = torch.linspace(-0.99999, 0.99999, 200_001, dtype=torch.float64).unsqueeze(-1)
    density = kind(vec).log_prob(grid).exp()[:, 0]
    assert abs(float(torch.trapezoid(density, grid[:, 0])) - 1.0) < 3e-3
    samples = kind(vec.expand(50_000, -1)).sample()
    assert samples.shape == (50_000, 1)
    assert samples.abs().max() < 1.0
    mean = float(torch.trapezoid(density * grid[:, 0], grid[:, 0]))
    assert abs(float(samples.mean()) - mean) < 0.01
    below = float(torch.trapezoid(density[:120_000], grid[:120_000, 0]))
    assert abs(float((samples < grid[120_000]).double().mean()) - below) < 0.01


def test_beta_has_reparametrised_samples_and_an_entropy():
    vec = torch.randn(20_000, 2, generator=torch.Generator().manual_seed(6))[:1].expand(20_000, 2).clone().requires_grad_()
    dist = Beta(1)(vec)
    torch.manual_seed(6)
    dist.rsample().mean().backward()
    mean = Beta(1)(again := vec.detach()[:1].clone().requires_grad_()).mean
    mean.sum().backward()
    torch.testing.assert_close(vec.grad.sum(0), again.grad[0], rtol=0.1, atol=2e-3)  # d E[a], two ways
    sample = dist.sample()
    assert not sample.requires_grad
    torch.testing.assert_close(-dist.log_prob(sample).mean(), dist.entropy().mean(), rtol=0, atol=0.02)
    for bound in (torch.ones(1), -torch.ones(1)):
        assert torch.isfinite(Beta(1)(torch.tensor([50.0, -50.0])).log_prob(bound)).all()
    with pytest.raises(ValueError, match="alpha_low must be positive, got alpha_low=0"):
        Beta(1, alpha_low=0.0)
    with pytest.raises(ValueError, match=r"clip_actions_on_log_prob must be within \(-1, 1\), got \(-1, 1\)"):
        Beta(1, clip_actions_on_log_prob=(-1, 1))


def test_gmm_has_several_modes_and_no_gradient_through_samples():
    far = torch.tensor([-1.0, 1.0, -9.0, -9.0, 0.0, 0.0])  # two narrow modes of equal weight
    dist = GMM(1, gmm_modes=2)(far.expand(2000, 6))
    sample = dist.sample()
    assert 0.45 < float((sample > 0).float().mean()) < 0.55
    torch.testing.assert_close(sample.abs(), torch.full_like(sample, math.tanh(1.0)), rtol=0, atol=0.01)
    with pytest.raises(NotImplementedError, match="GMMOutput has no reparametrised sample"):
        dist.sample_vector(grad=True)
    assert not GMM.actions_differentiable
    vec = torch.randn(7, GMM(3).input_dimension, requires_grad=True)
    loss = GMM(3)(vec).log_prob(torch.ones(7, 3))
    assert torch.isfinite(loss).all()
    loss.sum().backward()
    assert torch.isfinite(vec.grad).all()
    with pytest.raises(ValueError, match="gmm_modes must be at least 1, got gmm_modes=0"):
        GMM(3, gmm_modes=0)
    with pytest.raises(ValueError, match="std_low must be positive, got std_low=0"):
        GMM(3, std_low=0)


@pytest.mark.parametrize("make", [TanhGaussian, Beta, GMM])
def test_an_actor_of_any_continuous_distribution(make):
    actor = Actor(D, A, False, GAMMAS, continuous_dist_type=make)
    pi = actor(torch.randn(B, L, D), log_dict=(log := {}))
    assert pi.sample_action(True).shape == pi.sample_action(False).shape == (B, L, G, A)
    assert log
    assert all(torch.isfinite(v) and not v.requires_grad for v in log.values())
    pi.log_prob_of_vector(pi.sample()).sum().backward()
    assert all(torch.isfinite(p.grad).all() for p in actor.parameters())


def test_half_precision_parameters_give_full_precision_distributions():
    for kind in (Discrete(4), TanhGaussian(2), Multibinary(4), Beta(2), GMM(2, gmm_modes=2)):
        dist = kind(torch.randn(3, kind.input_dimension).bfloat16())
        assert dist.log_prob(dist.sample()).dtype == torch.float32


# PopArt


def test_popart_keeps_denormalised_values_and_ignores_what_is_masked():
    torch.manual_seed(3)
    net, q = PopArtLayer(3), torch.randn(2, 4, 2, 3, 1)
    mask = torch.rand(2, 4, 1, 1, 1) > 0.4
    before = net(q, normalized=False)
    target = 50 + 10 * torch.randn(2, 4, 1, 3, 1)
    target[~mask.expand_as(target)] = float("nan")
    net.update_stats(target, mask)
    assert (net.mu > 1).all()
    assert torch.isfinite(net.mu).all()
    torch.testing.assert_close(net(q, normalized=False), before, rtol=1e-4, atol=1e-4)
    for _ in range(20_000 // 10):
        net.update_stats(target, mask)
    torch.testing.assert_close(net(q, normalized=False), before, rtol=1e-3, atol=1e-3)
    real = net.normalize_values(target)[mask.expand_as(target)]
    assert abs(real.mean()) < 1.0


def test_popart_with_nothing_to_learn_from_stays():
    net = PopArtLayer(2)
    before = {k: v.clone() for k, v in net.state_dict().items()}
    net.update_stats(torch.randn(2, 3, 1, 2, 1), torch.zeros(2, 3, 1, 1, 1, dtype=torch.bool))
    net.update_stats(torch.full((2, 3, 1, 2, 1), float("inf")), torch.ones(2, 3, 1, 1, 1))
    for k, v in net.state_dict().items():
        assert v.equal(before[k]), k


def test_popart_disabled_is_the_identity():
    net, x = PopArtLayer(2, enabled=False), torch.randn(2, 3, 1, 2, 1)
    net.update_stats(100 * x, torch.ones_like(x))
    assert net(x) is x
    assert net(x, normalized=False) is x
    assert net.normalize_values(x) is x
    assert net.sigma.tolist() == [[1.0], [1.0]]
    assert net.mu.tolist() == [[0.0], [0.0]]


def test_popart_refusals():
    with pytest.raises(ValueError, match="gammas must be at least 1, got gammas=0"):
        PopArtLayer(0)
    with pytest.raises(ValueError, match=r"beta must be in \(0, 1\), got beta=1.5"):
        PopArtLayer(1, beta=1.5)
    with pytest.raises(ValueError, match=r"init_nu must be positive, got init_nu=0.0"):
        PopArtLayer(1, init_nu=0.0)
