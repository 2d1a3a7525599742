"""Weights that a policy has packed follow their parameters, and give what plain products give."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from amago.nets.cpu import packed
from amago.nets.cpu.packed import Linear, linear, pack
from amago.nets.ff import MLP, FFBlock, InputNorm
from amago.nets.traj_encoders import FFTrajEncoder, GRUTrajEncoder, TformerTrajEncoder
from amago.ops import ema_update

WIDE = 264  # of weights that are worth packing
needs_onednn = pytest.mark.skipif(packed._onednn() is None, reason="this PyTorch cannot pack weights")


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def plain(layer, x):
    return F.linear(x, layer.weight.detach(), layer.bias.detach())


@pytest.fixture
def layer():
    return Linear(WIDE, WIDE + 8).eval()


@pytest.mark.parametrize("shape", [(1,), (3,), (17,), (2, 1), (2, 3, 4)])
def test_the_product(layer, shape):
    x = torch.randn(*shape, WIDE)
    with torch.no_grad():
        torch.testing.assert_close(layer(x), plain(layer, x), rtol=1e-5, atol=1e-5)
        strided = torch.randn(*shape, 2 * WIDE)[..., ::2]
        torch.testing.assert_close(layer(strided), plain(layer, strided), rtol=1e-5, atol=1e-5)
    with torch.inference_mode():
        torch.testing.assert_close(layer(x), plain(layer, x), rtol=1e-5, atol=1e-5)


@needs_onednn
def test_what_is_packed():
    with torch.no_grad():
        assert pack(torch.randn(WIDE, WIDE)).is_mkldnn
        small, double, half = torch.randn(8, 8), torch.randn(WIDE, WIDE).double(), torch.randn(WIDE, WIDE).bfloat16()
        for weight in (small, double, half):
            assert pack(weight) is weight
        with torch.autocast("cpu", torch.bfloat16):
            weight = torch.randn(WIDE, WIDE)
            assert pack(weight) is weight
    weight = torch.randn(WIDE, WIDE)
    assert pack(weight) is weight, "gradients are on"


def test_without_onednn(layer, monkeypatch):
    monkeypatch.setattr(packed, "_onednn", lambda: None)
    x = torch.randn(2, WIDE)
    with torch.no_grad():
        weight = torch.randn(WIDE, WIDE)
        assert pack(weight) is weight
        assert torch.equal(linear(x, weight, None), F.linear(x, weight))
        assert torch.equal(layer(x), plain(layer, x))


def test_an_operation_that_fails_is_done_without(monkeypatch):
    def broken(*args):
        raise RuntimeError("no such instruction")

    packed._onednn.cache_clear()
    monkeypatch.setattr(torch.ops.mkldnn, "_reorder_linear_weight", broken, raising=False)
    try:
        assert packed._onednn() is None
    finally:
        monkeypatch.undo()
        packed._onednn.cache_clear()


def optimizer_step(module, kind, **options):
    optimizer = kind(module.parameters(), lr=0.1, **options)
    for p in module.parameters():
        p.grad = torch.randn_like(p)
    optimizer.step()


def load(module):
    module.load_state_dict({k: torch.randn_like(v) for k, v in module.state_dict().items()})


def assign(module):
    module.load_state_dict({k: torch.randn_like(v) for k, v in module.state_dict().items()}, assign=True)


def write_data(module):
    module.train()
    for p in module.parameters():
        p.data = torch.randn_like(p)
    module.eval()


def in_place(module):
    with torch.no_grad():
        for p in module.parameters():
            p.mul_(1.5).add_(0.1)


def follow(module):
    leader = copy.deepcopy(module)
    in_place(leader)
    ema_update(module, leader, 0.5)


def replace(module):
    for owner in list(module.modules()):
        for name, p in list(owner._parameters.items()):
            if p is not None:
                setattr(owner, name, nn.Parameter(torch.randn_like(p)))


CHANGES = {
    "SGD": lambda m: optimizer_step(m, torch.optim.SGD),
    "AdamW": lambda m: optimizer_step(m, torch.optim.AdamW),
    "AdamW, foreach": lambda m: optimizer_step(m, torch.optim.AdamW, foreach=True),
    "AdamW, fused": lambda m: optimizer_step(m, torch.optim.AdamW, fused=True),
    "EMA": follow,
    "load_state_dict": load,
    "load_state_dict(assign=True)": assign,
    "there and back through float64": lambda m: in_place(m.double().float()),
    "in place": in_place,
    "through .data, while training": write_data,
    "other parameters": replace,
}
MODULES = {
    "linear": lambda: Linear(WIDE, WIDE + 8),
    "mlp": lambda: MLP(WIDE, WIDE, 2, WIDE),
    "block": lambda: FFBlock(WIDE, WIDE),
}
ENCODERS = {
    "ff": lambda: FFTrajEncoder(WIDE, 4, d_model=WIDE, d_ff=WIDE),
    "gru": lambda: GRUTrajEncoder(WIDE, 4, d_hidden=WIDE, d_output=WIDE),
    "transformer": lambda: TformerTrajEncoder(WIDE, 4, d_model=WIDE, d_ff=WIDE + 64, n_heads=4, n_layers=2),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("module", MODULES)
def test_a_layer_follows_its_parameters(module, change):
    layer, x = MODULES[module]().eval(), torch.randn(4, WIDE)
    with torch.inference_mode():
        before = layer(x)
    CHANGES[change](layer)
    expected = layer(x).detach()  # with gradient nothing is packed
    with torch.inference_mode():
        after = layer(x)
    assert not torch.allclose(before, after, atol=1e-3), "the change does something"
    torch.testing.assert_close(after, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))


def acted(encoder, seq):
    """What a fresh memory gives, step by step."""
    memory, times = (
        encoder.init_hidden_state(len(seq), "cpu"),
        torch.arange(seq.shape[1])[None, :, None].expand(len(seq), -1, -1),
    )
    with torch.inference_mode():
        return torch.cat([encoder(seq[:, t : t + 1], times[:, t : t + 1], memory)[0] for t in range(seq.shape[1])], dim=1)


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("encoder", ENCODERS)
def test_a_sequence_model_that_acts_follows_its_parameters(encoder, change):
    encoder, seq = ENCODERS[encoder]().eval(), torch.randn(3, 4, WIDE)
    before = acted(encoder, seq)
    CHANGES[change](encoder)
    expected, _ = encoder(seq, torch.arange(4)[None, :, None].expand(3, -1, -1))
    assert not torch.allclose(before, expected, atol=1e-3), "the change does something"
    torch.testing.assert_close(acted(encoder, seq), expected.detach(), rtol=1e-3, atol=1e-3)


def test_the_scale_of_inputs_follows_its_statistics():
    norm, x = InputNorm(3).eval(), torch.randn(2, 1, 3)
    with torch.inference_mode():
        first = norm(x)
        assert torch.equal(first, norm(x))
    norm.train()(5.0 * torch.randn(50, 2, 3))
    expected = norm.eval()(x)
    with torch.inference_mode():
        assert torch.equal(norm(x), expected)
        assert not torch.allclose(first, expected)
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(norm(x), expected), "in float32, whatever autocast says"
        norm.load_state_dict({k: v + 0.5 for k, v in norm.state_dict().items()})
        changed = norm(x)
    assert torch.equal(changed, norm(x))
    assert not torch.equal(changed, expected)


def test_copies_pack_their_own(layer):
    x = torch.randn(2, WIDE)
    with torch.inference_mode():
        layer(x)
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        in_place(other)
        with torch.inference_mode():
            torch.testing.assert_close(other(x), plain(other, x), rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(layer(x), plain(layer, x), rtol=1e-5, atol=1e-5)


def test_nothing_is_packed_twice(layer, monkeypatch):
    packs = []
    monkeypatch.setattr(packed, "pack", lambda weight: packs.append(1) or weight)
    with torch.inference_mode():
        for _ in range(3):
            layer(torch.randn(2, WIDE))
    assert len(packs) == 1


def test_gradients_are_those_of_a_plain_layer(layer):
    x = torch.randn(2, WIDE, requires_grad=True)
    layer(x).square().sum().backward()
    y = x.detach().requires_grad_()
    weight, bias = (p.detach().clone().requires_grad_() for p in (layer.weight, layer.bias))
    F.linear(y, weight, bias).square().sum().backward()
    assert torch.equal(x.grad, y.grad)
    assert torch.equal(layer.weight.grad, weight.grad)
