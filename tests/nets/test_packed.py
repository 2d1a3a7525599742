"""Weights that are packed or computed once while acting follow their parameters, and give the results of plain products."""

import copy
import pickle
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F
from nets.test_parity import rollout

from amago import config
from amago.nets.traj_encoders import FFTrajEncoder, GRUTrajEncoder, TformerTrajEncoder
from amago.nets.transformer import SigmaReparam
from amago.nets.utils import InputNorm, Linear
from amago.ops import ema_update

WIDE = 264  # of weights that are worth packing


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def plain(layer, x):
    return F.linear(x, layer.weight.detach(), layer.bias.detach())


@pytest.mark.parametrize("shape", [(), (0,), (1,), (3,), (17,), (2, 1), (2, 3, 4)])
def test_products(shape):
    layer = Linear(WIDE, WIDE + 8).eval()
    for x in (torch.randn(*shape, WIDE), torch.randn(*shape, 2 * WIDE)[..., ::2]):
        for context in (torch.no_grad, torch.inference_mode):
            with context():
                torch.testing.assert_close(layer(x), plain(layer, x), rtol=1e-5, atol=1e-5)


def test_other_dtypes_and_gradients_are_not_affected():
    layer, x = Linear(WIDE, WIDE).eval(), torch.randn(3, WIDE, requires_grad=True)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert layer(x).equal(plain(layer, x))
    assert layer(x).equal(plain(layer, x))
    layer(x).sum().backward()
    torch.testing.assert_close(x.grad, layer.weight.detach().sum(0).expand(3, -1))
    with torch.no_grad():
        assert layer(x).dtype == torch.float32
        layer.double()
        assert layer(x.double()).equal(plain(layer, x.double()))


def test_the_switch_gives_plain_products():
    with config.temporary({"amago.config.fast_paths.enabled": False}):
        layer = Linear(WIDE, WIDE).eval()
    x = torch.randn(3, WIDE)
    for same in (layer, copy.deepcopy(layer)):
        with torch.no_grad():
            assert same(x).equal(plain(layer, x))


def optimizer_step(module, **options):
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1, **options)
    for p in module.parameters():
        p.grad = torch.randn_like(p)
    optimizer.step()


def in_place(module):
    with torch.no_grad():
        for p in module.parameters():
            p.copy_(1.5 * p + 0.1)


def load(module, **options):
    module.load_state_dict({k: torch.randn_like(v) for k, v in module.state_dict().items()}, **options)


def follow(module):
    leader = copy.deepcopy(module)
    in_place(leader)
    ema_update(module, leader, 0.5)


def other_data(module):
    for _ in range(3):  # freed memory may be used again
        for p in module.parameters():
            p.data = torch.randn_like(p)


def data_while_training(module):
    module.train()
    for p in module.parameters():
        p.data.mul_(1.5).add_(0.1)
    module.eval()


CHANGES = {
    "AdamW": optimizer_step,
    "AdamW, fused": lambda m: optimizer_step(m, fused=True),
    "EMA": follow,
    "load_state_dict": load,
    "load_state_dict(assign=True)": lambda m: load(m, assign=True),
    "there and back through float64": lambda m: in_place(m.double().float()),
    "in place": in_place,
    "another .data": other_data,
    "in place through .data, while training": data_while_training,
}
MODULES = {"linear": lambda: Linear(WIDE, WIDE + 8), "sigma": lambda: SigmaReparam(WIDE, WIDE + 8, fast_init=True)}
ENCODERS = {
    "ff": lambda: FFTrajEncoder(WIDE, 4, d_model=WIDE, d_ff=WIDE),
    "gru": lambda: GRUTrajEncoder(WIDE, 4, d_hidden=WIDE, d_output=WIDE),
    "transformer": lambda: TformerTrajEncoder(WIDE, 4, d_model=WIDE, d_ff=WIDE, n_heads=4, n_layers=1),
    "plain transformer": lambda: TformerTrajEncoder(WIDE, 4, WIDE, 4, WIDE, 1, sigma_reparam=False),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("module", MODULES)
def test_layers_follow_their_parameters(module, change):
    layer, x = MODULES[module]().eval(), torch.randn(4, WIDE)
    with torch.inference_mode():
        before = layer(x)
    CHANGES[change](layer)
    expected = layer(x).detach()  # with gradient nothing is cached
    with torch.inference_mode():
        after = layer(x)
    assert not torch.allclose(before, after, atol=1e-3), "the change does something"
    torch.testing.assert_close(after, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))


@pytest.mark.parametrize("change", ["AdamW, fused", "EMA", "in place through .data, while training"])
@pytest.mark.parametrize("encoder", ENCODERS)
def test_sequence_models_that_act_follow_their_parameters(encoder, change):
    encoder, seq = ENCODERS[encoder]().eval(), torch.randn(16, 4, WIDE)
    with torch.inference_mode():
        before, _ = rollout(encoder, seq, [[]] * 16)
    CHANGES[change](encoder)
    expected, _ = encoder(seq, torch.arange(4)[None, :, None].expand(16, -1, -1))
    assert not torch.allclose(before, expected, atol=1e-3), "the change does something"
    with torch.inference_mode():
        after, _ = rollout(encoder, seq, [[]] * 16)
    torch.testing.assert_close(after, expected.detach(), rtol=1e-3, atol=1e-3)


def test_the_scale_of_inputs_follows_its_statistics():
    norm, x = InputNorm(3).eval(), torch.randn(2, 1, 3)
    with torch.inference_mode():
        first = norm(x)
    norm.train()(5.0 * torch.randn(50, 2, 3))
    expected = norm.eval()(x)
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
        assert norm(x).equal(expected), "in float32, whatever autocast says"
        assert not expected.allclose(first)
        norm.load_state_dict({k: v + 0.5 for k, v in norm.state_dict().items()})
        assert not norm(x).equal(expected)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda layer: pickle.loads(pickle.dumps(layer))])
def test_copies_have_caches_of_their_own(copied):
    layer, x = Linear(WIDE, WIDE).eval(), torch.randn(2, WIDE)
    with torch.inference_mode():
        layer(x)
    other = copied(layer)
    in_place(other)
    assert layer.state_dict().keys() == {"weight", "bias"}
    for each in (other, layer):
        with torch.inference_mode():
            torch.testing.assert_close(each(x), plain(each, x), rtol=1e-5, atol=1e-5)


def test_threads_share_a_layer():
    layer, wrong = Linear(WIDE, WIDE, bias=False).eval(), []

    def act(rows):  # the value for a single row is another one
        x = torch.randn(rows, WIDE)
        expected = F.linear(x, layer.weight.detach())
        with torch.inference_mode():
            wrong.extend(rows for _ in range(200) if not layer(x).allclose(expected, rtol=1e-4, atol=1e-4))

    with ThreadPoolExecutor() as threads:
        list(threads.map(act, (1, 2, 3)))
    assert not wrong
