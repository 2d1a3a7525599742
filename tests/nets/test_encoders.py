"""Timestep encoders of vectors, images and goals, and sequence models as modules: options, masks, refusals."""

import copy

import gymnasium as gym
import numpy as np
import pytest
import torch

import amago.nets.transformer as public
from amago import cli_utils, config
from amago.nets import cnn
from amago.nets.cnn import GridworldCNN, NatureishCNN
from amago.nets.ff import MLP, InputNorm
from amago.nets.goal_embedders import FFGoalEmb, TokenGoalEmb
from amago.nets.traj_encoders import GRUTrajEncoder, TformerTrajEncoder
from amago.nets.transformer import SigmaReparam
from amago.nets.tstep_encoders import CNNTstepEncoder, DictTstepEncoder, FFTstepEncoder, GoalTstepEncoder

RL2 = gym.spaces.Box(-np.inf, np.inf, (3,), np.float32)
VECTORS = gym.spaces.Dict({"z": gym.spaces.Box(-1, 1, (2,)), "pos": gym.spaces.Box(0, 9, (2, 2), np.uint8)})
IMAGE = gym.spaces.Dict({"observation": gym.spaces.Box(0, 255, (36, 40, 3), np.uint8)})


def vectors(B=3, L=4):
    return {"z": torch.randn(B, L, 2), "pos": torch.randint(0, 9, (B, L, 2, 2), dtype=torch.uint8)}, torch.randn(B, L, 3)


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
    linear = MLP(3, 8, 2, 4, activation="identity")
    assert (linear(rl2s) + linear(-rl2s)).allclose(2 * linear(0 * rl2s), atol=1e-6)


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
    norm = torch.linalg.matrix_norm(net.effective_weight().detach(), 2)
    torch.testing.assert_close(norm, torch.tensor(1.0), rtol=1e-4, atol=0)
    net.eval()
    before = net.u.clone(), net.v.clone()
    net(torch.randn(2, 12))
    assert net.u.equal(before[0])
    assert net.v.equal(before[1])


@pytest.mark.parametrize("normalization", [None, "layer", "rmsnorm", "unitball", "unitball-detach", "hypersphere", "simnorm"])
def test_every_norm_of_a_hidden_layer_trains(normalization):
    net = MLP(5, 16, 2, 3, normalization=normalization)
    net(torch.randn(4, 5)).square().sum().backward()
    assert all(p.grad.any() for p in net.parameters())


MIXED = gym.spaces.Dict(
    {
        "far.away": gym.spaces.Box(0, 255, (40, 36, 3), np.uint8),
        "near": gym.spaces.Box(0.0, 1.0, (1, 8, 8), np.float32),
        "strip": gym.spaces.Box(0, 255, (2, 9, 3), np.uint8),  # too flat for any CNN
        "arm": gym.spaces.Box(-5.0, 5.0, (4,)),
    }
)


def observations(space, batch, length):
    return {
        k: torch.from_numpy(np.stack([[s.sample() for _ in range(length)] for _ in range(batch)]))
        for k, s in space.spaces.items()
    }


def test_every_observation_counts():
    torch.manual_seed(0)
    net = DictTstepEncoder(MIXED, RL2, d_output=20).eval()
    assert net.image_keys == ["far.away", "near"]
    assert net.vector_keys == ["arm", "strip"]
    assert [type(x) for x in net.cnns] == [NatureishCNN, GridworldCNN]
    assert [x.channels_first for x in net.cnns] == [False, True]
    obs, rl2s = observations(MIXED, 2, 3), torch.randn(2, 3, 3)
    out = net(obs, rl2s)
    assert out.shape == (2, 3, 20)
    for key, value in obs.items():
        other = net(obs | {key: value.flip(0)}, rl2s)
        assert (other - out).abs().max() > 1e-4, key
    assert (net(obs, rl2s + 1) - out).abs().max() > 1e-4
    part = DictTstepEncoder(MIXED, RL2, specify_obs_keys=["near"]).eval()
    assert part(obs, rl2s).equal(part({"near": obs["near"]}, rl2s))


def test_steps_equal_the_sequence_and_options_reach_the_parts():
    torch.manual_seed(0)
    config.bind({"DictTstepEncoder.img_features": 7, "DictTstepEncoder.vector_features": 5, "DictTstepEncoder.d_hidden": 16})
    net = DictTstepEncoder(MIXED, RL2, drqv2_aug=True, hide_rl2s=True)
    obs, rl2s = observations(MIXED, 4, 3), torch.randn(4, 3, 3)
    net(obs, rl2s, mask=torch.ones(4, 3, 1) > 0)  # statistics of inputs move
    net.eval()
    whole = net(obs, rl2s)
    steps = [net({k: v[:, t : t + 1] for k, v in obs.items()}, rl2s[:, t : t + 1]) for t in range(3)]
    torch.testing.assert_close(torch.cat(steps, dim=1), whole, rtol=1e-5, atol=1e-5)
    assert whole.equal(net(obs, 2 * rl2s))
    assert net.merge.in_layer.in_features == 2 * 7 + 5
    assert net.vectors.in_layer.out_features == 16


def test_the_cnn_encoder_warns_of_what_it_does_not_read():
    with pytest.warns(
        UserWarning, match=r"reads the observation 'far.away' alone: .* not contain 'arm', 'near', 'strip'.*DictTstepEncoder"
    ):
        CNNTstepEncoder(MIXED, RL2, obs_key="far.away")


@pytest.mark.parametrize(
    ("shapes", "want"),
    [
        ({"x": (4,)}, FFTstepEncoder), ({"x": (84, 84, 3)}, CNNTstepEncoder), ({"x": (3, 84, 84)}, DictTstepEncoder),
        ({"x": (7, 7, 3)}, DictTstepEncoder), ({"x": (84, 84, 3), "y": (2,)}, DictTstepEncoder),
    ],
)  # fmt: skip
def test_the_encoder_that_scripts_choose(shapes, want):
    space = gym.spaces.Dict({k: gym.spaces.Box(0, 255, shape, np.uint8) for k, shape in shapes.items()})
    settings = {}
    chosen = cli_utils.default_tstep_encoder(settings, space, d_hidden=9)
    assert chosen is want
    cli_utils.use_config(settings)
    chosen(space, RL2)


POSITIONS = gym.spaces.Box(-1.0, 1.0, (3, 2))
WORDS = gym.spaces.Box(0, 9, (6,), np.int64)
SENTENCES = gym.spaces.Box(-1, 20, (2, 5), np.int32)


def test_positions():
    torch.manual_seed(0)
    net = FFGoalEmb(POSITIONS, d_output=7)
    goals = torch.rand(4, 5, 3, 2)
    out = net(goals)
    assert out.shape == (4, 5, net.emb_dim) == (4, 5, 7)
    changed = goals.clone()
    changed[1, 2, 0] = -1.0  # a goal that is done
    assert ((net(changed) - out).abs().amax(-1) > 1e-5).nonzero().tolist() == [[1, 2]]
    assert (net(goals.flip(2)) - out).abs().max() > 1e-4  # the order of goals counts


def read_alone(net, sentence):
    """One sentence without its padding, token by token."""
    state = torch.zeros(1, 1, net.rnn.hidden_size)
    for token in [t for t in sentence.tolist() if t != net.pad_token]:
        _, state = net.rnn(net.embedding(torch.tensor([[token - net.lowest]])), state)
    return state.flatten()


@pytest.mark.parametrize("length", [1, 4])
@torch.no_grad()
def test_sentences_are_read_to_their_end(length):
    """Padding is not read, repeated instructions change nothing, several goals keep their order."""
    torch.manual_seed(1)
    net = TokenGoalEmb(SENTENCES)
    goals = torch.randint(1, 21, (3, length, 2, 5), dtype=torch.int32)
    goals[0, :, 0, 3:] = 0
    goals[1, :] = goals[1, :1]
    goals[2, 0, 1] = 0
    out = net(goals)
    assert out.shape == (3, length, net.emb_dim)
    for b in range(3):
        for t in range(length):
            expected = net.merge(torch.cat([read_alone(net, s) for s in goals[b, t]]))
            torch.testing.assert_close(out[b, t], expected, rtol=1e-5, atol=1e-5)


def test_words_get_gradients_and_floats_are_tokens_too():
    net = TokenGoalEmb(WORDS, pad_token=None)
    goals = torch.tensor([[[3, 0, 3, 3, 3, 5]] * 2])
    out = net(goals)
    assert out.equal(net(goals.float()))
    out.sum().backward()
    assert net.embedding.weight.grad.abs().sum(1).nonzero().flatten().tolist() == [0, 3, 5]
    padded = TokenGoalEmb(WORDS)
    assert padded(goals[:, :, :6]).shape == (1, 2, 64)


def test_encoder_merges_goals_with_everything_else():
    torch.manual_seed(2)
    space = gym.spaces.Dict({"position": gym.spaces.Box(-1, 1, (2,)), "goals": POSITIONS})
    obs, rl2s = {"position": torch.rand(2, 4, 2), "goals": torch.rand(2, 4, 3, 2)}, torch.randn(2, 4, 3)
    net = GoalTstepEncoder(space, RL2).eval()
    out = net(obs, rl2s)
    assert out.shape == (2, 4, net.emb_dim) == (2, 4, 256)
    assert net.in_norm.mu.shape == (2 + 3,)  # goals are not normalised
    for key in obs:
        assert (net({**obs, key: -obs[key]}, rl2s) - out).abs().max() > 1e-3
    assert (net(obs, -rl2s) - out).abs().max() > 1e-3
    hidden = GoalTstepEncoder(space, RL2, hide_rl2s=True).eval()
    assert hidden(obs, rl2s).equal(hidden(obs, -rl2s))
