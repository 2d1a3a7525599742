"""Wrong arguments of networks are refused with the argument's name and its value."""

import math

import gymnasium as gym
import numpy as np
import pytest
import torch
from messages import naming

from amago import config
from amago.nets import cnn
from amago.nets.actor_critic import Actor, NCritics, NCriticsTwoHot, PopArtLayer, ResidualActor
from amago.nets.ff import InputNorm
from amago.nets.goal_embedders import FFGoalEmb, TokenGoalEmb
from amago.nets.policy_dists import GMM, Beta, Discrete, TanhGaussian
from amago.nets.traj_encoders import FFTrajEncoder, GRUTrajEncoder, MambaTrajEncoder, MinGRUTrajEncoder, TformerTrajEncoder
from amago.nets.transformer import SlidingWindowFlexAttention, SlidingWindowSinkFlexAttention
from amago.nets.tstep_encoders import CNNTstepEncoder, DictTstepEncoder, FFTstepEncoder, GoalTstepEncoder

GAMMAS = torch.tensor([0.5, 0.9, 0.999])
RL2 = gym.spaces.Box(-np.inf, np.inf, (3,), np.float32)
VECTORS = gym.spaces.Dict({"z": gym.spaces.Box(-1, 1, (2,)), "pos": gym.spaces.Box(0, 9, (2, 2), np.uint8)})
IMAGE = gym.spaces.Dict({"observation": gym.spaces.Box(0, 255, (36, 40, 3), np.uint8)})
TIMES = torch.zeros(2, 3, 1, dtype=torch.int64)


def transformer(**options):
    return TformerTrajEncoder(4, 8, **({"d_model": 8, "n_heads": 2, "d_ff": 8} | options))


def sinks():
    config.bind({"SlidingWindowSinkFlexAttention.window_size": 3, "SlidingWindowSinkFlexAttention.sink_size": 9})
    return transformer(attention_type=SlidingWindowSinkFlexAttention)


def mamba():
    return MambaTrajEncoder(4, 8, d_model=8)


def critics(**options):
    return NCritics(8, 4, False, GAMMAS, **options)


def tokens(*space, **options):
    return TokenGoalEmb(gym.spaces.Box(*space), **options)


REFUSED = {
    "FFTstepEncoder": [
        (lambda: FFTstepEncoder(VECTORS, RL2, specify_obs_keys=["z", "q"]), ("specify_obs_keys='q'", ["pos", "z"])),
        (lambda: FFTstepEncoder(VECTORS, RL2, n_layers=0), ("n_layers=0",)),
    ],
    "images": [
        (lambda: CNNTstepEncoder(IMAGE, RL2, obs_key="rgb"), ("obs_key='rgb'", ["observation"])),
        (lambda: CNNTstepEncoder(VECTORS, RL2, obs_key="z"), ("obs_key='z'", (2,), "three dimensions")),
        (lambda: DictTstepEncoder(IMAGE, RL2, specify_obs_keys="z"), ("specify_obs_keys='z'",)),
        (lambda: cnn.NatureishCNN(img_shape=(36, 36)), ("height, width, channels", (36, 36))),
        (lambda: cnn.NatureishCNN(img_shape=(20, 20, 3)), ("NatureishCNN", (20, 20, 3), "too small", "36x36", "DrQCNN", "15x15")),
        (lambda: cnn.GridworldCNN(img_shape=(7, 7, 3))(torch.zeros(1, 7, 7, 3)), ("images", (1, 7, 7, 3))),
    ],
    "goals": [
        (lambda: FFGoalEmb(gym.spaces.Box(-1, 1, (3, 2)))(torch.rand(4, 5, 2, 2)), ("goals", (4, 5, 2, 2))),
        (lambda: FFGoalEmb(gym.spaces.Discrete(4)), ("goal_space", "Box", "Discrete")),
        (lambda: GoalTstepEncoder(VECTORS, RL2, goal_key="task"), ("goal_key='task'", ["pos", "z"])),
        (lambda: tokens(0.0, 1.0, (4,)), ("goal_space", "integers")),
        (lambda: tokens(0, 2**40, (4,), np.int64), ("goal_space", "bounds")),
        (lambda: tokens(1, 9, (4,), np.int64), ("pad_token=0", "1", "9")),
    ],
    "sequence models": [
        (lambda: FFTrajEncoder(4, 0), ("max_seq_len=0",)),
        (lambda: GRUTrajEncoder(4, 8, longest=0.9), ("longest", 0.9)),
        (lambda: MinGRUTrajEncoder(5, 8, d_hidden=0), ("d_hidden=0",)),
        (lambda: MambaTrajEncoder(5, 8, d_state=0), ("d_state=0",)),
        (lambda: MambaTrajEncoder(5, 8, dt_min=0.2), ("dt_min=0.2", "dt_max=0.1")),
        (lambda: MambaTrajEncoder(5, 8, A_scale=0.0), ("A_scale", 0.0)),
        (lambda: transformer(pos_emb="alibi"), ("pos_emb='alibi'", "fixed, learned, learnable, rope")),
        (lambda: transformer(n_heads=3), ("d_model=8", "n_heads=3")),
        (lambda: transformer(n_heads=8, pos_emb="rope"), ("rope", "even")),
        (lambda: transformer(d_model=9, n_heads=3), ("d_model=9", "even")),
        (lambda: transformer(norm="batch"), ("batch", "layer", "rmsnorm")),
        (lambda: transformer(activation="step"), ("activation='step'", "gelu, identity, leaky_relu")),
        (lambda: transformer(dropout_attn=-0.1), ("dropout=-0.1",)),
        (lambda: transformer(qk_norm=(1.0, 2.0, 3.0)), ("qk_norm", (1.0, 2.0, 3.0), "2 heads")),
        (lambda: transformer(qk_norm="lenght"), ("qk_norm", "lenght")),
        (lambda: transformer(causal=False).init_hidden_state(1, "cpu"), ("causal=False", "step by step")),
        (lambda: SlidingWindowFlexAttention(window_size=0), ("window_size=0",)),
        (sinks, ("sink_size=9", 8, "max_seq_len")),
    ],
    "sequences and hidden states": [
        (lambda: transformer()(torch.zeros(2, 3, 5), TIMES), ("seq", (2, 3, 5))),
        (lambda: transformer()(torch.zeros(2, 3, 4), TIMES[..., 0]), ("time_idxs", (2, 3))),
        (lambda: transformer()(torch.zeros(2, 3, 4), TIMES, transformer().init_hidden_state(5, "cpu")), ("hidden_state has 5 rows", 2)),
        (lambda: mamba()(torch.zeros(2, 3, 4), TIMES, mamba().init_hidden_state(3, "cpu")), ("hidden_state has 3 rows", 2)),
        (lambda: transformer().init_hidden_state(3, "cpu").reset(np.array([True, False])), ("dones", (3,), (2,))),
        (lambda: GRUTrajEncoder(4, 8).reset_hidden_state(torch.zeros(2, 3, 9), np.array([True])), ("dones", (3,), (1,))),
        (lambda: GRUTrajEncoder(4, 8).slice_hidden_state(torch.zeros(2, 3, 9), 2, 5), ("2:5", 3)),
    ],
    "heads": [
        (lambda: Actor(8, 4, False, GAMMAS, action_kind="tuple"), ("action_kind='tuple'", "discrete, continuous, multibinary")),
        (lambda: Actor(8, 4, True, GAMMAS, action_kind="multibinary"), ("discrete=True", "action_kind='multibinary'")),
        (lambda: Actor(8, 4, False, GAMMAS, continuous_dist_type=None), ("continuous_dist_type=None", "continuous")),
        (lambda: ResidualActor(8, 4, True, GAMMAS, residual_blocks=0), ("residual_blocks=0",)),
        (lambda: critics(num_critics=0), ("num_critics=0",)),
        (lambda: critics(normalization="batch"), ("batch", "layer")),
        (lambda: critics()(torch.zeros(2, 5, 8), torch.zeros(1, 2, 5, 2, 4)), ("action", (1, 2, 5, 2, 4))),
        (lambda: critics()(torch.zeros(2, 5, 7), torch.zeros(1, 2, 5, 3, 4)), ("state", (2, 5, 7))),
        (lambda: NCritics(8, 4, True, torch.tensor(0.9)), ("gammas", ())),
        (lambda: PopArtLayer(1, beta=1.5), ("beta=1.5",)),
        (lambda: InputNorm(1, init_nu=-1.0), ("init_nu=-1.0",)),
    ],
    "bins": [
        (lambda: NCriticsTwoHot(8, 4, True, GAMMAS, max_return=math.inf), ("max_return=inf",)),
        (lambda: NCriticsTwoHot(8, 4, True, GAMMAS, output_bins=1), ("output_bins=1",)),
        (lambda: NCriticsTwoHot(8, 4, True, GAMMAS, label_type="one_hot"), ("label_type='one_hot'", "twohot, hlgauss")),
        (lambda: NCriticsTwoHot(8, 4, True, GAMMAS, sigma=0.0), ("sigma=0.0",)),
        (lambda: NCriticsTwoHot(8, 4, True, GAMMAS, init_value=1e5), ("init_value=100000.0", "max_return=100000.0")),
    ],
    "distributions": [
        (lambda: Discrete(3, clip_prob_low=0.5, clip_prob_high=0.1), ("clip_prob_low=0.5", "clip_prob_high=0.1")),
        (lambda: Discrete(3, gumbel_temperature=0), ("gumbel_temperature=0",)),
        (lambda: Discrete(0), ("d_action=0",)),
        (lambda: Discrete(3)(torch.zeros(2, 4)), ("Discrete", (2, 4))),
        (lambda: Discrete(3)(torch.zeros(2, 3)).log_prob(torch.zeros(2, 3)), ("indices", (2,), (2, 3))),
        (lambda: TanhGaussian(1, std_low=2.0, std_high=1.0), ("std_low=2.0", "std_high=1.0")),
        (lambda: TanhGaussian(1, clip_actions_on_log_prob=(-1.0, 0.5)), ("clip_actions_on_log_prob", (-1.0, 0.5))),
        (lambda: Beta(1, alpha_low=0.0), ("alpha_low=0",)),
        (lambda: GMM(3, gmm_modes=0), ("gmm_modes=0",)),
    ],
}  # fmt: skip


@pytest.mark.parametrize("subject", REFUSED)
def test_wrong_arguments_are_refused_by_name_and_value(subject):
    for call, words in REFUSED[subject]:
        with pytest.raises(ValueError, match=naming(*words)):
            call()
