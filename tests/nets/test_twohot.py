"""Critics that classify returns: labels, values, initial values, refusals."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from amago.nets import twohot
from amago.nets.actor_critic import NCriticsTwoHot
from amago.nets.twohot import Bins, hl_gauss, two_hot

GAMMAS = torch.tensor([0.5, 0.9, 0.999])


def bins(low=-100.0, high=500.0, n=32, use_symlog=True, labels="twohot", sigma=0.75):
    return Bins(low, high, n, use_symlog, labels, sigma)


@given(x=st.floats(-9.0, 9.0), n=st.integers(2, 200))
@settings(max_examples=100, deadline=None)
def test_two_hot_is_on_two_neighbours_whose_mean_is_the_number(x, n):
    centers = torch.linspace(-7.0, 7.0, n, dtype=torch.float64)
    label = two_hot(torch.tensor([x], dtype=torch.float64), centers)
    on = label.nonzero()[:, 0]
    assert len(on) in (1, 2)
    assert on[-1] - on[0] == len(on) - 1
    assert label.sum().item() == pytest.approx(1.0)
    assert (label * centers).sum().item() == pytest.approx(min(max(x, -7.0), 7.0), abs=1e-9)


@given(x=st.floats(-6.9, 6.9), sigma=st.floats(0.3, 2.0))
@settings(max_examples=50, deadline=None)
def test_hl_gauss_is_the_mass_of_a_normal_distribution_in_each_bin(x, sigma):
    centers = torch.linspace(-7.0, 7.0, 15, dtype=torch.float64)  # one apart
    label = hl_gauss(torch.tensor([x], dtype=torch.float64), centers, sigma)
    mass = [
        0.5 * (math.erf((c + 0.5 - x) / (sigma * math.sqrt(2))) - math.erf((c - 0.5 - x) / (sigma * math.sqrt(2))))
        for c in range(-7, 8)
    ]
    assert label.tolist() == pytest.approx([m / sum(mass) for m in mass], abs=1e-9)


@pytest.mark.parametrize("labels", ["twohot", "hlgauss"])
@pytest.mark.parametrize("use_symlog", [True, False], ids=["symlog", "linear"])
def test_a_perfect_classifier_says_the_return(use_symlog, labels):
    """A bias of 1% of the value would grow without end by bootstrapping: 0.99 x 1.01 > 0.999."""
    returns = torch.tensor([-20.0, -3.0, 0.0, 0.5, 42.0, 150.0])[:, None]
    b = bins(use_symlog=use_symlog, labels=labels)
    torch.testing.assert_close(b.value(b.labels(returns).double().clamp(min=1e-30).log()), returns, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("labels", ["twohot", "hlgauss"])
def test_the_loss_of_a_target_that_is_no_number_is_none(labels):
    """And no index out of bounds, which would end the process on a GPU."""
    b, target = bins(labels=labels), torch.tensor([[math.nan], [1.0], [math.inf], [-math.inf]])
    loss = b.cross_entropy(torch.zeros(4, 32), target)
    assert loss[0].isnan()
    assert loss[1].isfinite()


def test_what_lies_beyond_the_bins():
    b = bins()
    returns = torch.tensor([-1e4, -100.0, 500.0, 501.0])[:, None]
    assert b.beyond(returns)[:, 0].tolist() == [True, False, False, True]
    assert b.labels(returns)[0].argmax() == 0
    assert b.labels(returns)[3].argmax() == 31
    blurred = bins(labels="hlgauss").labels(returns)
    assert blurred.argmax(-1).tolist() == [0, 0, 31, 31]
    torch.testing.assert_close(blurred.sum(-1), torch.ones(4))


@pytest.mark.parametrize("value", [-90.0, 0.0, 3.5, 499.0])
@pytest.mark.parametrize("use_symlog", [True, False])
def test_initial_values(value, use_symlog):
    options = {"min_return": -100.0, "max_return": 500.0, "output_bins": 32, "init_value": value, "use_symlog": use_symlog}
    net = NCriticsTwoHot(8, 4, False, GAMMAS, 2, 16, **options)
    state, action = torch.randn(2, 5, 8), torch.randn(3, 2, 5, 3, 4)
    said = net.bin_dist_to_raw_vals(net(state, action))
    torch.testing.assert_close(said, torch.full_like(said, value), rtol=1e-3, atol=1e-3)
    net(state, action).logits.square().mean().backward()
    assert net.net.output_layer.weight.grad.any()  # and it learns from there


def test_without_an_initial_value_they_begin_near_zero():
    torch.manual_seed(0)
    net = NCriticsTwoHot(8, 4, True, GAMMAS)
    said = net.bin_dist_to_raw_vals(net(torch.randn(2, 5, 8), torch.randn(1, 2, 5, 3, 4)))
    assert said.abs().max() <= 5.0


@pytest.mark.parametrize("kind", ["discrete", "continuous", "multibinary"])
def test_classifying_critics_read_every_action_as_a_vector(kind):
    torch.manual_seed(0)
    net = NCriticsTwoHot(8, 4, kind == "discrete", GAMMAS, d_hidden=16, output_bins=9)
    state, log = torch.randn(2, 5, 8), {}
    shared = torch.rand(1, 2, 5, 1, 4)
    logits = net(state, shared, log_dict=log).logits
    assert logits.shape == (1, 2, 5, 4, 3, 9)
    torch.testing.assert_close(logits, net(state, shared.expand(1, 2, 5, 3, 4)).logits, rtol=1e-4, atol=1e-5)
    assert sorted(log) == ["Q(s, a) (raw)", "Q(s, a) std. over critics (raw)"]
    assert not any(k.startswith("bins") for k in net.state_dict())


@pytest.mark.parametrize(("bit", "step"), [(1.0, -1), (0.0, 1)])
def test_a_sampled_bit_gets_its_gradient_although_it_is_at_the_bound(bit, step):
    net = NCriticsTwoHot(8, 4, False, GAMMAS, d_hidden=16, output_bins=9)
    torch.nn.init.normal_(net.net.output_layer.weight)
    state = torch.randn(2, 5, 8)
    action = torch.full((1, 2, 5, 3, 4), bit, requires_grad=True)
    net.frozen(state, action).logits.square().sum().backward()
    near = (action.detach() + 0.01 * step).requires_grad_()
    net.frozen(state, near).logits.square().sum().backward()
    assert (action.grad != 0).all()
    assert torch.nn.functional.cosine_similarity(action.grad.flatten(), near.grad.flatten(), dim=0) > 0.9


@pytest.mark.parametrize("labels", ["twohot", "hlgauss"])
def test_cross_entropy_and_values_in_blocks(monkeypatch, labels):
    """Logits in the critics' memory layout, targets broadcast over critics; gradients, and gradients of those."""
    monkeypatch.setattr(twohot, "_BLOCK", 64)
    b = bins(-10.0, 10.0, 8, labels=labels)
    b.double()
    logits = torch.randn(3, 5, 4, 2, 8, dtype=torch.float64).permute(1, 2, 0, 3, 4).requires_grad_()
    returns = torch.randn(5, 4, 1, 2, 1)
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)  # else finite differences would not tell anything
    label = b.labels(returns)
    want = -(label * logits.log_softmax(-1)).sum(-1, keepdim=True)
    torch.testing.assert_close(b.cross_entropy(logits, returns), want)
    assert torch.autograd.gradcheck(lambda x: b.cross_entropy(x, returns), logits)
    assert torch.autograd.gradgradcheck(lambda x: b.cross_entropy(x, returns), logits)
    torch.testing.assert_close(b.value(logits.detach()), b.value(logits).detach())
    assert b.value(torch.zeros(0, 8)).shape == (0, 1)
    loss, value = b.cross_entropy(logits, returns), b.value(logits.detach())
    b.fast = False
    torch.testing.assert_close(b.cross_entropy(logits, returns), loss)
    torch.testing.assert_close(b.value(logits.detach()), value)
