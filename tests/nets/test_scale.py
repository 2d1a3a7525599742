"""Observations of any size: pictures that are not colours from 0 to 255, vectors of tiny and huge numbers, and their running statistics."""

import gymnasium as gym
import numpy as np
import pytest
import torch
from torch import nn

import amago
from amago.nets import cnn
from amago.nets.actor_critic import PopArtLayer
from amago.nets.traj_encoders import FFTrajEncoder
from amago.nets.tstep_encoders import CNNTstepEncoder, DictTstepEncoder, ImageGoalTstepEncoder
from amago.nets.utils import InputNorm
from amago.run.checkpoint import load_into

RL2 = gym.spaces.Box(-np.inf, np.inf, (3,))
SHAPE = (16, 16, 2)
COLOURS = gym.spaces.Box(0, 255, SHAPE, np.uint8)
GOALS = gym.spaces.Box(-1, 1, (2, 3))
ENCODERS = {
    "cnn": (CNNTstepEncoder, {"cnn_type": cnn.GridworldCNN}),
    "dict": (DictTstepEncoder, {"cnn_type": cnn.GridworldCNN}),
    "goal": (ImageGoalTstepEncoder, {"cnn_type": cnn.GridworldCNN, "goal_emb_type": amago.nets.goal_embedders.FFGoalEmb}),
}


def encoder(kind, space, **options):
    torch.manual_seed(0)
    cls, arguments = ENCODERS[kind]
    spaces = {"observation": space} | ({"goals": GOALS} if kind == "goal" else {})
    return cls(gym.spaces.Dict(spaces), RL2, **arguments, **options)


def inputs(kind, images):
    obs = {"observation": images}
    if kind == "goal":
        obs["goals"] = torch.zeros(*images.shape[:2], *GOALS.shape)
    return obs, torch.zeros(*images.shape[:2], 3)


def bounds_of(low, high, dtype=np.float32):
    return gym.spaces.Box(np.broadcast_to(low, SHAPE).astype(dtype), np.broadcast_to(high, SHAPE).astype(dtype), dtype=dtype)


@pytest.mark.parametrize(("low", "high"), [(0, 1), (0, 10), (-1, 1), (-3, 5), (0, 65535), ([0, -2], [1, 40])], ids=str)
@pytest.mark.parametrize("kind", list(ENCODERS))
def test_pictures_are_read_by_the_bounds_of_their_space(kind, low, high):
    colours = torch.randint(0, 256, (2, 3, *SHAPE), dtype=torch.uint8)
    low_, high_ = torch.as_tensor(low, dtype=torch.float64), torch.as_tensor(high, dtype=torch.float64)
    scaled = (low_ + colours / 255.0 * (high_ - low_)).float()
    want = encoder(kind, COLOURS)(*inputs(kind, colours))
    torch.testing.assert_close(encoder(kind, bounds_of(low, high))(*inputs(kind, scaled)), want, rtol=1e-3, atol=1e-3)


def test_colours_are_read_as_ever():
    scale = cnn.ImageScale(COLOURS, False, False, "observation").eval()
    colours = torch.randint(0, 256, (2, 3, *SHAPE), dtype=torch.uint8)
    assert scale(colours) is colours
    assert not scale.state_dict()
    seen = []

    class Sees(cnn.CNN):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.conv = nn.Conv2d(2, 1, 1)

        def conv_forward(self, imgs):
            seen.append(imgs)
            return self.conv(imgs)

    net = CNNTstepEncoder(gym.spaces.Dict({"observation": COLOURS}), RL2, cnn_type=Sees)
    net(*inputs("cnn", colours))
    assert torch.equal(seen[-1], colours.flatten(0, 1).permute(0, 3, 1, 2) / 128.0 - 1.0)


@pytest.mark.parametrize("channels_first", [False, True])
@pytest.mark.parametrize(("mean", "spread"), [(0.0, 1.0), (1e4, 30.0), (0.0, 1e-4)])
def test_pictures_without_bounds_are_read_by_their_statistics(mean, spread, channels_first):
    torch.manual_seed(0)
    shape = (3, 8, 8) if channels_first else (8, 8, 3)
    scale = cnn.ImageScale(gym.spaces.Box(-np.inf, np.inf, shape), channels_first, False, "observation")
    images, mask = mean + spread * torch.randn(4, 5, *shape), torch.ones(4, 5, 1, dtype=torch.bool)
    mask[2:, 3:] = False
    images[~mask[..., 0]] = 1e6  # padding
    pixels = scale(images, mask)[mask[..., 0]] / 128.0 - 1.0
    assert abs(pixels.mean()) < 0.05
    assert abs(pixels.std() - 1.0) < 0.05
    assert torch.equal(scale.eval()(images[:1]), scale(images[:1], mask[:1]))


@pytest.mark.parametrize("kind", list(ENCODERS))
def test_codes_in_a_space_of_colours_are_named_and_can_be_normalised(kind):
    codes = torch.randint(1, 9, (4, 3, *SHAPE), dtype=torch.uint8)
    net = encoder(kind, COLOURS)
    with pytest.warns(UserWarning, match=r"'observation' use 2.7% .* normalize_images=True"):
        net(*inputs(kind, codes))
    net(*inputs(kind, codes))  # once
    spread = lambda net, codes: net.train()(*inputs(kind, codes)).std(dim=(0, 1)).mean().item()  # noqa: E731
    normalised = encoder(kind, COLOURS, normalize_images=True, out_norm="none")
    assert spread(normalised, codes) > 5 * spread(encoder(kind, COLOURS, out_norm="none"), codes * 20) / 20


def test_policies_of_pictures_without_bounds_of_an_earlier_version_load_and_act_as_before():
    def agent(space):
        torch.manual_seed(0)
        spaces = gym.spaces.Dict({"observation": space})
        rl2 = amago.spaces.rl2_space(amago.spaces.action_spec(gym.spaces.Discrete(2)))
        kinds = {
            "tstep_encoder_type": lambda **k: CNNTstepEncoder(**k, cnn_type=cnn.GridworldCNN),
            "traj_encoder_type": FFTrajEncoder,
        }
        return amago.Agent(spaces, rl2, gym.spaces.Discrete(2), 4, **kinds).eval()

    colours, free = agent(COLOURS), agent(gym.spaces.Box(-np.inf, np.inf, SHAPE))
    before = colours.state_dict()  # of those days: without statistics
    load_into(free, before, "policy.pt")
    images = torch.rand(2, 3, *SHAPE) * 255
    one, other = (a.get_state_embedding(*inputs("cnn", images), torch.zeros(2, 3, 1))[0] for a in (colours, free))
    torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)


SIZES = [1e-12, 1e-6, 1e-3, 1e-2, 1.0, 1e3, 1e9, 1e15]


@pytest.mark.parametrize("offset", [0.0, 100.0])
@pytest.mark.parametrize("size", SIZES)
def test_features_of_any_size_are_normalised(size, offset):
    torch.manual_seed(0)
    norm = InputNorm(1)
    x = size * (offset + torch.randn(16, 16, 1, dtype=torch.float64))
    for _ in range(20):
        out = norm(x)
    assert 0.5 < out.std() < 1.5
    assert torch.equal(norm.eval()(x), out)


EVERYTHING = torch.ones(1, 1, 1, 1, 1)


def observed(net, x):
    """Show ``x`` (B, L) to a normaliser of one number."""
    if isinstance(net, InputNorm):
        net.update_stats(x[..., None])
    else:
        net.update_stats(x[:, :, None, None, None], EVERYTHING)


@pytest.mark.parametrize("make", [lambda: InputNorm(1), lambda: PopArtLayer(1, initial_samples=0)], ids=["InputNorm", "PopArt"])
@pytest.mark.parametrize(("mean", "sd"), [(1e3, 1.0), (-1e6, 1.0), (30.0, 0.05), (0.0, 100.0)])
def test_the_first_batch_is_enough(make, mean, sd):
    torch.manual_seed(0)
    net = make()
    for _ in range(50):
        observed(net, mean + sd * torch.randn(24, 128))
        assert float(net.sigma) == pytest.approx(sd, rel=0.1)
        assert float(net.mu) == pytest.approx(mean, abs=0.1 * sd)


def test_the_statistics_are_those_of_all_real_timesteps_so_far():
    torch.manual_seed(1)
    net, batches, mask = InputNorm(3), [100 * i + torch.randn(4, 5, 3) for i in range(6)], torch.ones(4, 5, 1) > 0
    mask[1, 3:] = mask[2, 1:] = False
    for n, batch in enumerate(batches, start=1):
        net.update_stats(batch.where(mask, torch.nan), mask)
        seen = torch.cat([b[mask.squeeze(-1)] for b in batches[:n]]).double()
        torch.testing.assert_close(net.mu, seen.mean(0), rtol=2e-3, atol=0.1)
        torch.testing.assert_close(net.sigma.double(), seen.std(0, correction=0), rtol=2e-3, atol=1e-3)


def test_statistics_in_float32_load():
    """Those of the original system, and of agents that were saved before."""
    net = InputNorm(2)
    net.load_state_dict(
        {"mu": torch.tensor([1.0, 2.0]), "nu": torch.tensor([5.0, 8.0]), "_t": torch.tensor([7.0])}, strict=True
    )
    assert net.nu.dtype == torch.float64
    assert net.sigma.tolist() == pytest.approx([2.0, 2.0], rel=1e-5)
    again = InputNorm(2)
    again.load_state_dict(net.state_dict(), strict=True)
    assert again.mu.equal(net.mu)


def move(x):
    """As to a device without float64."""
    if x.dtype == torch.float64:
        raise TypeError("Cannot convert a MPS Tensor to float64 dtype as the MPS framework doesn't support float64.")
    return x.clone()


def test_devices_without_float64_have_float32():
    norm = InputNorm(2)
    norm._apply(move)
    assert norm.mu.dtype == norm.nu.dtype == torch.float32
    norm.update_stats(3 + torch.randn(50, 50, 2))
    assert norm.sigma.tolist() == pytest.approx([1.0, 1.0], rel=0.1)
    with pytest.raises(TypeError, match="anything else"):
        norm._apply(lambda x: (_ for _ in ()).throw(TypeError("anything else")))
