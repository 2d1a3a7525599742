"""The tests of `tests/nets/test_parity.py`, whose device is the default one, on a GPU."""

import pytest
from nets.test_parity import *  # noqa: F403


@pytest.fixture(autouse=True)
def _on_the_gpu(default_device, loosen):
    loosen(1e-4)
