"""Encoders, layers and attention kernels as code for the original system writes and calls them."""

import copy
import math

import gin
import pytest
import tiny
import torch

from amago import cli_utils
from amago.nets import attention, transformer
from amago.nets.traj_encoders import TformerTrajEncoder, TrajEncoder


class BeginsWithNone(TrajEncoder):
    """A GRU of a client's own, whose memory is None until its first step."""

    def __init__(self, tstep_dim, max_seq_len):
        super().__init__(tstep_dim, max_seq_len)
        self.gru = torch.nn.GRU(tstep_dim, 8, batch_first=True)

    @property
    def emb_dim(self):
        return 8

    def init_hidden_state(self, batch_size, device):
        return None

    def reset_hidden_state(self, hidden_state, dones):
        hidden_state[:, dones] = 0.0
        return hidden_state

    def forward(self, seq, time_idxs, hidden_state=None, log_dict=None):
        return self.gru(seq, hidden_state)


def test_a_memory_may_be_none_until_the_first_step(tmp_path):
    e = tiny.learned(tmp_path, traj_encoder_type=BeginsWithNone)
    assert e.evaluate_test(tiny.tmaze, timesteps=tiny.EPISODE + 1)


def former(**options):
    torch.manual_seed(0)
    return TformerTrajEncoder(4, 6, d_model=16, n_heads=2, d_ff=16, n_layers=2, **options).eval()


def steps(net, seq, times, hidden):
    outs = []
    with torch.no_grad():
        for t in range(seq.shape[1]):
            out, hidden = net(seq[:, t : t + 1], times[:, t : t + 1], hidden_state=hidden)
            outs.append(out)
    return torch.cat(outs, 1)


def sequence(B=3, L=11):
    torch.manual_seed(1)
    return torch.randn(B, L, 4), torch.arange(L)[None, :, None].expand(B, -1, -1)


@pytest.mark.parametrize("length", [2, 9])
def test_a_memory_is_copied_from_one_actor_to_another_cleared_by_hand_and_kept_in_copies(length):
    net, (seq, times) = former(), sequence()
    hidden = net.init_hidden_state(3, "cpu")
    steps(net, seq[:, :length], times[:, :length], hidden)
    saved = copy.deepcopy(hidden)
    for cache in (hidden.key_cache, hidden.val_cache):
        cache.data[:, 2] = cache.data[:, 0]
        cache.data[:, 1] = float("nan")
    hidden.seq_lens[2], hidden.seq_lens[1] = hidden.seq_lens[0], 0
    same, times = seq[:1, length:].expand(3, -1, -1), times[:, length:]
    out = steps(net, same, times, hidden)
    torch.testing.assert_close(out[2], out[0])
    torch.testing.assert_close(out[1:2], steps(net, same[:1], times[:1], net.init_hidden_state(1, "cpu")))
    assert (out[1] - out[0]).abs().max() > 1e-3
    torch.testing.assert_close(steps(net, same, times, saved)[0], out[0])
    hidden.seq_lens[0] = 7
    with pytest.raises(ValueError, match="seq_lens must be from 0 to 6"):
        steps(net, seq[:, :1], times[:, :1], hidden)


@gin.configurable
class TheirKernel(transformer.SelfAttention):
    """Attention over (B, L, 3, H, E), with caches that it writes itself."""

    calls: list = []

    def __init__(self, causal=True, dropout=0.0, scale=1.0):
        super().__init__(causal=causal, dropout=dropout)
        self.scale = torch.nn.Parameter(torch.tensor(scale))

    def forward(self, qkv, key_cache=None, val_cache=None, cache_seqlens=None):
        queries, keys, values = qkv.unbind(2)
        B, L, H, E = queries.shape
        if key_cache is None:
            seen = torch.ones(L, L, dtype=torch.bool).tril()[None, None]
        else:
            assert (cache_seqlens.dtype, L) == (torch.int32, 1)
            rows = torch.arange(B)
            key_cache[rows, cache_seqlens.long()] = keys[:, 0]
            val_cache[rows, cache_seqlens.long()] = values[:, 0]
            keys, values = key_cache.nan_to_num(0.0), val_cache.nan_to_num(0.0)
            seen = (torch.arange(keys.shape[1]) <= cache_seqlens[:, None])[:, None, None]
        scores = torch.einsum("blhe,bshe->bhls", queries, keys) * self.scale / math.sqrt(E)
        out = torch.einsum("bhls,bshe->blhe", scores.masked_fill(~seen, -torch.inf).softmax(-1), values)
        assert out.shape == (B, L, H, E)
        return out


def test_a_kernel_of_theirs_trains_and_acts_like_ours():
    seq, times = sequence(L=6)
    ours, theirs = former(attention_type=transformer.VanillaAttention), former(attention_type=TheirKernel)
    assert {k for k in theirs.state_dict() if "scale" in k and "head" not in k} == {
        f"tformer.layers.{i}.attention_layer.self_attention.scale" for i in (0, 1)
    }
    theirs.load_state_dict(ours.state_dict(), strict=False)
    whole = ours(seq, times)[0]
    torch.testing.assert_close(theirs(seq, times)[0], whole)
    torch.testing.assert_close(steps(theirs, seq, times, theirs.init_hidden_state(3, "cpu")), whole)
    theirs.train()(seq, times)[0].sum().backward()
    assert theirs.tformer.layers[0].attention_layer.self_attention.scale.grad.abs() > 0


@pytest.mark.parametrize(
    "kernel",
    [
        transformer.VanillaAttention,
        transformer.ScaledDotProductAttention,
        lambda: transformer.SlidingWindowFlexAttention(window_size=4),
        lambda: transformer.ClippedSlidingSinkAttention(window_size=4, sink_size=1),
        transformer.VanillaFlexAttention,
    ],
)
@pytest.mark.filterwarnings("ignore:FlexAttention")
def test_our_kernels_called_in_their_form(kernel):
    attend = kernel().eval()
    torch.manual_seed(0)
    qkv = torch.randn(2, 4, 3, 2, 8)
    whole = attend(qkv)
    assert whole.shape == (2, 4, 2, 8)
    assert attend(qkv=qkv).equal(whole)
    keys, values = (torch.full((2, 6, 2, 8), float("nan")) for _ in range(2))
    for t in range(4):
        out = attend(qkv[:, t : t + 1], key_cache=keys, val_cache=values, cache_seqlens=torch.full((2,), t, dtype=torch.int32))
        torch.testing.assert_close(out[:, 0], whole[:, t])
    assert keys[:, :4].equal(qkv[:, :, 1])
    assert keys[:, 4:].isnan().all()
    with pytest.raises(ValueError, match="6 slots"):
        attend(qkv[:, :1], keys, values, torch.tensor([6, 0], dtype=torch.int32))


def test_windows_of_flash_attention():
    attention.warn_fallback.cache_clear()
    with pytest.warns(UserWarning, match="FlashAttention"):
        flash = transformer.FlashAttention(window_size=(2, 0)).eval()
    window = transformer.SlidingWindowFlexAttention(window_size=2)
    qkv = torch.randn(2, 7, 3, 2, 8)
    torch.testing.assert_close(flash(qkv), transformer.VanillaAttention.forward(window, qkv))
    assert flash.cache_slots(10) == 3
    cli_utils.use_config(
        {"FlashAttention.window_size": (4, 0), "TformerTrajEncoder.attention_type": transformer.FlashAttention}
    )
    seq, times = sequence(L=6)
    net = former()
    torch.testing.assert_close(steps(net, seq, times, net.init_hidden_state(3, "cpu")), net(seq, times)[0])
    with pytest.raises(ValueError, match="window_size"):
        transformer.FlashAttention(window_size=(-2, 0))


@pytest.mark.filterwarnings("ignore:FlexAttention")
def test_score_and_mask_modifications():
    def alibi(score, b, h, q_idx, kv_idx):
        return score - 0.1 * (h + 1) * (q_idx - kv_idx)

    def every_other(b, h, q_idx, kv_idx):
        return (q_idx - kv_idx) % 2 == 0

    class Mine(transformer.FlexAttention):
        def __init__(self, causal=True, dropout=0.0):
            super().__init__(score_mod=alibi, mask_mod=every_other, causal=causal, dropout=dropout)

    torch.manual_seed(0)
    qkv = torch.randn(2, 7, 3, 2, 8)
    out = Mine()(qkv)
    q, k, v = qkv.permute(2, 0, 3, 1, 4)
    distance = torch.arange(7)[:, None] - torch.arange(7)
    scores = q @ k.transpose(-1, -2) / math.sqrt(8) - 0.1 * torch.tensor([1.0, 2.0])[:, None, None] * distance
    wanted = scores.masked_fill((distance < 0) | (distance % 2 == 1), -torch.inf).softmax(-1) @ v
    torch.testing.assert_close(out, wanted.transpose(1, 2))
    seq, times = sequence(L=6)
    net = former(attention_type=Mine)
    torch.testing.assert_close(steps(net, seq, times, net.init_hidden_state(3, "cpu")), net(seq, times)[0])
    with pytest.raises(ValueError, match="logit_clip"):
        transformer.ClippedSlidingSinkAttention(window_size=4, logit_clip=0.0)
