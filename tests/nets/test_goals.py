"""Goal embedders, and the timestep encoder that uses them."""

import gymnasium as gym
import numpy as np
import pytest
import torch

from amago.nets.goal_embedders import FFGoalEmb, TokenGoalEmb
from amago.nets.tstep_encoders import GoalTstepEncoder

RL2 = gym.spaces.Box(-np.inf, np.inf, (3,), np.float32)
POSITIONS = gym.spaces.Box(-1.0, 1.0, (3, 2))
WORDS = gym.spaces.Box(0, 9, (6,), np.int64)
SENTENCES = gym.spaces.Box(-1, 20, (2, 5), np.int32)


def test_positions():
    torch.manual_seed(0)
    net = FFGoalEmb(POSITIONS, d_output=7)
    goals = torch.rand(4, 5, 3, 2)
    out = net(goals)
    assert out.shape == (4, 5, net.emb_dim) == (4, 5, 7)
    changed = goals.clone()
    changed[1, 2, 0] = -1.0  # a goal that is done
    assert ((net(changed) - out).abs().amax(-1) > 1e-5).nonzero().tolist() == [[1, 2]]
    assert (net(goals.flip(2)) - out).abs().max() > 1e-4  # the order of goals counts


def read_alone(net, sentence):
    """One sentence without its padding, token by token."""
    state = torch.zeros(1, 1, net.rnn.hidden_size)
    for token in [t for t in sentence.tolist() if t != net.pad_token]:
        _, state = net.rnn(net.embedding(torch.tensor([[token - net.lowest]])), state)
    return state.flatten()


@pytest.mark.parametrize("length", [1, 4])
@torch.no_grad()
def test_sentences_are_read_to_their_end(length):
    """Padding is not read, repeated instructions change nothing, several goals keep their order."""
    torch.manual_seed(1)
    net = TokenGoalEmb(SENTENCES)
    goals = torch.randint(1, 21, (3, length, 2, 5), dtype=torch.int32)
    goals[0, :, 0, 3:] = 0
    goals[1, :] = goals[1, :1]
    goals[2, 0, 1] = 0
    out = net(goals)
    assert out.shape == (3, length, net.emb_dim)
    for b in range(3):
        for t in range(length):
            expected = net.merge(torch.cat([read_alone(net, s) for s in goals[b, t]]))
            torch.testing.assert_close(out[b, t], expected, rtol=1e-5, atol=1e-5)


def test_words_get_gradients_and_floats_are_tokens_too():
    net = TokenGoalEmb(WORDS, pad_token=None)
    goals = torch.tensor([[[3, 0, 3, 3, 3, 5]] * 2])
    out = net(goals)
    assert out.equal(net(goals.float()))
    out.sum().backward()
    assert net.embedding.weight.grad.abs().sum(1).nonzero().flatten().tolist() == [0, 3, 5]
    padded = TokenGoalEmb(WORDS)
    assert padded(goals[:, :, :6]).shape == (1, 2, 64)


def test_encoder_merges_goals_with_everything_else():
    torch.manual_seed(2)
    space = gym.spaces.Dict({"position": gym.spaces.Box(-1, 1, (2,)), "goals": POSITIONS})
    obs, rl2s = {"position": torch.rand(2, 4, 2), "goals": torch.rand(2, 4, 3, 2)}, torch.randn(2, 4, 3)
    net = GoalTstepEncoder(space, RL2).eval()
    out = net(obs, rl2s)
    assert out.shape == (2, 4, net.emb_dim) == (2, 4, 256)
    assert net.in_norm.mu.shape == (2 + 3,)  # goals are not normalised
    for key in obs:
        assert (net({**obs, key: -obs[key]}, rl2s) - out).abs().max() > 1e-3
    assert (net(obs, -rl2s) - out).abs().max() > 1e-3
    hidden = GoalTstepEncoder(space, RL2, hide_rl2s=True).eval()
    assert hidden(obs, rl2s).equal(hidden(obs, -rl2s))
