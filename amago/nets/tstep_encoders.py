"""Timestep encoders: each step's observation, reward and previous action to one vector, without memory.

Shapes: B sequences or actors, L timesteps, D numbers of output, A numbers of an action; rl2 is [reward, previous action].
"""

from __future__ import annotations

import math
import warnings
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

import gin
import gymnasium as gym
import torch
from torch import Tensor, nn

from amago.compat.names import attributes
from amago.nets import cnn
from amago.nets.ff import MLP, InputNorm, Normalization
from amago.nets.goal_embedders import FFGoalEmb, GoalEmb, TokenGoalEmb
from amago.nets.utils import Linear, Log, activation_switch, check_positive, has_argument
from amago.ops import symlog
from amago.registry import Registry

TSTEP_ENCODERS: Registry[type[TstepEncoder]] = Registry("tstep_encoder")
"""The timestep encoder of each name."""
register_tstep_encoder = TSTEP_ENCODERS.register
get_tstep_encoder_cls = TSTEP_ENCODERS.find
list_registered_tstep_encoders = TSTEP_ENCODERS.names


class TstepEncoder(nn.Module, ABC):
    """Base of all timestep encoders. A subclass defines `inner_forward`, and `emb_dim` or its value ``_emb_dim``.

    Args:
        obs_space: the observations, a flat dict of boxes.
        rl2_space: the space of [reward, previous action].
        hide_rl2s: `inner_forward` receives zeros instead of reward and previous action.
        hide_rewards: it receives zeros instead of the reward.

    The encoders of this module share further arguments:
        n_layers, d_hidden, activation: hidden layers of MLPs, their width and activation.
        d_output: D.
        out_norm: of the output, a method of `amago.nets.ff.Normalization`.
        normalize_inputs: normalise vectors and rl2 by running statistics, which are updated in training mode before they are
            applied. Goals are not normalised.
        specify_obs_keys: use these observations only; None uses all.
        cnn_type: a `amago.nets.cnn.CNN`.
        channels_first: images are (C, H, W), not (H, W, C).
        drqv2_aug: in training mode, shift the images of a share of the sequences, three quarters, by up to 4 pixels.
        normalize_images: scale images by running statistics of each channel, for values that use little of their space. They
            are, too, where the space has no bounds (`amago.nets.cnn.ImageScale`).
        goal_key, goal_emb_type: the observation that holds goals, and their `amago.nets.goal_embedders.GoalEmb`: `FFGoalEmb` for
            numbers, `TokenGoalEmb` for tokens.

    Attributes:
        takes_mask: `inner_forward` has an argument ``mask``, by its signature when the class is defined.

    Raises:
        ValueError: a key is not in ``obs_space``, or an image is not three-dimensional or too small.
    """

    takes_mask: ClassVar[bool] = False
    hide_rl2s: bool = False
    hide_rewards: bool = False
    _emb_dim: int
    in_norm: InputNorm

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        cls.takes_mask = has_argument(cls.inner_forward, "mask")

    def __init__(
        self, obs_space: gym.spaces.Dict, rl2_space: gym.spaces.Box, hide_rl2s: bool = False, hide_rewards: bool = False
    ) -> None:
        super().__init__()
        self.obs_space, self.rl2_space = obs_space, rl2_space
        self.hide_rl2s, self.hide_rewards = hide_rl2s, hide_rewards

    @property
    def emb_dim(self) -> int:
        """D."""
        return self._emb_dim

    def _read_flat(self, keys: Sequence[str], normalize: bool) -> int:
        """Let `_flat` read the observations ``keys``, with the statistics ``in_norm``; returns the width of its result."""
        self._flat_keys = keys
        width = sum(math.prod(self.obs_space[k].shape or ()) for k in keys) + self.rl2_space.shape[-1]
        self.in_norm = InputNorm(width, skip=not normalize)
        return width

    def _flat(self, obs: dict[str, Tensor], rl2s: Tensor, mask: Tensor | None) -> Tensor:
        """Observations and rl2 as one float32 vector a timestep, (B, L, width), normalised."""
        return self.in_norm(torch.cat([*(obs[k].flatten(2).float() for k in self._flat_keys), rl2s.float()], dim=-1), mask)

    @abstractmethod
    def inner_forward(self, obs: dict[str, Tensor], rl2s: Tensor, log_dict: Log = None) -> Tensor:
        """Map (B, L, ...) observations by key and (B, L, 1 + A) rl2s to (B, L, D).

        A subclass that keeps running statistics adds an argument ``mask``: (B, L, 1) bool, False at padding, or None where
        there is no padding.
        """

    def forward(self, obs: dict[str, Tensor], rl2s: Tensor, log_dict: Log = None, mask: Tensor | None = None) -> Tensor:
        """(B, L, D), by `inner_forward`; that receives ``mask`` if it has an argument of the name."""
        if self.hide_rl2s:
            rl2s = torch.zeros_like(rl2s)
        elif self.hide_rewards:
            rl2s = torch.cat((torch.zeros_like(rl2s[..., :1]), rl2s[..., 1:]), dim=-1)
        if self.takes_mask:
            return self.inner_forward(obs, rl2s, log_dict=log_dict, mask=mask)  # type: ignore[call-arg]
        return self.inner_forward(obs, rl2s, log_dict=log_dict)


def _space_of(obs_space: gym.spaces.Dict, **argument: str) -> gym.spaces.Box:
    """The space of the observation that an argument names."""
    ((name, key),) = argument.items()
    if key not in obs_space.spaces:
        raise ValueError(f"{name}={key!r} is not among the observations {sorted(obs_space.spaces)}")
    return obs_space[key]  # type: ignore[return-value]


def _image_space(obs_space: gym.spaces.Dict, **argument: str) -> gym.spaces.Box:
    space = _space_of(obs_space, **argument)
    if len(space.shape) != 3:
        ((name, key),) = argument.items()
        raise ValueError(f"{name}={key!r} has shape {space.shape}: an image has three dimensions")
    return space


def _chosen_keys(obs_space: gym.spaces.Dict, specified: Sequence[str] | None) -> list[str]:
    specified = list(obs_space.spaces) if specified is None else [specified] if isinstance(specified, str) else specified
    for key in specified:
        _space_of(obs_space, specify_obs_keys=key)
    return sorted(set(specified))


def _linear_after(net: cnn.CNN, width: int) -> Linear:
    """A linear layer from the features of a CNN."""
    with torch.no_grad():
        return Linear(net(net.blank_img).shape[-1], width)


@register_tstep_encoder("ff")
@gin.configurable
class FFTstepEncoder(TstepEncoder):
    """Observations, flattened in alphabetical order of their keys, and rl2: normalised by running statistics, then an MLP.

    Args, beside those of `TstepEncoder`:
        norm: of each hidden layer, a method of `amago.nets.ff.Normalization`; None: none.
        auto_scale: make hidden layers as wide as the power of two from the input's width on, between ``d_hidden`` and 8 times it.
    """

    def __init__(
        self,
        obs_space: gym.spaces.Dict,
        rl2_space: gym.spaces.Box,
        n_layers: int = 2,
        d_hidden: int = 512,
        d_output: int = 256,
        norm: str | None = None,
        out_norm: str = "layer",
        activation: str = "leaky_relu",
        hide_rl2s: bool = False,
        normalize_inputs: bool = True,
        specify_obs_keys: Sequence[str] | None = None,
        auto_scale: bool = False,
        hide_rewards: bool = False,
    ) -> None:
        super().__init__(obs_space, rl2_space, hide_rl2s, hide_rewards)
        self.obs_keys = _chosen_keys(obs_space, specify_obs_keys)
        d_inp = self._read_flat(self.obs_keys, normalize_inputs)
        d_hidden = max(d_hidden, min(1 << (d_inp - 1).bit_length(), 8 * d_hidden)) if auto_scale else d_hidden
        self.base = MLP(d_inp, d_hidden, n_layers, d_output, activation=activation, normalization=norm)
        self.out_norm = Normalization(out_norm, d_output)
        self._emb_dim = d_output

    def inner_forward(self, obs: dict[str, Tensor], rl2s: Tensor, log_dict: Log = None, mask: Tensor | None = None) -> Tensor:
        x = self._flat(obs, rl2s, mask)
        return self.out_norm(self.base(x.to(self.base.in_layer.weight.dtype)))


@register_tstep_encoder("goal")
@gin.configurable
class GoalTstepEncoder(TstepEncoder):
    """Goals or instructions through an embedder, merged by an MLP with the inputs of `FFTstepEncoder`; arguments as of
    `TstepEncoder`."""

    def __init__(
        self,
        obs_space: gym.spaces.Dict,
        rl2_space: gym.spaces.Box,
        goal_key: str = "goals",
        goal_emb_type: type[GoalEmb] = FFGoalEmb,
        n_layers: int = 2,
        d_hidden: int = 512,
        d_output: int = 256,
        out_norm: str = "layer",
        activation: str = "leaky_relu",
        hide_rl2s: bool = False,
        normalize_inputs: bool = True,
        hide_rewards: bool = False,
    ) -> None:
        super().__init__(obs_space, rl2_space, hide_rl2s, hide_rewards)
        self.goal_key, self.obs_keys = goal_key, sorted(set(obs_space.spaces) - {goal_key})
        self.goal_emb = goal_emb_type(_space_of(obs_space, goal_key=goal_key))
        d_inp = self._read_flat(self.obs_keys, normalize_inputs)
        self.base = MLP(d_inp + self.goal_emb.emb_dim, d_hidden, n_layers, d_output, activation=activation)
        self.out_norm = Normalization(out_norm, d_output)
        self._emb_dim = d_output

    def inner_forward(self, obs: dict[str, Tensor], rl2s: Tensor, log_dict: Log = None, mask: Tensor | None = None) -> Tensor:
        x = self._flat(obs, rl2s, mask)
        goals = self.goal_emb(obs[self.goal_key])
        return self.out_norm(self.base(torch.cat((x.to(goals.dtype), goals), dim=-1)))


@register_tstep_encoder("cnn")
@gin.configurable
class CNNTstepEncoder(TstepEncoder):
    """One image through a CNN, merged with symlog([reward, previous action]). It reads no other observation, and warns if there
    are any: `DictTstepEncoder` reads all.

    Args, beside those of `TstepEncoder`:
        img_features, rl2_features: widths of image and rl2 before they are merged.
        skip_rl2_norm: do not apply symlog to rl2.
        aug_pct_of_batch: share of the sequences whose images ``drqv2_aug`` shifts.
        obs_key: key of the observation that is the image.
    """

    def __init__(
        self,
        obs_space: gym.spaces.Dict,
        rl2_space: gym.spaces.Box,
        cnn_type: type[cnn.CNN] = cnn.NatureishCNN,
        channels_first: bool = False,
        img_features: int = 256,
        rl2_features: int = 12,
        d_output: int = 256,
        out_norm: str = "layer",
        activation: str = "leaky_relu",
        skip_rl2_norm: bool = False,
        hide_rl2s: bool = False,
        drqv2_aug: bool = False,
        aug_pct_of_batch: float = 0.75,
        obs_key: str = "observation",
        hide_rewards: bool = False,
        normalize_images: bool = False,
    ) -> None:
        super().__init__(obs_space, rl2_space, hide_rl2s, hide_rewards)
        check_positive(img_features=img_features, rl2_features=rl2_features, d_output=d_output)
        space = _image_space(obs_space, obs_key=obs_key)
        if unread := sorted(set(obs_space.spaces) - {obs_key}):
            warnings.warn(
                f"CNNTstepEncoder reads the observation {obs_key!r} alone: the agent's memory will not contain {', '.join(map(repr, unread))}. "
                "To read all observations, use DictTstepEncoder ('dict' for switch_tstep_encoder)",
                stacklevel=2,
            )
        self.image_scale = cnn.ImageScale(space, channels_first, normalize_images, obs_key)
        self.obs_key, self.skip_rl2_norm = obs_key, skip_rl2_norm
        self.data_aug = cnn.DrQv2Aug(4, channels_first, aug_pct_of_batch) if drqv2_aug else None
        self.cnn = cnn_type(space.shape, channels_first=channels_first, activation=activation)
        self.img_features = _linear_after(self.cnn, img_features)
        self.rl2_features = Linear(rl2_space.shape[-1], rl2_features)
        self.merge = Linear(img_features + rl2_features, d_output)
        self.out_norm = Normalization(out_norm, d_output)
        self.activation = activation_switch(activation, inplace=True)
        self._emb_dim = d_output

    def inner_forward(self, obs: dict[str, Tensor], rl2s: Tensor, log_dict: Log = None, mask: Tensor | None = None) -> Tensor:
        img = obs[self.obs_key] if self.data_aug is None else self.data_aug(obs[self.obs_key])
        img_features = self.img_features(self.cnn(self.image_scale(img, mask)))
        rl2s = rl2s if self.skip_rl2_norm else symlog(rl2s)
        rl2_features = self.rl2_features(rl2s.to(self.rl2_features.weight.dtype))
        return self.out_norm(self.merge(self.activation(torch.cat((img_features, rl2_features), dim=-1))))


@register_tstep_encoder("dict")
@gin.configurable(module="amago.nets.dict_encoder")
class DictTstepEncoder(TstepEncoder):
    """Every image through a separate CNN, all other observations and rl2 through an MLP, and an MLP of the results.

    An observation with three dimensions is an image. Images of less than 4 pixels in height or width are read as vectors.

    Args, beside those of `TstepEncoder`:
        cnn_type: None chooses one for each image by its size (`amago.nets.cnn.cnn_for`).
        channels_first: None: the channels are the smaller of the first and the last dimension, the last if they are equal.
        img_features: width of each image before it is merged.
        vector_features: width of the vectors and rl2 before they are merged.

    Attributes:
        image_keys, vector_keys: the observations of each kind, in alphabetical order.
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
        normalize_images: bool = False,
    ) -> None:
        super().__init__(obs_space, rl2_space, hide_rl2s, hide_rewards)
        check_positive(img_features=img_features, vector_features=vector_features)
        keys = _chosen_keys(obs_space, specify_obs_keys)
        self.image_keys = [k for k in keys if is_image(obs_space[k])]
        self.vector_keys = [k for k in keys if k not in self.image_keys]
        self.cnns, self.img_features, self.data_augs = nn.ModuleList(), nn.ModuleList(), nn.ModuleList()
        self.image_scales = nn.ModuleList()
        for key in self.image_keys:
            space = obs_space[key]
            shape: tuple[int, ...] = space.shape or ()
            first = shape[0] < shape[-1] if channels_first is None else channels_first
            net = (cnn_type or cnn.cnn_for(shape, first))(shape, channels_first=first, activation=activation)
            self.cnns.append(net)
            self.img_features.append(_linear_after(net, img_features))
            self.data_augs.append(cnn.DrQv2Aug(4, channels_first=first) if drqv2_aug else nn.Identity())
            self.image_scales.append(cnn.ImageScale(space, first, normalize_images, key))
        d_vectors = self._read_flat(self.vector_keys, normalize_inputs)
        self.vectors = MLP(d_vectors, d_hidden, n_layers, vector_features, activation=activation)
        merged = vector_features + img_features * len(self.image_keys)
        self.merge = MLP(merged, d_hidden, n_layers, d_output, activation=activation)
        self.activation = activation_switch(activation, inplace=True)
        self.out_norm = Normalization(out_norm, d_output)
        self._emb_dim = d_output

    def inner_forward(self, obs: dict[str, Tensor], rl2s: Tensor, log_dict: Log = None, mask: Tensor | None = None) -> Tensor:
        x = self._flat(obs, rl2s, mask)
        parts = [self.vectors(x.to(self.vectors.in_layer.weight.dtype))]
        for i, key in enumerate(self.image_keys):
            img = self.image_scales[i](self.data_augs[i](obs[key]), mask)
            parts.append(self.img_features[i](self.cnns[i](img)))
        return self.out_norm(self.merge(self.activation(torch.cat([x.to(parts[-1].dtype) for x in parts], dim=-1))))


def is_image(space: gym.Space[Any]) -> bool:
    """True if `DictTstepEncoder` reads observations of a space as images: three dimensions, and height and width of 4 or
    more."""
    shape = space.shape or ()
    return len(shape) == 3 and sorted(shape)[1] >= cnn.SMALLEST["GridworldCNN"]


@gin.configurable(module="amago.nets.image_goal_encoder")
class ImageGoalTstepEncoder(TstepEncoder):
    """An image (H, W, C) through a CNN, goals through an embedder, and the other inputs normalised; an MLP merges them.

    Args, beside those of `TstepEncoder`:
        image_key: key of the observation that is the image.
        img_features: width of the image before it is merged.

    Raises:
        ValueError: ``image_key`` and ``goal_key`` are the same.
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
        normalize_images: bool = False,
    ) -> None:
        super().__init__(obs_space, rl2_space, hide_rl2s, hide_rewards)
        check_positive(img_features=img_features)
        if image_key == goal_key:
            raise ValueError(f"image_key and goal_key must be two observations, both are {image_key!r}")
        image, goals = _image_space(obs_space, image_key=image_key), _space_of(obs_space, goal_key=goal_key)
        self.image_scale = cnn.ImageScale(image, False, normalize_images, image_key)
        self.image_key, self.goal_key = image_key, goal_key
        self.obs_keys = sorted(set(obs_space.spaces) - {image_key, goal_key})
        self.cnn = cnn_type(image.shape, channels_first=False, activation=activation)
        self.img_features = _linear_after(self.cnn, img_features)
        self.goal_emb = goal_emb_type(goals)
        d_rest = self._read_flat(self.obs_keys, normalize_inputs)
        self.base = MLP(img_features + self.goal_emb.emb_dim + d_rest, d_hidden, n_layers, d_output, activation=activation)
        self.out_norm = Normalization(out_norm, d_output)
        self._emb_dim = d_output

    def inner_forward(self, obs: dict[str, Tensor], rl2s: Tensor, log_dict: Log = None, mask: Tensor | None = None) -> Tensor:
        rest = self._flat(obs, rl2s, mask)
        img = self.img_features(self.cnn(self.image_scale(obs[self.image_key], mask)))
        goals = self.goal_emb(obs[self.goal_key])
        return self.out_norm(self.base(torch.cat((img, goals.to(img.dtype), rest.to(img.dtype)), dim=-1)))


__getattr__ = attributes(__name__)
