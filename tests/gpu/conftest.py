"""Tests of this directory run on ``cuda`` with the marker ``gpu``, and, where that makes sense, on ``cpu`` without it."""

import pytest
import torch
from accelerate.state import AcceleratorState
from gpu.devices import CUDA, tf32

from amago import (
    Experiment,  # noqa: F401  # whose defaults are bound
    config,
)


@pytest.fixture
def use(monkeypatch):
    """A function that lets the next experiment compute on the named device, with products in float32 and not TF32, uncompiled."""

    def select(name):
        config.bind({"Experiment.matmul_precision": "highest", "Experiment.compile": False})
        AcceleratorState._reset_state(reset_partial_state=True)
        monkeypatch.setenv("ACCELERATE_USE_CPU", str(name == "cpu").lower())

    with tf32(False):
        yield select
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.fixture(params=["cpu", CUDA])
def device(request, use):
    """A device, which experiments of the test use too."""
    use(request.param)
    return torch.device(request.param)


@pytest.fixture(params=[CUDA])
def default_device(request, use):
    """A GPU on which tensors are created by default, for tests that are written for the default device."""
    use(request.param)
    with torch.device(request.param):
        yield torch.device(request.param)


@pytest.fixture
def loosen(monkeypatch):
    """A function that sets a lower bound of the tolerances of `torch.testing.assert_close`."""
    exact = torch.testing.assert_close

    def at_least(tolerance):
        def assert_close(*args, rtol=0.0, atol=0.0, **kwargs):
            exact(*args, rtol=max(rtol, tolerance), atol=max(atol, tolerance), **kwargs)

        monkeypatch.setattr(torch.testing, "assert_close", assert_close)

    return at_least
