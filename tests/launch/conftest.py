from pathlib import Path

import launching
import pytest


def pytest_collection_modifyitems(items):
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.timeout(1800))


@pytest.fixture
def launch(tmp_path):
    """Starts launches, and ends them after the test."""
    started = []

    def start(*options, **fields):
        started.append(launching.Launch(tmp_path, *options, **fields))
        return started[-1]

    yield start
    for each in started:
        each.end()
