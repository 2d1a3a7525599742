import gymnasium as gym
import numpy as np
import torch

import amago

OBS = gym.spaces.Dict({"observation": gym.spaces.Box(-1, 1, (4,), np.float32)})
RL2 = gym.spaces.Box(-np.inf, np.inf, (3,))
X = {"observation": torch.randn(2, 5, 4)}
R = torch.randn(2, 5, 3)
T = torch.arange(5)[None, :, None].expand(2, 5, 1)
SMALL = {"d_model": 16, "n_heads": 2, "d_ff": 32, "n_layers": 2}

# fact: symlog of tensors and numbers; activations are logged
from amago.nets.utils import add_activation_log, symexp, symlog

assert abs(symexp(symlog(3.0)) - 3.0) < 1e-6
torch.testing.assert_close(symexp(symlog(torch.tensor([-5.0, 2.0]))), torch.tensor([-5.0, 2.0]))
log = {}
add_activation_log(root_key="k", activation=torch.ones(2, 3), log_dict=log)
assert set(log) == {f"activation-k-{s}" for s in ("max", "min", "std", "mean")}
add_activation_log("k", torch.ones(2))

# fact: running statistics of inputs
from amago.nets.utils import InputNorm

norm = InputNorm(3, beta=1e-4, init_nu=1.0, skip=False)
x = 5 + 2 * torch.randn(64, 20, 3)
norm.update_stats(x)
torch.testing.assert_close(norm.denormalize_values(norm.normalize_values(x)), x, rtol=1e-3, atol=1e-3)
assert abs(float(norm.normalize_values(x).mean())) < 0.2
assert InputNorm(3, skip=True)(x) is x

# fact: eight normalisations, perceptrons and blocks
from amago.nets.ff import MLP, FFBlock, Normalization, SimNorm

v = torch.randn(2, 16)
for method in (None, "none", "layer", "rmsnorm", "unitball", "unitball-detach", "hypersphere", "simnorm"):
    assert Normalization(method, 16)(v).shape == (2, 16)
torch.testing.assert_close(Normalization("hypersphere", 16)(v), v / v.norm(dim=-1, keepdim=True) * 4.0, rtol=1e-4, atol=1e-5)
torch.testing.assert_close(Normalization("unitball", 16)(v), v / v.norm(dim=-1, keepdim=True), rtol=1e-4, atol=1e-5)
assert SimNorm(dim=8)(v).sum() > 0
mlp = MLP(d_inp=16, d_hidden=8, n_layers=2, d_output=4, activation="relu", normalization="layer", dropout_p=0.1)
assert mlp(v).shape == (2, 4)
assert FFBlock(16, 32, 0.0, "relu", norm="layer")(v).shape == (2, 16)
assert amago.nets.transformer.SigmaReparam(4, 6, bias=True, fast_init=True).out_features == 6


# fact: the feed-forward timestep encoder
net = amago.nets.tstep_encoders.FFTstepEncoder(
    OBS, RL2, n_layers=1, d_hidden=8, d_output=6, norm=None, out_norm="layer", activation="leaky_relu", hide_rl2s=True, normalize_inputs=False,
    specify_obs_keys=["observation"], auto_scale=True,
)  # fmt: skip
assert net(obs=X, rl2s=R).shape == (2, 5, 6)
assert list(net.obs_keys) == ["observation"]
assert net.base is not None
assert net.out_norm is not None
assert net.in_norm is not None

# fact: parts of a transformer
from amago.nets import transformer

net = amago.nets.traj_encoders.TformerTrajEncoder(
    6, 8, **SMALL, dropout_ff=0.0, dropout_emb=0.0, dropout_attn=0.0, dropout_qkv=0.0, activation="gelu", norm="rmsnorm", pos_emb="learnable",
    sigma_reparam=True, normformer_norms=True, head_scaling=True, attention_type=transformer.VanillaAttention,
).eval()  # fmt: skip
assert (net.d_model, net.n_heads, net.n_layers, net.head_dim, net.attention_type) == (16, 2, 2, 8, transformer.VanillaAttention)
former = net.tformer
assert former.d_model == former.layers[0].d_model == 16
for part in (former.inp, former.norm, former.dropout, former.position_embedding):
    assert isinstance(part, torch.nn.Module)
seq = torch.randn(2, 5, 6)
x = former.preprocess_seq(seq, T)
for layer in former.layers:
    x = layer(x)
torch.testing.assert_close(former.norm(x), former.training_forward(seq, T))
torch.testing.assert_close(former.training_forward(seq, T), net(seq, T)[0])
out, hidden = former.inference_forward(seq[:, :1], T[:, :1], net.init_hidden_state(2, "cpu"))
torch.testing.assert_close(out, net(seq[:, :1], T[:, :1])[0])
cos, sin = transformer.RotaryPosEmb(8)(T.squeeze(-1))
assert transformer.flash_attn is None or transformer.flash_attn

# fact: the layout of a transformer's memory, which may be made by hand
from amago.nets.transformer import Cache, TformerHiddenState

net = amago.nets.traj_encoders.TformerTrajEncoder(6, 8, **SMALL).eval()
hidden = net.init_hidden_state(3, "cpu")
assert isinstance(hidden, TformerHiddenState)
assert hidden.n_layers == 2
assert hidden.key_cache.data.shape == (2, 3, 8, 2, 8)
assert hidden.key_cache.max_seq_len == 8
assert hidden.key_cache.data.isnan().all()
assert hidden.seq_lens.dtype == torch.int32
with torch.no_grad():
    for i in range(3):
        net(torch.randn(3, 1, 6), torch.full((3, 1, 1), i), hidden)
assert hidden.seq_lens.tolist() == [3, 3, 3]
mine = TformerHiddenState(
    key_cache=Cache("cpu", torch.float32, 2, 3, 8, 2, 8), val_cache=Cache("cpu", torch.float32, 2, 3, 8, 2, 8), seq_lens=torch.zeros(3, dtype=torch.int32)
)  # fmt: skip
mine.key_cache.data[:] = hidden.key_cache.data
mine.val_cache.data[:] = hidden.val_cache.data
mine.seq_lens[:] = hidden.seq_lens
x, t = torch.randn(3, 1, 6), torch.full((3, 1, 1), 3)
with torch.no_grad():
    torch.testing.assert_close(net(x, t, mine)[0], net(x, t, hidden)[0])
mine.reset(np.array([True, False, True]))
assert mine.seq_lens.tolist() == [0, 4, 0]

# fact: policies are distributions of torch
from amago.nets import policy_dists as pd

d = pd.Discrete(3, clip_prob_low=0.001, clip_prob_high=0.99)
assert (d.is_discrete, d.input_dimension) == (True, 3)
assert isinstance(d.actions_differentiable, bool)
dist = d(torch.randn(2, 5, 7, 3))
assert isinstance(dist, torch.distributions.Categorical)
assert dist.sample().shape == (2, 5, 7, 1)
assert dist.probs.shape == dist.logits.shape == (2, 5, 7, 3)
assert pd._Categorical(probs=torch.full((4, 3), 1 / 3)).sample().shape == (4, 1)
low = d.action_from_buffer(torch.tensor([1.0, 0.0, 0.0]))
assert float(low.min()) > 0.0
both = pd.DiscreteLikeContinuous(dist, gumbel_softmax_temperature=0.5)
assert both.sample((2,)).shape == (2, 2, 5, 7, 3)
assert both.rsample().shape == (2, 5, 7, 3)
assert both.log_prob(both.sample()).shape[:3] == (2, 5, 7)
both.entropy()
for cls, options in ((pd.TanhGaussian, {}), (pd.Beta, {}), (pd.GMM, {"gmm_modes": 3}), (pd.Multibinary, {})):
    p = cls(2, **options)
    out = p(torch.randn(2, 5, 7, p.input_dimension))
    assert isinstance(out, torch.distributions.Distribution)
    assert out.sample().shape == (2, 5, 7, 2)
assert float(pd.softplus_bounded_positive(torch.zeros(1), low=0.5, high=2.0)) >= 0.5
assert 0.5 <= float(pd.tanh_bounded_positive(torch.zeros(1), low=0.5, high=2.0)) <= 2.0

# fact: actors
from amago.nets.actor_critic import Actor, BaseActorHead, ResidualActor

for cls, options in (
    (Actor, {"n_layers": 2, "d_hidden": 8}),
    (ResidualActor, {"feature_dim": 8, "residual_ff_dim": 16, "residual_blocks": 1}),
):
    net = cls(state_dim=6, action_dim=3, discrete=True, gammas=torch.tensor([0.9, 0.99]), continuous_dist_type=None, **options)
    assert isinstance(net, BaseActorHead)
    assert (net.num_gammas, net.discrete) == (2, True)
    assert net(torch.randn(2, 5, 6), log_dict={}, straight_from_obs=None).probs.shape == (2, 5, 2, 3)
assert net.gammas.shape == (2,)

# fact: critics
from amago.nets.actor_critic import NCritics, NCriticsTwoHot, gammas_as_input_seq, symlog

gammas = torch.tensor([0.9, 0.99])
state, action = torch.randn(2, 5, 6), torch.nn.functional.one_hot(torch.randint(3, (1, 2, 5, 2)), 3).float()
critics = NCritics(state_dim=6, action_dim=3, discrete=True, gammas=gammas, num_critics=4, d_hidden=8)
assert critics(state, action, log_dict={}).shape == (1, 2, 5, 4, 2, 1)
assert len(critics) == 4
assert gammas_as_input_seq(gammas, 2, 5).shape == (4, 5, 1)
hot = NCriticsTwoHot(
    state_dim=6, action_dim=3, discrete=True, gammas=gammas, num_critics=4, d_hidden=8, min_return=-10, max_return=10, output_bins=16,
    use_symlog=True, label_type="hlgauss", sigma=0.75, init_value=None,
)  # fmt: skip
dist = hot(state, action)
assert isinstance(dist, torch.distributions.Categorical)
assert dist.probs.shape == (1, 2, 5, 4, 2, 16)
assert hot.bin_dist_to_raw_vals(dist).shape == (1, 2, 5, 4, 2, 1)
assert hot.raw_vals_to_labels(torch.zeros(2, 5, 1)).shape == (2, 5, 16)
assert (hot.num_bins, hot.label_type, hot.sigma) == (16, "hlgauss", 0.75)
assert hot.bin_vals.shape[-1] == 16 or hot.bin_vals.shape[0] == 16
torch.testing.assert_close(
    hot.invert_bins(hot.transform_values(torch.tensor([3.0]))), torch.tensor([3.0]), rtol=1e-4, atol=1e-4
)

# fact: PopArt
from amago.nets.actor_critic import PopArtLayer

art = PopArtLayer(gammas=2, beta=5e-4, init_nu=100.0, enabled=True)
v = 3 + torch.randn(4, 5, 1, 2, 1)
art.update_stats(v, mask=torch.ones(4, 5, 1, 2, 1))
assert art(v, normalized=True).shape == art(v, normalized=False).shape == art.normalize_values(v).shape == v.shape
for name in ("mu", "nu", "w", "b", "sigma"):
    assert isinstance(getattr(art, name), torch.Tensor)
