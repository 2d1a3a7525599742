"""Attention backends: what each sees, what its cache holds, and what happens where a kernel cannot run."""

import copy
import pickle
import warnings

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention.flex_attention import flex_attention as uncompiled_kernel

from amago import config
from amago.nets import attention, flex_attention
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


@pytest.fixture
def quiet(monkeypatch):
    monkeypatch.setattr(attention, "_warned", {"FlexAttention"})


def times(B, L):
    return torch.arange(L)[None, :, None].expand(B, -1, 1)


PATTERNS = {
    "flex": ["1....", "11...", "111..", "1111.", "11111"],
    "flex, both ways": ["11111"] * 5,
    "window": ["1....", "11...", "111..", ".111.", "..111"],
    "window, both ways": ["11...", "111..", ".111.", "..111", "...11"],
    "sinks": ["1....", "11...", "111..", "1111.", "11.11"],
}


@pytest.mark.parametrize("name", KERNELS)
def test_what_each_kernel_sees(name):
    mask = KERNELS[name]().mask(5, None, torch.device("cpu"))
    assert ["".join("1" if seen else "." for seen in row) for row in mask.tolist()] == PATTERNS[name]


@pytest.mark.parametrize("causal", [True, False])
def test_a_window_is_as_published(causal):
    """Query q sees key k where q - k <= window_size, so a token sees window_size tokens and itself."""
    for window in (1, 3):
        mask = SlidingWindowFlexAttention(causal=causal, window_size=window).mask(9, None, torch.device("cpu"))
        for q in range(9):
            for k in range(9):
                assert mask[q, k] == (0 <= q - k <= window if causal else abs(q - k) <= window)


@pytest.mark.parametrize("name", ["flex, both ways", "window, both ways", "default", "vanilla", "flash"])
def test_padding_is_not_seen(name, monkeypatch):
    monkeypatch.setattr(attention, "_warned", {"FlexAttention", "FlashAttention"})
    torch.manual_seed(0)
    others = {"default": ScaledDotProductAttention, "vanilla": VanillaAttention, "flash": FlashAttention}
    net = others[name](causal=False) if name in others else KERNELS[name]()
    qkv = torch.randn(3, 2, 2, 5, 4, requires_grad=True)
    real = torch.tensor([[True] * 5, [True] * 2 + [False] * 3])
    out = net(*qkv, real=real)
    torch.testing.assert_close(out[1, :, :2], net(*qkv[:, 1:, :, :2])[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(out[0], net(*qkv[:, :1])[0], rtol=1e-5, atol=1e-5)
    out.square().sum().backward()
    assert out.isfinite().all()
    assert not qkv.grad[1:, 1, :, 2:].any()
    assert qkv.grad.isfinite().all()


@pytest.mark.parametrize("kernel", [ScaledDotProductAttention, VanillaAttention, FlexAttention])
@pytest.mark.usefixtures("quiet")
def test_a_model_that_sees_the_future_sees_no_padding(kernel):
    torch.manual_seed(0)
    net = TformerTrajEncoder(4, 8, **SMALL, causal=False, attention_type=kernel).eval()
    seq, mask = torch.randn(2, 6, 4), torch.ones(2, 6, 1, dtype=torch.bool)
    mask[1, 4:] = False
    out, _ = net(seq, times(2, 6), mask=mask)
    alone, _ = net(seq[1:, :4], times(1, 4))
    torch.testing.assert_close(out[1:, :4], alone, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(net(seq, times(2, 6))[0][0], out[0], rtol=1e-5, atol=1e-5)


def written_out(pattern, q, k, v):
    """Attention of one sequence with a pattern of "1" and ".", by loops in float64."""
    out = torch.zeros_like(q)
    for t, row in enumerate(pattern):
        seen = [i for i, c in enumerate(row) if c == "1"]
        weights = (q[:, :, t : t + 1] @ k[:, :, seen].mT / q.shape[-1] ** 0.5).softmax(-1)
        out[:, :, t] = (weights @ v[:, :, seen]).squeeze(2)
    return out


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.usefixtures("quiet")
def test_falling_back_computes_the_same_gradients_included(name):
    torch.manual_seed(0)
    qkv = torch.randn(3, 2, 2, 5, 4, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(2, 2, 5, 4, dtype=torch.float64)
    (expected,) = torch.autograd.grad((written_out(PATTERNS[name], *qkv) * weight).sum(), qkv)
    out = KERNELS[name]()(*qkv)
    (got,) = torch.autograd.grad((out * weight).sum(), qkv)
    torch.testing.assert_close(out, written_out(PATTERNS[name], *qkv), rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("name", KERNELS)
@torch.no_grad()
def test_the_kernel_is_given_the_pattern(name, monkeypatch):
    """The kernel itself, uncompiled: on a CPU it knows the forward pass only, and that is enough to see what it is told."""
    calls = []

    def kernel(q, k, v, block_mask):
        calls.append(block_mask)
        return uncompiled_kernel(q, k, v, block_mask=block_mask)

    monkeypatch.setattr(flex_attention, "_refusal", lambda device_type, dropout: None)
    monkeypatch.setattr(flex_attention, "_failure", lambda *_: None)
    monkeypatch.setattr(flex_attention, "_compiled", lambda: kernel)
    torch.manual_seed(0)
    net, qkv = KERNELS[name](), torch.randn(3, 2, 2, 5, 16)
    out = net(*qkv)
    assert len(calls) == 1
    torch.testing.assert_close(out, written_out(PATTERNS[name], *qkv), rtol=1e-5, atol=1e-5)
    net(*qkv)
    assert calls[1] is calls[0]  # the mask of a length is made once
    assert len(copy.deepcopy(net)._block_masks) == len(pickle.loads(pickle.dumps(net))._block_masks) == 0


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_a_kernel_that_fails_is_tried_once_and_replaced(monkeypatch):
    monkeypatch.setattr(attention, "_warned", set())
    monkeypatch.setattr(flex_attention, "_refusal", lambda device_type, dropout: None)
    monkeypatch.setattr(flex_attention, "_tried", {})
    attempts = []

    def kernel(q, k, v, block_mask):
        attempts.append(q.shape)
        return uncompiled_kernel(q, k, v, block_mask=block_mask)  # refuses gradients on a CPU

    monkeypatch.setattr(flex_attention, "_compiled", lambda: kernel)
    qkv = torch.randn(3, 2, 2, 5, 16)
    with pytest.warns(UserWarning, match="FlexAttention: NotImplementedError: FlexAttention does not support backward on CPU"):
        out = FlexAttention()(*qkv)
    torch.testing.assert_close(out, VanillaAttention()(*qkv), rtol=1e-5, atol=1e-5)
    FlexAttention()(*qkv)
    assert len(attempts) == 1


def test_out_of_memory_is_no_reason_to_fall_back(monkeypatch):
    def kernel(*args, **kwargs):
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(flex_attention, "_refusal", lambda device_type, dropout: None)
    monkeypatch.setattr(flex_attention, "_tried", {})
    monkeypatch.setattr(flex_attention, "_compiled", lambda: kernel)
    with pytest.raises(torch.OutOfMemoryError, match="no room"):
        FlexAttention()(*torch.randn(3, 2, 2, 5, 16))
    assert flex_attention._tried == {}


def test_dropout_is_left_to_the_default():
    assert flex_attention._refusal("cuda", 0.0) is None
    assert "has no dropout, and dropout_attn is 0.1" in flex_attention._refusal("cuda", 0.1)
    assert "no backward pass for tensors on cpu" in flex_attention._refusal("cpu", 0.0)


def test_one_warning_in_training_and_none_in_acting(monkeypatch):
    monkeypatch.setattr(attention, "_warned", set())
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


# settings


@pytest.mark.parametrize("kernel", [SlidingWindowFlexAttention, SlidingWindowSinkFlexAttention])
def test_the_window_has_to_be_bound(kernel):
    config.bind({"TformerTrajEncoder.attention_type": kernel})
    with pytest.raises(ValueError, match=rf"attention_type={kernel.__name__} has settings without a default.*'window_size'"):
        TformerTrajEncoder(4, 8, **SMALL)
    config.bind({f"amago.nets.transformer.{kernel.__name__}.window_size": 3})
    assert isinstance(TformerTrajEncoder(4, 8, **SMALL)._kernel, kernel)
    config.bind({f"{kernel.__name__}.window_size": 0})
    with pytest.raises(ValueError, match="window_size must be at least 1, got window_size=0"):
        TformerTrajEncoder(4, 8, **SMALL)


def test_sinks_must_leave_room():
    config.bind({"SlidingWindowSinkFlexAttention.window_size": 3, "SlidingWindowSinkFlexAttention.sink_size": 9})
    with pytest.raises(ValueError, match=r"sink_size=9 leaves no room in a memory of 8 timesteps \(max_seq_len\)"):
        TformerTrajEncoder(4, 8, **SMALL, attention_type=SlidingWindowSinkFlexAttention)
    assert TformerTrajEncoder(4, 10, **SMALL, attention_type=SlidingWindowSinkFlexAttention)._kernel.sink_size == 9
    with pytest.raises(ValueError, match=r"sinks must be in \[0, slots\), got sinks=3, slots=3"):
        KVCache(1, 1, 1, 3, 1, "cpu", sinks=3)


def test_other_errors_of_a_kernel_are_its_own():
    class Broken(SelfAttention):
        def __init__(self, causal=True, dropout=0.0):
            raise RuntimeError("out of order")

    with pytest.raises(RuntimeError, match="out of order"):
        TformerTrajEncoder(4, 8, **SMALL, attention_type=Broken)


# caches


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


@torch.no_grad()
def test_sinks_stay_in_their_slots():
    cache, seen = KVCache(1, 1, 1, 4, 1, "cpu", sinks=2), []
    for t in range(8):
        slots = cache.advance()
        k, _ = cache.write(0, torch.full((1, 1, 1, 1), float(t)), torch.zeros(1, 1, 1, 1), slots)
        seen.append(k.flatten().int().tolist())
        assert (slots.places[0] == k.flatten()).all()
        assert slots.ages[0].tolist() == [t - int(x) for x in k.flatten()]
    assert seen == [[0], [0, 1], [0, 1, 2], [0, 1, 2, 3], [0, 1, 4, 3], [0, 1, 4, 5], [0, 1, 6, 5], [0, 1, 6, 7]]


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


def test_a_full_window_needs_no_mask():
    config.bind({"SlidingWindowSinkFlexAttention.window_size": 2})
    net = TformerTrajEncoder(4, 8, **SMALL, attention_type=SlidingWindowSinkFlexAttention)
    cache = net.init_hidden_state(2, "cpu")
    for _ in range(6):
        assert net._kernel.pattern(1, cache.advance()) == "full"
    cache.reset(np.array([True, False]))
    assert net._kernel.pattern(1, cache.advance()) == "masked"


# subclasses as a user writes them, who knows of `visible` and `forward` only


class EverySecond(ScaledDotProductAttention):
    """Another pattern, on a kernel that has a causal fast path."""

    def visible(self, distance):
        return (distance >= 0) & (distance % 2 == 0)


class CausalInOtherWords(FlexAttention):
    """The causal pattern, overridden: fast paths stay right, and stay open."""

    def visible(self, distance):
        return ~(distance < 0)


class GrowingWindow(SelfAttention):
    """A window that training widens, so that the answer of `visible` changes."""

    window = 2

    def visible(self, distance):
        return (distance >= 0) & (distance < self.window)


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
    CausalInOtherWords: ["1....", "11...", "111..", "1111.", "11111"],
    GrowingWindow: ["1....", "11...", ".11..", "..11.", "...11"],
    LearnedBuffer: ["1....", ".1...", "1.1..", "11.1.", ".11.1"],
    Halved: ["1....", "11...", "111..", "1111.", "11111"],
}


@pytest.mark.parametrize("cls", OWN)
@pytest.mark.usefixtures("quiet")
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


def test_what_is_seen_is_asked_each_time():
    torch.manual_seed(0)
    net, qkv = GrowingWindow(), torch.randn(3, 2, 2, 5, 4)
    assert net.pattern(5) == "masked"
    net(*qkv)
    net.window = 9
    assert net.pattern(5) == "causal"
    torch.testing.assert_close(net(*qkv), VanillaAttention()(*qkv), rtol=1e-5, atol=1e-5)


def test_patterns_that_need_no_mask():
    patterns = {name: make().pattern(5) for name, make in KERNELS.items()}
    assert patterns == {
        "flex": "causal",
        "flex, both ways": "full",
        "window": "masked",
        "window, both ways": "masked",
        "sinks": "masked",
    }
    assert SlidingWindowFlexAttention(window_size=4).pattern(5) == "causal"
    assert SlidingWindowFlexAttention(window_size=3).pattern(5) == "masked"
    assert CausalInOtherWords().pattern(5) == "causal"


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
