import launching
import pytest


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
