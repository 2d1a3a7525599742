"""Beyond one process: one command that starts a learner and its collectors, moves their data, and replaces those that fail."""

from __future__ import annotations

from amago.distributed.api import launch
from amago.distributed.ingest import Ingest
from amago.distributed.link import Answer, Link, LocalLink, Parcel

__all__ = ["Answer", "Ingest", "Link", "LocalLink", "Parcel", "launch"]
