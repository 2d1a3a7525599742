"""Roles: what a process of a launched run does differently from one that a user has started alone."""

from __future__ import annotations

from amago.run.roles.role import Role

__all__ = ["Role"]
