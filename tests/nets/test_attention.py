"""Attention backends: what each sees, what its cache holds, and what happens where a kernel cannot run."""

import copy
import pickle
import warnings

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention.flex_attention import create_mask

from amago import config
from amago.nets import attention
from amago.nets.kv_cache import KVCache
from amago.nets.traj_encoders import TformerTrajEncoder
from amago.nets.transformer import (
    FlashAttention,
    FlexAttention,
    ScaledDotProductAttention,
    SelfAttention,
    SlidingWindowFlexAttention,
    SlidingWindowSinkFlexAttention,
    VanillaAttention,
)

SMALL = {"d_model": 8, "n_heads": 2, "d_ff": 8, "n_layers": 2}
KERNELS = {
    "flex": lambda: FlexAttention(),
    "flex, both ways": lambda: FlexAttention(causal=False),
    "window": lambda: SlidingWindowFlexAttention(window_size=2),
    "window, both ways": lambda: SlidingWindowFlexAttention(causal=False, window_size=1),
    "sinks": lambda: SlidingWindowSinkFlexAttention(window_size=1, sink_size=2),
}
OTHERS = {
    f"{kernel.__name__}{ways}": lambda kernel=kernel, causal=not ways: kernel(causal=causal)
    for kernel in (SelfAttention, ScaledDotProductAttention, VanillaAttention, FlashAttention)
    for ways in ("", ", both ways")
}


quiet = pytest.mark.filterwarnings("ignore:.*using PyTorch's scaled_dot_product_attention")


def times(B, L):
    return torch.arange(L)[None, :, None].expand(B, -1, 1)


PATTERNS = {
    "flex": ["1....", "11...", "111..", "1111.", "11111"],
    "flex, both ways": ["11111"] * 5,
    "window": ["1....", "11...", "111..", ".111.", "..111"],
    "window, both ways": ["11...", "111..", ".111.", "..111", "...11"],
    "sinks": ["1....", "11...", "111..", "1111.", "11.11"],
}
PATTERNS |= {name: PATTERNS["flex, both ways" if "both" in name else "flex"] for name in OTHERS}


@pytest.mark.parametrize("name", [name for name in KERNELS | OTHERS if "both ways" in name])
@quiet
def test_padding_is_not_seen(name):
    torch.manual_seed(0)
    net = (KERNELS | OTHERS)[name]()
    qkv = torch.randn(3, 2, 2, 5, 4, requires_grad=True)
    real = torch.tensor([[True] * 5, [True] * 2 + [False] * 3])
    out = net(*qkv, real=real)
    torch.testing.assert_close(out[1, :, :2], net(*qkv[:, 1:, :, :2])[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(out[0], net(*qkv[:, :1])[0], rtol=1e-5, atol=1e-5)
    out.square().sum().backward()
    assert out.isfinite().all()
    assert not qkv.grad[1:, 1, :, 2:].any()
    assert qkv.grad.isfinite().all()


def written_out(pattern, q, k, v):
    """Attention of one sequence with a pattern of "1" and ".", by loops in float64."""
    out = torch.zeros_like(q)
    for t, row in enumerate(pattern):
        seen = [i for i, c in enumerate(row) if c == "1"]
        weights = (q[:, :, t : t + 1] @ k[:, :, seen].mT / q.shape[-1] ** 0.5).softmax(-1)
        out[:, :, t] = (weights @ v[:, :, seen]).squeeze(2)
    return out


@pytest.mark.parametrize("name", KERNELS | OTHERS)
@quiet
def test_results_and_gradients_are_those_of_the_formula(name):
    torch.manual_seed(0)
    qkv = torch.randn(3, 2, 2, 5, 4, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(2, 2, 5, 4, dtype=torch.float64)
    (expected,) = torch.autograd.grad((written_out(PATTERNS[name], *qkv) * weight).sum(), qkv)
    out = (KERNELS | OTHERS)[name]()(*qkv)
    (got,) = torch.autograd.grad((out * weight).sum(), qkv)
    torch.testing.assert_close(out, written_out(PATTERNS[name], *qkv), rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", KERNELS)
def test_the_kernel_is_given_the_pattern(name, monkeypatch):
    """A stand-in for the compiled kernel, which attends to what its block mask says."""
    calls = []

    def kernel(q, k, v, score_mod, block_mask):
        calls.append(block_mask)
        mask = create_mask(block_mask.mask_mod, None, None, q.shape[2], k.shape[2], device="cpu")
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, mask)

    monkeypatch.setattr(attention, "compiled_flex_attention", lambda: kernel)
    monkeypatch.setattr(FlexAttention, "devices", ("cpu",))
    net, qkv = KERNELS[name](), torch.randn(3, 2, 2, 5, 16)
    torch.testing.assert_close(net(*qkv), written_out(PATTERNS[name], *qkv), rtol=1e-5, atol=1e-5)
    pickle.loads(pickle.dumps(copy.deepcopy(net)))(*qkv)
    assert calls[1] is calls[0], "the mask of a length is made once"


def test_a_kernel_that_fails_is_tried_once_and_replaced(monkeypatch):
    attention.warn_fallback.cache_clear()
    monkeypatch.setattr(attention, "compiled_flex_attention", lambda: attempts.append(1) or 1 / 0)
    monkeypatch.setattr(FlexAttention, "devices", ("cpu",))
    qkv, attempts, net = torch.randn(3, 2, 2, 5, 16), [], FlexAttention()
    with pytest.warns(UserWarning, match="FlexAttention: ZeroDivisionError"):
        out = net(*qkv)
    torch.testing.assert_close(out, VanillaAttention()(*qkv), rtol=1e-5, atol=1e-5)
    net(*qkv)
    assert len(attempts) == 1


def test_one_warning_in_training_and_none_in_acting():
    attention.warn_fallback.cache_clear()
    config.bind({"SlidingWindowFlexAttention.window_size": 2})
    net = TformerTrajEncoder(4, 8, **SMALL, attention_type=SlidingWindowFlexAttention)
    with torch.no_grad():
        net(torch.randn(1, 1, 4), times(1, 1), net.init_hidden_state(1, "cpu"))  # a warning would be an error
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        net(torch.randn(1, 3, 4), times(1, 3))
        FlexAttention()(*torch.randn(3, 1, 1, 3, 4))
    assert len(caught) == 1
    assert "FlexAttention: its kernel has no backward pass for tensors on cpu" in str(caught[0].message)


@pytest.mark.parametrize(
    ("window", "sinks", "slots"), [(3, 0, 4), (3, 2, 6), (99, 0, 8), (99, 2, 8), (7, 1, 8), (1, 0, 2)], ids=str
)
def test_caches_hold_no_more_than_is_seen(window, sinks, slots):
    kernel = SlidingWindowSinkFlexAttention if sinks else SlidingWindowFlexAttention
    config.bind({f"{kernel.__name__}.window_size": window, "SlidingWindowSinkFlexAttention.sink_size": sinks or 1})
    net = TformerTrajEncoder(4, 8, **SMALL, attention_type=kernel)
    cache = net.init_hidden_state(2, "cpu")
    assert cache.keys.shape == cache.values.shape == (2, 2, 2, slots, 4)
    assert cache.sinks == cache.slice(0, 1).sinks == sinks


@settings(max_examples=60, deadline=None)
@given(
    capacity=st.integers(1, 6),
    data=st.data(),
    resets=st.lists(st.lists(st.booleans(), min_size=3, max_size=3), min_size=1, max_size=20),
)
@torch.no_grad()
def test_a_cache_remembers_the_first_and_the_last_tokens(capacity, data, resets):
    """Against lists, rows resetting at random."""
    sinks = data.draw(st.integers(0, capacity - 1))
    cache, rows = KVCache(1, 3, 1, capacity, 1, "cpu", sinks=sinks), [[], [], []]
    for t, dones in enumerate(resets):
        cache.reset(np.array(dones))
        rows = [[] if done else row for row, done in zip(rows, dones)]
        for row in rows:
            row.append(t)
        slots = cache.advance()
        k, _ = cache.write(0, torch.full((3, 1, 1, 1), float(t)), torch.zeros(3, 1, 1, 1), slots)
        for b, row in enumerate(rows):
            kept = {n: row[n] for n in range(len(row)) if n < sinks or n >= len(row) - (capacity - sinks)}
            held = slots.ages[b] >= 0
            assert dict(zip(slots.places[b][held].tolist(), k[b, 0, held, 0].int().tolist())) == kept
            assert slots.full == all(len(r) >= k.shape[2] for r in rows)


# subclasses as a user writes them, who knows of `visible` and `forward` only


class EverySecond(ScaledDotProductAttention):
    """Another pattern, on a kernel that has a causal fast path."""

    def visible(self, distance):
        return (distance >= 0) & (distance % 2 == 0)


class LearnedBuffer(SelfAttention):
    """A pattern from a table, which moves with the module."""

    def __init__(self, causal=True, dropout=0.0):
        super().__init__(causal, dropout)
        self.register_buffer("table", torch.tensor([True, False, True, True, False, False, False, False]))

    def visible(self, distance):
        return (distance >= 0) & self.table[distance.clamp(0, 7)]


class Halved(ScaledDotProductAttention):
    """Another computation, with the masks of the base."""

    def forward(self, q, k, v, slots=None):
        return 0.5 * super().forward(q, k, v, slots)


OWN = {
    EverySecond: ["1....", ".1...", "1.1..", ".1.1.", "1.1.1"],
    LearnedBuffer: ["1....", ".1...", "1.1..", "11.1.", ".11.1"],
    Halved: ["1....", "11...", "111..", "1111.", "11111"],
}


@pytest.mark.parametrize("cls", OWN)
@quiet
def test_a_subclass_that_overrides_one_method(cls):
    torch.manual_seed(0)
    factor = 0.5 if cls is Halved else 1.0
    net, qkv = cls(), torch.randn(3, 2, 2, 5, 4)
    expected = factor * written_out(OWN[cls], *qkv.double()).float()
    torch.testing.assert_close(net(*qkv), expected, rtol=1e-5, atol=1e-5)
    cache = KVCache(1, 2, 2, 5, 4, "cpu")
    with torch.no_grad():
        for t in range(5):
            slots = cache.advance()
            k, v = cache.write(0, *qkv[1:, :, :, t : t + 1], slots)
            torch.testing.assert_close(
                net(qkv[0, :, :, t : t + 1], k, v, slots)[:, :, 0], expected[:, :, t], rtol=1e-5, atol=1e-5
            )


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("length", [7, 300])
def test_the_fast_path_for_bf16_computes_what_the_plain_one_does(length, causal):
    torch.manual_seed(0)
    with config.temporary({"amago.config.fast_paths.enabled": False}):
        plain = SelfAttention(causal)
    fast = SelfAttention(causal)
    assert (fast.fast, plain.fast) == (True, False)
    qkv = torch.randn(3, 2, 2, length, 8, dtype=torch.bfloat16, requires_grad=True)
    exact = VanillaAttention(causal)(*qkv.detach().float())
    errors = [float((net(*qkv).detach().float() - exact).norm() / exact.norm()) for net in (fast, plain)]
    assert max(errors) < 0.01


class Keeping(ScaledDotProductAttention):
    """Keeps queries and keys of its last call."""

    def forward(self, q, k, v, slots=None, real=None):
        self.seen = q.float(), k.float()
        return super().forward(q, k, v, slots, real)


@pytest.mark.parametrize("pos_emb", ["fixed", "rope"])
@pytest.mark.parametrize("t", [8.0, (2.0, 16.0), "length"])
def test_normalised_scores_are_cosines_times_a_temperature(t, pos_emb):
    plain, normalised = (
        TformerTrajEncoder(3, 99, **SMALL, pos_emb=pos_emb, attention_type=Keeping, qk_norm=x).eval() for x in (None, t)
    )
    normalised.load_state_dict(plain.state_dict())  # it has no weights of its own
    seq = torch.randn(2, 99, 3)
    for net in (plain, normalised):
        net(seq, times(2, 99))
    heads = torch.as_tensor({"length": 2 * np.log(100)}.get(t, t), dtype=torch.float32).expand(2)[:, None, None]
    kernel, reference = (net.tformer.layers[0].attention_layer.self_attention for net in (normalised, plain))
    q, k = (x / x.norm(dim=-1, keepdim=True) for x in reference.seen)
    q_, k_ = kernel.seen
    torch.testing.assert_close(q_ @ k_.mT / 2, heads * (q @ k.mT), atol=1e-4, rtol=1e-4)  # a head is 4 wide
