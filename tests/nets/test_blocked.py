"""Critic ensembles in blocks equal ensembles layer by layer: values, gradients, dtypes."""

import pytest
import tiny
import torch

from amago import config
from amago.nets import blocked, twohot
from amago.nets.actor_critic import NCritics, NCriticsTwoHot
from amago.nets.ff import EnsembleMLP, evaluate_action, state_part
from amago.nets.heads import outputs_of

B, L, C, G, A, D = 3, 7, 3, 4, 2, 6
GAMMAS = torch.tensor([0.1, 0.9, 0.99, 0.999])


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Several blocks and several grains in tiny cases; the last block is not full."""
    monkeypatch.setattr(blocked, "ROWS", 5 * G)
    monkeypatch.setattr(blocked, "GRAIN", 4)


def evaluate(net, state, features, action, detach=False):
    weights = net.weights(detach=detach)
    return evaluate_action(net, weights, state_part(weights, state), features, action)


def written_out(net, state, features, action):
    """Every input put together, every network on its own."""
    K, b, length, _, width = action.shape
    full = torch.cat((
        state[None, :, :, None].expand(K, b, length, G, D),
        features[:, None].expand(K, b, length, G, 1),
        action.clamp(-0.999, 0.999).expand(K, b, length, G, width),
    ), dim=-1)  # fmt: skip
    outs = []
    for c in range(C):
        h = full
        layers = [net.inp_layer, *net.core_layers, net.output_layer]
        for i, layer in enumerate(layers):
            h = h @ layer.weight[c] + layer.bias[0, 0, c]
            if i + 1 < len(layers) and net.norms is not None:
                norm = net.norms[i]
                h = (h - h.mean(-1, keepdim=True)) / (h.var(-1, correction=0, keepdim=True) + 1e-5).sqrt()
                h = h * norm.weight[c, 0] + norm.bias[c, 0]
            h = net.activation(h) if i + 1 < len(layers) else h
        outs.append(h)
    return torch.stack(outs, dim=3)


def network(n_layers, outputs, activation="leaky_relu", normalization="none"):
    net = EnsembleMLP(C, D + 1 + A, 8, n_layers, outputs, activation=activation, normalization=normalization).double()
    for norm in net.norms or ():
        for p in norm.parameters():
            p.data += torch.randn_like(p)
    return net


@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize("normalization", ["none", "layer"])
@pytest.mark.parametrize(("n_layers", "activation"), [(1, "relu"), (3, "leaky_relu"), (3, "gelu")])
@pytest.mark.parametrize(("K", "shared"), [(1, False), (2, False), (1, True), (2, True)])
def test_values_and_all_gradients(K, shared, n_layers, activation, normalization, fast):
    torch.manual_seed(0)
    net = network(n_layers, 5, activation, normalization)
    net.fast = fast
    state = torch.randn(B, L, D, dtype=torch.float64, requires_grad=True)
    action = (torch.rand(K, B, L, 1 if shared else G, A, dtype=torch.float64) * 1.8 - 0.9).requires_grad_()
    features = torch.rand(G, dtype=torch.float64)
    inputs = [state, action, *net.parameters()]
    got, want = evaluate(net, state, features, action), written_out(net, state, features, action)
    torch.testing.assert_close(got, want)
    weigh = torch.randn_like(want)
    weigh[:, 1, 2:] = 0.0  # what is padding has no gradient
    for a, b in zip(torch.autograd.grad((got * weigh).sum(), inputs), torch.autograd.grad((want * weigh).sum(), inputs)):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("normalization", ["none", "layer"])
@pytest.mark.parametrize("shared", [False, True])
def test_with_parameters_held_out_the_gradient_is_that_of_the_rows_that_have_one(shared, normalization):
    """The least value over critics, whose gradient reaches one critic of each row."""
    torch.manual_seed(1)
    net = network(2, 1, normalization=normalization)
    state = torch.randn(B, L, D, dtype=torch.float64, requires_grad=True)
    action = (torch.rand(2, B, L, 1 if shared else G, A, dtype=torch.float64) * 1.8 - 0.9).requires_grad_()
    features = torch.rand(G, dtype=torch.float64)
    got = evaluate(net, state, features, action, detach=True).amin(dim=3)
    want = written_out(net, state, features, action).amin(dim=3)
    for a, b in zip(torch.autograd.grad(got.sum(), (state, action)), torch.autograd.grad(want.sum(), (state, action))):
        torch.testing.assert_close(a, b)
        assert b.abs().sum() > 0


def test_backward_twice_is_refused_and_possible_without_blocks():
    net = EnsembleMLP(C, D + 1 + A, 8, 2, 1)
    args = net, torch.randn(B, L, D), torch.rand(G), torch.rand(1, B, L, G, A, requires_grad=True)
    with pytest.raises(RuntimeError, match=r"bind amago\.config\.fast_paths\.enabled = False"):
        torch.autograd.grad(evaluate(*args).sum(), args[-1], create_graph=True)
    config.bind({"amago.config.fast_paths.enabled": False})
    args = EnsembleMLP(C, D + 1 + A, 8, 2, 1), *args[1:]
    (grad,) = torch.autograd.grad(evaluate(*args).sum(), args[-1], create_graph=True)
    grad.square().sum().backward()
    assert args[0].core_layers[0].weight.grad.any()


@pytest.mark.parametrize("normalization", ["none", "layer"])
def test_bf16_errs_no_more_than_layer_by_layer_and_gradients_come_in_float32(normalization):
    torch.manual_seed(3)
    net, features = EnsembleMLP(C, D + 1 + A, 32, 2, 1, normalization=normalization), torch.rand(G)
    state, action = torch.randn(B, L, D, requires_grad=True), (torch.rand(1, B, L, G, A) - 0.5).requires_grad_()
    weigh = torch.randn(1, B, L, C, G, 1)

    def run(fast, half):
        net.fast = fast
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=half):
            out = evaluate(net, state, features, action)
        return [out, *torch.autograd.grad((out.float() * weigh).sum(), [state, action, *net.parameters()])]

    for exact, blocks, layers in zip(run(True, False), run(True, True), run(False, True)):
        assert blocks.dtype == torch.float32
        assert (blocks - exact).norm() < 2.0 * (layers.float() - exact).norm() + 1e-3 * exact.norm()


@pytest.mark.parametrize("cls", [NCritics, NCriticsTwoHot])
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("grad", [False, True])
def test_stored_and_chosen_actions_evaluated_together_are_as_if_apart(cls, shared, grad):
    torch.manual_seed(4)
    net = cls(D, A, False, GAMMAS, num_critics=C, d_hidden=8)
    torch.nn.init.normal_(net.net.output_layer.weight)
    value = net.bins.value if cls is NCriticsTwoHot else torch.Tensor.float
    state = torch.randn(B, L, D, requires_grad=True)
    stored, chosen = torch.rand(B, L, 1 if shared else G, A), torch.rand(2, B, L, G, A, requires_grad=grad)
    out, values = net.evaluate(state, stored, chosen, value)
    same = torch.log_softmax if cls is NCriticsTwoHot else torch.mul  # logits are normalised, or not
    torch.testing.assert_close(same(out, -1), same(outputs_of(net(state, stored[None]))[0], -1))
    torch.testing.assert_close(values, value(outputs_of(net(state, chosen))))
    assert values.requires_grad == grad
    if grad:
        assert torch.autograd.grad(values.sum(), chosen, retain_graph=True)[0].any()
        unused = torch.autograd.grad(values.sum(), [state, *net.parameters()], retain_graph=True, allow_unused=True)
        assert all(g is None for g in unused)
    assert all(g.any() for g in torch.autograd.grad(out.square().sum(), [state, *net.parameters()]))


def test_a_forward_of_ones_own_is_called_by_every_method():
    class Doubled(NCritics):
        def forward(self, state, action, log_dict=None):
            return 2.0 * super().forward(state, action, log_dict)

    net = Doubled(D, A, False, GAMMAS, num_critics=C, d_hidden=8)
    state, action, drawn = torch.randn(B, L, D), torch.rand(1, B, L, G, A), torch.tensor([1])
    want = net(state, action)
    out, values = net.evaluate(state, action[0], action, torch.Tensor.float)
    torch.testing.assert_close(out, want[0])
    torch.testing.assert_close(values, want)
    torch.testing.assert_close(net.evaluate_subset(state, action, drawn), want[:, :, :, drawn])
    assert NCritics.fused
    assert not Doubled.fused
    assert not type("Mixed", (type("Mixin", (), {"forward": Doubled.forward}), NCritics), {}).fused
    assert type("Renamed", (NCritics,), {}).fused


def test_critics_that_declare_it_may_be_fused_with_a_forward_of_their_own():
    class Logged(NCritics):
        fused = True

        def forward(self, state, action, log_dict=None):
            raise AssertionError("evaluate takes the shorter way")

    net = Logged(D, A, False, GAMMAS, num_critics=C, d_hidden=8)
    state, action = torch.randn(B, L, D), torch.rand(1, B, L, G, A)
    out, _ = net.evaluate(state, action[0], action, torch.Tensor.float)
    torch.testing.assert_close(out, NCritics.forward(net, state, action)[0])


def test_the_switch_is_read_when_a_module_is_built():
    with config.temporary({"amago.config.fast_paths.enabled": False}):
        plain = tiny.agent(tiny.pendulum())
    fast = tiny.agent(tiny.pendulum())
    for agent, expected in ((plain, False), (fast, True)):
        assert {m.fast for m in agent.modules() if isinstance(m, (EnsembleMLP, twohot.Bins))} == {expected}
