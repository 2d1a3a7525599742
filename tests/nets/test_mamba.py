"""The selective scan against a sequential oracle, and the block against the paper's formulas written out."""

import math
import re
import sys
import types

import pytest
import tiny
import torch
import torch.nn.functional as F

import amago
from amago import config
from amago.cli_utils import switch_traj_encoder, use_config
from amago.nets import mamba
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


def test_memory_grows_with_the_chunk_only():
    """What is kept for the backward pass holds one state a chunk."""
    kept = []
    args = operands(L=64)
    with torch.autograd.graph.saved_tensors_hooks(lambda z: kept.append(tuple(z.shape)) or z, lambda z: z):
        selective_scan(*args, chunk=16)
    assert (4, 2, 4, 3) in kept  # 64 / 16 chunks, (B, N, D)
    assert not any(len(s) == 4 and s[0] > 4 for s in kept)


def test_chunks_fit_the_cache_of_a_cpu_and_the_memory_of_a_gpu():
    assert mamba._chunk_length(24 * 16 * 512, on_cpu=True) == 4
    assert mamba._chunk_length(24 * 16 * 512, on_cpu=False) == 64
    assert mamba._chunk_length(1, on_cpu=True) == 64
    assert mamba._chunk_length(2**30, on_cpu=False) == 4


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


def test_parameters_are_laid_out_as_those_of_mamba_ssm():
    shapes = {k: tuple(v.shape) for k, v in Mamba(32, d_state=6, d_conv=4, expand=2).state_dict().items()}
    assert shapes == {
        "A_log": (64, 6), "D": (64,), "in_proj.weight": (128, 32), "conv1d.weight": (64, 1, 4), "conv1d.bias": (64,),
        "x_proj.weight": (2 + 12, 64), "dt_proj.weight": (64, 2), "dt_proj.bias": (64,), "out_proj.weight": (32, 64),
    }  # fmt: skip


def test_the_start_remembers_ten_to_a_thousand_steps():
    net = Mamba(64)
    dt = F.softplus(net.dt_proj.bias)
    assert dt.min() > 1e-3 * 0.99
    assert dt.max() < 0.1 * 1.01
    assert 0.004 < dt.log().mean().exp() < 0.025  # geometric mean of 1e-3 and 0.1 is 0.01
    torch.testing.assert_close(net.A_log.exp()[0], torch.arange(1.0, 17.0))


def test_the_time_scales_of_the_start_can_be_chosen():
    """With larger steps of time and slower decays the same memory, and a larger gradient for what selects it."""

    def memory_and_gradient(**kwargs):
        torch.manual_seed(0)
        net = Mamba(16, d_state=1, **kwargs)
        dt = F.softplus(net.dt_proj.bias)
        (slope,) = torch.autograd.grad(dt.sum(), net.dt_proj.bias)
        return (1 / (dt * net.A_log.exp()[:, 0])).detach(), slope

    usual, usual_slope = memory_and_gradient()
    memory, slope = memory_and_gradient(dt_min=0.1, dt_max=10.0, A_scale=0.01)
    torch.testing.assert_close(memory, usual, rtol=1e-3, atol=0.0)
    assert (slope > 5 * usual_slope).all()
    net = MambaTrajEncoder(5, 8, d_model=16, dt_min=0.5, dt_max=2.0, A_scale=3e-4)
    for block in net.mambas:
        dt = F.softplus(block.mamba.dt_proj.bias)
        assert dt.min() > 0.499
        assert dt.max() < 2.001
        torch.testing.assert_close(block.mamba.A_log.exp()[3], 3e-4 * torch.arange(1.0, 17.0))


def test_the_interface_of_the_fused_kernel():
    """A stand-in with the arguments of mamba_ssm's function, (B, D, L), computes the same."""

    def selective_scan_fn(u, delta, A, B, C):
        return sequential(*(z.transpose(1, 2) for z in (u, delta)), A, *(z.transpose(1, 2) for z in (B, C)))[0].transpose(1, 2)

    args = operands()
    torch.testing.assert_close(mamba._fused(selective_scan_fn, *args), selective_scan(*args)[0])


def test_the_fused_kernel_is_not_asked_on_a_cpu(monkeypatch):
    for name in ("mamba_ssm", "mamba_ssm.ops", "mamba_ssm.ops.selective_scan_interface"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))  # without the function: asking for it would fail
    mamba._fused_scan.cache_clear()
    Mamba(8, d_state=3)(torch.randn(2, 6, 8))


def test_without_the_package_there_is_no_kernel():
    mamba._fused_scan.cache_clear()
    if "mamba_ssm" not in sys.modules:
        assert mamba._fused_scan() is None


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


def test_state_is_constant_in_size_and_updated_in_place():
    net = MambaTrajEncoder(5, 8, d_model=16, d_state=4, d_conv=3, expand=2, n_layers=2)
    hidden = net.init_hidden_state(3, here())
    assert hidden.conv.shape == (2, 3, 2, 32)
    assert hidden.ssm.shape == (2, 3, 4, 32)
    where = hidden.conv.data_ptr(), hidden.ssm.data_ptr()
    with torch.no_grad():
        for t in range(20):
            _, same = net(torch.randn(3, 1, 5), torch.full((3, 1, 1), t), hidden)
    assert same is hidden
    assert (hidden.conv.data_ptr(), hidden.ssm.data_ptr()) == where


def test_settings_and_refusals():
    settings = {}
    assert switch_traj_encoder(settings, "mamba", memory_size=24, layers=1, d_state=3, expand=3) is MambaTrajEncoder
    use_config(settings)
    config.bind({"amago.nets.traj_encoders.MambaTrajEncoder.d_conv": 2})
    net = MambaTrajEncoder(5, 8)
    assert (net.emb_dim, len(net.mambas)) == (24, 1)
    layer = net.mambas[0].mamba
    assert (layer.d_state, layer.d_conv, layer.d_inner, layer.dt_rank) == (3, 2, 72, math.ceil(24 / 16))
    with pytest.raises(ValueError, match="d_state must be at least 1, got d_state=0"):
        MambaTrajEncoder(5, 8, d_state=0)
    with pytest.raises(ValueError, match=re.escape("dt_min must be positive and at most dt_max, got dt_min=0.2, dt_max=0.1")):
        MambaTrajEncoder(5, 8, dt_min=0.2)
    with pytest.raises(ValueError, match=re.escape("A_scale must be positive, got 0.0")):
        MambaTrajEncoder(5, 8, A_scale=0.0)
    with pytest.raises(ValueError, match="hidden_state has 3 rows, but seq has a batch of 2"):
        net(torch.zeros(2, 1, 5), times(2, 1), net.init_hidden_state(3, here()))


@pytest.mark.parametrize("env_mode", ["sync", "async"])
def test_an_experiment_with_mamba_and_its_policy(env_mode, tmp_path):
    """Collected (in two halves that share one memory, if asynchronous), trained, saved, and loaded."""
    small = {"MambaTrajEncoder.d_model": 16, "MambaTrajEncoder.d_state": 4, "MambaTrajEncoder.n_layers": 1}
    config.bind(small)
    workers = {"env_workers": 1} if env_mode == "async" else {}
    e = tiny.learned(
        tmp_path, traj_encoder_type=MambaTrajEncoder, env_mode=env_mode, epochs=2, always_save_latest=True, **workers
    )
    agent = e.policy
    before, after = MambaTrajEncoder(12, 8).state_dict(), agent.traj_encoder.state_dict()
    assert {k: v.shape for k, v in before.items()} == {k: v.shape for k, v in after.items()}
    assert all(torch.isfinite(v).all() for v in after.values())
    e.close()
    policy = amago.load_policy(tmp_path / "run")
    env = tiny.tmaze()
    obs = env.reset()[0].obs
    actions = [policy.act({k: v[0] for k, v in obs.items()}, reward=0.0) for _ in range(3)]
    assert all(0 <= int(a) < 4 for a in actions)
    assert float(policy._memory.ssm.abs().sum()) > 0
