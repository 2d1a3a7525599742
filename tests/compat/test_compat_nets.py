"""Encoders, layers and attention kernels as code for the original system writes and calls them."""

import copy
import math

import gin
import gymnasium as gym
import numpy as np
import pytest
import tiny
import torch

from amago import cli_utils, config
from amago.nets import attention, cnn, ff, transformer, utils
from amago.nets.traj_encoders import FFTrajEncoder, GRUTrajEncoder, TformerTrajEncoder, TrajEncoder
from amago.nets.tstep_encoders import CNNTstepEncoder, FFTstepEncoder, TstepEncoder

OBS = gym.spaces.Dict({"observation": gym.spaces.Box(-1, 1, (4,))})
RL2 = gym.spaces.Box(-np.inf, np.inf, (3,))
IMAGE = gym.spaces.Dict({"observation": gym.spaces.Box(0, 255, (36, 36, 3), np.uint8)})


def inputs(B=2, L=5):
    return {"observation": torch.randn(B, L, 4)}, torch.randn(B, L, 3)


# ---- utils and layers ----------------------------------------------------------------------------------------------------


def test_symlog_takes_tensors_and_numbers():
    assert utils.symlog(-1e5) == pytest.approx(-math.log(1e5 + 1))
    assert utils.symlog(torch.tensor([-1e5])).item() == pytest.approx(utils.symlog(-1e5), rel=1e-6)
    assert utils.symexp(utils.symlog(-12.5)) == pytest.approx(-12.5)
    assert utils.symlog(0) == 0


def test_activations_are_logged_where_a_dict_is_given():
    log, x = {}, torch.tensor([[1.0, 2.0], [3.0, 6.0]], requires_grad=True)
    utils.add_activation_log("merge", x, log)
    wanted = {
        "activation-merge-max": 6.0,
        "activation-merge-min": 1.0,
        "activation-merge-std": x.std().item(),
        "activation-merge-mean": 3.0,
    }
    assert {k: v.item() for k, v in log.items()} == pytest.approx(wanted)
    assert not any(v.requires_grad for v in log.values())
    utils.add_activation_log("merge", x, None)
    utils.add_activation_log("merge", x)


def test_normalisation_by_name():
    x = torch.tensor([[3.0, 4.0, 0.0, 0.0], [0.3, 0.4, 0.0, 0.0]])
    assert ff.Normalization(None, 4)(x).equal(x)
    assert ff.Normalization("none", 4)(x).equal(x)
    torch.testing.assert_close(ff.Normalization("unitball", 4)(x), torch.stack((x[0] / 5, x[1])))
    torch.testing.assert_close(ff.Normalization("unitball-detach", 4)(x), torch.stack((x[0] / 5, x[1])))
    torch.testing.assert_close(ff.Normalization("hypersphere", 4)(x), torch.stack((x[0] / 5, x[1] * 2)))
    cli_utils.use_config({"SimNorm.dim": 2})
    grouped = ff.Normalization("simnorm", 4)(x)
    torch.testing.assert_close(grouped.unflatten(-1, (2, 2)).sum(-1), torch.ones(2, 2))
    with pytest.raises(ValueError, match=r"SimNorm.dim=2 does not divide the width 3"):
        ff.SimNorm()(torch.zeros(1, 3))

    def gradient(method):
        y = x.clone().requires_grad_()
        (ff.Normalization(method, 4)(y)[0] @ x[0]).backward()
        return y.grad[0]

    assert gradient("unitball").norm() < 1e-6  # a longer vector is the same point of the sphere
    assert gradient("unitball-detach").norm() > 0.5


def test_perceptrons_with_normalisation_and_other_layers():
    net = ff.MLP(4, 8, 2, 3, "relu", "layer", 0.0, transformer.SigmaReparam)
    assert isinstance(net.out_layer, transformer.SigmaReparam)
    out = net(torch.randn(5, 4) * 1e6)
    assert out.shape == (5, 3)
    assert out.abs().max() < 100  # the layers are normalised
    block = ff.FFBlock(4, 8, dropout=0.0, activation="gelu", norm="rmsnorm", layer_type=torch.nn.Linear)
    assert type(block.ff1) is torch.nn.Linear
    assert (block(1e6 * torch.ones(1, 4)) - 1e6).abs().max() < 100


def test_input_statistics_can_be_skipped():
    norm = utils.InputNorm(dim=4, beta=0.1, init_nu=2.0, skip=True)
    x = torch.randn(2, 3, 4)
    assert norm(x) is x
    norm.load_state_dict(utils.InputNorm(4).state_dict(), strict=True)  # the original's checkpoints have them
    cli_utils.use_config({"utils.InputNorm.beta": 0.5})
    assert utils.InputNorm(4).beta == 0.5
    cli_utils.use_config({"amago.nets.ff.InputNorm.beta": 0.25})  # the name of the module where it used to be
    assert utils.InputNorm(4).beta == 0.25
    assert list(config.bindings()) == ["amago.nets.utils.InputNorm.beta"]


# ---- timestep encoders ---------------------------------------------------------------------------------------------------


class OnlyWhatItSees(TstepEncoder):
    """As a client writes it."""

    def __init__(self, obs_space, rl2_space, hide_rl2s=False, hide_rewards=False):
        super().__init__(obs_space, rl2_space, hide_rl2s, hide_rewards)
        self.inner = FFTstepEncoder(gym.spaces.Dict({"part": obs_space["observation"]}), rl2_space, d_output=8)

    @property
    def emb_dim(self):
        return self.inner.emb_dim + self.rl2_space.shape[-1]

    def inner_forward(self, obs, rl2s, log_dict=None):
        nested = self.inner(obs={"part": obs["observation"]}, rl2s=rl2s, log_dict=log_dict)
        return torch.cat((nested, rl2s), dim=-1)


@pytest.mark.parametrize(
    ("hide", "seen"), [((False, False), [1, 1, 1]), ((False, True), [0, 1, 1]), ((True, False), [0, 0, 0])]
)
def test_the_base_class_hides_rewards_and_actions(hide, seen):
    net = OnlyWhatItSees(OBS, RL2, *hide)
    obs, _ = inputs()
    out = net(obs=obs, rl2s=torch.ones(2, 5, 3), log_dict=None)
    assert out.shape == (2, 5, net.emb_dim)
    assert out[0, 0, -3:].tolist() == seen
    assert (net.obs_space, net.rl2_space) == (OBS, RL2)


def test_feed_forward_encoder():
    net = FFTstepEncoder(OBS, RL2, n_layers=2, d_hidden=16, d_output=6, norm="layer", hide_rl2s=True, normalize_inputs=False)
    obs, rl2s = inputs()
    assert net(obs, rl2s).equal(net(obs, rl2s + 1))
    assert net.obs_keys == ["observation"]
    x = torch.randn(2, 5, 7)
    assert net.in_norm(x) is x
    torch.testing.assert_close(
        net.out_norm(net.base(torch.cat((obs["observation"], torch.zeros(2, 5, 3)), -1))), net(obs, rl2s)
    )
    cli_utils.use_config({"FFTstepEncoder.auto_scale": True, "FFTstepEncoder.d_hidden": 4})
    assert FFTstepEncoder(OBS, RL2).base.in_layer.out_features == 8  # 4 + 3 inputs


def test_image_networks():
    class Mine(cnn.CNN):
        def __init__(self, img_shape, channels_first, activation):
            super().__init__(img_shape, channels_first, activation)
            self.conv1 = torch.nn.Conv2d(3, 5, 8, 4)

        def conv_forward(self, imgs):
            self.saw = imgs
            return self.activation(self.conv1(imgs))

    net = Mine((36, 36, 3), False, "relu")
    img = torch.randint(0, 256, (2, 3, 36, 36, 3), dtype=torch.uint8)
    out = net(img, flatten=False)
    assert out.shape == (2, 3, 5, 8, 8)
    assert net(img).equal(out.flatten(2))
    assert net(net.blank_img).shape == (1, 1, 5 * 64)
    floats = torch.rand(2, 3, 36, 36, 3)
    net(floats, from_float=True)
    assert net.saw.equal(floats.flatten(0, 1).permute(0, 3, 1, 2))
    cli_utils.use_config(
        {"NatureishCNN.channels": [8, 8, 8], "cnn.NatureishCNN.kernels": [4, 3, 3], "NatureishCNN.strides": [2, 2, 1]}
    )
    assert cnn.NatureishCNN((36, 36, 3)).conv1.kernel_size == (4, 4)
    grid = cnn.GridworldCNN((7, 7, 3), channels=[4, 4], kernels=[3, 2], strides=[2, 1])
    assert grid(grid.blank_img).shape == (1, 1, 4 * 2 * 2)
    with pytest.raises(ValueError, match="channels, kernels and strides"):
        cnn.GridworldCNN((7, 7, 3), channels=[4], kernels=[3, 2])
    half = CNNTstepEncoder(IMAGE, RL2, cnn_type=Mine, drqv2_aug=True, aug_pct_of_batch=0.5)
    images = torch.randint(0, 256, (8, 1, 36, 36, 3), dtype=torch.uint8)
    torch.manual_seed(0)
    kept = [bool(half.data_aug(images)[i].equal(images[i])) for i in range(8)]
    assert all(kept[:4])
    assert sum(kept[4:]) <= 1


# ---- sequence models -----------------------------------------------------------------------------------------------------


def test_feed_forward_sequence_model_has_two_norms():
    net = FFTrajEncoder(4, 8, d_model=6, norm="layer", out_norm="none")
    assert net.traj_blocks[0].norm is not None
    assert FFTrajEncoder(4, 8, d_model=6).traj_blocks[0].norm is None


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
    e.close()


def test_a_gru_starts_from_nothing():
    net = GRUTrajEncoder(4, 8, d_hidden=6, d_output=5).eval()
    seq, times = torch.randn(3, 6, 4), torch.arange(6)[None, :, None].expand(3, -1, -1)
    whole, last = net(seq=seq, time_idxs=times, hidden_state=None)
    hidden, outs = None, []
    for t in range(6):
        out, hidden = net(seq[:, t : t + 1], times[:, t : t + 1], hidden_state=hidden)
        outs.append(out)
    assert hidden.shape == (2, 3, 6)
    torch.testing.assert_close(torch.cat(outs, 1), whole)
    torch.testing.assert_close(hidden, last)
    assert net.reset_hidden_state(hidden, np.array([True, False, False])) is hidden
    assert not hidden[:, 0].any()
    assert hidden[:, 1].any()
    assert net.reset_hidden_state(None, np.array([True])) is None


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


def test_parts_of_a_transformer():
    net = former().tformer
    assert (net.inp.out_features, len(net.layers), net.dropout.p) == (16, 2, 0.05)
    assert net.position_embedding is net.pos_emb
    assert net.norm(torch.randn(2, 16)).shape == (2, 16)
    cli_utils.use_config({"LearnablePosEmb.max_time_idx": 9, "SigmaReparam.fast_init": True})
    learned = former(pos_emb="learned")
    assert learned.tformer.position_embedding.embedding.num_embeddings == 10
    layer = learned.tformer.layers[0].ff1
    exact = torch.linalg.matrix_norm(layer.weight, 2)
    assert torch.dot(layer.u, layer.weight @ layer.v) / exact > 0.9
    assert transformer.LearnedPosEmb is transformer.LearnablePosEmb
    assert transformer.flash_attn is None or hasattr(transformer.flash_attn, "flash_attn_func")


def test_the_layout_of_a_hidden_state():
    net, (seq, times) = former(), sequence()
    hidden = net.init_hidden_state(3, "cpu")
    assert isinstance(hidden, transformer.TformerHiddenState)
    assert hidden.seq_lens.dtype == torch.int32
    assert hidden.key_cache.data.shape == hidden.val_cache.data.shape == (2, 3, 6, 2, 8)
    assert hidden.key_cache.max_seq_len == hidden.max_seq_len == 6
    assert hidden.key_cache.data.isnan().all()
    steps(net, seq[:, :3], times[:, :3], hidden)
    assert hidden.seq_lens.tolist() == [3, 3, 3]
    assert not hidden.key_cache.data[:, :, :3].isnan().any()
    assert hidden.val_cache.data[:, :, 3:].isnan().all()
    first = hidden.key_cache.data[:, :, 0].clone()
    steps(net, seq[:, 3:4], times[:, 3:4], hidden)
    assert hidden.key_cache.data[:, :, 0].equal(first)
    hidden.reset([1])
    assert hidden.seq_lens.tolist() == [4, 0, 4]
    hidden.reset(np.array([False, False, True]))
    assert hidden.seq_lens.tolist() == [4, 0, 0]


@pytest.mark.parametrize("length", [2, 5, 6, 9])
def test_reading_a_hidden_state_changes_nothing(length):
    net, (seq, times) = former(), sequence()
    plain = steps(net, seq, times, net.init_hidden_state(3, "cpu"))
    hidden = net.init_hidden_state(3, "cpu")
    before = steps(net, seq[:, :length], times[:, :length], hidden)
    _ = hidden.key_cache.data, hidden.seq_lens
    after = steps(net, seq[:, length:], times[:, length:], hidden)
    torch.testing.assert_close(torch.cat((before, after), 1), plain)


@pytest.mark.parametrize("length", [2, 9])
def test_a_memory_is_copied_from_one_actor_to_another(length):
    net, (seq, times) = former(), sequence()
    hidden = net.init_hidden_state(3, "cpu")
    steps(net, seq[:, :length], times[:, :length], hidden)
    for cache in (hidden.key_cache, hidden.val_cache):
        cache.data[:, 2] = cache.data[:, 0]
    hidden.seq_lens[2] = hidden.seq_lens[0]
    same = seq[:1, length:].expand(3, -1, -1)
    out = steps(net, same, times[:, length:], hidden)
    torch.testing.assert_close(out[2], out[0])
    assert (out[1] - out[0]).abs().max() > 1e-3


def test_a_memory_is_cleared_by_hand_and_kept_in_copies():
    net, (seq, times) = former(), sequence()
    hidden = net.init_hidden_state(3, "cpu")
    steps(net, seq[:, :4], times[:, :4], hidden)
    saved = copy.deepcopy(hidden)
    hidden.key_cache.data[:, 1] = float("nan")
    hidden.val_cache.data[:, 1] = float("nan")
    hidden.seq_lens[1] = 0
    out = steps(net, seq[:, 4:], times[:, 4:], hidden)
    torch.testing.assert_close(out[1:2], steps(net, seq[1:2, 4:], times[1:2, 4:], net.init_hidden_state(1, "cpu")))
    goes_on = steps(net, seq[:, 4:], times[:, 4:], saved)
    torch.testing.assert_close(goes_on[0], out[0])
    assert (goes_on[1] - out[1]).abs().max() > 1e-3
    hidden.seq_lens[0] = 7
    with pytest.raises(ValueError, match="seq_lens must be from 0 to 6"):
        steps(net, seq[:, :1], times[:, :1], hidden)


def test_a_token_written_from_outside_is_counted_by_update():
    net, (seq, times) = former(), sequence()
    a, b = net.init_hidden_state(3, "cpu"), net.init_hidden_state(3, "cpu")
    steps(net, seq[:, :5], times[:, :5], a)
    for t in range(5):
        for kind in ("key_cache", "val_cache"):
            getattr(b, kind).data[:, :, t] = getattr(a, kind).data[:, :, t]
        if t < 4:
            b.update()
    b.update()
    torch.testing.assert_close(steps(net, seq[:, 5:], times[:, 5:], b), steps(net, seq[:, 5:], times[:, 5:], a))


# ---- attention kernels ---------------------------------------------------------------------------------------------------


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
            assert cache_seqlens.dtype == torch.int32
            assert L == 1
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


@pytest.mark.parametrize("length", [4, 9])
def test_a_kernel_of_theirs_acts_with_actors_at_different_times(length):
    (seq, times), dones = sequence(L=12), np.array([False, True, False])
    ours, theirs = former(attention_type=transformer.VanillaAttention), former(attention_type=TheirKernel)
    theirs.load_state_dict(ours.state_dict(), strict=False)
    outs = []
    for net in (ours, theirs):
        hidden = net.init_hidden_state(3, "cpu")
        steps(net, seq[:, :length], times[:, :length], hidden)
        hidden = net.reset_hidden_state(hidden, dones)
        outs.append(steps(net, seq[:, length:], times[:, length:], hidden))
    torch.testing.assert_close(*outs)


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


def test_their_kernel_may_build_on_ours():
    class Doubled(transformer.VanillaAttention):
        def forward(self, qkv, key_cache=None, val_cache=None, cache_seqlens=None):
            return 2 * super().forward(qkv, key_cache=key_cache, val_cache=val_cache, cache_seqlens=cache_seqlens)

    seq, times = sequence(L=6)
    doubled = former(attention_type=Doubled, normformer_norms=False)
    whole = doubled(seq, times)[0]
    qkv = torch.randn(2, 7, 3, 2, 8)
    torch.testing.assert_close(Doubled()(qkv), 2 * transformer.VanillaAttention()(qkv))
    torch.testing.assert_close(steps(doubled, seq, times, doubled.init_hidden_state(3, "cpu")), whole)


def test_windows_of_flash_attention():
    attention._warned.discard("FlashAttention")
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
