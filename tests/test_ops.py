import numpy as np
import pytest
import torch
from golden import load
from hypothesis import given, settings
from hypothesis import strategies as st

from amago import ops
from amago.agent import binary_filter, exp_filter
from amago.nets import ranks


def test_symlog_golden():
    arrays, _, _ = load("symlog")
    x = torch.as_tensor(arrays["x"])
    torch.testing.assert_close(ops.symlog(x), torch.as_tensor(arrays["symlog"]), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(ops.symexp(ops.symlog(x)), torch.as_tensor(arrays["symexp_of_symlog"]), rtol=1e-4, atol=1e-5)


def test_filters_golden():
    arrays, _, _ = load("filters")
    adv, no_bounds = torch.as_tensor(arrays["adv"]), {"clip_weights_low": None, "clip_weights_high": None}
    for name, got in {
        "binary": binary_filter(adv),
        "binary_thr": binary_filter(adv, threshold=0.5),
        "exp": exp_filter(adv, **no_bounds),
        "exp_clip": exp_filter(adv, beta=0.5, clip_weights_low=float(np.exp(-1)), clip_weights_high=2.0),
    }.items():
        torch.testing.assert_close(got, torch.as_tensor(arrays[name]), rtol=1e-5, atol=1e-6, msg=name)


@pytest.mark.parametrize("n", [1, 2, 3, 5])
def test_n_step_golden(n):
    a = {k: torch.as_tensor(v) for k, v in load("nstep")[0].items()}
    got = ops.n_step_return(a["r"], a["d"], a["q"], a["gamma"], a["mask"], n=n)
    real = a["mask"].bool().expand_as(got)
    torch.testing.assert_close(got[real], a[f"n{n}"][real], rtol=1e-5, atol=1e-6)


def slow_return(r, d, v, gamma, real, n):
    """One target at a time, from the definition, in float64."""
    out = np.zeros(len(r))
    for t in range(real):
        total, factor, bootstrap = 0.0, 1.0, True
        for k in range(t, min(t + n, real)):
            total += factor * r[k]
            factor *= gamma
            if d[k]:
                bootstrap = False
                break
        out[t] = total + (factor * v[k] if bootstrap else 0.0)
    return out


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 12), st.integers(1, 7), st.integers(0, 2**31), st.floats(0.0, 1.0))
def test_n_step_equals_the_definition(length, n, seed, gamma):
    rng = np.random.default_rng(seed)
    r, v = rng.normal(size=(2, 3, length))
    real = rng.integers(1, length + 1, size=3)
    d = rng.random((3, length)) < 0.2
    mask = np.arange(length)[None] < real[:, None]
    got = ops.n_step_return(
        *(torch.as_tensor(x)[..., None, None] for x in (r, d, v)), torch.tensor([[gamma]], dtype=torch.float64),
        torch.as_tensor(mask)[..., None, None], n=n,
    )[..., 0, 0]  # fmt: skip
    for b in range(3):
        want = slow_return(r[b], d[b], v[b], gamma, real[b], n)
        np.testing.assert_allclose(got[b, : real[b]].numpy(), want[: real[b]], rtol=1e-9, atol=1e-9)


def slow_traces(r, d, v, q, c, gamma, real):
    """Targets over sequences by their definition, from the last transition back; over several discounts."""
    y = np.zeros((len(r), len(gamma)))
    for t in reversed(range(real)):
        y[t] = r[t] + gamma * (1.0 - d[t]) * v[t]
        if t + 1 < real:
            y[t] += gamma * (1.0 - d[t]) * c[t] * (y[t + 1] - q[t])
    return y


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 70), st.integers(0, 2**31), st.floats(0.0, 1.0), st.sampled_from([0.0, 0.05, 0.4]))
def test_trace_return_equals_the_definition(length, seed, gamma, ends):
    rng, gammas = np.random.default_rng(seed), np.array([gamma, 0.5, 1.0])
    r, d = rng.normal(size=(3, length)), rng.random((3, length)) < ends
    v, q, c = rng.normal(size=(3, 3, length, 3))
    c = np.minimum(np.abs(c), 1.0)
    real = rng.integers(1, length + 1, size=3)
    mask = np.arange(length)[None] < real[:, None]
    for x in (r, v, q, c):
        x[~mask] = np.nan  # what padding holds does not matter
    (r_, d_, m_), (v_, q_, c_) = ([torch.as_tensor(x) for x in xs] for xs in ((r, d, mask), (v, q, c)))
    got = ops.trace_return(
        r_[..., None, None, None], d_[..., None, None, None], *(x[:, :, None, :, None] for x in (v_, q_, c_)),
        torch.as_tensor(gammas)[:, None], m_[..., None, None, None],
    )[:, :, 0, :, 0].numpy()  # fmt: skip
    for b in range(3):
        n = real[b]
        np.testing.assert_allclose(got[b, :n], slow_traces(r[b], d[b], v[b], q[b], c[b], gammas, n)[:n], rtol=1e-9, atol=1e-9)
        assert (got[b, n:] == 0).all()


def test_n_step_refuses_zero():
    with pytest.raises(ValueError, match="n=0"):
        ops.n_step_return(*[torch.zeros(1, 2, 1)] * 3, torch.ones(1), torch.ones(1, 2, 1), n=0)


def test_masked_mean_ignores_what_is_masked_even_if_it_is_not_finite():
    x = torch.tensor([1.0, 2.0, float("nan"), float("inf")])
    assert ranks.masked_mean(x, torch.tensor([True, True, False, False])) == 1.5
    assert ranks.masked_mean(x, torch.zeros(4, dtype=torch.bool)) == 0.0
    assert ranks.masked_std(torch.tensor([1.0, 3.0, 99.0]), torch.tensor([True, True, False])) == 1.0


def test_ema_update_moves_parameters_by_tau_and_copies_buffers():
    source, target = torch.nn.BatchNorm1d(2), torch.nn.BatchNorm1d(2)
    torch.nn.init.constant_(source.weight, 3.0)
    source.running_mean.fill_(7.0)
    ops.ema_update(target, source, tau=0.25)
    torch.testing.assert_close(target.weight, torch.full((2,), 1.5))
    torch.testing.assert_close(target.running_mean, torch.full((2,), 7.0))
