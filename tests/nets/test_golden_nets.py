"""Every network against a trusted implementation: same weights, same inputs, same outputs."""

import gymnasium as gym
import numpy as np
import pytest
import torch
from golden import load
from nets.test_parity import rollout

from amago import config
from amago.nets import cnn
from amago.nets.actor_critic import Actor, NCritics, NCriticsTwoHot, PopArtLayer, ResidualActor
from amago.nets.policy_dists import GMM, Beta, Discrete, Multibinary, TanhGaussian
from amago.nets.traj_encoders import FFTrajEncoder, GRUTrajEncoder, TformerTrajEncoder
from amago.nets.transformer import SigmaReparam, VanillaAttention
from amago.nets.tstep_encoders import CNNTstepEncoder, FFTstepEncoder


def tensors(name):
    arrays, weights, _ = load(name)
    return {k: torch.as_tensor(v) for k, v in arrays.items()}, {k: torch.as_tensor(v) for k, v in weights.items()}


def close(got, expected, rtol=1e-5):
    """Relative to the largest number of the output."""
    assert got.shape == expected.shape
    torch.testing.assert_close(got.to(expected.dtype), expected, rtol=rtol, atol=rtol * float(expected.abs().max()))


RL2 = gym.spaces.Box(-np.inf, np.inf, (5,), np.float32)


@pytest.mark.parametrize("cls", [cnn.NatureishCNN, cnn.IMPALAishCNN, cnn.GridworldCNN, cnn.DrQCNN])
@pytest.mark.parametrize("channels_first", [False, True])
def test_cnn(cls, channels_first):
    a, weights = tensors(f"cnn_{cls.__name__.removesuffix('CNN').lower()}")
    img = a["img"].permute(0, 1, 4, 2, 3) if channels_first else a["img"]
    net = cls(img_shape=img.shape[2:], channels_first=channels_first, activation="leaky_relu")
    net.load_state_dict(weights, strict=True)
    close(net(img), a["out"])
    assert net(net.blank_img).shape[-1] == a["out"].shape[-1]


def ff_encoder(weights=None):
    space = gym.spaces.Dict({"b": gym.spaces.Box(-9, 9, (3,)), "a": gym.spaces.Box(-9, 9, (2, 2))})
    net = FFTstepEncoder(space, RL2, n_layers=2, d_hidden=16, d_output=12)
    if weights is not None:
        net.load_state_dict(weights, strict=True)
    return net


def test_ff_tstep_encoder_eval():
    a, weights = tensors("tstep_ff")
    net = ff_encoder(weights).eval()
    close(net({"b": a["obs/b"], "a": a["obs/a"]}, a["rl2s"]), a["eval_out"])
    assert net.emb_dim == 12


def test_ff_tstep_encoder_updates_statistics_before_use():
    config.parse_files(["zoo/original"])
    a, weights = tensors("tstep_ff")
    fresh = {k: v for k, v in ff_encoder().state_dict().items() if k.startswith("in_norm.")}
    net = ff_encoder(weights | fresh).train()
    obs = {"b": a["obs/b"], "a": a["obs/a"]}
    close(net(obs, a["rl2s"]), a["train_out_1"])
    close(net(obs, a["rl2s"]), a["train_out_2"])
    for name in ("in_norm.mu", "in_norm.nu", "in_norm._t"):
        close(net.state_dict()[name], weights[name])


def test_cnn_tstep_encoder():
    a, weights = tensors("tstep_cnn")
    space = gym.spaces.Dict({"observation": gym.spaces.Box(0, 255, (36, 36, 3), np.uint8)})
    net = CNNTstepEncoder(space, RL2, img_features=16, rl2_features=6, d_output=10)
    net.load_state_dict(weights, strict=True)
    close(net({"observation": a["obs/observation"]}, a["rl2s"]), a["out"])


TFORMER = {"d_model": 16, "n_heads": 4, "d_ff": 32, "n_layers": 2}
PLAIN = {"sigma_reparam": False, "normformer_norms": False, "head_scaling": False}


@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("traj_ff", lambda: FFTrajEncoder(6, 9, d_model=16, n_layers=2)),
        ("traj_gru", lambda: GRUTrajEncoder(6, 9, d_hidden=16, n_layers=2, d_output=12)),
        ("traj_transformer_fixed", lambda: TformerTrajEncoder(6, 9, **TFORMER)),
        ("traj_transformer_fixed", lambda: TformerTrajEncoder(6, 9, **TFORMER, attention_type=VanillaAttention)),
        ("traj_transformer_rope", lambda: TformerTrajEncoder(6, 9, **TFORMER, pos_emb="rope")),
        ("traj_transformer_plain", lambda: TformerTrajEncoder(6, 9, **TFORMER, **PLAIN)),
    ],
)
def test_traj_encoder(name, make):
    a, weights = tensors(name)
    net = make().eval()
    net.load_state_dict(weights, strict=True)
    out, hidden = net(a["seq"], a["time_idxs"])
    assert hidden is None or name == "traj_gru"  # a GRU returns its last state
    close(out, a["out"])
    with torch.no_grad():
        close(rollout(net, a["seq"], [[], []])[0], a["rollout_out"])


def test_sigma_reparam():
    a, weights = tensors("sigma_reparam")
    net = SigmaReparam(8, 5)
    net.load_state_dict(weights, strict=True)
    close(net(a["x"]), a["train_1"])
    close(net(a["x"]), a["train_2"])
    net.eval()
    close(net(a["x"]), a["eval_out"])
    close(net.u, a["u_after"])
    close(net.v, a["v_after"])


GAMMAS = torch.tensor([0.5, 0.9, 0.999])
ACTORS = {
    "actor": (lambda: Actor(8, 4, True, GAMMAS, n_layers=2, d_hidden=16), "probs"),
    "actor_residual": (lambda: ResidualActor(8, 3, False, GAMMAS, feature_dim=16, residual_ff_dim=24), "mean"),
}


@pytest.mark.parametrize("name", ACTORS)
def test_actors(name):
    a, weights = tensors(name)
    make, result = ACTORS[name]
    actor = make()
    actor.load_state_dict(weights, strict=True)
    close(getattr(actor(a["state"]), result), a[result])


@pytest.mark.parametrize("kind", ["discrete", "continuous", "multibinary"])
def test_classifying_critics(kind):
    a, weights = tensors("critic_twohot")
    options = {"num_critics": 2, "d_hidden": 16, "n_layers": 2, "min_return": -100.0, "max_return": 500.0, "output_bins": 32}
    options |= {"clamp_labels": False}
    critics = NCriticsTwoHot(8, 4, kind == "discrete", a["gammas"], **options)
    critics.load_state_dict(weights, strict=True)
    dist = critics(a["state"], a["action"])
    close(dist.probs, a["probs"])
    close(critics.bin_dist_to_raw_vals(dist), a["value"])
    close(critics.bin_vals, a["bin_vals"])
    close(critics.raw_vals_to_labels(a["target"]), a["twohot"])
    blurred = NCriticsTwoHot(8, 4, kind == "discrete", a["gammas"], **options, label_type="hlgauss").bins
    close(blurred.labels(a["target"]), a["hlgauss"])


@pytest.mark.parametrize("kind", ["discrete", "continuous"])
def test_critics(kind):
    a, weights = tensors(f"critic_scalar_{kind}")
    critics = NCritics(8, 4, kind == "discrete", a["gammas"], num_critics=2, d_hidden=16, n_layers=2)
    critics.load_state_dict(weights, strict=True)
    close(critics(a["state"], a["action"]), a["value"])


def test_popart():
    config.parse_files(["zoo/original"])
    a, _ = tensors("popart")
    net = PopArtLayer(3)
    for i in range(6):
        net.update_stats(a[f"{i}/val"], a[f"{i}/mask"])
        for name in ("mu", "nu", "w", "b", "sigma"):
            close(getattr(net, name), a[f"{i}/{name}"])
        close(net(a["q"]), a[f"{i}/normed_q"])
        close(net(a["q"], normalized=False), a[f"{i}/denormed_q"])
        close(net.normalize_values(a[f"{i}/val"]), a[f"{i}/normalized_target"])
    assert set(net.state_dict()) == {"mu", "nu", "w", "b", "_t"}


# {name: (kind, the results of its distributions)}; log_prob is compared for all
POLICIES = {
    "discrete": (Discrete(6), {"probs": "probs"}),
    "tanh_gaussian": (TanhGaussian(3), {"loc": "base_loc", "scale": "base_scale", "mean": "mean"}),
    "multibinary": (Multibinary(6), {}),
    "beta": (Beta(3), {"mean": "mean"}),
    "gmm": (GMM(3), {"mean": "mean"}),
}


@pytest.mark.parametrize("name", POLICIES)
def test_policies(name):
    a, _ = tensors(f"dist_{name}")
    kind, results = POLICIES[name]
    assert kind.input_dimension == a["vec"].shape[-1]
    dist = kind(a["vec"])
    close(dist.log_prob(a["action"]), a["log_prob"])
    for result, expected in results.items():
        close(getattr(dist, result), a[expected])
    if name == "discrete":
        close(dist.entropy(), a["entropy"])
        close(kind.action_from_buffer(a["buffer_onehot"]), a["action_from_buffer"])
