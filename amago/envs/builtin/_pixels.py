"""What the environments that show pictures share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from amago.envs.builtin import _common as common


def check_resolution(value: Any, low: int = 1) -> tuple[int, int]:
    """``value`` as (height, width), each at least ``low``.

    Raises:
        TypeError, ValueError: quoting the value.
    """
    if isinstance(value, str) or not isinstance(value, Sequence | np.ndarray) or len(value) != 2:
        raise TypeError(f"resolution must be (height, width), got {value!r}")
    height, width = value
    return common.check_int("resolution", height, low), common.check_int("resolution", width, low)


def check_chance(name: str, value: Any) -> float:
    """``value`` as a probability below 1.

    Raises:
        TypeError, ValueError: quoting the name and the value.
    """
    chance = common.check_real(name, value)
    if not 0.0 <= chance < 1.0:
        raise ValueError(f"{name} must be in [0, 1), got {value!r}")
    return chance
