"""The order of names that hold numbers."""

from __future__ import annotations

import re


def natural(text: str) -> list[tuple[int, str]]:
    """A sort key that puts "Attempt 9" before "Attempt 10"."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.findall(r"\d+|\D", text)]
