"""The selective scan against a sequential oracle, and the block against the paper's formulas written out."""

import pytest
import torch

from amago.nets.mamba import Mamba, selective_scan
from amago.nets.traj_encoders import MambaTrajEncoder

here = torch.get_default_device  # tests/gpu runs these tests with another one


def sequential(x, dt, A, B, C, h=None):
    """One timestep after another. x, dt: (B, L, D); A: (D, N); B, C: (B, L, N); h: (B, N, D)."""
    h = torch.zeros(x.shape[0], A.shape[1], x.shape[2], dtype=x.dtype) if h is None else h
    ys = []
    for t in range(x.shape[1]):
        h = torch.exp(dt[:, t, None] * A.T) * h + B[:, t, :, None] * (dt[:, t] * x[:, t])[:, None]
        ys.append((h * C[:, t, :, None]).sum(1))
    return torch.stack(ys, 1), h


def operands(L=7, B=2, D=3, N=4, dtype=torch.float64):
    torch.manual_seed(0)
    x, b, c = torch.randn(B, L, D), torch.randn(B, L, N), torch.randn(B, L, N)
    found = (x, torch.rand(B, L, D), -3 * torch.rand(D, N), b, c)
    return [z.to(dtype).requires_grad_() for z in found]


@pytest.mark.parametrize("chunk", [1, 3, 7, 50])
def test_scan_and_its_gradient(chunk):
    args = operands()
    expected, last = sequential(*args)
    y, none = selective_scan(*args, chunk=chunk)
    assert none is None
    torch.testing.assert_close(y, expected, rtol=1e-12, atol=1e-12)
    weight = torch.randn_like(y)
    for got, wanted in zip(torch.autograd.grad((y * weight).sum(), args), torch.autograd.grad((expected * weight).sum(), args)):
        torch.testing.assert_close(got, wanted, rtol=1e-9, atol=1e-9)
    assert torch.autograd.gradcheck(lambda *z: selective_scan(*z, chunk=chunk)[0], args)
    y, state = selective_scan(*args, h0=torch.zeros(2, 4, 3), chunk=chunk)
    torch.testing.assert_close(state, last, rtol=1e-12, atol=1e-12)
    assert not state.requires_grad


@pytest.mark.parametrize("split", [1, 4, 6])
def test_scan_goes_on_from_a_state(split):
    args = operands()
    expected, last = sequential(*args)
    x, dt, A, B, C = args
    first, h = selective_scan(x[:, :split], dt[:, :split], A, B[:, :split], C[:, :split], torch.zeros(2, 4, 3).double(), 2)
    second, h = selective_scan(x[:, split:], dt[:, split:], A, B[:, split:], C[:, split:], h.detach(), 2)
    torch.testing.assert_close(torch.cat((first, second), 1), expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(h, last, rtol=1e-12, atol=1e-12)


def test_strong_decay_over_a_long_sequence_stays_finite():
    """dt x A of -200 a step, where cumulative products would underflow to 0 / 0."""
    x, _, _, B, C = operands(L=300, dtype=torch.float32)
    dt, A = torch.full_like(x, 10.0), torch.tensor([[-20.0, -5.0, -1e-3, 0.0]]).repeat(3, 1)
    for z in (dt, A):
        z.requires_grad_()
    y, _ = selective_scan(x, dt, A, B, C)
    torch.testing.assert_close(y, sequential(x, dt, A, B, C)[0], rtol=1e-4, atol=1e-3)
    y.sum().backward()
    assert all(torch.isfinite(z.grad).all() for z in (x, dt, A, B, C))


def written_out(net, u):
    """One sequence (L, d_model) through a `Mamba` in loops, from the paper's section 3."""
    w = {k: v.detach() for k, v in net.state_dict().items()}
    D, N, K = net.d_inner, net.d_state, net.d_conv
    xz = u @ w["in_proj.weight"].T
    x, z = xz[:, :D], xz[:, D:]
    conv = torch.zeros_like(x)
    for t in range(len(u)):
        for k in range(K):
            if t - (K - 1) + k >= 0:
                conv[t] += w["conv1d.weight"][:, 0, k] * x[t - (K - 1) + k]
    conv = conv + w["conv1d.bias"]
    x = conv * torch.sigmoid(conv)
    h, out = torch.zeros(D, N, dtype=u.dtype), []
    for t in range(len(u)):
        low, b, c = (x[t] @ w["x_proj.weight"].T).split((net.dt_rank, N, N))
        dt = torch.log1p(torch.exp(low @ w["dt_proj.weight"].T + w["dt_proj.bias"]))
        h = torch.exp(-dt[:, None] * w["A_log"].exp()) * h + (dt * x[t])[:, None] * b
        out.append((h @ c + w["D"] * x[t]) * z[t] * torch.sigmoid(z[t]))
    return torch.stack(out) @ w["out_proj.weight"].T


@pytest.mark.parametrize(("d_conv", "expand"), [(4, 2), (1, 1), (3, 4)])
def test_block_against_the_formulas(d_conv, expand):
    torch.manual_seed(1)
    net = Mamba(18, d_state=5, d_conv=d_conv, expand=expand).double()
    u = torch.randn(3, 11, 18, dtype=torch.float64)
    got = net(u)
    for b in range(3):
        torch.testing.assert_close(got[b].detach(), written_out(net, u[b]), rtol=1e-9, atol=1e-9)


def times(B, L):
    return torch.arange(L)[None, :, None].expand(B, -1, 1)


def test_half_precision():
    torch.manual_seed(3)
    net = MambaTrajEncoder(5, 8, d_model=16, d_state=4, n_layers=2)
    x = torch.randn(2, 7, 5)
    exact = net(x, times(2, 7))[0].detach()
    with torch.autocast(here().type, dtype=torch.bfloat16):
        rough, _ = net(x, times(2, 7))
        hidden = net.init_hidden_state(2, here())
        stepped = torch.cat([net(x[:, t : t + 1], times(2, 1), hidden)[0] for t in range(7)], 1)
    assert 0 < (rough.float() - exact).abs().max() < 0.15
    assert (stepped.float() - exact).abs().max() < 0.15
    rough.sum().backward()
    assert all(p.grad.dtype == torch.float32 and torch.isfinite(p.grad).all() for p in net.parameters())
    half = net.bfloat16()
    hidden = half.init_hidden_state(2, here())
    assert (hidden.conv.dtype, hidden.ssm.dtype) == (torch.bfloat16, torch.float32)
    assert half(x.bfloat16(), times(2, 7))[0].dtype == torch.bfloat16
    assert half(x[:, :1].bfloat16(), times(2, 1), hidden)[0].dtype == torch.bfloat16
