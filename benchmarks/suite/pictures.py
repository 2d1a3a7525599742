"""Pictures of many small panels."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


@contextmanager
def panels(path: Path, count: int, columns: int, size: tuple[float, float], x: str) -> Iterator[list[Any]]:
    """Matplotlib's axes to draw on; at the end of the block the picture is written.

    Args:
        path: of the picture; missing folders are made.
        count: of panels, at least 1.
        columns: most panels in a row.
        size: width and height of a panel in inches.
        x: what the horizontal axes show.

    Raises:
        ValueError: there is nothing to draw.
    """
    if count < 1:
        raise ValueError(f"there is no finished run to draw in {path.name}")
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    columns = min(columns, count)
    height = -(-count // columns)
    figure, axes = plt.subplots(height, columns, figsize=(size[0] * columns, size[1] * height), squeeze=False)
    try:
        yield list(axes.flat[:count])
        for panel in axes.flat[:count]:
            panel.tick_params(labelsize=7)
        for panel in axes.flat[count:]:
            panel.set_visible(False)
        figure.supxlabel(x, fontsize=9)
        figure.tight_layout()
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=110)
    finally:
        plt.close(figure)
