"""Argument checks of environments with image observations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from amago.envs.builtin import _common as common


def check_resolution(value: Any, low: int = 1) -> tuple[int, int]:
    """``value`` as (height, width).

    Raises:
        TypeError: it is not a pair of integers.
        ValueError: one of them is less than ``low``.
    """
    if isinstance(value, str) or not isinstance(value, Sequence | np.ndarray) or len(value) != 2:
        raise TypeError(f"resolution must be (height, width), got {value!r}")
    height, width = value
    return common.check_int("resolution", height, low), common.check_int("resolution", width, low)
