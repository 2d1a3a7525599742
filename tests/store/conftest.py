import os

import pytest


@pytest.fixture(autouse=True)
def _fast_sync(monkeypatch):
    """Thousands of fsyncs wait for whatever else the disk does; the tests with other processes use the real one."""
    monkeypatch.setattr(os, "fsync", lambda fd: None)
