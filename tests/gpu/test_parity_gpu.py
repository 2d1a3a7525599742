"""The tests of `tests/nets/test_parity.py`, whose device is the default one, on a GPU."""

import pytest
from nets.test_parity import *  # noqa: F403
from nets.test_parity import _no_fallback_warnings  # noqa: F401


@pytest.fixture(autouse=True)
def _on_the_gpu(default_device, loosen):
    loosen(1e-4)
