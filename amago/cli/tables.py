"""Metrics as a table for the console."""

from __future__ import annotations

from collections.abc import Mapping


def metrics_table(metrics: Mapping[str, float], title: str) -> str:
    """Two columns, names and values, sorted by name with the headline first."""
    if not metrics:
        return f"{title}: no rollout ended; evaluate for more timesteps"
    first = "Average Total Return (Across All Env Names)"
    names = sorted(metrics, key=lambda k: (k != first, natural(k)))
    width = max(map(len, names))
    lines = [f"{name:<{width}}  {metrics[name]:>12.4g}" for name in names]
    return "\n".join([title, "-" * (width + 14), *lines])


def natural(text: str) -> list[tuple[int, str]]:
    """A sort key that puts "Attempt 9" before "Attempt 10"."""
    key, digits = [], ""
    for c in text + " ":
        if c.isdigit():
            digits += c
        else:
            if digits:
                key.append((int(digits), ""))
                digits = ""
            key.append((-1, c))
    return key
