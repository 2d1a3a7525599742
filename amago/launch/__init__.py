"""Beyond one process: one command that starts a learner and its collectors, moves their data, and replaces those that fail."""

from __future__ import annotations

from amago.launch.api import launch

__all__ = ["launch"]
