"""`amago.distributed.launch`, under the name that scripts and docs use; the code is in `amago.launch`."""

from __future__ import annotations

from amago.launch import launch

__all__ = ["launch"]
