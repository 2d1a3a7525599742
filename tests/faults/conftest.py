import pathlib

import fault_helpers
import pytest
from launching import launch  # noqa: F401

_LONGEST = 3600.0


def pytest_report_header():
    return f"faults: {'long' if fault_helpers.LONG else 'short'} version, AMAGO_FAULTS_SEED={fault_helpers.seed()}"


def pytest_collection_modifyitems(items):
    """The full counts take longer than a test otherwise may."""
    here = pathlib.Path(__file__).parent
    for item in items:
        if fault_helpers.LONG and here in item.path.parents:
            item.add_marker(pytest.mark.timeout(_LONGEST), append=False)  # before that of the short version


@pytest.fixture(autouse=True)
def _print_seed():
    print(f"AMAGO_FAULTS_SEED={fault_helpers.seed()}")
    yield
    fault_helpers.end_programs()
