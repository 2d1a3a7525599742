import sys

import pytest
from hypothesis import HealthCheck, settings

from amago import config

settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")


@pytest.fixture(autouse=True)
def _fresh_gin():
    config.clear()
    yield
    config.clear()
    if "tiny" in sys.modules:
        sys.modules["tiny"].close_all()
