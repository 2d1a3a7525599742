"""The one definition of how an environment asks for a number to be logged."""

from __future__ import annotations

AMAGO_ENV_LOG_PREFIX = "AMAGO_LOG_METRIC"
"""Whatever an environment puts into ``info`` under a key that starts with this is averaged and logged by environment name."""
