"""A plugin for pytest (``-p original_defaults``): every test runs with the settings of ``zoo/original``."""

import pytest

from amago import config


@pytest.fixture(autouse=True)
def _original_settings(_fresh_gin):
    config.parse_files(["zoo/original"])
