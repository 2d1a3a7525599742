import importlib.util
import os
import pathlib
import sys

import pytest

HERE = pathlib.Path(__file__).parent
for other in ("distributed", "faults"):
    sys.path.insert(0, str(HERE.parent / other))


def pytest_collection_modifyitems(items):
    spec = importlib.util.find_spec("ray")
    missing = spec is None or spec.origin is None  # a directory of this name is no package, and Ray's own in /tmp has it
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.ray)
            item.add_marker(pytest.mark.timeout(3600 if os.environ.get("AMAGO_FAULTS") == "long" else 600))
            if missing:
                item.add_marker(pytest.mark.skip(reason="Ray is not installed: make test-ray"))


@pytest.fixture
def cluster(tmp_path):
    """A cluster of this machine alone, to which a test adds nodes."""
    from clusters import Cluster

    made = Cluster(tmp_path)
    yield made
    made.end()
