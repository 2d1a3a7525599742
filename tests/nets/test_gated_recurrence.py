"""Linear recurrences: the scan against a loop in float64, the layer against its published equations, and what it remembers at the start."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._dynamo.utils import counters

from amago.nets.gated_recurrence import MinGRU, linear_scan, scan_, scan_in_blocks
from amago.nets.traj_encoders import MambaTrajEncoder, MinGRUTrajEncoder


def loop(decay, inputs, h0):
    states, h = [], h0
    for a, b in zip(decay, inputs):
        h = a * h + b
        states.append(h)
    return torch.stack(states)


def example(length, width=3, seed=0):
    g = torch.Generator().manual_seed(seed)
    decay = torch.rand(length, 2, width, generator=g, dtype=torch.float64)
    inputs, h0 = (
        torch.randn(length, 2, width, generator=g, dtype=torch.float64),
        torch.randn(2, width, generator=g, dtype=torch.float64),
    )
    return decay, inputs, h0


@settings(deadline=None)
@given(st.integers(1, 40), st.integers(0, 10), st.booleans())
def test_scan_is_the_recurrence(length, seed, begins_at_zero):
    decay, inputs, h0 = example(length, seed=seed)
    found = linear_scan(decay, inputs, None if begins_at_zero else h0)
    torch.testing.assert_close(found, loop(decay, inputs, torch.zeros_like(h0) if begins_at_zero else h0))


@pytest.mark.parametrize("length", [1, 2, 3, 5, 8, 33])
@pytest.mark.parametrize("continues", [False, True])
def test_gradients_of_the_scan(length, continues):
    decay, inputs, h0 = example(length)
    torch.testing.assert_close(linear_scan(decay, inputs, h0), loop(decay, inputs, h0))
    start = h0 if continues else None
    assert torch.autograd.gradcheck(lambda a, b: linear_scan(a, b, start), (decay.requires_grad_(), inputs.requires_grad_()))


@settings(deadline=None)
@given(st.integers(1, 200), st.booleans())
def test_the_scan_of_gpus_is_that_of_cpus(length, backwards):
    decay, inputs, _ = example(length)
    expected = scan_(decay[1:], inputs.clone(), backwards)
    torch.testing.assert_close(scan_in_blocks(decay[1:], inputs, backwards), expected)


@pytest.mark.filterwarnings("ignore")  # of the compiler
@pytest.mark.parametrize("encoder", [MinGRUTrajEncoder, MambaTrajEncoder])
def test_one_compilation_serves_every_length(encoder):
    torch._dynamo.reset()
    counters.clear()
    torch.manual_seed(0)
    net = encoder(3, 40, d_model=8, n_layers=1).double()
    compiled = torch.compile(net, dynamic=True, fullgraph=True, backend="eager")
    for length in (40, 3, 17, 24):
        x, times = torch.randn(2, length, 3, dtype=torch.float64), torch.arange(length)[None, :, None].expand(2, -1, 1)
        (expected, _), (found, _) = net(x, times), compiled(x, times)
        torch.testing.assert_close(found, expected)
        gradients = [torch.autograd.grad(y.square().sum(), list(net.parameters())) for y in (expected, found)]
        torch.testing.assert_close(*gradients)
    assert counters["stats"]["unique_graphs"] == 1
    torch._dynamo.reset()


def test_layer_is_the_minimal_gru():
    torch.manual_seed(0)
    net = MinGRU(5, 4, longest=20.0).double()
    x = torch.randn(9, 2, 5, dtype=torch.float64)
    W, b = net.inp.weight, net.inp.bias
    h, expected = torch.zeros(2, 4, dtype=torch.float64), []
    for t in range(9):
        z, c, gate = (x[t] @ W.T + b).split(4, dim=-1)
        z = 1.0 / (1.0 + torch.exp(-z))
        h = (1.0 - z) * h + z * c
        expected.append((h * gate / (1.0 + torch.exp(-gate))) @ net.out.weight.T + net.out.bias)
    torch.testing.assert_close(net(x), torch.stack(expected))


def test_at_the_start_states_forget_over_one_timestep_to_the_longest():
    torch.manual_seed(0)
    z = torch.sigmoid(MinGRU(4, 4000, longest=100.0).inp.bias[:4000])
    over = 1.0 / z  # timesteps
    assert 1.9 < over.min() < 2.1
    assert 90.0 < over.max() < 102.0
    assert abs(over.log().mean() - math.log(100.0) / 2) < 0.5
