"""Convolutional image encoders, and random-shift augmentation."""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import gin
import gymnasium as gym
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from amago.nets.utils import InputNorm, activation_switch


class CNN(nn.Module, ABC):
    """Base of all image networks: (B, L, H, W, C), or (B, L, C, H, W) with ``channels_first``, to features (B, L, D).

    Pixels range from 0 to 255 and are mapped to image / 128 - 1. A subclass defines `conv_forward`.

    Args:
        img_shape: shape of one image.
        channels_first: ``img_shape`` is (C, H, W), not (H, W, C).
        activation: name, as of `amago.nets.utils.activation_switch`.

    Raises:
        ValueError: ``img_shape`` is not three positive numbers, or too small for the convolutions.
    """

    def __init__(self, img_shape: Sequence[int], channels_first: bool = False, activation: str = "leaky_relu") -> None:
        super().__init__()
        if len(img_shape) != 3 or min(img_shape) < 1:
            order = "(channels, height, width)" if channels_first else "(height, width, channels)"
            raise ValueError(f"img_shape must be {order}, got img_shape={tuple(img_shape)}")
        self.img_shape = tuple(int(s) for s in img_shape)
        self.channels_first = channels_first
        self.activation = activation_switch(activation)

    @property
    def in_channels(self) -> int:
        """C."""
        return self.img_shape[0] if self.channels_first else self.img_shape[-1]

    @property
    def blank_img(self) -> Tensor:
        """One black image, (1, 1, *img_shape), on the device of the parameters: ``cnn(cnn.blank_img).shape[-1]`` is D."""
        parameter = next(self.parameters(), None)
        return torch.zeros((1, 1, *self.img_shape), device=None if parameter is None else parameter.device)

    @abstractmethod
    def conv_forward(self, imgs: Tensor) -> Tensor:
        """(N, C, H, W), values from -1 to 1 -> (N, channels, height, width)."""

    def forward(self, imgs: Tensor, from_float: bool = False, flatten: bool = True) -> Tensor:
        """(B, L, *img_shape) -> (B, L, D), or the output of `conv_forward` (B, L, channels, height, width) without ``flatten``.
        With ``from_float``, images are not mapped."""
        if imgs.ndim != 5 or imgs.shape[2:] != self.img_shape:
            raise ValueError(f"images must be (batch, length, *{self.img_shape}), got shape {tuple(imgs.shape)}")
        B, L = imgs.shape[:2]
        x = imgs.flatten(0, 1)
        if not self.channels_first:
            x = x.permute(0, 3, 1, 2)
        x = x.to(next(self.parameters()).dtype)
        features = self.conv_forward(x if from_float else x / 128.0 - 1.0)
        return features.reshape(B, L, -1) if flatten else features.unflatten(0, (B, L))

    def _check_conv_output(self) -> None:
        """Raise ValueError for an image that is too small; called at the end of constructors."""
        try:
            with torch.no_grad():
                self(self.blank_img)
        except RuntimeError as err:
            sizes = ", ".join(f"{name} from {n}x{n}" for name, n in SMALLEST.items())
            raise ValueError(
                f"{type(self).__name__}: img_shape={self.img_shape} is too small for its convolutions. With default arguments, images "
                f"suit {sizes}, smaller ones an encoder of vectors, such as FFTstepEncoder"
            ) from err


class ImageScale(nn.Module):
    """Map the values of a space of images to pixels from 0 to 255, which `CNN` reads.

    Spaces from 0 to 255 stay as they are, other bounds are mapped to 0 and 255. Without bounds, or with ``by_statistics``, each
    channel is centred at 128 and scaled to a standard deviation of 128, by running statistics of the images in training mode.
    Warns, once, where images of a batch use less than a twentieth of the range.

    Args:
        space: of one image.
        channels_first: it is (C, H, W), not (H, W, C).
        by_statistics: use statistics even where the space has bounds.
        name: of the observation, for the warning.
    """

    _affine: Tensor | None
    """(2, *shape), or (2,) where all bounds are equal: factors and shifts; None for bounds of 0 and 255."""

    def __init__(self, space: gym.Space[Any], channels_first: bool, by_statistics: bool, name: str) -> None:
        super().__init__()
        self.name, self.channels_first, self._checked = name, channels_first, False
        self.norm: InputNorm | None = None
        self.register_buffer("_affine", None, persistent=False)
        shape = space.shape or ()
        ends = (space.low, space.high) if isinstance(space, gym.spaces.Box) else (-np.inf, np.inf)
        low, high = (np.asarray(end, np.float64) for end in ends)
        width = np.broadcast_to(high - low, shape)
        if by_statistics or not (np.isfinite(width).all() and width.min() > 0.0 and width.max() <= LARGEST_RANGE):
            self.norm = InputNorm(shape[0 if channels_first else -1])
            self.norm.load_state_dict(self.at_start())
            return
        if low.min() == low.max() and high.min() == high.max():
            low, high = np.asarray(low.min()), np.asarray(high.max())
        affine = np.stack((255.0 / (high - low), -low * 255.0 / (high - low)))
        if affine.tolist() != [1.0, 0.0]:
            self.register_buffer("_affine", torch.as_tensor(affine, dtype=torch.float32), persistent=False)

    def at_start(self) -> dict[str, Tensor]:
        """The state of the statistics before any data, which leave images as they are."""
        if self.norm is None:
            return {}
        one = torch.ones_like(self.norm.mu)
        return {"mu": 128.0 * one, "nu": 2.0 * 128.0**2 * one, "_t": torch.zeros_like(self.norm._t)}

    def forward(self, imgs: Tensor, mask: Tensor | None = None) -> Tensor:
        """(B, L, *shape) -> the same; ``mask`` (B, L, 1) is False at padding."""
        if self.norm is not None:
            channels = imgs.movedim(2, -1) if self.channels_first else imgs
            flat = channels.flatten(1, 3).float()  # (B, L * H * W, C)
            repeated = None if mask is None else mask.repeat_interleave(flat.shape[1] // mask.shape[1], dim=1)
            scaled = ((self.norm(flat, repeated) + 1.0) * 128.0).view(channels.shape)
            return scaled.movedim(-1, 2) if self.channels_first else scaled
        if self._affine is not None:
            imgs = imgs * self._affine[0] + self._affine[1]
        if self.training and not self._checked:
            self._check(imgs)
        return imgs

    def _check(self, imgs: Tensor) -> None:
        self._checked = True
        used = float(imgs.max()) - float(imgs.min())
        if 0.0 < used < 255.0 / 20.0:
            warnings.warn(
                f"images of {self.name!r} use {used / 2.55:.1f}% of the range of their space, so that a network hardly sees differences: "
                "give the space the bounds of its values, or set normalize_images=True of the timestep encoder",
                stacklevel=2,
            )


LARGEST_RANGE = 1e5
"""Difference of the bounds of a space above which they are ignored."""
SMALLEST = {"NatureishCNN": 36, "DrQCNN": 15, "IMPALAishCNN": 15, "GridworldCNN": 4}
"""Height and width of the smallest image of each network with its default arguments."""


def cnn_for(img_shape: Sequence[int], channels_first: bool = False) -> type[CNN]:
    """The network for images of a size: `NatureishCNN` from 36x36 pixels on, `DrQCNN` from 15x15, `GridworldCNN` below."""
    side = min(img_shape[1:] if channels_first else img_shape[:2])
    if side >= SMALLEST["NatureishCNN"]:
        return NatureishCNN
    return DrQCNN if side >= SMALLEST["DrQCNN"] else GridworldCNN


class _ConvStack(CNN):
    """Convolutions ``conv1``, ``conv2``, ..., each followed by the activation."""

    def __init__(
        self,
        img_shape: Sequence[int],
        channels_first: bool,
        activation: str,
        channels: Sequence[int],
        kernels: Sequence[int],
        strides: Sequence[int],
    ) -> None:
        super().__init__(img_shape, channels_first, activation)
        if not len(channels) == len(kernels) == len(strides) > 0:
            given = f"channels={list(channels)}, kernels={list(kernels)}, strides={list(strides)}"
            raise ValueError(f"channels, kernels and strides need one number for each layer, got {given}")
        self._n_convs = len(channels)
        self._overwrite = activation_switch(activation, inplace=True)
        widths = [self.in_channels, *channels]
        for i, (out, kernel, stride) in enumerate(zip(channels, kernels, strides)):
            self.add_module(f"conv{i + 1}", nn.Conv2d(widths[i], out, kernel, stride))
        self._check_conv_output()

    def conv_forward(self, imgs: Tensor) -> Tensor:
        for i in range(1, self._n_convs + 1):
            imgs = self._overwrite(self.get_submodule(f"conv{i}")(imgs))
        return imgs


@gin.configurable
class NatureishCNN(_ConvStack):
    """Three layers: 8x8 with stride 4, 4x4 with stride 2, 3x3 (Mnih et al. 2015). Images have at least 36x36 pixels."""

    def __init__(
        self,
        img_shape: Sequence[int],
        channels_first: bool = False,
        activation: str = "leaky_relu",
        channels: Sequence[int] = (32, 64, 64),
        kernels: Sequence[int] = (8, 4, 3),
        strides: Sequence[int] = (4, 2, 1),
    ) -> None:
        super().__init__(img_shape, channels_first, activation, channels, kernels, strides)


@gin.configurable
class DrQCNN(_ConvStack):
    """Four 3x3 layers of 32 channels, the first with stride 2 (Yarats et al. 2021)."""

    def __init__(self, img_shape: Sequence[int], channels_first: bool = False, activation: str = "leaky_relu") -> None:
        super().__init__(img_shape, channels_first, activation, (32, 32, 32, 32), (3, 3, 3, 3), (2, 1, 1, 1))


@gin.configurable
class GridworldCNN(_ConvStack):
    """Three 2x2 layers for small grids, such as the 7x7 views of MiniGrid. ``kernels`` and ``strides`` None: 2 and 1 for each layer."""

    def __init__(
        self,
        img_shape: Sequence[int],
        channels_first: bool = False,
        activation: str = "leaky_relu",
        channels: Sequence[int] = (16, 32, 48),
        kernels: Sequence[int] | None = None,
        strides: Sequence[int] | None = None,
    ) -> None:
        kernels, strides = ((default,) * len(channels) if x is None else x for x, default in ((kernels, 2), (strides, 1)))
        super().__init__(img_shape, channels_first, activation, channels, kernels, strides)


class _Residual(nn.Module):
    """x + conv(act(conv(act(x)))), normalised, (N, channels, H, W)."""

    def __init__(self, channels: int, activation: str, group_norm: bool) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1)
        self.norm = nn.GroupNorm(4, channels) if group_norm else nn.Identity()
        self.activation, self._overwrite = activation_switch(activation), activation_switch(activation, inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        h = self.conv1(self.activation(x))
        return self.norm(x + self.conv2(self._overwrite(h)))


class _IMPALABlock(nn.Module):
    """A convolution, max-pooling with stride 2 and two residual connections."""

    def __init__(self, c_in: int, c_out: int, activation: str, group_norm: bool) -> None:
        super().__init__()
        self.conv = nn.Conv2d(c_in, c_out, 3, padding=1)
        self.residual1 = _Residual(c_out, activation, group_norm)
        self.residual2 = _Residual(c_out, activation, group_norm)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(self.conv(x), kernel_size=3, stride=2)
        return self.residual2(self.residual1(x))


@gin.configurable
class IMPALAishCNN(CNN):
    """Residual blocks with max-pooling (Espeholt et al. 2018, arXiv 1802.01561).

    Args:
        cnn_block_depths: channels of each block; each halves height and width.
        post_group_norm: normalise the output of every residual connection in 4 groups. Depths are then multiples of 4.
    """

    def __init__(
        self,
        img_shape: Sequence[int],
        channels_first: bool = False,
        activation: str = "leaky_relu",
        cnn_block_depths: Sequence[int] = (16, 32, 32),
        post_group_norm: bool = True,
    ) -> None:
        super().__init__(img_shape, channels_first, activation)
        widths = [self.in_channels, *cnn_block_depths]
        self.blocks = nn.Sequential(*(_IMPALABlock(a, b, activation, post_group_norm) for a, b in pairwise(widths)))
        self._check_conv_output()

    def conv_forward(self, imgs: Tensor) -> Tensor:
        return self.blocks(imgs)


class DrQv2Aug(nn.Module):
    """Random shifts of images by up to ``pad`` pixels, with repeated edges (Yarats et al. 2021, arXiv 2107.09645).

    They apply in training mode, to the share ``pct_of_batch`` of the sequences, the last ones of the batch. All images of a sequence
    are shifted by the same distance, which preserves motion. Any dtype.
    """

    def __init__(self, pad: int = 4, channels_first: bool = False, pct_of_batch: float = 0.75) -> None:
        super().__init__()
        if pad < 0:
            raise ValueError(f"pad must not be negative, got pad={pad}")
        if not 0.0 <= pct_of_batch <= 1.0:
            raise ValueError(f"pct_of_batch is a share, from 0 to 1, got pct_of_batch={pct_of_batch}")
        self.pad, self.channels_first, self.pct_of_batch = pad, channels_first, pct_of_batch

    def forward(self, imgs: Tensor) -> Tensor:
        """(B, L, H, W, C), or (B, L, C, H, W) with ``channels_first``, to the same."""
        if not self.training or self.pad == 0:
            return imgs
        B, dev = imgs.shape[0], imgs.device
        x = imgs.permute(0, 1, 3, 4, 2) if self.channels_first else imgs
        H, W = x.shape[2:4]
        dy, dx = torch.randint(-self.pad, self.pad + 1, (2, B, 1), device=dev)
        unshifted = torch.arange(B, device=dev).unsqueeze(-1) < int(B * (1.0 - self.pct_of_batch) + 1e-9)
        dy, dx = dy.masked_fill(unshifted, 0), dx.masked_fill(unshifted, 0)
        rows = (torch.arange(H, device=dev) + dy).clamp(0, H - 1)
        cols = (torch.arange(W, device=dev) + dx).clamp(0, W - 1)
        batch = torch.arange(B, device=dev)[:, None, None]
        # indexing puts the dimensions of indices on both sides of a slice first: (B, H, W, L, C)
        shifted = x[batch, :, rows[:, :, None], cols[:, None, :]].permute(0, 3, 1, 2, 4)
        return shifted.permute(0, 1, 4, 2, 3) if self.channels_first else shifted
