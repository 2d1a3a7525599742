"""Pictures read by networks of a client's own, bound as classes, functions and partial functions (A, R)."""

import functools

import gin
import gymnasium as gym
import numpy as np
import torch
from small import SIZES, experiment
from torch import nn

import amago
from amago.cli_utils import switch_tstep_encoder, use_config
from amago.nets.cnn import CNN, DrQv2Aug, GridworldCNN, NatureishCNN


class Dots(gym.Env):
    observation_space = gym.spaces.Box(0, 255, (3, 40, 40), np.uint8)
    action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return self.observation_space.sample(), {}

    def step(self, action):
        self.t += 1
        return self.observation_space.sample(), float(action), self.t == 5, False, {}


@gin.configurable
class OwnCNN(CNN):
    def __init__(self, img_shape, channels_first, activation, width=8):
        super().__init__(img_shape, channels_first=channels_first, activation=activation)
        self.conv = nn.Conv2d(img_shape[0] if channels_first else img_shape[-1], width, 8, stride=4)

    def conv_forward(self, imgs):
        return torch.relu(self.conv(imgs))


def natureish(img_shape, channels_first, activation):
    return NatureishCNN(img_shape=img_shape, channels_first=channels_first, activation=activation)


if __name__ == "__main__":
    make = lambda: amago.envs.AMAGOEnv(Dots(), env_name="dots")
    for i, cnn in enumerate((OwnCNN, natureish, functools.partial(OwnCNN, width=4))):
        config = dict(SIZES)
        encoder = switch_tstep_encoder(config, "cnn", cnn_type=cnn, channels_first=True, drqv2_aug=i == 0)
        use_config(config)
        exp = experiment(
            run_name=f"run{i}", make_train_env=make, make_val_env=make, tstep_encoder_type=encoder, agent_type=amago.Agent, epochs=1,
            traj_encoder_type=amago.nets.traj_encoders.FFTrajEncoder,
        )  # fmt: skip
        exp.start()
        exp.learn()
        assert exp.policy.tstep_encoder.obs_key == "observation"
        policy = amago.load_policy(str(exp.ckpt_dir.parent if hasattr(exp.ckpt_dir, "parent") else exp.ckpt_dir + "/.."))
        assert policy.act(Dots.observation_space.sample()) in (0, 1)
        exp.close()
    net = GridworldCNN(img_shape=(7, 7, 3), channels_first=False, activation="relu")
    assert net(torch.zeros(2, 3, 7, 7, 3), from_float=True, flatten=True).shape[:2] == (2, 3)
    assert DrQv2Aug(pad=4, channels_first=False)(torch.zeros(2, 3, 9, 9, 3)).shape == (2, 3, 9, 9, 3)
