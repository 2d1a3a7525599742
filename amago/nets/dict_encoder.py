"""A timestep encoder for any dict of images and vectors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import gin
import gymnasium as gym
import numpy as np
import torch
from torch import Tensor, nn

from amago.nets import cnn
from amago.nets.cpu.packed import Linear
from amago.nets.ff import MLP, InputNorm, Normalization
from amago.nets.tstep_encoders import TstepEncoder, flat_inputs, register_tstep_encoder, space_shape
from amago.nets.utils import activation_switch, check_positive


@register_tstep_encoder("dict")
@gin.configurable
class DictTstepEncoder(TstepEncoder):
    """Every image through a CNN of its own, all other observations and rl2 through an MLP, and an MLP of the results.

    An observation with three dimensions is an image. Pixels range from 0 to 255; an image whose space ends at 1 is multiplied by 255.
    Images of less than 4 pixels in height or width are read as vectors.

    Args:
        cnn_type: a `amago.nets.cnn.CNN` for all images; None chooses one for each by its size (`amago.nets.cnn.cnn_for`).
        channels_first: images are (C, H, W), not (H, W, C). None: the channels are the smaller of the first and the last
            dimension, the last if they are equal.
        img_features: width of each image before it is merged.
        vector_features: width of the vectors and rl2 before they are merged.
        n_layers, d_hidden, activation: hidden layers of both MLPs, their width and activation, which is also that of CNNs.
        d_output: D.
        out_norm: of the output: "layer", "rmsnorm" or "none".
        hide_rl2s, hide_rewards: as of `TstepEncoder`.
        normalize_inputs: normalise vectors and rl2 by running statistics.
        drqv2_aug: in training mode, shift the images of three quarters of the batch by up to 4 pixels.
        specify_obs_keys: use these observations only; None uses all.

    Attributes:
        image_keys, vector_keys: the observations of each kind, in alphabetical order.

    Raises:
        ValueError: a specified key is not in ``obs_space``, or an image is too small for ``cnn_type``.
    """

    def __init__(
        self,
        obs_space: gym.spaces.Dict,
        rl2_space: gym.spaces.Box,
        cnn_type: type[cnn.CNN] | None = None,
        channels_first: bool | None = None,
        img_features: int = 256,
        vector_features: int = 128,
        n_layers: int = 1,
        d_hidden: int = 256,
        d_output: int = 256,
        out_norm: str = "layer",
        activation: str = "leaky_relu",
        hide_rl2s: bool = False,
        normalize_inputs: bool = True,
        drqv2_aug: bool = False,
        specify_obs_keys: Sequence[str] | None = None,
        hide_rewards: bool = False,
    ) -> None:
        super().__init__(obs_space, rl2_space, hide_rl2s, hide_rewards)
        check_positive(img_features=img_features, vector_features=vector_features, d_output=d_output)
        keys = _chosen_keys(obs_space, specify_obs_keys)
        self.image_keys = [k for k in keys if is_image(obs_space[k])]
        self.vector_keys = [k for k in keys if k not in self.image_keys]
        self.cnns, self.img_features, self.data_augs = nn.ModuleList(), nn.ModuleList(), nn.ModuleList()
        self._pixel_scales: list[float] = []
        for key in self.image_keys:
            shape, space = space_shape(obs_space[key]), obs_space[key]
            first = shape[0] < shape[-1] if channels_first is None else channels_first
            net = (cnn_type or cnn.cnn_for(shape, first))(shape, channels_first=first, activation=activation)
            with torch.no_grad():
                d_cnn = net(net.blank_img).shape[-1]
            self.cnns.append(net)
            self.img_features.append(Linear(d_cnn, img_features))
            self.data_augs.append(cnn.DrQv2Aug(4, channels_first=first) if drqv2_aug else nn.Identity())
            self._pixel_scales.append(255.0 if isinstance(space, gym.spaces.Box) and float(space.high.max()) <= 1.0 else 1.0)
        d_vectors = sum(int(np.prod(space_shape(obs_space[k]))) for k in self.vector_keys) + space_shape(rl2_space)[-1]
        self.in_norm = InputNorm(d_vectors, skip=not normalize_inputs)
        self.vectors = MLP(d_vectors, d_hidden, n_layers, vector_features, activation=activation)
        merged = vector_features + img_features * len(self.image_keys)
        self.merge = MLP(merged, d_hidden, n_layers, d_output, activation=activation)
        self.activation = activation_switch(activation, inplace=True)
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
        x = flat_inputs(obs, self.vector_keys, rl2s, self.in_norm, mask)
        parts = [self.vectors(x.to(self.vectors.in_layer.weight.dtype))]
        for i, key in enumerate(self.image_keys):
            img = self.data_augs[i](obs[key])
            img = img if self._pixel_scales[i] == 1.0 else img * self._pixel_scales[i]
            parts.append(self.img_features[i](self.cnns[i](img)))
        return self.out_norm(self.merge(self.activation(torch.cat([x.to(parts[-1].dtype) for x in parts], dim=-1))))


def is_image(space: gym.Space[Any]) -> bool:
    """Whether `DictTstepEncoder` reads observations of a space as images: three dimensions, and height and width of 4 or more."""
    shape = space.shape or ()
    return len(shape) == 3 and sorted(shape)[1] >= cnn.SMALLEST["GridworldCNN"]


def _chosen_keys(obs_space: gym.spaces.Dict, specified: Sequence[str] | None) -> list[str]:
    known = sorted(obs_space.spaces)
    if specified is None:
        return known
    specified = [specified] if isinstance(specified, str) else list(specified)
    if missing := sorted(set(specified) - set(known)):
        raise ValueError(f"specify_obs_keys={specified}: {missing} not among the observations {known}")
    return sorted(set(specified))
