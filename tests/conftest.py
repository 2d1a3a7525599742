import sys

import pytest

from amago import config


@pytest.fixture(autouse=True)
def _fresh_gin():
    config.clear()
    yield
    config.clear()
    if "tiny" in sys.modules:
        sys.modules["tiny"].close_all()
