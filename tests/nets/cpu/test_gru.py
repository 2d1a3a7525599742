"""The fast step of a GRU gives what `torch.nn.GRU` gives, and follows its weights."""

import pytest
import torch

from amago.nets.traj_encoders import GRUTrajEncoder


@pytest.fixture
def pair():
    """A model with the fast step and its copy without."""
    torch.manual_seed(0)
    fast, plain = (GRUTrajEncoder(24, 16, d_hidden=200, n_layers=2, d_output=24).eval() for _ in range(2))
    plain.load_state_dict(fast.state_dict())
    plain.fast = False
    return fast, plain


def steps(model, inputs):
    hidden = model.init_hidden_state(inputs.shape[0], "cpu")
    outputs = []
    with torch.no_grad():
        for t in range(inputs.shape[1]):
            out, hidden = model(inputs[:, t : t + 1], torch.full((len(inputs), 1, 1), t), hidden)
            outputs.append(out)
    return torch.cat(outputs, dim=1), hidden


def test_it_is_the_step_of_torch(pair):
    inputs = torch.randn(3, 5, 24)
    (fast, fast_hidden), (plain, plain_hidden) = (steps(model, inputs) for model in pair)
    torch.testing.assert_close(fast, plain, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(fast_hidden, plain_hidden, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("change", ["optimizer", "in place", "state dict"])
def test_it_follows_its_weights(pair, change):
    fast, plain = pair
    inputs = torch.randn(2, 2, 24)
    before, _ = steps(fast, inputs)
    if change == "optimizer":
        optimizer = torch.optim.AdamW(fast.parameters(), lr=0.1, fused=True)
        fast(inputs, torch.zeros(2, 2, 1, dtype=torch.int64))[0].sum().backward()
        optimizer.step()
    elif change == "in place":
        with torch.no_grad():
            fast.rnn.weight_hh_l0.mul_(2.0)
            fast.rnn.weight_ih_l1.mul_(2.0)
    else:
        fast.load_state_dict({name: 2.0 * w for name, w in fast.state_dict().items()})
    plain.load_state_dict(fast.state_dict())
    after, _ = steps(fast, inputs)
    assert not torch.allclose(before, after)
    torch.testing.assert_close(after, steps(plain, inputs)[0], rtol=1e-5, atol=1e-6)
