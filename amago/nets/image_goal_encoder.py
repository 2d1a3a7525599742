"""A timestep encoder for observations with an image and goals or instructions."""

from __future__ import annotations

from typing import Any

import gin
import gymnasium as gym
import torch
from torch import Tensor, nn

from amago.nets import cnn
from amago.nets.ff import MLP, InputNorm, Normalization
from amago.nets.goal_embedders import GoalEmb, TokenGoalEmb
from amago.nets.tstep_encoders import TstepEncoder, flat_inputs, flat_width, space_shape
from amago.nets.utils import check_positive


@gin.configurable
class ImageGoalTstepEncoder(TstepEncoder):
    """An image through a CNN, goals through an embedder, and the other inputs normalised; an MLP merges them.

    Pixels range from 0 to 255. An image whose space ends at 1 (the bits of a grid, or unit pixels) is multiplied by 255.

    Args:
        image_key: key of the observation that is the image, (H, W, C).
        goal_key: key of the observation that holds the goals.
        cnn_type: a `amago.nets.cnn.CNN`; `GridworldCNN` for small grids.
        goal_emb_type: a `amago.nets.goal_embedders.GoalEmb`: `TokenGoalEmb` for tokens, `FFGoalEmb` for numbers.
        img_features: width of the image before it is merged.
        n_layers, d_hidden, activation: hidden layers of the MLP, their width and activation.
        d_output: D.
        out_norm: of the output: "layer", "rmsnorm" or "none".
        hide_rl2s, hide_rewards: as of `TstepEncoder`.
        normalize_inputs: normalise the other observations and rl2 by running statistics.

    Raises:
        ValueError: a key is not in ``obs_space``, both keys are the same, or the image is not three-dimensional.
    """

    def __init__(
        self,
        obs_space: gym.spaces.Dict,
        rl2_space: gym.spaces.Box,
        image_key: str = "observation",
        goal_key: str = "goals",
        cnn_type: type[cnn.CNN] = cnn.NatureishCNN,
        goal_emb_type: type[GoalEmb] = TokenGoalEmb,
        img_features: int = 128,
        n_layers: int = 1,
        d_hidden: int = 256,
        d_output: int = 256,
        out_norm: str = "layer",
        activation: str = "leaky_relu",
        hide_rl2s: bool = False,
        normalize_inputs: bool = True,
        hide_rewards: bool = False,
    ) -> None:
        super().__init__(obs_space, rl2_space, hide_rl2s, hide_rewards)
        check_positive(img_features=img_features)
        known = sorted(obs_space.spaces)
        for name, key in (("image_key", image_key), ("goal_key", goal_key)):
            if key not in known:
                raise ValueError(f"{name}={key!r} is not among the observations {known}")
        if image_key == goal_key:
            raise ValueError(f"image_key and goal_key must be two observations, both are {image_key!r}")
        space = obs_space[image_key]
        shape = space_shape(space)
        if len(shape) != 3:
            raise ValueError(f"image_key={image_key!r} has shape {shape}: an image has three dimensions")
        self._pixel_scale = 255.0 if isinstance(space, gym.spaces.Box) and float(space.high.max()) <= 1.0 else 1.0
        self.image_key, self.goal_key = image_key, goal_key
        self.obs_keys = sorted(set(known) - {image_key, goal_key})
        self.cnn = cnn_type(shape, channels_first=False, activation=activation)
        with torch.no_grad():
            d_cnn = self.cnn(self.cnn.blank_img).shape[-1]
        self.img_features = nn.Linear(d_cnn, img_features)
        self.goal_emb = goal_emb_type(obs_space[goal_key])
        d_rest = flat_width(obs_space, self.obs_keys, rl2_space)
        self.in_norm = InputNorm(d_rest, skip=not normalize_inputs)
        self.base = MLP(img_features + self.goal_emb.emb_dim + d_rest, d_hidden, n_layers, d_output, activation=activation)
        self.out_norm = Normalization(out_norm, d_output)
        self._emb_dim = d_output

    @property
    def emb_dim(self) -> int:
        return self._emb_dim

    def inner_forward(
        self,
        obs: dict[str, Tensor],
        rl2s: Tensor,
        log_dict: dict[str, Any] | None = None,
        mask: Tensor | None = None,
    ) -> Tensor:
        rest = flat_inputs(obs, self.obs_keys, rl2s, self.in_norm, mask)
        img = obs[self.image_key]
        img = self.img_features(self.cnn(img if self._pixel_scale == 1.0 else img * self._pixel_scale))
        goals = self.goal_emb(obs[self.goal_key])
        return self.out_norm(self.base(torch.cat((img, goals.to(img.dtype), rest.to(img.dtype)), dim=-1)))
