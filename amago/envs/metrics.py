"""The prefix by which an environment has numbers logged."""

from __future__ import annotations

AMAGO_ENV_LOG_PREFIX = "AMAGO_LOG_METRIC"
"""Numbers in ``info`` under keys with this prefix are averaged and logged by environment name."""
