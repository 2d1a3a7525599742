"""The golden vectors of networks and agents on a GPU: to 1e-4 without TF32, to 1e-3 with it."""

import nets.test_golden_nets as golden_nets
import pytest
from agent.test_golden_agent import *  # noqa: F403
from gpu.devices import tf32
from nets.test_golden_nets import *  # noqa: F403

CLOSE = golden_nets.close


@pytest.fixture(autouse=True, params=[1e-4, 1e-3], ids=["float32", "TF32"])
def _on_the_gpu(request, default_device, loosen, monkeypatch):
    """The tolerance decides the precision."""
    monkeypatch.setattr(golden_nets, "close", lambda got, expected, rtol=0.0: CLOSE(got, expected, max(rtol, request.param)))
    loosen(request.param)
    with tf32(request.param == 1e-3):
        yield
