"""Timestep encoders, image networks, sequence models as modules: options, masks, refusals, and weights computed once."""

import copy

import gymnasium as gym
import numpy as np
import pytest
import torch

import amago.nets.transformer as public
from amago import config
from amago.nets import cnn
from amago.nets.cpu.weight_cache import WeightCache
from amago.nets.ff import MLP, FFBlock, InputNorm, Normalization
from amago.nets.traj_encoders import FFTrajEncoder, GRUTrajEncoder, TformerTrajEncoder
from amago.nets.transformer import SigmaReparam
from amago.nets.tstep_encoders import CNNTstepEncoder, FFTstepEncoder, TstepEncoder
from amago.nets.utils import activation_switch

RL2 = gym.spaces.Box(-np.inf, np.inf, (3,), np.float32)
VECTORS = gym.spaces.Dict({"z": gym.spaces.Box(-1, 1, (2,)), "pos": gym.spaces.Box(0, 9, (2, 2), np.uint8)})
IMAGE = gym.spaces.Dict({"observation": gym.spaces.Box(0, 255, (36, 40, 3), np.uint8)})


def vectors(B=3, L=4):
    return {"z": torch.randn(B, L, 2), "pos": torch.randint(0, 9, (B, L, 2, 2), dtype=torch.uint8)}, torch.randn(B, L, 3)


# FFTstepEncoder


def test_padding_does_not_count_in_normalisation():
    torch.manual_seed(0)
    x = 3 + 2 * torch.randn(4, 6, 5)
    mask = torch.ones(4, 6, 1, dtype=torch.bool)
    mask[1, 3:] = mask[2, 1:] = False
    real = x[mask.squeeze(-1)]
    padded = x.clone()
    padded[~mask.squeeze(-1)] = float("nan")
    norm, alone = InputNorm(5), InputNorm(5)
    norm.update(padded, mask)
    alone.update(real.unsqueeze(0))
    torch.testing.assert_close(norm.mu, alone.mu)
    torch.testing.assert_close(norm.nu, alone.nu)
    unmasked = InputNorm(5)
    unmasked.update(x)
    assert not torch.allclose(unmasked.mu, norm.mu, rtol=1e-3)


def test_encoder_hands_the_mask_to_the_normaliser():
    obs, rl2s = vectors()
    mask = torch.ones(3, 4, 1, dtype=torch.bool)
    mask[0, 1:] = False
    torch.manual_seed(1)
    one, other = FFTstepEncoder(VECTORS, RL2), FFTstepEncoder(VECTORS, RL2)
    one(obs, rl2s, mask=mask)
    changed = {k: v.clone() for k, v in obs.items()}
    changed["z"][0, 1:] = 4.0
    other(changed, rl2s, mask=mask)
    torch.testing.assert_close(one.in_norm.mu, other.in_norm.mu)
    other(changed, rl2s)
    assert not torch.allclose(one.in_norm.mu, other.in_norm.mu, rtol=1e-3)


def test_normaliser_changes_in_training_mode_only():
    norm = InputNorm(2).eval()
    before = copy.deepcopy(norm.state_dict())
    norm(torch.randn(3, 4, 2))
    assert all(v.equal(before[k]) for k, v in norm.state_dict().items())
    norm.train()(torch.randn(3, 4, 2))
    assert float(norm._t) == 1.0
    assert not norm.mu.equal(before["mu"])


def test_normaliser_survives_what_is_not_finite_or_not_there():
    norm = InputNorm(2)
    x = torch.tensor([[[1.0, float("nan")], [3.0, 1.0]]])
    norm.update(x)
    assert float(norm.mu[0]) != 0.0
    assert float(norm.mu[1]) == 0.0
    before = copy.deepcopy(norm.state_dict())
    norm.update(torch.randn(1, 2, 2), torch.zeros(1, 2, 1, dtype=torch.bool))
    assert all(v.equal(before[k]) for k, v in norm.state_dict().items())


def test_normaliser_converges_and_only_centres_constant_features():
    torch.manual_seed(2)
    norm = InputNorm(3, beta=0.05)
    for _ in range(400):
        x = torch.stack((5 + 2 * torch.randn(8, 16), torch.full((8, 16), 7.0), 1e8 * torch.randn(8, 16)), dim=-1)
        out = norm(x)
    assert abs(out[..., 0].mean()) < 0.3
    assert abs(out[..., 0].std() - 1) < 0.2
    torch.testing.assert_close(out[..., 1], torch.zeros(8, 16), rtol=0, atol=1e-3)
    assert float(norm.sigma[2]) == 1e6
    assert out.abs().max() <= 1e4


def test_ff_encoder_options():
    obs, rl2s = vectors()
    small = FFTstepEncoder(VECTORS, RL2, specify_obs_keys=["z"], d_output=10, out_norm="none", normalize_inputs=False)
    assert small.base.in_layer.in_features == 2 + 3
    assert small.emb_dim == small(obs, rl2s).shape[-1] == 10
    assert not any(k.startswith("in_norm") for k in small.state_dict())
    hidden = FFTstepEncoder(VECTORS, RL2, hide_rl2s=True).eval()
    assert hidden(obs, rl2s).equal(hidden(obs, rl2s + 1))
    shown = FFTstepEncoder(VECTORS, RL2).eval()
    assert not shown(obs, rl2s).equal(shown(obs, rl2s + 1))
    with pytest.raises(ValueError, match=r"specify_obs_keys=\['z', 'q'\]: \['q'\] not among the observations \['pos', 'z'\]"):
        FFTstepEncoder(VECTORS, RL2, specify_obs_keys=["z", "q"])
    with pytest.raises(ValueError, match="n_layers must be at least 1, got n_layers=0"):
        FFTstepEncoder(VECTORS, RL2, n_layers=0)


def test_a_users_own_encoder_as_in_the_tutorial():
    class Robot(TstepEncoder):
        def __init__(self, obs_space, rl2_space):
            super().__init__(obs_space=obs_space, rl2_space=rl2_space)
            self.cnn = cnn.NatureishCNN(img_shape=obs_space["image"].shape)
            width = self.cnn(self.cnn.blank_img).shape[-1]
            self.merge = torch.nn.Linear(width + rl2_space.shape[-1], 64)
            self.out_norm = Normalization("layer", 64)

        @property
        def emb_dim(self):
            return 64

        def inner_forward(self, obs, rl2s, log_dict=None):
            return self.out_norm(self.merge(torch.cat((self.cnn(obs["image"]), rl2s), dim=-1)))

    space = gym.spaces.Dict({"image": gym.spaces.Box(0, 255, (36, 36, 3), np.uint8)})
    net = Robot(space, RL2)
    obs, rl2s = {"image": torch.randint(0, 255, (2, 3, 36, 36, 3), dtype=torch.uint8)}, torch.randn(2, 3, 3)
    mask = torch.ones(2, 3, 1, dtype=torch.bool)
    assert net(obs=obs, rl2s=rl2s, log_dict={}, mask=mask).shape == (2, 3, 64)

    class Watching(Robot):
        def inner_forward(self, obs, rl2s, log_dict=None, mask=None):
            self.saw = mask
            return super().inner_forward(obs, rl2s, log_dict)

    net = Watching(space, RL2)
    net(obs, rl2s, mask=mask)
    assert net.saw is mask


def test_the_signature_says_whether_the_mask_is_taken():
    class Deaf(FFTstepEncoder):
        def inner_forward(self, obs, rl2s, log_dict=None):
            return super().inner_forward(obs, rl2s, log_dict)

    class Everything(FFTstepEncoder):
        def inner_forward(self, obs, rl2s, **others):
            return super().inner_forward(obs, rl2s, **others)

    class Inherits(Deaf):
        """Without a method of its own."""

    assert [c.takes_mask for c in (FFTstepEncoder, Everything, CNNTstepEncoder, Deaf, Inherits)] == [
        True,
        True,
        False,
        False,
        False,
    ]
    obs, rl2s = vectors()
    mask = torch.zeros(3, 4, 1, dtype=torch.bool)
    for cls, counted in ((Deaf, True), (Inherits, True), (Everything, False), (FFTstepEncoder, False)):
        net = cls(VECTORS, RL2)
        net(obs, rl2s, mask=mask)
        assert (float(net.in_norm._t) > 0.0) == counted


# images


def images(B=8, L=2, channels_first=False):
    img = torch.randint(0, 256, (B, L, 36, 40, 3), dtype=torch.uint8)
    return img.permute(0, 1, 4, 2, 3) if channels_first else img


def test_cnn_encoder_options():
    obs, rl2s = {"observation": images(2)}, torch.randn(2, 2, 3)
    net = CNNTstepEncoder(IMAGE, RL2)
    assert net.emb_dim == net(obs, rl2s).shape[-1] == 256
    assert net.img_features.out_features == 256
    assert net.rl2_features.out_features == 12
    hidden = CNNTstepEncoder(IMAGE, RL2, hide_rl2s=True)
    assert hidden(obs, rl2s).equal(hidden(obs, 2 * rl2s))
    raw = CNNTstepEncoder(IMAGE, RL2, skip_rl2_norm=True)
    raw.load_state_dict(net.state_dict())
    assert (raw(obs, rl2s) - net(obs, rl2s)).abs().max() > 1e-4
    first = CNNTstepEncoder(gym.spaces.Dict({"rgb": gym.spaces.Box(0, 255, (3, 36, 40), np.uint8)}), RL2, channels_first=True, obs_key="rgb")  # fmt: skip
    first.load_state_dict(net.state_dict())
    torch.testing.assert_close(first({"rgb": obs["observation"].permute(0, 1, 4, 2, 3)}, rl2s), net(obs, rl2s))
    with pytest.raises(ValueError, match=r"obs_key='rgb' is not among the observations \['observation'\]"):
        CNNTstepEncoder(IMAGE, RL2, obs_key="rgb")
    with pytest.raises(ValueError, match=r"obs_key='z' has shape \(2,\): an image has three dimensions"):
        CNNTstepEncoder(VECTORS, RL2, obs_key="z")


def test_float_images_up_to_one_are_scaled_like_bytes():
    unit = gym.spaces.Dict({"observation": gym.spaces.Box(0.0, 1.0, (36, 40, 3), np.float32)})
    a, b = CNNTstepEncoder(IMAGE, RL2), CNNTstepEncoder(unit, RL2)
    b.load_state_dict(a.state_dict())
    img, rl2s = images(2), torch.randn(2, 2, 3)
    torch.testing.assert_close(b({"observation": img / 255.0}, rl2s), a({"observation": img}, rl2s), rtol=1e-4, atol=1e-4)


def test_cnns_refuse_what_is_no_image_and_what_is_too_small():
    with pytest.raises(ValueError, match=r"img_shape must be \(height, width, channels\), got img_shape=\(36, 36\)"):
        cnn.NatureishCNN(img_shape=(36, 36))
    with pytest.raises(ValueError, match=r"NatureishCNN: img_shape=\(20, 20, 3\) is too small for its convolutions"):
        cnn.NatureishCNN(img_shape=(20, 20, 3))
    with pytest.raises(ValueError, match=r"images must be \(batch, length, \*\(7, 7, 3\)\), got shape \(1, 7, 7, 3\)"):
        cnn.GridworldCNN(img_shape=(7, 7, 3))(torch.zeros(1, 7, 7, 3))
    with pytest.raises(ValueError, match=r"cnn_block_depths must be multiples of 4 \(groups\), got cnn_block_depths=\[6\]"):
        cnn.IMPALAishCNN(img_shape=(20, 20, 3), cnn_block_depths=[6])


def test_impala_by_gin():
    config.bind({
        "amago.nets.tstep_encoders.CNNTstepEncoder.cnn_type": cnn.IMPALAishCNN,
        "amago.nets.cnn.IMPALAishCNN.cnn_block_depths": [8, 12],
        "amago.nets.cnn.IMPALAishCNN.post_group_norm": False,
    })  # fmt: skip
    net = CNNTstepEncoder(IMAGE, RL2)
    assert [b.conv.out_channels for b in net.cnn.blocks] == [8, 12]
    assert not any("norm" in k for k in net.cnn.state_dict())


@pytest.mark.parametrize("channels_first", [False, True])
def test_random_shift(channels_first):
    torch.manual_seed(3)
    aug = cnn.DrQv2Aug(4, channels_first=channels_first)
    img = images(16, 2, channels_first)
    out = aug(img)
    assert out.shape == img.shape
    assert out.dtype == img.dtype
    x, y = (z.permute(0, 1, 3, 4, 2) if channels_first else z for z in (img, out))
    assert y[:4].equal(x[:4])  # a quarter stays
    found = []
    padded = np.pad(x.numpy(), ((0, 0), (0, 0), (4, 4), (4, 4), (0, 0)), mode="edge")
    for b in range(4, 16):
        shifts = [
            (i, j) for i in range(9) for j in range(9) if np.array_equal(padded[b, :, i : i + 36, j : j + 40], y[b].numpy())
        ]
        assert len(shifts) == 1  # one shift for the whole sequence
        found += shifts
    assert len(set(found)) > 6
    assert aug.eval()(img) is img


def test_augmentation_in_training_only():
    torch.manual_seed(4)
    net = CNNTstepEncoder(IMAGE, RL2, drqv2_aug=True)
    obs, rl2s = {"observation": images()}, torch.randn(8, 2, 3)
    assert not net(obs, rl2s).equal(net(obs, rl2s))
    net.eval()
    assert net(obs, rl2s).equal(net(obs, rl2s))


# sequence models


def test_documented_defaults():
    net = TformerTrajEncoder(10, 8)
    layer = net.tformer.layers[0]
    assert (net.emb_dim, len(net.tformer.layers), layer.attention_layer.n_heads, layer.ff1.weight.shape[0]) == (256, 3, 8, 1024)
    assert isinstance(layer.ff1, SigmaReparam)
    assert type(layer.attention_layer.self_attention) is public.ScaledDotProductAttention
    assert GRUTrajEncoder(10, 8).rnn.num_layers == 2
    assert FFTrajEncoder(10, 8).emb_dim == 256


def test_a_gru_may_remember_from_the_start():
    torch.manual_seed(0)
    models = {longest: GRUTrajEncoder(4, 8, d_hidden=500, n_layers=2, longest=longest) for longest in (None, 200.0)}
    for layer in range(2):
        kept = {
            k: m.rnn.get_parameter(f"bias_ih_l{layer}") + m.rnn.get_parameter(f"bias_hh_l{layer}") for k, m in models.items()
        }
        over = {k: 1.0 / torch.sigmoid(-bias[500:1000]) for k, bias in kept.items()}  # timesteps
        assert over[None].max() < 2.2
        assert 1.9 < over[200.0].min() < 2.1
        assert 180.0 < over[200.0].max() < 202.0
    untouched = dict(models[200.0].rnn.named_parameters())["bias_ih_l0"][:500]
    assert untouched.abs().max() < 500**-0.5, "the reset gate is PyTorch's"
    with pytest.raises(ValueError, match=r"longest must be at least 1 timestep, got 0\.9"):
        GRUTrajEncoder(4, 8, longest=0.9)


def test_gin_selects_attention_by_its_public_name():
    config.bind({
        "TformerTrajEncoder.attention_type": public.VanillaAttention,
        "amago.nets.transformer.VanillaAttention.dropout": 0.3,
        "amago.nets.traj_encoders.TformerTrajEncoder.n_layers": 1,
        "amago.nets.transformer.LearnedPosEmb.max_time_idx": 3,
        "TformerTrajEncoder.pos_emb": "learnable",
    })  # fmt: skip
    net = TformerTrajEncoder(4, 8, d_model=8, n_heads=2, d_ff=8).eval()
    assert isinstance(net.tformer.layers[0].attention_layer.self_attention, public.VanillaAttention)
    assert net.tformer.pos_emb.embedding.num_embeddings == 4
    table = net.tformer.pos_emb(torch.tensor([[2, 3, 4, 999]]))
    assert table[0, 1].equal(table[0, 3])
    assert not table[0, 0].equal(table[0, 1])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pos_emb": "alibi"}, "pos_emb='alibi' is unknown: use one of fixed, learned, learnable, rope"),
        ({"n_heads": 3}, "d_model must divide by n_heads, got d_model=8, n_heads=3"),
        ({"n_heads": 8, "pos_emb": "rope"}, "rope needs heads of even width, got d_model / n_heads = 1"),
        ({"d_model": 9, "n_heads": 3}, "d_model must be even for fixed position embeddings, got d_model=9"),
        ({"norm": "batch"}, "unknown normalization 'batch': use 'layer', 'rmsnorm'"),
        ({"activation": "step"}, "activation='step' is unknown: use one of elu, gelu, leaky_relu"),
        ({"dropout_attn": -0.1}, r"dropout_attn must be in \[0, 1\), got dropout_attn=-0.1"),
        ({"dropout_emb": 1.0}, r"dropout_emb must be in \[0, 1\), got dropout_emb=1.0"),
        ({"n_layers": 0}, "n_layers must be at least 1, got n_layers=0"),
    ],
)
def test_transformer_refusals(options, message):
    with pytest.raises(ValueError, match=message):
        TformerTrajEncoder(4, 8, **({"d_model": 8, "n_heads": 2, "d_ff": 8} | options))


def test_input_refusals():
    net = TformerTrajEncoder(4, 8, d_model=8, n_heads=2, d_ff=8)
    times = torch.zeros(2, 3, 1, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"seq must be \(batch, length, 4\), got shape \(2, 3, 5\)"):
        net(torch.zeros(2, 3, 5), times)
    with pytest.raises(ValueError, match=r"time_idxs must be \(2, 3, 1\) for this seq, got shape \(2, 3\)"):
        net(torch.zeros(2, 3, 4), times.squeeze(-1))
    for model in (net, GRUTrajEncoder(4, 8, d_hidden=8)):
        with pytest.raises(ValueError, match="hidden_state has 5 rows, but seq has a batch of 2"):
            model(torch.zeros(2, 1, 4), times[:, :1], model.init_hidden_state(5, "cpu"))
    with pytest.raises(ValueError, match="causal=False: a model whose tokens see the future cannot act step by step"):
        TformerTrajEncoder(4, 8, d_model=8, n_heads=2, d_ff=8, causal=False).init_hidden_state(1, "cpu")
    with pytest.raises(ValueError, match="max_seq_len must be at least 1, got max_seq_len=0"):
        FFTrajEncoder(4, 0)


def test_head_scaling_off_is_not_trained_and_gradients_reach_everything_else():
    for scaling in (True, False):
        net = TformerTrajEncoder(4, 8, d_model=8, n_heads=2, d_ff=8, head_scaling=scaling)
        net(torch.randn(2, 5, 4), torch.arange(5)[None, :, None].expand(2, -1, 1))[0][..., 0].sum().backward()
        for name, p in net.named_parameters():
            assert (p.grad is not None) == (scaling or "head_scaler" not in name), name
            assert p.grad is None or torch.isfinite(p.grad).all(), name


def test_sigma_reparam_tracks_the_spectral_norm():
    torch.manual_seed(5)
    net = SigmaReparam(12, 7)
    assert abs(torch.linalg.matrix_norm(net.effective_weight(), 2).item() - 1.0) < 1e-4  # u and v start from the SVD
    with torch.no_grad():
        net.weight.add_(torch.randn_like(net.weight))
    for _ in range(200):
        net(torch.randn(2, 12))
    torch.testing.assert_close(
        torch.linalg.matrix_norm(net.effective_weight().detach(), 2), torch.tensor(1.0), rtol=1e-4, atol=0
    )
    net.eval()
    before = net.u.clone(), net.v.clone()
    net(torch.randn(2, 12))
    assert net.u.equal(before[0])
    assert net.v.equal(before[1])


def test_sigma_reparam_gradient_goes_through_sigma():
    net = SigmaReparam(6, 4).double().eval()
    x = torch.randn(3, 6, dtype=torch.float64)
    net(x).square().sum().backward()
    u, v, eps = net.u, net.v, 1e-6
    i, j = 2, 3

    def loss(shift):
        w = net.weight.detach().clone()
        w[i, j] += shift
        return (x @ (w * net.gamma.detach() / (u @ w @ v)).T + net.bias.detach()).square().sum()

    numeric = (loss(eps) - loss(-eps)) / (2 * eps)
    torch.testing.assert_close(net.weight.grad[i, j], numeric, rtol=1e-4, atol=1e-6)


def test_two_training_forwards_before_one_backward():
    net = SigmaReparam(6, 4)
    x = torch.randn(3, 6)
    (net(x).sum() + net(x).sum()).backward()
    assert torch.isfinite(net.weight.grad).all()


UPDATES = ["sgd", "adamw fused", "adamw foreach", "load_state_dict", "lerp_", "foreach lerp", "data between modes"]


@pytest.mark.parametrize("sigma_reparam", [True, False])
@pytest.mark.parametrize("update", UPDATES)
def test_weights_computed_once_notice_every_update(update, sigma_reparam):
    torch.manual_seed(6)
    net = TformerTrajEncoder(4, 8, d_model=8, n_heads=2, d_ff=8, n_layers=1, sigma_reparam=sigma_reparam).eval()
    seq, times = torch.randn(2, 5, 4), torch.arange(5)[None, :, None].expand(2, -1, 1)
    with torch.no_grad():
        first = net(seq, times)[0]
        assert net(seq, times)[0].equal(first)
    # gradients off makes a forward remember; the caches of all four linear layers are in use
    layer = net.tformer.layers[0]
    caches = [*layer._caches.values(), *layer.attention_layer._caches.values()]
    assert len(caches) == 4
    assert all(c._value is not None for c in caches)
    params = [p for n, p in net.named_parameters() if "ff" in n or "projection" in n]
    others = [torch.randn_like(p) for p in params]
    for p, g in zip(params, others):
        p.grad = g.clone()
    with torch.no_grad():
        if update == "sgd":
            torch.optim.SGD(params, lr=0.1).step()
        elif update == "adamw fused":
            torch.optim.AdamW(params, lr=0.1, fused=True).step()
        elif update == "adamw foreach":
            torch.optim.AdamW(params, lr=0.1, foreach=True).step()
        elif update == "load_state_dict":
            net.load_state_dict({k: v + 0.1 * torch.randn_like(v) for k, v in net.state_dict().items()})
        elif update == "lerp_":
            for p, g in zip(params, others):
                p.lerp_(g, 0.1)
        elif update == "foreach lerp":
            torch._foreach_lerp_(params, others, 0.1)
        else:
            net.train()
            for p, g in zip(params, others):
                p.data.add_(0.1 * g)
            net.eval()
        got = net(seq, times)[0]
    fresh = TformerTrajEncoder(4, 8, d_model=8, n_heads=2, d_ff=8, n_layers=1, sigma_reparam=sigma_reparam).eval()
    fresh.load_state_dict(net.state_dict())
    torch.testing.assert_close(got, fresh(seq, times)[0].detach(), rtol=1e-5, atol=1e-5)
    assert (got - first).abs().max() > 1e-3


def test_weight_cache_computes_once_and_is_not_copied():
    calls = []
    cache, w = WeightCache(), torch.randn(3)

    def compute():
        calls.append(1)
        return 2 * w

    with torch.no_grad():
        assert cache.get((w,), compute).equal(2 * w)
        cache.get((w,), compute)
        assert len(calls) == 1
        assert copy.deepcopy(cache)._value is None
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert cache.get((w,), compute).dtype == torch.bfloat16
        assert cache.get((w,), compute).dtype == torch.float32
    before = len(calls)
    cache.get((w,), compute)  # gradients on: computed anew
    assert len(calls) == before + 1


# feed-forward pieces


def test_mlp_and_block_shapes_and_dropout():
    net = MLP(5, 7, 3, 2, dropout_p=0.5)
    assert net(torch.randn(4, 5)).shape == (4, 2)
    assert len(net.layers) == 2
    x = torch.randn(4, 5)
    assert not net(x).equal(net(x))
    net.eval()
    assert net(x).equal(net(x))
    block = FFBlock(6, 9)
    y = torch.randn(3, 6)
    with torch.no_grad():
        block.ff2.weight.zero_()
        block.ff2.bias.zero_()
    assert block(y).equal(y)


def test_normalization_by_name():
    x = 3 + 2 * torch.randn(5, 8)
    torch.testing.assert_close(Normalization("layer", 8)(x), torch.nn.functional.layer_norm(x, (8,)))
    torch.testing.assert_close(Normalization("rmsnorm", 8)(x), x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt())
    assert Normalization("none", 8)(x) is x
    with pytest.raises(ValueError, match="activation='' is unknown"):
        activation_switch("")


def test_nets_import_is_light():
    import subprocess
    import sys

    code = "import sys, amago.nets; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
