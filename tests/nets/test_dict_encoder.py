"""DictTstepEncoder: images and vectors together, refusals, a learning run that needs both; what CNNs say about small images."""

import gymnasium as gym
import numpy as np
import pytest
import torch

from amago import cli_utils, config
from amago.nets.cnn import GridworldCNN, NatureishCNN
from amago.nets.tstep_encoders import CNNTstepEncoder, DictTstepEncoder, FFTstepEncoder

RL2 = gym.spaces.Box(-np.inf, np.inf, (3,), np.float32)
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
