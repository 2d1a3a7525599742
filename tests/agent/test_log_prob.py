"""The recorded log-probability is that of the whole action: probabilities of all actions sum to 1."""

import itertools

import gymnasium as gym
import pytest
import torch

import amago
from amago.agent.methods import log_prob_of_stored
from amago.nets.policy_dists import TanhGaussian, distribution_of
from amago.nets.traj_encoders import FFTrajEncoder
from amago.nets.tstep_encoders import FFTstepEncoder
from amago.spaces import action_spec, rl2_space


def policy(space, rows=1, scale=1.0):
    spec = action_spec(space)
    kind = distribution_of(spec.kind, spec.dim, TanhGaussian)
    return kind.make(scale * torch.randn(rows, kind.input_dimension, generator=torch.Generator().manual_seed(0)))


EVERY = {
    "discrete": (gym.spaces.Discrete(4), [range(4)]),
    "bits": (gym.spaces.MultiBinary(3), [range(2)] * 3),
    "multidiscrete": (gym.spaces.MultiDiscrete([2, 3]), [range(2), range(3)]),
    "tuple": (gym.spaces.Tuple((gym.spaces.Discrete(3), gym.spaces.MultiBinary(2))), [range(3), range(2), range(2)]),
}


@pytest.mark.parametrize("kind", EVERY)
def test_probabilities_sum_to_one(kind):
    space, choices = EVERY[kind]
    dist = policy(space)
    logs = [log_prob_of_stored(dist, torch.tensor([action])) for action in itertools.product(*choices)]
    assert torch.cat(logs).exp().sum().item() == pytest.approx(1.0, abs=1e-5)


@pytest.mark.parametrize("space", [gym.spaces.Discrete(4), gym.spaces.MultiBinary(3), gym.spaces.Box(-1, 1, (2,))], ids=str)
def test_an_agent_chooses_the_same_with_and_without(space):
    obs_space = gym.spaces.Dict({"observation": gym.spaces.Box(-1, 1, (2,))})
    spec = action_spec(space)
    torch.manual_seed(0)
    agent = amago.Agent(obs_space, rl2_space(spec), space, 8, FFTstepEncoder, FFTrajEncoder).eval()
    state, obs = torch.randn(3, agent.traj_encoder.emb_dim), {"observation": torch.zeros(3, 2)}
    torch.manual_seed(1)
    plain = agent.act(state, obs, True)
    torch.manual_seed(1)
    actions, extras = agent.act_with_extras(state, obs, True, ["log_prob"])
    assert torch.equal(plain, actions)
    assert extras["log_prob"].shape == (3,)
    assert torch.isfinite(extras["log_prob"]).all()
