"""Timestep encoders: each step's observation, reward and previous action to one vector, without memory.

Shapes: B sequences or actors, L timesteps, D numbers of output, A numbers of an action; rl2 is [reward, previous action].
"""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

import gin
import gymnasium as gym
import numpy as np
import torch
from torch import Tensor, nn

from amago.config import NamedArguments
from amago.nets import cnn
from amago.nets.cpu.packed import Linear
from amago.nets.ff import MLP, InputNorm, Normalization
from amago.nets.goal_embedders import FFGoalEmb, GoalEmb
from amago.nets.utils import activation_switch, check_positive, has_argument
from amago.ops import symlog
from amago.registry import Registry

TSTEP_ENCODERS: Registry[type[TstepEncoder]] = Registry("tstep_encoder")
"""The timestep encoder of each name."""
register_tstep_encoder = TSTEP_ENCODERS.register
get_tstep_encoder_cls = TSTEP_ENCODERS.find
list_registered_tstep_encoders = TSTEP_ENCODERS.names


class TstepEncoder(NamedArguments, nn.Module, ABC):
    """Base of all timestep encoders. A subclass defines `emb_dim` and `inner_forward`.

    Args:
        obs_space: the observations, a flat dict of boxes.
        rl2_space: the space of [reward, previous action].
        hide_rl2s: `inner_forward` receives zeros instead of reward and previous action.
        hide_rewards: it receives zeros instead of the reward.

    Attributes:
        takes_mask: `inner_forward` has an argument ``mask``. Its signature says so when the class is defined.
    """

    takes_mask: ClassVar[bool] = False
    hide_rl2s: bool = False
    hide_rewards: bool = False

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.takes_mask = has_argument(cls.inner_forward, "mask")

    def __init__(
        self, obs_space: gym.spaces.Dict, rl2_space: gym.spaces.Box, hide_rl2s: bool = False, hide_rewards: bool = False
    ) -> None:
        super().__init__()
        self.obs_space = obs_space
        self.rl2_space = rl2_space
        self.hide_rl2s, self.hide_rewards = hide_rl2s, hide_rewards

    @property
    @abstractmethod
    def emb_dim(self) -> int:
        """D."""

    @abstractmethod
    def inner_forward(self, obs: dict[str, Tensor], rl2s: Tensor, log_dict: dict[str, Any] | None = None) -> Tensor:
        """Map (B, L, ...) observations by key and (B, L, 1 + A) rl2s to (B, L, D).

        A subclass that keeps running statistics adds an argument ``mask``: (B, L, 1) bool, False at padding, or None where there is no
        padding.
        """

    def forward(
        self, obs: dict[str, Tensor], rl2s: Tensor, log_dict: dict[str, Any] | None = None, mask: Tensor | None = None
    ) -> Tensor:
        """(B, L, D), by `inner_forward`; that receives ``mask`` if it has an argument of the name."""
        if self.hide_rl2s:
            rl2s = torch.zeros_like(rl2s)
        elif self.hide_rewards:
            rl2s = torch.cat((torch.zeros_like(rl2s[..., :1]), rl2s[..., 1:]), dim=-1)
        if self.takes_mask:
            return self.inner_forward(obs, rl2s, log_dict=log_dict, mask=mask)  # type: ignore[call-arg]
        return self.inner_forward(obs, rl2s, log_dict=log_dict)


def space_shape(space: gym.Space[Any]) -> tuple[int, ...]:
    """The shape of a space.

    Raises:
        ValueError: it has none.
    """
    if space.shape is None:
        raise ValueError(f"observation space {space} has no shape")
    return space.shape


def flat_width(obs_space: gym.spaces.Dict, keys: Sequence[str], rl2_space: gym.spaces.Box) -> int:
    """The width of the output of `flat_inputs`."""
    return sum(int(np.prod(space_shape(obs_space[k]))) for k in keys) + space_shape(rl2_space)[-1]


def scaled_width(d_inp: int, d_hidden: int) -> int:
    """``d_hidden``, or the power of two from ``d_inp`` on if that is larger, but at most 8 x ``d_hidden``."""
    return max(d_hidden, min(1 << (d_inp - 1).bit_length(), 8 * d_hidden))


def flat_inputs(obs: dict[str, Tensor], keys: Sequence[str], rl2s: Tensor, norm: InputNorm, mask: Tensor | None) -> Tensor:
    """The observations ``keys`` and rl2 as one float32 vector a timestep, (B, L, `flat_width`), normalised by ``norm``."""
    return norm(torch.cat([*(obs[k].flatten(2).float() for k in keys), rl2s.float()], dim=-1), mask)


@register_tstep_encoder("ff")
@gin.configurable
class FFTstepEncoder(TstepEncoder):
    """Observations, flattened in alphabetical order of their keys, and rl2: normalised by running statistics, then an MLP.

    Args:
        n_layers, d_hidden, activation: hidden layers of the MLP, their width and activation.
        d_output: D.
        norm: of each hidden layer, a method of `amago.nets.ff.Normalization`; None: none.
        out_norm: of the output, a method of it.
        hide_rl2s, hide_rewards: as of `TstepEncoder`.
        normalize_inputs: normalise by running statistics, which are updated in training mode before they are applied.
        specify_obs_keys: use these observations only; None uses all.
        auto_scale: make hidden layers at least as wide as the input (`scaled_width`).

    Raises:
        ValueError: a specified key is not in ``obs_space``.
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
        known = sorted(obs_space.spaces)
        if isinstance(specify_obs_keys, str):
            specify_obs_keys = [specify_obs_keys]
        missing = sorted(set(specify_obs_keys or ()) - set(known))
        if missing:
            raise ValueError(f"specify_obs_keys={list(specify_obs_keys or ())}: {missing} not among the observations {known}")
        self.obs_keys = known if specify_obs_keys is None else sorted(set(specify_obs_keys))
        d_inp = flat_width(obs_space, self.obs_keys, rl2_space)
        self.in_norm = InputNorm(d_inp, skip=not normalize_inputs)
        d_hidden = scaled_width(d_inp, d_hidden) if auto_scale else d_hidden
        self.base = MLP(d_inp, d_hidden, n_layers, d_output, activation=activation, normalization=norm)
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
        x = flat_inputs(obs, self.obs_keys, rl2s, self.in_norm, mask)
        return self.out_norm(self.base(x.to(self.base.in_layer.weight.dtype)))


@register_tstep_encoder("goal")
@gin.configurable
class GoalTstepEncoder(TstepEncoder):
    """Goals or instructions through an embedder, merged by an MLP with the inputs of `FFTstepEncoder`.

    Args:
        goal_key: key of the observation that holds the goals.
        goal_emb_type: a `amago.nets.goal_embedders.GoalEmb`: `FFGoalEmb` for numbers, `TokenGoalEmb` for tokens.
        n_layers, d_hidden, activation: hidden layers of the MLP, their width and activation.
        d_output: D.
        out_norm: of the output: "layer", "rmsnorm" or "none".
        hide_rl2s, hide_rewards: as of `TstepEncoder`.
        normalize_inputs: normalise the other observations and rl2 by running statistics. Goals are not normalised.

    Raises:
        ValueError: ``goal_key`` is not in ``obs_space``.
    """

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
        if goal_key not in obs_space.spaces:
            raise ValueError(f"goal_key={goal_key!r} is not among the observations {sorted(obs_space.spaces)}")
        self.goal_key = goal_key
        self.obs_keys = sorted(set(obs_space.spaces) - {goal_key})
        self.goal_emb = goal_emb_type(obs_space[goal_key])
        d_inp = flat_width(obs_space, self.obs_keys, rl2_space)
        self.in_norm = InputNorm(d_inp, skip=not normalize_inputs)
        self.base = MLP(d_inp + self.goal_emb.emb_dim, d_hidden, n_layers, d_output, activation=activation)
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
        x = flat_inputs(obs, self.obs_keys, rl2s, self.in_norm, mask)
        goals = self.goal_emb(obs[self.goal_key])
        return self.out_norm(self.base(torch.cat((x.to(goals.dtype), goals), dim=-1)))


_warned: set[tuple[str, ...]] = set()


def _warn_of_unread_keys(obs_key: str, unread: list[str]) -> None:
    """Warn, once a process and list of keys, that `CNNTstepEncoder` does not read them."""
    if unread and (obs_key, *unread) not in _warned:
        _warned.add((obs_key, *unread))
        warnings.warn(
            f"CNNTstepEncoder reads the observation {obs_key!r} alone: the agent's memory will not contain {', '.join(map(repr, unread))}. "
            "To read all observations, use DictTstepEncoder (amago.nets.dict_encoder; 'dict' for switch_tstep_encoder)",
            stacklevel=3,
        )


@register_tstep_encoder("cnn")
@gin.configurable
class CNNTstepEncoder(TstepEncoder):
    """One image through a CNN, merged with symlog([reward, previous action]). It reads no other observation, and warns if there are any.

    `amago.nets.dict_encoder.DictTstepEncoder` reads all.

    Args:
        cnn_type: a `amago.nets.cnn.CNN`.
        channels_first: the image is (C, H, W), not (H, W, C).
        img_features, rl2_features: widths of image and rl2 before they are merged.
        d_output: D.
        out_norm: of the output: "layer", "rmsnorm" or "none".
        activation: name, of the CNN and between the linear layers.
        skip_rl2_norm: do not apply symlog to rl2.
        hide_rl2s, hide_rewards: as of `TstepEncoder`.
        drqv2_aug: in training mode, shift images randomly by up to 4 pixels.
        aug_pct_of_batch: share of the sequences whose images are shifted.
        obs_key: key of the observation that is the image.

    Pixels range from 0 to 255. A float image whose space ends at 1 is multiplied by 255.

    Raises:
        ValueError: ``obs_key`` is not in ``obs_space``, or its space is not three-dimensional.
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
    ) -> None:
        super().__init__(obs_space, rl2_space, hide_rl2s, hide_rewards)
        check_positive(img_features=img_features, rl2_features=rl2_features, d_output=d_output)
        if obs_key not in obs_space.spaces:
            raise ValueError(f"obs_key={obs_key!r} is not among the observations {sorted(obs_space.spaces)}")
        space = obs_space[obs_key]
        shape = space_shape(space)
        if len(shape) != 3:
            raise ValueError(f"obs_key={obs_key!r} has shape {shape}: an image has three dimensions")
        _warn_of_unread_keys(obs_key, sorted(set(obs_space.spaces) - {obs_key}))
        unit = isinstance(space, gym.spaces.Box) and np.issubdtype(space.dtype, np.floating) and float(space.high.max()) <= 1.0
        self._pixel_scale = 255.0 if unit else 1.0
        self.obs_key, self.skip_rl2_norm = obs_key, skip_rl2_norm
        self.data_aug = cnn.DrQv2Aug(4, channels_first, aug_pct_of_batch) if drqv2_aug else None
        self.cnn = cnn_type(shape, channels_first=channels_first, activation=activation)
        with torch.no_grad():
            d_cnn = self.cnn(self.cnn.blank_img).shape[-1]
        self.img_features = Linear(d_cnn, img_features)
        self.rl2_features = nn.Linear(space_shape(rl2_space)[-1], rl2_features)
        self.merge = Linear(img_features + rl2_features, d_output)
        self.out_norm = Normalization(out_norm, d_output)
        self.activation = activation_switch(activation, inplace=True)
        self._emb_dim = d_output

    @property
    def emb_dim(self) -> int:
        return self._emb_dim

    def inner_forward(self, obs: dict[str, Tensor], rl2s: Tensor, log_dict: dict[str, Any] | None = None) -> Tensor:
        img = obs[self.obs_key]
        if self.data_aug is not None:
            img = self.data_aug(img)
        if self._pixel_scale != 1.0:
            img = img * self._pixel_scale
        rl2s = rl2s if self.skip_rl2_norm else symlog(rl2s)
        img_features = self.img_features(self.cnn(img))
        rl2_features = self.rl2_features(rl2s.to(self.rl2_features.weight.dtype))
        merged = torch.cat((img_features, rl2_features), dim=-1)
        return self.out_norm(self.merge(self.activation(merged)))
