"""The tests of `tests/nets/test_mamba.py`, whose device is the default one, on a GPU."""

import pytest
from nets.test_mamba import (  # noqa: F401
    test_block_against_the_formulas,
    test_half_precision,
    test_scan_and_its_gradient,
    test_scan_goes_on_from_a_state,
    test_strong_decay_over_a_long_sequence_stays_finite,
)


@pytest.fixture(autouse=True)
def _on_the_gpu(default_device, loosen):
    loosen(1e-6)
