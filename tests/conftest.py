import signal
import sys

import gymnasium as gym
import pytest
from hypothesis import HealthCheck, settings

from amago import config

settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")
# in the background of a script, where programs that tests start would not hear Ctrl-C either
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def _fresh_gin():
    config.clear()
    yield
    config.clear()
    if "tiny" in sys.modules:
        sys.modules["tiny"].close_all()


@pytest.fixture
def registered():
    """A function that registers an environment for the time of a test."""
    known = []

    def register(name, make, **options):
        known.append(name)
        gym.register(name, make, **options)

    yield register
    for name in known:
        gym.registry.pop(name)
