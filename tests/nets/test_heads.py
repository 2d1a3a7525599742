"""Actors, critics, PopArt and distributions: gradients, slow references, refusals."""

import math

import pytest
import torch

from amago.nets.actor_critic import Actor, PopArtLayer, ResidualActor
from amago.nets.policy_dists import GMM, Beta, Discrete, Multibinary, TanhGaussian

GAMMAS = torch.tensor([0.5, 0.9, 0.999])
B, L, K, C, G, A, D = 2, 5, 3, 4, 3, 4, 8


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


@pytest.mark.parametrize("make", [TanhGaussian, Beta, GMM])
def test_densities_on_an_interval_integrate_to_one_and_give_the_samples(make):
    torch.manual_seed(5)
    kind = make(1, gmm_modes=3) if make is GMM else make(1, clip_actions_on_log_prob=(-0.999999, 0.999999))
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
