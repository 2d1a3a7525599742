"""Acting step by step equals reading whole sequences, with actors at different times, before and past the end of the cache.

A step has not seen what follows, so whole sequences are causal where they equal steps.
"""

import copy

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from nets.test_attention import EverySecond
from torch import nn

from amago import config
from amago.nets.kv_cache import KVCache
from amago.nets.mamba import MambaState
from amago.nets.traj_encoders import (
    FFTrajEncoder,
    GRUTrajEncoder,
    IdentityTrajEncoder,
    LSTMTrajEncoder,
    MambaTrajEncoder,
    MinGRUTrajEncoder,
    TformerTrajEncoder,
)
from amago.nets.transformer import (
    FlashAttention,
    FlexAttention,
    ScaledDotProductAttention,
    SigmaReparam,
    SlidingWindowFlexAttention,
    SlidingWindowSinkFlexAttention,
    VanillaAttention,
)

D, MAX_LEN = 6, 6
SLOTS = MAX_LEN
here = torch.get_default_device  # tests/gpu runs these tests with another one
SMALL = {"d_model": 16, "n_heads": 4, "d_ff": 32, "n_layers": 3}


pytestmark = pytest.mark.filterwarnings("ignore:.*using PyTorch's scaled_dot_product_attention")  # on a CPU


def randomize(net):
    """Every parameter away from its start, so that no norm, bias or scale is neutral."""
    with torch.no_grad():
        for p in net.parameters():
            p.add_(0.2 * torch.randn_like(p))
        for layer in net.modules():  # the spectral norms follow, else some layer divides by nearly nothing
            if isinstance(layer, SigmaReparam):
                for _ in range(20):
                    layer.train().effective_weight()
    return net


def sliding(window, sinks=0, **options):
    """A transformer with a sliding window."""
    kernel = SlidingWindowSinkFlexAttention if sinks else SlidingWindowFlexAttention
    config.bind({f"{kernel.__name__}.window_size": window})
    if sinks:
        config.bind({"SlidingWindowSinkFlexAttention.sink_size": sinks})
    return TformerTrajEncoder(D, MAX_LEN, **SMALL, attention_type=kernel, **options)


PLAIN = {"sigma_reparam": False, "normformer_norms": False, "head_scaling": False}
MODELS = {
    "ff": lambda: FFTrajEncoder(D, MAX_LEN, d_model=16, n_layers=2),
    "gru": lambda: GRUTrajEncoder(D, MAX_LEN, d_hidden=16, d_output=12, shortcut=True),
    "lstm": lambda: LSTMTrajEncoder(D, MAX_LEN, d_hidden=16, d_output=12, longest=8.0),
    "fixed": lambda: TformerTrajEncoder(D, MAX_LEN, **SMALL),
    "learned": lambda: TformerTrajEncoder(D, MAX_LEN, **SMALL, pos_emb="learned"),
    "rope": lambda: TformerTrajEncoder(D, MAX_LEN, **SMALL, pos_emb="rope"),
    "no positions": lambda: TformerTrajEncoder(D, MAX_LEN, **SMALL, pos_emb="none"),
    "plain": lambda: TformerTrajEncoder(D, MAX_LEN, **SMALL, **PLAIN),
    "rmsnorm": lambda: TformerTrajEncoder(D, MAX_LEN, **SMALL, norm="rmsnorm", pos_emb="rope"),
    "vanilla rope": lambda: TformerTrajEncoder(D, MAX_LEN, **SMALL, attention_type=VanillaAttention, pos_emb="rope"),
    "mamba": lambda: MambaTrajEncoder(D, MAX_LEN, d_model=16, d_state=4, n_layers=2),
    "mingru": lambda: MinGRUTrajEncoder(D, MAX_LEN, d_model=16, d_hidden=12),
    "flash": lambda: TformerTrajEncoder(D, MAX_LEN, **SMALL, attention_type=FlashAttention),
    "flex rope": lambda: TformerTrajEncoder(D, MAX_LEN, **SMALL, attention_type=FlexAttention, pos_emb="rope"),
    "window 3": lambda: sliding(3),
    "window 3 rope": lambda: sliding(3, pos_emb="rope"),
    "window beyond the context": lambda: sliding(50),
    "window 2, sink 1": lambda: sliding(2, 1),
    "window 3, sinks 2, rope": lambda: sliding(3, 2, pos_emb="rope"),
    "window beyond the context, sinks 2": lambda: sliding(9, 2),
    "normalised": lambda: TformerTrajEncoder(D, MAX_LEN, **SMALL, qk_norm=8.0),
    "normalised, by head, rope": lambda: TformerTrajEncoder(D, MAX_LEN, **SMALL, qk_norm=(1.0, 2.0, 4.0, 8.0), pos_emb="rope"),
    "normalised, vanilla": lambda: TformerTrajEncoder(D, MAX_LEN, **SMALL, attention_type=VanillaAttention, qk_norm="length"),
    "normalised, window 2, sink 1": lambda: sliding(2, 1, qk_norm=8.0),
    "own pattern": lambda: TformerTrajEncoder(D, MAX_LEN, **SMALL, attention_type=EverySecond),
}


def windowed(net, window):
    """A copy of the model whose layers all see ``window`` tokens of a whole sequence: sinks, and the last others."""
    net = copy.deepcopy(net)
    for layer in getattr(net, "tformer", nn.Module()).layers if isinstance(net, TformerTrajEncoder) else []:
        inner = layer.attention_layer.self_attention

        class Banded(VanillaAttention):
            def sees(self, query, key, inner=inner):
                kept = (query - key < window - inner.sink_size) | (key < inner.sink_size)
                return inner.sees(query, key) & kept

        layer.attention_layer.self_attention = Banded()
    return net


def rollout(net, seq, starts, hidden=None):
    """Act; ``starts[b]`` are the steps at which row b's episode begins. Returns outputs and time indices."""
    B, T = seq.shape[:2]
    hidden = net.init_hidden_state(B, here()) if hidden is None else hidden
    times, outs = torch.zeros(B, 1, 1, dtype=torch.int64), []
    all_times = []
    for t in range(T):
        dones = np.array([t in starts[b] for b in range(B)])
        if t > 0:
            hidden = net.reset_hidden_state(hidden, dones)
        times = torch.where(torch.as_tensor(dones)[:, None, None], 0, times + 1) if t > 0 else times
        out, hidden = net(seq[:, t : t + 1], times, hidden)
        outs.append(out)
        all_times.append(times)
    return torch.cat(outs, 1), torch.cat(all_times, 1)


def episodes(starts, T):
    for b, s in enumerate(starts):
        bounds = sorted({0, *s, T})
        yield from ((b, lo, hi) for lo, hi in zip(bounds, bounds[1:]))


STARTS = {
    "one long episode": ([[], [], []], 4 * SLOTS),
    "staggered, long": ([[7, 9, 20], [], [1, 13]], 4 * SLOTS),
    "all reset together": ([[8, 16], [8, 16], [8, 16]], 4 * SLOTS),
}


@pytest.mark.parametrize("case", STARTS)
@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_step_equals_whole_sequence(name, case):
    torch.manual_seed(0)
    net = randomize(MODELS[name]()).eval()
    starts, T = STARTS[case]
    seq = torch.randn(len(starts), T, D)
    out, times = rollout(net, seq, starts)
    whole = windowed(net, SLOTS)
    for b, lo, hi in episodes(starts, T):
        part = slice(lo, hi)
        expected, _ = (net if hi - lo <= SLOTS else whole)(seq[b : b + 1, part], times[b : b + 1, part])
        torch.testing.assert_close(out[b : b + 1, part], expected, rtol=1e-5, atol=1e-5)
    assert out.std() > 0.1


def oracle(weights, seq, times, n_heads, pos_emb, window, sinks=0):
    """One sequence through a transformer in float64, written with loops and nothing of ours. (L, D) -> (L, d_model)."""
    w = {k: v.double() for k, v in weights.items()}
    seq, times = seq.double(), times.double()

    def linear(x, name):
        weight = w[f"{name}.weight"]
        if f"{name}.gamma" in w:
            weight = weight * w[f"{name}.gamma"] / (w[f"{name}.u"] @ weight @ w[f"{name}.v"])
        return x @ weight.T + w.get(f"{name}.bias", 0.0)

    def norm(x, name):
        if f"{name}.norm.weight" not in w:
            return x
        x = (x - x.mean(-1, keepdim=True)) / (x.var(-1, unbiased=False, keepdim=True) + 1e-5).sqrt()
        return x * w[f"{name}.norm.weight"] + w[f"{name}.norm.bias"]

    def turn(x, t):
        half = len(x) // 2
        out = x.clone()
        for i in range(half):
            angle = t * 10_000.0 ** (-2 * i / len(x))
            c, s = torch.cos(angle), torch.sin(angle)
            out[i], out[half + i] = x[i] * c - x[half + i] * s, x[i] * s + x[half + i] * c
        return out

    x = linear(seq, "tformer.inp")
    L, M = x.shape
    if pos_emb == "fixed":
        for t in range(L):
            for i in range(M // 2):
                angle = times[t] / 10_000.0 ** (2 * i / M)
                x[t, 2 * i] += torch.sin(angle)
                x[t, 2 * i + 1] += torch.cos(angle)
    n_layers = 1 + max(int(k.split(".")[2]) for k in w if k.startswith("tformer.layers."))
    for n in range(n_layers):
        p = f"tformer.layers.{n}"
        qkv = linear(norm(x, f"{p}.norm1"), f"{p}.attention_layer.qkv_projection").reshape(L, 3, M // n_heads, n_heads)
        heads = torch.zeros(L, n_heads, M // n_heads, dtype=torch.float64)
        for h in range(n_heads):
            q, k, v = (qkv[:, j, :, h] for j in range(3))
            if pos_emb == "rope":
                q, k = (torch.stack([turn(y[t], times[t]) for t in range(L)]) for y in (q, k))
            for t in range(L):
                seen = [i for i in range(t + 1) if i > t - window or i < sinks]
                heads[t, h] = ((k[seen] @ q[t]) / (M // n_heads) ** 0.5).softmax(0) @ v[seen]
            heads[:, h] *= w[f"{p}.attention_layer.head_scaler"][0, 0, h]
        x = x + norm(linear(heads.reshape(L, M), f"{p}.attention_layer.out_projection"), f"{p}.norm2")
        h = F.leaky_relu(linear(norm(x, f"{p}.norm3"), f"{p}.ff1"))
        x = x + linear(norm(h, f"{p}.norm4"), f"{p}.ff2")
    return norm(x, "tformer.norm")


# (tokens seen, sinks) of those that see less than everything
WINDOWS = {"window 3": (4, 0), "window 2, sink 1": (3, 1), "window 3, sinks 2, rope": (4, 2)}


@pytest.mark.parametrize("name", ["fixed", "rope", "plain", *WINDOWS])
@torch.no_grad()
def test_transformer_against_an_oracle_in_float64(name):
    torch.manual_seed(1)
    net = randomize(MODELS[name]()).double().eval()
    pos_emb = "rope" if "rope" in name else "fixed"
    window, sinks = WINDOWS.get(name, (None, 0))
    starts, T = STARTS["staggered, long"]
    seq = torch.randn(len(starts), T, D, dtype=torch.float64)
    out, times = rollout(net, seq, starts)
    for b, lo, hi in episodes(starts, T):
        e, t = seq[b, lo:hi], times[b, lo:hi, 0]
        expected = oracle(net.state_dict(), e, t, 4, pos_emb, window or SLOTS, sinks)
        torch.testing.assert_close(out[b, lo:hi], expected, rtol=1e-5, atol=1e-5)
        whole, _ = net(e[None], t[None, :, None])
        expected = oracle(net.state_dict(), e, t, 4, pos_emb, window or hi, sinks)
        torch.testing.assert_close(whole[0], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["gru", "lstm", "mamba", "mingru", "fixed", "rope", "window 3, sinks 2, rope"])
@torch.no_grad()
def test_several_steps_at_once_and_late_time_indices(name):
    torch.manual_seed(2)
    net = randomize(MODELS[name]()).eval()
    seq, times = torch.randn(2, SLOTS, D), 5000 + torch.arange(SLOTS)[None, :, None].expand(2, -1, 1)
    expected, _ = net(seq, times)
    hidden = net.init_hidden_state(2, here())
    first, hidden = net(seq[:, :4], times[:, :4], hidden)
    second, _ = net(seq[:, 4:], times[:, 4:], hidden)
    torch.testing.assert_close(torch.cat((first, second), 1), expected, rtol=1e-4, atol=1e-4 if "rope" in name else 1e-5)


def state_of(hidden):
    if isinstance(hidden, MambaState):
        return [hidden.conv.movedim(1, 0), hidden.ssm.movedim(1, 0)]
    if isinstance(hidden, KVCache):
        return [hidden.keys.movedim(1, 0), hidden.values.movedim(1, 0), hidden.lengths, torch.as_tensor(hidden.host_lengths)]
    return [part.movedim(1, 0) for part in (hidden if isinstance(hidden, tuple) else (hidden,))]


@pytest.mark.parametrize("as_tensor", [False, True])
@pytest.mark.parametrize("name", ["gru", "lstm", "mamba", "mingru", "fixed", "window 2, sink 1"])
@torch.no_grad()
def test_reset_touches_only_its_rows(name, as_tensor):
    net = MODELS[name]().eval()
    hidden = net.init_hidden_state(3, here())
    for t in range(3):
        _, hidden = net(torch.randn(3, 1, D), torch.full((3, 1, 1), t), hidden)
    before = [x.clone() for x in state_of(hidden)]
    dones = np.array([False, True, False])
    hidden = net.reset_hidden_state(hidden, torch.as_tensor(dones) if as_tensor else dones)
    for old, new in zip(before, state_of(hidden)):
        torch.testing.assert_close(new[[0, 2]], old[[0, 2]], rtol=0, atol=0)
    x = torch.randn(3, 1, D)
    out, _ = net(x, torch.zeros(3, 1, 1, dtype=torch.int64), hidden)
    fresh, _ = net(x, torch.zeros(3, 1, 1, dtype=torch.int64), net.init_hidden_state(3, here()))
    torch.testing.assert_close(out[1], fresh[1], rtol=1e-5, atol=1e-5)
    assert (out[0] - fresh[0]).abs().max() > 1e-3


@pytest.mark.parametrize("name", ["ff", "gru", "lstm", "mamba", "mingru", "fixed", "window 3", "window 2, sink 1"])
@torch.no_grad()
def test_slices_of_a_hidden_state_share_storage(name):
    torch.manual_seed(4)
    net = randomize(MODELS[name]()).eval()
    starts, T = [[3], [], [5, 8], [2]], 2 * SLOTS
    seq = torch.randn(4, T, D)
    expected, _ = rollout(net, seq, starts)
    whole = net.init_hidden_state(4, here())
    halves = [
        rollout(net, seq[s], starts[s], net.slice_hidden_state(whole, s.start, s.stop))[0] for s in (slice(0, 2), slice(2, 4))
    ]
    torch.testing.assert_close(torch.cat(halves), expected, rtol=1e-5, atol=1e-5)
    if whole is not None:
        filled = state_of(whole)[0].flatten(1).abs().sum(1)
        assert (filled > 0).all()


@pytest.mark.parametrize("name", ["ff", "gru", "lstm", "mamba", "mingru", "fixed", "rope", "window 2, sink 1"])
@torch.no_grad()
def test_a_step_from_exported_tensors_is_a_step(name):
    """`export_hidden_state` and `import_hidden_state`, with rows that reset, and without a change of the tensors."""
    torch.manual_seed(8)
    net = randomize(MODELS[name]()).eval()
    starts, T = [[3], [], [5, 8]], 2 * SLOTS
    seq = torch.randn(3, T, D)
    expected, times = rollout(net, seq, starts)
    tensors = net.export_hidden_state(net.init_hidden_state(3, here()))
    assert (len(tensors) == 0) == (name == "ff")
    for t in range(T):
        before = {k: v.clone() for k, v in tensors.items()}
        dones = torch.tensor([t in s for s in starts])
        hidden = net.import_hidden_state(tensors, dones)
        out, hidden = net(seq[:, t : t + 1], times[:, t : t + 1], hidden)
        torch.testing.assert_close(out, expected[:, t : t + 1], rtol=1e-5, atol=1e-5)
        assert all(tensors[k].equal(v) for k, v in before.items())
        tensors = net.export_hidden_state(hidden)


def test_a_model_without_memory_needs_no_hidden_state_methods():
    net = IdentityTrajEncoder(D, 4)
    assert net.init_hidden_state(2, here()) is None
    assert net.reset_hidden_state(None, np.array([True, False])) is None
    assert net.slice_hidden_state(None, 0, 1) is None
    assert net.can_slice_hidden_state(None)
    assert not net.can_slice_hidden_state(torch.zeros(2))


@torch.no_grad()
def test_half_precision_cache():
    torch.manual_seed(5)
    net = MODELS["rope"]().eval()
    seq = torch.randn(2, 2 * SLOTS, D)
    exact, _ = rollout(net, seq, [[3], []])
    rough, _ = rollout(net, seq, [[3], []], net.init_hidden_state(2, here(), dtype=torch.bfloat16))
    assert 0 < (exact - rough).abs().max() < 0.1
    with torch.autocast(here().type, dtype=torch.bfloat16):
        hidden = net.init_hidden_state(2, here())
        assert hidden.keys.dtype == torch.bfloat16
        rough, _ = rollout(net, seq, [[3], []], hidden)
    assert (exact - rough).abs().max() < 0.1
    half = copy.deepcopy(net).bfloat16()
    assert half.init_hidden_state(2, here()).keys.dtype == torch.bfloat16
    rough, _ = rollout(half, seq.bfloat16(), [[3], []])
    assert (exact - rough).abs().max() < 0.2


@pytest.mark.parametrize("name", ["gru", "lstm", "mamba", "mingru", "fixed", "window 2, sink 1"])
def test_acting_with_gradients_on_changes_nothing(name):
    """A hidden state is written in place; the graph of a step must survive it."""
    torch.manual_seed(6)
    net = MODELS[name]().eval()
    seq = torch.randn(2, 4, D)
    out, _ = rollout(net, seq, [[], [2]])
    with torch.no_grad():
        expected, _ = rollout(net, seq, [[], [2]])
    torch.testing.assert_close(out.detach(), expected)
    out.square().sum().backward()
    assert all(torch.isfinite(p.grad).all() for p in net.parameters() if p.requires_grad and p.grad is not None)


@pytest.mark.parametrize("cls", [ScaledDotProductAttention, VanillaAttention])
def test_attention_dropout_only_in_training(cls):
    net = cls(dropout=0.5)
    q, k, v = torch.randn(3, 1, 2, 6, 4)
    assert not torch.allclose(net(q, k, v), net(q, k, v))
    net.eval()
    torch.testing.assert_close(net(q, k, v), net(q, k, v))
