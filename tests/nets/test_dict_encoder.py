"""DictTstepEncoder: images and vectors together, refusals, a learning run that needs both; what CNNs say about small images."""

import warnings

import gymnasium as gym
import numpy as np
import pytest
import torch

from amago import cli_utils, config
from amago.agent import Agent
from amago.envs import AMAGOEnv
from amago.experiment import Experiment
from amago.loading import DiskTrajDataset
from amago.nets import cnn, tstep_encoders
from amago.nets.cnn import DrQCNN, GridworldCNN, IMPALAishCNN, NatureishCNN
from amago.nets.dict_encoder import DictTstepEncoder
from amago.nets.traj_encoders import FFTrajEncoder
from amago.nets.tstep_encoders import CNNTstepEncoder, FFTstepEncoder

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


def test_padding_does_not_move_the_statistics():
    net = DictTstepEncoder(gym.spaces.Dict({"x": MIXED["arm"]}), RL2)
    x, rl2s = torch.randn(2, 4, 4), torch.randn(2, 4, 3)
    mask = torch.ones(2, 4, 1, dtype=torch.bool)
    mask[0, 2:] = False
    net({"x": torch.where(mask, x, 1e6)}, rl2s, mask=mask)
    assert net.in_norm.mu.abs().max() < 100


def test_what_it_refuses():
    with pytest.raises(ValueError, match=r"specify_obs_keys=\['z'\]: \['z'\] not among the observations"):
        DictTstepEncoder(MIXED, RL2, specify_obs_keys="z")
    with pytest.raises(
        ValueError, match=r"NatureishCNN: img_shape=\(1, 8, 8\) is too small .* from 36x36 pixels on; use GridworldCNN"
    ):
        DictTstepEncoder(MIXED, RL2, cnn_type=NatureishCNN)


@pytest.mark.parametrize("kind", [NatureishCNN, DrQCNN, IMPALAishCNN, GridworldCNN])
def test_cnns_name_their_smallest_image(kind):
    side = cnn.SMALLEST[kind.__name__]
    kind(img_shape=(side, side + 3, 3))
    with pytest.raises(ValueError, match=rf"too small for its convolutions, which take images from {side}x{side} pixels on"):
        kind(img_shape=(side - 1, side + 30, 3))


def test_cnns_name_the_networks_that_take_a_small_image():
    with pytest.raises(
        ValueError, match=r"use DrQCNN \(from 15x15\) or IMPALAishCNN \(from 15x15\) or GridworldCNN \(from 4x4\)"
    ):
        NatureishCNN(img_shape=(3, 20, 20), channels_first=True)
    with pytest.raises(ValueError, match="use an encoder of vectors, such as FFTstepEncoder"):
        GridworldCNN(img_shape=(3, 3, 1))


def test_the_cnn_encoder_says_once_what_it_does_not_read(monkeypatch):
    monkeypatch.setattr(tstep_encoders, "_warned", set())
    with pytest.warns(
        UserWarning, match=r"reads the observation 'far.away' alone: .* not contain 'arm', 'near', 'strip'.*DictTstepEncoder"
    ):
        CNNTstepEncoder(MIXED, RL2, obs_key="far.away")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
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


class Parity(gym.Env):
    """Four steps; the reward is 1 where the action is the exclusive or of an image (dark or bright) and a number (0 or 1)."""

    observation_space = gym.spaces.Dict(
        {"picture": gym.spaces.Box(0, 255, (6, 6, 1), np.uint8), "number": gym.spaces.Box(0.0, 1.0, (1,))}
    )
    action_space = gym.spaces.Discrete(2)

    def _observe(self):
        self._bits = self.np_random.integers(0, 2, 2)
        return {"picture": np.full((6, 6, 1), 255 * self._bits[0], np.uint8), "number": self._bits[1:].astype(np.float32)}

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self._t = 0
        return self._observe(), {}

    def step(self, action):
        self._t += 1
        reward = float(action == self._bits[0] ^ self._bits[1])
        return self._observe(), reward, self._t == 4, False, {}


def parity():
    return AMAGOEnv(Parity(), env_name="Parity")


@pytest.mark.learning
def test_learning_from_an_image_and_a_number_at_once(tmp_path):
    config.bind(
        {
            "DictTstepEncoder.d_hidden": 32, "DictTstepEncoder.d_output": 32, "DictTstepEncoder.img_features": 16,
            "DictTstepEncoder.vector_features": 16, "FFTrajEncoder.d_model": 32, "Actor.d_hidden": 32, "NCritics.d_hidden": 32,
            "Agent.tau": 0.05, "Agent.num_critics": 2, "Multigammas.discrete": [0.5], "Agent.gamma": 0.5, "EpsilonGreedy.steps_anneal": 100,
        }
    )  # fmt: skip
    experiment = Experiment(
        run_name="parity", ckpt_base_dir=str(tmp_path), dataset=DiskTrajDataset(tmp_path, "parity", 2000), max_seq_len=4,
        tstep_encoder_type=DictTstepEncoder, traj_encoder_type=FFTrajEncoder, agent_type=Agent, make_train_env=parity,
        make_val_env=parity, env_mode="sync", parallel_actors=16, val_timesteps_per_epoch=4, train_timesteps_per_epoch=12,
        train_batches_per_epoch=25, batch_size=24, learning_rate=2e-3, lr_warmup_steps=20, epochs=12, val_interval=None,
        ckpt_interval=None, always_save_latest=False, dloader_workers=0, sample_actions=False, verbose=False, seed=0,
    )  # fmt: skip
    experiment.start()
    try:
        experiment.learn()
        metrics = experiment.evaluate_test(parity, timesteps=80)
    finally:
        experiment.close()
    assert metrics["Average Total Return in Parity"] >= 3.8  # of 4; 2.0 without the image, or without the number
