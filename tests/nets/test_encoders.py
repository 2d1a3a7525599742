"""Timestep encoders, image networks, sequence models as modules: options, masks, refusals, and weights computed once."""

import copy

import gymnasium as gym
import numpy as np
import pytest
import torch

import amago.nets.transformer as public
from amago import config
from amago.nets import cnn
from amago.nets.ff import MLP, InputNorm
from amago.nets.traj_encoders import GRUTrajEncoder, TformerTrajEncoder
from amago.nets.transformer import SigmaReparam
from amago.nets.tstep_encoders import CNNTstepEncoder, FFTstepEncoder

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
    norm.update_stats(padded, mask)
    alone.update_stats(real.unsqueeze(0))
    torch.testing.assert_close(norm.mu, alone.mu)
    torch.testing.assert_close(norm.nu, alone.nu)
    unmasked = InputNorm(5)
    unmasked.update_stats(x)
    assert not torch.allclose(unmasked.mu, norm.mu, rtol=1e-3)


def test_normaliser_survives_what_is_not_finite_or_not_there():
    norm = InputNorm(2)
    x = torch.tensor([[[1.0, float("nan")], [3.0, 1.0]]])
    norm.update_stats(x)
    assert float(norm.mu[0]) != 0.0
    assert float(norm.mu[1]) == 0.0
    before = copy.deepcopy(norm.state_dict())
    norm.update_stats(torch.randn(1, 2, 2), torch.zeros(1, 2, 1, dtype=torch.bool))
    assert all(v.equal(before[k]) for k, v in norm.state_dict().items())


def test_ff_encoder_options():
    obs, rl2s = vectors()
    small = FFTstepEncoder(VECTORS, RL2, specify_obs_keys=["z"], d_output=10, out_norm="none", normalize_inputs=False)
    assert small.base.in_layer.in_features == 2 + 3
    assert small.emb_dim == small(obs, rl2s).shape[-1] == 10
    hidden = FFTstepEncoder(VECTORS, RL2, hide_rl2s=True).eval()
    assert hidden(obs, rl2s).equal(hidden(obs, rl2s + 1))
    shown = FFTstepEncoder(VECTORS, RL2).eval()
    assert not shown(obs, rl2s).equal(shown(obs, rl2s + 1))


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


# sequence models


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


# feed-forward pieces


@pytest.mark.parametrize("normalization", [None, "layer", "rmsnorm", "unitball", "unitball-detach", "hypersphere", "simnorm"])
def test_every_norm_of_a_hidden_layer_trains(normalization):
    net = MLP(5, 16, 2, 3, normalization=normalization)
    net(torch.randn(4, 5)).square().sum().backward()
    assert all(p.grad.any() for p in net.parameters())
