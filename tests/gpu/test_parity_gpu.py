"""The tests of `tests/nets/test_parity.py`, whose device is the default one, on a GPU."""

import sys

import pytest
import torch
from nets.test_parity import *  # noqa: F403


@pytest.fixture(autouse=True)
def _on_the_gpu(request, default_device, loosen):
    if "lstm" in request.node.name and "simcuda" in sys.modules:
        pytest.skip("a simulated device has no LSTM: PyTorch's CPU has no kernel of its cell")
    loosen(1e-4)
    if "acting_with_gradients" in request.node.name:  # cuDNN has no gradient of a model that only evaluates
        with torch.backends.cudnn.flags(enabled=False):
            yield
    else:
        yield
