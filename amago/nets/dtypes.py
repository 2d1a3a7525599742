"""Which dtype to compute in."""

from __future__ import annotations

import torch
from torch import Tensor


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """The dtype autocast would compute in on ``device``, or None where it is off."""
    kind = device.type
    if kind in ("cpu", "cuda") and not torch.is_autocast_enabled(kind):  # shortcut: asked about thirty times a step
        return None
    if not torch.amp.is_autocast_available(kind) or not torch.is_autocast_enabled(kind):
        return None
    return torch.get_autocast_dtype(kind)


def at_least_float32(x: Tensor) -> Tensor:
    """Half precision to float32; anything else as it is."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
